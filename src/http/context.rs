//! The outermost layer: gives every request its ids, writes the document of every refusal, and puts the headers that
//! belong on every response. It also counts the request, because only it sees how a request ends.

use axum::body::{Body, HttpBody};
use axum::extract::{FromRequestParts, MatchedPath, Request};
use axum::http::header::{CONTENT_LENGTH, X_CONTENT_TYPE_OPTIONS};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method};
use axum::middleware::Next;
use axum::response::Response;

use crate::domain::ids::new_request_id;
use crate::domain::trace::{Traceparent, is_request_id};
use crate::problem::{ApiError, Rejection};
use crate::telemetry;

use super::server::Follows;

/// The request id, in both directions.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-openvibe-request-id");
/// The W3C trace context, in both directions.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// What a request is called. In the extensions of every request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestContext {
    /// The caller's, when it is 8 to 128 of `A-Za-z0-9._-`; otherwise `req_` and 24 hex digits.
    pub request_id: String,
    /// The caller's trace, or one started here. What is sent on is `trace.next_span()`.
    pub trace: Traceparent,
    /// Whether the trace is the caller's. A trace started here says nothing about earlier hops.
    pub given: bool,
}

impl RequestContext {
    /// Reads the ids of a request, making those that are absent or malformed.
    pub fn of(headers: &HeaderMap) -> Self {
        let trace = text(headers, &TRACEPARENT).and_then(Traceparent::parse);
        let request_id = match text(headers, &REQUEST_ID) {
            Some(id) if is_request_id(id) => id.to_owned(),
            _ => new_request_id(),
        };
        Self {
            request_id,
            given: trace.is_some(),
            trace: trace.unwrap_or_else(Traceparent::start),
        }
    }

    /// The trace id, 32 lower-case hex digits.
    pub fn trace_id(&self) -> &str {
        self.trace.trace_id()
    }
}

impl<S: Send + Sync> FromRequestParts<S> for RequestContext {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        // A handler tested without the layers still gets ids.
        Ok(parts
            .extensions
            .get::<Self>()
            .cloned()
            .unwrap_or_else(|| Self::of(&parts.headers)))
    }
}

/// The layer itself, for `axum::middleware::from_fn`.
pub async fn edge(mut request: Request, next: Next) -> Response {
    let context = RequestContext::of(request.headers());
    let head_only = request.method() == Method::HEAD;
    let mut counted = Counted::start(&request);
    request.extensions_mut().insert(context.clone());

    let mut response = next.run(request).await;
    if let Some(Rejection(error)) = response.extensions_mut().remove::<Rejection>() {
        response = written(&error, &context, response, head_only);
    }
    common_headers(&context, &mut response);
    counted.outcome = match response.extensions().get::<Follows>() {
        // A stream lasts for hours, and has figures of its own.
        Some(_) => Outcome::Stream,
        None => Outcome::Answer(response.status().as_u16()),
    };
    response
}

/// The whole answer to a request that never reaches a route.
pub fn refusal(error: &ApiError, headers: &HeaderMap) -> Response {
    let context = RequestContext::of(headers);
    let mut response = error.document(&context.request_id, context.trace_id());
    common_headers(&context, &mut response);
    response
}

fn common_headers(context: &RequestContext, response: &mut Response) {
    let headers = response.headers_mut();
    headers.insert(REQUEST_ID, ascii(&context.request_id));
    headers.insert(TRACEPARENT, ascii(&context.trace.next_span().to_string()));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
}

/// The document, under the headers that the handler may have set on its refusal.
fn written(error: &ApiError, context: &RequestContext, refused: Response, head_only: bool) -> Response {
    let (mut parts, body) = error.document(&context.request_id, context.trace_id()).into_parts();
    let mut headers = refused.into_parts().0.headers;
    headers.remove(CONTENT_LENGTH);
    headers.extend(std::mem::take(&mut parts.headers));
    parts.headers = headers;
    if !head_only {
        return Response::from_parts(parts, body);
    }
    if let Some(length) = body.size_hint().exact() {
        parts.headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
    }
    Response::from_parts(parts, Body::empty())
}

/// One request in the metrics, counted when it is dropped.
struct Counted {
    request: telemetry::HttpRequest,
    outcome: Outcome,
}

/// What became of a request.
enum Outcome {
    /// Its caller went away before there was an answer.
    Aborted,
    /// An answer of this status.
    Answer(u16),
    /// A stream, which has begun.
    Stream,
}

impl Counted {
    fn start(request: &Request) -> Self {
        let route = request.extensions().get::<MatchedPath>();
        Self {
            request: telemetry::HttpRequest::start(request.method(), route),
            outcome: Outcome::Aborted,
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        match self.outcome {
            Outcome::Aborted => self.request.end(None),
            Outcome::Answer(status) => self.request.end(Some(status)),
            Outcome::Stream => self.request.leave_out(),
        }
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

fn ascii(value: &str) -> HeaderValue {
    HeaderValue::from_str(value).expect("ids are made of, or checked to be, visible ASCII")
}
