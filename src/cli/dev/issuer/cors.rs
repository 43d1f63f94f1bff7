//! Lets pages of this machine talk to the issuer, and no page from anywhere else.

use axum::extract::Request;
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
    ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_MAX_AGE, ORIGIN, VARY,
};
use axum::http::{HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

/// The layer, for `axum::middleware::from_fn`.
pub(super) async fn local_pages(request: Request, next: Next) -> Response {
    let origin = request.headers().get(ORIGIN).filter(|origin| is_local(origin)).cloned();
    let is_preflight = request.method() == Method::OPTIONS;
    let mut response = match is_preflight {
        true => StatusCode::NO_CONTENT.into_response(),
        false => next.run(request).await,
    };
    let headers = response.headers_mut();
    headers.insert(VARY, HeaderValue::from_static("Origin"));
    let Some(origin) = origin else { return response };
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
    if is_preflight {
        headers.insert(
            ACCESS_CONTROL_ALLOW_METHODS,
            HeaderValue::from_static("GET, POST, OPTIONS"),
        );
        headers.insert(
            ACCESS_CONTROL_ALLOW_HEADERS,
            HeaderValue::from_static("Authorization, Content-Type"),
        );
        headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    }
    response
}

/// `http://127.0.0.1` or `http://localhost`, on any port.
fn is_local(origin: &HeaderValue) -> bool {
    let host = origin.to_str().ok().and_then(|origin| origin.strip_prefix("http://"));
    let name = host.map(|host| host.split_once(':').unwrap_or((host, "0")));
    name.is_some_and(|(name, port)| matches!(name, "127.0.0.1" | "localhost") && port.parse::<u16>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pages_of_this_machine_are_let_in() {
        let judged = |origin: &str| is_local(&HeaderValue::from_str(origin).expect("a value"));
        for local in ["http://127.0.0.1:4300", "http://localhost:5173", "http://localhost"] {
            assert!(judged(local), "{local}");
        }
        for foreign in [
            "null",
            "http://evil.example",
            "http://localhost.evil.example:4300",
            "http://127.0.0.1.evil.example",
            "http://127.0.0.1:4300.evil.example",
            "http://127.0.0.1:4300@evil.example",
            "https://openvibe.network",
        ] {
            assert!(!judged(foreign), "{foreign}");
        }
    }
}
