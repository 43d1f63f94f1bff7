//! The newest PostgreSQL: what depends most on the server runs there too, from an empty database to a delivery.
//!
//! The other tests run on one server, the oldest supported one where the machine has it. Their number says nothing more
//! on a second version; these go through every statement that takes part in carrying an event.

use serde_json::json;

use crate::{
    store_fixture::{
        Door, Fixture, FloorAlone, assert_counts, broken_keys, claim, dead, delivered, events_of, heads, ids, number,
        positions, pull, put, request, retry, settle_all,
    },
    support::{
        database::{Database, Server},
        envelopes::{batch, envelope, envelopes},
        ledger::{Ledger, Walk},
        network::Network,
        receiver::Receiver,
        service::start_many,
        wait::SOON,
    },
};
use openvibe_events::store::ReplaySelection;

#[tokio::test]
async fn the_newest_postgresql_is_eighteen() {
    let database = Database::empty_on(&Server::eighteen()).await;
    let version = number(database.pool(), "SELECT current_setting('server_version_num')::bigint").await;
    assert_eq!(version / 10_000, 18);
}

#[tokio::test]
async fn keys_claims_results_and_replays_keep_their_rules_on_the_newest_postgresql() {
    let fixture = Fixture::on(Database::create_on(&Server::eighteen()).await).await;
    let (store, other) = (&fixture.store, fixture.another().await);
    let id = fixture.subscription(8).await;
    let first = put(store, Some(&id), &events_of("live.a.b", 3), Some("k"))
        .await
        .expect("a group");
    let free = put(&other, Some(&id), &events_of("live.a.c", 2), None)
        .await
        .expect("a group");
    assert_eq!(heads(fixture.pool(), &id).await, [first[0], free[0], free[1]]);

    let pass = claim(&other, "w", &[&id]).await;
    assert_eq!(positions(&pass), [first[0], free[0], free[1]]);
    settle_all(&other, "w", &pass, &retry(0)).await;
    let again = claim(store, "w", &[&id]).await;
    assert_eq!(again.claimed.len(), 3);
    settle_all(store, "w", &again, &delivered()).await;
    assert_eq!(heads(fixture.pool(), &id).await, [first[1]], "the mark moves on");
    settle_all(store, "w", &claim(store, "w", &[&id]).await, &dead()).await;
    assert_counts(store, fixture.pool()).await;

    let replayed = store
        .replay(&id, &ReplaySelection::FromPosition(0), &FloorAlone)
        .await
        .expect("a replay");
    assert_eq!(replayed.expect("a subscription").queued, 5);
    assert_eq!(heads(fixture.pool(), &id).await, [first[0], free[0], free[1]]);
    assert!(broken_keys(fixture.pool()).await.is_empty());
    let lost = claim(store, "gone", &[&id]).await;
    assert_eq!(lost.claimed.len(), 3);
    fixture
        .sql("UPDATE deliveries SET lease_until = 1 WHERE lease_owner = 'gone'")
        .await;
    assert_eq!(
        other.release_lost(None).await.expect("a release").subscriptions,
        std::slice::from_ref(&id)
    );
    assert_counts(&other, fixture.pool()).await;

    for (topic, count) in [("live.*", 5), ("live.a.c", 2)] {
        assert_eq!(ids(&pull(store, None, topic, 10).await).len(), count);
    }
    fixture.sql("UPDATE store_counter SET timeline = '00000009'").await;
    let after = put(store, None, &events_of("live.a.b", 1), None)
        .await
        .expect("a group");
    assert!(after[0] > 1 << 32, "another timeline is noticed");
    let event = envelope("live");
    let door = Door::open(&other);
    for duplicate in [false, true] {
        let answer = door.publish(request("live", event.json())).await.expect("a publish");
        assert_eq!(answer[0].duplicate, duplicate);
    }
}

#[tokio::test]
async fn an_event_goes_all_the_way_on_the_newest_postgresql_from_an_empty_database_on() {
    let server = Server::eighteen();
    let (database, network, receiver) = tokio::join!(Database::empty_on(&server), Network::start(), Receiver::start());
    let services = start_many(&database, &network, 2, &[]).await;
    let (one, two) = (services[0].client(), services[1].client());
    let events = envelopes("live", 30);
    receiver.script("/hook", [500, 204]);
    let body = json!({ "topic_pattern": "live.*", "endpoint": receiver.url("/hook"), "max_inflight": 4,
                       "retry_policy": { "max_attempts": 3, "backoff_ms": [100] } });
    let made = one
        .post("/api/v1/subscriptions", Some(&one.service_token("chat")), &body)
        .await
        .expect(201);
    let ledger = Ledger::default().route("/hook", |_| true);
    let (single, rest) = events.split_at(10);
    for event in single {
        ledger.note([event], &two.publish(event).await);
    }
    ledger.note(rest, &one.publish_as("live", &batch(rest)).await);
    assert_eq!(ledger.len(), events.len());
    ledger.settle(&receiver, SOON).await;
    ledger.assert_stored_once(database.pool()).await;
    for call in receiver.calls() {
        call.assert_signed(made["secret"].as_str().expect("a secret"));
    }
    let mut walk = Walk::over("live.*");
    walk.rest(two).await;
    walk.assert_whole(database.pool()).await;
    for service in services {
        assert_eq!(service.terminate().await.0.code, Some(0));
    }
}
