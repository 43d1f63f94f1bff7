//! What the fabric counts and logs: claims by what caused them, how long a carrier's word takes, and what a stop or a lost
//! broker leaves in the log.

use std::{sync::Arc, time::Duration};

use openvibe_events::delivery::{DeliverySettings, Waker};
use parking_lot::Mutex;
use planner::Class;

use crate::{
    api_world::Site,
    delivery_worker::{Process, World, settings},
    fabric_world::{NO_POLL, Pair, carrier, metric, subscribe, topic, url},
    support::{
        broker::Broker,
        envelopes::envelope,
        proxy::Proxy,
        receiver::{Answer, Receiver},
        wait::{SOON, eventually, stays},
    },
};

const TYPE: &str = "live.counted.here";

/// Deliveries that a process claimed by a path.
fn won(path: &str) -> String {
    format!(r#"events_claims_total{{path="{path}",outcome="won"}}"#)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_is_counted_for_the_carrier_whose_word_led_to_it() {
    let pair = Pair::start(&[]).await;
    pair.subscribe(TYPE, "/hook").await;
    let worker = pair.worker.client();
    // The worker may hear of an event before it has heard of the subscription, and finds it by looking then.
    pair.round(&envelope("live").event_type(TYPE), SOON).await;
    let (rung, found) = (metric(worker, &won("pg-v1")).await, metric(worker, &won("poll")).await);
    assert_eq!(rung + found, 1.0);
    pair.round(&envelope("live").event_type(TYPE), SOON).await;
    assert_eq!(metric(worker, &won("pg-v1")).await, rung + 1.0);
    let heard = r#"events_claim_seconds_count{path="pg-v1"}"#;
    assert_eq!(metric(worker, heard).await, rung + 1.0);
    let wait = r#"events_commit_to_claim_seconds_count{carrier="pg-v1",class="QUEUE"}"#;
    assert_eq!(metric(worker, wait).await, 2.0);
    let sum = r#"events_commit_to_claim_seconds_sum{carrier="pg-v1",class="QUEUE"}"#;
    assert!(metric(worker, sum).await < 5.0, "by one clock");
    let offered = r#"events_carrier_latency_seconds{carrier="pg-v1",class="QUEUE"}"#;
    assert_eq!(
        metric(worker, offered).await,
        1800.0,
        "half of its poll, whatever its bell does"
    );
    assert_eq!(metric(worker, &won("local")).await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_of_what_the_process_has_committed_and_what_follows_it_are_counted_as_its_own() {
    let receiver = Receiver::start().await;
    receiver.answer_with("/hook", |call| {
        Answer::status(if call.attempt() == 1 { 500 } else { 204 })
    });
    let site = Site::own(1, &[("EVENTS_WORKER", "on"), NO_POLL, ("EVENTS_BACKOFF_MS", "50")]).await;
    subscribe(site.one(), TYPE, &receiver.url("/hook")).await;
    site.one().publish(&envelope("live").event_type(TYPE)).await.expect(201);
    receiver.wait_calls(2, SOON).await;
    assert_eq!(metric(site.one(), &won("local")).await, 1.0);
    assert_eq!(metric(site.one(), &won("next")).await, 1.0, "the retry fell due");
    let first = "events_commit_to_claim_seconds_count";
    assert_eq!(
        metric(site.one(), first).await,
        1.0,
        "a retry had to wait, and does not count"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_nothing_announced_is_counted_for_the_poll() {
    let deaf = [
        ("EVENTS_CARRIERS_DISABLED", "pg-v1"),
        ("EVENTS_WORKER_INTERVAL_MS", "200"),
    ];
    let pair = Pair::start_with(&[], &deaf).await;
    pair.subscribe(TYPE, "/hook").await;
    pair.round(&envelope("live").event_type(TYPE), SOON).await;
    assert_eq!(metric(pair.worker.client(), &won("poll")).await, 1.0);
    assert_eq!(metric(pair.worker.client(), "events_oldest_due_seconds").await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_whose_process_died_is_counted_by_the_one_that_frees_it() {
    let pair = Pair::start(&[]).await;
    pair.receiver.answer_with("/hook", |_| Answer::hang(204));
    pair.subscribe(TYPE, "/hook").await;
    pair.client()
        .publish(&envelope("live").event_type(TYPE))
        .await
        .expect(201);
    pair.receiver.wait_calls(1, SOON).await;
    let other = pair.another(&[]).await;
    pair.worker.kill().await;
    eventually("it is freed", SOON, async || {
        metric(other.client(), "events_lease_expired_total").await == 1.0
    })
    .await;
}

/// Notes what its words led to.
#[derive(Default)]
struct Bell(Mutex<Vec<(Class, Duration)>>);

impl Waker for Bell {
    fn id(&self) -> &'static str {
        "bell-v1"
    }

    fn claimed(&self, class: Class, after: Duration) {
        self.0.lock().push((class, after));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_word_that_waited_for_nothing_tells_the_time_of_its_carrier() {
    let world = World::new().await;
    world.receiver.answer_with("/held", |_| Answer::hang(204));
    let held = world.subscribe("chat", &world.receiver.url("/held")).await;
    let free = world.subscribe("media", &world.receiver.url("/free")).await;
    let one_slot = DeliverySettings {
        max_inflight: 1,
        poll_interval: Duration::from_secs(3600),
        ..settings()
    };
    let process = Process::start(world.database.url(), one_slot).await;
    let bell = Arc::new(Bell::default());
    let waker: Arc<dyn Waker> = Arc::<Bell>::clone(&bell);
    let place = async || {
        let placed = "WITH p AS (
                INSERT INTO delivery_placements (carrier_class, carrier, result, decided_at)
                VALUES ('STREAM', 'pg-v1', '{}', now_ms()) RETURNING id)
             UPDATE deliveries SET placement_id = p.id FROM p";
        sqlx::query(placed)
            .execute(world.database.pool())
            .await
            .expect("placed");
    };

    world.publish(1, &[&free]).await;
    place().await;
    process.wake.heard(&waker, tokio::time::Instant::now(), [free.clone()]);
    world.all(&free, "delivered").await;
    let told = bell.0.lock().clone();
    assert_eq!(told.len(), 1);
    assert_eq!(told[0].0, Class::Stream);
    assert!(told[0].1 > Duration::ZERO && told[0].1 < SOON, "{told:?}");

    world.publish(1, &[&held]).await;
    process.wake.subscriptions([held.clone()]);
    world.receiver.wait_calls(2, SOON).await;
    world.publish(1, &[&free]).await;
    place().await;
    process.wake.heard(&waker, tokio::time::Instant::now(), [free.clone()]);
    stays("it waits for the slot", Duration::from_millis(200), async || {
        world.receiver.calls().len() == 2
    })
    .await;
    world.receiver.release();
    world.all(&free, "delivered").await;
    assert_eq!(bell.0.lock().len(), 1, "the slot was waited for, not the carrier");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_broker_is_one_line_in_the_log_and_a_stop_is_no_warning() {
    let broker = Broker::nats().await;
    let line = Proxy::start(&broker.address()).await;
    let address = url("nats", line.address());
    let site = Site::own(1, &[("NATS_URL", &address), ("NATS_JETSTREAM", "off")]).await;
    topic(site.one(), TYPE).await;
    let state = async || carrier(site.one(), "nats-v1").await["state"].clone();
    eventually("it is up", SOON, async || state().await == "up").await;
    line.cut();
    eventually("it is down", SOON, async || state().await == "down").await;
    line.restore();
    eventually("it is up again", SOON, async || state().await == "up").await;
    let (exit, _took) = site.service().terminate().await;
    assert_eq!(exit.code, Some(0));
    let log = site.service().log();
    let lines = |words: &[&str]| {
        let all = |line: &&str| words.iter().all(|word| line.contains(word));
        log.lines().filter(all).count()
    };
    assert_eq!(lines(&["nats-v1: not connected (nats-v1)"]), 1, "{log}");
    assert_eq!(lines(&["async_nats"]), 0, "{log}");
    assert_eq!(
        (lines(&["WARN", "pg-v1"]), lines(&["pg-v1 has stopped"])),
        (0, 1),
        "{log}"
    );
}
