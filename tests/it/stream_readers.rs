//! Readers that stop, vanish, crowd in or are sent away: each costs what is promised and none costs its neighbours.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::json;
use tokio_util::task::AbortOnDropHandle;

use crate::{
    fabric_world::{median, metric},
    support::{
        client::assert_problem,
        database::Database,
        envelopes::{Envelope, batch, envelope, id},
        ledger::cursor_of,
        network::{Network, TokenSpec},
        process::resident_kib,
        receiver::Receiver,
        service::{Service, start_many},
        sse::{Part, Sse, ask},
        wait::{SOON, eventually, within},
        wire::Wire,
    },
};

const TYPE: &str = "live.reader.said";
const TOPICS: &str = "topics=live.reader.*";
const OPEN: &str = "events_realtime_connections";

async fn process(env: &[(&str, &str)]) -> (Service, Network, Database) {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let service = Service::start(&database, &network, env).await;
    (service, network, database)
}

fn public(bytes: usize) -> Envelope {
    envelope("live")
        .event_type(TYPE)
        .visibility("public")
        .payload(json!({ "text": "x".repeat(bytes) }))
}

/// A stream that is asked for on a connection with as little room as possible, and not read.
async fn stalled(service: &Service, query: &str) -> Wire {
    asked(Wire::narrow(service).await, query).await
}

async fn asked(mut wire: Wire, query: &str) -> Wire {
    wire.send(format!("GET /realtime/stream?{query} HTTP/1.1\r\nHost: events\r\n\r\n"))
        .await;
    wire
}

async fn open_streams(service: &Service, count: f64, deadline: Duration) {
    eventually("so many streams are open", deadline, async || {
        let open = metric(service.client(), OPEN).await;
        #[expect(clippy::float_cmp, reason = "small whole numbers")]
        (open == count).then_some(()).ok_or(open)
    })
    .await;
}

/// How long small events take from before the publish to the last of some streams; a large one goes before every fifth.
async fn latencies(service: &Service, streams: &mut [Sse], large: usize, count: usize) -> Vec<Duration> {
    let mut took = Vec::new();
    for n in 0..count {
        if n % 5 == 0 {
            fan_out(service, streams, large).await;
        }
        took.push(fan_out(service, streams, 200).await);
    }
    took
}

async fn fan_out(service: &Service, streams: &mut [Sse], bytes: usize) -> Duration {
    let event = public(bytes);
    let began = Instant::now();
    let publish = async { service.client().publish(&event).await.expect(201) };
    let arrive = async {
        for id in join_all(streams.iter_mut().map(Sse::event_id)).await {
            assert_eq!(id, event.id());
        }
        began.elapsed()
    };
    tokio::join!(publish, arrive).1
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_readers_that_stop_are_closed_and_slow_no_other() {
    const BYTES: usize = 48 * 1024;
    let (service, _network, _database) = process(&[("EVENTS_WORKER", "off")]).await;
    let mut streams = join_all((0..10).map(|_| Sse::of(service.client(), TOPICS, None))).await;
    latencies(&service, &mut streams, BYTES, 20).await;
    // Compared with a hundred that do read.
    let others: Vec<_> = join_all((0..100).map(|_| async { asked(Wire::to(&service).await, TOPICS).await }))
        .await
        .into_iter()
        .map(|mut wire| {
            let read = async move { while !wire.read_some().await.is_empty() {} };
            AbortOnDropHandle::new(tokio::spawn(read))
        })
        .collect();
    open_streams(&service, 110.0, SOON).await;
    let reading = latencies(&service, &mut streams, BYTES, 200).await;
    drop(others);
    open_streams(&service, 10.0, SOON).await;
    let before = resident_kib(service.pid());
    let _stopped = join_all((0..100).map(|_| stalled(&service, TOPICS))).await;
    open_streams(&service, 110.0, SOON).await;
    let mut beside = Vec::new();
    let mut most = before;
    within("those that stopped are closed", Duration::from_secs(40), async {
        while metric(service.client(), OPEN).await > 10.0 {
            beside.extend(latencies(&service, &mut streams, BYTES, 10).await);
            most = most.max(resident_kib(service.pid()));
        }
    })
    .await;
    let slow = metric(service.client(), "events_realtime_streams_ended_total{reason=\"slow\"}").await;
    assert!((slow - 100.0).abs() < 0.5, "{slow}");
    let p99 = |all: &[Duration]| {
        let mut all = all.to_vec();
        all.sort();
        all[(all.len() - 1) * 99 / 100]
    };
    println!(
        "fan-out beside readers that read: median {:?}, p99 {:?}; beside as many that stop: median {:?}, p99 {:?} ({} events)",
        median(reading.clone()),
        p99(&reading),
        median(beside.clone()),
        p99(&beside),
        beside.len()
    );
    let allowed = |reading: Duration, noise| reading.mul_f64(1.5) + Duration::from_millis(noise);
    assert!(median(beside.clone()) < allowed(median(reading.clone()), 5));
    assert!(p99(&beside) < allowed(p99(&reading), 150));
    if let (Some(before), Some(most)) = (before, most) {
        println!("resident: {before} KiB before, {most} KiB at most");
        assert!(most < before + 40 * 1024, "{before} to {most} KiB");
    }
    latencies(&service, &mut streams, BYTES, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_stops_in_its_replay_is_waited_for_and_has_everything() {
    let (service, _network, database) = process(&[("REALTIME_REPLAY_MAX", "10000"), ("EVENTS_WORKER", "off")]).await;
    let publish = async |batches: usize| {
        for _ in 0..batches {
            let some: Vec<_> = (0..50).map(|_| public(20_000)).collect();
            service.client().publish_as("live", &batch(&some)).await.expect(201);
        }
    };
    publish(8).await;
    let resumed = format!("{TOPICS}&last_event_id={}", cursor_of(0, 0));
    let mut wire = asked(Wire::to(&service).await, &resumed).await;
    open_streams(&service, 1.0, SOON).await;
    // More than may wait for a reader that is live.
    publish(2).await;
    let stored: Vec<i64> = sqlx::query_scalar("SELECT seq FROM events ORDER BY seq")
        .fetch_all(database.pool())
        .await
        .expect("the log");
    let expected: Vec<String> = stored.into_iter().map(|seq| cursor_of(0, seq)).collect();
    let mut given = Vec::new();
    within("everything is given", SOON, async {
        let last = format!("id: {}", expected.last().expect("it is not empty"));
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
    let ids: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("id: ")).collect();
    assert_eq!(ids, expected);
    assert!(!text.contains("event: gap"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_stops_in_its_replay_for_good_is_closed() {
    let (service, _network, _database) = process(&[
        ("REALTIME_REPLAY_MAX", "10000"),
        ("REALTIME_HEARTBEAT_MS", "200"),
        ("EVENTS_WORKER", "off"),
    ])
    .await;
    for _ in 0..10 {
        let some: Vec<_> = (0..30).map(|_| public(48 * 1024)).collect();
        service.client().publish_as("live", &batch(&some)).await.expect(201);
    }
    let resumed = format!("{TOPICS}&last_event_id={}", cursor_of(0, 0));
    let mut idle = Sse::of(service.client(), TOPICS, None).await;
    let _stopped = stalled(&service, &resumed).await;
    open_streams(&service, 2.0, SOON).await;
    open_streams(&service, 1.0, SOON).await;
    let slow = metric(service.client(), "events_realtime_streams_ended_total{reason=\"slow\"}").await;
    assert!((slow - 1.0).abs() < 0.5, "{slow}");
    // One that has nothing to read takes heartbeats.
    let event = public(10);
    service.client().publish(&event).await.expect(201);
    assert_eq!(idle.event_id().await, event.id());
}

#[tokio::test(flavor = "multi_thread")]
async fn who_vanishes_or_crowds_in_gives_the_place_back() {
    let (service, _network, _database) = process(&[("REALTIME_MAX_CONNECTIONS", "5")]).await;
    let asked = || Sse::open(ask(service.client(), TOPICS, None));
    for _ in 0..3 {
        let answers = join_all((0..40).map(|_| asked())).await;
        let (given, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(Result::is_ok);
        assert_eq!(given.len(), 5);
        for answer in refused {
            let refusal = answer.expect_err("a refusal");
            assert_problem(&refusal, 503, "realtime.over_capacity");
            assert_eq!(refusal.header("retry-after"), "10");
        }
        open_streams(&service, 5.0, SOON).await;
        drop(given);
        // Long before any heartbeat.
        open_streams(&service, 0.0, Duration::from_secs(3)).await;
    }
    let mut wires = Vec::new();
    for _ in 0..5 {
        wires.push(stalled(&service, TOPICS).await);
    }
    open_streams(&service, 5.0, SOON).await;
    for wire in &wires {
        wire.reset();
    }
    drop(wires);
    open_streams(&service, 0.0, Duration::from_secs(3)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_without_streams_does_everything_else() {
    let (database, network, receiver) = tokio::join!(Database::create(), Network::start(), Receiver::start());
    let without = Service::start(&database, &network, &[("REALTIME_MAX_CONNECTIONS", "0")]).await;
    let with = Service::start(&database, &network, &[]).await;
    let ticket = TokenSpec::ticket(&id("usr")).sign();
    let query = format!("{TOPICS}&ticket={ticket}");
    let refusal = Sse::open(ask(without.client(), &query, None))
        .await
        .expect_err("a refusal");
    assert_problem(&refusal, 503, "realtime.over_capacity");
    assert!(!refusal.header("retry-after").is_empty());
    crate::fabric_world::subscribe(without.client(), TYPE, &receiver.url("/hook")).await;
    let mut stream = Sse::of(with.client(), &query, None).await;
    let event = public(10);
    without.client().publish(&event).await.expect(201);
    assert_eq!(receiver.wait_calls(1, SOON).await[0].event_id(), event.id());
    assert_eq!(stream.event_id().await, event.id());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_ends_every_stream_with_its_last_chunk_and_the_next_process_goes_on() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let services = start_many(&database, &network, 2, &[("REALTIME_REPLAY_MAX", "10000")]).await;
    let [leaving, staying] = &services[..] else {
        unreachable!("two were started")
    };
    let mut streams = join_all((0..50).map(|_| Sse::of(leaving.client(), TOPICS, None))).await;
    let event = public(10);
    staying.client().publish(&event).await.expect(201);
    let mut last = String::new();
    for stream in &mut streams {
        assert_eq!(stream.event_id().await, event.id());
        stream.last_cursor().clone_into(&mut last);
    }
    let ends = join_all(streams.iter_mut().map(|stream| stream.ended(SOON)));
    let began = Instant::now();
    let ((exit, took), ends) = tokio::join!(leaving.terminate(), async {
        let ends = ends.await;
        (ends, began.elapsed())
    });
    assert!(ends.0.iter().all(|end| *end == Part::End), "{:?}", ends.0);
    println!("a stop: streams ended after {:?}, the process after {took:?}", ends.1);
    assert_eq!(exit.code, Some(0));
    assert!(
        ends.1 < Duration::from_secs(2) && took < Duration::from_secs(4),
        "{:?}, {took:?}",
        ends.1
    );
    let missed = public(10);
    staying.client().publish(&missed).await.expect(201);
    let resumed = ask(staying.client(), TOPICS, None).header("Last-Event-ID", last);
    assert_eq!(
        Sse::open(resumed).await.expect("a stream").event_id().await,
        missed.id()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_that_do_not_read_hold_no_stop_up() {
    let (service, _network, _database) = process(&[("REALTIME_REPLAY_MAX", "10000"), ("EVENTS_WORKER", "off")]).await;
    // Some stop in their replay, with more behind it than any system takes for a reader.
    for _ in 0..10 {
        let some: Vec<_> = (0..30).map(|_| public(48 * 1024)).collect();
        service.client().publish_as("live", &batch(&some)).await.expect(201);
    }
    let resumed = format!("{TOPICS}&last_event_id={}", cursor_of(0, 0));
    let mut readers = Vec::new();
    for _ in 0..5 {
        readers.push(stalled(&service, &resumed).await);
        readers.push(stalled(&service, TOPICS).await);
    }
    open_streams(&service, 10.0, SOON).await;
    // And some stop live, a little behind.
    for _ in 0..20 {
        service.client().publish(&public(48 * 1024)).await.expect(201);
    }
    let (exit, took) = service.terminate().await;
    println!("a stop with readers that do not read: {took:?}");
    assert_eq!(exit.code, Some(0));
    assert!(took < Duration::from_secs(4), "{took:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_talks_on_a_stream_is_ignored_for_a_while_and_then_hung_up_on() {
    let (service, _network, _database) = process(&[("EVENTS_WORKER", "off")]).await;
    let mut talker = asked(Wire::to(&service).await, TOPICS).await;
    let mut chatterbox = asked(Wire::to(&service).await, TOPICS).await;
    open_streams(&service, 2.0, SOON).await;
    talker.send("x".repeat(1_000)).await;
    within("no more is read of it", SOON, async {
        while chatterbox.try_send("y".repeat(10_000)).await.is_ok() {}
    })
    .await;
    open_streams(&service, 1.0, SOON).await;
    let event = public(10);
    service.client().publish(&event).await.expect(201);
    within("the event", SOON, async {
        while !String::from_utf8_lossy(&talker.read_some().await).contains(event.id()) {}
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_history_cannot_be_read_a_stream_lives_and_who_vanishes_is_noticed() {
    let env = [
        ("REALTIME_REPLAY_MAX", "10000"),
        ("REALTIME_HEARTBEAT_MS", "100"),
        ("EVENTS_WORKER", "off"),
    ];
    let (service, _network, database) = process(&env).await;
    // More than the system takes at once for a reader that does not read.
    for _ in 0..10 {
        let some: Vec<_> = (0..30).map(|_| public(48 * 1024)).collect();
        service.client().publish_as("live", &batch(&some)).await.expect(201);
    }
    let resumed = format!("{TOPICS}&last_event_id={}", cursor_of(0, 0));
    let mut wire = stalled(&service, &resumed).await;
    open_streams(&service, 1.0, SOON).await;
    let mut lock = database.pool().begin().await.expect("a transaction");
    sqlx::query("LOCK TABLE events IN ACCESS EXCLUSIVE MODE")
        .execute(&mut *lock)
        .await
        .expect("a lock");
    within("heartbeats", SOON, async {
        while !wire.read_some().await.ends_with(b": hb\n\n\r\n") {}
    })
    .await;
    drop(wire);
    // Before the read of history is given up. The figures wait two seconds for those that come from the store.
    open_streams(&service, 0.0, Duration::from_secs(5)).await;
    let failed = metric(
        service.client(),
        "events_realtime_streams_ended_total{reason=\"failed\"}",
    )
    .await;
    assert!(failed < 0.5, "{failed}");
}
