//! An https receiver whose certificate comes from an authority of these tests, valid for `127.0.0.1` and `localhost`.
//!
//! The authority, its certificate and both keys lie in `tls/` and are good for nothing else; they end in 2120.

use std::{
    fs,
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use rustls::{
    ServerConfig, ServerConnection, StreamOwned,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};

/// The PEM file of the authority that signed the receiver's certificate.
pub(crate) const CA_FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/support/tls/ca.pem");

/// An authority that signed nothing.
pub(crate) const OTHER_CA_FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/support/tls/other-ca.pem");

/// Answers every request with the same status and body, and counts them. It lives as long as the test process.
pub(crate) struct HttpsServer {
    address: SocketAddr,
    requests: Arc<AtomicUsize>,
}

impl HttpsServer {
    /// Starts it on a free loopback port.
    pub(crate) fn start(status: u16, body: String) -> Self {
        let config = config();
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free loopback port");
        let address = listener.local_addr().expect("a bound port");
        let requests = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&requests);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // A client that does not trust the certificate breaks off; that is its answer.
                if exchange(&config, stream, &format!("{status} Status\r\n"), &body).is_ok() {
                    counted.fetch_add(1, Ordering::SeqCst);
                }
            }
        });
        Self { address, requests }
    }

    /// `https://127.0.0.1:port` and the path.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("https://{}{path}", self.address)
    }

    /// Requests answered so far.
    pub(crate) fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }
}

fn config() -> Arc<ServerConfig> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/support/tls");
    let read = |name: &str| fs::read(folder.join(name)).expect(name);
    let certificate = CertificateDer::from_pem_slice(&read("server.pem")).expect("a certificate");
    let key = PrivateKeyDer::from_pem_slice(&read("server-key.pem")).expect("a key");
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .expect("a key that fits its certificate");
    Arc::new(config)
}

/// Reads one request and answers it with this status line and these header lines, each of which ends itself.
pub(crate) fn exchange(config: &Arc<ServerConfig>, stream: TcpStream, head: &str, body: &str) -> io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let connection = ServerConnection::new(Arc::clone(config)).map_err(io::Error::other)?;
    let mut stream = BufReader::new(StreamOwned::new(connection, stream));
    let mut length = 0;
    let mut line = String::new();
    loop {
        line.clear();
        if stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match line.trim_end().to_ascii_lowercase().split_once(':') {
            Some(("content-length", value)) => length = value.trim().parse().map_err(io::Error::other)?,
            _ if line.trim_end().is_empty() => break,
            _ => {}
        }
    }
    stream.read_exact(&mut vec![0; length])?;
    let mut stream = stream.into_inner();
    write!(
        stream,
        "HTTP/1.1 {head}content-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    )?;
    stream.conn.send_close_notify();
    stream.flush()
}
