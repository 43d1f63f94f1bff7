//! The HTTP edge: what every route stands on. One thin file per resource is added beside these.

mod answer;
pub mod api;
mod arriving;
pub mod body;
mod caller;
mod carriers;
mod checkpoints;
pub mod context;
pub mod cors;
mod deadline;
mod deliveries;
mod document;
mod events;
pub mod fallback;
mod gate;
mod head;
pub mod health;
pub mod limits;
pub mod metrics;
mod placement;
mod policies;
mod publish;
pub mod query;
pub mod release;
pub mod room;
pub mod server;
pub mod stream;
mod subscriptions;
#[cfg(test)]
mod tests;

use axum::Router;
use axum::middleware::from_fn;
use tower_http::catch_panic::CatchPanicLayer;

/// Puts the edge around all routes of the service: ids, problem documents, common headers, request metrics, a
/// deadline, caught panics, and 404 for whatever no route answers.
pub fn layers(router: Router) -> Router {
    router
        .fallback(fallback::not_found)
        .method_not_allowed_fallback(fallback::not_found)
        .layer(CatchPanicLayer::custom(fallback::panicked))
        .layer(from_fn(deadline::answered_in_time))
        .layer(from_fn(context::edge))
}
