//! Which pages may open streams with credentials. Other pages are answered as well; their browser keeps it from them.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
    ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_MAX_AGE, ORIGIN, VARY,
};
use axum::http::{HeaderValue, Method};
use axum::middleware::Next;
use axum::response::Response;

use crate::domain::endpoint::HostRules;

/// Pages that are trusted with credentials.
#[derive(Debug, Clone)]
pub struct Origins {
    /// `https` pages of these hosts.
    pub hosts: HostRules,
    /// Further origins, each exact.
    pub exact: Vec<String>,
}

impl Origins {
    fn allow(&self, origin: &str) -> bool {
        self.exact.iter().any(|exact| exact == origin) || self.hosts.covers_origin(origin)
    }
}

/// The layer, for `axum::middleware::from_fn_with_state`. Refusals carry the headers too: a page may read why.
pub(super) async fn shared(State(origins): State<Arc<Origins>>, request: Request, next: Next) -> Response {
    let origin = request.headers().get(ORIGIN).cloned();
    let allowed = origin.filter(|origin| origin.to_str().is_ok_and(|origin| origins.allow(origin)));
    let is_preflight = request.method() == Method::OPTIONS;
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    headers.insert(VARY, HeaderValue::from_static("Origin"));
    let Some(origin) = allowed else { return response };
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
    if is_preflight {
        headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, OPTIONS"));
        headers.insert(
            ACCESS_CONTROL_ALLOW_HEADERS,
            HeaderValue::from_static("Authorization, Last-Event-ID, Cache-Control"),
        );
        headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    }
    response
}
