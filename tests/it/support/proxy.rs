//! A TCP proxy between the service and PostgreSQL that a test can cut, stall and restore.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
};
use tokio_util::task::AbortOnDropHandle;

/// What the line does with what passes through it.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Line {
    /// Everything passes.
    Open,
    /// Everything passes this much later.
    Late(Duration),
    /// Connections stay; nothing passes in either direction.
    Stalled,
    /// What clients send passes; what the server answers is held.
    AnswersHeld,
    /// Every connection is closed, and every new one at once.
    Cut,
}

/// A running proxy. It ends, with every connection through it, when the value is dropped.
#[derive(Debug)]
pub(crate) struct Proxy {
    address: SocketAddr,
    line: watch::Sender<Line>,
    accepted: Arc<watch::Sender<u64>>,
    _server: AbortOnDropHandle<()>,
}

impl Proxy {
    /// Starts a proxy on a free loopback port in front of `upstream` (`host:port`).
    pub(crate) async fn start(upstream: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free loopback port");
        let address = listener.local_addr().expect("a bound port");
        let line = watch::Sender::new(Line::Open);
        let accepted = Arc::new(watch::Sender::new(0));
        let server = serve(listener, upstream.to_owned(), line.subscribe(), accepted.clone());
        Self {
            address,
            line,
            accepted,
            _server: AbortOnDropHandle::new(tokio::spawn(server)),
        }
    }

    /// Where clients connect.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes every connection and refuses new ones until `restore`.
    pub(crate) fn cut(&self) {
        self.line.send_replace(Line::Cut);
    }

    /// Keeps connections open but holds every byte until `restore`, which lets the held bytes go on.
    pub(crate) fn stall(&self) {
        self.line.send_replace(Line::Stalled);
    }

    /// Lets statements reach the server but holds its answers: a commit happens and nobody hears of it.
    pub(crate) fn hold_answers(&self) {
        self.line.send_replace(Line::AnswersHeld);
    }

    /// Makes everything pass this much later, in each direction.
    pub(crate) fn delay(&self, delay: Duration) {
        self.line.send_replace(Line::Late(delay));
    }

    /// Lets everything pass again.
    pub(crate) fn restore(&self) {
        self.line.send_replace(Line::Open);
    }

    /// How many connections were accepted so far, refused ones not counted.
    pub(crate) fn accepted(&self) -> u64 {
        *self.accepted.borrow()
    }
}

async fn serve(
    listener: TcpListener,
    upstream: String,
    line: watch::Receiver<Line>,
    accepted: Arc<watch::Sender<u64>>,
) {
    let mut connections = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        while connections.try_join_next().is_some() {}
        if *line.borrow() == Line::Cut {
            continue;
        }
        accepted.send_modify(|count| *count += 1);
        connections.spawn(join(client, upstream.clone(), line.clone()));
    }
}

async fn join(client: TcpStream, upstream: String, mut line: watch::Receiver<Line>) {
    let Ok(server) = TcpStream::connect(&upstream).await else {
        return;
    };
    client.set_nodelay(true).ok();
    server.set_nodelay(true).ok();
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let asked = pump(from_client, to_server, line.clone(), |line| line == Line::Stalled);
    let answered = pump(from_server, to_client, line.clone(), |line| {
        matches!(line, Line::Stalled | Line::AnswersHeld)
    });
    // Either side's end ends both, as does a cut; dropping the halves closes both sockets.
    tokio::select! {
        () = asked => {}
        () = answered => {}
        _ = line.wait_for(|line| *line == Line::Cut) => {}
    }
}

/// Carries bytes one way, holding them while `held` says so.
async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut line: watch::Receiver<Line>,
    held: impl Fn(Line) -> bool,
) {
    let mut buffer = vec![0; 16 * 1024];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        match line.wait_for(|line| !held(*line)).await.map(|line| *line) {
            // What was held when the line is cut is lost with it.
            Ok(Line::Cut) | Err(_) => return,
            Ok(Line::Late(delay)) => tokio::time::sleep(delay).await,
            Ok(_) => {}
        }
        if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}
