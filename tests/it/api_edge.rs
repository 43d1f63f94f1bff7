//! What every answer has in common, and the routes that tell how the service is.

use std::time::Duration;

use reqwest::{Method, header::CONTENT_TYPE};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    api_world::{Site, consumer, operator, raw, refused, routes, send, text},
    support::{
        client::{Response, trace_of},
        contracts::assert_valid,
        database::Database,
        envelopes::{batch, envelope, envelopes, id},
        network::{KeyMode, Network, TokenSpec},
        proxy::Proxy,
        service::Service,
        wait::{SOON, eventually, within},
        wire::Wire,
    },
};

const EVENTS: &str = "/api/v1/events";

async fn ready(site: &Site) -> Response {
    site.one().get("/api/ready", None).await
}

#[tokio::test]
async fn health_says_that_the_process_answers() {
    let site = Site::shared().await;
    let answer = site.one().get("/api/health", None).await;
    assert_valid("service.health@1", &answer.clone().expect(200));
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(
        answer.text,
        format!(r#"{{"status":"ok","service":"openvibe-events","version":"{version}"}}"#)
    );
}

#[tokio::test]
async fn readiness_shows_every_member_in_order_and_the_figures_of_the_log() {
    let site = Site::own(1, &[("RELEASE_COMMIT", "0123456789abcdef0123456789abcdef01234567")]).await;
    let slug = consumer();
    site.subscribe(&slug, "live.*", "a").await;
    site.one()
        .publish_as("live", &batch(&envelopes("live", 3)))
        .await
        .expect(201);
    let answer = ready(&site).await;
    assert_eq!(answer.header("cache-control"), "no-store");
    let report = answer.clone().expect(200);
    assert_valid("service.ready@1", &report);
    let members = [
        "ready",
        "status",
        "service",
        "release",
        "checked_at",
        "failed",
        "degraded",
        "skipped",
        "checks",
        "latest_seq",
        "deliveries",
        "worker",
        "realtime_connections",
    ];
    assert_eq!(
        report.as_object().map(serde_json::Map::len),
        Some(members.len()),
        "{report}"
    );
    let places: Vec<_> = members
        .iter()
        .map(|member| answer.text.find(&format!("\"{member}\":")))
        .collect();
    assert!(
        places.iter().all(Option::is_some) && places.is_sorted(),
        "{}",
        answer.text
    );
    assert_eq!(text(&report, "release"), "0123456789ab");
    assert_eq!(report["latest_seq"], 3);
    assert_eq!(
        report["deliveries"],
        json!({ "pending": 3, "failed": 0, "delivered": 0, "dead": 0 })
    );
    assert_eq!(
        report["worker"],
        json!({ "enabled": false, "running": false, "inflight": 0, "busy_subscriptions": 0, "last_tick_at": null })
    );
    let names: Vec<&String> = report["checks"].as_object().expect("checks").keys().collect();
    assert_eq!(names, ["db", "dlq", "network_jwks"], "no worker runs here: {report}");
    for (name, required) in [("db", true), ("network_jwks", true), ("dlq", false)] {
        let check = &report["checks"][name];
        assert_eq!(
            (&check["status"], &check["required"]),
            (&json!("ok"), &json!(required)),
            "{name}"
        );
    }
}

#[tokio::test]
async fn readiness_is_degraded_while_more_deliveries_are_dead_than_allowed() {
    let site = Site::own(1, &[("EVENTS_DLQ_DEGRADED_AT", "2")]).await;
    for (dead, status) in [(2, "ready"), (3, "degraded"), (1, "ready")] {
        site.run(&format!(
            "DELETE FROM delivery_counts; INSERT INTO delivery_counts (owner, role, period, dead) VALUES ('', '', 0, {dead})"
        ))
        .await;
        let report = ready(&site).await.expect(200);
        assert_valid("service.ready@1", &report);
        assert_eq!(
            (&report["ready"], text(&report, "status")),
            (&json!(true), status),
            "{dead} dead"
        );
        let degraded = if status == "degraded" {
            json!(["dlq"])
        } else {
            json!([])
        };
        assert_eq!((&report["degraded"], &report["failed"]), (&degraded, &json!([])));
        assert_eq!(
            report["checks"]["dlq"]["detail"],
            json!({ "depth": dead, "threshold": 2 })
        );
    }
}

#[tokio::test]
async fn without_a_signing_key_nothing_is_judged_and_readiness_says_so() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    network.answer_keys(KeyMode::Down);
    let env = [("DATABASE_URL", database.url()), ("EVENTS_WORKER", "off")];
    let service = Service::spawn(&network, &env);
    let client = service.client();
    eventually("the process answers", SOON, async || {
        client
            .try_send(client.request(Method::GET, "/api/health", None))
            .await
            .is_ok()
    })
    .await;
    let answer = client.get("/api/ready", None).await;
    let report = answer.expect(503);
    assert_valid("service.ready@1", &report);
    assert_eq!(
        (&report["ready"], text(&report, "status")),
        (&json!(false), "not_ready")
    );
    assert_eq!(report["failed"], json!(["network_jwks"]));
    assert_eq!(report["checks"]["network_jwks"]["status"], "fail");
    assert!(!text(&report["checks"]["network_jwks"], "error").is_empty());
    for (method, path) in routes(&id("sub")) {
        let answer = send(client, method, &path, Some(&operator()), "{}".to_owned()).await;
        refused(&answer, 503, "token.unavailable");
        assert!(
            answer.header("retry-after").parse::<u64>().is_ok_and(|wait| wait >= 1),
            "{method} {path}"
        );
        refused(
            &send(client, method, &path, None, "{}".to_owned()).await,
            401,
            "token.missing",
        );
    }
}

/// A service whose way to the database leads through a proxy, and what both of them need.
async fn behind_a_proxy() -> ((Database, Network), Proxy, Service) {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let proxy = Proxy::start(&database.server()).await;
    let url = database.url_through(proxy.address());
    let env = [
        ("DATABASE_URL", url.as_str()),
        ("DATABASE_DIRECT_URL", url.as_str()),
        ("EVENTS_WORKER", "off"),
    ];
    let service = Service::start(&database, &network, &env).await;
    ((database, network), proxy, service)
}

#[tokio::test]
async fn a_publish_that_a_silent_database_never_answers_is_told_not_now() {
    let (_kept, proxy, service) = behind_a_proxy().await;
    let client = service.client();
    let token = TokenSpec::service("live").sign();
    let event = envelope("live");
    proxy.stall();
    let answer = send(client, "POST", EVENTS, Some(&token), event.json().to_string()).await;
    refused(&answer, 503, "events.unavailable");
    proxy.restore();
    eventually("the same event is stored once the database answers", SOON, async || {
        let answer = send(client, "POST", EVENTS, Some(&token), event.json().to_string()).await;
        matches!(answer.status, 200 | 201)
            .then_some(())
            .ok_or(format!("{answer:?}"))
    })
    .await;
}

#[tokio::test]
async fn without_the_database_every_route_says_not_now_and_all_recover() {
    let (_kept, proxy, service) = behind_a_proxy().await;
    let client = service.client();
    proxy.cut();
    let everything = TokenSpec::service("live").caps(&["events.event.*", "events.subscription.*", "events.delivery.*"]);
    let token = everything.sign();
    let sub = id("sub");
    let bodies = |path: &str| match path {
        EVENTS => envelope("live").json().clone(),
        "/api/v1/checkpoints" => json!({ "topic": "live.*", "cursor": "c1.0.MA" }),
        "/api/v1/subscriptions" => json!({ "topic_pattern": "live.*", "endpoint": "http://127.0.0.1:9/" }),
        path if path.starts_with("/api/v1/delivery-policies/") => {
            json!({ "class": "bulk", "durability": "none", "delivery_semantics": "at_least_once" })
        }
        path if path.starts_with("/api/v1/carriers/") => json!({ "disabled": false }),
        _ => json!({ "subscription_id": sub, "from_seq": 0 }),
    };
    // How carriers stand, a process knows by itself.
    let asks = |(method, path): &(&str, String)| (*method, path.as_str()) != ("GET", "/api/v1/carriers");
    for (method, path) in routes(&sub).into_iter().filter(asks) {
        let body = bodies(&path).to_string();
        let path = match path
            .replace(&format!("{EVENTS}/{sub}"), &format!("{EVENTS}/{}", id("evt")))
            .replace(&format!("policies/{sub}"), "policies/live.*")
            .replace(&format!("carriers/{sub}"), "carriers/pg-v1")
            .replace(
                &format!("deliveries/{sub}/{sub}"),
                &format!("deliveries/{}/{sub}", id("evt")),
            )
            .as_str()
        {
            "/api/v1/delivery-policies/resolve" => "/api/v1/delivery-policies/resolve?event_type=live.x".to_owned(),
            "/api/v1/checkpoints" if method == "GET" => "/api/v1/checkpoints?topic=live.*".to_owned(),
            "/api/v1/placement" => "/api/v1/placement?event_type=live.x".to_owned(),
            other => other.to_owned(),
        };
        let answer = send(client, method, &path, Some(&token), body).await;
        refused(&answer, 503, "events.unavailable");
        assert!(
            answer.header("retry-after").parse::<u64>().is_ok_and(|wait| wait >= 1),
            "{method} {path}"
        );
    }
    let report = client.get("/api/ready", None).await.expect(503);
    assert_valid("service.ready@1", &report);
    assert_eq!(report["failed"], json!(["db"]), "{report}");
    assert_eq!(
        (&report["latest_seq"], &report["deliveries"]),
        (&Value::Null, &Value::Null)
    );
    client.get("/api/health", None).await.expect(200);
    assert!(
        client.get("/metrics", None).await.text.contains("http_requests_total"),
        "the rest is still measured"
    );

    proxy.restore();
    eventually("publishing works again", SOON, async || {
        client.publish(&envelope("live")).await.status == 201
    })
    .await;
    service.wait_ready().await;
}

#[tokio::test]
async fn a_read_that_the_database_holds_up_is_answered_in_bounded_time() {
    let site = Site::own(1, &[]).await;
    let mut holder = site.pool.begin().await.expect("a transaction");
    sqlx::raw_sql("LOCK TABLE events IN ACCESS EXCLUSIVE MODE")
        .execute(&mut *holder)
        .await
        .expect("the table is locked");
    let token = site.one().service_token("live");
    let path = format!("{EVENTS}?topic=live.*");
    let answer = site.one().get(&path, Some(&token));
    let answer = within("an answer", Duration::from_secs(25), answer).await;
    refused(&answer, 503, "events.unavailable");
    assert!(answer.header("retry-after").parse::<u64>().is_ok_and(|wait| wait >= 1));
    holder.rollback().await.expect("the table is free");
    eventually("reading works again", SOON, async || {
        site.one().get(&path, Some(&token)).await.status == 200
    })
    .await;
}

#[tokio::test]
async fn metrics_are_for_direct_callers_of_this_machine_only() {
    let site = Site::own(1, &[]).await;
    site.one().publish(&envelope("live")).await.expect(201);
    let stored = format!("{EVENTS}/{}", id("evt"));
    site.one().get(&stored, Some(&site.one().service_token("live"))).await;
    site.one().get("/never/heard/of", None).await;
    let answer = site.one().get("/metrics", None).await;
    assert_eq!(answer.status, 200);
    assert_eq!(
        answer.header("content-type"),
        "text/plain; version=0.0.4; charset=utf-8"
    );
    assert!(
        !answer.text.contains("evt_") && !answer.text.contains("heard"),
        "no ids and no foreign paths in labels"
    );
    let line = |name: &str, holds: &[&str]| {
        let found = answer
            .text
            .lines()
            .find(|line| line.starts_with(name) && holds.iter().all(|part| line.contains(part)));
        found
            .unwrap_or_else(|| panic!("no {name} with {holds:?} in {}", answer.text))
            .to_owned()
    };
    assert!(line("http_requests_total", &["method=\"POST\"", "/api/v1/events", "2xx"]).ends_with(" 1"));
    line("http_requests_total", &["/api/v1/events/", "4xx"]);
    line("http_requests_total", &["route=\"unmatched\""]);
    line("http_request_duration_seconds_bucket", &["le=\"0.005\""]);
    assert!(line("events_latest_seq", &[]).ends_with(" 1"));
    assert!(line("events_dlq_depth", &[]).ends_with(" 0"));
    line("events_deliveries", &["status=\"pending\""]);
    line("release_info", &["service=\"events\""]);
    line("process_uptime_seconds", &[]);

    for name in [
        "X-Forwarded-For",
        "x-forwarded-host",
        "Forwarded",
        "Via",
        "X-Real-IP",
        "CF-Connecting-IP",
        "True-Client-IP",
        "X-Client-IP",
        "X-Original-Forwarded-For",
    ] {
        for value in ["127.0.0.1", "for=127.0.0.1", "203.0.113.9", ""] {
            let request = site.one().request(Method::GET, "/metrics", None).header(name, value);
            let answer = site.one().send(request).await;
            refused(&answer, 404, "events.not_found");
        }
    }
}

#[tokio::test]
async fn a_path_in_another_spelling_names_nothing() {
    let site = Site::shared().await;
    let slug = consumer();
    let held = site.subscribe(&slug, "live.*", "spelling").await;
    let subscription = format!("/api/v1/subscriptions/{}", text(&held, "id"));
    let own = TokenSpec::service(&slug)
        .caps(&["events.event.*", "events.subscription.*", "events.delivery.*"])
        .sign();
    let mut wire = Wire::to(site.service()).await;
    let mut ask = async |target: &str| {
        let request = format!("GET {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {own}\r\n\r\n");
        wire.ask(request).await.expect("an answer")
    };
    for path in [
        "/metrics",
        "/api/ready",
        "/api/health",
        EVENTS,
        "/api/v1/deliveries",
        subscription.as_str(),
    ] {
        let plain = ask(path).await;
        assert_eq!(plain.status, 200, "{path}: {plain:?}");
        let absolute = ask(&format!("http://elsewhere:81{path}?x=%2f..")).await;
        assert_eq!(
            absolute.status, 200,
            "the host and the query are no part of the path: {absolute:?}"
        );
        let (start, last) = path.rsplit_once('/').expect("a slash");
        let (first, rest) = last.split_at(1);
        for other in [
            format!("/{path}"),
            format!("{start}//{last}"),
            format!("{path}/"),
            format!("{path}//"),
            format!("/.{path}"),
            format!("{start}/./{last}"),
            format!("{start}/x/../{last}"),
            format!("{start}/x/%2e%2e/{last}"),
            format!("{path}/."),
            format!("{path}/.."),
            format!("{start}%2f{last}"),
            format!("{start}%2F{last}"),
            format!("{start}/%2f{last}"),
            format!("{start}\\{last}"),
            format!("{start}%5c{last}"),
            format!("{path};x=1"),
            format!("{path};"),
            format!("{path}%00"),
            format!("{path}%20"),
            format!("{path}%0a"),
            format!("{path}%3f"),
            format!("{path}%23"),
            format!("{path}%"),
            format!("{path}.json"),
            format!("{start}/{}{rest}", first.to_uppercase()),
            path.to_uppercase(),
        ]
        .iter()
        .filter(|other| other.starts_with('/'))
        {
            let answer = ask(other).await;
            assert_eq!(
                (answer.status, answer.body["code"].as_str()),
                (404, Some("events.not_found")),
                "{other}: {answer:?}"
            );
        }
        // A route without a parameter has no other spelling either.
        if path != subscription {
            let encoded = format!("{start}/%{:02x}{rest}", first.as_bytes()[0]);
            assert_eq!(ask(&encoded).await.status, 404, "{encoded}");
        }
    }
    // A parameter is decoded once, and then judged.
    let id = text(&held, "id");
    let (head, tail) = id.split_at(4);
    let once = ask(&format!("/api/v1/subscriptions/%73ub_{tail}")).await;
    assert_eq!((once.status, text(&once.body, "id")), (200, id), "{head}");
    assert!(once.head.contains("cache-control: no-store"), "{once:?}");
    assert_eq!(ask(&format!("/api/v1/subscriptions/%2573ub_{tail}")).await.status, 404);
}

#[tokio::test]
async fn every_answer_carries_a_request_id_and_a_traceparent() {
    let site = Site::shared().await;
    let token = site.one().service_token("live");
    let body = envelope("live").json().to_string();
    let cases = [
        ("POST", EVENTS, Some(token.as_str()), body.as_str(), 201),
        ("POST", EVENTS, Some(token.as_str()), body.as_str(), 200),
        ("POST", EVENTS, Some(token.as_str()), "{", 400),
        ("POST", EVENTS, None, "{}", 401),
        ("GET", "/api/v1/deliveries", Some(token.as_str()), "", 403),
        ("GET", "/nothing", None, "", 404),
        ("DELETE", EVENTS, Some(token.as_str()), "", 404),
        ("BREW", EVENTS, Some(token.as_str()), "", 404),
        ("OPTIONS", EVENTS, None, "", 404),
        ("GET", "/api/v1/events/%ff", Some(token.as_str()), "", 404),
        ("GET", "/api/health", None, "", 200),
        ("GET", "/api/ready", None, "", 200),
        ("GET", "/metrics", None, "", 200),
        ("HEAD", "/api/health", None, "", 200),
        ("HEAD", "/nothing", None, "", 404),
    ];
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    for (method, path, token, body, status) in cases {
        let method: Method = method.parse().expect("a method");
        let ask = |id: &str| {
            let request = site
                .one()
                .request(method.clone(), path, token)
                .header("x-openvibe-request-id", id);
            let request = request.header("traceparent", format!("00-{trace}-00f067aa0ba902b7-01"));
            site.one()
                .send(request.header(CONTENT_TYPE, "application/json").body(body.to_owned()))
        };
        let answer = ask("caller.chosen_id-1").await;
        // The second publish of the same body is a duplicate.
        assert_eq!(answer.status, status, "{method} {path}: {}", answer.text);
        assert_eq!(
            answer.header("x-openvibe-request-id"),
            "caller.chosen_id-1",
            "{method} {path}"
        );
        assert_eq!(trace_of(answer.header("traceparent")), Some(trace), "{method} {path}");
        assert!(
            !answer.header("traceparent").contains("00f067aa0ba902b7"),
            "a span of its own"
        );
        assert_eq!(answer.header("x-content-type-options"), "nosniff", "{method} {path}");
        for absent in [
            "server",
            "x-powered-by",
            "access-control-allow-origin",
            "www-authenticate",
        ] {
            assert_eq!(answer.header(absent), "", "{method} {path}: {absent}");
        }
        let longest = "i".repeat(128);
        assert_eq!(ask(&longest).await.header("x-openvibe-request-id"), longest);
        for bad in ["short", "with space", "slash/slash", &"i".repeat(129), "quote\"quote"] {
            let made = ask(bad).await.header("x-openvibe-request-id").to_owned();
            let random = made.strip_prefix("req_").unwrap_or_default();
            assert!(
                random.len() == 24 && random.bytes().all(|b| b.is_ascii_hexdigit()),
                "{bad}: {made}"
            );
        }
    }
}

#[tokio::test]
async fn an_unknown_route_and_a_wrong_method_are_problem_documents() {
    let site = Site::shared().await;
    for (method, path) in [
        ("GET", "/x"),
        ("PUT", EVENTS),
        ("POST", "/api/ready"),
        ("GET", "/api/v1/deliveries/replay"),
    ] {
        let request = site
            .one()
            .request(method.parse().expect("a method"), path, Some(&operator()));
        refused(&site.one().send(request).await, 404, "events.not_found");
    }
}

#[tokio::test]
async fn a_request_whose_end_is_unclear_is_refused_and_nothing_after_it_is_answered() {
    let site = Site::shared().await;
    let smuggled = "GET /api/health HTTP/1.1\r\nHost: x\r\n\r\n";
    for framing in [
        "Content-Length: 3\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: gzip, chunked",
        "Content-Length: 3\r\nContent-Length: 4",
    ] {
        let request = format!(
            "POST {EVENTS} HTTP/1.1\r\nHost: x\r\nX-OpenVibe-Request-Id: caller-1\r\n{framing}\r\n\r\n0\r\n\r\n{smuggled}"
        );
        let answer = raw(site.service(), request.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 400 "), "{framing}: {answer}");
        assert_eq!(answer.matches("HTTP/1.1").count(), 1, "{framing}: {answer}");
        let lower = answer.to_lowercase();
        assert!(
            lower.contains("x-openvibe-request-id: caller-1") && lower.contains("traceparent: 00-"),
            "{answer}"
        );
        let (_, body) = answer.split_once("\r\n\r\n").expect("a body");
        let document: Value = serde_json::from_str(body).expect("JSON");
        assert_valid("errors.problem@1", &document);
        assert_eq!(document["code"], "events.bad_request");
    }
    site.one().get("/api/health", None).await.expect(200);
}

#[tokio::test]
async fn a_head_that_cannot_be_read_is_refused_with_a_document_and_the_connection_closed() {
    let site = Site::shared().await;
    let get = |headers: &str| format!("GET /api/health HTTP/1.1\r\nHost: x\r\n{headers}\r\n");
    for (request, status, title) in [
        (
            get(&format!("A: {}\r\n", "a".repeat(70 * 1024))),
            431,
            "Request Header Fields Too Large",
        ),
        (get(&"A: b\r\n".repeat(100)), 431, "Request Header Fields Too Large"),
        (
            format!("GET /{}", "a".repeat(70 * 1024)),
            431,
            "Request Header Fields Too Large",
        ),
        (get("no header\r\n"), 400, "Bad Request"),
        ("GET /api/health\r\n\r\n".to_owned(), 400, "Bad Request"),
    ] {
        let answer = raw(site.service(), request.as_bytes()).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a body");
        let document: Value = serde_json::from_str(body).expect("JSON");
        assert_valid("errors.problem@1", &document);
        assert_eq!(
            (text(&document, "code"), text(&document, "title")),
            ("events.bad_request", title)
        );
        let head = head.to_lowercase();
        assert!(
            head.contains(&format!("x-openvibe-request-id: {}", text(&document, "request_id"))),
            "{answer}"
        );
        assert!(
            head.contains("traceparent: 00-") && head.contains("connection: close"),
            "{answer}"
        );
    }
}

#[tokio::test]
async fn callers_that_do_not_read_their_pages_make_pages_short_and_stop_nobody() {
    let site = Site::own(1, &[]).await;
    let reader = site.one().service_token(&consumer());
    let large = envelopes("live", 90).into_iter();
    let large: Vec<_> = large
        .map(|event| event.payload(json!({ "text": "x".repeat(60_000) })))
        .collect();
    for part in large.chunks(30) {
        site.one().publish_as("live", &batch(part)).await.expect(201);
    }
    let page = async |query: &str| {
        let page = site
            .one()
            .get(&format!("{EVENTS}?limit=1000{query}"), Some(&reader))
            .await
            .expect(200);
        let ids = page["events"].as_array().expect("a list").iter();
        let ids: Vec<String> = ids.map(|item| text(&item["event"], "event_id").to_owned()).collect();
        (ids, text(&page, "next_cursor").to_owned())
    };
    let (whole, _) = page("").await;
    assert!(
        (60..90).contains(&whole.len()),
        "a page ends at about 4 MiB: {} events",
        whole.len()
    );

    let mut deaf = Vec::new();
    for _ in 0..20 {
        let mut wire = Wire::narrow(site.service()).await;
        wire.send(format!(
            "GET {EVENTS}?limit=1000 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {reader}\r\n\r\n"
        ))
        .await;
        deaf.push(wire);
    }
    let next = eventually("pages are short", SOON, async || {
        let (ids, next) = page("").await;
        (ids.len() < 10).then(|| {
            assert_eq!(ids, whole[..ids.len()], "the beginning of the page");
            (ids.len(), next)
        })
    })
    .await;
    let (ids, _) = page(&format!("&after={}", next.1)).await;
    assert_eq!(ids[0], whole[next.0], "the next page goes on where the short one ended");
    site.one().publish(&envelope("live")).await.expect(201);

    drop(deaf);
    eventually("pages are whole again", SOON, async || {
        page("").await.0.len() == whole.len()
    })
    .await;
}

#[tokio::test]
async fn head_is_answered_like_get_without_a_body() {
    let site = Site::shared().await;
    let token = site.one().service_token("live");
    let bearer = format!("Authorization: Bearer {token}\r\n");
    for (path, headers, status) in [
        ("/api/health", "", 200),
        ("/api/ready", "", 200),
        ("/api/v1/events?limit=1", bearer.as_str(), 200),
        ("/api/v1/events?limit=0", bearer.as_str(), 400),
        ("/api/v1/events", "", 401),
        ("/api/v1/subscriptions", bearer.as_str(), 200),
        ("/nothing", "", 404),
    ] {
        let request = format!("HEAD {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n");
        let answer = raw(site.service(), request.as_bytes()).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{path}: {answer}");
        assert!(answer.ends_with("\r\n\r\n"), "no body: {path}: {answer}");
        let lower = answer.to_lowercase();
        assert!(
            lower.contains("content-length: ") && !lower.contains("content-length: 0"),
            "{path}: {answer}"
        );
        assert!(lower.contains("x-openvibe-request-id: "), "{path}: {answer}");
    }
}

#[tokio::test]
async fn a_connection_outlives_the_refusals_on_it() {
    let site = Site::shared().await;
    let address = site.service().base().trim_start_matches("http://").to_owned();
    let mut stream = TcpStream::connect(address).await.expect("a connection");
    let token = site.one().service_token("live");
    let bearer = format!("Authorization: Bearer {token}");
    let post = |body: &str| {
        let length = body.len();
        format!(
            "POST {EVENTS} HTTP/1.1\r\nHost: x\r\n{bearer}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        )
    };
    let good = envelope("live").json().to_string();
    for (request, status) in [
        (post("{"), 400),
        ("GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(), 404),
        (format!("GET {EVENTS} HTTP/1.1\r\nHost: x\r\n\r\n"), 401),
        (post("{}"), 422),
        (
            format!("GET {EVENTS}?limit=0 HTTP/1.1\r\nHost: x\r\n{bearer}\r\n\r\n"),
            400,
        ),
        (post(&good), 201),
        (post(&good), 200),
    ] {
        stream
            .write_all(request.as_bytes())
            .await
            .expect("the connection is open");
        let answer = within("an answer", Duration::from_secs(10), one_answer(&mut stream)).await;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{request}\n{answer}"
        );
    }
}

/// One answer of a declared length, from a connection that stays open.
async fn one_answer(stream: &mut TcpStream) -> String {
    let mut seen = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&seen).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head
                .to_lowercase()
                .lines()
                .find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
            if body.len() >= length.unwrap_or(0) {
                return text;
            }
        }
        let read = stream.read_buf(&mut seen).await.expect("the answer is read");
        assert_ne!(read, 0, "closed after {text:?}");
    }
}
