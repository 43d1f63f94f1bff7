//! `nats-v1` under the service as it is run: news between processes, and what happens while the server is away, cut off,
//! silent or forbids it.

use std::time::Duration;

use serde_json::json;

use crate::{
    fabric_world::{
        BACK, Pair, QUICK, TOLD, candidate, carrier, explain, keyed, median, metric, reason, selects, speak, topic, url,
    },
    support::{
        broker::{Broker, PASSWORD},
        envelopes::{Envelope, envelope},
        ledger::Ledger,
        proxy::Proxy,
        wait::{SOON, eventually},
    },
};

const ID: &str = "nats-v1";
const TYPE: &str = "live.nats.news";

fn event(subject: usize) -> Envelope {
    envelope("live").event_type(TYPE).subject("thing", &subject.to_string())
}

async fn pair_on(url: &str) -> Pair {
    let pair = Pair::start(&[("NATS_URL", url), ("NATS_JETSTREAM", "off")]).await;
    topic(pair.client(), TYPE).await;
    pair.subscribe(TYPE, "/hook").await;
    pair
}

/// NATS with one user, `events`, of these rights.
fn with_rights(permissions: &str) -> String {
    format!(
        "authorization {{ users: [ {{ user: events, password: {PASSWORD}, permissions: {{ {permissions} }} }} ] }}\n"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn news_cross_long_before_any_poll_and_other_classes_are_not_its_own() {
    let broker = Broker::nats().await;
    let pair = pair_on(&url("nats", broker.address())).await;
    pair.selects(TYPE, ID, SOON).await;
    selects(pair.worker.client(), TYPE, ID, SOON).await;
    let mut took = Vec::new();
    for n in 0..30 {
        took.push(pair.round(&event(n), SOON).await);
    }
    let median = median(took);
    println!("{ID}: median from the publish to its POST: {median:?}");
    assert!(median < QUICK, "{median:?}");
    pair.all_sent_once(30, SOON).await;
    assert_eq!(pair.placed_on(ID).await, 30);
    keyed(pair.client(), "live.nats.stream", "domain", "required").await;
    for event_type in ["live.nats.stream", "live.nats.queue"] {
        let explained = explain(pair.client(), event_type, None).await;
        assert_eq!(candidate(&explained, ID), None, "{explained}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_away_is_named_until_it_comes() {
    let broker = Broker::nats().await;
    broker.kill();
    let pair = pair_on(&url("nats", broker.address())).await;
    pair.excludes(TYPE, ID, "not connected (nats-v1)", TOLD).await;
    pair.round(&event(1), SOON).await;
    broker.revive().await;
    pair.selects(TYPE, ID, BACK).await;
    selects(pair.worker.client(), TYPE, ID, BACK).await;
    pair.round(&event(2), SOON).await;
    assert_eq!((pair.placed_on("pg-v1").await, pair.placed_on(ID).await), (1, 1));
    pair.all_sent_once(2, SOON).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_on_an_open_connection_is_named_and_ends_when_it_is_lifted() {
    let all = with_rights(r#"publish: ">", subscribe: ">""#);
    let mute = with_rights(r#"publish: { deny: "ov.events.>" }, subscribe: ">""#);
    let broker = Broker::nats_with(&all).await;
    let pair = pair_on(&url("nats", broker.address())).await;
    pair.selects(TYPE, ID, SOON).await;
    broker.reload(&mute);
    let denied = "permission denied (nats-v1)";
    pair.excludes(TYPE, ID, denied, TOLD).await;
    pair.round(&event(1), SOON).await;
    broker.kill();
    broker.revive().await;
    pair.excludes(TYPE, ID, denied, SOON).await;
    broker.reload(&all);
    pair.selects(TYPE, ID, BACK).await;
    selects(pair.worker.client(), TYPE, ID, BACK).await;
    pair.round(&event(2), SOON).await;
    pair.all_sent_once(2, SOON).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn users_that_may_not_publish_or_not_subscribe_are_named_and_work_goes_on() {
    for rights in [r#"publish: { deny: ">" }"#, r#"subscribe: { deny: "ov.events.>" }"#] {
        let broker = Broker::nats_with(&with_rights(rights)).await;
        let pair = pair_on(&url("nats", broker.address())).await;
        pair.excludes(TYPE, ID, "permission denied (nats-v1)", SOON).await;
        pair.round(&event(1), SOON).await;
        pair.all_sent_once(1, SOON).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_is_cut_off_goes_on_by_the_floor_and_returns() {
    let broker = Broker::nats().await;
    let proxy = Proxy::start(&broker.address()).await;
    let own = [
        ("NATS_URL", url("nats", proxy.address())),
        ("NATS_JETSTREAM", "off".to_owned()),
    ];
    let other = [
        ("NATS_URL", url("nats", broker.address())),
        ("NATS_JETSTREAM", "off".to_owned()),
    ];
    let [own, other] = [&own, &other].map(|env| {
        env.iter()
            .map(|(name, value)| (*name, value.as_str()))
            .collect::<Vec<_>>()
    });
    let pair = Pair::start_with(&own, &other).await;
    topic(pair.client(), TYPE).await;
    pair.subscribe(TYPE, "/hook").await;
    pair.selects(TYPE, ID, SOON).await;
    let ledger = Ledger::default().route_type("/hook", TYPE);
    proxy.cut();
    pair.publish_until(&ledger, event, pair.excludes(TYPE, ID, "not connected (nats-v1)", TOLD))
        .await;
    assert_eq!(
        carrier(pair.worker.client(), ID).await["state"],
        "up",
        "only one was cut off"
    );
    ledger.settle(&pair.receiver, SOON).await;
    proxy.restore();
    pair.publish_until(&ledger, event, pair.selects(TYPE, ID, BACK)).await;
    ledger.settle(&pair.receiver, SOON).await;
    let before = pair.placed_on(ID).await;
    pair.round(&event(1), SOON).await;
    assert_eq!(pair.placed_on(ID).await, before + 1);
    pair.all_sent_once(ledger.len() + 1, SOON).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_that_went_silent_is_noticed_and_nothing_is_lost() {
    let broker = Broker::nats().await;
    let proxy = Proxy::start(&broker.address()).await;
    let pair = pair_on(&url("nats", proxy.address())).await;
    pair.selects(TYPE, ID, SOON).await;
    let ledger = Ledger::default().route_type("/hook", TYPE);
    proxy.stall();
    // In use, it is the deadline of the calls that tells first; then the connection is given up.
    pair.publish_until(&ledger, event, async {
        eventually("it is not chosen any more", TOLD, async || {
            let explained = explain(pair.client(), TYPE, None).await;
            let (selected, why) = (explained["placement"]["selected"].clone(), reason(&explained, ID));
            (selected == "pg-v1" && !why.is_empty())
                .then_some(())
                .ok_or(format!("{selected} {why}"))
        })
        .await;
        pair.excludes(TYPE, ID, "not connected (nats-v1)", Duration::from_secs(10))
            .await;
    })
    .await;
    ledger.settle(&pair.receiver, SOON).await;
    proxy.restore();
    pair.publish_until(&ledger, event, pair.selects(TYPE, ID, BACK)).await;
    ledger.settle(&pair.receiver, SOON).await;
    pair.all_sent_once(ledger.len(), SOON).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn forged_news_cause_nothing_and_the_real_ones_behind_them_arrive() {
    let broker = Broker::nats().await;
    let pair = pair_on(&url("nats", broker.address())).await;
    pair.selects(TYPE, ID, SOON).await;
    let stranger = envelope("live");
    let subscription = pair.subscribe("live.nats.never", "/never").await;
    let forged = [
        json!({ "from": "x", "ids": [stranger.id()] }).to_string().into_bytes(),
        json!({ "from": "x", "ids": [], "deliveries": [[stranger.id(), subscription], ["evt_1", "sub_none"]] })
            .to_string()
            .into_bytes(),
        json!({ "rows": [{ "id": stranger.id(), "seq": 1_000_000, "envelope": stranger.json() }] })
            .to_string()
            .into_bytes(),
        b"\xff\x00".to_vec(),
        vec![b'x'; 1_000_000],
    ];
    let mut bytes =
        format!("CONNECT {{\"user\":\"events\",\"pass\":\"{PASSWORD}\",\"verbose\":false}}\r\n").into_bytes();
    for message in forged {
        bytes.extend(format!("PUB ov.events.fabric.topic {}\r\n", message.len()).into_bytes());
        bytes.extend(message);
        bytes.extend(b"\r\n");
    }
    bytes.extend(b"PING\r\n");
    speak(&broker, &bytes, "PONG").await;
    pair.round(&event(1), SOON).await;
    pair.all_sent_once(1, SOON).await;
    assert!(pair.worker.is_alive());
}

#[tokio::test(flavor = "multi_thread")]
async fn nonsense_is_counted_though_no_signal_ever_comes() {
    let broker = Broker::nats().await;
    let pair = pair_on(&url("nats", broker.address())).await;
    pair.selects(TYPE, ID, SOON).await;
    let forged = format!(
        "CONNECT {{\"user\":\"events\",\"pass\":\"{PASSWORD}\",\"verbose\":false}}\r\n\
         PUB ov.events.fabric.topic 8\r\nnonsense\r\nPING\r\n"
    );
    speak(&broker, forged.as_bytes(), "PONG").await;
    eventually("it is counted", SOON, async || {
        let strange = r#"events_carrier_dropped_total{carrier="nats-v1",why="strange"}"#;
        metric(pair.client(), strange).await >= 1.0
    })
    .await;
}
