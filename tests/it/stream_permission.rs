//! Permission that ends while a stream is open: with the session that opened it, or when the network withdraws a
//! person's sessions.

use std::time::{Duration, Instant};

use reqwest::RequestBuilder;
use serde_json::json;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::{
    fabric_world::metric,
    support::{
        client::{Client, assert_problem},
        database::Database,
        envelopes::{Envelope, batch, envelope, id},
        ledger::cursor_of,
        network::{Network, TokenSpec, unix_now},
        service::{Service, start_many},
        sse::{Part, Sse, ask},
        wait::{SOON, eventually, within},
        wire::Wire,
    },
};

const TOPICS: &str = "topics=live.*,network.notification.*";

/// The ways in which a token comes to a stream.
#[derive(Debug, Clone, Copy, PartialEq)]
enum By {
    Bearer,
    Cookie,
    Ticket,
}

const WAYS: [By; 3] = [By::Bearer, By::Cookie, By::Ticket];

fn asked(client: &Client, by: By, token: &str) -> RequestBuilder {
    match by {
        By::Bearer => ask(client, TOPICS, Some(token)),
        By::Cookie => ask(client, TOPICS, None).header("Cookie", format!("theme=dark; ov_token={token}")),
        By::Ticket => ask(client, &format!("{TOPICS}&ticket={token}"), None),
    }
}

/// A token of a person that was issued so many seconds ago.
fn issued(by: By, person: &str, seconds_ago: i64) -> String {
    match by {
        By::Ticket => TokenSpec::ticket(person)
            .claim("exp", unix_now() + 290)
            .shifted(-seconds_ago)
            .sign(),
        By::Bearer | By::Cookie => TokenSpec::person(person)
            .claim("exp", unix_now() + 900)
            .shifted(-seconds_ago)
            .sign(),
    }
}

async fn opened(client: &Client, by: By, token: &str) -> Sse {
    let stream = Sse::open(asked(client, by, token)).await.expect("a stream");
    assert_eq!(stream.viewer, "user", "{by:?}");
    stream
}

fn notification(person: &str) -> Envelope {
    envelope("network")
        .event_type("network.notification.created")
        .subject("user", person)
        .visibility("subject")
}

/// What the network publishes when what was issued to a person before a moment holds no longer.
fn withdrawal(person: &str, seconds_ago: u64) -> Envelope {
    let moment = OffsetDateTime::from_unix_timestamp((unix_now() - seconds_ago) as i64).expect("a present time");
    let moment = moment.format(&Rfc3339).expect("it has a text");
    envelope("network")
        .event_type("network.user.token_valid_after")
        .subject("user", person)
        .payload(
            json!({ "subject": { "type": "user", "id": person }, "valid_after": moment, "reason": "password_changed" }),
        )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_ends_half_a_minute_after_its_session() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let service = Service::start(&database, &network, &[("REALTIME_HEARTBEAT_MS", "200")]).await;
    // The session is over already, and still believed for a moment.
    let over = TokenSpec::person(&id("usr")).claim("exp", unix_now() - 27).sign();
    let (mut bearer, mut cookie) = tokio::join!(
        opened(service.client(), By::Bearer, &over),
        opened(service.client(), By::Cookie, &over)
    );
    let began = Instant::now();
    let service_token = TokenSpec::service("reader").claim("exp", unix_now() - 28).sign();
    let mut of_a_service = Sse::of(service.client(), TOPICS, Some(&service_token)).await;
    let short = TokenSpec::ticket(&id("usr")).claim("exp", unix_now() + 1).sign();
    let mut of_a_ticket = opened(service.client(), By::Ticket, &short).await;
    for stream in [&mut bearer, &mut cookie] {
        assert_eq!(stream.ended(Duration::from_secs(6)).await, Part::End);
        assert!(began.elapsed() > Duration::from_secs(1), "it had a moment left");
    }
    // What a service or a ticket came with limits the opening only.
    let more = within("heartbeats", SOON, async {
        while began.elapsed() < Duration::from_secs(5) {
            assert!(matches!(of_a_service.next().await, Part::Frame(_)));
            assert!(matches!(of_a_ticket.next().await, Part::Frame(_)));
        }
    });
    more.await;
}

#[tokio::test(flavor = "multi_thread")]
async fn withdrawn_sessions_end_everywhere_and_open_nothing_and_nobody_else_notices() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let services = start_many(&database, &network, 2, &[]).await;
    let (alice, bob) = (id("usr"), id("usr"));
    let mut old = Vec::new();
    let mut others = Vec::new();
    for service in &services {
        let client = service.client();
        for by in WAYS {
            old.push(opened(client, by, &issued(by, &alice, 100)).await);
            // A moment before or after the withdrawal, which is fifty seconds ago.
            old.push(opened(client, by, &issued(by, &alice, 52)).await);
            others.push((&alice, opened(client, by, &issued(by, &alice, 10)).await));
            others.push((&bob, opened(client, by, &issued(by, &bob, 100)).await));
        }
    }
    let mut anyone = Sse::of(services[0].client(), TOPICS, None).await;
    let publisher = services[0].client();
    publisher.publish(&withdrawal(&alice, 50)).await.expect(201);
    for stream in &mut old {
        assert_eq!(stream.ended(SOON).await, Part::End);
    }
    for person in [&alice, &bob] {
        let event = notification(person);
        publisher.publish(&event).await.expect(201);
        for (whose, stream) in &mut others {
            if *whose == person {
                assert_eq!(stream.event_id().await, event.id());
            }
        }
    }
    let public = envelope("live").event_type("live.stream.started").visibility("public");
    publisher.publish(&public).await.expect(201);
    assert_eq!(anyone.event_id().await, public.id());

    for service in &services {
        let open =
            async |by, seconds_ago| Sse::open(asked(service.client(), by, &issued(by, &alice, seconds_ago))).await;
        let refused = open(By::Bearer, 100).await.expect_err("a refusal");
        assert_problem(&refused, 401, "token.invalid");
        let refused = open(By::Ticket, 100).await.expect_err("a refusal");
        assert_problem(&refused, 401, "ticket.invalid");
        assert_eq!(open(By::Cookie, 100).await.expect("a stream").viewer, "anonymous");
        for by in WAYS {
            assert_eq!(open(by, 40).await.expect("a stream").viewer, "user", "{by:?}");
        }
    }
    // One that comes late, or tells of less, takes nothing back.
    publisher.publish(&withdrawal(&alice, 80)).await.expect(201);
    let between = asked(publisher, By::Bearer, &issued(By::Bearer, &alice, 60));
    assert_problem(&Sse::open(between).await.expect_err("a refusal"), 401, "token.invalid");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_withdrawal_reaches_a_stream_that_is_still_given_what_it_missed() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let service = Service::start(&database, &network, &[("REALTIME_REPLAY_MAX", "10000")]).await;
    let client = service.client();
    let alice = id("usr");
    let own = || notification(&alice).payload(json!({ "text": "x".repeat(20_000) }));
    for _ in 0..16 {
        let some: Vec<_> = (0..50).map(|_| own()).collect();
        client.publish_as("network", &batch(&some)).await.expect(201);
    }
    // Taken slowly: most of it waits in the database. And one is not taken at all.
    let (token, first) = (issued(By::Bearer, &alice, 100), cursor_of(0, 0));
    let request = format!(
        "GET /realtime/stream?{TOPICS}&last_event_id={first} HTTP/1.1\r\nHost: events\r\nAuthorization: Bearer {token}\r\n\r\n"
    );
    let mut wire = Wire::to(&service).await;
    let mut unread = Wire::narrow(&service).await;
    for wire in [&mut wire, &mut unread] {
        wire.send(&request).await;
    }
    let open = async || metric(client, "events_realtime_connections").await;
    eventually("both are open", SOON, async || open().await > 1.5).await;
    client.publish(&withdrawal(&alice, 50)).await.expect(201);
    let ended = "events_realtime_streams_ended_total{reason=\"withdrawn\"}";
    let mut given = 0;
    let mut tail = Vec::new();
    within("the end of the stream", SOON, async {
        while !tail.ends_with(b"\r\n0\r\n\r\n") {
            let some = wire.read_some().await;
            assert!(!some.is_empty(), "it was cut");
            given += some.len();
            tail.extend(some);
            tail.drain(..tail.len().saturating_sub(64));
        }
    })
    .await;
    eventually("both places are free", SOON, async || open().await < 0.5).await;
    eventually("both are counted", SOON, async || metric(client, ended).await > 1.5).await;
    println!("given of 16 MB after the withdrawal: {given} bytes");
    assert!(given < 12_000_000, "all of it was given");
}
