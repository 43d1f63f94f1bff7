//! A certificate authority of a test's own, and https receivers on any address that it vouches for.

use std::{
    collections::VecDeque,
    fs,
    net::{IpAddr, SocketAddr, TcpListener},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use parking_lot::Mutex;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::{
    ServerConfig,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
};

use super::tls::exchange;

/// An authority. Its file is removed with it.
pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    file: PathBuf,
}

impl Authority {
    /// A new one.
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let issuer = CertifiedIssuer::self_signed(params, key).expect("a certificate of its own");
        let file = std::env::temp_dir().join(format!("ov-it-ca-{}.pem", ulid::Ulid::generate()));
        fs::write(&file, issuer.pem()).expect("a file in the temporary directory");
        Self { issuer, file }
    }

    /// Its certificate, for `SSL_CERT_FILE`.
    pub(crate) fn file(&self) -> &str {
        self.file.to_str().expect("a plain path")
    }

    /// An https receiver on this address that the authority vouches for as these names and addresses.
    pub(crate) fn receiver(&self, address: SocketAddr, names: &[&str]) -> HttpsReceiver {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let params = CertificateParams::new(names).expect("names and addresses");
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(
                vec![certificate.der().clone()],
                PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der())),
            )
            .expect("a key that fits its certificate");
        HttpsReceiver::start(address, Arc::new(config))
    }
}

impl Drop for Authority {
    fn drop(&mut self) {
        fs::remove_file(&self.file).ok();
    }
}

/// Answers requests with 200, or as scripted. It lives as long as the test process.
pub(crate) struct HttpsReceiver {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
    requests: Arc<AtomicUsize>,
    script: Arc<Mutex<VecDeque<String>>>,
}

impl HttpsReceiver {
    fn start(address: SocketAddr, config: Arc<ServerConfig>) -> Self {
        let listener = TcpListener::bind(address).expect("an address of this machine");
        let receiver = Self {
            address: listener.local_addr().expect("a bound port"),
            connections: Arc::default(),
            requests: Arc::default(),
            script: Arc::default(),
        };
        let (connections, requests, script) = (
            Arc::clone(&receiver.connections),
            Arc::clone(&receiver.requests),
            Arc::clone(&receiver.script),
        );
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                connections.fetch_add(1, Ordering::SeqCst);
                let next = script.lock().pop_front();
                let head = next.unwrap_or_else(|| "200 OK\r\n".to_owned());
                if exchange(&config, stream, &head, "").is_ok() {
                    requests.fetch_add(1, Ordering::SeqCst);
                }
            }
        });
        receiver
    }

    /// Its port.
    pub(crate) fn port(&self) -> u16 {
        self.address.port()
    }

    /// `https://host:port/hook`, under a name or as itself.
    pub(crate) fn url(&self, name: Option<&str>) -> String {
        match (name, self.address.ip()) {
            (Some(name), _) => format!("https://{name}:{}/hook", self.port()),
            (None, IpAddr::V4(address)) => format!("https://{address}:{}/hook", self.port()),
            (None, IpAddr::V6(address)) => format!("https://[{address}]:{}/hook", self.port()),
        }
    }

    /// Answers the next request with this status line and these header lines; each line ends itself.
    pub(crate) fn answer_next(&self, head: &str) {
        self.script.lock().push_back(head.to_owned());
    }

    /// Connections so far, whatever came of them.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// Requests answered so far.
    pub(crate) fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }
}
