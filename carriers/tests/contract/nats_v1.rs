//! What only NATS can do to its carriers: restart, stall, and forbid on a connection that stays open.

use std::time::{Duration, Instant};

use carriers::{Class, Health, Heard, Signal, SignalError};

use super::support::broker::{Broker, NOTICED};
use super::support::process::{Process, Variables, unique};
use super::support::wait::{SOON, eventually};
use super::support::world::World;
use tokio::time::timeout;

const SUBJECT: &str = "ov.events.fabric.topic";

/// NATS with one user of these rights.
fn configuration(permissions: &str) -> String {
    format!("authorization {{ users: [ {{ user: events, password: hush, permissions: {{ {permissions} }} }} ] }}\n")
}

fn process(broker: &Broker) -> Process {
    let variables = Variables::from([("NATS_URL", format!("nats://events:hush@{}", broker.address()))]);
    Process::start(carriers::descriptor("nats-v1").expect("registered"), &variables)
}

/// The test's own client.
pub(crate) async fn client(broker: &Broker, user: &str, password: &str) -> async_nats::Client {
    let options = async_nats::ConnectOptions::with_user_and_password(user.into(), password.into());
    options.connect(broker.address()).await.expect("the broker answers")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_and_a_stalled_server_are_named_and_come_back() {
    let world = World::of("nats-v1").await;
    let broker = world.broker().expect("its own");
    let (one, two) = world.pair().await;
    broker.kill();
    one.stands(Health::not_connected("nats-v1"), NOTICED).await;
    broker.revive().await;
    world.connected(&one).await;
    world.connected(&two).await;
    one.reaches_any(&[&two], Class::Topic).await;
    broker.stall();
    one.stands(Health::not_connected("nats-v1"), NOTICED).await;
    broker.resume();
    world.connected(&one).await;
    world.connected(&two).await;
    one.reaches_any(&[&two], Class::Topic).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_on_an_open_connection_is_named_within_two_seconds_and_ends_when_it_is_lifted() {
    let all = configuration(r#"publish: ">", subscribe: ">""#);
    let mute = configuration(r#"publish: { deny: "ov.events.>" }, subscribe: ">""#);
    let broker = Broker::nats_with(&all).await;
    let (one, two) = (process(&broker), process(&broker));
    one.stands(Health::Up, SOON).await;
    broker.reload(&mute);
    let denied = Health::permission_denied("nats-v1");
    one.stands(denied.clone(), Duration::from_secs(2)).await;
    assert_eq!(
        one.send(Class::Topic, &[unique(Class::Topic)]).await,
        Err(SignalError::Denied)
    );
    // A connection that is opened while it is still refused changes nothing.
    broker.kill();
    broker.revive().await;
    one.stands(denied.clone(), SOON).await;
    broker.reload(&all);
    one.stands(Health::Up, SOON).await;
    two.stands(Health::Up, SOON).await;
    one.reaches_any(&[&two], Class::Topic).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn users_that_may_not_publish_or_not_subscribe_or_not_at_all_are_denied() {
    for permissions in [r#"publish: { deny: ">" }"#, r#"subscribe: { deny: ">" }"#] {
        let broker = Broker::nats_with(&configuration(permissions)).await;
        process(&broker)
            .stands(Health::permission_denied("nats-v1"), NOTICED)
            .await;
    }
    let broker = Broker::nats_with("authorization { user: other, password: other }").await;
    process(&broker)
        .stands(Health::permission_denied("nats-v1"), NOTICED)
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strange_messages_say_nothing_and_what_is_behind_them_arrives() {
    let broker = Broker::nats_with(&configuration(r#"publish: ">""#)).await;
    let (one, two) = (process(&broker), process(&broker));
    one.stands(Health::Up, SOON).await;
    two.stands(Health::Up, SOON).await;
    let anybody = client(&broker, "events", "hush").await;
    let large = "x".repeat(900_000);
    let nested = format!(r#"{{"from":"x","ids":{}"#, "[".repeat(10_000));
    let ids: Vec<String> = (0..1500).map(|n| format!("evt_{n}")).collect();
    let many = serde_json::json!({ "from": "x", "ids": ids }).to_string();
    for message in [
        "",
        "{}",
        "nonsense",
        r#"{"rows":[{"id":"evt_forged"}]}"#,
        &large,
        &nested,
    ] {
        anybody
            .publish(SUBJECT, message.to_owned().into())
            .await
            .expect("published");
    }
    anybody
        .publish(SUBJECT, b"\xff\x00".as_slice().into())
        .await
        .expect("published");
    anybody.publish(SUBJECT, many.into()).await.expect("published");
    anybody.flush().await.expect("sent");
    let real = unique(Class::Topic);
    one.send(Class::Topic, std::slice::from_ref(&real)).await.expect("sent");
    eventually("the real one arrives", SOON, async || two.signals().contains(&real)).await;
    // What one message may name at most.
    let forged = || {
        two.signals()
            .into_iter()
            .filter(|signal| *signal != real)
            .collect::<Vec<_>>()
    };
    eventually("a thousand of the forged ids", SOON, async || match forged().len() {
        1000 => Ok(()),
        other => Err(format!("{other}")),
    })
    .await;
    assert!(forged().iter().all(|signal| signal.subscription_id.is_none()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_hold_ids_and_nothing_else() {
    let broker = Broker::nats_with(&configuration(r#"publish: ">""#)).await;
    let one = process(&broker);
    one.stands(Health::Up, SOON).await;
    let listener = client(&broker, "events", "hush").await;
    let mut messages = listener.subscribe(SUBJECT).await.expect("subscribed");
    // It hears what the process says to itself: from now on it misses nothing.
    futures_util::StreamExt::next(&mut messages).await.expect("a message");
    let signal = Signal {
        event_id: "evt_1".into(),
        subscription_id: None,
    };
    one.send(Class::Topic, &[signal]).await.expect("sent");
    let ids = loop {
        let message = futures_util::StreamExt::next(&mut messages).await.expect("a message");
        let message: serde_json::Value = serde_json::from_slice(&message.payload).expect("JSON");
        let members = message.as_object().expect("an object");
        assert_eq!(members.keys().collect::<Vec<_>>(), ["from", "ids"]);
        if message["ids"] != serde_json::json!([]) {
            break message["ids"].clone();
        }
    };
    assert_eq!(ids, serde_json::json!(["evt_1"]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_may_have_missed_something_is_told_to_look_at_everything() {
    let world = World::of("nats-v1").await;
    let one = world.process();
    world.connected(&one).await;
    one.heard.lock().clear();
    world.line.drop_connections();
    eventually("it looks at everything", SOON, async || {
        one.heard.lock().contains(&Heard::Everything)
    })
    .await;
    one.carrier.probe().await.expect("an answer");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_sent_has_been_taken_when_the_server_has_sent_it_back_and_not_before() {
    let world = World::of("nats-v1").await;
    let one = world.process();
    world.connected(&one).await;
    let late = Duration::from_millis(150);
    world.line.delay(late);
    // It talks to itself all the time, and none of those words stands for a later one.
    for _ in 0..5 {
        let began = Instant::now();
        one.carrier.probe().await.expect("an answer");
        assert!(began.elapsed() >= late * 2, "{:?}", began.elapsed());
        let began = Instant::now();
        one.send(Class::Topic, &[unique(Class::Topic)]).await.expect("sent");
        assert!(began.elapsed() >= late * 2, "{:?}", began.elapsed());
    }
    world.line.stall();
    let taken = timeout(
        Duration::from_millis(500),
        one.send(Class::Topic, &[unique(Class::Topic)]),
    )
    .await;
    assert!(!matches!(taken, Ok(Ok(()))), "nobody took it");
}
