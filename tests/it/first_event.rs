//! One event all the way, over two processes: published, stored once, delivered signed, and refused without a token.

use serde_json::json;

use crate::support::{
    client::assert_problem,
    database::Database,
    envelopes::{batch, envelopes},
    ledger::Ledger,
    network::Network,
    receiver::Receiver,
    service::start_many,
    wait::SOON,
};

#[tokio::test]
async fn events_published_to_either_process_are_stored_once_and_delivered_signed() {
    let (database, network, receiver) = tokio::join!(Database::create(), Network::start(), Receiver::start());
    let services = start_many(&database, &network, 2, &[]).await;
    let (one, two) = (services[0].client(), services[1].client());
    let events = envelopes("live", 20);

    let refused = one.post("/api/v1/events", None, events[0].json()).await;
    assert_problem(&refused, 401, "token.missing");

    receiver.script("/hook", [500, 204]);
    let subscription = json!({ "topic_pattern": events[0].type_name(), "endpoint": receiver.url("/hook") });
    let created = one
        .post("/api/v1/subscriptions", Some(&one.service_token("chat")), &subscription)
        .await
        .expect(201);
    let secret = created["secret"].as_str().expect("a secret on creation");

    let ledger = Ledger::default().route_type("/hook", events[0].type_name());
    let (first, rest) = events.split_at(10);
    for event in first {
        ledger.note([event], &two.publish(event).await);
    }
    ledger.note(rest, &one.publish_as("live", &batch(rest)).await);
    assert_eq!(ledger.len(), events.len(), "every publish is acknowledged");

    ledger.settle(&receiver, SOON).await;
    ledger.assert_stored_once(database.pool()).await;
    for call in receiver.calls() {
        call.assert_signed(secret);
    }
    assert_eq!(receiver.peak("/hook"), 1, "one delivery of a subscription at a time");
    for service in services {
        let (exit, took) = service.terminate().await;
        assert_eq!(exit.code, Some(0), "a clean stop in {took:?}");
    }
}
