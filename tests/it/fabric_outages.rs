//! The broker of ordered work dies, or falls silent, while events flow: nothing is lost, the reason is told, and it is used
//! again by itself.

use std::time::Duration;

use crate::{
    fabric_world::{BACK, Pair, TOLD, candidate, carrier, explain, keyed, reason, selects, subject_of, url},
    support::{
        broker::Broker,
        database::Database,
        envelopes::{Envelope, envelope},
        ledger::{Ledger, assert_in_order},
        proxy::Proxy,
        wait::{SOON, eventually},
    },
};

const ID: &str = "nats-js-v1";
const TYPE: &str = "live.outage.ordered";

fn event(subject: usize) -> Envelope {
    envelope("live").event_type(TYPE).subject("thing", &subject.to_string())
}

/// What becomes of two processes and their events while the broker is gone and once it is back. Answers every reason that
/// an operator was told on the way.
async fn outage(begin: impl Fn(&Broker), end: impl AsyncFn(&Broker), named: &str) {
    let broker = Broker::nats().await;
    let pair = Pair::start(&[("NATS_URL", &url("nats", broker.address()))]).await;
    keyed(pair.client(), TYPE, "domain", "required").await;
    pair.subscribe(TYPE, "/hook").await;
    pair.selects(TYPE, ID, SOON).await;
    selects(pair.worker.client(), TYPE, ID, SOON).await;
    let ledger = Ledger::default().route_type("/hook", TYPE);
    pair.publish_until(&ledger, event, async {
        pair.receiver.wait_calls(10, SOON).await;
        begin(&broker);
        eventually("it is not chosen, and an operator is told why", TOLD, async || {
            let explained = explain(pair.client(), TYPE, None).await;
            let (selected, why) = (explained["placement"]["selected"].clone(), reason(&explained, ID));
            (selected == "pg-v1" && why.ends_with("(nats-js-v1)"))
                .then_some(())
                .ok_or(format!("{selected} {why}"))
        })
        .await;
        // In the end the line itself is given up.
        pair.excludes(TYPE, ID, named, Duration::from_secs(10)).await;
        eventually("events are published meanwhile", SOON, async || {
            pair.placed_on("pg-v1").await >= 20
        })
        .await;
    })
    .await;
    // The poll is an hour away, and the broker is still gone.
    ledger.settle(&pair.receiver, SOON).await;
    end(&broker).await;
    pair.publish_until(&ledger, event, async {
        pair.selects(TYPE, ID, BACK).await;
        selects(pair.worker.client(), TYPE, ID, BACK).await;
    })
    .await;
    ledger.settle(&pair.receiver, SOON).await;
    let before = pair.placed_on(ID).await;
    pair.round(&event(1), SOON).await;
    assert_eq!(pair.placed_on(ID).await, before + 1, "it is used again");
    pair.all_sent_once(ledger.len() + 1, SOON).await;
    ledger.assert_stored_once(pair.database.pool()).await;
    assert_in_order(&pair.receiver, "/hook", pair.database.pool(), subject_of).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_of_ordered_work_costs_no_event_and_is_used_again_once_it_is_back() {
    outage(Broker::kill, Broker::revive, "not connected (nats-js-v1)").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_server_of_ordered_work_costs_no_event_and_is_used_again_once_it_goes_on() {
    outage(
        Broker::stall,
        async |broker| broker.resume(),
        "not connected (nats-js-v1)",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_doorbell_that_cannot_ring_leaves_the_floor_to_be_chosen_and_rings_again_within_seconds() {
    const TYPE: &str = "live.outage.doorbell";
    const FLOOR: &str = "pg-v1";
    let database = Database::create().await;
    let line = Proxy::start(&database.server()).await;
    let direct = database.url_through(line.address());
    let pair = Pair::start_on(database, &[("DATABASE_DIRECT_URL", direct.as_str())], &[]).await;
    pair.subscribe(TYPE, "/hook").await;
    let event = |_| envelope("live").event_type(TYPE);
    let ledger = Ledger::default().route_type("/hook", TYPE);
    pair.round(&event(0), SOON).await;
    line.stall();
    pair.publish_until(&ledger, event, async {
        eventually("an operator is told, and it is chosen", SOON, async || {
            let explained = explain(pair.client(), TYPE, None).await;
            let floor = candidate(&explained, FLOOR).expect("the floor").clone();
            let told = floor["eligible"] == true && floor["reasons"][0] == "breaker open (pg-v1)";
            (told && explained["placement"]["selected"] == FLOOR)
                .then_some(())
                .ok_or(floor)
        })
        .await;
    })
    .await;
    line.restore();
    // Nobody publishes, and the poll is an hour away.
    eventually("it can ring again", Duration::from_secs(5), async || {
        let shown = carrier(pair.client(), FLOOR).await;
        (shown["breaker"]["state"] == "closed")
            .then_some(())
            .ok_or(shown["breaker"].to_string())
    })
    .await;
    let last = event(0);
    ledger.note([&last], &pair.client().publish(&last).await);
    ledger.settle(&pair.receiver, TOLD).await;
    pair.all_sent_once(ledger.len() + 1, SOON).await;
}
