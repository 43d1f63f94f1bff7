//! A TCP proxy between the service and PostgreSQL that a test can cut, stall and restore.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

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
    /// Everything passes, one byte at a time.
    Dripping,
    /// Connections stay; nothing passes in either direction.
    Stalled,
    /// What clients send passes; what the server answers is held.
    AnswersHeld,
    /// Everything passes until a client sends these words. They reach the server, and the connection ends unanswered.
    CutAt(&'static [u8]),
    /// So many pieces pass from clients to the server; a connection with a further one is closed, and that is lost.
    Asks(u64),
    /// As `Asks`, for pieces from the server.
    Answers(u64),
    /// Every connection is closed, and every new one at once.
    Cut,
}

/// A running proxy. It ends, with every connection through it, when the value is dropped.
#[derive(Debug)]
pub(crate) struct Proxy {
    address: SocketAddr,
    line: watch::Sender<Line>,
    shared: Arc<Shared>,
    _server: AbortOnDropHandle<()>,
}

/// What the connections of a proxy share.
#[derive(Debug, Default)]
struct Shared {
    accepted: AtomicU64,
    unanswered: AtomicU64,
    /// Pieces since the last limit was set.
    passed: AtomicU64,
    /// Connections of earlier generations are closed.
    generation: watch::Sender<u64>,
}

impl Proxy {
    /// Starts a proxy on a free loopback port in front of `upstream` (`host:port`).
    pub(crate) async fn start(upstream: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free loopback port");
        let address = listener.local_addr().expect("a bound port");
        let line = watch::Sender::new(Line::Open);
        let shared = Arc::new(Shared::default());
        let server = serve(listener, upstream.to_owned(), line.subscribe(), Arc::clone(&shared));
        Self {
            address,
            line,
            shared,
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

    /// Carries every byte in a write of its own, so that no message arrives whole.
    pub(crate) fn drip(&self) {
        self.line.send_replace(Line::Dripping);
    }

    /// Passes on what a client sends with these words in it, and closes that connection once the server has answered,
    /// without the answer: what was asked has happened, and nobody heard of it.
    pub(crate) fn cut_at(&self, words: &'static [u8]) {
        self.line.send_replace(Line::CutAt(words));
    }

    /// Lets so many pieces of any connection pass from clients to the server, each as it was sent; whoever sends more
    /// loses the connection and what was sent. Each step of a transaction is one piece.
    pub(crate) fn cut_after_asking(&self, pieces: u64) {
        self.shared.passed.store(0, Relaxed);
        self.line.send_replace(Line::Asks(pieces));
    }

    /// As `cut_after_asking`, for what the server answers: the next answer is lost, and the connection with it.
    pub(crate) fn cut_after_answers(&self, pieces: u64) {
        self.shared.passed.store(0, Relaxed);
        self.line.send_replace(Line::Answers(pieces));
    }

    /// How many connections were ended by `cut_at`.
    pub(crate) fn left_unanswered(&self) -> u64 {
        self.shared.unanswered.load(Relaxed)
    }

    /// Closes the connections there are now. New ones are served.
    pub(crate) fn drop_connections(&self) {
        self.shared.generation.send_modify(|generation| *generation += 1);
    }

    /// Lets everything pass again.
    pub(crate) fn restore(&self) {
        self.line.send_replace(Line::Open);
    }

    /// How many connections were accepted so far, refused ones not counted.
    pub(crate) fn accepted(&self) -> u64 {
        self.shared.accepted.load(Relaxed)
    }
}

async fn serve(listener: TcpListener, upstream: String, line: watch::Receiver<Line>, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        while connections.try_join_next().is_some() {}
        if *line.borrow() == Line::Cut {
            continue;
        }
        shared.accepted.fetch_add(1, Relaxed);
        let generation = shared.generation.subscribe();
        connections.spawn(join(
            client,
            upstream.clone(),
            line.clone(),
            generation,
            Arc::clone(&shared),
        ));
    }
}

async fn join(
    client: TcpStream,
    upstream: String,
    mut line: watch::Receiver<Line>,
    mut generation: watch::Receiver<u64>,
    shared: Arc<Shared>,
) {
    let Ok(server) = TcpStream::connect(&upstream).await else {
        return;
    };
    client.set_nodelay(true).ok();
    server.set_nodelay(true).ok();
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let asking = AtomicBool::new(false);
    let asked = pump(
        from_client,
        to_server,
        line.clone(),
        |line| line == Line::Stalled,
        |line, bytes| {
            if matches!(line, Line::CutAt(words) if bytes.windows(words.len()).any(|text| text == words)) {
                asking.store(true, Relaxed);
            }
            !matches!(line, Line::Asks(most) if shared.passed.fetch_add(1, Relaxed) >= most)
        },
    );
    let answered = pump(
        from_server,
        to_client,
        line.clone(),
        |line| matches!(line, Line::Stalled | Line::AnswersHeld),
        |line, _| {
            let ends = asking.load(Relaxed);
            shared.unanswered.fetch_add(u64::from(ends), Relaxed);
            !ends && !matches!(line, Line::Answers(most) if shared.passed.fetch_add(1, Relaxed) >= most)
        },
    );
    // Either side's end ends both, as does a cut; dropping the halves closes both sockets.
    tokio::select! {
        () = asked => {}
        () = answered => {}
        _ = line.wait_for(|line| *line == Line::Cut) => {}
        _ = generation.changed() => {}
    }
}

/// The end of the message that asks for a commit.
pub(crate) const COMMIT: &[u8] = b"COMMIT\0";

/// Carries bytes one way, holding them while `held` says so, until `passes` refuses some.
async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut line: watch::Receiver<Line>,
    held: impl Fn(Line) -> bool,
    passes: impl Fn(Line, &[u8]) -> bool,
) {
    let mut buffer = vec![0; 16 * 1024];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        let now = line.wait_for(|line| !held(*line)).await.map(|line| *line);
        let mut at_once = read;
        match now {
            // What was held when the line is cut is lost with it.
            Ok(Line::Cut) | Err(_) => return,
            Ok(Line::Late(delay)) => tokio::time::sleep(delay).await,
            Ok(Line::Dripping) => at_once = 1,
            Ok(_) => {}
        }
        if now.is_ok_and(|line| !passes(line, &buffer[..read])) {
            return;
        }
        for part in buffer[..read].chunks(at_once) {
            if to.write_all(part).await.is_err() {
                return;
            }
        }
    }
}
