//! Content that tries to be more than content, requests that try to be something else, pages of elsewhere; and what of
//! all that a log may keep.

use reqwest::{Method, RequestBuilder};
use serde_json::json;

use crate::support::{
    client::{Client, Response, assert_problem, json as with_json},
    database::Database,
    envelopes::{envelope, id},
    ledger::cursor_of,
    network::{Network, TokenSpec},
    service::{Service, start_many},
    sse::{Sse, after, ask},
    wire::Wire,
};

const TYPE: &str = "live.hostile.said";
const TOPICS: &str = "topics=live.hostile.*";
const OURS: &str = "https://www.openvibe.events";

async fn process(env: &[(&str, &str)]) -> (Service, Network, Database) {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let service = Service::start(&database, &network, env).await;
    (service, network, database)
}

/// Texts that would begin a line, a field or a frame, were they not kept inside JSON.
const TEXTS: [&str; 10] = [
    "\n\ndata: {\"event\":{}}\n\n",
    "\r\rid: c1.0.MQ\r\r",
    "\r\n\r\nevent: gap\r\ndata: {}\r\n\r\n",
    "\u{2028}\u{2029}\u{85}\u{b}\u{c}\u{1c}\u{1d}\u{1e}",
    "\u{feff}: hb",
    "\\n\\r\\u000a",
    "\u{1}\u{7f}\t\u{8}",
    "retry: 1",
    "</script><!--",
    "\u{1f4a9}\u{0}",
];

#[tokio::test(flavor = "multi_thread")]
async fn what_was_published_begins_no_line_and_arrives_as_it_was() {
    let (service, _network, _database) = process(&[]).await;
    let client = service.client();
    let token = TokenSpec::service("reader").sign();
    let mut stream = Sse::of(client, TOPICS, Some(&token)).await;
    let mut published = Vec::new();
    for text in TEXTS {
        let event = envelope("live")
            .event_type(TYPE)
            .visibility("public")
            .subject(&format!("thing{text}"), text)
            .payload(json!({ text: [text, { "a\nb": text }], "n": 1.5 }));
        // White space between the tokens as well.
        let body = serde_json::to_string_pretty(event.json())
            .expect("JSON")
            .replace('\n', "\r\n");
        let request = client.request(Method::POST, "/api/v1/events", Some(&client.service_token("live")));
        let answer = client
            .send(request.header("Content-Type", "application/json").body(body))
            .await;
        match answer.status {
            201 => published.push(event),
            // A database cannot keep every character.
            _ => assert!(text.contains('\0') && answer.status == 422, "{text:?}: {}", answer.text),
        }
    }
    assert!(published.len() >= TEXTS.len() - 1);
    let mut resumed = Sse::open(after(ask(client, TOPICS, None), Some(&cursor_of(0, 0))))
        .await
        .expect("a stream");
    for event in &published {
        for stream in [&mut stream, &mut resumed] {
            let given = stream.event().await;
            for member in ["event_id", "subject", "payload"] {
                assert_eq!(given[member], event.json()[member]);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn odd_requests_are_refused_by_name_or_begin_at_the_head() {
    let (service, _network, _database) = process(&[]).await;
    let client = service.client();
    let old = envelope("live").event_type(TYPE).visibility("public");
    client.publish(&old).await.expect(201);
    let many = (0..21).map(|n| format!("live.t{n}")).collect::<Vec<_>>().join(",");
    for (query, code) in [
        ("topics=%zz", "realtime.bad_request"),
        ("topics=live.*%", "realtime.bad_request"),
        ("topics=live.*&x=%f", "realtime.bad_request"),
        ("topics=%ff%fe", "realtime.bad_request"),
        ("topics=live.*&topics=live.*", "realtime.bad_request"),
        ("topics=live.*&last_event_id=&last_event_id=", "realtime.bad_request"),
        ("topics=live.*%0d%0aX-Evil:%201", "realtime.bad_topic"),
        ("topics=live.*%00", "realtime.bad_topic"),
        ("topics=user:usr_01JAB2C3D4E5F6G7H8J9K0MNPQ", "realtime.bad_topic"),
        ("topics=live.*.*.x", "realtime.bad_topic"),
        (&format!("topics={many}"), "realtime.too_many_topics"),
        (&format!("topics={}", "x".repeat(10_000)), "realtime.bad_topic"),
    ] {
        let refusal = Sse::open(ask(client, query, None)).await.expect_err("a refusal");
        assert_problem(&refusal, 400, code);
        assert_eq!(refusal.header("x-evil"), "", "{query}");
    }
    let ticket_twice = format!("{TOPICS}&ticket=&ticket=x");
    let refusal = Sse::open(ask(client, &ticket_twice, None))
        .await
        .expect_err("a refusal");
    assert_problem(&refusal, 401, "ticket.invalid");

    // Twenty, the same one many times, empty ones: fine.
    let twenty = (0..19).map(|n| format!("live.t{n}")).collect::<Vec<_>>().join(",");
    let same = "live.hostile.*,,".repeat(30);
    let mut streams = Vec::new();
    for query in [format!("topics={twenty},live.hostile.*"), format!("topics={same}")] {
        streams.push(Sse::of(client, &query, None).await);
    }
    // No positions, so these begin at the head.
    let head = cursor_of(0, 0);
    for position in [
        "0",
        "1",
        "-1",
        "c1.0",
        "c1.0.",
        "c1.0.MA==",
        "c1.-1.MA",
        "c01.0.MA",
        "c1.00.MA",
        "C1.0.MA",
        "c1.0.MA.",
        "c1.0.%4dA%0a%0aid:1",
        "c1.0.OTk5OTk5OTk5OTk5OTk5OTk5OTk5OTk5",
        &"9".repeat(5000),
        "%F0%9F%99%82",
        "NaN",
        "c1.0.LTE",
        "c1.0.MDE",
    ] {
        let query = format!("{TOPICS}&last_event_id={position}");
        streams.push(Sse::of(client, &query, None).await);
    }
    for header in [
        &b"\xff\xfe"[..],
        b"c1.0.MA\tx",
        b"c1.0.MA, c1.0.MA",
        b"\"c1.0.MA\"",
        &[b'c'; 8_000],
    ] {
        let request = ask(client, TOPICS, None).header("Last-Event-ID", header);
        streams.push(Sse::open(request).await.expect("a stream"));
    }
    // The header counts where both are there.
    let both = ask(client, &format!("{TOPICS}&last_event_id={head}"), None).header("Last-Event-ID", "nothing");
    streams.push(Sse::open(both).await.expect("a stream"));
    let new = envelope("live").event_type(TYPE).visibility("public");
    client.publish(&new).await.expect(201);
    for stream in &mut streams {
        assert_eq!(stream.event_id().await, new.id());
    }
    // And this one is a position.
    let query = format!("{TOPICS}&last_event_id=%20{head}%20");
    assert_eq!(Sse::of(client, &query, None).await.event_id().await, old.id());

    let long = ask(client, TOPICS, None).header("Last-Event-ID", "c".repeat(100_000));
    let refused = Sse::try_open(long).await;
    assert!(!matches!(refused, Ok(Ok(_))), "a stream with a head that large");
    for method in [Method::HEAD, Method::POST, Method::PUT, Method::DELETE] {
        let answer = client
            .send(client.request(method.clone(), &format!("/realtime/stream?{TOPICS}"), None))
            .await;
        assert_eq!(answer.status, 404, "{method}");
    }
    let mut wire = Wire::to(&service).await;
    let split = wire
        .ask("GET /realtime/stream?topics=live.*\nX: y HTTP/1.1\r\nHost: x\r\n\r\n")
        .await;
    assert!(split.is_none_or(|reply| reply.status == 400));
}

/// Refusals of every kind, each asked for by a page of `origin`.
async fn refusals(client: &Client, origin: &str) -> Vec<Response> {
    let with = |request: RequestBuilder| request.header("Origin", origin);
    let mut all = Vec::new();
    for request in [
        ask(client, "topics=A", None),
        ask(client, "topics=%zz", None),
        ask(client, &format!("{TOPICS}&ticket=x"), None),
        ask(client, TOPICS, Some("x")),
        ask(client, TOPICS, Some(&TokenSpec::service("live").caps(&[]).sign())),
        ask(client, TOPICS, None),
    ] {
        all.push(Sse::open(with(request)).await.expect_err("a refusal"));
    }
    all.push(
        client
            .send(with(client.request(Method::POST, "/realtime/stream", None)))
            .await,
    );
    let statuses: Vec<u16> = all.iter().map(|answer| answer.status).collect();
    assert_eq!(statuses, [400, 400, 401, 401, 403, 503, 404]);
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_tell_pages_of_ours_why_and_others_nothing() {
    let (service, _network, _database) = process(&[("REALTIME_MAX_CONNECTIONS", "0")]).await;
    let client = service.client();
    for refusal in refusals(client, OURS).await {
        assert_eq!(refusal.header("access-control-allow-origin"), OURS, "{}", refusal.text);
        assert_eq!(refusal.header("access-control-allow-credentials"), "true");
        assert_eq!(refusal.header("vary"), "Origin");
    }
    for refusal in refusals(client, "https://evil.example").await {
        assert_eq!(refusal.header("access-control-allow-origin"), "", "{}", refusal.text);
        assert_eq!(refusal.header("access-control-allow-credentials"), "");
        assert_eq!(refusal.header("vary"), "Origin");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_pages_that_are_trusted_can_be_listed() {
    let (service, _network, _database) = process(&[
        ("REALTIME_ORIGIN_HOSTS", "openvibe.events,*.openvibe.tv"),
        ("REALTIME_CORS_ORIGINS", "http://127.0.0.1:5173"),
    ])
    .await;
    let client = service.client();
    for (origin, trusted) in [
        ("https://openvibe.events", true),
        ("https://openvibe.tv", true),
        ("https://a.b.openvibe.tv", true),
        ("http://127.0.0.1:5173", true),
        ("https://www.openvibe.events", false),
        ("https://openvibe.live", false),
        ("https://evilopenvibe.tv", false),
        ("https://openvibe.tv.evil.example", false),
        ("https://openvibe.tv:8443", false),
        ("https://openvibe.tv.", false),
        ("https://openvibe.tv@evil.example", false),
        ("http://openvibe.tv", false),
        ("http://127.0.0.1:5174", false),
        ("null", false),
    ] {
        let asked = ask(client, TOPICS, None).header("Origin", origin);
        let stream = Sse::open(asked).await.expect("a stream, whoever asks");
        let preflight = client
            .request(Method::OPTIONS, &format!("/realtime/stream?{TOPICS}"), None)
            .header("Origin", origin)
            .header("Access-Control-Request-Method", "GET");
        let preflight = client.send(preflight).await;
        assert_eq!(preflight.status, 204);
        for headers in [&stream.headers, &preflight.headers] {
            let allowed = headers
                .get("access-control-allow-origin")
                .map(|value| value.to_str().expect("text"));
            assert_eq!(allowed, trusted.then_some(origin), "{origin}");
            assert_eq!(
                headers.contains_key("access-control-allow-credentials"),
                trusted,
                "{origin}"
            );
            assert_eq!(headers["vary"], "Origin");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_level_of_the_log_has_a_ticket_a_token_or_a_query() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    for format in ["human", "json"] {
        let env = [
            ("EVENTS_LOG", "trace"),
            ("EVENTS_LOG_FORMAT", format),
            ("REALTIME_MAX_CONNECTIONS", "1"),
        ];
        let services = start_many(&database, &network, 1, &env).await;
        let service = &services[0];
        let client = service.client();
        let person = id("usr");
        let ticket = TokenSpec::ticket(&person).sign();
        let session = TokenSpec::person(&person).sign();
        let over = TokenSpec::ticket(&person).shifted(-1000).sign();
        let reader = TokenSpec::service("reader").sign();
        let marked = |rest: &str| format!("{TOPICS}&mark=secretmark{rest}");
        {
            let _open = Sse::of(client, &marked(&format!("&ticket={ticket}")), Some(&session)).await;
            // Full, used, invalid, expired, none of these, and what cannot be read.
            for (rest, token) in [
                (format!("&ticket={ticket}"), None),
                (format!("&ticket={over}"), None),
                (format!("&ticket={session}"), None),
                (format!("&last_event_id={}", cursor_of(7, 1)), Some(&session)),
                (format!("&x=%zz&ticket={ticket}"), None),
                (String::new(), Some(&ticket)),
                (String::new(), Some(&reader)),
            ] {
                let request = ask(client, &marked(&rest), token.map(String::as_str))
                    .header("Cookie", format!("ov_token={session}"))
                    .header("Origin", OURS);
                Sse::open(request).await.expect_err("a refusal");
            }
        }
        let event = envelope("live")
            .event_type(TYPE)
            .payload(json!({ "text": "secretmark" }));
        let publish = with_json(
            client.request(
                Method::POST,
                "/api/v1/events?mark=secretmark",
                Some(&client.service_token("live")),
            ),
            event.json(),
        );
        assert_eq!(client.send(publish).await.status, 201);
        let mut wire = Wire::to(service).await;
        wire.ask(format!(
            "GET /realtime/stream?{} HTTP/1.1\r\nbroken\r\n\r\n",
            marked(&ticket)
        ))
        .await;
        let mut wire = Wire::to(service).await;
        wire.ask(format!("GET /realtime/stream?{} HTTP/9.9\r\n\r\n", marked(&ticket)))
            .await;
        let (exit, _) = service.terminate().await;
        assert_eq!(exit.code, Some(0));
        let log = service.log();
        assert!(
            log.contains("TRACE") || log.contains("\"trace\""),
            "it was written at every level"
        );
        let signature = |token: &str| token.rsplit('.').next().expect("three parts").to_owned();
        let secrets = [&ticket, &session, &over, &reader].map(|token| signature(token));
        for secret in secrets
            .iter()
            .map(String::as_str)
            .chain(["secretmark", "eyJ", "ticket="])
        {
            let line = log.lines().find(|line| line.contains(secret));
            assert_eq!(line, None, "{secret}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn where_nobody_in_particular_may_follow_nobody_does() {
    let (service, _network, _database) = process(&[("REALTIME_ALLOW_ANONYMOUS", "false")]).await;
    let client = service.client();
    let expired = TokenSpec::person(&id("usr")).shifted(-4000).sign();
    for request in [
        ask(client, TOPICS, None),
        ask(client, TOPICS, None).header("Cookie", format!("ov_token={expired}")),
    ] {
        assert_problem(&Sse::open(request).await.expect_err("a refusal"), 401, "token.missing");
    }
    let person = TokenSpec::person(&id("usr")).sign();
    Sse::of(client, TOPICS, Some(&person)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_position_that_is_sent_twice_is_refused_and_refusals_are_counted() {
    let (service, _network, _database) = process(&[]).await;
    let client = service.client();
    let stream = Sse::of(client, TOPICS, None).await;
    let twice = ask(client, TOPICS, None)
        .header("Last-Event-ID", cursor_of(0, 1))
        .header("Last-Event-ID", cursor_of(0, 2));
    assert_problem(
        &Sse::open(twice).await.expect_err("a refusal"),
        400,
        "realtime.bad_request",
    );
    let metrics = client.get("/metrics", None).await.text;
    let counted = |class: &str| {
        let labels = format!("route=\"/realtime/stream\",status_class=\"{class}\"}} ");
        let line = metrics
            .lines()
            .find(|line| line.starts_with("http_requests_total") && line.contains(&labels));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
    };
    assert_eq!(
        (counted("4xx"), counted("2xx"), counted("aborted")),
        (Some(1), None, None)
    );
    drop(stream);
}
