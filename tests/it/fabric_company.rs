//! Healthy subscriptions beside endpoints that never answer, while a broker does the waking.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use serde_json::json;

use crate::{
    api_world::text,
    fabric_world::{Brokers, Pair, keyed, selects, subscribe, subscribe_with},
    support::{
        envelopes::{Envelope, batch, envelope},
        receiver::{Answer, Call},
        wait::{SOON, within},
    },
};

/// Events a second.
const RATE: u32 = 50;
/// Events of one measurement.
const EVENTS: usize = 75;
const HEALTHY: usize = 20;
/// What a busy machine may add to the 95th percentile of a few milliseconds.
const NOISE: Duration = Duration::from_millis(25);

fn type_of(n: usize) -> String {
    format!("live.company.n{}", n % HEALTHY)
}

/// Publishes at a steady pace, one event to each healthy subscription in turn; answers how late each arrived.
async fn lateness(pair: &Pair) -> Vec<Duration> {
    let mut pace = tokio::time::interval(Duration::from_secs(1) / RATE);
    let mut late = Vec::new();
    let mut sent = Vec::new();
    for n in 0..EVENTS {
        pace.tick().await;
        let event = envelope("live").event_type(&type_of(n));
        let began = Instant::now();
        pair.client().publish(&event).await.expect(201);
        sent.push((event, format!("/healthy/{}", n % HEALTHY), began));
    }
    let all = sent.len();
    pair.receiver
        .wait_until("the healthy ones have it", SOON, |receiver| {
            let calls = receiver.calls();
            let arrived = |(event, path, _): &&(Envelope, String, Instant)| {
                calls
                    .iter()
                    .any(|call| call.path() == path && call.event_id() == event.id())
            };
            sent.iter().filter(arrived).count() == all
        })
        .await;
    let calls = pair.receiver.calls();
    for (event, path, began) in sent {
        let own = |call: &&Arc<Call>| call.path() == path && call.event_id() == event.id();
        late.push(calls.iter().find(own).expect("it has arrived").arrived - began);
    }
    late
}

fn p95(mut late: Vec<Duration>) -> Duration {
    late.sort();
    late[late.len() * 95 / 100]
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_that_hangs_makes_no_healthy_one_slower() {
    let brokers = Brokers::start().await;
    let pair = Pair::start(&brokers.env()).await;
    for turn in 0..2 {
        pair.receiver
            .answer_with(&format!("/hangs/{turn}"), |_| Answer::hang(204));
    }
    for n in 0..HEALTHY {
        pair.subscribe(&type_of(n), &format!("/healthy/{n}")).await;
    }
    pair.selects(&type_of(0), "valkey-v1", SOON).await;
    selects(pair.worker.client(), &type_of(0), "valkey-v1", SOON).await;
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    // In turns, so that what else the machine does meets both.
    let stuck = pair.client().service_token("stuck");
    for turn in 0..2 {
        alone.extend(lateness(&pair).await);
        let endpoint = pair.receiver.url(&format!("/hangs/{turn}"));
        let body = json!({ "topic_pattern": "live.company.*", "endpoint": endpoint, "max_inflight": 64 });
        let hanging = pair
            .client()
            .post("/api/v1/subscriptions", Some(&stuck), &body)
            .await
            .expect(201);
        beside.extend(lateness(&pair).await);
        let path = format!("/api/v1/subscriptions/{}/disable", text(&hanging, "id"));
        let disabled = pair.client().post(&path, Some(&stuck), &json!({})).await;
        assert_eq!(disabled.status, 200, "{}", disabled.text);
    }
    let hung: usize = (0..2)
        .map(|turn| pair.receiver.calls_to(&format!("/hangs/{turn}")).len())
        .sum();
    let (alone, beside) = (p95(alone), p95(beside));
    println!("95 of 100 healthy arrive within {alone:?}, and within {beside:?} beside {hung} attempts that hang");
    assert!(hung >= 64, "{hung} attempts hung");
    assert!(
        beside <= alone.mul_f64(1.2).max(alone + NOISE),
        "{beside:?} instead of {alone:?}"
    );
    pair.receiver.release();
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_endpoints_that_hang_delay_an_event_to_a_healthy_one_by_nothing() {
    const TYPE: &str = "live.company.stuck";
    const BELL: &str = "live.company.bell";
    const ATTEMPTS: usize = 100;
    let brokers = Brokers::start().await;
    let pair = Pair::start(&brokers.env()).await;
    keyed(pair.client(), "live.company.*", "domain", "required").await;
    for n in 0..50 {
        let path = format!("/hangs/{n}");
        pair.receiver.answer_with(&path, |_| Answer::hang(204));
        let body = json!({ "topic_pattern": TYPE, "endpoint": pair.receiver.url(&path), "max_inflight": 2 });
        subscribe_with(pair.client(), &body).await;
    }
    subscribe(pair.client(), BELL, &pair.receiver.url("/healthy")).await;
    pair.selects(BELL, "nats-js-v1", SOON).await;
    selects(pair.worker.client(), BELL, "nats-js-v1", SOON).await;
    let events: Vec<_> = (0..10)
        .map(|n| envelope("live").event_type(TYPE).subject("thing", &n.to_string()))
        .collect();
    assert_eq!(pair.client().publish_as("live", &batch(&events)).await.status, 201);
    pair.receiver
        .wait_until("all of them hang", SOON, |receiver| {
            (0..50).all(|n| receiver.active(&format!("/hangs/{n}")) > 0)
        })
        .await;
    for n in 1..=5 {
        let began = Instant::now();
        pair.client()
            .publish(&envelope("live").event_type(BELL))
            .await
            .expect(201);
        let calls = within(
            "it arrives",
            Duration::from_secs(1),
            pair.receiver.wait_calls_to("/healthy", n, SOON),
        )
        .await;
        let late = calls[n - 1].arrived - began;
        assert!(late < Duration::from_secs(1), "{late:?}");
    }
    assert!(pair.receiver.calls().len() <= ATTEMPTS + 5);
    pair.receiver.release();
}
