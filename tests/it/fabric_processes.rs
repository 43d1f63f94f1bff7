//! Several processes behind one set of brokers: what is sent, how often and in which order, when one of them is killed, has
//! another time of day, or works while a policy changes or PostgreSQL restarts.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use sqlx::PgPool;

use crate::{
    api_world::operator,
    delivery_processes::{SHIFT_S, drain_through_a_restart, shift_of, shifted_clock, switch_a_policy},
    fabric_world::{Brokers, NO_POLL, Pair, keyed, number, put_policy, selects, subject_of, subscribe_with},
    support::{
        client::Client,
        envelopes::{Envelope, batch, envelope},
        ledger::{Ledger, assert_in_order},
        receiver::Answer,
        service::Service,
        wait::{SOON, eventually, stays},
    },
};

/// How soon the work of a killed process is with another one: nobody may take it for dead before four seconds have passed.
const MOVES_ON: Duration = Duration::from_secs(6);

/// A subscription of its own cap.
async fn subscribe(pair: &Pair, event_type: &str, max_inflight: u32) -> String {
    let body = json!({
        "topic_pattern": event_type, "endpoint": pair.receiver.url("/hook"), "max_inflight": max_inflight,
        "retry_policy": { "max_attempts": 20, "backoff_ms": [60] },
    });
    subscribe_with(pair.client(), &body).await
}

/// The events that this process has claimed and not recorded, by the database.
async fn held_by(service: &Service, pool: &PgPool) -> BTreeSet<String> {
    sqlx::query_scalar("SELECT event_id FROM deliveries WHERE lease_owner LIKE '%:' || $1 || ':%'")
        .bind(service.pid().to_string())
        .fetch_all(pool)
        .await
        .expect("the claims")
        .into_iter()
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_process_held_is_sent_by_the_other_in_seconds_and_nothing_else_comes_twice() {
    const TYPE: &str = "live.killed.keyed";
    let brokers = Brokers::start().await;
    let pair = Pair::start(&brokers.env()).await;
    let other = pair.another(&brokers.env()).await;
    keyed(pair.client(), TYPE, "domain", "optional").await;
    subscribe(&pair, TYPE, 6).await;
    for client in [pair.client(), pair.worker.client(), other.client()] {
        selects(client, TYPE, "valkey-v1", SOON).await;
    }
    pair.receiver
        .answer_with("/hook", |_| Answer::status(204).after(Duration::from_millis(50)));
    let event = |subject: usize| envelope("live").event_type(TYPE).subject("thing", &subject.to_string());
    let ledger = Ledger::default().route_type("/hook", TYPE);
    let (mut held, mut killed) = (BTreeSet::new(), Instant::now());
    pair.publish_until(&ledger, event, async {
        pair.receiver.wait_calls(20, SOON).await;
        eventually("it is sending", SOON, async || {
            !held_by(&pair.worker, pair.database.pool()).await.is_empty()
        })
        .await;
        pair.worker.kill().await;
        killed = Instant::now();
        held = held_by(&pair.worker, pair.database.pool()).await;
        let before = pair.receiver.calls().len();
        pair.receiver.wait_calls(before + 10, SOON).await;
    })
    .await;
    ledger.settle(&pair.receiver, MOVES_ON + Duration::from_secs(2)).await;
    eventually("everything is recorded", SOON, async || {
        number(
            &pair.database,
            "SELECT count(*) FROM deliveries WHERE status <> 'delivered'",
        )
        .await
            == 0
    })
    .await;
    let mut times: BTreeMap<String, usize> = BTreeMap::new();
    for call in pair.receiver.calls() {
        let times = times.entry(call.event_id().to_owned()).or_default();
        *times += 1;
        if *times > 1 {
            let (id, late) = (call.event_id(), call.arrived.saturating_duration_since(killed));
            assert!(held.contains(id), "{id} came again and was not under way");
            assert!(
                *times == 2 && late < MOVES_ON,
                "{id} came {times} times, the last after {late:?}"
            );
        }
    }
    assert_in_order(&pair.receiver, "/hook", pair.database.pool(), subject_of).await;
    println!(
        "{} were under way, {} came again",
        held.len(),
        times.values().filter(|times| **times > 1).count()
    );
    assert!(other.is_alive());
}

#[tokio::test(flavor = "multi_thread")]
async fn clocks_a_minute_apart_cost_no_lease_and_no_signal() {
    const EACH: usize = 250;
    const TYPES: [(&str, &str, &str); 2] = [
        ("live.shifted.queue", "optional", "valkey-v1"),
        ("live.shifted.stream", "required", "nats-js-v1"),
    ];
    let brokers = Brokers::start().await;
    let library = shifted_clock();
    let library = library.to_str().expect("a plain path");
    let (ahead, behind) = (SHIFT_S.to_string(), (-SHIFT_S).to_string());
    let with = |shift| {
        let clock = [("LD_PRELOAD", library), ("OV_CLOCK_SHIFT_S", shift)];
        brokers.env().into_iter().chain(clock).collect::<Vec<_>>()
    };
    let pair = Pair::start_with(&with(&ahead), &with(&behind)).await;
    let other = pair.another(&with(&ahead)).await;
    // A few attempts last for longer than an owner that does not renew is taken for alive.
    pair.receiver.answer_with("/hook", |call| {
        let long = call.json()["event"]["payload"]["long"] == true;
        Answer::status(204).after(Duration::from_millis(if long { 5_000 } else { 3 }))
    });
    let mut ledger = Ledger::default();
    for (event_type, durability, carrier) in TYPES {
        keyed(pair.client(), event_type, "domain", durability).await;
        subscribe(&pair, event_type, 16).await;
        for client in [pair.client(), pair.worker.client(), other.client()] {
            selects(client, event_type, carrier, SOON).await;
        }
        ledger = ledger.route_type("/hook", event_type);
    }
    // One publishes and sends nothing, the other does both.
    let publish = async |client: &Client, side: &str| {
        for n in 0..EACH {
            let event = envelope("live")
                .event_type(TYPES[n % 2].0)
                .subject("thing", &format!("{side}{}", n % 20))
                .payload(json!({ "long": n < 4 }));
            let answer = client.publish(&event).await;
            assert_eq!(answer.status, 201, "{}", answer.text);
            ledger.note([&event], &answer);
        }
    };
    tokio::join!(publish(pair.client(), "a"), publish(other.client(), "b"));
    ledger.settle(&pair.receiver, Duration::from_secs(30)).await;
    pair.all_sent_once(EACH * 2, SOON).await;
    let key = |call: &crate::support::receiver::Call| {
        let event: &Value = &call.json()["event"];
        format!("{} {}", event["event_type"], event["subject"]["id"])
    };
    assert_in_order(&pair.receiver, "/hook", pair.database.pool(), key).await;
    for (_, _, carrier) in TYPES {
        assert!(pair.placed_on(carrier).await > 0, "{carrier}");
    }
    let again = "SELECT count(*) FROM deliveries WHERE attempt <> 1";
    assert_eq!(number(&pair.database, again).await, 0, "no lease was taken early");
    let shifts: BTreeSet<i64> = pair.receiver.calls().iter().map(|call| shift_of(call)).collect();
    let near = |shift: i64| shifts.iter().any(|seen| (seen - shift).abs() <= 2);
    assert!(near(SHIFT_S) && near(-SHIFT_S), "both took part: {shifts:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cap_of_four_holds_for_a_thousand_events_that_two_processes_are_woken_for() {
    const EVENTS: usize = 1_000;
    const TYPE: &str = "live.capped.free";
    let brokers = Brokers::start().await;
    let pair = Pair::start(&brokers.env()).await;
    let other = pair.another(&brokers.env()).await;
    subscribe(&pair, TYPE, 4).await;
    for client in [pair.client(), pair.worker.client(), other.client()] {
        selects(client, TYPE, "valkey-v1", SOON).await;
    }
    pair.receiver
        .answer_with("/hook", |_| Answer::status(204).after(Duration::from_millis(5)));
    for _ in 0..EVENTS / 100 {
        let events: Vec<Envelope> = (0..100).map(|_| envelope("live").event_type(TYPE)).collect();
        let answer = pair.client().publish_as("live", &batch(&events)).await;
        assert_eq!(answer.status, 201, "{}", answer.text);
    }
    pair.all_sent_once(EVENTS, Duration::from_secs(60)).await;
    assert_eq!(pair.receiver.peak("/hook"), 4, "all of the cap is used, and no more");
    assert_eq!(pair.placed_on("valkey-v1").await, i64::try_from(EVENTS).expect("few"));
    assert!(other.is_alive());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_may_leave_once_is_dead_when_its_process_is_killed_behind_the_post_and_never_comes_again() {
    const TYPE: &str = "live.once.only";
    let brokers = Brokers::start().await;
    let pair = Pair::start(&brokers.env()).await;
    let once = json!({ "class": "domain", "durability": "optional", "delivery_semantics": "at_most_once" });
    put_policy(pair.client(), TYPE, &once).await;
    subscribe(&pair, TYPE, 1).await;
    pair.selects(TYPE, "valkey-v1", SOON).await;
    selects(pair.worker.client(), TYPE, "valkey-v1", SOON).await;
    pair.receiver.answer_with("/hook", |call| match call.number {
        1 => Answer::hang(204),
        _ => Answer::status(204),
    });
    let first = envelope("live").event_type(TYPE);
    pair.client().publish(&first).await.expect(201);
    pair.receiver.wait_calls(1, SOON).await;
    let other = pair.another(&brokers.env()).await;
    selects(other.client(), TYPE, "valkey-v1", SOON).await;
    pair.worker.kill().await;
    let second = envelope("live").event_type(TYPE);
    pair.client().publish(&second).await.expect(201);
    pair.receiver.wait_calls(2, SOON).await;
    eventually("the first is dead and the second delivered", SOON, async || {
        let states: Vec<(String, String, i32)> =
            sqlx::query_as("SELECT event_id, status, attempt FROM deliveries ORDER BY seq")
                .fetch_all(pair.database.pool())
                .await
                .expect("the deliveries");
        let wanted = [
            (first.id().to_owned(), "dead".to_owned(), 1),
            (second.id().to_owned(), "delivered".to_owned(), 1),
        ];
        (states == wanted).then_some(()).ok_or(format!("{states:?}"))
    })
    .await;
    stays("it does not come again", Duration::from_secs(1), async || {
        let calls = pair.receiver.calls();
        calls.len() == 2 && calls[1].event_id() == second.id()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replays_of_what_runs_and_of_what_is_dead_keep_the_order_of_the_key() {
    const TYPE: &str = "live.replayed.ordered";
    let brokers = Brokers::start().await;
    let pair = Pair::start(&brokers.env()).await;
    keyed(pair.client(), TYPE, "domain", "required").await;
    let body = json!({
        "topic_pattern": TYPE, "endpoint": pair.receiver.url("/hook"), "max_inflight": 4,
        "retry_policy": { "max_attempts": 1, "backoff_ms": [50] },
    });
    let subscription = subscribe_with(pair.client(), &body).await;
    pair.selects(TYPE, "nats-js-v1", SOON).await;
    selects(pair.worker.client(), TYPE, "nats-js-v1", SOON).await;
    let event = || envelope("live").event_type(TYPE).subject("thing", "1");
    let replay = async |event: &Envelope| {
        let body = json!({ "subscription_id": subscription, "event_ids": [event.id()] });
        let answer = pair
            .client()
            .post("/api/v1/deliveries/replay", Some(&operator()), &body)
            .await;
        answer.expect(200);
    };
    let status = async |event: &Envelope| -> String {
        sqlx::query_scalar("SELECT status FROM deliveries WHERE event_id = $1")
            .bind(event.id())
            .fetch_one(pair.database.pool())
            .await
            .expect("its delivery")
    };
    let becomes = async |event: &Envelope, wanted: &str| {
        eventually("its state", SOON, async || {
            let status = status(event).await;
            (status == wanted).then_some(()).ok_or(status)
        })
        .await;
    };
    let ids = || -> Vec<String> {
        let calls = pair.receiver.calls();
        calls.iter().map(|call| call.event_id().to_owned()).collect()
    };

    // The head fails for good, what is behind it is delivered.
    pair.receiver.script("/hook", [500, 204]);
    let (dead, behind) = (event(), event());
    for one in [&dead, &behind] {
        pair.client().publish(one).await.expect(201);
    }
    becomes(&dead, "dead").await;
    becomes(&behind, "delivered").await;

    // One runs, two wait; then the dead one and the one that runs are replayed.
    pair.receiver.script("/hook", [Answer::hang(204), Answer::status(204)]);
    let [runs, next, last] = [event(), event(), event()];
    for one in [&runs, &next, &last] {
        pair.client().publish(one).await.expect(201);
    }
    pair.receiver.wait_calls(3, SOON).await;
    replay(&runs).await;
    replay(&dead).await;
    stays("nothing overtakes what runs", Duration::from_millis(300), async || {
        ids().len() == 3
    })
    .await;
    pair.receiver.release();
    for one in [&dead, &runs, &next, &last] {
        becomes(one, "delivered").await;
    }
    let expected = [&dead, &behind, &runs, &dead, &runs, &next, &last].map(|event| event.id().to_owned());
    assert_eq!(ids(), expected, "each replay is one more attempt, in its place");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_moves_work_from_one_broker_to_another_and_back_loses_nothing_and_keeps_order() {
    let brokers = Brokers::start().await;
    let env: Vec<_> = brokers
        .env()
        .into_iter()
        .chain([("EVENTS_WORKER_INTERVAL_MS", "500")])
        .collect();
    let database = switch_a_policy(&env).await;
    for carrier in ["valkey-v1", "nats-js-v1"] {
        let placed = format!("SELECT count(*) FROM deliveries WHERE carrier = '{carrier}'");
        assert!(number(&database, &placed).await > 0, "{carrier}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_of_postgresql_in_a_drain_that_brokers_wake_repeats_only_what_was_leased() {
    let brokers = Brokers::start().await;
    let env: Vec<_> = brokers.env().into_iter().chain([NO_POLL]).collect();
    let drained = drain_through_a_restart(3_000, &env).await;
    let placed = "SELECT count(*) FROM deliveries WHERE carrier = 'valkey-v1'";
    assert_eq!(number(&drained.database, placed).await, 3_000);
}
