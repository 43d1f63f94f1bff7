//! A document that says the same for as long as the process runs, and that any page may read.

use axum::Router;
use axum::body::Bytes;
use axum::http::header::{ACCESS_CONTROL_ALLOW_ORIGIN, CACHE_CONTROL};
use axum::response::IntoResponse;
use axum::routing::get;
use serde::Serialize;

use super::answer::json_text;

/// The route of such a document; `cache` tells caches how long it stays true.
pub(super) fn route(path: &str, cache: &'static str, document: &impl Serialize) -> Router {
    let text = Bytes::from(serde_json::to_vec(document).expect("a document of plain members"));
    let headers = [(CACHE_CONTROL, cache), (ACCESS_CONTROL_ALLOW_ORIGIN, "*")];
    Router::new().route(
        path,
        get(move || async move { (headers, json_text(text)).into_response() }),
    )
}
