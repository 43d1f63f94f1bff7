//! The life of a delivery as its consumer and an operator see it: its turn, its schedule, its death, and its return.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    api_world::{operator, refused, text},
    support::{
        client::Client,
        database::Database,
        envelopes::{batch, envelope, envelopes},
        network::Network,
        receiver::{Answer, Receiver},
        service::Service,
        wait::{SOON, eventually, stays},
    },
};

const DELIVERIES: &str = "/api/v1/deliveries";

/// How much later than due an attempt may come on a busy machine.
const LATE: Duration = Duration::from_secs(2);

async fn subscribe(client: &Client, consumer: &str, topic: &str, endpoint: &str, more: Value) -> String {
    let mut body = json!({ "topic_pattern": topic, "endpoint": endpoint });
    for (member, value) in more.as_object().into_iter().flatten() {
        body[member] = value.clone();
    }
    let token = client.service_token(consumer);
    let view = client
        .post("/api/v1/subscriptions", Some(&token), &body)
        .await
        .expect(201);
    text(&view, "id").to_owned()
}

async fn only_delivery(client: &Client, query: &str) -> Option<Value> {
    let page = client.get(&format!("{DELIVERIES}?{query}"), Some(&operator())).await;
    let mut rows = page.expect(200)["deliveries"].take();
    rows.as_array_mut().and_then(Vec::pop)
}

#[tokio::test]
async fn eight_failures_follow_the_schedule_and_the_dead_delivery_returns_by_replay() {
    const WAITS_MS: [u64; 7] = [100, 150, 200, 50, 250, 100, 100];
    let (database, network, receiver) = tokio::join!(Database::create(), Network::start(), Receiver::start());
    // As the schedule of the service itself goes: what a subscription says is another test's.
    let env = [
        ("EVENTS_BACKOFF_MS", "100,150,200,50,250,100"),
        ("EVENTS_BACKOFF_JITTER", "0"),
    ];
    let service = Service::start(&database, &network, &env).await;
    let client = service.client();
    receiver.answer_with("/hook", |call| Answer::status(if call.number <= 8 { 503 } else { 204 }));
    let event = envelope("live");
    let id = subscribe(client, "chat", event.type_name(), &receiver.url("/hook"), json!({})).await;
    client.publish(&event).await.expect(201);

    let calls = receiver.wait_calls(8, SOON).await;
    let attempts: Vec<u32> = calls.iter().map(|call| call.attempt()).collect();
    assert_eq!(attempts, [1, 2, 3, 4, 5, 6, 7, 8]);
    for (pair, wait_ms) in calls.windows(2).zip(WAITS_MS) {
        let (waited, due) = (pair[1].arrived - pair[0].arrived, Duration::from_millis(wait_ms));
        assert!(waited >= due && waited <= due + LATE, "{waited:?} instead of {due:?}");
    }
    let query = format!("status=dead&subscription_id={id}");
    let dead = eventually("it is among the dead letters", SOON, async || {
        only_delivery(client, &query).await
    })
    .await;
    assert_eq!(text(&dead, "event_id"), event.id());
    assert_eq!((&dead["attempt"], &dead["last_status"]), (&json!(8), &json!(503)));
    assert!(!text(&dead, "last_error").is_empty(), "{dead}");
    stays("it is not tried by itself", Duration::from_millis(600), async || {
        receiver.calls().len() == 8
    })
    .await;

    let replay = json!({ "subscription_id": id, "event_ids": [event.id()] });
    let path = format!("{DELIVERIES}/replay");
    let stranger = client.service_token("chat");
    refused(
        &client.post(&path, Some(&stranger), &replay).await,
        403,
        "capability.denied",
    );
    let answer = client.post(&path, Some(&operator()), &replay).await.expect(200);
    assert_eq!(answer["queued"], 1);
    let calls = receiver.wait_calls(9, SOON).await;
    assert_eq!((calls[8].event_id(), calls[8].attempt()), (event.id(), 1));
    eventually("it is delivered", SOON, async || {
        only_delivery(client, &format!("status=delivered&subscription_id={id}")).await
    })
    .await;
}

#[tokio::test]
async fn a_subscription_that_says_nothing_gets_as_many_in_flight_as_the_service_is_told() {
    const EVENTS: usize = 8;
    let (database, network, receiver) = tokio::join!(Database::create(), Network::start(), Receiver::start());
    let service = Service::start(&database, &network, &[("EVENTS_DEFAULT_MAX_INFLIGHT", "3")]).await;
    let client = service.client();
    receiver.answer_with("/silent", |_| Answer::hang(204));
    let events = envelopes("live", EVENTS);
    let topic = events[0].type_name();
    subscribe(client, "chat", topic, &receiver.url("/silent"), json!({})).await;
    let own = json!({ "max_inflight": 1 });
    subscribe(client, "music", topic, &receiver.url("/says"), own).await;
    client.publish_as("live", &batch(&events)).await.expect(201);
    receiver
        .wait_until("three are in flight", SOON, |receiver| receiver.active("/silent") == 3)
        .await;
    // Whatever else could be claimed had its chance meanwhile.
    receiver.wait_calls_to("/says", EVENTS, SOON).await;
    receiver.answer_with("/silent", |_| Answer::status(204));
    receiver.release();
    receiver.wait_calls_to("/silent", EVENTS, SOON).await;
    assert_eq!((receiver.peak("/silent"), receiver.peak("/says")), (3, 1));
}

#[tokio::test]
async fn a_new_subscription_gets_nothing_of_the_past_until_it_is_replayed_in_order() {
    let (database, network, receiver) = tokio::join!(Database::create(), Network::start(), Receiver::start());
    let service = Service::start(&database, &network, &[]).await;
    let client = service.client();
    let (wanted, others) = (envelopes("live", 12), envelopes("live", 12));
    for (one, other) in wanted.iter().zip(&others) {
        client.publish(one).await.expect(201);
        client.publish(other).await.expect(201);
    }
    let id = subscribe(client, "chat", wanted[0].type_name(), &receiver.url("/hook"), json!({})).await;
    stays("the past is not sent", Duration::from_millis(400), async || {
        receiver.calls().is_empty()
    })
    .await;
    let third: i64 = sqlx::query_scalar("SELECT seq FROM events WHERE id = $1")
        .bind(wanted[2].id())
        .fetch_one(database.pool())
        .await
        .expect("a position");
    let replay = json!({ "subscription_id": id, "from_seq": third });
    let answer = client
        .post(&format!("{DELIVERIES}/replay"), Some(&operator()), &replay)
        .await
        .expect(200);
    assert_eq!(answer["queued"], 10);
    let calls = receiver.wait_calls(10, SOON).await;
    let arrived: Vec<&str> = calls.iter().map(|call| call.event_id()).collect();
    let expected: Vec<&str> = wanted[2..].iter().map(|event| event.id()).collect();
    assert_eq!(arrived, expected);
}

#[tokio::test]
async fn what_waits_is_sent_by_priority_to_each_subscription() {
    let (database, network, receiver) = tokio::join!(Database::create(), Network::start(), Receiver::start());
    let filler = Service::start(&database, &network, &[("EVENTS_WORKER", "off")]).await;
    let client = filler.client();
    let base = envelope("live");
    for (consumer, path) in [("chat", "/chat"), ("bell", "/bell")] {
        subscribe(client, consumer, base.type_name(), &receiver.url(path), json!({})).await;
    }
    let events: Vec<_> = ["low", "important", "critical", "low", "critical"]
        .map(|priority| envelope("live").event_type(base.type_name()).priority(priority))
        .into();
    let answer = client.publish_as("live", &batch(&events)).await;
    assert_eq!(answer.status, 201, "{}", answer.text);
    let pending: i64 = sqlx::query_scalar("SELECT count(*) FROM deliveries WHERE status = 'pending'")
        .fetch_one(database.pool())
        .await
        .expect("a count");
    assert_eq!(
        (pending, receiver.calls().len()),
        (10, 0),
        "stored before anything is sent"
    );
    let started = Instant::now();
    let _worker = Service::start(&database, &network, &[]).await;
    let calls = receiver.wait_calls(10, SOON).await;
    let expected = [2, 4, 1, 0, 3].map(|at: usize| events[at].id());
    let mut by_path: HashMap<&str, Vec<&str>> = HashMap::new();
    for call in &calls {
        by_path.entry(call.path()).or_default().push(call.event_id());
    }
    for path in ["/chat", "/bell"] {
        assert_eq!(by_path[path], expected, "{path}, after {:?}", started.elapsed());
    }
}
