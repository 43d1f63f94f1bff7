//! `nats-js-v1` under the service as it is run: ordered work over a stream that processes share, and what happens without it.

use std::time::Duration;

use serde_json::json;

use crate::{
    fabric_world::{
        BACK, NO_POLL, Pair, QUICK, TOLD, candidate, explain, keyed, median, selects, speak, subject_of, url,
    },
    support::{
        broker::{Broker, PASSWORD},
        envelopes::{Envelope, batch, envelope},
        ledger::{Ledger, assert_in_order},
        proxy::Proxy,
        receiver::Answer,
        wait::{SOON, eventually, stays},
    },
};

const ID: &str = "nats-js-v1";
const TYPE: &str = "live.js.ordered";

fn event(subject: usize) -> Envelope {
    envelope("live").event_type(TYPE).subject("thing", &subject.to_string())
}

async fn pair_on(url: &str) -> Pair {
    subscribed(url).await.0
}

/// Two processes, and the subscription to what is published.
async fn subscribed(url: &str) -> (Pair, String) {
    let pair = Pair::start(&[("NATS_URL", url)]).await;
    keyed(pair.client(), TYPE, "domain", "required").await;
    let subscription = pair.subscribe(TYPE, "/hook").await;
    pair.selects(TYPE, ID, SOON).await;
    selects(pair.worker.client(), TYPE, ID, SOON).await;
    (pair, subscription)
}

#[tokio::test(flavor = "multi_thread")]
async fn ordered_work_crosses_long_before_any_poll_with_the_floor_beneath() {
    let broker = Broker::nats().await;
    let pair = pair_on(&url("nats", broker.address())).await;
    let explained = explain(pair.client(), TYPE, Some("thing:1")).await;
    assert_eq!(candidate(&explained, "pg-v1").expect("the floor")["eligible"], true);
    let mut took = Vec::new();
    for n in 0..30 {
        took.push(pair.round(&event(n % 3), SOON).await);
    }
    let median = median(took);
    println!("{ID}: median from the publish to its POST: {median:?}");
    assert!(median < QUICK, "{median:?}");
    pair.all_sent_once(30, SOON).await;
    assert_in_order(&pair.receiver, "/hook", pair.database.pool(), subject_of).await;
    assert_eq!(pair.placed_on(ID).await, 30);
    let elsewhere = explain(pair.client(), "live.js.queue", None).await;
    assert_eq!(candidate(&elsewhere, ID), None, "{elsewhere}");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_consumers_send_each_once_and_each_subject_in_order() {
    let broker = Broker::nats().await;
    let address = url("nats", broker.address());
    let pair = pair_on(&address).await;
    let other = pair.another(&[("NATS_URL", &address)]).await;
    selects(other.client(), TYPE, ID, SOON).await;
    let events: Vec<Envelope> = (0..60).map(|n| event(n % 2)).collect();
    for some in events.chunks(6) {
        let answer = pair.client().publish_as("live", &batch(some)).await;
        assert_eq!(answer.status, 201, "{}", answer.text);
    }
    pair.all_sent_once(60, SOON).await;
    assert_in_order(&pair.receiver, "/hook", pair.database.pool(), subject_of).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_killed_while_it_sends_leaves_the_key_in_order_to_the_other() {
    let broker = Broker::nats().await;
    let address = url("nats", broker.address());
    let pair = pair_on(&address).await;
    pair.receiver.answer_with("/hook", |call| match call.attempt() {
        1 if call.json()["event"]["payload"]["first"] == true => Answer::hang(204),
        _ => Answer::status(204),
    });
    let first = event(1).payload(json!({ "first": true }));
    pair.client().publish(&first).await.expect(201);
    pair.receiver.wait_calls(1, SOON).await;
    let other = pair.another(&[("NATS_URL", &address)]).await;
    let rest: Vec<Envelope> = (0..5).map(|_| event(1)).collect();
    let answer = pair.client().publish_as("live", &batch(&rest)).await;
    assert_eq!(answer.status, 201, "{}", answer.text);
    pair.worker.kill().await;
    let calls = pair.receiver.wait_calls(7, Duration::from_secs(30)).await;
    let ids: Vec<&str> = calls.iter().map(|call| call.event_id()).collect();
    let expected: Vec<&str> = [&first, &first].into_iter().chain(&rest).map(Envelope::id).collect();
    assert_eq!(
        ids, expected,
        "the one that was under way comes again, the others once and in order"
    );
    stays("nothing more is sent", Duration::from_millis(500), async || {
        pair.receiver.calls().len() == 7
    })
    .await;
    assert!(other.is_alive());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_cut_off_leaves_ordered_work_to_the_floor_and_is_used_again() {
    let broker = Broker::nats().await;
    let proxy = Proxy::start(&broker.address()).await;
    let pair = pair_on(&url("nats", proxy.address())).await;
    let ledger = Ledger::default().route_type("/hook", TYPE);
    // Signalled, stored by the broker and consumed by nobody.
    pair.worker.freeze();
    let early: Vec<Envelope> = (0..20).map(event).collect();
    ledger.note(&early, &pair.client().publish_as("live", &batch(&early)).await);
    proxy.cut();
    pair.publish_until(
        &ledger,
        event,
        pair.excludes(TYPE, ID, "not connected (nats-js-v1)", TOLD),
    )
    .await;
    pair.worker.thaw();
    ledger.settle(&pair.receiver, Duration::from_secs(30)).await;
    let on_the_floor = pair.placed_on("pg-v1").await;
    proxy.restore();
    pair.publish_until(&ledger, event, pair.selects(TYPE, ID, BACK)).await;
    ledger.settle(&pair.receiver, Duration::from_secs(30)).await;
    selects(pair.worker.client(), TYPE, ID, BACK).await;
    let before = pair.placed_on(ID).await;
    pair.round(&event(1), SOON).await;
    assert_eq!(pair.placed_on(ID).await, before + 1);
    assert!(pair.placed_on("pg-v1").await >= on_the_floor);
    pair.all_sent_once(ledger.len() + 1, SOON).await;
    assert_in_order(&pair.receiver, "/hook", pair.database.pool(), subject_of).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_dies_between_a_commit_and_its_signal_costs_no_answer_and_no_delivery() {
    let broker = Broker::nats().await;
    let proxy = Proxy::start(&broker.address()).await;
    let pair = pair_on(&url("nats", proxy.address())).await;
    let ledger = Ledger::default().route_type("/hook", TYPE);
    // The signal reaches the broker, and no acknowledgement ever comes back.
    proxy.hold_answers();
    let (mut n, broker) = (0, &broker);
    pair.publish_until(
        &ledger,
        |subject| {
            n += 1;
            if n == 5 {
                broker.kill();
            }
            event(subject)
        },
        async {
            eventually("it is not chosen any more", TOLD, async || {
                explain(pair.client(), TYPE, None).await["placement"]["selected"] == "pg-v1"
            })
            .await;
        },
    )
    .await;
    assert!(ledger.len() >= 5);
    ledger.settle(&pair.receiver, SOON).await;
    pair.all_sent_once(ledger.len(), SOON).await;
    broker.revive().await;
    proxy.restore();
    pair.selects(TYPE, ID, BACK).await;
    pair.round(&event(1), SOON).await;
    pair.all_sent_once(ledger.len() + 1, SOON).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn forged_messages_cause_nothing_and_the_real_one_behind_them_is_sent_once() {
    let broker = Broker::nats().await;
    let (pair, subscription) = subscribed(&url("nats", broker.address())).await;
    let elsewhere = pair.subscribe("live.js.never", "/never").await;
    let stranger = envelope("live");
    let forged = [
        json!({ "event_id": stranger.id(), "subscription_id": elsewhere })
            .to_string()
            .into_bytes(),
        json!({ "event_id": stranger.id(), "subscription_id": "sub_01K7AAB2CD3EF4GH5JK6MN7PQR" })
            .to_string()
            .into_bytes(),
        b"nonsense".to_vec(),
        b"\xff\x00".to_vec(),
    ];
    let mut bytes =
        format!("CONNECT {{\"user\":\"events\",\"pass\":\"{PASSWORD}\",\"verbose\":false}}\r\n").into_bytes();
    for message in forged {
        bytes.extend(format!("PUB ov.events.fabric.stream._ {}\r\n", message.len()).into_bytes());
        bytes.extend(message);
        bytes.extend(b"\r\n");
    }
    bytes.extend(b"PING\r\n");
    speak(&broker, &bytes, "PONG").await;
    let real = event(1);
    pair.round(&real, SOON).await;
    // Fifty more of the real one find it done.
    let again = json!({ "event_id": real.id(), "subscription_id": subscription }).to_string();
    let mut bytes = format!("CONNECT {{\"user\":\"events\",\"pass\":\"{PASSWORD}\",\"verbose\":false}}\r\n");
    for _ in 0..50 {
        bytes.push_str(&format!("PUB ov.events.fabric.stream._ {}\r\n{again}\r\n", again.len()));
    }
    bytes.push_str("PING\r\n");
    speak(&broker, bytes.as_bytes(), "PONG").await;
    pair.round(&event(1), SOON).await;
    pair.all_sent_once(2, SOON).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_jetstream_ordered_work_is_on_the_floor_and_the_other_carrier_of_nats_is_not_hurt() {
    let broker = Broker::nats().await;
    let address = url("nats", broker.address());
    let pair = Pair::start(&[("NATS_URL", &address), ("NATS_JETSTREAM", "off"), NO_POLL]).await;
    keyed(pair.client(), TYPE, "domain", "required").await;
    pair.subscribe(TYPE, "/hook").await;
    let explained = explain(pair.client(), TYPE, None).await;
    assert_eq!(candidate(&explained, ID), None, "{explained}");
    assert_eq!(explained["placement"]["selected"], "pg-v1");
    pair.round(&event(1), SOON).await;
    assert_eq!(pair.placed_on("pg-v1").await, 1);
    crate::fabric_world::topic(pair.client(), "live.js.news").await;
    pair.selects("live.js.news", "nats-v1", SOON).await;
}
