//! The broker of ordered work dies, or falls silent, while events flow: nothing is lost, the reason is told, and it is used
//! again by itself.

use std::time::Duration;

use crate::{
    fabric_world::{BACK, Pair, TOLD, explain, keyed, reason, selects, subject_of, url},
    support::{
        broker::Broker,
        envelopes::{Envelope, envelope},
        ledger::{Ledger, assert_in_order},
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
