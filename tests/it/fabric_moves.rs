//! When placement moves between two carriers that both work: not for a little, and at once for a lot.

use std::time::Duration;

use crate::{
    api_world::text,
    fabric_world::{BACK, Brokers, Pair, carrier, explain, switch, topic, url},
    support::{
        envelopes::envelope,
        proxy::Proxy,
        wait::{SOON, eventually},
    },
};

const TYPE: &str = "live.moves.news";

#[tokio::test(flavor = "multi_thread")]
async fn work_stays_where_it_is_for_a_few_percent_and_moves_for_more() {
    let brokers = Brokers::start().await;
    let nats = Proxy::start(&brokers.nats.address()).await;
    let valkey = Proxy::start(&brokers.valkey.address()).await;
    // In each direction. The second is 10 % better.
    nats.delay(Duration::from_millis(60));
    valkey.delay(Duration::from_millis(54));
    let env = [
        ("VALKEY_URL", url("redis", valkey.address())),
        ("NATS_URL", url("nats", nats.address())),
        ("NATS_JETSTREAM", "off".to_owned()),
        // The floor promises a second: both are better, whatever a busy machine adds.
        ("EVENTS_WORKER_INTERVAL_MS", "2000".to_owned()),
    ];
    let env: Vec<_> = env.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let pair = Pair::start(&env).await;
    topic(pair.client(), TYPE).await;
    pair.subscribe(TYPE, "/hook").await;
    switch(pair.client(), "valkey-v1", true).await.expect(200);
    pair.selects(TYPE, "nats-v1", SOON).await;
    pair.round(&envelope("live").event_type(TYPE), SOON).await;
    assert_eq!(pair.placed_on("nats-v1").await, 1);

    switch(pair.client(), "valkey-v1", false).await.expect(200);
    // Few samples are offered as more than they say, so it takes several of its own until it is the better one.
    eventually("it is a little better, and work stays", BACK, async || {
        let explained = explain(pair.client(), TYPE, None).await;
        let placement = &explained["placement"];
        let stays = placement["reasons"]
            .to_string()
            .contains("stays on nats-v1: the best alternative is only ");
        (stays && text(placement, "selected") == "nats-v1")
            .then_some(())
            .ok_or(placement.to_string())
    })
    .await;
    pair.round(&envelope("live").event_type(TYPE), SOON).await;
    assert_eq!(pair.placed_on("nats-v1").await, 2);

    nats.delay(Duration::from_millis(100));
    pair.selects(TYPE, "valkey-v1", SOON).await;
    pair.round(&envelope("live").event_type(TYPE), SOON).await;
    assert_eq!(pair.placed_on("valkey-v1").await, 1);
    assert_eq!(
        carrier(pair.client(), "nats-v1").await["state"],
        "up",
        "it could be used"
    );
}
