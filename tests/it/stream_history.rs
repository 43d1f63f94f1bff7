//! The log under open streams: restored to what it was, replaced, or out of reach for a while.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;

use crate::{
    store_fixture::{number, sql},
    support::{
        client::{Client, assert_problem},
        database::Database,
        envelopes::{Envelope, envelope, id},
        follower::{Entry, Follower, gaps},
        ledger::{cursor_of, position_of},
        network::{Network, TokenSpec},
        proxy::Proxy,
        service::{Service, start_many},
        sse::{Frame, Part, Sse, after, ask},
        wait::{SOON, eventually, stays, within},
        wire::Wire,
    },
};

const TYPE: &str = "live.history.said";
const TOPICS: &str = "topics=live.history.*";
/// How soon a stream notices: it looks once a second.
const NOTICED: Duration = Duration::from_secs(4);

fn public() -> Envelope {
    envelope("live").event_type(TYPE).visibility("public")
}

fn reader() -> String {
    TokenSpec::service("reader").sign()
}

async fn publish(client: &Client, count: usize) -> Vec<String> {
    let mut cursors = Vec::new();
    for _ in 0..count {
        let answer = client.publish(&public()).await.expect(201);
        cursors.push(answer["cursor"].as_str().expect("a cursor").to_owned());
    }
    cursors
}

/// A stream of each kind of viewer on each process, which have all had the last event.
async fn everybody(services: &[Service], last: &str) -> Vec<Sse> {
    let mut streams = Vec::new();
    for service in services {
        for token in [None, Some(reader()), Some(TokenSpec::person(&id("usr")).sign())] {
            let request = ask(service.client(), TOPICS, token.as_deref());
            streams.push(Sse::open(after(request, Some(last))).await.expect("a stream"));
        }
    }
    let client = services[0].client();
    publish(client, 1).await;
    for stream in &mut streams {
        stream.event().await;
    }
    streams
}

async fn all_end(streams: &mut [Sse]) {
    for end in join_all(streams.iter_mut().map(|stream| stream.ended(NOTICED))).await {
        assert_eq!(end, Part::End);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restored_log_ends_streams_and_who_comes_back_is_told_and_has_what_is_there() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let services = start_many(&database, &network, 2, &[]).await;
    let client = services[0].client();
    let cursors = publish(client, 6).await;
    let mut streams = everybody(&services, &cursors[5]).await;
    let last = streams[0].last_cursor().to_owned();
    let third = position_of(&cursors[2]).expect("a cursor");
    // What a backup brings back: less, under another epoch.
    sql(database.pool(), &format!("DELETE FROM events WHERE seq > {third}")).await;
    sql(database.pool(), "UPDATE store_epoch SET value = value + 1").await;
    all_end(&mut streams).await;
    let kept = number(database.pool(), "SELECT count(*) FROM events").await;
    let floor = number(database.pool(), "SELECT value FROM store_floor").await;
    for service in &services {
        for token in [None, Some(reader())] {
            let request = ask(service.client(), TOPICS, token.as_deref());
            let mut resumed = Sse::open(after(request, Some(&last))).await.expect("a stream");
            let gap = resumed.gap().await;
            assert_eq!(
                (gap["reason"].as_str(), gap["to_seq"].as_i64()),
                (Some("epoch"), Some(floor)),
                "{gap}"
            );
            assert_eq!(gap["latest_seq"], third, "{gap}");
            for _ in 0..kept {
                resumed.event().await;
            }
            assert!(resumed.last_cursor().starts_with("c1.1."), "{}", resumed.last_cursor());
        }
    }
    // What follows is live under the new epoch.
    let mut stream = Sse::of(services[1].client(), TOPICS, None).await;
    let cursor = publish(client, 1).await.remove(0);
    stream.event().await;
    assert_eq!(stream.last_cursor(), cursor);
    assert!(cursor.starts_with("c1.1."));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_is_shorter_than_it_was_is_noticed_though_nobody_said_so() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let services = start_many(&database, &network, 2, &[]).await;
    let cursors = publish(services[0].client(), 6).await;
    let mut streams = everybody(&services, &cursors[5]).await;
    let last = streams[0].last_cursor().to_owned();
    let third = position_of(&cursors[2]).expect("a cursor");
    sql(database.pool(), &format!("DELETE FROM events WHERE seq > {third}")).await;
    all_end(&mut streams).await;
    for service in &services {
        let request = ask(service.client(), TOPICS, None);
        let mut resumed = Sse::open(after(request, Some(&last))).await.expect("a stream");
        let gap = resumed.gap().await;
        assert_eq!(gap["reason"], "cursor_ahead", "{gap}");
        assert_eq!(
            (gap["from_seq"].as_i64(), gap["to_seq"].as_i64()),
            (Some(third + 1), position_of(&last)),
            "{gap}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_of_the_database_costs_time_and_no_event() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let line = Proxy::start(&database.server()).await;
    let through = database.url_through(line.address());
    let env = [
        ("DATABASE_URL", through.as_str()),
        ("DATABASE_DIRECT_URL", through.as_str()),
        ("REALTIME_HEARTBEAT_MS", "300"),
    ];
    let near = Service::start(&database, &network, &env).await;
    let far = Service::start(&database, &network, &[]).await;
    publish(far.client(), 1).await;
    let client = near.client().clone();
    let asking = {
        let client = client.clone();
        move |_| ask(&client, TOPICS, Some(&reader()))
    };
    let follower = Follower::start(asking, Some(cursor_of(0, 0)), (0, 0)).await;
    let mut stream = Sse::of(&client, TOPICS, None).await;
    let mut cursors = Vec::new();
    for outage in [Proxy::cut, Proxy::stall, Proxy::hold_answers] {
        outage(&line);
        cursors.extend(publish(far.client(), 20).await);
        // It lives on meanwhile, and has nothing to say.
        for _ in 0..5 {
            let beat = within("a heartbeat", SOON, stream.next()).await;
            assert_eq!(beat, Part::Frame(Frame::Heartbeat));
        }
        // Whoever comes now is told to come again.
        let refusal = within(
            "a refusal",
            Duration::from_secs(25),
            Sse::try_open(ask(&client, TOPICS, None)),
        )
        .await;
        let refusal = refusal.expect("an answer").expect_err("a refusal");
        let problem = assert_problem(&refusal, 503, refusal.body["code"].as_str().unwrap_or_default());
        assert!(!refusal.header("retry-after").is_empty(), "{problem}");
        line.restore();
        for cursor in cursors.drain(..) {
            stream.event().await;
            assert_eq!(stream.last_cursor(), cursor);
        }
    }
    follower.assert_whole(database.pool(), 0, "true", SOON).await;
    assert_eq!(follower.look(gaps), 0);
    let first = follower.look(|seen| seen.entries.first().cloned());
    assert!(matches!(first, Some(Entry::Event(..))));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_resumes_while_the_database_fails_is_refused_or_ended_and_never_short() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let line = Proxy::start(&database.server()).await;
    let through = database.url_through(line.address());
    let env = [("DATABASE_URL", through.as_str()), ("REALTIME_REPLAY_MAX", "10000")];
    let near = Service::start(&database, &network, &env).await;
    let far = Service::start(&database, &network, &[]).await;
    for _ in 0..10 {
        let some: Vec<_> = (0..50).map(|_| public()).collect();
        let body = crate::support::envelopes::batch(&some);
        far.client().publish_as("live", &body).await.expect(201);
    }
    let client = near.client().clone();
    let asking = move |_| ask(&client, TOPICS, Some(&reader()));
    let followers = [
        Follower::start(asking.clone(), Some(cursor_of(0, 0)), (120, 1)).await,
        Follower::start(asking, Some(cursor_of(0, 0)), (70, 2)).await,
    ];
    for _ in 0..12 {
        line.drop_connections();
        publish(far.client(), 3).await;
    }
    for follower in &followers {
        follower
            .assert_whole(database.pool(), 0, "true", Duration::from_secs(30))
            .await;
        assert_eq!(follower.look(gaps), 0);
    }
    stays("nothing comes twice", Duration::from_millis(300), async || {
        followers
            .iter()
            .all(|follower| follower.look(|seen| seen.entries.len()) == 536)
    })
    .await;
    eventually("the process is ready again", SOON, async || {
        near.client().get("/api/ready", None).await.status == 200
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_pruned_while_a_reader_takes_its_history_is_told() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let env = [("REALTIME_REPLAY_MAX", "10000"), ("EVENTS_WORKER", "off")];
    let service = Service::start(&database, &network, &env).await;
    for _ in 0..10 {
        let some: Vec<_> = (0..30)
            .map(|_| public().payload(json!({ "text": "x".repeat(48 * 1024) })))
            .collect();
        let body = crate::support::envelopes::batch(&some);
        service.client().publish_as("live", &body).await.expect(201);
    }
    let head = number(database.pool(), "SELECT max(seq) FROM events").await;
    let mut wire = Wire::to(&service).await;
    let from = cursor_of(0, 0);
    let query = format!("{TOPICS}&last_event_id={from}");
    wire.send(format!("GET /realtime/stream?{query} HTTP/1.1\r\nHost: events\r\n\r\n"))
        .await;
    let mut given = wire.read_some().await;
    let floor = head - 20;
    let prune = format!("DELETE FROM events WHERE seq <= {floor}; UPDATE store_floor SET value = {floor}");
    sql(database.pool(), &prune).await;
    let last = format!("id: {}\n", cursor_of(0, head));
    within("the last event", SOON, async {
        while !given
            .windows(last.len())
            .rev()
            .take(64 * 1024)
            .any(|text| text == last.as_bytes())
        {
            given.extend(wire.read_some().await);
        }
    })
    .await;
    let text = String::from_utf8_lossy(&given);
    let mut at = 0;
    let mut gaps = 0;
    for line in text.lines() {
        if let Some(cursor) = line.strip_prefix("id: ") {
            at += 1;
            assert_eq!(position_of(cursor), Some(at), "nothing is passed over in silence");
        } else if let Some(gap) = line.strip_prefix("data: {\"reason\":\"retention\"") {
            assert!(
                gap.starts_with(&format!(",\"from_seq\":{},\"to_seq\":{floor},", at + 1)),
                "{gap}"
            );
            (at, gaps) = (floor, gaps + 1);
        }
    }
    assert_eq!((at, gaps), (head, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_opened_right_after_a_restore_goes_from_its_gap_into_what_is_live() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let services = start_many(&database, &network, 2, &[]).await;
    let mut last = publish(services[0].client(), 3).await.remove(2);
    // Somebody is there, so that the log is followed.
    let _others = everybody(&services, &last).await;
    for service in &services {
        sql(database.pool(), "UPDATE store_epoch SET value = value + 1").await;
        let request = ask(service.client(), TOPICS, Some(&reader()));
        let mut stream = Sse::open(after(request, Some(&last))).await.expect("a stream");
        assert_eq!(stream.gap().await["reason"], "epoch");
        for _ in 0..number(database.pool(), "SELECT count(*) FROM events").await {
            stream.event().await;
        }
        last = publish(services[0].client(), 1).await.remove(0);
        stream.event().await;
        assert_eq!(stream.last_cursor(), last);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn public_events_of_before_the_window_are_told_and_a_hole_is_no_gap() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let service = Service::start(&database, &network, &[]).await;
    let client = service.client();
    let cursors = publish(client, 4).await;
    // What a publish that was rolled back, or a fail-over, leaves behind.
    sql(
        database.pool(),
        "SELECT setval('event_positions', nextval('event_positions') + 5000)",
    )
    .await;
    let later = publish(client, 2).await;
    let resumed = async |from: &str, token: Option<&str>| {
        Sse::open(after(ask(client, TOPICS, token), Some(from)))
            .await
            .expect("a stream")
    };
    for token in [None, Some(reader())] {
        let mut stream = resumed(&cursors[3], token.as_deref()).await;
        for cursor in &later {
            stream.event().await;
            assert_eq!(stream.last_cursor(), cursor);
        }
    }

    // Three are older than what browsers get again.
    let third = position_of(&cursors[2]).expect("a cursor");
    let old = format!("UPDATE events SET received_at = received_at - 400000 WHERE seq <= {third}");
    sql(database.pool(), &old).await;
    let mut anyone = resumed(&cursor_of(0, 0), None).await;
    let gap = anyone.gap().await;
    assert_eq!(gap["reason"], "public_window", "{gap}");
    assert_eq!(
        (gap["from_seq"].as_i64(), gap["to_seq"].as_i64()),
        (Some(1), Some(third)),
        "{gap}"
    );
    assert_eq!(
        (gap["window_seconds"].as_i64(), gap["latest_seq"].as_i64()),
        (Some(300), position_of(&later[1]))
    );
    for cursor in [&cursors[3], &later[0], &later[1]] {
        anyone.event().await;
        assert_eq!(anyone.last_cursor(), cursor);
    }
    let mut service = resumed(&cursor_of(0, 0), Some(&reader())).await;
    for cursor in cursors.iter().chain(&later) {
        service.event().await;
        assert_eq!(service.last_cursor(), cursor);
    }
    // All of them are.
    sql(database.pool(), "UPDATE events SET received_at = received_at - 400000").await;
    let mut anyone = resumed(&cursor_of(0, 0), None).await;
    assert_eq!(anyone.gap().await["to_seq"].as_i64(), position_of(&later[1]));
    let fresh = publish(client, 1).await.remove(0);
    anyone.event().await;
    assert_eq!(anyone.last_cursor(), fresh);
}
