//! The edge as a caller sees it, without sockets.

use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::header::CONTENT_LENGTH;
use axum::http::{HeaderValue, Method, Response, StatusCode};
use axum::routing::{get, post};
use futures_util::future::{BoxFuture, FutureExt};
use http_body_util::BodyExt;
use serde_json::Value;
use tower::ServiceExt;

use super::health::{StoredVitals, Vitals};
use super::query::PathOf;
use super::server::Peer;
use super::{body, layers, metrics};
use crate::domain::deliveries::{Waiting, WorkerState};
use crate::problem::{ApiError, Cause};
use crate::telemetry::Metrics;

/// A service with one route that reads a body of at most 64 bytes.
pub(super) fn small() -> Router {
    layers(
        Router::new()
            .route(
                "/echo",
                post(|request: Request| async { body::read_json(request, 64).await }),
            )
            .route("/items/{id}", get(|PathOf(id): PathOf<String>| async { id }))
            .route("/panic", get(|| async { panic!("hunter2") as &'static str }))
            .route("/denied", get(|| async { ([("cache-control", "no-store")], denied()) })),
    )
}

fn denied() -> ApiError {
    ApiError::CapabilityDenied("the token does not hold events.event.read".into())
}

async fn ask(request: axum::http::request::Builder, body: impl Into<Body>) -> (Response<()>, Bytes) {
    let response = small().oneshot(request.body(body.into()).unwrap()).await.unwrap();
    let (parts, body) = response.into_parts();
    (
        Response::from_parts(parts, ()),
        body.collect().await.unwrap().to_bytes(),
    )
}

fn problem(response: &Response<()>, body: &[u8], status: u16, code: &str) -> Value {
    assert_eq!(response.headers()["content-type"], "application/problem+json");
    let document: Value = serde_json::from_slice(body).unwrap();
    assert_eq!(
        (response.status().as_u16(), document["code"].as_str()),
        (status, Some(code)),
        "{document}"
    );
    assert_eq!(
        document["request_id"],
        response.headers()["x-openvibe-request-id"].to_str().unwrap()
    );
    let trace = response.headers()["traceparent"]
        .to_str()
        .unwrap()
        .split('-')
        .nth(1)
        .unwrap()
        .to_owned();
    assert_eq!(document["trace_id"], trace.as_str());
    assert_eq!(response.headers()["x-content-type-options"], "nosniff");
    document
}

#[tokio::test]
async fn the_callers_ids_come_back_on_every_answer_and_bad_ones_are_replaced() {
    let trace = "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-00";
    for path in ["/items/1", "/nowhere", "/panic", "/denied"] {
        let request = Request::get(path)
            .header("traceparent", trace)
            .header("x-openvibe-request-id", "my.request-1");
        let (response, _) = ask(request, "").await;
        assert_eq!(response.headers()["x-openvibe-request-id"], "my.request-1", "{path}");
        let sent = response.headers()["traceparent"].to_str().unwrap();
        assert!(
            sent.starts_with("00-4bf92f3577b34da6a3ce929d0e0e4736-") && sent.ends_with("-00"),
            "{sent}"
        );
        assert!(!sent.contains("00f067aa0ba902b7"), "the span is ours: {sent}");
    }
    let request = Request::get("/items/1")
        .header("traceparent", "00-0-0-0")
        .header("x-openvibe-request-id", "short");
    let (response, _) = ask(request, "").await;
    assert!(
        response.headers()["x-openvibe-request-id"]
            .to_str()
            .unwrap()
            .starts_with("req_")
    );
    assert!(response.headers()["traceparent"].to_str().unwrap().ends_with("-01"));
}

#[tokio::test]
async fn an_unknown_route_and_a_wrong_method_are_the_same_404() {
    for (method, path) in [
        ("GET", "/nowhere"),
        ("DELETE", "/echo"),
        ("PUT", "/items/1"),
        ("BREW", "/echo"),
    ] {
        let (response, body) = ask(Request::builder().method(method).uri(path), "").await;
        problem(&response, &body, 404, "events.not_found");
    }
}

#[tokio::test]
async fn a_panic_is_a_500_that_tells_nothing() {
    let (response, body) = ask(Request::get("/panic"), "").await;
    let document = problem(&response, &body, 500, "events.internal");
    assert!(!document.to_string().contains("hunter2"));
}

#[tokio::test]
async fn a_refusal_keeps_the_headers_its_handler_set() {
    let (response, body) = ask(Request::get("/denied"), "").await;
    problem(&response, &body, 403, "capability.denied");
    assert_eq!(response.headers()["cache-control"], "no-store");
}

#[tokio::test]
async fn head_is_get_without_a_body() {
    for (path, status) in [("/items/1", 200), ("/denied", 403), ("/nowhere", 404)] {
        let (response, body) = ask(Request::head(path), "").await;
        assert_eq!((response.status().as_u16(), body.len()), (status, 0), "{path}");
        assert_ne!(response.headers()[CONTENT_LENGTH], "0", "{path}");
    }
}

#[tokio::test]
async fn a_path_that_cannot_be_decoded_names_nothing() {
    for path in ["/items/%ff", "/items/%zz", "/items/%"] {
        let (response, body) = ask(Request::get(path), "").await;
        problem(&response, &body, 404, "events.not_found");
    }
    let (_, body) = ask(Request::get("/items/live.%2A"), "").await;
    assert_eq!(body, "live.*");
}

fn json() -> axum::http::request::Builder {
    Request::post("/echo").header("content-type", "application/json")
}

#[tokio::test]
async fn json_bodies_come_through_as_they_were_sent_and_an_empty_one_is_an_empty_object() {
    for kind in [
        "application/json",
        "APPLICATION/JSON; Charset=\"UTF-8\"",
        "application/cloudevents+json;x=y",
    ] {
        let (response, body) = ask(Request::post("/echo").header("content-type", kind), r#"{ "a": 1.0 }"#).await;
        assert_eq!(
            (response.status(), &body[..]),
            (StatusCode::OK, &br#"{ "a": 1.0 }"#[..]),
            "{kind}"
        );
    }
    let (_, body) = ask(Request::post("/echo"), "").await;
    assert_eq!(body, "{}");
    let chunked = Body::from_stream(futures_util::stream::iter([Ok::<_, axum::Error>(Bytes::new())]));
    let (_, body) = ask(Request::post("/echo").header("content-encoding", "gzip"), chunked).await;
    assert_eq!(body, "{}");
}

#[tokio::test]
async fn what_is_not_json_in_utf_8_is_a_415() {
    let kinds = [
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/json; charset=latin1",
        "application/+json",
    ];
    for kind in kinds {
        let (response, body) = ask(Request::post("/echo").header("content-type", kind), "{}").await;
        problem(&response, &body, 415, "events.unsupported_media_type");
    }
    for request in [
        Request::post("/echo"),
        json().header("content-type", "application/json"),
    ] {
        let (response, body) = ask(request, "{}").await;
        problem(&response, &body, 415, "events.unsupported_media_type");
    }
    for encoding in ["br", "gzip, gzip", "zstd"] {
        let (response, body) = ask(json().header("content-encoding", encoding), "{}").await;
        problem(&response, &body, 415, "events.unsupported_media_type");
    }
}

#[tokio::test]
async fn a_body_that_is_no_json_document_is_a_400() {
    let deep = format!("{}{}", "[".repeat(32), "]".repeat(31));
    for text in ["{", "1", "\"text\"", "null", "{}{}", "[1,]", &deep] {
        let (response, body) = ask(json(), text.to_owned()).await;
        problem(&response, &body, 400, "events.bad_json");
    }
    let (response, body) = ask(json(), &b"{\"a\":\"\xff\"}"[..]).await;
    problem(&response, &body, 400, "events.bad_json");
}

#[tokio::test]
async fn the_limit_counts_real_bytes_before_and_after_unpacking() {
    let exact = format!("[{}]", " ".repeat(62));
    assert_eq!(ask(json(), exact.clone()).await.0.status(), 200);
    let (response, body) = ask(json(), format!("{exact} ")).await;
    assert_eq!(problem(&response, &body, 413, "events.batch_too_large")["limit"], 64);
    let undeclared = Body::from_stream(futures_util::stream::iter(
        (0..65).map(|_| Ok::<_, axum::Error>(Bytes::from(" "))),
    ));
    let (response, body) = ask(json(), undeclared).await;
    problem(&response, &body, 413, "events.batch_too_large");
    // 40 bytes that unpack to 2000, and a packed body of which 64 bytes are not yet the whole.
    let (response, body) = ask(json().header("content-encoding", "gzip"), BOMB).await;
    problem(&response, &body, 413, "events.batch_too_large");
    let padding = [BOMB, &[0; 64]].concat();
    let (response, body) = ask(json().header("content-encoding", "gzip"), padding).await;
    problem(&response, &body, 413, "events.batch_too_large");
}

#[tokio::test]
async fn packed_bodies_are_unpacked_and_damaged_ones_are_a_400() {
    for (encoding, bytes) in [
        ("gzip", PACKED_GZIP),
        ("GZIP", PACKED_GZIP),
        ("deflate", PACKED_DEFLATE),
    ] {
        let (response, body) = ask(json().header("content-encoding", encoding), bytes).await;
        assert_eq!(
            (response.status().as_u16(), &body[..]),
            (200, &br#"{"a":1}"#[..]),
            "{encoding}"
        );
        let (response, body) = ask(json().header("content-encoding", encoding), &bytes[..bytes.len() - 3]).await;
        problem(&response, &body, 400, "events.bad_json");
        let (response, body) = ask(json().header("content-encoding", encoding), r#"{"a":1}"#).await;
        problem(&response, &body, 400, "events.bad_json");
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_never_ends_is_given_up() {
    let stream = futures_util::stream::once(async { Ok::<_, axum::Error>(Bytes::from("{")) });
    let endless = Body::from_stream(futures_util::StreamExt::chain(stream, futures_util::stream::pending()));
    let (response, body) = ask(json(), endless).await;
    problem(&response, &body, 400, "events.bad_json");
}

#[tokio::test]
async fn a_body_that_breaks_off_is_a_400() {
    let parts = [Ok(Bytes::from("{")), Err(axum::Error::new("reset"))];
    let (response, body) = ask(json(), Body::from_stream(futures_util::stream::iter(parts))).await;
    problem(&response, &body, 400, "events.bad_json");
}

struct NoStore;

impl Vitals for NoStore {
    fn stored(&self) -> BoxFuture<'static, Result<StoredVitals, Cause>> {
        async { Err("down".into()) }.boxed()
    }
    fn waiting(&self) -> BoxFuture<'static, Result<Waiting, Cause>> {
        async { Err("down".into()) }.boxed()
    }
    fn worker(&self) -> WorkerState {
        WorkerState::default()
    }
    fn realtime_connections(&self) -> u64 {
        0
    }
}

#[tokio::test]
async fn metrics_are_for_direct_callers_on_this_machine() {
    let router = layers(metrics::routes(Metrics::install(), Arc::new(NoStore)));
    let ask = async |peer: &str, header: Option<&'static str>| {
        let mut request = Request::get("/metrics").body(Body::empty()).unwrap();
        request.extensions_mut().insert(Peer(peer.parse().unwrap()));
        if let Some(header) = header {
            request
                .headers_mut()
                .insert(header, HeaderValue::from_static("127.0.0.1"));
        }
        router.clone().oneshot(request).await.unwrap()
    };
    for peer in ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
        let response = ask(peer, None).await;
        assert_eq!(response.status(), 200, "{peer}");
        assert_eq!(
            response.headers()["content-type"],
            "text/plain; version=0.0.4; charset=utf-8"
        );
        assert_eq!(response.headers()["cache-control"], "no-store");
    }
    for peer in ["10.0.0.1:1", "[::ffff:10.0.0.1]:1", "[fe80::1]:1"] {
        assert_eq!(ask(peer, None).await.status(), 404, "{peer}");
    }
    for header in [
        "x-forwarded-for",
        "x-forwarded-host",
        "forwarded",
        "x-real-ip",
        "cf-connecting-ip",
        "true-client-ip",
    ] {
        assert_eq!(ask("127.0.0.1:1", Some(header)).await.status(), 404, "{header}");
    }
    let unknown = Request::get("/metrics")
        .method(Method::GET)
        .body(Body::empty())
        .unwrap();
    assert_eq!(
        router.clone().oneshot(unknown).await.unwrap().status(),
        404,
        "a caller without an address"
    );
}

/// `[`, 1998 spaces, `]`, in gzip.
const BOMB: &[u8] = &[
    31, 139, 8, 0, 0, 0, 0, 0, 2, 3, 139, 86, 24, 5, 163, 96, 20, 140, 130, 81, 48, 10, 70, 193, 16, 7, 177, 0, 145,
    111, 170, 124, 208, 7, 0, 0,
];
/// `{"a":1}` in gzip.
const PACKED_GZIP: &[u8] = &[
    31, 139, 8, 0, 0, 0, 0, 0, 2, 3, 171, 86, 74, 84, 178, 50, 172, 5, 0, 175, 172, 27, 86, 7, 0, 0, 0,
];
/// `{"a":1}` in zlib, which is what HTTP calls deflate.
const PACKED_DEFLATE: &[u8] = &[120, 156, 171, 86, 74, 84, 178, 50, 172, 5, 0, 8, 42, 2, 9];
