//! Serves a router on a loopback listener: the small server under the issuer and the receiver.

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;

/// Connections served at once; more wait to be accepted.
const CONNECTIONS_MAX: usize = 256;

/// Serves until the answer is dropped, which also closes every connection.
pub(super) fn serve(listener: TcpListener, routes: Router) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(async move {
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                accepted = listener.accept(), if connections.len() < CONNECTIONS_MAX => {
                    // A failed accept concerns a client that has gone already.
                    if let Ok((stream, _)) = accepted {
                        let service = TowerToHyperService::new(routes.clone());
                        connections.spawn(async move {
                            // How a client ends its connection is its own affair.
                            http1::Builder::new().serve_connection(TokioIo::new(stream), service).await.ok();
                        });
                    }
                }
                Some(_) = connections.join_next(), if !connections.is_empty() => {}
            }
        }
    }))
}
