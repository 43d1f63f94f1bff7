//! Who may call: every route of the API asks for a token that holds its capability before it reads anything else.

use std::time::Duration;

use reqwest::header::CONTENT_TYPE;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    api_world::{Site, consumer, method_of, refused, routes, send},
    support::{
        envelopes::{envelope, id},
        network::{ADMIN_CAP, AUDIENCE, FIRST_KEY, SERVICE_CAPS, TokenSpec},
        wait::within,
    },
};

const PUBLISH: &str = "events.event.publish";
const READ: &str = "events.event.read";
const SUBSCRIBE: &str = "events.subscription.manage";

/// What each route asks for, written down a second time so that no route can lose its guard.
const CAPABILITIES: [(&str, &str, &str); 23] = [
    ("GET", "/api/v1/events", READ),
    ("POST", "/api/v1/events", PUBLISH),
    ("GET", "/api/v1/events/:id", READ),
    ("GET", "/api/v1/checkpoints", READ),
    ("PUT", "/api/v1/checkpoints", READ),
    ("GET", "/api/v1/subscriptions", SUBSCRIBE),
    ("POST", "/api/v1/subscriptions", SUBSCRIBE),
    ("GET", "/api/v1/subscriptions/:id", SUBSCRIBE),
    ("PATCH", "/api/v1/subscriptions/:id", SUBSCRIBE),
    ("POST", "/api/v1/subscriptions/:id/enable", SUBSCRIBE),
    ("POST", "/api/v1/subscriptions/:id/disable", SUBSCRIBE),
    ("POST", "/api/v1/subscriptions/:id/rotate-secret", SUBSCRIBE),
    ("GET", "/api/v1/deliveries", ADMIN_CAP),
    ("POST", "/api/v1/deliveries/replay", ADMIN_CAP),
    ("POST", "/api/v1/deliveries/skip", ADMIN_CAP),
    ("GET", "/api/v1/delivery-policies", ADMIN_CAP),
    ("GET", "/api/v1/delivery-policies/resolve", ADMIN_CAP),
    ("PUT", "/api/v1/delivery-policies/:id", ADMIN_CAP),
    ("DELETE", "/api/v1/delivery-policies/:id", ADMIN_CAP),
    ("GET", "/api/v1/placement", ADMIN_CAP),
    ("GET", "/api/v1/placement/deliveries/:id/:id", ADMIN_CAP),
    ("GET", "/api/v1/carriers", ADMIN_CAP),
    ("PUT", "/api/v1/carriers/:id", ADMIN_CAP),
];

fn all_capabilities() -> Vec<&'static str> {
    SERVICE_CAPS.into_iter().chain([ADMIN_CAP]).collect()
}

#[test]
fn every_route_of_the_service_is_in_the_table_of_capabilities() {
    let served = routes(":id");
    let served: Vec<(&str, &str)> = served.iter().map(|(method, path)| (*method, path.as_str())).collect();
    let known: Vec<(&str, &str)> = CAPABILITIES.iter().map(|(method, path, _)| (*method, *path)).collect();
    assert_eq!(served, known);
}

#[tokio::test]
async fn every_route_refuses_a_caller_without_a_token() {
    let site = Site::shared().await;
    for (method, path) in routes(&id("sub")) {
        let bare = send(site.one(), method, &path, None, "{}".to_owned()).await;
        let document = refused(&bare, 401, "token.missing");
        assert!(
            document["detail"].as_str().unwrap().contains("Authorization"),
            "{method} {path}"
        );
        for value in ["", "Bearer", "Bearer ", "bearer abc", "Basic abc", "Token abc"] {
            let request = site.one().request(method_of(method), &path, None);
            let answer = site.one().send(request.header("authorization", value)).await;
            refused(&answer, 401, "token.missing");
        }
        let garbled = send(site.one(), method, &path, Some("not.a.token"), "{}".to_owned()).await;
        refused(&garbled, 401, "token.malformed");
    }
}

#[tokio::test]
async fn every_route_asks_for_its_own_capability_and_for_no_other() {
    let site = Site::shared().await;
    let slug = consumer();
    for (method, path, capability) in CAPABILITIES {
        let path = path.replace(":id", &id("sub"));
        let others: Vec<&str> = all_capabilities()
            .into_iter()
            .filter(|held| *held != capability)
            .collect();
        for held in [
            others,
            vec![],
            vec!["events.app.publish", "events.app.read"],
            vec!["events.*x"],
        ] {
            let token = TokenSpec::service(&slug).caps(&held).sign();
            let answer = send(site.one(), method, &path, Some(&token), "{}".to_owned()).await;
            let document = refused(&answer, 403, "capability.denied");
            assert!(
                document["detail"].as_str().unwrap().contains(capability),
                "{method} {path}: {document}"
            );
        }
        let family = format!("{}.*", capability.rsplit_once('.').expect("segments").0);
        for held in [capability, family.as_str()] {
            let token = TokenSpec::service(&slug).caps(&[held]).sign();
            let answer = send(site.one(), method, &path, Some(&token), "{}".to_owned()).await;
            assert!(
                !matches!(answer.status, 401 | 403 | 500..),
                "{method} {path} with {held}: {}",
                answer.text
            );
        }
    }
}

#[tokio::test]
async fn no_operators_route_accepts_an_app_and_none_any_principal_but_a_service_or_an_app() {
    let site = Site::shared().await;
    let mut caps = all_capabilities();
    caps.extend(["events.app.publish", "events.app.read", "events.app.subscribe"]);
    let (app, project) = (id("app"), id("prj"));
    let production = TokenSpec::app(&app, &project, "production").caps(&caps).sign();
    let sandbox = TokenSpec::app(&app, &project, "sandbox").caps(&caps).sign();
    let others = [
        TokenSpec::other("mod", &format!("mod:{}", id("mod")), &caps),
        TokenSpec::other("node", &format!("node:{}", id("nod")), &caps),
        TokenSpec::other("agent", &format!("agent:{}", id("agt")), &caps)
            .claim("on_behalf_of", id("usr"))
            .claim("project_id", project.as_str())
            .claim("env", "production"),
    ];
    for ((method, path), (_, _, capability)) in routes(&id("sub")).into_iter().zip(CAPABILITIES) {
        if capability == ADMIN_CAP {
            let answer = send(site.one(), method, &path, Some(&production), "{}".to_owned()).await;
            refused(&answer, 403, "capability.denied");
            let answer = send(site.one(), method, &path, Some(&sandbox), "{}".to_owned()).await;
            refused(&answer, 401, "token.sandbox_refused");
        }
        for other in &others {
            let answer = send(site.one(), method, &path, Some(&other.sign()), "{}".to_owned()).await;
            refused(&answer, 403, "capability.denied");
        }
    }
}

#[tokio::test]
async fn a_token_that_does_not_hold_is_refused_with_the_code_of_its_fault() {
    let site = Site::shared().await;
    let good = || TokenSpec::service("live");
    let cases = [
        (good().signed_by("stranger"), "token.bad_signature"),
        (good().header("alg", "HS256"), "token.malformed"),
        (good().header("alg", "none"), "token.malformed"),
        (good().shifted(-400), "token.expired"),
        (good().shifted(400), "token.expired"),
        (good().claim("iss", "https://other.example"), "token.wrong_issuer"),
        (good().claim("aud", json!(["openvibe.live"])), "token.wrong_audience"),
        (good().claim("aud", AUDIENCE), "token.invalid_claims"),
        (good().without("jti"), "token.invalid_claims"),
        (good().claim("sub", "svc:L"), "token.invalid_claims"),
        (good().claim("actor_type", "app"), "token.invalid_claims"),
        (good().claim("env", "sandbox"), "token.sandbox_refused"),
    ];
    for (spec, code) in cases {
        let event = envelope("live");
        let answer = site
            .one()
            .post("/api/v1/events", Some(&spec.sign()), event.json())
            .await;
        refused(&answer, 401, code);
        assert_eq!(site.traces_of(event.id()).await, 0, "{code}");
    }
    for within_the_skew in [
        good().shifted(-320),
        good().shifted(20),
        good().header("kid", FIRST_KEY),
    ] {
        let event = envelope("live");
        let token = within_the_skew.sign();
        site.one()
            .post("/api/v1/events", Some(&token), event.json())
            .await
            .expect(201);
    }
}

#[tokio::test]
async fn authentication_comes_before_the_body() {
    let site = Site::shared().await;
    let garbage = vec![b'x'; 2 * 1024 * 1024 + 1];
    for (method, path) in routes(&id("sub")).into_iter().filter(|(method, _)| *method != "GET") {
        for content_type in ["application/json", "text/plain"] {
            let request = site.one().request(method_of(method), &path, None);
            let request = request.header(CONTENT_TYPE, content_type).body(garbage.clone());
            refused(&site.one().send(request).await, 401, "token.missing");
        }
        let token = TokenSpec::service("live").caps(&[]).sign();
        let request = site.one().request(method_of(method), &path, Some(&token));
        let request = request.header(CONTENT_TYPE, "application/json").body(garbage.clone());
        refused(&site.one().send(request).await, 403, "capability.denied");
    }

    // The refusal does not wait for a body that never comes.
    let address = site.service().base().trim_start_matches("http://").to_owned();
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head =
        "POST /api/v1/events HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n{";
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut start = [0; 12];
    let answered = within("an answer", Duration::from_secs(5), stream.read_exact(&mut start)).await;
    answered.unwrap();
    assert_eq!(&start, b"HTTP/1.1 401");
}
