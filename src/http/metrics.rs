//! `GET /metrics`: Prometheus text for a scraper on the same machine that talks to this process directly.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderMap, Method, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::fallback;
use super::health::Vitals;
use super::server::Peer;
use crate::telemetry::{Metrics, Readings};

/// Time for the figures that come from the store; without them the rest is served.
const COLLECT_DEADLINE: Duration = Duration::from_secs(2);

/// The route. Anyone but a direct loopback caller is answered as if it did not exist.
pub fn routes(metrics: Metrics, vitals: Arc<dyn Vitals>) -> Router {
    Router::new()
        .route("/metrics", get(scrape))
        .with_state((metrics, vitals))
}

async fn scrape(
    State((metrics, vitals)): State<(Metrics, Arc<dyn Vitals>)>,
    method: Method,
    uri: Uri,
    request: Request,
) -> Response {
    let peer = request.extensions().get::<Peer>().map(|peer| peer.0);
    if !is_direct_loopback(peer, request.headers()) {
        return fallback::not_found(method, uri).await.into_response();
    }
    let (stored, waiting) = tokio::join!(
        tokio::time::timeout(COLLECT_DEADLINE, vitals.stored()),
        tokio::time::timeout(COLLECT_DEADLINE, vitals.waiting())
    );
    let stored = stored.ok().and_then(Result::ok);
    let waiting = waiting.ok().and_then(Result::ok);
    let readings = Readings {
        deliveries: stored.map(|stored| stored.deliveries),
        latest_seq: stored.map(|stored| stored.latest_seq),
        oldest_due_ms: waiting.map(|waiting| waiting.oldest_due_ms),
        oldest_head_ms: waiting.and_then(|waiting| waiting.oldest_head_ms),
        realtime_connections: Some(vitals.realtime_connections()),
    };
    let headers = [
        (CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8"),
        (CACHE_CONTROL, "no-store"),
    ];
    (headers, metrics.render(&readings)).into_response()
}

/// Whether the peer of the connection is this machine and no header says that it speaks for someone else. A forwarding
/// header, whatever it holds, can only close the door.
pub fn is_direct_loopback(peer: Option<SocketAddr>, headers: &HeaderMap) -> bool {
    let forwarded = headers.keys().any(|name| {
        let name = name.as_str();
        matches!(name, "forwarded" | "forwarded-for" | "via" | "x-real-ip")
            || ["x-forwarded", "x-original-"]
                .iter()
                .any(|start| name.starts_with(start))
            || ["client-ip", "connecting-ip"].iter().any(|end| name.ends_with(end))
    });
    !forwarded && peer.is_some_and(|peer| peer.ip().to_canonical().is_loopback())
}
