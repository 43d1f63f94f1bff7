//! Accepts connections and serves HTTP/1.1 on them, with a bound on everything a client can hold or delay.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::header::CONNECTION;
use axum::http::{HeaderValue, Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use super::context;
use super::gate::{Framing, Gate, Gatekeeper};
use crate::problem::ApiError;

/// Connections served at once; further ones wait in the listener's queue. Well under the 16 384 files that the unit
/// file allows, since deliveries and the database need some too.
pub const CONNECTIONS_MAX: usize = 10_000;
/// An idle connection is kept as long. Longer than a proxy keeps its own (60 s), so that the proxy closes first.
const IDLE_DEADLINE: Duration = Duration::from_secs(65);
/// Headers of a request.
const HEADERS_MAX: usize = 100;
/// Bytes of a head, request line included.
const HEAD_BYTES_MAX: usize = 32 * 1024;
/// Bytes a connection buffers.
const BUFFER_BYTES_MAX: usize = 64 * 1024;
/// Requests in flight get as long after a stop.
pub const DRAIN_DEADLINE: Duration = Duration::from_secs(8);
/// The waits after a failed accept, which happens when the process is out of files.
const ACCEPT_BACKOFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// The address of the connection's other end, in the extensions of every request. Never taken from a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer(pub SocketAddr);

/// Serves `router` until `stop`, then gives requests in flight 8 s and returns with every connection closed.
///
/// Fails only when the listener has no address, that is, before serving anything.
pub async fn serve(listener: TcpListener, router: Router, stop: CancellationToken) -> io::Result<()> {
    tracing::info!("listening on {}", listener.local_addr()?);
    let graceful = GracefulShutdown::new();
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let cut = CancellationToken::new();
    let tasks = TaskTracker::new();
    let mut backoff = ACCEPT_BACKOFF.0;

    while let Some(slot) = stop.run_until_cancelled(slots.clone().acquire_owned()).await {
        let slot = slot.expect("nobody closes the semaphore");
        let Some(accepted) = stop.run_until_cancelled(listener.accept()).await else {
            break;
        };
        match accepted {
            Ok((stream, peer)) => {
                backoff = ACCEPT_BACKOFF.0;
                let connection = Connection {
                    router: router.clone(),
                    peer,
                    cut: cut.clone(),
                };
                let watcher = graceful.watcher();
                tasks.spawn(async move {
                    connection.run(stream, watcher).await;
                    drop(slot);
                });
            }
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                tracing::warn!("no connection can be accepted, trying again in {backoff:?}: {error}");
                stop.run_until_cancelled(tokio::time::sleep(backoff)).await;
                backoff = (backoff * 2).min(ACCEPT_BACKOFF.1);
            }
        }
    }
    drop(listener);
    tasks.close();
    if tokio::time::timeout(DRAIN_DEADLINE, graceful.shutdown()).await.is_err() {
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
    cut: CancellationToken,
}

impl Connection {
    async fn run(self, stream: TcpStream, watcher: Watcher) {
        let Self { router, peer, cut } = self;
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%peer, "the connection ended before it was served: {error}");
            return;
        }
        let (gate, keeper) = Gate::new(stream);
        let service = service_fn(move |request| answer(router.clone(), keeper.clone(), peer, request));
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(IDLE_DEADLINE)
            .max_headers(HEADERS_MAX)
            .max_header_size(HEAD_BYTES_MAX)
            .max_buf_size(BUFFER_BYTES_MAX)
            .serve_connection(TokioIo::new(gate), service);
        if let Some(Err(error)) = cut.run_until_cancelled(watcher.watch(connection)).await {
            tracing::debug!(%peer, "the connection ended: {error}");
        }
    }
}

async fn answer(
    router: Router,
    keeper: Gatekeeper,
    peer: SocketAddr,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let framing = keeper.framing(request.headers());
    let mut response = match framing {
        Ok(_) => {
            let mut request = request.map(Body::new);
            request.extensions_mut().insert(Peer(peer));
            router.oneshot(request).await?
        }
        Err(detail) => context::refusal(&ApiError::BadRequest(detail.into()), request.headers()),
    };
    // Where a chunked body ends is known to the parser alone, so nothing may follow it on this connection.
    if !matches!(framing, Ok(Framing::None | Framing::Length(_))) {
        response
            .headers_mut()
            .insert(CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response)
}
