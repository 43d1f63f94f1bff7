//! What only JetStream can do to its carrier: lose its stream or consumer, refuse them, and deliver again.

use std::time::Duration;

use async_nats::jetstream::{self, Context, consumer::pull, stream};
use carriers::{Class, Health, Signal};

use super::nats_v1::client;
use super::support::broker::{Broker, NOTICED};
use super::support::process::{Process, Variables, unique};
use super::support::wait::{SOON, eventually};
use super::support::world::World;

const STREAM: &str = "OV_EVENTS_STREAM";
const CONSUMER: &str = "events_workers";

/// JetStream for a user who may do anything.
const OPEN: &str = "jetstream {}\nauthorization { user: events, password: hush }\n";

fn process(broker: &Broker) -> Process {
    let variables = Variables::from([("NATS_URL", format!("nats://events:hush@{}", broker.address()))]);
    Process::start(carriers::descriptor("nats-js-v1").expect("registered"), &variables)
}

async fn open() -> (Broker, Context) {
    let broker = Broker::nats_with(OPEN).await;
    let context = jetstream::new(client(&broker, "events", "hush").await);
    (broker, context)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_stream_and_its_consumer_have_the_documented_limits() {
    let (broker, context) = open().await;
    let (one, two) = (process(&broker), process(&broker));
    one.stands(Health::Up, SOON).await;
    two.stands(Health::Up, SOON).await;
    let stream = context.get_stream(STREAM).await.expect("the stream");
    let config = stream.get_info().await.expect("its info").config;
    assert_eq!(config.subjects, ["ov.events.fabric.stream.>"]);
    assert_eq!(
        (config.retention, config.storage, config.discard, config.num_replicas),
        (
            stream::RetentionPolicy::Limits,
            stream::StorageType::File,
            stream::DiscardPolicy::Old,
            1
        )
    );
    assert_eq!(
        (config.max_age, config.duplicate_window),
        (Duration::from_secs(86_400), Duration::from_secs(120))
    );
    assert_eq!((config.max_message_size, config.max_bytes), (1024, 256 * 1024 * 1024));
    let consumers: Vec<_> = futures_util::StreamExt::collect(stream.consumer_names()).await;
    let consumers: Vec<_> = consumers
        .into_iter()
        .map(|name: Result<String, _>| name.expect("a name"))
        .collect();
    assert_eq!(consumers, [CONSUMER], "one for all processes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_or_consumer_that_is_deleted_is_made_again() {
    let (broker, context) = open().await;
    let one = process(&broker);
    one.stands(Health::Up, SOON).await;
    one.reaches_any(&[&one], Class::Stream).await;
    context
        .get_stream(STREAM)
        .await
        .expect("the stream")
        .delete_consumer(CONSUMER)
        .await
        .expect("deleted");
    one.reaches_any(&[&one], Class::Stream).await;
    context.delete_stream(STREAM).await.expect("deleted");
    one.reaches_any(&[&one], Class::Stream).await;
    one.stands(Health::Up, SOON).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_exists_is_used_as_it_is() {
    let (broker, context) = open().await;
    let own = stream::Config {
        name: STREAM.into(),
        subjects: vec!["ov.events.fabric.stream.>".into()],
        max_messages: 7,
        ..stream::Config::default()
    };
    context.create_stream(own).await.expect("created");
    let one = process(&broker);
    one.stands(Health::Up, SOON).await;
    one.reaches_any(&[&one], Class::Stream).await;
    let info = context
        .get_stream(STREAM)
        .await
        .expect("the stream")
        .get_info()
        .await
        .expect("its info");
    assert_eq!(info.config.max_messages, 7);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_jetstream_is_not_ready_and_says_why() {
    let broker = Broker::nats_with("authorization { user: events, password: hush }").await;
    let one = process(&broker);
    eventually("it is not ready", NOTICED, async || match one.carrier.health() {
        Health::Down(reason) if reason.starts_with("stream not ready (nats-js-v1): ") => Ok(()),
        health => Err(format!("{health:?}")),
    })
    .await;
    broker.kill();
    one.stands(Health::not_connected("nats-js-v1"), NOTICED).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_forbidden_is_named_and_used_again_when_it_is_allowed() {
    let rights = |publish: &str| {
        format!(
            "jetstream {{}}\nauthorization {{ users: [ {{ user: events, password: hush, \
             permissions: {{ publish: {{ deny: {publish} }} }} }} ] }}\n"
        )
    };
    let all = rights("[]");
    for denied in ["\"$JS.API.>\"", "\"ov.events.fabric.stream.>\""] {
        let broker = Broker::nats_with(&rights(denied)).await;
        let one = process(&broker);
        one.stands(Health::permission_denied("nats-js-v1"), NOTICED).await;
        broker.reload(&all);
        one.stands(Health::Up, Duration::from_secs(20)).await;
        one.reaches_any(&[&one], Class::Stream).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strange_messages_are_acknowledged_and_what_is_behind_them_arrives() {
    let (broker, context) = open().await;
    let one = process(&broker);
    one.stands(Health::Up, SOON).await;
    let long = "x".repeat(900);
    for message in [
        "",
        "nonsense",
        r#"{"event_id":1}"#,
        r#"{"event_id":"a b","subscription_id":"s"}"#,
        &long,
    ] {
        let stored = context
            .publish("ov.events.fabric.stream.abc", message.to_owned().into())
            .await
            .expect("published");
        stored.await.expect("stored");
    }
    context
        .publish("ov.events.fabric.stream.abc", b"\xff\x00".as_slice().into())
        .await
        .expect("published");
    let real = unique(Class::Stream);
    one.send(Class::Stream, std::slice::from_ref(&real))
        .await
        .expect("stored");
    eventually("the real one arrives", SOON, async || one.signals() == [real.clone()]).await;
    acknowledged(&context).await;
}

/// Nothing waits, and nothing was taken without an acknowledgement.
async fn acknowledged(context: &Context) {
    let stream = context.get_stream(STREAM).await.expect("the stream");
    eventually("everything is acknowledged", SOON, async || {
        let info = stream.consumer_info(CONSUMER).await.expect("the consumer");
        match (info.num_pending, info.num_ack_pending) {
            (0, 0) => Ok(()),
            (waiting, taken) => Err(format!("{waiting} wait, {taken} are not acknowledged")),
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signal_is_acknowledged_when_it_was_handled_and_not_before() {
    let (broker, context) = open().await;
    let variables = Variables::from([("NATS_URL", format!("nats://events:hush@{}", broker.address()))]);
    let mut one = Process::open(carriers::descriptor("nats-js-v1").expect("registered"), &variables);
    let mut arrivals = one.run_unheard(8);
    one.stands(Health::Up, SOON).await;
    one.send(Class::Stream, &[unique(Class::Stream)]).await.expect("stored");
    let arrival = arrivals.next().await.expect("an arrival");
    let stream = context.get_stream(STREAM).await.expect("the stream");
    let taken = async || {
        stream
            .consumer_info(CONSUMER)
            .await
            .expect("the consumer")
            .num_ack_pending
    };
    // What the carrier tried at its start is acknowledged by then, or soon.
    eventually("the signal alone is not acknowledged", SOON, async || {
        taken().await == 1
    })
    .await;
    drop(arrival);
    acknowledged(&context).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_killed_process_took_is_delivered_again_to_another() {
    let (broker, context) = open().await;
    let mut one = process(&broker);
    one.stands(Health::Up, SOON).await;
    one.stop().await;
    // A consumer that has not long to wait for its dead.
    let stream = context.get_stream(STREAM).await.expect("the stream");
    stream.delete_consumer(CONSUMER).await.expect("deleted");
    let quick = pull::Config {
        durable_name: Some(CONSUMER.into()),
        ack_wait: Duration::from_secs(1),
        ..pull::Config::default()
    };
    let consumer = stream.create_consumer(quick).await.expect("created");
    let two = process(&broker);
    two.stands(Health::Up, SOON).await;
    let signal = unique(Class::Stream);
    let message = serde_json::to_string(&signal).expect("JSON");
    // The dead process: it asks first, takes the message and is never heard of again.
    let mut dead = consumer.fetch().max_messages(1).messages().await.expect("a pull");
    context
        .publish("ov.events.fabric.stream._", message.into())
        .await
        .expect("published")
        .await
        .expect("stored");
    let _taken = futures_util::StreamExt::next(&mut dead).await;
    eventually("it arrives after all", SOON, async || two.signals().contains(&signal)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_delivery_can_be_signalled_again() {
    let world = World::of("nats-js-v1").await;
    let one = world.process();
    world.connected(&one).await;
    let signal: Signal = unique(Class::Stream);
    for times in 1..=3 {
        one.send(Class::Stream, std::slice::from_ref(&signal))
            .await
            .expect("stored");
        eventually("it arrives each time", SOON, async || one.signals().len() == times).await;
    }
    // Within one call it is the same news.
    one.send(Class::Stream, &[signal.clone(), signal.clone()])
        .await
        .expect("stored");
    let other = unique(Class::Stream);
    one.send(Class::Stream, std::slice::from_ref(&other))
        .await
        .expect("stored");
    eventually("the last arrives", SOON, async || one.signals().contains(&other)).await;
    assert_eq!(one.signals().len(), 5);
    one.carrier.probe().await.expect("an answer");
}
