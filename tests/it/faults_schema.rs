//! The schema changes under running processes, as it does while a newer release starts beside the one before.

use std::{
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

use futures_util::future::join_all;
use serde_json::json;

use crate::{
    store_fixture::sql,
    support::{
        database::Database,
        envelopes::envelope,
        ledger::{Ledger, Walk},
        network::Network,
        receiver::Receiver,
        service::start_many,
        wait::{SOON, eventually},
    },
};

/// What a migration may do: add, and build indexes without locking anybody out.
const CHANGES: [&str; 8] = [
    "ALTER TABLE events ADD COLUMN later text",
    "ALTER TABLE deliveries ADD COLUMN later bigint NOT NULL DEFAULT 0",
    "ALTER TABLE subscriptions ADD COLUMN later text, ADD COLUMN still_later integer NOT NULL DEFAULT 1",
    "ALTER TABLE store_counter ADD COLUMN later text",
    "CREATE INDEX CONCURRENTLY later_events ON events (publisher, seq)",
    "CREATE INDEX CONCURRENTLY later_deliveries ON deliveries (status, seq)",
    "CREATE TABLE later (id text PRIMARY KEY)",
    "ALTER TABLE delivery_counts ADD COLUMN later bigint NOT NULL DEFAULT 0",
];

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_that_grows_under_running_processes_is_noticed_by_nobody() {
    let (database, network, receiver) = tokio::join!(Database::create(), Network::start(), Receiver::start());
    let services = start_many(&database, &network, 2, &[]).await;
    let clients = [services[0].client(), services[1].client()];
    let body = json!({ "topic_pattern": "live.*", "endpoint": receiver.url("/hook"), "max_inflight": 16 });
    let token = clients[0].service_token("chat");
    clients[0]
        .post("/api/v1/subscriptions", Some(&token), &body)
        .await
        .expect(201);
    let ledger = Ledger::default().route("/hook", |_| true);
    let changed = AtomicBool::new(false);
    let publish = join_all((0..6).map(|publisher| {
        let (ledger, client, changed, token) = (&ledger, clients[publisher % 2], &changed, &token);
        async move {
            while !changed.load(Relaxed) {
                let event = envelope("live");
                let answer = client.publish(&event).await;
                assert_eq!(answer.status, 201, "{}", answer.text);
                ledger.note([&event], &answer);
                for path in ["/api/v1/events?topic=live.*&limit=10", "/api/v1/subscriptions"] {
                    let answer = client.get(path, Some(token)).await;
                    assert_eq!(answer.status, 200, "{path}: {}", answer.text);
                }
            }
        }
    }));
    let change = async {
        for statement in CHANGES {
            let (taken, arrived) = (ledger.len(), receiver.calls().len());
            sql(database.pool(), statement).await;
            // Every kind of statement has run again since, on plans that were made before.
            eventually("the work goes on", SOON, async || {
                ledger.len() > taken + 60 && receiver.calls().len() > arrived + 60
            })
            .await;
        }
        changed.store(true, Relaxed);
    };
    tokio::join!(publish, change);
    ledger.settle(&receiver, Duration::from_secs(30)).await;
    ledger.assert_stored_once(database.pool()).await;
    let mut walk = Walk::over("live.*");
    walk.rest(clients[1]).await;
    walk.assert_whole(database.pool()).await;
    assert_eq!(receiver.calls().len(), ledger.len(), "no attempt had to be repeated");
    for service in services {
        let log = service.log();
        let complaint = |line: &&str| line.contains("ERROR") || line.contains("cannot be recorded");
        assert_eq!(log.lines().find(complaint), None);
    }
}
