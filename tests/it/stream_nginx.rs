//! The shipped nginx configuration in front of two processes: streams pass unbuffered, tickets stay out of every log, and
//! only what is public is there.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::json;

use crate::{
    api_world::operator,
    support::{
        client::{Client, assert_problem},
        database::Database,
        envelopes::{Envelope, envelope, id},
        network::{Network, TokenSpec},
        nginx::Nginx,
        service::{Service, start_many},
        sse::{Part, Sse, after, ask},
        wait::{SOON, eventually, within},
        wire::Wire,
    },
};

const TYPE: &str = "live.front.said";
const TOPICS: &str = "topics=live.front.*";
/// What passes "at once".
const AT_ONCE: Duration = Duration::from_millis(300);

struct Front {
    nginx: Nginx,
    services: Vec<Service>,
    client: Client,
    _network: Network,
    _database: Database,
}

impl Front {
    async fn start(env: &[(&str, &str)]) -> Self {
        let (database, network) = tokio::join!(Database::create(), Network::start());
        let services = start_many(&database, &network, 2, env).await;
        let nginx = Nginx::start(&services).await;
        Self {
            client: Client::secure(nginx.secure()),
            nginx,
            services,
            _network: network,
            _database: database,
        }
    }
}

fn public() -> Envelope {
    envelope("live").event_type(TYPE).visibility("public")
}

#[tokio::test(flavor = "multi_thread")]
async fn events_and_heartbeats_pass_at_once_and_a_stream_is_resumed() {
    let front = Front::start(&[("REALTIME_HEARTBEAT_MS", "400")]).await;
    let client = &front.client;
    let mut stream = Sse::of(client, TOPICS, None).await;
    assert_eq!(stream.headers["content-type"], "text/event-stream; charset=utf-8");
    let mut took = Vec::new();
    for _ in 0..10 {
        let event = public();
        // Through nginx as well.
        client.publish(&event).await.expect(201);
        let began = Instant::now();
        assert_eq!(stream.event_id().await, event.id());
        took.push(began.elapsed());
    }
    println!("from the answer to the stream behind nginx: {took:?}");
    assert!(took.iter().all(|took| *took < AT_ONCE), "{took:?}");
    let mut beats = Vec::new();
    for _ in 0..4 {
        assert!(matches!(
            within("a heartbeat", SOON, stream.next()).await,
            Part::Frame(_)
        ));
        beats.push(Instant::now());
    }
    let apart: Vec<Duration> = beats.windows(2).map(|two| two[1] - two[0]).collect();
    assert!(
        apart.iter().all(|apart| *apart > Duration::from_millis(100)),
        "held and sent together: {apart:?}"
    );

    let last = stream.last_cursor().to_owned();
    drop(stream);
    let missed = [public(), public()];
    for event in &missed {
        client.publish(event).await.expect(201);
    }
    // By header and by parameter, by whichever process nginx asks.
    for n in 0..4 {
        let resumed = match n % 2 {
            0 => after(ask(client, TOPICS, None), Some(&last)),
            _ => ask(client, &format!("{TOPICS}&last_event_id={last}"), None),
        };
        let mut resumed = Sse::open(resumed).await.expect("a stream");
        for event in &missed {
            assert_eq!(resumed.event_id().await, event.id());
        }
    }
    // Whoever leaves is noticed behind nginx, too.
    eventually("no stream is left", SOON, async || {
        let mut open = 0.0;
        for service in &front.services {
            open += crate::fabric_world::metric(service.client(), "events_realtime_connections").await;
        }
        (open < 0.5).then_some(()).ok_or(open)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_log_has_a_ticket_a_token_or_a_query_whatever_becomes_of_the_request() {
    let front = Front::start(&[]).await;
    let client = &front.client;
    let person = id("usr");
    let ticket = TokenSpec::ticket(&person).sign();
    let session = TokenSpec::person(&person).sign();
    let query = format!("{TOPICS}&ticket={ticket}&mark=secretmark");
    Sse::of(client, &query, None).await;
    assert_problem(
        &Sse::open(ask(client, &query, None)).await.expect_err("a refusal"),
        401,
        "ticket.used",
    );
    let referred = ask(client, &query, Some(&session))
        .header("Referer", format!("https://openvibe.live/?{query}"))
        .header("User-Agent", "secretmark")
        .header("Cookie", format!("ov_token={session}"));
    assert!(Sse::open(referred).await.is_err());
    // Refused by nginx itself: closed paths, bodies too large, methods, heads too long, the other port.
    for path in ["/realtime/stream/", "/realtime", "/metrics", "/api/v1/deliveries"] {
        let path = format!("{path}?{query}");
        assert_eq!(client.get(&path, Some(&session)).await.status, 404, "{path}");
    }
    let target = format!("/realtime/stream?{query}");
    let large = client.request(Method::POST, &target, None).body("x".repeat(4 << 20));
    client.try_send(large).await.ok();
    let long = client
        .request(Method::GET, &target, None)
        .header("X-Long", "x".repeat(60_000));
    // It may close on a head that is too long before that was sent.
    if let Ok(refusal) = client.try_send(long).await {
        assert!(refusal.status >= 400);
    }
    let plain = Client::new(front.nginx.plain());
    let moved = plain.get(&target, None).await;
    assert_eq!(
        (moved.status, moved.header("location")),
        (301, "https://openvibe.events/realtime/stream")
    );
    let split = plain.get(&format!("/a%0d%0aX-Evil:1?{query}"), None).await;
    assert!(split.header("x-evil").is_empty() && !split.header("location").contains(['\r', '\n']));
    let mut wire = Wire::to_address(front.nginx.plain().trim_start_matches("http://")).await;
    wire.ask(format!("GET {target} HTTP/1.1\r\nbroken\r\n\r\n")).await;
    // More at a time than one address may open.
    let mut open = Vec::new();
    let limited = within("nginx limits", SOON, async {
        loop {
            let some = (0..50).map(|_| Sse::open(ask(client, &format!("{TOPICS}&mark=secretmark"), None)));
            for answer in join_all(some).await {
                match answer {
                    Ok(stream) => open.push(stream),
                    Err(refusal) => return refusal.status,
                }
            }
        }
    });
    assert_eq!(limited.await, 429);
    drop(open);
    // And while nobody is behind it.
    for service in &front.services {
        service.kill().await;
    }
    eventually("nobody is behind it", SOON, async || {
        let status = Sse::open(ask(client, &query, None))
            .await
            .expect_err("a refusal")
            .status;
        // Its own limits are in the way at first.
        (status == 502 || status == 504).then_some(()).ok_or(status)
    })
    .await;

    let access = front.nginx.access_log();
    assert!(access.contains("\"GET /realtime/stream HTTP/1.1\" 200"), "{access}");
    assert!(access.contains("\"GET /realtime/stream HTTP/1.1\" 401"), "{access}");
    let logs = front.nginx.logs();
    let signature = |token: &str| token.rsplit('.').next().expect("three parts").to_owned();
    for secret in [
        "secretmark",
        "topics",
        "ticket=",
        "eyJ",
        &signature(&ticket),
        &signature(&session),
    ] {
        let line = logs.lines().find(|line| line.contains(secret));
        assert_eq!(line, None, "{secret}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_public_is_there_and_everything_else_is_not() {
    let front = Front::start(&[]).await;
    let client = &front.client;
    let token = TokenSpec::service("reader").sign();
    for (path, status) in [
        ("/api/health", 200),
        ("/api/ready", 200),
        ("/release.json", 200),
        ("/limits.json", 200),
        ("/api/v1/events?topic=live.*", 200),
        ("/api/v1/subscriptions", 200),
        ("/api/v1/checkpoints?topic=live.*", 200),
    ] {
        let answer = client.get(path, Some(&token)).await;
        assert_eq!(answer.status, status, "{path}: {}", answer.text);
        assert_eq!(answer.header("x-content-type-options"), "nosniff", "{path}");
        assert!(
            answer.header("strict-transport-security").contains("max-age="),
            "{path}"
        );
    }
    let unknown = client.get(&format!("/api/v1/events/{}", id("evt")), Some(&token)).await;
    assert_problem(&unknown, 404, "events.not_found");

    // An operator's token opens none of these from outside, by whatever spelling.
    let operator = operator();
    let own = front.services[0].client();
    own.get("/api/v1/deliveries", Some(&operator)).await.expect(200);
    for path in [
        "/metrics",
        "/metrics/",
        "/internal",
        "/api/",
        "/api/v1/deliveries",
        "/api/v1/deliveries/replay",
        "/api/v1/delivery-policies",
        "/api/v1/delivery-policies/resolve?event_type=live.stream.started",
        "/api/v1/placement?event_type=live.stream.started",
        "/api/v1/carriers",
        "/api/v1/resources",
        "/api/v1/eventsx",
        "/release-metrics",
        "/realtime/stream/x",
        "/api/v1/events/%2e%2e/deliveries",
        "/api/v1/events/..%2fdeliveries",
        "/api/v1//deliveries",
        "//api/v1/deliveries",
        "/api/health/..%2f..%2fmetrics",
    ] {
        let answer = client.get(path, Some(&operator)).await;
        assert_eq!(answer.status, 404, "{path}: {}", answer.text);
        assert_eq!(answer.header("x-openvibe-request-id"), "", "{path} was passed on");
    }
    // One path as nginx reads it, another as it is written.
    let policy = json!({ "class": "domain", "durability": "required", "delivery_semantics": "at_most_once" });
    for path in [
        "/api/v1/delivery-policies/x%2f..%2f..%2fevents",
        "/api/v1/delivery-policies/live.*%2f..%2f..%2fevents%2fx",
        "/api/v1/carriers/x%2f..%2f..%2fsubscriptions%2fx",
    ] {
        let answer = client.put(path, Some(&operator), &policy).await;
        assert_problem(&answer, 404, "events.not_found");
    }
    let kept = own.get("/api/v1/delivery-policies", Some(&operator)).await.expect(200);
    assert_eq!(kept["policies"], json!([]));
    // What a caller says of its address is not passed on; and the service tells who came through nginx.
    let event = public();
    let request = client
        .request(Method::POST, "/api/v1/events", Some(&client.service_token("live")))
        .header("X-Forwarded-For", "127.0.0.1")
        .header("Content-Type", "application/json")
        .body(event.json().to_string());
    assert_eq!(client.send(request).await.status, 201);
}
