//! The carrier fabric in the service as it is run: what placement says, what is on record, and what crosses between
//! processes.

use std::time::Duration;

use serde_json::{Value, json};
use sqlx::AssertSqlSafe;

use crate::{
    api_world::{Site, operator},
    support::{
        client::{Client, assert_problem},
        database::Database,
        envelopes::{Envelope, envelope},
        network::Network,
        receiver::Receiver,
        service::Service,
        wait::{SOON, eventually},
    },
};

/// Longer than any test: what arrives was not found by a poll.
const NO_POLL: (&str, &str) = ("EVENTS_WORKER_INTERVAL_MS", "3600000");

async fn explain(client: &Client, event_type: &str, key: Option<&str>) -> Value {
    let key = key.map(|key| format!("&key={key}")).unwrap_or_default();
    let path = format!("/api/v1/placement?event_type={event_type}{key}");
    client.get(&path, Some(&operator())).await.expect(200)
}

async fn explain_delivery(client: &Client, event: &Envelope, subscription: &str) -> Value {
    let path = format!("/api/v1/placement/deliveries/{}/{subscription}", event.id());
    client.get(&path, Some(&operator())).await.expect(200)
}

async fn subscribe(client: &Client, event_type: &str, endpoint: &str) -> String {
    let body = json!({ "topic_pattern": event_type, "endpoint": endpoint });
    let created = client
        .post("/api/v1/subscriptions", Some(&client.service_token("chat")), &body)
        .await
        .expect(201);
    created["id"].as_str().expect("an id").to_owned()
}

async fn policy(client: &Client, pattern: &str, class: &str, durability: &str) {
    let policy = json!({
        "class": class, "durability": durability, "delivery_semantics": "at_least_once",
        "ordering": { "scope": "key", "key": "subject" },
    });
    let path = format!("/api/v1/delivery-policies/{pattern}");
    client.put(&path, Some(&operator()), &policy).await.expect(200);
}

fn candidate<'a>(explained: &'a Value, carrier: &str) -> Option<&'a Value> {
    let candidates = explained["placement"]["candidates"].as_array().expect("candidates");
    candidates.iter().find(|candidate| candidate["id"] == carrier)
}

#[tokio::test(flavor = "multi_thread")]
async fn work_of_a_process_that_sends_nothing_wakes_another_without_a_poll() {
    const TYPE: &str = "live.doorbell.rung";
    let (database, network, receiver) = tokio::join!(Database::create(), Network::start(), Receiver::start());
    let quiet = Service::start(&database, &network, &[("EVENTS_WORKER", "off"), NO_POLL]).await;
    let _worker = Service::start(&database, &network, &[NO_POLL]).await;
    let client = quiet.client();
    let subscription = subscribe(client, TYPE, &receiver.url("/hook")).await;
    let event = envelope("live").event_type(TYPE);
    client.publish(&event).await.expect(201);
    receiver.wait_calls(1, SOON).await;
    // A replay is work as well.
    let delivered =
        format!("SELECT count(*) FROM deliveries WHERE status = 'delivered' AND subscription_id = '{subscription}'");
    eventually("the delivery is recorded", SOON, async || {
        let count: i64 = sqlx::query_scalar(AssertSqlSafe(delivered.clone()))
            .fetch_one(database.pool())
            .await
            .expect("a count");
        (count == 1).then_some(()).ok_or(count)
    })
    .await;
    let body = json!({ "subscription_id": subscription, "event_ids": [event.id()] });
    client
        .post("/api/v1/deliveries/replay", Some(&operator()), &body)
        .await
        .expect(200);
    receiver.wait_calls(2, SOON).await;
}

#[tokio::test]
async fn placement_says_what_holds_for_a_type_and_what_held_for_a_delivery() {
    let site = Site::own(2, &[("EVENTS_WORKER_INTERVAL_MS", "500")]).await;
    let explained = explain(site.one(), "live.placed.never", None).await;
    assert_eq!(explained["carrier_class"], "QUEUE");
    assert_eq!(
        (&explained["pattern"], &explained["ordering_key"]),
        (&Value::Null, &Value::Null)
    );
    assert_eq!(explained["placement"]["selected"], "pg-v1");
    assert_eq!(explained["last_decision"], Value::Null);
    let floor = candidate(&explained, "pg-v1").expect("the floor");
    assert_eq!(
        (&floor["eligible"], &floor["estimated_latency_ms"]),
        (&json!(true), &json!(250))
    );

    const TYPE: &str = "live.placed.here";
    policy(site.one(), "live.placed.*", "domain", "required").await;
    let subscription = subscribe(site.one(), TYPE, "http://127.0.0.1:9/placed").await;
    let first = envelope("live").event_type(TYPE).subject("stream", "K1");
    site.one().publish(&first).await.expect(201);
    let second = envelope("live").event_type(TYPE).subject("stream", "K1");
    site.two().publish(&second).await.expect(201);
    let (one, two) = (
        explain_delivery(site.one(), &first, &subscription).await,
        explain_delivery(site.two(), &second, &subscription).await,
    );
    assert_eq!(one["carrier"], "pg-v1");
    assert_eq!(one["carrier_class"], "STREAM");
    assert_eq!(
        (&one["pattern"], &one["revision"]),
        (&json!("live.placed.*"), &json!(1))
    );
    assert_eq!(one["decision"]["result"]["selected"], "pg-v1");
    assert_eq!(one["decision"], two["decision"], "both processes act on one record");
    let last = explain(site.two(), TYPE, Some("stream:K1")).await;
    assert_eq!(last["ordering_key"], "stream:K1");
    assert_eq!(last["last_decision"]["decided_at"], one["decision"]["decided_at"]);

    // What a policy says later changes nothing about what was made before.
    policy(site.one(), "live.placed.*", "bulk", "none").await;
    let third = envelope("live").event_type(TYPE).subject("stream", "K2");
    site.two().publish(&third).await.expect(201);
    assert_eq!(explain_delivery(site.one(), &first, &subscription).await, one);
    let changed = explain_delivery(site.one(), &third, &subscription).await;
    assert_eq!(
        (&changed["carrier_class"], &changed["revision"]),
        (&json!("QUEUE"), &json!(2))
    );

    let unknown = format!("/api/v1/placement/deliveries/evt_01K7AAB2CD3EF4GH5JK6MN7PQR/{subscription}");
    let refused = site.one().get(&unknown, Some(&operator())).await;
    assert_problem(&refused, 404, "events.not_found");
}

#[tokio::test]
async fn a_backlog_keeps_its_key_on_its_carrier_until_it_has_drained() {
    const TYPE: &str = "live.pinned.here";
    let site = Site::own(1, &[]).await;
    policy(site.one(), TYPE, "domain", "optional").await;
    let subscription = subscribe(site.one(), TYPE, "http://127.0.0.1:9/pinned").await;
    let event = |subject: &str| envelope("live").event_type(TYPE).subject("stream", subject);
    let first = event("K");
    site.one().publish(&first).await.expect(201);
    sqlx::query("UPDATE deliveries SET carrier = 'other-v1' WHERE event_id = $1")
        .bind(first.id())
        .execute(&site.pool)
        .await
        .expect("an update");
    let (second, third, elsewhere) = (event("K"), event("K"), event("L"));
    let token = site.one().service_token("live");
    let both = json!({ "events": [second.json(), third.json(), elsewhere.json()] });
    site.one().post("/api/v1/events", Some(&token), &both).await.expect(201);
    let carrier = async |event: &Envelope| explain_delivery(site.one(), event, &subscription).await["carrier"].clone();
    assert_eq!(carrier(&second).await, "other-v1");
    assert_eq!(carrier(&third).await, "other-v1", "the whole group joins the backlog");
    assert_eq!(carrier(&elsewhere).await, "pg-v1");
    sqlx::query("UPDATE deliveries SET status = 'delivered', head = false WHERE ordering_key = 'stream:K'")
        .execute(&site.pool)
        .await
        .expect("an update");
    let later = event("K");
    site.one().publish(&later).await.expect(201);
    assert_eq!(carrier(&later).await, "pg-v1", "it has drained");
}

#[tokio::test]
async fn an_operator_switches_a_carrier_for_every_process_and_the_environment_wins() {
    let env = [
        ("NATS_URL", "nats://127.0.0.1:9"),
        ("EVENTS_CARRIERS_DISABLED", "nats-js-v1"),
    ];
    let site = Site::own(2, &env).await;
    const TYPE: &str = "live.switched.here";
    let policy = json!({ "class": "realtime_ephemeral", "durability": "none", "delivery_semantics": "at_most_once" });
    site.one()
        .put(&format!("/api/v1/delivery-policies/{TYPE}"), Some(&operator()), &policy)
        .await
        .expect(200);
    let reason = async |client: &Client| {
        let explained = explain(client, TYPE, None).await;
        assert_eq!(explained["placement"]["selected"], "pg-v1");
        candidate(&explained, "nats-v1").expect("it is configured")["excluded_because"].clone()
    };
    assert_eq!(reason(site.two()).await, "not connected (nats-v1)");
    let switch = async |carrier: &str, disabled: bool| {
        let path = format!("/api/v1/carriers/{carrier}");
        let body = json!({ "disabled": disabled });
        site.one().put(&path, Some(&operator()), &body).await
    };
    let switched = switch("nats-v1", true).await.expect(200);
    assert_eq!(
        (&switched["state"], &switched["disabled"]["by_operator"]),
        (&json!("disabled"), &json!(true))
    );
    eventually("the other process follows", Duration::from_secs(2), async || {
        let reason = reason(site.two()).await;
        (reason == "disabled by an operator").then_some(()).ok_or(reason)
    })
    .await;
    switch("nats-v1", false).await.expect(200);
    let kept = switch("nats-js-v1", false).await.expect(200);
    assert_eq!(kept["reason"], "disabled by configuration");
    assert_problem(&switch("kafka-v1", true).await, 404, "events.not_found");
    assert_problem(&switch("valkey-v1", true).await, 404, "events.not_found");

    let listed = site.one().get("/api/v1/carriers", Some(&operator())).await.expect(200);
    let ids: Vec<&str> = listed["carriers"]
        .as_array()
        .expect("carriers")
        .iter()
        .filter_map(|carrier| carrier["id"].as_str())
        .collect();
    assert_eq!(ids, ["pg-v1", "nats-v1", "nats-js-v1"]);
}
