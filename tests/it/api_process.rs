//! The process: what it refuses to start with, how it starts beside another, how it stops, what it writes.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    api_world::{consumer, endpoint, send, text},
    support::{
        database::Database,
        envelopes::{batch, envelope, envelopes},
        network::{Network, TokenSpec},
        receiver::{Answer, Receiver},
        service::{Service, start_many},
        wait::{SOON, eventually, within},
    },
};

const EVENTS: &str = "/api/v1/events";

#[tokio::test]
async fn a_bad_configuration_is_refused_with_every_mistake_by_name() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let mistakes = [
        ("PORT", "70000"),
        ("DATABASE_URL", "mysql://root:pgmarker@127.0.0.1/x"),
        ("EVENTS_MAX_PAYLOAD_BYTES", "many"),
        ("EVENTS_MAX_HOPS", "0"),
        ("EVENTS_SOURCE_PREFIXES", r#"{"app-x":["app."]}"#),
        ("EVENTS_SHARED_PREFIXES", "app."),
        ("EVENTS_WORKER", "perhaps"),
        ("EVENTS_BACKOFF_MS", "1,x,2"),
        ("EVENTS_SECRET_KEY", "keymarker"),
        ("EVENTS_ENDPOINT_HOSTS", "http://x/"),
        ("OV_NETWORK_PUBLIC_KEY", "not a key"),
    ];
    let service = Service::spawn(&network, &mistakes);
    let exit = service.wait_exit(SOON).await;
    let log = service.log();
    assert_eq!(exit.code, Some(2), "{log}");
    for (name, _) in mistakes {
        assert!(log.contains(name), "{name} is named in\n{log}");
    }
    for secret in ["pgmarker", "keymarker"] {
        assert!(!log.contains(secret), "{secret} in\n{log}");
    }

    let service = Service::spawn(&network, &[]);
    assert_eq!(service.wait_exit(SOON).await.code, Some(2));
    assert!(service.log().contains("DATABASE_URL"), "{}", service.log());
    drop(database);
}

/// What a database holds: its tables with their columns, and their rows.
async fn content(database: &Database) -> Vec<String> {
    let columns = sqlx::query_scalar(
        "SELECT table_name || '.' || column_name || ' ' || data_type FROM information_schema.columns \
         WHERE table_schema = 'public' ORDER BY 1",
    );
    let rows = sqlx::query_scalar(
        "SELECT e::text FROM events e UNION ALL SELECT m::text FROM ov_migrations m \
         UNION ALL SELECT datname FROM pg_database WHERE datname = current_database()",
    );
    let mut all: Vec<String> = columns.fetch_all(database.pool()).await.expect("the columns");
    all.extend(rows.fetch_all(database.pool()).await.expect("the rows") as Vec<String>);
    all
}

#[tokio::test]
async fn the_database_of_the_old_service_is_refused_and_left_as_it_is() {
    let (database, network) = tokio::join!(Database::empty(), Network::start());
    let old = "CREATE TABLE ov_migrations (name text PRIMARY KEY, applied_at bigint); \
               CREATE TABLE events (seq bigint PRIMARY KEY, id text UNIQUE, payload text); \
               INSERT INTO ov_migrations VALUES ('0001_init.sql', 1); INSERT INTO events VALUES (1, 'evt_x', '{}');";
    sqlx::raw_sql(old)
        .execute(database.pool())
        .await
        .expect("the old tables");
    let before = content(&database).await;
    for _ in 0..2 {
        let service = Service::spawn(&network, &[("DATABASE_URL", database.url())]);
        let exit = service.wait_exit(SOON).await;
        let log = service.log();
        assert!(exit.code.is_some_and(|code| code != 0), "{exit:?}\n{log}");
        assert!(log.contains("openvibe-events import"), "{log}");
        assert_eq!(content(&database).await, before);
    }
}

#[tokio::test]
async fn several_processes_start_on_an_empty_database_at_once() {
    let (database, network) = tokio::join!(Database::empty(), Network::start());
    let services = start_many(&database, &network, 3, &[]).await;
    for service in &services {
        service.client().publish(&envelope("live")).await.expect(201);
    }
    let stored: (i64, i64) = sqlx::query_as(
        "SELECT (SELECT count(*) FROM events), (SELECT count(*) - count(DISTINCT version) FROM _sqlx_migrations)",
    )
    .fetch_one(database.pool())
    .await
    .expect("the counts");
    assert_eq!(stored, (3, 0), "every event, and every migration once");
}

#[tokio::test]
async fn a_stop_answers_the_request_in_flight_and_lets_idle_connections_go() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let service = Service::start(&database, &network, &[]).await;
    let address = service.base().trim_start_matches("http://").to_owned();
    let event = envelope("live");
    let token = service.client().service_token("live");
    // The client keeps an idle connection open all the while.
    service.client().get("/api/health", None).await.expect(200);

    let body = event.json().to_string();
    let (start, rest) = body.split_at(10);
    let mut stream = TcpStream::connect(&address).await.expect("a connection");
    let head = format!(
        "POST {EVENTS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\nExpect: 100-continue\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.expect("the head is sent");
    // The service asks for the body: the request is in its hands.
    let mut asked = [0; 25];
    within("100 Continue", SOON, stream.read_exact(&mut asked))
        .await
        .expect("an interim answer");
    assert_eq!(&asked, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(start.as_bytes()).await.expect("the body begins");

    let stopping = Instant::now();
    let stop = service.terminate();
    let finish = async {
        eventually("no new connection is accepted", SOON, async || {
            TcpStream::connect(&address).await.is_err()
        })
        .await;
        stream.write_all(rest.as_bytes()).await.expect("the body ends");
        let mut answer = String::new();
        within("the answer", SOON, stream.read_to_string(&mut answer))
            .await
            .expect("an answer");
        answer
    };
    let ((exit, _), answer) = tokio::join!(stop, finish);
    assert!(answer.starts_with("HTTP/1.1 201 "), "{answer}");
    assert_eq!(exit.code, Some(0), "{}", service.log());
    assert!(
        stopping.elapsed() < Duration::from_secs(5),
        "nothing was left to wait for: {:?}",
        stopping.elapsed()
    );
    let stored: i64 = sqlx::query_scalar("SELECT count(*) FROM events WHERE id = $1")
        .bind(event.id())
        .fetch_one(database.pool())
        .await
        .expect("the count");
    assert_eq!(stored, 1);
}

#[tokio::test]
async fn a_stop_does_not_wait_for_a_request_that_never_ends() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let service = Service::start(&database, &network, &[]).await;
    let address = service.base().trim_start_matches("http://").to_owned();
    let token = service.client().service_token("live");
    let mut stream = TcpStream::connect(&address).await.expect("a connection");
    let head = format!(
        "POST {EVENTS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n\
         Content-Length: 1000\r\n\r\n{{"
    );
    stream.write_all(head.as_bytes()).await.expect("the head is sent");
    let (exit, took) = service.terminate().await;
    assert_eq!(exit.code, Some(0), "{}", service.log());
    assert!(took < Duration::from_secs(10), "{took:?}");
}

#[tokio::test]
async fn a_stop_says_how_many_attempts_it_had_to_interrupt() {
    let (database, network, receiver) = tokio::join!(Database::create(), Network::start(), Receiver::start());
    let service = Service::start(&database, &network, &[("EVENTS_DELIVERY_TIMEOUT_MS", "60000")]).await;
    receiver.answer_with("/hangs", |_| Answer::hang(204));
    let event = envelope("live");
    let body = json!({ "topic_pattern": event.type_name(), "endpoint": receiver.url("/hangs"), "max_inflight": 2 });
    let client = service.client();
    let token = client.service_token(&consumer());
    client
        .post("/api/v1/subscriptions", Some(&token), &body)
        .await
        .expect(201);
    client.publish(&event).await.expect(201);
    client
        .publish(&envelope("live").event_type(event.type_name()))
        .await
        .expect(201);
    receiver.wait_calls(2, SOON).await;
    let (exit, _) = service.terminate().await;
    let log = service.log();
    assert_eq!(exit.code, Some(0), "{log}");
    assert!(log.contains("2 attempts are interrupted by the stop"), "{log}");
}

#[tokio::test]
async fn a_start_says_once_where_it_listens_and_nothing_of_a_migration_that_was_there() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let service = Service::start(&database, &network, &[]).await;
    let (exit, _) = service.terminate().await;
    let log = service.log();
    assert_eq!(exit.code, Some(0), "{log}");
    assert_eq!(log.matches("listening on").count(), 1, "{log}");
    assert!(!log.contains("_sqlx_migrations"), "{log}");
}

#[tokio::test]
async fn what_is_confidential_is_never_written_to_the_log() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let url = database.url().replacen("postgres@", "postgres:pgmarker@", 1);
    let key = "a2V5bWFya2Vya2V5bWFya2Vya2V5bWFya2Vya2V5bWE="; // 32 bytes
    for filter in ["info", "debug"] {
        let env = [
            ("DATABASE_URL", url.as_str()),
            ("DATABASE_DIRECT_URL", url.as_str()),
            ("EVENTS_SECRET_KEY", key),
            ("EVENTS_LOG", filter),
        ];
        let service = Service::start(&database, &network, &env).await;
        assert!(
            !service.log().contains("EVENTS_SECRET_KEY"),
            "a key that is set needs no words"
        );
        let client = service.client();
        let token = client.service_token("live");
        let slug = consumer();
        let manager = TokenSpec::service(&slug).sign();

        let marked = envelope("live")
            .payload(json!({ "note": "payloadmarker" }))
            .subject("thing", "subjectmarker");
        client.publish(&marked).await.expect(201);
        client
            .publish(&marked.clone().event_type("live.another.type"))
            .await
            .expect(409);
        client.publish(&marked.clone().set("version", 0)).await.expect(422);
        client
            .publish_as("live", &batch(&envelopes("live", 3)))
            .await
            .expect(201);
        let broken = r#"{"payload":"payloadmarker"#.to_owned();
        send(client, "POST", EVENTS, Some(&token), broken).await.expect(400);
        send(client, "POST", EVENTS, Some(&format!("{token}x")), "{}".to_owned())
            .await
            .expect(401);
        client
            .get("/api/v1/events?after=querymarker", Some(&token))
            .await
            .expect(400);
        client
            .get("/api/v1/events?topic=live.*&limit=2", Some(&token))
            .await
            .expect(200);

        let given = "secretmarker".repeat(4);
        let body = json!({ "topic_pattern": "live.*", "endpoint": endpoint("x?key=endpointmarker"), "secret": given });
        let made = client
            .post("/api/v1/subscriptions", Some(&manager), &body)
            .await
            .expect(201);
        let path = format!("/api/v1/subscriptions/{}/rotate-secret", text(&made, "id"));
        let rotated: Value = client.post(&path, Some(&manager), &json!({})).await.expect(200);
        client
            .post(&path, Some(&manager), &json!({ "secret": "secretmarker" }))
            .await
            .expect(422);
        // An attempt at a delivery that fails.
        client
            .publish(&envelope("live").payload(json!({ "note": "payloadmarker" })))
            .await
            .expect(201);
        let attempted = "SELECT count(*) FROM deliveries WHERE attempt > 0";
        eventually("a delivery was attempted", SOON, async || {
            let tries: Result<i64, _> = sqlx::query_scalar(attempted).fetch_one(database.pool()).await;
            tries.is_ok_and(|tries| tries > 0)
        })
        .await;
        // A failure inside: its cause is logged, and nothing of the request.
        sqlx::raw_sql("ALTER TABLE idempotency_receipts RENAME TO hidden")
            .execute(database.pool())
            .await
            .expect("hidden");
        client
            .publish(&envelope("live").payload(json!({ "note": "payloadmarker" })))
            .await
            .expect(500);
        sqlx::raw_sql("ALTER TABLE hidden RENAME TO idempotency_receipts")
            .execute(database.pool())
            .await
            .expect("back");
        let (exit, _) = service.terminate().await;

        let log = service.log();
        assert_eq!(exit.code, Some(0), "{log}");
        assert!(log.contains("events.internal"), "the failure was logged:\n{log}");
        let signature = token.rsplit('.').next().expect("three parts");
        for marker in [
            "payloadmarker",
            "subjectmarker",
            "secretmarker",
            "querymarker",
            "endpointmarker",
            "pgmarker",
            key,
            "whsec_",
            text(&rotated, "secret"),
            signature,
            "Bearer ey",
        ] {
            assert!(!log.contains(marker), "{marker} at {filter} in\n{log}");
        }
        sqlx::raw_sql("TRUNCATE subscriptions; TRUNCATE deliveries; TRUNCATE events; TRUNCATE idempotency_receipts")
            .execute(database.pool())
            .await
            .expect("an empty start");
    }
}
