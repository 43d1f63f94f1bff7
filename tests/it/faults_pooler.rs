//! The whole service behind a real PgBouncer: transaction mode, and one server connection for all its clients.

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::{
    api_world::text,
    support::{
        client::Client,
        database::Database,
        envelopes::{Envelope, envelope},
        ledger::{Ledger, Walk},
        network::Network,
        pgbouncer::PgBouncer,
        receiver::Receiver,
        service::start_many,
        wait::{SOON, eventually},
    },
};

const EVENTS: usize = 120;

fn events_of(event_type: &str) -> Vec<Envelope> {
    (0..EVENTS)
        .map(|n| {
            envelope("live")
                .event_type(event_type)
                .subject("thing", &(n % 7).to_string())
        })
        .collect()
}

async fn subscribe(client: &Client, consumer: &str, pattern: &str, endpoint: &str) -> Value {
    let body = json!({ "topic_pattern": pattern, "endpoint": endpoint, "max_inflight": 8 });
    let token = client.service_token(consumer);
    client
        .post("/api/v1/subscriptions", Some(&token), &body)
        .await
        .expect(201)
}

/// Changes a subscription in every way there is, again and again.
async fn change(client: &Client, consumer: &str, id: &str) {
    let token = client.service_token(consumer);
    for _ in 0..10 {
        for verb in ["disable", "enable", "rotate-secret"] {
            let path = format!("/api/v1/subscriptions/{id}/{verb}");
            client.post(&path, Some(&token), &json!({})).await.expect(200);
        }
        client.get("/api/v1/subscriptions", Some(&token)).await.expect(200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_processes_share_one_connection_of_a_pooler_and_nothing_is_refused_or_lost() {
    let (database, network, receiver) = tokio::join!(Database::create(), Network::start(), Receiver::start());
    let pooler = PgBouncer::start(&database, 1).await;
    let services = start_many(&database, &network, 2, &[("DATABASE_URL", pooler.url())]).await;
    let (one, two) = (services[0].client(), services[1].client());
    let made = subscribe(one, "chat", "live.pool.*", &receiver.url("/all")).await;
    let switched = subscribe(two, "billing", "live.pool.*", &receiver.url("/switched")).await;
    let ledger = Ledger::default().route("/all", |_| true);

    let events = events_of("live.pool.made");
    let publish = events.chunks(EVENTS / 8).enumerate().map(|(n, part)| {
        let (client, ledger) = ([one, two][n % 2], &ledger);
        async move {
            for event in part {
                let answer = client.publish(event).await;
                assert_eq!(answer.status, 201, "{}", answer.text);
                ledger.note([event], &answer);
            }
        }
    });
    let read = async {
        let mut walk = Walk::over("live.*");
        for turn in 0..20 {
            walk.step([one, two][turn % 2]).await;
        }
        walk
    };
    let (_, mut walk, ()) = tokio::join!(join_all(publish), read, change(two, "billing", text(&switched, "id")));
    assert_eq!(ledger.len(), EVENTS);
    ledger.settle(&receiver, SOON).await;
    ledger.assert_stored_once(database.pool()).await;
    walk.rest(one).await;
    walk.assert_whole(database.pool()).await;

    let operator = network.operator_token();
    let before = receiver.calls_to("/all").len();
    let replay = json!({ "subscription_id": made["id"], "from_seq": 0 });
    let queued = two
        .post("/api/v1/deliveries/replay", Some(&operator), &replay)
        .await
        .expect(200);
    assert_eq!(queued["queued"], EVENTS);
    receiver.wait_calls_to("/all", before + EVENTS, SOON).await;
    eventually("every delivery is recorded", SOON, async || {
        let list = one.get("/api/v1/deliveries?limit=1", Some(&operator)).await.expect(200);
        let counts = &list["counts"];
        let open = [&counts["pending"], &counts["failed"]].map(|count| count.as_i64().expect("a count"));
        if open == [0, 0] {
            Ok(())
        } else {
            Err(counts.to_string())
        }
    })
    .await;
    for service in &services {
        let log = service.log();
        let complaint = |line: &&str| {
            (line.contains("WARN") || line.contains("ERROR")) && !line.contains("EVENTS_SECRET_KEY is not set")
        };
        assert_eq!(log.lines().find(complaint), None);
    }
    assert!(!pooler.log().contains("WARNING"), "{}", pooler.log());
}
