//! An HTTP client for the service's routes, and the judgement of problem documents.

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use reqwest::{
    Method,
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap},
    redirect::Policy,
};
use serde_json::Value;

use super::{envelopes::Envelope, logs, network::TokenSpec, tls::CA_FILE};

/// How long any answer may take. Routes have shorter deadlines of their own.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// How long a token made by `publish` is used again; it is valid for 300 s.
const TOKEN_REUSE_S: u64 = 200;

/// A client of one process. Cloning shares its connections.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    base: String,
    http: reqwest::Client,
    tokens: Arc<Mutex<HashMap<String, (String, std::time::Instant)>>>,
}

/// An answer, read to its end.
#[derive(Debug, Clone)]
pub(crate) struct Response {
    /// The status code.
    pub(crate) status: u16,
    /// Every header.
    pub(crate) headers: HeaderMap,
    /// The body as text.
    pub(crate) text: String,
    /// The body as JSON; null when it is none.
    pub(crate) body: Value,
}

impl Response {
    /// Reads an answer to its end.
    pub(crate) async fn read(answer: reqwest::Response) -> Result<Self, reqwest::Error> {
        let (status, headers) = (answer.status().as_u16(), answer.headers().clone());
        let bytes = answer.bytes().await?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        logs::body(&body);
        Ok(Self {
            status,
            headers,
            text,
            body,
        })
    }

    /// The value of a header; empty when there is none or it is not text.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default()
    }

    /// The body, after checking the status.
    #[track_caller]
    pub(crate) fn expect(self, status: u16) -> Value {
        assert_eq!(self.status, status, "the answer was {}", self.text);
        self.body
    }
}

impl Client {
    /// A client of the process at `base` (`http://host:port`). It follows no redirect and uses no proxy.
    pub(crate) fn new(base: &str) -> Self {
        Self::built(base, reqwest::Client::builder())
    }

    /// As `new`, trusting the authority of these tests and no other.
    pub(crate) fn secure(base: &str) -> Self {
        let authority = std::fs::read(CA_FILE).expect("the authority of these tests");
        let authority = reqwest::Certificate::from_pem(&authority).expect("a certificate");
        Self::built(base, reqwest::Client::builder().tls_certs_only([authority]))
    }

    fn built(base: &str, builder: reqwest::ClientBuilder) -> Self {
        let http = builder
            .http1_only()
            .redirect(Policy::none())
            .no_proxy()
            .timeout(ANSWER_MAX)
            .build();
        Self {
            base: base.to_owned(),
            http: http.expect("an HTTP client builds"),
            tokens: Arc::default(),
        }
    }

    /// `GET`, with a bearer token or none.
    pub(crate) async fn get(&self, path: &str, token: Option<&str>) -> Response {
        self.send(self.request(Method::GET, path, token)).await
    }

    /// `POST` of a JSON body.
    pub(crate) async fn post(&self, path: &str, token: Option<&str>, body: &Value) -> Response {
        self.send(json(self.request(Method::POST, path, token), body)).await
    }

    /// `PUT` of a JSON body.
    pub(crate) async fn put(&self, path: &str, token: Option<&str>, body: &Value) -> Response {
        self.send(json(self.request(Method::PUT, path, token), body)).await
    }

    /// A request to be completed by the test: other methods, raw bodies, odd headers.
    pub(crate) fn request(&self, method: Method, path: &str, token: Option<&str>) -> reqwest::RequestBuilder {
        let request = self.http.request(method, format!("{}{path}", self.base));
        match token {
            Some(token) => request.header(AUTHORIZATION, format!("Bearer {token}")),
            None => request,
        }
    }

    /// Sends a request; fails the test when no answer comes.
    pub(crate) async fn send(&self, request: reqwest::RequestBuilder) -> Response {
        self.try_send(request)
            .await
            .unwrap_or_else(|error| panic!("no answer from {}: {error:?}", self.base))
    }

    /// Sends a request whose answer may be lost, as when the process is killed.
    pub(crate) async fn try_send(&self, request: reqwest::RequestBuilder) -> Result<Response, reqwest::Error> {
        Response::read(request.send().await?).await
    }

    /// Publishes one envelope as the service it names.
    pub(crate) async fn publish(&self, envelope: &Envelope) -> Response {
        self.publish_as(envelope.source(), envelope.json()).await
    }

    /// Publishes any body, such as a batch, as the service `slug`.
    pub(crate) async fn publish_as(&self, slug: &str, body: &Value) -> Response {
        self.post("/api/v1/events", Some(&self.service_token(slug)), body).await
    }

    /// As `publish`, when the answer may be lost.
    pub(crate) async fn try_publish(&self, envelope: &Envelope) -> Result<Response, reqwest::Error> {
        self.try_publish_as(envelope.source(), envelope.json()).await
    }

    /// As `publish_as`, when the answer may be lost.
    pub(crate) async fn try_publish_as(&self, slug: &str, body: &Value) -> Result<Response, reqwest::Error> {
        let token = self.service_token(slug);
        let request = self.request(Method::POST, "/api/v1/events", Some(&token));
        self.try_send(json(request, body)).await
    }

    /// A token of the service `slug` with the capabilities of an ordinary service, used again while it is fresh.
    pub(crate) fn service_token(&self, slug: &str) -> String {
        let mut tokens = self.tokens.lock();
        if let Some((token, made)) = tokens.get(slug)
            && made.elapsed().as_secs() < TOKEN_REUSE_S
        {
            return token.clone();
        }
        let token = TokenSpec::service(slug).sign();
        tokens.insert(slug.to_owned(), (token.clone(), std::time::Instant::now()));
        token
    }
}

/// Gives a request a JSON body.
pub(crate) fn json(request: reqwest::RequestBuilder, body: &Value) -> reqwest::RequestBuilder {
    logs::body(body);
    request.header(CONTENT_TYPE, "application/json").body(body.to_string())
}

/// Fails unless the answer is the problem document of `status` and `code`, whole and right; yields the document.
///
/// Every member is judged: the type URL, the title of the status, the legacy `error`, and both ids against the
/// response headers. The per-actor limiter's 429 has a body of its own, without ids.
#[track_caller]
pub(crate) fn assert_problem(response: &Response, status: u16, code: &str) -> Value {
    let document = &response.body;
    assert_eq!(
        (response.status, text(document, "code")),
        (status, code),
        "the answer was {}",
        response.text
    );
    assert_eq!(
        response.header("content-type"),
        "application/problem+json",
        "a problem's content type"
    );
    assert_eq!(document["status"], status, "status: {document}");
    assert_eq!(
        text(document, "type"),
        format!("https://openvibe.network/problems/{code}"),
        "type: {document}"
    );
    let request_id = response.header("x-openvibe-request-id");
    assert!(is_request_id(request_id), "X-OpenVibe-Request-Id: {request_id:?}");
    let trace_id = trace_of(response.header("traceparent"));
    if code == "rate_limited" {
        assert_rate_limited(response);
        return document.clone();
    }
    let title = text(document, "title");
    match title_of(status) {
        Some(expected) => assert_eq!(title, expected, "title: {document}"),
        None => assert!(!title.is_empty(), "title: {document}"),
    }
    let detail = document.get("detail").map_or(title, |_| text(document, "detail"));
    assert!(!detail.is_empty(), "detail: {document}");
    assert_eq!(text(document, "error"), detail, "error repeats the detail: {document}");
    assert_eq!(
        text(document, "request_id"),
        request_id,
        "request_id and its header: {document}"
    );
    assert_eq!(
        Some(text(document, "trace_id")),
        trace_id,
        "trace_id and traceparent: {document}"
    );
    if let Some(errors) = document.get("errors") {
        let errors = errors.as_array().expect("errors is a list");
        assert!(!errors.is_empty(), "errors is left out when there are none: {document}");
        for error in errors {
            assert!(
                text(error, "path").starts_with('/'),
                "an error's path is a JSON pointer: {error}"
            );
            assert!(!text(error, "message").is_empty(), "an error's message: {error}");
        }
    }
    document.clone()
}

#[track_caller]
fn assert_rate_limited(response: &Response) {
    let document = &response.body;
    assert_eq!(text(document, "title"), "Too many requests", "title: {document}");
    assert_eq!(text(document, "error"), "rate_limited", "error: {document}");
    let wait = document["retry_after_seconds"].as_u64().expect("whole seconds to wait");
    assert!(wait >= 1, "retry_after_seconds: {document}");
    assert_eq!(response.header("retry-after"), wait.to_string(), "Retry-After");
    assert_eq!(response.header("cache-control"), "no-store", "Cache-Control");
    assert!(
        document.get("request_id").is_none() && document.get("trace_id").is_none(),
        "no ids: {document}"
    );
}

fn text<'a>(document: &'a Value, member: &str) -> &'a str {
    document[member].as_str().unwrap_or_default()
}

fn is_request_id(id: &str) -> bool {
    (8..=128).contains(&id.len()) && id.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
}

/// The trace id of a well-formed `traceparent`.
pub(crate) fn trace_of(traceparent: &str) -> Option<&str> {
    let hex = |part: &str, length| {
        part.len() == length && part.chars().all(|c| c.is_ascii_digit() || ('a'..='f').contains(&c))
    };
    let parts: Vec<&str> = traceparent.split('-').collect();
    let [version, trace, span, flags] = parts[..] else {
        return None;
    };
    let zero = |part: &str| part.chars().all(|c| c == '0');
    let good = version == "00" && hex(trace, 32) && hex(span, 16) && hex(flags, 2) && !zero(trace) && !zero(span);
    good.then_some(trace)
}

/// The title that the contract fixes for a status.
fn title_of(status: u16) -> Option<&'static str> {
    Some(match status {
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        409 => "Conflict",
        413 => "Payload Too Large",
        422 => "Unprocessable Content",
        429 => "Too Many Requests",
        500 => "Internal Server Error",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        _ => return None,
    })
}
