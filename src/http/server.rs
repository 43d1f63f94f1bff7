//! Accepts connections and serves HTTP/1.1 on them, with a bound on everything a client can hold or delay.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::header::{CONNECTION, CONTENT_LENGTH, DATE, TRANSFER_ENCODING};
use axum::http::response::Parts;
use axum::http::{HeaderValue, Request, Response, Version};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use super::arriving::Budget;
use super::context;
use super::gate::{Gate, Gatekeeper, HEADS, Refusal};
use super::head::{Framing as Framed, HEAD_BYTES_MAX, HEADERS_MAX};
use crate::backoff::Backoff;
use crate::clock;
use crate::realtime::{Framing, Stream};

/// Connections served at once besides those of live streams; further ones wait in the listener's queue. Well under the
/// 16 384 files that the unit file allows, since deliveries and the database need some too.
pub const CONNECTIONS_MAX: usize = 10_000;
/// An idle connection is kept as long. Longer than a proxy keeps its own (60 s), so that the proxy closes first.
const IDLE_DEADLINE: Duration = Duration::from_secs(65);
/// Bytes a connection buffers.
const BUFFER_BYTES_MAX: usize = 64 * 1024;
/// Requests in flight get as long after a stop.
pub const DRAIN_DEADLINE: Duration = Duration::from_secs(8);
/// The waits after a failed accept, which happens when the process is out of files.
const ACCEPT_BACKOFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// The address of the connection's other end, in the extensions of every request. Never taken from a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer(pub SocketAddr);

/// In the extensions of a response: what follows its head, for as long as the client stays. It takes the connection over.
#[derive(Clone)]
pub struct Follows(Arc<Mutex<Option<Stream>>>);

impl Follows {
    /// Has `stream` follow.
    pub fn new(stream: Stream) -> Self {
        Self(Arc::new(Mutex::new(Some(stream))))
    }
}

/// Serves `router` until `stop` on at most so many connections, then gives requests in flight 8 s and returns with every connection closed.
///
/// Fails only when the listener has no address, that is, before serving anything.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    connections_max: usize,
    stop: CancellationToken,
) -> io::Result<()> {
    let address = listener.local_addr()?;
    tracing::info!(%address, "listening on http://{address}");
    let slots = Arc::new(Semaphore::new(connections_max.min(Semaphore::MAX_PERMITS)));
    let cut = CancellationToken::new();
    let tasks = TaskTracker::new();
    let mut backoff = Backoff::new(ACCEPT_BACKOFF.0, ACCEPT_BACKOFF.1);

    while let Some(slot) = stop.run_until_cancelled(slots.clone().acquire_owned()).await {
        let slot = slot.expect("nobody closes the semaphore");
        let Some(accepted) = stop.run_until_cancelled(listener.accept()).await else {
            break;
        };
        match accepted {
            Ok((stream, peer)) => {
                backoff.succeeded();
                let connection = Connection {
                    router: router.clone(),
                    peer,
                    heads: &HEADS,
                    cut: cut.clone(),
                    stop: stop.clone(),
                };
                let others = tasks.clone();
                tasks.spawn(async move {
                    let Some(taken) = connection.run(stream).await else {
                        return drop(slot);
                    };
                    // In a task of its own: the server's part of this one is much larger than what a stream needs.
                    others.spawn(async move {
                        taken.serve().await;
                        drop(slot);
                    });
                });
            }
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                let wait = backoff.failed();
                tracing::warn!("no connection can be accepted, trying again in {wait:?}: {error}");
                stop.run_until_cancelled(tokio::time::sleep(wait)).await;
            }
        }
    }
    drop(listener);
    tasks.close();
    if tokio::time::timeout(DRAIN_DEADLINE, tasks.wait()).await.is_err() {
        tracing::warn!("{} connections were cut after {DRAIN_DEADLINE:?}", tasks.len());
    }
    cut.cancel();
    tasks.wait().await;
    Ok(())
}

/// Whether a failed accept says something about the connection, not about the process.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(
        error.kind(),
        ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted
    )
}

struct Connection {
    router: Router,
    peer: SocketAddr,
    /// Bounds the heads that are on their way.
    heads: &'static Budget,
    /// Ends the connection where it is.
    cut: CancellationToken,
    /// Ends it once nothing is under way.
    stop: CancellationToken,
}

/// A connection whose last answer goes on as a stream.
struct Taken<S> {
    socket: S,
    cut: CancellationToken,
    answer: Answer,
}

/// The head of an answer, and what follows it.
struct Answer {
    head: Parts,
    version: Version,
    stream: Stream,
}

impl Connection {
    async fn run(self, socket: TcpStream) -> Option<Taken<TcpStream>> {
        match socket.set_nodelay(true) {
            Ok(()) => self.converse(socket).await,
            Err(error) => {
                tracing::debug!(peer = %self.peer, "the connection ended before it was served: {error}");
                None
            }
        }
    }

    /// Serves the connection to its end, or to the answer that takes it over.
    async fn converse<S>(self, socket: S) -> Option<Taken<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Self {
            router,
            peer,
            heads,
            cut,
            stop,
        } = self;
        let (gate, keeper) = Gate::new(socket, heads);
        let (takes, mut taken) = mpsc::channel(1);
        let written = keeper.clone();
        let service = service_fn(move |request: Request<Incoming>| {
            // At once, and not in the future: the parser may read on before it polls that for the first time.
            let verdict = keeper.verdict();
            answer(router.clone(), verdict, keeper.clone(), takes.clone(), peer, request)
        });
        let mut connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(IDLE_DEADLINE)
            .max_headers(HEADERS_MAX)
            .max_header_size(HEAD_BYTES_MAX)
            .max_buf_size(BUFFER_BYTES_MAX)
            .serve_connection(TokioIo::new(gate), service);
        let mut stopping = pin!(stop.cancelled());
        let mut is_stopping = false;
        let mut takes_over: Option<Answer> = None;
        let served = poll_fn(|cx| {
            if !is_stopping && stopping.as_mut().poll(cx).is_ready() {
                is_stopping = true;
                Pin::new(&mut connection).graceful_shutdown();
            }
            if let Poll::Ready(ended) = Pin::new(&mut connection).poll(cx) {
                return Poll::Ready(Some(ended));
            }
            if let Poll::Ready(Some(answer)) = taken.poll_recv(cx) {
                takes_over = Some(answer);
            }
            // What was answered before goes first.
            match takes_over.is_some() && written.has_written_all() {
                true => Poll::Ready(None),
                false => Poll::Pending,
            }
        });
        match cut.run_until_cancelled(served).await {
            Some(None) => {}
            Some(Some(Err(error))) => {
                tracing::debug!(%peer, "the connection ended: {error}");
                return None;
            }
            Some(Some(Ok(()))) | None => return None,
        }
        Some(Taken {
            socket: connection.into_parts().io.into_inner().into_inner(),
            cut,
            answer: takes_over?,
        })
    }
}

impl Taken<TcpStream> {
    async fn serve(self) {
        let Answer { head, version, stream } = self.answer;
        let framing = match version {
            Version::HTTP_10 => Framing::Close,
            _ => Framing::Chunked,
        };
        let head = written_head(head, framing);
        self.cut
            .run_until_cancelled(stream.serve(self.socket, head, framing))
            .await;
    }
}

/// The head of an answer as it is sent, with what the HTTP server would have added.
fn written_head(mut head: Parts, framing: Framing) -> Vec<u8> {
    head.headers.remove(CONTENT_LENGTH);
    match framing {
        Framing::Chunked => head
            .headers
            .insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked")),
        Framing::Close => head.headers.insert(CONNECTION, HeaderValue::from_static("close")),
    };
    let date = httpdate::fmt_http_date(clock::system());
    head.headers
        .insert(DATE, HeaderValue::from_str(&date).expect("a date is ASCII"));
    let mut bytes = format!("HTTP/1.1 {}\r\n", head.status).into_bytes();
    for (name, value) in &head.headers {
        bytes.extend_from_slice(name.as_str().as_bytes());
        bytes.extend_from_slice(b": ");
        bytes.extend_from_slice(value.as_bytes());
        bytes.extend_from_slice(b"\r\n");
    }
    bytes.extend_from_slice(b"\r\n");
    bytes
}

async fn answer(
    router: Router,
    verdict: Result<Framed, Box<Refusal>>,
    keeper: Gatekeeper,
    takes: mpsc::Sender<Answer>,
    peer: SocketAddr,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let may_go_on = matches!(verdict, Ok(Framed::None | Framed::Length(_)));
    let version = request.version();
    let mut response = match verdict {
        Ok(_) => {
            let mut request = request.map(Body::new);
            request.extensions_mut().insert(Peer(peer));
            router.oneshot(request).await?
        }
        Err(refusal) => context::refusal(&refusal.error, &refusal.ids),
    };
    let follows = response.extensions_mut().remove::<Follows>();
    if let Some(stream) = follows.and_then(|follows| follows.0.lock().take()) {
        let (head, _nothing) = response.into_parts();
        // The only one that is ever sent: this request stays under way until the connection is taken over.
        let _ = takes.try_send(Answer { head, version, stream });
        return std::future::pending().await;
    }
    // Where a chunked body ends is known to the parser alone, so nothing may follow it on this connection. A body that
    // was not read ends the connection as well: a client that is not told would lose its next request with it.
    if !may_go_on || keeper.owes_body() {
        response
            .headers_mut()
            .insert(CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use axum::body::Bytes;
    use axum::routing::{get, post};
    use proptest::prelude::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::Notify;
    use tokio::task::JoinHandle;
    use tokio::time::{Instant, timeout};

    use super::*;
    use crate::http::{body, gate, layers};

    const BODY_LIMIT: usize = 2 * 1024 * 1024;
    /// Long enough for any step on a busy machine; a test that reaches it has failed.
    const PATIENCE: Duration = Duration::from_secs(20);

    struct Server {
        at: SocketAddr,
        stop: CancellationToken,
        task: JoinHandle<io::Result<()>>,
        /// Told when `/slow` has begun; tells it to end.
        begun: Arc<Notify>,
        end: Arc<Notify>,
    }

    impl Server {
        async fn start() -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let at = listener.local_addr().unwrap();
            let stop = CancellationToken::new();
            let (begun, end) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
            let (started, finish) = (begun.clone(), end.clone());
            let slow = move || {
                let (started, finish) = (started.clone(), finish.clone());
                async move {
                    started.notify_one();
                    finish.notified().await;
                    "done"
                }
            };
            let router = layers(
                Router::new()
                    .route(
                        "/echo",
                        post(|request: Request<Body>| async { body::read_json(request, BODY_LIMIT).await }),
                    )
                    .route("/unread", post(|| async { "unread" }))
                    .route("/small", get(|| async { "small" }))
                    .route("/big", get(|| async { Bytes::from(vec![b'x'; 64 << 20]) }))
                    .route("/slow", get(slow)),
            );
            let task = tokio::spawn(serve(listener, router, CONNECTIONS_MAX, stop.clone()));
            Self {
                at,
                stop,
                task,
                begun,
                end,
            }
        }

        async fn connect(&self) -> TcpStream {
            TcpStream::connect(self.at).await.unwrap()
        }

        /// Everything the server sends until it closes.
        async fn exchange(&self, bytes: &[u8]) -> String {
            let mut stream = self.connect().await;
            stream.write_all(bytes).await.unwrap();
            rest(&mut stream).await
        }
    }

    async fn rest(stream: &mut TcpStream) -> String {
        let mut out = Vec::new();
        timeout(PATIENCE, stream.read_to_end(&mut out))
            .await
            .expect("the server closes")
            .expect("without a reset");
        String::from_utf8(out).unwrap()
    }

    /// One response with a declared length, from a connection that stays open.
    async fn one(stream: &mut TcpStream) -> String {
        let mut out = Vec::new();
        timeout(PATIENCE, async {
            loop {
                let text = String::from_utf8_lossy(&out).to_lowercase();
                if let Some((head, body)) = text.split_once("\r\n\r\n") {
                    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
                    if body.len() >= length.map_or(0, |length| length.parse().unwrap()) {
                        break;
                    }
                }
                assert_ne!(stream.read_buf(&mut out).await.unwrap(), 0, "closed after {text}");
            }
        })
        .await
        .expect("an answer");
        String::from_utf8(out).unwrap()
    }

    fn answers(text: &str) -> usize {
        text.matches("HTTP/1.1 ").count()
    }

    #[tokio::test]
    async fn a_request_framed_twice_is_refused_and_what_follows_is_never_read_as_a_request() {
        let server = Server::start().await;
        let next = "0\r\n\r\nGET /small HTTP/1.1\r\nHost: x\r\n\r\n";
        for framing in [
            "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
            "Transfer-Encoding: chunked\r\ncOntent-lEngth: 2\r\n",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
            "Transfer-Encoding: gzip, chunked\r\n",
            "Transfer-Encoding: chunked, identity\r\n",
            "Content-Length: 2\r\nContent-Length: 3\r\n",
            "Content-Length: 2, 2\r\n",
            "Content-Length: +2\r\n",
            "Content-Length : 2\r\n",
        ] {
            let head = format!("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{framing}\r\n");
            let answer = server.exchange(format!("{head}{next}").as_bytes()).await;
            assert!(answer.starts_with("HTTP/1.1 400 "), "{framing}: {answer}");
            assert_eq!(answers(&answer), 1, "{framing}: {answer}");
            // Behind another request in the same packet, and byte by byte, the answer is the same.
            let first = "GET /small HTTP/1.1\r\nHost: x\r\n\r\n";
            let answer = server.exchange(format!("{first}{head}{next}").as_bytes()).await;
            assert_eq!(answers(&answer), 2, "{framing}: {answer}");
            assert!(answer.contains("HTTP/1.1 400 "), "{framing}: {answer}");
            let mut stream = server.connect().await;
            stream.set_nodelay(true).unwrap();
            for byte in head.as_bytes() {
                stream.write_all(&[*byte]).await.unwrap();
            }
            assert!(rest(&mut stream).await.starts_with("HTTP/1.1 400 "), "{framing}");
        }
        let answer = server.exchange(
            b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        );
        let answer = answer.await.to_lowercase();
        assert!(
            answer.contains("application/problem+json") && answer.contains("x-openvibe-request-id"),
            "{answer}"
        );
    }

    #[tokio::test]
    async fn requests_on_one_connection_are_told_apart_whatever_their_framing() {
        let server = Server::start().await;
        let json = "Content-Type: application/json\r\n";
        let body = "{\"a\":\"\\r\\n\\r\\ncontent-length: 9\"}";
        let with_body = format!(
            "POST /echo HTTP/1.1\r\nHost: x\r\n{json}Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let without = "GET /small HTTP/1.1\r\nHost: x\r\n\r\n";
        let chunked =
            format!("POST /echo HTTP/1.1\r\nHost: x\r\n{json}Transfer-Encoding: Chunked\r\n\r\n3\r\n[1]\r\n0\r\n\r\n");
        // Pipelined in one write, an empty line before one of them, the chunked one last.
        let all = format!("{with_body}{without}\r\n{with_body}{without}{with_body}{chunked}");
        let answer = server.exchange(all.as_bytes()).await;
        assert_eq!(answers(&answer), 6, "{answer}");
        assert_eq!(answer.matches("HTTP/1.1 200 OK").count(), 6, "{answer}");
        assert_eq!(answer.matches(body).count(), 3, "{answer}");
        assert!(answer.ends_with("[1]"), "{answer}");

        // One after the other on a kept connection.
        let mut stream = server.connect().await;
        for request in [&with_body, without, &with_body] {
            stream.write_all(request.as_bytes()).await.unwrap();
            assert!(one(&mut stream).await.starts_with("HTTP/1.1 200"));
        }
    }

    /// Judges the one answer of a closed connection: the document of a refusal with the ids of the caller.
    fn refused_head(answer: &str, status: u16, title: &str) {
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        assert_eq!(answers(answer), 1, "{answer}");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let head = head.to_lowercase();
        for line in [
            "content-type: application/problem+json",
            "x-openvibe-request-id: caller-1",
            "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-",
            "connection: close",
        ] {
            assert!(head.contains(&format!("\r\n{line}")), "no {line} in {answer}");
        }
        let document: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(
            (&document["code"], &document["title"], &document["request_id"]),
            (&"events.bad_request".into(), &title.into(), &"caller-1".into())
        );
    }

    const IDS: &str =
        "X-OpenVibe-Request-Id: caller-1\r\nTraceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\n";

    #[tokio::test]
    async fn a_head_that_is_too_large_is_refused_with_a_document() {
        let server = Server::start().await;
        let fits = HEADERS_MAX - 3;
        let get = |headers: &str| format!("GET /small HTTP/1.1\r\n{IDS}{headers}Connection: close\r\n\r\n");
        let filler = HEAD_BYTES_MAX - get("A: \r\n").len();
        for large in [
            get(&format!("A: {}\r\n", "a".repeat(filler))),
            get(&"A: b\r\n".repeat(fits)),
        ] {
            assert!(server.exchange(large.as_bytes()).await.ends_with("small"));
        }
        for large in [
            get(&format!("A: {}\r\n", "a".repeat(filler + 1))),
            get(&format!("A: {}\r\n", "a".repeat(70_000))),
            get(&"A: b\r\n".repeat(fits + 1)),
            get(&"A: b\r\n".repeat(fits + 2_000)),
        ] {
            refused_head(
                &server.exchange(large.as_bytes()).await,
                431,
                "Request Header Fields Too Large",
            );
        }
        let endless = server.exchange(format!("GET /{}", "a".repeat(70_000)).as_bytes()).await;
        assert!(
            endless.starts_with("HTTP/1.1 431 ") && endless.contains("req_"),
            "{endless}"
        );
    }

    #[tokio::test]
    async fn what_is_no_http_is_refused_with_a_document() {
        let server = Server::start().await;
        for nonsense in [
            "GET\r\n",
            "GET / HTTP/9.9\r\n",
            "PRI * HTTP/2.0\r\n",
            "GET  / HTTP/1.1\r\n",
            "G\"T / HTTP/1.1\r\n",
            "GET http://[ HTTP/1.1\r\n",
            "GET / HTTP/1.1\r\nHost\r\n",
            "GET / HTTP/1.1\r\nA: b\r\n folded\r\n",
            "GET / HTTP/1.1\r\nA: \0\r\n",
            "GET / HTTP/1.1\r\nA: b\rC: d\r\n",
            "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 18446744073709551615\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n",
        ] {
            // In one packet, so that the ids are there when the request line is judged.
            let answer = server.exchange(format!("{nonsense}{IDS}\r\n").as_bytes()).await;
            refused_head(&answer, 400, "Bad Request");
            // Behind another request, whose answer comes first.
            let both = format!("GET /small HTTP/1.1\r\n\r\n{nonsense}{IDS}\r\n");
            let answer = server.exchange(both.as_bytes()).await;
            let (_, second) = answer.split_once("small").expect("the first answer");
            refused_head(second, 400, "Bad Request");
        }
        // A peer that speaks something else does not have to end a head, or a line, to learn so.
        for start in ["\u{16}\u{3}\u{1}", "GET\r\n"] {
            assert!(
                server.exchange(start.as_bytes()).await.starts_with("HTTP/1.1 400 "),
                "{start:?}"
            );
        }
        let head = server
            .exchange(format!("HEAD / HTTP/1.1\r\nHost\r\n{IDS}\r\n").as_bytes())
            .await;
        assert!(
            head.starts_with("HTTP/1.1 400 ") && head.ends_with("\r\n\r\n"),
            "no body: {head}"
        );
        let bare = server
            .exchange(b"GET /small HTTP/1.1\nHost: x\nConnection: close\n\n")
            .await;
        assert!(bare.ends_with("small"), "{bare}");
    }

    /// Everything the service answers to `bytes`, in pieces of `size`, on a connection of its own in memory.
    async fn conversation(bytes: &[u8], size: usize) -> String {
        let (mut client, served) = tokio::io::duplex(1 << 20);
        let router = layers(Router::new().route("/small", get(|| async { "small" })).route(
            "/echo",
            post(|request: Request<Body>| async { body::read_json(request, BODY_LIMIT).await }),
        ));
        let connection = Connection {
            router,
            peer: ([127, 0, 0, 1], 1).into(),
            heads: &HEADS,
            cut: CancellationToken::new(),
            stop: CancellationToken::new(),
        };
        let task = tokio::spawn(connection.converse(served));
        for piece in bytes.chunks(size) {
            // The service may have closed already.
            if client.write_all(piece).await.is_err() {
                break;
            }
            tokio::task::yield_now().await;
        }
        let mut out = Vec::new();
        client.read_to_end(&mut out).await.unwrap();
        task.await.expect("no panic");
        String::from_utf8_lossy(&out).into_owned()
    }

    proptest! {
        /// An answer without ids is one that the server gave by itself.
        #[test]
        fn whatever_is_sent_nothing_but_the_service_answers(
            seeds in prop::collection::vec(prop::sample::select(SEEDS), 1..4),
            faults in prop::collection::vec((any::<prop::sample::Index>(), 0_usize..4, prop::sample::select(FAULTS)), 0..4),
            size in 1_usize..200,
        ) {
            let mut bytes = seeds.concat().into_bytes();
            for (at, removed, fault) in faults {
                let at = at.index(bytes.len());
                let end = (at + removed).min(bytes.len());
                bytes.splice(at..end, fault.iter().copied());
                bytes.push(b'\n');
            }
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
            let answer = runtime.block_on(conversation(&bytes, size));
            let ids = answer.matches("\r\nx-openvibe-request-id: ").count();
            prop_assert_eq!(answer.matches("\r\ndate: ").count(), ids, "{:?}\n{}", String::from_utf8_lossy(&bytes), answer);
        }
    }

    const SEEDS: &[&str] = &[
        "GET /small HTTP/1.1\r\nHost: x\r\n\r\n",
        "HEAD http://x/small?a=%20 HTTP/1.1\nA:\n\n",
        "\r\nPOST /echo HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n[]",
        "POST /echo HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[]\r\n0\r\n\r\n",
        "CONNECT x:1 HTTP/1.1\r\nUpgrade: y\r\nConnection: upgrade\r\n\r\n",
        "POST /echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "OPTIONS * HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    ];
    const FAULTS: &[&[u8]] = &[
        b"",
        b"\r",
        b"\n",
        b"\r\n",
        b"\r\n\r\n",
        b"\0",
        b" ",
        b"\t",
        b":",
        b"\x80",
        b"\xc3\xa9",
        b"[",
        b"HTTP/1.0",
        b"A: b\r\n",
        b"Content-Length: 2\r\n",
        b"Content-Length: 99999999999999999999\r\n",
        b"Transfer-Encoding: chunked\r\n",
    ];

    #[tokio::test]
    async fn a_refused_body_does_not_cost_the_client_its_answer() {
        let server = Server::start().await;
        let size = 3 * 1024 * 1024;
        for path in ["/echo", "/unread"] {
            let head = format!(
                "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
            );
            let mut stream = server.connect().await;
            stream.write_all(head.as_bytes()).await.unwrap();
            // The answer is on its way and the server done with the request; the client is not done sending.
            stream.readable().await.unwrap();
            for piece in vec![b' '; size].chunks(64 * 1024) {
                stream.write_all(piece).await.expect("the server reads on");
            }
            let answer = rest(&mut stream).await;
            let expected = if path == "/echo" {
                "HTTP/1.1 413 "
            } else {
                "HTTP/1.1 200 "
            };
            assert!(answer.starts_with(expected), "{answer}");
            assert!(answer.to_lowercase().contains("\r\nconnection: close\r\n"), "{answer}");
        }
    }

    #[tokio::test]
    async fn a_client_that_asks_before_it_sends_is_refused_without_sending() {
        let server = Server::start().await;
        let ask = |more: &str| format!("POST /echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n{more}\r\n");
        let answer = server
            .exchange(ask("Content-Type: text/plain\r\nContent-Length: 5\r\n").as_bytes())
            .await;
        assert!(answer.starts_with("HTTP/1.1 415 "), "{answer}");
        let answer = server
            .exchange(ask("Content-Type: application/json\r\nContent-Length: 9999999\r\n").as_bytes())
            .await;
        assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
        let mut stream = server.connect().await;
        stream
            .write_all(ask("Content-Type: application/json\r\nContent-Length: 2\r\n").as_bytes())
            .await
            .unwrap();
        assert!(one(&mut stream).await.starts_with("HTTP/1.1 100 "));
        stream.write_all(b"[]").await.unwrap();
        assert!(one(&mut stream).await.starts_with("HTTP/1.1 200 "));
    }

    #[tokio::test]
    async fn a_body_cut_short_harms_nobody() {
        let server = Server::start().await;
        let head = "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{";
        let mut stream = server.connect().await;
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let answer = rest(&mut stream).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400 "), "{answer}");
        assert!(
            server
                .exchange(b"GET /small HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                .await
                .ends_with("small")
        );
    }

    /// Runs `wait` on a paused clock once the server has taken in what was sent.
    async fn paused<T>(wait: impl Future<Output = T>) -> (T, Duration) {
        tokio::time::pause();
        let since = Instant::now();
        let value = wait.await;
        let took = since.elapsed();
        tokio::time::resume();
        (value, took)
    }

    #[tokio::test]
    async fn a_slow_head_is_cut_while_an_idle_connection_is_kept_longer() {
        let server = Server::start().await;
        let mut silent = server.connect().await;
        let (answer, took) = paused(async { silent.read(&mut [0; 16]).await.unwrap_or(0) }).await;
        assert_eq!(answer, 0);
        assert!(took >= gate::HEAD_DEADLINE && took < IDLE_DEADLINE, "{took:?}");

        let mut idle = server.connect().await;
        idle.write_all(b"GET /small HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        one(&mut idle).await;
        let (answer, took) = paused(async { idle.read(&mut [0; 16]).await.unwrap_or(0) }).await;
        assert_eq!(answer, 0);
        assert!(
            took >= IDLE_DEADLINE - Duration::from_secs(1) && took < 2 * IDLE_DEADLINE,
            "{took:?}"
        );
    }

    #[tokio::test]
    async fn large_heads_under_way_share_a_budget_and_the_slowest_is_refused_first() {
        let heads: &'static Budget = Box::leak(Box::new(Budget::new(40 * 1024)));
        let connect = || {
            let (client, served) = tokio::io::duplex(1 << 20);
            let connection = Connection {
                router: layers(Router::new().route("/small", get(|| async { "small" }))),
                peer: ([127, 0, 0, 1], 1).into(),
                heads,
                cut: CancellationToken::new(),
                stop: CancellationToken::new(),
            };
            tokio::spawn(connection.converse(served));
            client
        };
        let half = format!(
            "GET /small HTTP/1.1\r\nHost: x\r\nConnection: close\r\nA: {}",
            "a".repeat(20_000)
        );
        let mut clients = [connect(), connect(), connect(), connect()];
        for client in &mut clients[..3] {
            client.write_all(half.as_bytes()).await.unwrap();
            // Each is taken in before the next begins.
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
        }
        let [mut first, mut second, mut third, mut small] = clients;
        small
            .write_all(b"GET /small HTTP/1.1\r\nConnection: close\r\n\r\n")
            .await
            .unwrap();
        let mut answer = String::new();
        for (client, rest, status) in [
            (&mut first, "", 503),
            (&mut second, "\r\n\r\n", 200),
            (&mut third, "\r\n\r\n", 200),
            (&mut small, "", 200),
        ] {
            client.write_all(rest.as_bytes()).await.unwrap();
            answer.clear();
            timeout(PATIENCE, client.read_to_string(&mut answer))
                .await
                .expect("an answer")
                .unwrap();
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        }
    }

    #[tokio::test]
    async fn a_head_that_drips_is_cut_by_one_deadline_from_its_first_byte() {
        let server = Server::start().await;
        let mut stream = server.connect().await;
        stream
            .write_all(b"GET /small HTTP/1.1\r\nHost: x\r\n\r\n")
            .await
            .unwrap();
        one(&mut stream).await;
        let (cut, took) = paused(async {
            for _ in 0..100 {
                if stream.write_all(b"G").await.is_err() {
                    return true;
                }
                if let Ok(read) = timeout(Duration::from_secs(1), stream.read(&mut [0; 16])).await {
                    return matches!(read, Ok(0) | Err(_));
                }
            }
            false
        })
        .await;
        assert!(cut, "never cut");
        assert!(took <= gate::HEAD_DEADLINE + Duration::from_secs(3), "{took:?}");
    }

    #[tokio::test]
    async fn a_stop_closes_idle_connections_finishes_what_runs_and_takes_nothing_new() {
        let server = Server::start().await;
        let mut idle = server.connect().await;
        idle.write_all(b"GET /small HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        one(&mut idle).await;
        let mut busy = server.connect().await;
        busy.write_all(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        server.begun.notified().await;

        server.stop.cancel();
        assert_eq!(rest(&mut idle).await, "");
        assert!(TcpStream::connect(server.at).await.is_err(), "nothing listens any more");
        server.end.notify_one();
        assert!(rest(&mut busy).await.ends_with("done"));
        timeout(PATIENCE, server.task)
            .await
            .expect("serve returns")
            .unwrap()
            .unwrap();
    }

    #[tokio::test]
    async fn a_request_that_outlasts_the_drain_is_cut() {
        let server = Server::start().await;
        let mut busy = server.connect().await;
        busy.write_all(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        server.begun.notified().await;
        server.stop.cancel();
        let (result, took) = paused(server.task).await;
        result.unwrap().unwrap();
        assert!(
            took >= DRAIN_DEADLINE && took < DRAIN_DEADLINE + Duration::from_secs(1),
            "{took:?}"
        );
        let _ = busy;
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_next_to_nothing_is_cut_and_one_that_only_reads_slowly_is_not() {
        const SIZE: usize = 4 << 20;
        for (a_second, whole) in [(1, false), (1024, false), (32 * 1024, true)] {
            let (mut client, served) = tokio::io::duplex(64 * 1024);
            let connection = Connection {
                router: layers(Router::new().route("/big", get(|| async { Bytes::from(vec![b'x'; SIZE]) }))),
                peer: ([127, 0, 0, 1], 1).into(),
                heads: &HEADS,
                cut: CancellationToken::new(),
                stop: CancellationToken::new(),
            };
            let task = tokio::spawn(connection.converse(served));
            client
                .write_all(b"GET /big HTTP/1.1\r\nConnection: close\r\n\r\n")
                .await
                .unwrap();
            let since = Instant::now();
            let mut out = Vec::new();
            while !task.is_finished() {
                let mut part = vec![0; a_second];
                let read = client.read(&mut part).await.unwrap();
                out.extend_from_slice(&part[..read]);
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            client.read_to_end(&mut out).await.unwrap();
            assert_eq!(out.len() > SIZE, whole, "{a_second} bytes a second: {} came", out.len());
            // The bytes that fit between the two sides count as taken.
            assert!(
                whole || since.elapsed() < Duration::from_secs(90),
                "{:?}",
                since.elapsed()
            );
        }
    }

    #[tokio::test]
    async fn a_client_that_reads_nothing_is_cut() {
        let server = Server::start().await;
        let mut deaf = server.connect().await;
        deaf.write_all(b"GET /big HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            .await
            .unwrap();
        deaf.readable().await.unwrap();
        tokio::time::pause();
        tokio::time::sleep(Duration::from_secs(70)).await;
        tokio::time::resume();
        let mut out = Vec::new();
        let ended = timeout(PATIENCE, deaf.read_to_end(&mut out))
            .await
            .expect("the server closes");
        assert!(ended.is_err() || out.len() < 64 << 20, "{} bytes came", out.len());
    }
}
