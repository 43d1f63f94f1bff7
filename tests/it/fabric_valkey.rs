//! `valkey-v1` under the service as it is run: what crosses through it, and what happens while it is dead, stalled or slow.

use std::time::{Duration, Instant};

use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    fabric_world::{
        BACK, Pair, QUICK, TOLD, carrier, explain, keyed, median, metric, number, put_policy, reason, selects, speak,
        subject_of, subscribe_with, topic, url,
    },
    support::{
        broker::Broker,
        envelopes::{Envelope, batch, envelope},
        ledger::{Ledger, assert_in_order},
        proxy::Proxy,
        receiver::Answer,
        wait::{SOON, eventually, stays},
    },
};

const ID: &str = "valkey-v1";
const TYPE: &str = "live.valkey.carried";

fn event(subject: usize) -> Envelope {
    envelope("live").event_type(TYPE).subject("thing", &subject.to_string())
}

/// A broker, and two processes that reach it through a proxy.
async fn through_a_proxy() -> (Broker, Proxy, Pair) {
    let broker = Broker::valkey().await;
    let proxy = Proxy::start(&broker.address()).await;
    let pair = Pair::start(&[("VALKEY_URL", &url("redis", proxy.address()))]).await;
    keyed(pair.client(), TYPE, "domain", "optional").await;
    let hook = pair.receiver.url("/hook");
    let body = json!({ "topic_pattern": TYPE, "endpoint": hook, "max_inflight": 64 });
    subscribe_with(pair.client(), &body).await;
    pair.selects(TYPE, ID, SOON).await;
    (broker, proxy, pair)
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_events_cross_in_order_long_before_any_poll() {
    let broker = Broker::valkey().await;
    let pair = Pair::start(&[("VALKEY_URL", &url("redis", broker.address()))]).await;
    keyed(pair.client(), TYPE, "domain", "optional").await;
    pair.subscribe(TYPE, "/hook").await;
    pair.selects(TYPE, ID, SOON).await;
    let mut took = Vec::new();
    for n in 0..50 {
        took.push(pair.round(&event(n % 5), SOON).await);
    }
    let median = median(took);
    println!("{ID}: median from the publish to its POST: {median:?}");
    assert!(median < QUICK, "{median:?}");
    pair.all_sent_once(50, SOON).await;
    assert_in_order(&pair.receiver, "/hook", pair.database.pool(), subject_of).await;
    assert_eq!(pair.placed_on(ID).await, 50);
    // What one process sent, every other knows of: an allowance is everybody's.
    eventually("the other process knows what was used", SOON, async || {
        let usage = carrier(pair.worker.client(), ID).await["usage"].clone();
        (usage["used"].as_f64() >= Some(20.0)).then_some(()).ok_or(usage)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_server_is_named_while_work_goes_on_and_comes_back_by_itself() {
    let broker = Broker::valkey().await;
    let pair = Pair::start(&[("VALKEY_URL", &url("redis", broker.address()))]).await;
    keyed(pair.client(), TYPE, "domain", "optional").await;
    pair.subscribe(TYPE, "/hook").await;
    pair.selects(TYPE, ID, SOON).await;
    let ledger = Ledger::default().route_type("/hook", TYPE);
    broker.stall();
    // Nothing that follows may help the first signal that it does not take, and the poll is an hour away.
    let first = event(9);
    let took = pair.round(&first, Duration::from_secs(5)).await;
    println!("{ID}: the first event after the stall arrived after {took:?}");
    pair.publish_until(&ledger, event, async {
        eventually("explain says that it is not usable", TOLD, async || {
            let explained = explain(pair.client(), TYPE, None).await;
            let why = reason(&explained, ID);
            let moved = explained["placement"]["selected"] == "pg-v1";
            (moved && !why.is_empty())
                .then_some(())
                .ok_or(explained["placement"].to_string())
        })
        .await;
    })
    .await;
    ledger.settle(&pair.receiver, SOON).await;
    broker.resume();
    pair.publish_until(&ledger, event, pair.selects(TYPE, ID, BACK)).await;
    let before = pair.placed_on(ID).await;
    let last = event(4711);
    ledger.note([&last], &pair.client().publish(&last).await);
    ledger.settle(&pair.receiver, SOON).await;
    assert!(pair.placed_on(ID).await > before, "it is used again");
    pair.all_sent_once(ledger.len() + 1, SOON).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_costs_no_delivery_and_is_used_again_once_it_is_back() {
    let broker = Broker::valkey().await;
    let pair = Pair::start(&[("VALKEY_URL", &url("redis", broker.address()))]).await;
    keyed(pair.client(), TYPE, "domain", "optional").await;
    pair.subscribe(TYPE, "/hook").await;
    pair.selects(TYPE, ID, SOON).await;
    let ledger = Ledger::default().route_type("/hook", TYPE);
    pair.publish_until(&ledger, event, async {
        broker.kill();
        pair.excludes(TYPE, ID, "not connected (valkey-v1)", TOLD).await;
    })
    .await;
    ledger.settle(&pair.receiver, SOON).await;
    broker.revive().await;
    pair.publish_until(&ledger, event, pair.selects(TYPE, ID, BACK)).await;
    // The other process must have come back as well: it is the one that hears.
    eventually("both are connected", BACK, async || {
        carrier(pair.worker.client(), ID).await["state"] == "up"
    })
    .await;
    ledger.settle(&pair.receiver, SOON).await;
    assert!(pair.round(&event(1), SOON).await < Duration::from_secs(2));
    pair.all_sent_once(ledger.len() + 1, SOON).await;
    assert_in_order(&pair.receiver, "/hook", pair.database.pool(), subject_of).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_down_at_boot_hurts_nobody_and_is_used_once_it_is_up() {
    let (valkey, nats) = tokio::join!(Broker::valkey(), Broker::nats());
    valkey.kill();
    let env = [
        ("VALKEY_URL", url("redis", valkey.address())),
        ("NATS_URL", url("nats", nats.address())),
    ];
    let env: Vec<_> = env.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let pair = Pair::start(&env).await;
    const NEWS: &str = "live.valkey.news";
    crate::fabric_world::topic(pair.client(), NEWS).await;
    pair.subscribe(NEWS, "/news").await;
    pair.selects(NEWS, "nats-v1", SOON).await;
    pair.round(&envelope("live").event_type(NEWS), SOON).await;
    keyed(pair.client(), TYPE, "domain", "optional").await;
    pair.subscribe(TYPE, "/hook").await;
    pair.excludes(TYPE, ID, "not connected (valkey-v1)", SOON).await;
    pair.round(&event(1), SOON).await;
    valkey.revive().await;
    pair.selects(TYPE, ID, BACK).await;
    selects(pair.worker.client(), TYPE, ID, BACK).await;
    pair.round(&event(1), SOON).await;
    assert_eq!((pair.placed_on(ID).await, pair.placed_on("nats-v1").await), (1, 1));
    pair.all_sent_once(3, SOON).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_server_opens_the_breaker_and_one_trial_at_a_time_closes_it_without_any_traffic() {
    let (_broker, proxy, pair) = through_a_proxy().await;
    let ledger = Ledger::default().route_type("/hook", TYPE);
    // Slower than a call may take, and quick enough to be connected.
    proxy.delay(Duration::from_millis(200));
    pair.round(&event(9), Duration::from_secs(5)).await;
    pair.publish_until(
        &ledger,
        event,
        pair.excludes(TYPE, ID, "breaker open (valkey-v1)", TOLD),
    )
    .await;
    ledger.settle(&pair.receiver, SOON).await;
    let opened = carrier(pair.client(), ID).await;
    assert_eq!(
        (&opened["state"], &opened["reason"]),
        (&json!("down"), &json!("breaker open (valkey-v1)"))
    );
    let failed = async || metric(pair.client(), r#"events_carrier_signals_total{carrier="valkey-v1""#).await;
    let before = failed().await;
    eventually("a trial failed and it is open for longer", BACK, async || {
        let shown = carrier(pair.client(), ID).await;
        let wait = shown["breaker"]["trial_in_ms"].as_u64().unwrap_or(0);
        (wait > 1_300).then_some(()).ok_or(shown["breaker"].to_string())
    })
    .await;
    // It is asked, and no signal is risked on it.
    assert!((failed().await - before).abs() < f64::EPSILON);
    assert_eq!(
        reason(&explain(pair.client(), TYPE, None).await, ID),
        "breaker open (valkey-v1)"
    );
    proxy.restore();
    pair.selects(TYPE, ID, Duration::from_secs(60)).await;
    let closed = carrier(pair.client(), ID).await;
    assert_eq!(closed["breaker"], json!({ "state": "closed", "trial_in_ms": null }));
    pair.round(&event(1), SOON).await;
    pair.all_sent_once(ledger.len() + 2, SOON).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_carrier_loses_to_the_floor_by_latency_and_wins_again_when_it_is_quick() {
    let broker = Broker::valkey().await;
    let proxy = Proxy::start(&broker.address()).await;
    // The floor promises 25 ms.
    let env = [
        ("VALKEY_URL", url("redis", proxy.address())),
        ("EVENTS_WORKER_INTERVAL_MS", "50".to_owned()),
    ];
    let env: Vec<_> = env.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let pair = Pair::start(&env).await;
    keyed(pair.client(), TYPE, "domain", "optional").await;
    pair.selects(TYPE, ID, SOON).await;
    proxy.delay(Duration::from_millis(60));
    pair.selects(TYPE, "pg-v1", SOON).await;
    let explained = explain(pair.client(), TYPE, None).await;
    assert_eq!(
        reason(&explained, ID),
        "",
        "it could be used: {}",
        explained["placement"]
    );
    proxy.restore();
    pair.selects(TYPE, ID, Duration::from_secs(60)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_drains_in_order_at_the_receivers_speed_once_the_breaker_has_closed() {
    const EVENTS: usize = 10_000;
    const KEYS: usize = 200;
    let (_broker, proxy, pair) = through_a_proxy().await;
    pair.receiver
        .answer_with("/hook", |_| Answer::status(204).after(Duration::from_millis(1)));
    let ledger = Ledger::default().route_type("/hook", TYPE);
    proxy.cut();
    pair.worker.freeze();
    for first in (0..EVENTS).step_by(100) {
        let events: Vec<Envelope> = (first..first + 100).map(|n| event(n % KEYS)).collect();
        let answer = pair.client().publish_as("live", &batch(&events)).await;
        assert_eq!(answer.status, 201, "{}", answer.text);
        ledger.note(&events, &answer);
    }
    proxy.restore();
    pair.selects(TYPE, ID, BACK).await;
    pair.worker.thaw();
    const OTHER: &str = "live.valkey.other";
    pair.subscribe(OTHER, "/other").await;
    let before = Instant::now();
    pair.client()
        .publish(&envelope("live").event_type(OTHER))
        .await
        .expect(201);
    pair.receiver.wait_calls_to("/other", 1, Duration::from_secs(10)).await;
    println!("an event to another subscription arrived after {:?}", before.elapsed());
    ledger.settle(&pair.receiver, Duration::from_secs(60)).await;
    pair.all_sent_once(EVENTS + 1, SOON).await;
    assert_in_order(&pair.receiver, "/hook", pair.database.pool(), subject_of).await;
}

/// A command for Valkey.
fn command(parts: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", parts.len()).into_bytes();
    for part in parts {
        bytes.extend(format!("${}\r\n", part.len()).into_bytes());
        bytes.extend(*part);
        bytes.extend(b"\r\n");
    }
    bytes
}

/// Adds entries to the stream of signals, as somebody who may do anything there.
async fn forge(broker: &Broker, entries: &[&[u8]]) {
    let mut bytes = command(&[b"AUTH", b"admin", b"admin"]);
    for entry in entries {
        bytes.extend(command(&[b"XADD", b"ov:events:q:fabric.queue", b"*", b"d", entry]));
    }
    bytes.extend(command(&[b"ECHO", b"the-end"]));
    speak(broker, &bytes, "the-end").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn forged_signals_cause_nothing_and_the_real_one_behind_them_arrives() {
    let broker = Broker::valkey().await;
    let pair = Pair::start(&[("VALKEY_URL", &url("redis", broker.address()))]).await;
    keyed(pair.client(), TYPE, "domain", "optional").await;
    let subscription = pair.subscribe(TYPE, "/hook").await;
    pair.selects(TYPE, ID, SOON).await;
    let stranger = envelope("live");
    let unknown = json!({ "event_id": stranger.id(), "subscription_id": subscription }).to_string();
    let nobody = json!({ "event_id": stranger.id(), "subscription_id": "sub_01K7AAB2CD3EF4GH5JK6MN7PQR" }).to_string();
    let long = "x".repeat(10_000_000);
    let entries: [&[u8]; 6] = [
        unknown.as_bytes(),
        nobody.as_bytes(),
        b"{}",
        b"\xff\x00\x01",
        b"",
        long.as_bytes(),
    ];
    forge(&broker, &entries).await;
    pair.round(&event(1), SOON).await;
    pair.all_sent_once(1, SOON).await;
    assert!(pair.worker.is_alive());
}

#[tokio::test(flavor = "multi_thread")]
async fn word_of_everything_over_and_over_is_looked_into_now_and_then() {
    let broker = Broker::valkey().await;
    let pair = Pair::start(&[("VALKEY_URL", &url("redis", broker.address()))]).await;
    pair.subscribe(TYPE, "/hook").await;
    pair.selects(TYPE, ID, SOON).await;
    pair.round(&event(1), SOON).await;
    let everything = br#"{"from":"nobody","ids":[],"everything":true}"#;
    let mut bytes = command(&[b"AUTH", b"admin", b"admin"]);
    for _ in 0..20 {
        bytes.extend(command(&[b"PUBLISH", b"ov:events:ps:fabric.topic", everything]));
    }
    bytes.extend(command(&[b"ECHO", b"the-end"]));
    let looks = "SELECT (sum(idx_scan) + sum(seq_scan))::bigint FROM pg_stat_user_tables WHERE relname = 'deliveries'";
    let before = number(&pair.database, looks).await;
    let began = Instant::now();
    let mut said = 0;
    while began.elapsed() < Duration::from_secs(2) {
        speak(&broker, &bytes, "the-end").await;
        said += 20;
    }
    // The server's counts come late; what has come by then is enough to tell.
    pair.round(&event(1), SOON).await;
    let looked = number(&pair.database, looks).await - before;
    assert!(looked < 250, "{said} words, {looked} looks");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_that_is_repeated_fifty_times_from_two_sides_sends_once() {
    let broker = Broker::valkey().await;
    let env = url("redis", broker.address());
    let pair = Pair::start(&[("VALKEY_URL", &env)]).await;
    let other = pair.another(&[("VALKEY_URL", &env)]).await;
    keyed(pair.client(), TYPE, "domain", "optional").await;
    let subscription = pair.subscribe(TYPE, "/hook").await;
    pair.selects(TYPE, ID, SOON).await;
    pair.receiver
        .answer_with("/hook", |_| Answer::status(204).after(Duration::from_millis(200)));
    let event = event(1);
    let signal = json!({ "event_id": event.id(), "subscription_id": subscription }).to_string();
    let entries = vec![signal.as_bytes(); 25];
    pair.client().publish(&event).await.expect(201);
    tokio::join!(forge(&broker, &entries), forge(&broker, &entries));
    pair.all_sent_once(1, SOON).await;
    stays("it is not sent again", Duration::from_secs(1), async || {
        pair.receiver.calls().len() == 1
    })
    .await;
    assert!(other.is_alive());
}

#[tokio::test(flavor = "multi_thread")]
async fn signals_go_out_in_one_round_trip_for_each_window_and_not_for_each_delivery() {
    const SUBSCRIPTIONS: usize = 40;
    let broker = Broker::valkey().await;
    let pair = Pair::start(&[("VALKEY_URL", &url("redis", broker.address()))]).await;
    keyed(pair.client(), TYPE, "domain", "optional").await;
    for n in 0..SUBSCRIPTIONS {
        let endpoint = pair.receiver.url(&format!("/hook/{n}"));
        subscribe_with(
            pair.client(),
            &json!({ "topic_pattern": TYPE, "endpoint": endpoint, "max_inflight": 50 }),
        )
        .await;
    }
    pair.selects(TYPE, ID, SOON).await;
    let calls = r#"events_carrier_signal_seconds_count{carrier="valkey-v1""#;
    let signals = r#"events_carrier_signals_total{carrier="valkey-v1""#;
    let before = (metric(pair.client(), calls).await, metric(pair.client(), signals).await);
    let events: Vec<Envelope> = (0..20).map(event).collect();
    let answer = pair.client().publish_as("live", &batch(&events)).await;
    assert_eq!(answer.status, 201, "{}", answer.text);
    pair.all_sent_once(events.len() * SUBSCRIPTIONS, Duration::from_secs(60))
        .await;
    let (trips, sent) = (
        metric(pair.client(), calls).await - before.0,
        metric(pair.client(), signals).await - before.1,
    );
    println!(
        "{} deliveries: {trips} round trips with {sent} signals",
        events.len() * SUBSCRIPTIONS
    );
    // One group, 40 subscriptions with work: 40 signals in one trip, or in two where the group was cut.
    assert!((1.0..=3.0).contains(&trips), "{trips} round trips");
    assert!((40.0..=120.0).contains(&sent), "{sent} signals");
    let stored = "SELECT count(*) FROM deliveries WHERE carrier = 'valkey-v1'";
    assert_eq!(number(&pair.database, stored).await, 800);
}

#[tokio::test(flavor = "multi_thread")]
async fn work_of_a_subscription_gathers_into_one_signal_while_a_call_is_under_way() {
    const EVENTS: usize = 60;
    let (_broker, proxy, pair) = through_a_proxy().await;
    proxy.delay(Duration::from_millis(40));
    let calls = r#"events_carrier_signal_seconds_count{carrier="valkey-v1""#;
    let signals = r#"events_carrier_signals_total{carrier="valkey-v1""#;
    let before = (metric(pair.client(), calls).await, metric(pair.client(), signals).await);
    let began = Instant::now();
    for n in 0..EVENTS {
        pair.client().publish(&event(n)).await.expect(201);
    }
    let took = began.elapsed();
    pair.all_sent_once(EVENTS, SOON).await;
    let trips = metric(pair.client(), calls).await - before.0;
    let sent = metric(pair.client(), signals).await - before.1;
    println!("{EVENTS} publishes in {took:?}: {trips} round trips with {sent} signals");
    assert!(
        (trips - sent).abs() < f64::EPSILON,
        "one subscription, one signal a trip"
    );
    // No more trips than there was time for, one after the other.
    assert!(
        trips <= took.as_secs_f64() / 0.08 + 2.0,
        "{trips} round trips in {took:?}"
    );
}

/// How much memory the server may use, by its operator; 0 is any.
async fn limit_memory(broker: &Broker, bytes: &str) {
    let said = format!("AUTH admin admin\r\nCONFIG SET maxmemory {bytes}\r\nECHO the-end\r\n");
    let answer = speak(broker, said.as_bytes(), "the-end").await;
    assert!(!answer.starts_with('-') && !answer.contains("\n-"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_answers_and_takes_no_signals_is_excluded_until_it_takes_one() {
    let broker = Broker::valkey().await;
    let pair = Pair::start(&[("VALKEY_URL", &url("redis", broker.address()))]).await;
    keyed(pair.client(), TYPE, "domain", "optional").await;
    pair.subscribe(TYPE, "/hook").await;
    pair.selects(TYPE, ID, SOON).await;
    pair.round(&event(1), SOON).await;
    let ledger = Ledger::default().route_type("/hook", TYPE);
    limit_memory(&broker, "1").await;
    pair.publish_until(&ledger, event, async {
        pair.excludes(TYPE, ID, "breaker open (valkey-v1)", TOLD).await;
        stays("it is not chosen again", Duration::from_secs(4), async || {
            reason(&explain(pair.client(), TYPE, None).await, ID) == "breaker open (valkey-v1)"
        })
        .await;
    })
    .await;
    ledger.settle(&pair.receiver, SOON).await;
    let moves = "SELECT count(*) FROM delivery_placements";
    assert_eq!(number(&pair.database, moves).await, 2, "to it, and away from it");
    limit_memory(&broker, "0").await;
    pair.publish_until(&ledger, event, pair.selects(TYPE, ID, BACK)).await;
    ledger.settle(&pair.receiver, SOON).await;
    pair.all_sent_once(ledger.len() + 1, SOON).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_was_busy_is_used_again_where_nothing_but_news_is_sent() {
    let broker = Broker::valkey().await;
    let pair = Pair::start(&[("VALKEY_URL", &url("redis", broker.address()))]).await;
    topic(pair.client(), TYPE).await;
    pair.selects(TYPE, ID, SOON).await;
    // Logged in before, since that is refused as well while a script does not end.
    let mut operators = Vec::new();
    for _ in 0..2 {
        let mut line = TcpStream::connect(broker.address()).await.expect("the broker answers");
        let login = b"AUTH admin admin\r\nCONFIG SET busy-reply-threshold 1\r\n";
        line.write_all(login).await.expect("sent");
        line.read_exact(&mut [0; 10]).await.expect("done, twice");
        operators.push(line);
    }
    let script = b"EVAL \"while true do end\" 0\r\n";
    operators[0].write_all(script).await.expect("sent");
    // Nobody subscribes, so there are no deliveries: live streams alone are told.
    eventually("the breaker opens", SOON, async || {
        pair.client().publish(&event(1)).await.expect(201);
        let breaker = carrier(pair.client(), ID).await["breaker"].clone();
        (breaker["state"] == "open").then_some(()).ok_or(breaker)
    })
    .await;
    operators[1].write_all(b"SCRIPT KILL\r\n").await.expect("sent");
    eventually("it is used again", BACK, async || {
        pair.client().publish(&event(1)).await.expect(201);
        let explained = explain(pair.client(), TYPE, None).await["placement"].clone();
        (explained["selected"] == ID).then_some(()).ok_or(explained)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_waits_on_a_carrier_above_its_ceiling_is_rung_by_the_one_that_explain_names() {
    let (_broker, proxy, pair) = through_a_proxy().await;
    let policy = json!({
        "class": "domain", "durability": "optional", "delivery_semantics": "at_least_once",
        "ordering": { "scope": "key", "key": "subject" }, "latency": { "maximum_p95_ms": 50 },
    });
    put_policy(pair.client(), TYPE, &policy).await;
    pair.receiver.answer_with("/hook", |_| Answer::hang(204));
    pair.round(&event(1), SOON).await;
    assert_eq!(pair.placed_on(ID).await, 1);
    proxy.delay(Duration::from_millis(80));
    let route = "the backlog of this key stays on valkey-v1 until it has drained; signals go through pg-v1 meanwhile";
    eventually("explain names another", SOON, async || {
        let explained = explain(pair.client(), TYPE, Some("thing:1")).await["placement"].clone();
        (explained["reasons"][0] == route).then_some(()).ok_or(explained)
    })
    .await;
    let sent = async |carrier: &str| {
        metric(
            pair.client(),
            &format!("events_carrier_signals_total{{carrier=\"{carrier}\""),
        )
        .await
    };
    let before = (sent(ID).await, sent("pg-v1").await);
    pair.client().publish(&event(1)).await.expect(201);
    eventually("the other one rings", SOON, async || sent("pg-v1").await > before.1).await;
    assert_eq!(pair.placed_on(ID).await, 2, "the key stays together");
    assert!((sent(ID).await - before.0).abs() < f64::EPSILON, "it is not rung");
    pair.receiver.release();
}
