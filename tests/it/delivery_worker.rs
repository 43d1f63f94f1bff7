//! Deliveries without the HTTP edge: workers on a real database send to a real receiver, crash, stop and lose the
//! database in the middle of things.

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use openvibe_events::{
    delivery::{self, DeliverySettings, Vitals, Wake},
    domain::{
        app::Holder, endpoint::HostRules, envelope, ids::SubscriptionId, retry::Schedule, seal::Sealer, time::Millis,
    },
    egress::Guard,
    store::{
        Addresses, NewDelivery, NewEvent, NewSubscription, ReplaySelection, SharedStore, Skip, Store,
        SubscriptionChange,
    },
    tls::{Authorities, Trust},
};
use serde_json::json;
use tokio::{runtime::Runtime, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use crate::store_fixture::FloorAlone;
use crate::support::{
    database::Database,
    envelopes,
    proxy::Proxy,
    receiver::{Answer, Call, Receiver},
    wait::{SOON, eventually, stays, within},
};

pub(crate) const SECRET: &str = "whsec_for_tests_of_deliveries_only_0001";
const TYPE: &str = "live.stream.started";

#[expect(clippy::disallowed_methods, reason = "deliveries are signed with the real time")]
pub(crate) fn settings() -> DeliverySettings {
    DeliverySettings {
        max_inflight: 64,
        inflight_default: 1,
        retry: Schedule {
            max_attempts: 3,
            backoff_ms: vec![50],
            jitter: 0.0,
        },
        timeout: Duration::from_secs(20),
        poll_interval: Duration::from_millis(100),
        hosts: HostRules::parse(&["127.0.0.1".to_owned()]).expect("a good rule"),
        guard: Guard::new(&[]),
        trust: Trust::load(&Authorities::default()),
        user_agent: "OpenVibe.Events/0.1".to_owned(),
        clock: || {
            let since = SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .expect("a clock after 1970");
            Millis(i64::try_from(since.as_millis()).expect("a clock before the year 292 million"))
        },
    }
}

/// A worker with everything of its own, so that it can crash as a process does: at once, and without a word.
pub(crate) struct Process {
    runtime: Option<Runtime>,
    pub(crate) wake: Wake,
    pub(crate) vitals: Vitals,
    stop: CancellationToken,
    task: Option<JoinHandle<()>>,
}

impl Process {
    pub(crate) async fn start(url: &str, settings: DeliverySettings) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let stop = CancellationToken::new();
        let (url, stopped) = (url.to_owned(), stop.clone());
        let starting = runtime.spawn(async move {
            let store = connect(&url).await;
            delivery::start(store, settings, stopped).expect("an HTTP client")
        });
        let started = starting.await.expect("a started worker");
        eventually("the worker runs", SOON, async || started.vitals.read().running).await;
        Self {
            runtime: Some(runtime),
            wake: started.wake,
            vitals: started.vitals,
            stop,
            task: Some(started.task),
        }
    }

    fn crash(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    /// Stops as a process told to; answers how long that took.
    async fn stop(mut self) -> Duration {
        let began = Instant::now();
        self.stop.cancel();
        let task = self.task.take().expect("it was not stopped before");
        within("the worker's stop", Duration::from_secs(10), task)
            .await
            .expect("an end without a panic");
        began.elapsed()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.crash();
    }
}

async fn connect(url: &str) -> SharedStore {
    let addresses = Addresses::parse(url, url).expect("a database URL");
    Arc::new(Store::connect(addresses).await.expect("a migrated database"))
}

/// A database, a receiver, and a publisher's view of them.
pub(crate) struct World {
    pub(crate) database: Database,
    pub(crate) receiver: Receiver,
    pub(crate) store: SharedStore,
}

#[derive(Debug, PartialEq, sqlx::FromRow)]
pub(crate) struct Row {
    pub(crate) status: String,
    pub(crate) attempt: i32,
    last_status: Option<i32>,
    last_error: Option<String>,
    leased: bool,
    due_in_ms: Option<i64>,
}

impl World {
    pub(crate) async fn new() -> Self {
        let (database, receiver) = tokio::join!(Database::create(), Receiver::start());
        let store = connect(database.url()).await;
        Self {
            database,
            receiver,
            store,
        }
    }

    pub(crate) async fn subscribe(&self, consumer: &str, endpoint: &str) -> SubscriptionId {
        let created = self
            .store
            .create_subscription(&NewSubscription {
                holder: Holder::service(consumer),
                topic_pattern: TYPE,
                endpoint,
                secret: SECRET,
                retry_policy: None,
                max_inflight: None,
                consumer_max: 100,
                project_max: None,
                issued_at_s: 0,
            })
            .await
            .expect("a new subscription");
        SubscriptionId::parse(&created.id).expect("an id as the store makes them")
    }

    /// A subscription that may have so many deliveries in flight.
    pub(crate) async fn subscribe_capped(&self, consumer: &str, path: &str, max_inflight: i32) -> SubscriptionId {
        let id = self.subscribe(consumer, &self.receiver.url(path)).await;
        let change = SubscriptionChange {
            max_inflight: Some(Some(max_inflight)),
            ..SubscriptionChange::default()
        };
        let changed = self
            .store
            .update_subscription(&Holder::service(consumer), &id, &change)
            .await;
        assert!(changed.expect("a change").is_some());
        id
    }

    /// Stores `count` events with one delivery for each subscription, and tells nobody.
    pub(crate) async fn publish(&self, count: usize, subscriptions: &[&SubscriptionId]) {
        self.publish_keyed(&vec![None; count], subscriptions).await;
    }

    /// Stores one event for each of the keys; `payload.key` and `payload.n` tell them apart.
    pub(crate) async fn publish_keyed(&self, keys: &[Option<&str>], subscriptions: &[&SubscriptionId]) {
        self.store_events(keys, subscriptions, false).await;
    }

    /// Stores `count` events whose deliveries may leave a process once only.
    async fn publish_once(&self, count: usize, subscriptions: &[&SubscriptionId]) {
        self.store_events(&vec![None; count], subscriptions, true).await;
    }

    async fn store_events(&self, keys: &[Option<&str>], subscriptions: &[&SubscriptionId], at_most_once: bool) {
        let events: Vec<envelope::Envelope> = keys
            .iter()
            .enumerate()
            .map(|(n, key)| {
                let made = envelopes::envelope("live")
                    .event_type(TYPE)
                    .payload(json!({ "key": key, "n": n }));
                let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
                let parsed = envelope::Envelope::parse(&made.json().to_string(), trace);
                parsed.expect("a good envelope").0
            })
            .collect();
        let ids: Vec<&str> = events.iter().map(|event| event.event_id.as_str()).collect();
        let new: Vec<NewEvent<'_>> = events
            .iter()
            .map(|envelope| NewEvent {
                envelope,
                hops: 2,
                publisher: "live",
                request_id: "req_for_tests",
                project: None,
            })
            .collect();
        let deliveries: Vec<NewDelivery<'_>> = events
            .iter()
            .enumerate()
            .zip(keys)
            .flat_map(|((event, _), key)| {
                subscriptions.iter().map(move |id| NewDelivery {
                    event,
                    subscription_id: id,
                    ordering_key: *key,
                    at_most_once,
                    carrier: "pg-v1",
                    placement_id: None,
                })
            })
            .collect();
        let mut group = self.store.open_group(&ids).await.expect("a group");
        group.store(&new, &deliveries).await.expect("stored events");
        group.commit().await.expect("a commit");
    }

    /// The deliveries of a subscription in position order.
    pub(crate) async fn rows(&self, subscription: &SubscriptionId) -> Vec<Row> {
        sqlx::query_as(
            "SELECT status, attempt, last_status, last_error, lease_until IS NOT NULL AS leased, \
                    next_attempt_at - now_ms() AS due_in_ms \
             FROM deliveries WHERE subscription_id = $1 ORDER BY seq",
        )
        .bind(subscription.as_str())
        .fetch_all(self.database.pool())
        .await
        .expect("the rows")
    }

    /// Waits until every delivery of the subscription has this status.
    pub(crate) async fn all(&self, subscription: &SubscriptionId, status: &str) {
        eventually(&format!("every delivery {status}"), SOON, async || {
            let rows = self.rows(subscription).await;
            let done = !rows.is_empty() && rows.iter().all(|row| row.status == status && !row.leased);
            done.then_some(()).ok_or(format!("{rows:?}"))
        })
        .await;
    }

    /// Replays one event; answers how many deliveries were queued.
    async fn replay(&self, subscription: &SubscriptionId, event_id: &str) -> i64 {
        let selection = ReplaySelection::Events(vec![event_id.to_owned()]);
        let replayed = self.store.replay(subscription, &selection, &FloorAlone).await;
        replayed.expect("a replay").expect("a subscription").queued
    }

    async fn workers(&self) -> i64 {
        sqlx::query_scalar("SELECT count(*) FROM workers WHERE alive_until > now_ms()")
            .fetch_one(self.database.pool())
            .await
            .expect("the workers")
    }
}

#[tokio::test]
async fn a_delivery_carries_its_headers_and_both_signatures_of_a_rotation() {
    let world = World::new().await;
    let id = world.subscribe("chat", &world.receiver.url("/hook?x=1")).await;
    let later = "whsec_for_tests_of_deliveries_only_0002";
    world
        .store
        .rotate_secret(&Holder::service("chat"), &id, later, 3_600_000)
        .await
        .expect("a rotation");
    let _process = Process::start(world.database.url(), settings()).await;
    world.publish(1, &[&id]).await;
    let call = &world.receiver.wait_calls(1, SOON).await[0];
    call.assert_signed(SECRET);
    call.assert_signed(later);
    let header = |name: &str| call.header(name).unwrap_or_default().to_owned();
    assert_eq!(header("user-agent"), "OpenVibe.Events/0.1");
    assert_eq!(header("content-type"), "application/json");
    assert_eq!(header("x-openvibe-event-id"), call.json()["event"]["event_id"]);
    assert_eq!(header("x-openvibe-event-type"), TYPE);
    assert_eq!(header("x-openvibe-subscription-id"), id.as_str());
    assert_eq!(header("x-openvibe-delivery-attempt"), "1");
    assert_eq!(header("x-openvibe-hops"), "2");
    let trace = call.json()["event"]["trace_id"].as_str().expect("a trace").to_owned();
    let parent = header("traceparent");
    assert!(
        parent.starts_with(&format!("00-{trace}-")) && parent.ends_with("-01"),
        "{parent}"
    );
    world.all(&id, "delivered").await;
}

#[tokio::test]
async fn a_redirect_is_a_failure_and_is_not_followed() {
    let world = World::new().await;
    let elsewhere = world.receiver.url("/elsewhere");
    world
        .receiver
        .answer_with("/hook", move |_| Answer::status(307).header("Location", &elsewhere));
    let id = world.subscribe("chat", &world.receiver.url("/hook")).await;
    let _process = Process::start(world.database.url(), settings()).await;
    world.publish(1, &[&id]).await;
    world.all(&id, "dead").await;
    let row = &world.rows(&id).await[0];
    assert_eq!(
        (row.attempt, row.last_status, row.last_error.as_deref()),
        (3, Some(307), Some("HTTP 307"))
    );
    let attempts: Vec<u32> = world.receiver.calls().iter().map(|call| call.attempt()).collect();
    assert_eq!(attempts, [1, 2, 3], "every attempt is counted, and none went elsewhere");
}

#[tokio::test]
async fn an_endpoint_that_is_no_longer_allowed_is_dead_at_once_and_not_called() {
    let world = World::new().await;
    let id = world.subscribe("chat", &world.receiver.url("/hook")).await;
    let mut strict = settings();
    strict.hosts = HostRules::parse(&["*.openvibe.*".to_owned()]).expect("a good rule");
    let _process = Process::start(world.database.url(), strict).await;
    world.publish(1, &[&id]).await;
    world.all(&id, "dead").await;
    let row = &world.rows(&id).await[0];
    assert_eq!((row.attempt, row.last_status), (1, None));
    assert!(world.receiver.calls().is_empty());
}

#[tokio::test]
async fn an_event_that_cannot_be_read_is_given_up_and_stops_no_other() {
    let world = World::new().await;
    let poisoned = world.subscribe("chat", &world.receiver.url("/poisoned")).await;
    let healthy = world.subscribe("bell", &world.receiver.url("/healthy")).await;
    world.publish(1, &[&poisoned]).await;
    let robot = r#"UPDATE events SET actor = '{"type":"robot","id":"r2"}'"#;
    sqlx::query(robot)
        .execute(world.database.pool())
        .await
        .expect("an update");
    world.publish(5, &[&healthy]).await;
    let _process = Process::start(world.database.url(), settings()).await;
    world.all(&healthy, "delivered").await;
    world.all(&poisoned, "dead").await;
    let error = world.rows(&poisoned).await[0]
        .last_error
        .clone()
        .expect("a reason on record");
    assert!(error.contains("cannot be read"), "{error}");
}

#[tokio::test]
async fn a_row_that_somebody_holds_keeps_no_other_result_from_being_recorded() {
    let world = World::new().await;
    let held = world.subscribe("chat", &world.receiver.url("/held")).await;
    let free = world.subscribe("bell", &world.receiver.url("/free")).await;
    world.receiver.script("/held", [Answer::hang(204)]);
    world.publish(1, &[&held]).await;
    let _process = Process::start(world.database.url(), settings()).await;
    world.receiver.wait_calls_to("/held", 1, SOON).await;
    let mut stranger = world.database.pool().begin().await.expect("a transaction");
    sqlx::query("SELECT 1 FROM deliveries WHERE subscription_id = $1 FOR UPDATE")
        .bind(held.as_str())
        .fetch_one(&mut *stranger)
        .await
        .expect("the row");
    world.receiver.release();
    for _ in 0..3 {
        world.publish(5, &[&free]).await;
        world.all(&free, "delivered").await;
    }
    stranger.rollback().await.expect("an end");
    world.all(&held, "delivered").await;
    assert_eq!(world.receiver.calls_to("/held").len(), 1, "nothing is sent again");
}

#[tokio::test]
async fn attempts_that_end_without_a_result_count_and_end_the_delivery_after_one_more_than_allowed() {
    let world = World::new().await;
    let id = world.subscribe("chat", &world.receiver.url("/hook")).await;
    world.publish(2, &[&id]).await;
    // What three and four crashes leave behind; three attempts are allowed.
    let crashes = "UPDATE deliveries SET attempt = 2 + seq, status = 'failed', updated_at = 0";
    sqlx::query(crashes)
        .execute(world.database.pool())
        .await
        .expect("an update");
    let _process = Process::start(world.database.url(), settings()).await;
    eventually("both deliveries end", SOON, async || {
        let rows = world.rows(&id).await;
        let states: Vec<(&str, i32)> = rows.iter().map(|row| (row.status.as_str(), row.attempt)).collect();
        (states == [("delivered", 4), ("dead", 4)])
            .then_some(())
            .ok_or(format!("{rows:?}"))
    })
    .await;
    assert_eq!(
        world.receiver.calls().len(),
        1,
        "the one that is given up is not sent again"
    );
    let error = world.rows(&id).await[1].last_error.clone().expect("a reason on record");
    assert!(error.contains("used up"), "{error}");
}

#[tokio::test]
async fn an_attempt_without_an_answer_fails_in_words_that_give_nothing_away() {
    let world = World::new().await;
    world.receiver.answer_with("/head", |_| Answer::trickle_head(200));
    let slow = world.subscribe("chat", &world.receiver.url("/head")).await;
    let gone = world.subscribe("chat", "http://127.0.0.1:9/x?token=hidden").await;
    let mut hasty = settings();
    hasty.timeout = Duration::from_millis(300);
    let _process = Process::start(world.database.url(), hasty).await;
    world.publish(1, &[&slow, &gone]).await;
    world.all(&slow, "dead").await;
    let row = &world.rows(&slow).await[0];
    assert_eq!((row.attempt, row.last_error.as_deref()), (3, Some("timeout")));
    world.all(&gone, "dead").await;
    let error = world.rows(&gone).await[0].last_error.clone().expect("an error");
    assert!(error.contains("refused") && !error.contains("hidden"), "{error}");
}

#[tokio::test]
async fn a_body_is_not_waited_for_and_changes_nothing() {
    let world = World::new().await;
    world
        .receiver
        .answer_with("/slow", |_| Answer::trickle_body(200).body_of(60_000));
    world
        .receiver
        .answer_with("/huge", |_| Answer::status(200).body_of(1_000_000));
    let slow = world.subscribe("chat", &world.receiver.url("/slow")).await;
    let huge = world.subscribe("chat", &world.receiver.url("/huge")).await;
    let _process = Process::start(world.database.url(), settings()).await;
    world.publish(3, &[&slow, &huge]).await;
    world.all(&slow, "delivered").await;
    world.all(&huge, "delivered").await;
    assert_eq!(world.receiver.calls().len(), 6, "once each");
}

#[tokio::test]
async fn one_delivery_of_a_subscription_is_in_flight_across_two_processes() {
    let world = World::new().await;
    let mut ids = Vec::new();
    for path in ["/0", "/1", "/2", "/3"] {
        world
            .receiver
            .answer_with(path, |_| Answer::status(204).after(Duration::from_millis(20)));
        ids.push(world.subscribe("chat", &world.receiver.url(path)).await);
    }
    let one = Process::start(world.database.url(), settings()).await;
    let two = Process::start(world.database.url(), settings()).await;
    let all: Vec<&SubscriptionId> = ids.iter().collect();
    for _ in 0..5 {
        world.publish(4, &all).await;
        one.wake.subscriptions(ids.iter().cloned());
        two.wake.subscriptions(ids.iter().cloned());
    }
    for (id, path) in ids.iter().zip(["/0", "/1", "/2", "/3"]) {
        world.all(id, "delivered").await;
        assert_eq!(world.receiver.peak(path), 1);
        assert_eq!(world.receiver.calls_to(path).len(), 20, "none twice");
    }
}

#[tokio::test]
async fn a_cap_of_two_runs_two_keys_and_never_one_of_them_twice() {
    let world = World::new().await;
    world.receiver.answer_with("/hook", |_| Answer::hang(204));
    let id = world.subscribe_capped("chat", "/hook", 2).await;
    let process = Process::start(world.database.url(), settings()).await;
    world
        .publish_keyed(&[Some("a"), Some("a"), Some("b"), Some("b")], &[&id])
        .await;
    process.wake.subscriptions([id.clone()]);
    for lot in 1..=2 {
        world.receiver.wait_calls(2 * lot, SOON).await;
        stays("no third", Duration::from_millis(300), async || {
            world.receiver.active("/hook") == 2 && world.receiver.calls().len() == 2 * lot
        })
        .await;
        let calls = world.receiver.calls();
        let keys = calls[2 * lot - 2..]
            .iter()
            .map(|call| call.json()["event"]["payload"]["key"].clone());
        let mut keys: Vec<String> = keys.map(|key| key.to_string()).collect();
        keys.sort_unstable();
        assert_eq!(keys, [r#""a""#, r#""b""#]);
        world.receiver.release();
    }
    world.all(&id, "delivered").await;
}

#[tokio::test]
async fn order_per_key_holds_when_a_process_dies_in_the_middle() {
    const KEYS: [&str; 3] = ["a", "b", "c"];
    let world = World::new().await;
    let payload = |call: &Call, member: &str| call.json()["event"]["payload"][member].clone();
    // The first arrival of the twelfth event is never answered: its process dies over it.
    world
        .receiver
        .answer_with("/hook", move |call| match payload(call, "n").as_i64() {
            Some(12) if call.attempt() == 1 => Answer::hang(204),
            _ => Answer::status(204).after(Duration::from_millis(20)),
        });
    let id = world.subscribe_capped("chat", "/hook", 3).await;
    let mut first = Process::start(world.database.url(), settings()).await;
    let keys: Vec<Option<&str>> = (0..30).map(|n| Some(KEYS[n % 3])).collect();
    world.publish_keyed(&keys, &[&id]).await;
    first.wake.subscriptions([id.clone()]);
    world
        .receiver
        .wait_until("the event over which it dies", SOON, |receiver| {
            receiver.calls().iter().any(|call| payload(call, "n") == 12)
        })
        .await;
    first.crash();
    let _second = Process::start(world.database.url(), settings()).await;
    world.all(&id, "delivered").await;
    for key in KEYS {
        let calls = world.receiver.calls();
        let of_key: Vec<_> = calls.iter().filter(|call| payload(call, "key") == key).collect();
        let mut order: Vec<i64> = of_key.iter().filter_map(|call| payload(call, "n").as_i64()).collect();
        assert!(order.is_sorted(), "{key}: {order:?}");
        order.dedup();
        assert_eq!(order.len(), 10, "{key}: {order:?}");
        let others = of_key
            .windows(2)
            .filter(|pair| pair[0].event_id() != pair[1].event_id());
        let gaps = others.map(|pair| pair[1].arrived - pair[0].arrived);
        assert!(
            gaps.min() >= Some(Duration::from_millis(18)),
            "two events of {key} at a time"
        );
    }
}

#[tokio::test]
async fn order_per_key_holds_across_two_processes_and_through_failures() {
    let world = World::new().await;
    let payload = |call: &Call, member: &str| call.json()["event"]["payload"][member].clone();
    // The first event of key "a" fails twice; the others of its key wait, those of other keys go on.
    world.receiver.answer_with("/hook", move |call| {
        let fails = payload(call, "key") == "a" && payload(call, "n") == 0 && call.attempt() < 3;
        Answer::status(if fails { 500 } else { 204 }).after(Duration::from_millis(15))
    });
    let id = world.subscribe("chat", &world.receiver.url("/hook")).await;
    sqlx::query("UPDATE subscriptions SET max_inflight = 3")
        .execute(world.database.pool())
        .await
        .expect("a higher cap");
    let mut slow_retries = settings();
    slow_retries.retry.backoff_ms = vec![300];
    let _one = Process::start(world.database.url(), slow_retries.clone()).await;
    let two = Process::start(world.database.url(), slow_retries).await;
    let keys: Vec<Option<&str>> = (0..24).map(|n| Some(["a", "b", "c", "d"][n % 4])).collect();
    world.publish_keyed(&keys, &[&id]).await;
    two.wake.subscriptions([id.clone()]);
    world.all(&id, "delivered").await;

    assert!(world.receiver.peak("/hook") <= 3, "the cap of the subscription");
    for key in ["a", "b", "c", "d"] {
        let calls = world.receiver.calls();
        let of_key: Vec<_> = calls.iter().filter(|call| payload(call, "key") == key).collect();
        let order: Vec<i64> = of_key.iter().filter_map(|call| payload(call, "n").as_i64()).collect();
        assert!(
            order.is_sorted() && order.len() == if key == "a" { 8 } else { 6 },
            "{key}: {order:?}"
        );
        let gaps = of_key.windows(2).map(|pair| pair[1].arrived - pair[0].arrived);
        assert!(gaps.min() >= Some(Duration::from_millis(15)), "two of {key} at a time");
    }
    let first_a = world.receiver.calls().iter().rposition(|call| payload(call, "n") == 0);
    let last_b = world.receiver.calls().iter().rposition(|call| payload(call, "n") == 21);
    assert!(last_b < first_a, "a failing key holds no other");
}

#[tokio::test]
async fn the_slots_of_a_process_are_never_exceeded_and_none_stays_unused() {
    let world = World::new().await;
    let mut ids = Vec::new();
    for n in 0..25 {
        let path = format!("/{n}");
        world
            .receiver
            .answer_with(&path, |_| Answer::status(204).after(Duration::from_millis(250)));
        ids.push(
            world
                .subscribe(&format!("consumer{n}"), &world.receiver.url(&path))
                .await,
        );
    }
    let mut twenty = settings();
    twenty.max_inflight = 20;
    let process = Process::start(world.database.url(), twenty).await;
    let all: Vec<&SubscriptionId> = ids.iter().collect();
    world.publish(3, &all).await;
    process.wake.subscriptions(ids.iter().cloned());
    for id in &ids {
        world.all(id, "delivered").await;
    }
    assert_eq!(world.receiver.calls().len(), 75);
    assert_eq!(world.receiver.peak_total(), 20);
    assert!((0..25).all(|n| world.receiver.peak(&format!("/{n}")) == 1));
}

#[tokio::test]
async fn a_consumer_that_hangs_holds_half_of_the_slots_at_most() {
    let world = World::new().await;
    let mut stuck = Vec::new();
    for n in 0..4 {
        let path = format!("/stuck{n}");
        world.receiver.answer_with(&path, |_| Answer::hang(204));
        stuck.push(world.subscribe("stuck", &world.receiver.url(&path)).await);
    }
    let fine = world.subscribe("fine", &world.receiver.url("/fine")).await;
    let mut four = settings();
    four.max_inflight = 4;
    let process = Process::start(world.database.url(), four).await;
    let every: Vec<&SubscriptionId> = stuck.iter().chain([&fine]).collect();
    world.publish(5, &every).await;
    process.wake.subscriptions(every.iter().copied().cloned());
    world.all(&fine, "delivered").await;
    let held = world
        .receiver
        .calls()
        .iter()
        .filter(|call| call.path().starts_with("/stuck"))
        .count();
    assert_eq!(held, 2);
    let state = process.vitals.read();
    assert_eq!((state.inflight, state.busy_subscriptions), (2, 2));
    world.receiver.release();
}

#[tokio::test]
async fn an_endpoint_that_keeps_timing_out_is_tried_alone_until_it_answers() {
    let world = World::new().await;
    world.receiver.answer_with("/hook", |_| Answer::hang(204));
    // Two subscriptions to one endpoint, four at a time each.
    let mut ids = Vec::new();
    for consumer in ["chat", "bell"] {
        let id = world.subscribe(consumer, &world.receiver.url("/hook")).await;
        let four = SubscriptionChange {
            max_inflight: Some(Some(4)),
            ..SubscriptionChange::default()
        };
        world
            .store
            .update_subscription(&Holder::service(consumer), &id, &four)
            .await
            .expect("a change");
        ids.push(id);
    }
    let mut hasty = settings();
    hasty.timeout = Duration::from_millis(400);
    hasty.retry.backoff_ms = vec![0];
    hasty.retry.max_attempts = 20;
    let process = Process::start(world.database.url(), hasty).await;
    let both: Vec<&SubscriptionId> = ids.iter().collect();
    world.publish(10, &both).await;
    process.wake.subscriptions(ids.iter().cloned());
    // All that may run at once time out; what was begun while they did so ends; from then on it is one at a time.
    let calls = world.receiver.wait_calls(16 + 4, SOON).await;
    let alone: Vec<Instant> = calls[16..].iter().map(|call| call.arrived).collect();
    let apart = alone
        .windows(2)
        .all(|pair| pair[1] - pair[0] >= Duration::from_millis(400));
    assert!(apart, "{alone:?}");
    assert_eq!(world.receiver.peak("/hook"), 8);
    // Its first answer ends that, and every attempt was counted as ever.
    world
        .receiver
        .answer_with("/hook", |_| Answer::status(204).after(Duration::from_millis(100)));
    let before = world.receiver.calls().len();
    world.receiver.more_calls_than(before + 1).await;
    for id in &ids {
        world.all(id, "delivered").await;
    }
    let attempts: i32 = world
        .rows(&ids[0])
        .await
        .iter()
        .chain(&world.rows(&ids[1]).await)
        .map(|row| row.attempt)
        .sum();
    assert_eq!(usize::try_from(attempts), Ok(world.receiver.calls().len()));
    let after: Vec<Instant> = world.receiver.calls()[before + 2..]
        .iter()
        .map(|call| call.arrived)
        .collect();
    let together = after
        .windows(2)
        .filter(|pair| pair[1] - pair[0] < Duration::from_millis(50))
        .count();
    assert!(together >= 6, "more than one at a time again: {after:?}");
}

#[tokio::test]
async fn fifty_endpoints_that_hang_keep_no_healthy_one_waiting() {
    let world = World::new().await;
    let healthy = world.subscribe("healthy", &world.receiver.url("/healthy")).await;
    let mut hanging = Vec::new();
    for n in 0..50 {
        let path = format!("/hangs/{n}");
        world.receiver.answer_with(&path, |_| Answer::hang(204));
        hanging.push(world.subscribe(&format!("hangs{n}"), &world.receiver.url(&path)).await);
    }
    let mut eight = settings();
    eight.max_inflight = 8;
    eight.timeout = Duration::from_secs(2);
    let process = Process::start(world.database.url(), eight).await;
    let healthy_calls = || world.receiver.calls_to("/healthy").len();
    world.publish(1, &[&healthy]).await;
    world.all(&healthy, "delivered").await;

    let all: Vec<&SubscriptionId> = hanging.iter().collect();
    world.publish(3, &all).await;
    process.wake.subscriptions(hanging.iter().cloned());
    let stuck = || world.receiver.calls().len() - healthy_calls();
    // Also while one lot of them times out and the next one takes its place.
    for round in 0..6 {
        eventually("half of the slots hang", SOON, async || {
            (process.vitals.read().inflight == 4 && stuck() > round * 3)
                .then_some(())
                .ok_or(stuck())
        })
        .await;
        let asked = Instant::now();
        world.publish(1, &[&healthy]).await;
        process.wake.subscriptions([healthy.clone()]);
        world.receiver.wait_calls_to("/healthy", 2 + round, SOON).await;
        let took = asked.elapsed();
        assert!(took < Duration::from_secs(1), "round {round}: {took:?}");
    }
    assert!(world.receiver.peak_total() <= 5, "{}", world.receiver.peak_total());
    world.receiver.release();
}

#[tokio::test]
async fn a_cap_that_was_raised_elsewhere_is_used_within_moments_and_a_lowered_one_at_once() {
    let world = World::new().await;
    world.receiver.answer_with("/hook", |_| Answer::hang(204));
    let id = world.subscribe("chat", &world.receiver.url("/hook")).await;
    let mut patient = settings();
    patient.poll_interval = Duration::from_secs(60);
    let process = Process::start(world.database.url(), patient).await;
    world.publish(6, &[&id]).await;
    process.wake.subscriptions([id.clone()]);
    world.receiver.wait_calls(1, SOON).await;
    let cap = async |cap| {
        let change = SubscriptionChange {
            max_inflight: Some(cap),
            ..SubscriptionChange::default()
        };
        let changed = world
            .store
            .update_subscription(&Holder::service("chat"), &id, &change)
            .await;
        assert!(changed.expect("a change").is_some());
    };
    cap(Some(3)).await;
    world.receiver.wait_calls(3, Duration::from_secs(3)).await;
    cap(None).await;
    world
        .receiver
        .answer_with("/hook", |_| Answer::status(204).after(Duration::from_millis(50)));
    world.receiver.release();
    world.all(&id, "delivered").await;
    assert_eq!(world.receiver.peak("/hook"), 3);
    let last: Vec<Instant> = world.receiver.calls()[3..].iter().map(|call| call.arrived).collect();
    let apart = last
        .windows(2)
        .all(|pair| pair[1] - pair[0] >= Duration::from_millis(50));
    assert!(apart, "one at a time again: {last:?}");
}

#[tokio::test]
async fn a_retry_and_a_wake_up_do_not_wait_for_the_poll() {
    let world = World::new().await;
    world.receiver.script("/hook", [500, 500, 204]);
    let id = world.subscribe("chat", &world.receiver.url("/hook")).await;
    let mut patient = settings();
    patient.poll_interval = Duration::from_secs(60);
    let process = Process::start(world.database.url(), patient).await;
    world.publish(1, &[&id]).await;
    process.wake.subscriptions([id.clone()]);
    let calls = world.receiver.wait_calls(3, Duration::from_secs(5)).await;
    let waits: Vec<Duration> = calls.windows(2).map(|pair| pair[1].arrived - pair[0].arrived).collect();
    assert!(waits.iter().all(|wait| *wait >= Duration::from_millis(50)), "{waits:?}");
    world.all(&id, "delivered").await;
}

#[tokio::test]
async fn a_crashed_owners_work_moves_on_within_five_seconds_and_not_while_it_may_live() {
    let world = World::new().await;
    world.receiver.answer_with("/hook", |call| match call.number {
        1 => Answer::hang(204),
        _ => Answer::status(204),
    });
    let id = world.subscribe("chat", &world.receiver.url("/hook")).await;
    let mut first = Process::start(world.database.url(), settings()).await;
    world.publish(1, &[&id]).await;
    world.receiver.wait_calls(1, SOON).await;
    let _second = Process::start(world.database.url(), settings()).await;
    stays(
        "a living owner keeps its claim",
        Duration::from_millis(5500),
        async || world.receiver.calls().len() == 1,
    )
    .await;
    first.crash();
    let crashed = Instant::now();
    let calls = world.receiver.wait_calls(2, SOON).await;
    let after = calls[1].arrived - crashed;
    assert!(
        after >= Duration::from_millis(2500) && after <= Duration::from_secs(5),
        "{after:?}"
    );
    assert_eq!(calls[1].attempt(), 2, "the attempt may have arrived, so it counts");
    world.all(&id, "delivered").await;
}

#[tokio::test]
async fn what_was_skipped_while_it_ran_is_not_sent_again_when_its_owner_dies() {
    let world = World::new().await;
    world.receiver.answer_with("/hook", |_| Answer::hang(204));
    let id = world.subscribe("chat", &world.receiver.url("/hook")).await;
    let mut first = Process::start(world.database.url(), settings()).await;
    world.publish(1, &[&id]).await;
    let event_id = world.receiver.wait_calls(1, SOON).await[0].event_id().to_owned();
    let found = world.store.skip(&id, &[&event_id]).await.expect("a skip");
    assert_eq!(found[&event_id], Skip::InFlight);
    let _second = Process::start(world.database.url(), settings()).await;
    first.crash();
    world.all(&id, "dead").await;
    let error = world.rows(&id).await[0].last_error.clone().expect("a reason on record");
    assert!(error.contains("skipped by an operator"), "{error}");
    assert_eq!(world.receiver.calls().len(), 1);
}

#[tokio::test]
async fn a_late_result_of_a_lost_claim_changes_nothing() {
    let world = World::new().await;
    world.receiver.answer_with("/hook", |call| match call.number {
        1 => Answer::hang(500),
        _ => Answer::status(204),
    });
    let id = world.subscribe("chat", &world.receiver.url("/hook")).await;
    let mut once = settings();
    once.retry.max_attempts = 2;
    let process = Process::start(world.database.url(), once).await;
    world.publish(1, &[&id]).await;
    world.receiver.wait_calls(1, SOON).await;
    sqlx::query("UPDATE deliveries SET lease_until = now_ms() - 1")
        .execute(world.database.pool())
        .await
        .expect("an ended lease");
    world.all(&id, "delivered").await;
    let before = world.rows(&id).await;
    world.receiver.release();
    eventually("the late answer is taken in", SOON, async || {
        process.vitals.read().inflight == 0
    })
    .await;
    assert_eq!(world.rows(&id).await, before);
}

#[tokio::test]
async fn a_delivery_replayed_while_it_runs_is_sent_once_more_after_that_attempt() {
    let world = World::new().await;
    world.receiver.answer_with("/hook", |call| match call.number {
        1 => Answer::hang(204),
        _ => Answer::status(204),
    });
    let id = world.subscribe_capped("chat", "/hook", 4).await;
    let process = Process::start(world.database.url(), settings()).await;
    world.publish_keyed(&[Some("k"), Some("k")], &[&id]).await;
    let event = world.receiver.wait_calls(1, SOON).await[0].event_id().to_owned();
    let replayed = world.replay(&id, &event).await;
    assert_eq!(replayed, 1);
    process.wake.subscriptions([id.clone()]);
    stays("one attempt at a time", Duration::from_millis(500), async || {
        world.receiver.calls().len() == 1
    })
    .await;
    world.receiver.release();
    world.all(&id, "delivered").await;
    let calls = world.receiver.calls();
    let of_event: Vec<u32> = calls
        .iter()
        .filter(|call| call.event_id() == event)
        .map(|call| call.attempt())
        .collect();
    assert_eq!(
        (of_event.as_slice(), calls.len()),
        (&[1, 1][..], 3),
        "once more, and counted anew"
    );
    assert_eq!(world.receiver.peak("/hook"), 1);
}

#[tokio::test]
async fn a_dead_delivery_replayed_behind_delivered_ones_is_sent_and_the_rest_of_its_key_keeps_its_order() {
    let world = World::new().await;
    let n_of = |call: &Call| call.json()["event"]["payload"]["n"].as_i64().expect("a number");
    // The first event is refused until it is dead; the third hangs, so that others wait behind it.
    world
        .receiver
        .answer_with("/hook", move |call| match (n_of(call), call.number) {
            (0, 1..=3) => Answer::status(500),
            (2, _) => Answer::hang(204),
            _ => Answer::status(204),
        });
    let id = world.subscribe_capped("chat", "/hook", 4).await;
    let process = Process::start(world.database.url(), settings()).await;
    world.publish_keyed(&[Some("k"); 5], &[&id]).await;
    let calls = world.receiver.wait_calls(5, SOON).await;
    let first = calls[0].event_id().to_owned();
    assert_eq!(calls.iter().map(|call| n_of(call)).collect::<Vec<_>>(), [0, 0, 0, 1, 2]);
    assert_eq!(world.rows(&id).await[0].status, "dead");
    assert_eq!(world.replay(&id, &first).await, 1);
    process.wake.subscriptions([id.clone()]);
    world.receiver.release();
    world.all(&id, "delivered").await;
    let order: Vec<i64> = world.receiver.calls()[5..].iter().map(|call| n_of(call)).collect();
    assert_eq!(order, [0, 3, 4], "it takes its place in front of what waits");
    assert_eq!(world.receiver.peak("/hook"), 1);
}

#[tokio::test]
async fn a_stop_lets_a_running_attempt_finish_and_leaves_no_owner() {
    let world = World::new().await;
    world
        .receiver
        .answer_with("/hook", |_| Answer::status(204).after(Duration::from_millis(700)));
    let id = world.subscribe("chat", &world.receiver.url("/hook")).await;
    let process = Process::start(world.database.url(), settings()).await;
    world.publish(2, &[&id]).await;
    world.receiver.wait_calls(1, SOON).await;
    let took = process.stop().await;
    assert!(took < Duration::from_secs(3), "{took:?}");
    let rows = world.rows(&id).await;
    assert_eq!((rows[0].status.as_str(), rows[0].attempt), ("delivered", 1));
    assert_eq!(
        (rows[1].status.as_str(), rows[1].attempt, rows[1].leased),
        ("pending", 0, false)
    );
    assert_eq!(world.workers().await, 0, "others need not wait for it");
}

#[tokio::test]
async fn a_stop_hands_an_endless_attempt_back_uncounted_and_due() {
    let world = World::new().await;
    world.receiver.answer_with("/hook", |_| Answer::hang(204));
    let id = world.subscribe("chat", &world.receiver.url("/hook")).await;
    let process = Process::start(world.database.url(), settings()).await;
    world.publish(1, &[&id]).await;
    world.receiver.wait_calls(1, SOON).await;
    let took = process.stop().await;
    assert!(took >= Duration::from_secs(8), "it had its time: {took:?}");
    let row = &world.rows(&id).await[0];
    assert_eq!((row.status.as_str(), row.attempt, row.leased), ("failed", 0, false));
    assert!(row.due_in_ms <= Some(0), "due now: {row:?}");
    assert!(
        row.last_error.as_deref().is_some_and(|error| error.contains("stopped")),
        "{row:?}"
    );
}

#[tokio::test]
async fn what_no_key_opens_waits_without_an_attempt_until_its_secret_can_be_read() {
    let world = World::new().await;
    let sealed_by = Sealer::new([&[7; 32]]);
    let lost = world.subscribe("chat", &world.receiver.url("/lost")).await;
    let fine = world.subscribe("chat", &world.receiver.url("/fine")).await;
    sqlx::query("UPDATE subscriptions SET secret = $2 WHERE id = $1")
        .bind(lost.as_str())
        .bind(sealed_by.seal(SECRET, lost.as_str()))
        .execute(world.database.pool())
        .await
        .expect("an update");
    world.publish(3, &[&lost, &fine]).await;
    let process = Process::start(world.database.url(), settings()).await;
    world.all(&fine, "delivered").await;
    eventually("the first one says why it waits", SOON, async || {
        let row = world.rows(&lost).await.remove(0);
        let error = row.last_error.clone().unwrap_or_default();
        let held = row.status == "failed" && row.attempt == 0 && error.contains("EVENTS_SECRET_KEY");
        // Due for any other process that has the key.
        (held && !row.leased && row.due_in_ms <= Some(0))
            .then_some(())
            .ok_or(format!("{row:?}"))
    })
    .await;
    stays("its queue is left alone", Duration::from_millis(500), async || {
        world.rows(&lost).await[1].last_error.is_none() && world.receiver.calls_to("/lost").is_empty()
    })
    .await;
    // A new secret is stored as this process can read it; nothing of the schedule was used up.
    world
        .store
        .rotate_secret(&Holder::service("chat"), &lost, SECRET, 0)
        .await
        .expect("a rotation");
    world.all(&lost, "delivered").await;
    drop(process);
    let calls = world.receiver.calls_to("/lost");
    calls.iter().for_each(|call| call.assert_signed(SECRET));
    assert!(calls.iter().all(|call| call.attempt() == 1) && calls.len() == 3);
}

#[tokio::test]
async fn a_process_without_the_key_leaves_deliveries_to_one_that_has_it() {
    let world = World::new().await;
    let id = world.subscribe("chat", &world.receiver.url("/sealed")).await;
    sqlx::query("UPDATE subscriptions SET secret = $2 WHERE id = $1")
        .bind(id.as_str())
        .bind(Sealer::new([&[7; 32]]).seal(SECRET, id.as_str()))
        .execute(world.database.pool())
        .await
        .expect("an update");
    world.publish(1, &[&id]).await;
    let _without = Process::start(world.database.url(), settings()).await;
    stays("it claims nothing at first", Duration::from_secs(1), async || {
        world.rows(&id).await[0].last_error.is_none()
    })
    .await;
    eventually("then it says why it cannot", SOON, async || {
        world.rows(&id).await[0].last_error.is_some()
    })
    .await;
    // As it would be in a process that has the key.
    let addresses = Addresses::parse(world.database.url(), world.database.url()).expect("a database URL");
    let with = Store::connect(addresses).await.expect("a migrated database");
    let with = Arc::new(with.sealing_with(Sealer::new([&[7; 32]])));
    let stop = CancellationToken::new();
    let _ended = stop.clone().drop_guard();
    let delivery = delivery::start(with, settings(), stop).expect("an HTTP client");
    world.publish(3, &[&id]).await;
    delivery.wake.subscriptions([id.clone()]);
    let began = Instant::now();
    world.all(&id, "delivered").await;
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    let calls = world.receiver.calls_to("/sealed");
    assert!(calls.len() == 4 && calls.iter().all(|call| call.attempt() == 1));
}

/// An owner whose claim was answered to nobody, while another delivery of it is on its way.
async fn claim_is_unheard(at_most_once: bool) {
    let world = World::new().await;
    let proxy = Proxy::start(&world.database.server()).await;
    let id = world.subscribe("chat", &world.receiver.url("/hook")).await;
    sqlx::query("UPDATE subscriptions SET max_inflight = 4")
        .execute(world.database.pool())
        .await
        .expect("an update");
    let process = Process::start(&world.database.url_through(proxy.address()), settings()).await;
    world.receiver.script("/hook", [Answer::hang(204), Answer::status(204)]);
    world.publish(1, &[&id]).await;
    process.wake.subscriptions([id.clone()]);
    world.receiver.wait_calls_to("/hook", 1, SOON).await;

    // A claim names what it is for; it happens, and nobody hears of it.
    proxy.cut_at(id.as_str().to_owned().leak().as_bytes());
    world.store_events(&[None], &[&id], at_most_once).await;
    process.wake.subscriptions([id.clone()]);
    eventually("it is claimed", SOON, async || world.rows(&id).await[1].leased).await;
    proxy.restore();
    world.receiver.wait_calls_to("/hook", 2, SOON).await;
    world.receiver.release();
    world.all(&id, "delivered").await;
    let calls = world.receiver.calls_to("/hook");
    assert!(
        calls.len() == 2 && calls.iter().all(|call| call.attempt() == 1),
        "what was on its way was let be"
    );
    assert!(world.rows(&id).await.iter().all(|row| row.attempt == 1));
}

#[tokio::test]
async fn a_claim_that_nobody_heard_of_is_given_back_uncounted() {
    claim_is_unheard(false).await;
}

#[tokio::test]
async fn a_claim_that_nobody_heard_of_is_no_attempt_of_what_may_leave_once() {
    claim_is_unheard(true).await;
}

#[tokio::test]
async fn a_delivery_that_somebody_held_locked_for_long_goes_out_when_it_is_let_go() {
    let world = World::new().await;
    let id = world.subscribe("chat", &world.receiver.url("/hook")).await;
    world.publish(1, &[&id]).await;
    sqlx::query("UPDATE deliveries SET next_attempt_at = now_ms() - 60000")
        .execute(world.database.pool())
        .await
        .expect("an update");
    let mut holder = world.database.pool().begin().await.expect("a transaction");
    sqlx::query("SELECT FROM deliveries FOR UPDATE")
        .execute(&mut *holder)
        .await
        .expect("the row");
    let _process = Process::start(world.database.url(), settings()).await;
    // Claims do not see it, so after two of them, a second apart, nothing so old seems to be left.
    stays("nobody can claim it", Duration::from_millis(2_500), async || {
        world.receiver.calls_to("/hook").is_empty()
    })
    .await;
    holder.rollback().await.expect("a rollback");
    world.all(&id, "delivered").await;
}

#[tokio::test]
async fn a_stop_hands_back_what_was_claimed_but_not_sent_without_counting_it() {
    let world = World::new().await;
    let proxy = Proxy::start(&world.database.server()).await;
    let id = world.subscribe("chat", &world.receiver.url("/hook")).await;
    let mut patient = settings();
    patient.poll_interval = Duration::from_secs(60);
    let process = Process::start(&world.database.url_through(proxy.address()), patient).await;
    world.publish(1, &[&id]).await;
    // The commit of the claim is seen here well before the worker hears of it.
    proxy.delay(Duration::from_millis(200));
    process.wake.subscriptions([id.clone()]);
    eventually("the claim", SOON, async || world.rows(&id).await[0].leased).await;
    process.stop.cancel();
    proxy.restore();
    process.stop().await;
    let row = &world.rows(&id).await[0];
    assert_eq!((row.status.as_str(), row.attempt, row.leased), ("pending", 0, false));
    assert!(world.receiver.calls().is_empty());
}

#[tokio::test]
async fn what_may_leave_once_is_dead_after_any_failure_and_never_sent_again() {
    let world = World::new().await;
    world
        .receiver
        .answer_with("/refuses", |_| Answer::status(503).header("Retry-After", "0"));
    world.receiver.answer_with("/breaks", |_| Answer::close());
    world.receiver.answer_with("/hangs", |_| Answer::hang(204));
    let mut ids = Vec::new();
    for path in ["/refuses", "/breaks", "/hangs", "/takes"] {
        ids.push(world.subscribe("chat", &world.receiver.url(path)).await);
    }
    let gone = world.subscribe("chat", "http://127.0.0.1:9/nobody").await;
    let mut hasty = settings();
    hasty.timeout = Duration::from_millis(300);
    let _process = Process::start(world.database.url(), hasty).await;
    let every: Vec<&SubscriptionId> = ids.iter().chain([&gone]).collect();
    world.publish_once(1, &every).await;
    for id in ids.iter().take(3).chain([&gone]) {
        world.all(id, "dead").await;
        let row = &world.rows(id).await[0];
        assert_eq!((row.attempt, row.last_error.is_some()), (1, true), "{row:?}");
    }
    world.all(&ids[3], "delivered").await;
    assert_eq!(world.rows(&ids[0]).await[0].last_status, Some(503));
    stays("nothing is tried again", Duration::from_secs(1), async || {
        world.receiver.calls().len() == 4
    })
    .await;
}

#[tokio::test]
async fn what_may_leave_once_is_dead_within_seconds_when_its_owner_dies() {
    let world = World::new().await;
    world.receiver.answer_with("/hook", |_| Answer::hang(204));
    let id = world.subscribe("chat", &world.receiver.url("/hook")).await;
    let mut first = Process::start(world.database.url(), settings()).await;
    world.publish_once(1, &[&id]).await;
    world.receiver.wait_calls(1, SOON).await;
    let _second = Process::start(world.database.url(), settings()).await;
    first.crash();
    let crashed = Instant::now();
    world.all(&id, "dead").await;
    let after = crashed.elapsed();
    assert!(after <= Duration::from_secs(6), "{after:?}");
    let error = world.rows(&id).await[0].last_error.clone().expect("a reason on record");
    assert!(error.contains("only attempt"), "{error}");
    assert_eq!(world.receiver.calls().len(), 1, "it may have arrived");
}

#[tokio::test]
async fn what_may_leave_once_and_was_cut_by_a_stop_is_dead() {
    let world = World::new().await;
    world.receiver.answer_with("/hook", |_| Answer::hang(204));
    let id = world.subscribe("chat", &world.receiver.url("/hook")).await;
    let process = Process::start(world.database.url(), settings()).await;
    world.publish_once(1, &[&id]).await;
    world.receiver.wait_calls(1, SOON).await;
    process.stop().await;
    let row = &world.rows(&id).await[0];
    assert_eq!((row.status.as_str(), row.attempt, row.leased), ("dead", 1, false));
    let _next = Process::start(world.database.url(), settings()).await;
    stays("nothing is sent again", Duration::from_secs(1), async || {
        world.receiver.calls().len() == 1
    })
    .await;
}

#[tokio::test]
async fn what_may_leave_once_and_was_not_sent_before_a_stop_is_sent_after_it() {
    let world = World::new().await;
    let proxy = Proxy::start(&world.database.server()).await;
    let id = world.subscribe("chat", &world.receiver.url("/hook")).await;
    let mut patient = settings();
    patient.poll_interval = Duration::from_secs(60);
    let process = Process::start(&world.database.url_through(proxy.address()), patient).await;
    world.publish_once(1, &[&id]).await;
    proxy.delay(Duration::from_millis(200));
    process.wake.subscriptions([id.clone()]);
    eventually("the claim", SOON, async || world.rows(&id).await[0].leased).await;
    process.stop.cancel();
    proxy.restore();
    process.stop().await;
    let row = &world.rows(&id).await[0];
    assert_eq!((row.status.as_str(), row.attempt, row.leased), ("pending", 0, false));
    assert!(world.receiver.calls().is_empty());

    let _next = Process::start(world.database.url(), settings()).await;
    world.all(&id, "delivered").await;
    assert_eq!(world.rows(&id).await[0].attempt, 1);
    assert_eq!(world.receiver.calls().len(), 1);
}

/// Cuts the database while an attempt runs, has the receiver answer, and restores it after `outage`.
async fn result_survives(outage: Duration) {
    let world = World::new().await;
    let proxy = Proxy::start(&world.database.server()).await;
    world.receiver.answer_with("/hook", |_| Answer::hang(204));
    let id = world.subscribe("chat", &world.receiver.url("/hook")).await;
    let process = Process::start(&world.database.url_through(proxy.address()), settings()).await;
    world.publish(1, &[&id]).await;
    world.receiver.wait_calls(1, SOON).await;
    proxy.cut();
    world.receiver.release();
    stays("the claim is kept", outage, async || world.rows(&id).await[0].leased).await;
    proxy.restore();
    world.all(&id, "delivered").await;
    assert_eq!(world.rows(&id).await[0].attempt, 1);
    assert_eq!(world.receiver.calls().len(), 1, "the receiver had it once");
    eventually("it works again", SOON, async || process.vitals.read().running).await;
    world.receiver.answer_with("/hook", |_| Answer::status(204));
    world.publish(1, &[&id]).await;
    world.all(&id, "delivered").await;
}

#[tokio::test]
async fn a_result_is_recorded_after_a_short_outage_of_the_database() {
    result_survives(Duration::from_millis(800)).await;
}

#[tokio::test]
async fn a_result_is_recorded_after_an_outage_that_ended_its_owner() {
    result_survives(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn an_owner_without_a_database_ends_its_attempts_and_begins_anew() {
    let world = World::new().await;
    let proxy = Proxy::start(&world.database.server()).await;
    world.receiver.answer_with("/hook", |call| match call.number {
        1 => Answer::hang(204),
        _ => Answer::status(204),
    });
    let id = world.subscribe("chat", &world.receiver.url("/hook")).await;
    let process = Process::start(&world.database.url_through(proxy.address()), settings()).await;
    world.publish(1, &[&id]).await;
    world.receiver.wait_calls(1, SOON).await;
    proxy.stall();
    let stalled = Instant::now();
    eventually("the attempt is cut", SOON, async || {
        world.receiver.abandoned("/hook") == 1
    })
    .await;
    let cut = stalled.elapsed();
    assert!(
        cut >= Duration::from_secs(2) && cut < Duration::from_secs(4),
        "before others may judge: {cut:?}"
    );
    assert!(!process.vitals.read().running);
    proxy.restore();
    world.all(&id, "delivered").await;
    assert_eq!(world.rows(&id).await[0].attempt, 2);
}

#[tokio::test]
async fn an_enabled_subscription_is_served_though_nobody_rings() {
    let world = World::new().await;
    let id = world.subscribe("chat", &world.receiver.url("/hook")).await;
    let enable = async |enabled: i32| {
        sqlx::query("UPDATE subscriptions SET enabled = $1")
            .bind(enabled)
            .execute(world.database.pool())
            .await
            .expect("a switch");
    };
    let mut patient = settings();
    patient.poll_interval = Duration::from_secs(60);
    let _process = Process::start(world.database.url(), patient).await;
    enable(0).await;
    world.publish(1, &[&id]).await;
    stays("nothing is sent", Duration::from_millis(1500), async || {
        world.receiver.calls().is_empty()
    })
    .await;
    enable(1).await;
    world.receiver.wait_calls(1, Duration::from_secs(4)).await;
}

#[tokio::test]
async fn an_owner_that_was_dead_once_judges_nobody_and_begins_anew() {
    let world = World::new().await;
    world.receiver.answer_with("/hook", |_| Answer::hang(204));
    let id = world.subscribe("chat", &world.receiver.url("/hook")).await;
    let process = Process::start(world.database.url(), settings()).await;
    world.publish(1, &[&id]).await;
    world.receiver.wait_calls(1, SOON).await;
    let owner: String = sqlx::query_scalar("SELECT lease_owner FROM deliveries")
        .fetch_one(world.database.pool())
        .await
        .expect("an owner");
    let mut late = world.store.heartbeat().await.expect("a connection");
    late.renew("judge").await.expect("a renewal").expect("a living owner");
    assert!(
        world
            .store
            .release_lost(Some("judge"))
            .await
            .expect("a pass")
            .subscriptions
            .is_empty(),
        "its owner lives"
    );

    // As if every renewal had been held up for longer than a life.
    sqlx::query("UPDATE workers SET alive_until = now_ms() - 1")
        .execute(world.database.pool())
        .await
        .expect("dead owners");
    assert_eq!(late.renew("judge").await.expect("an answer"), None, "too late");
    assert!(
        world
            .store
            .release_lost(Some("judge"))
            .await
            .expect("a pass")
            .subscriptions
            .is_empty(),
        "the dead judge nobody"
    );
    eventually("the worker has a new name", SOON, async || {
        let living: Vec<String> = sqlx::query_scalar("SELECT owner FROM workers WHERE alive_until > now_ms()")
            .fetch_all(world.database.pool())
            .await
            .expect("the workers");
        living.iter().any(|other| *other != owner) && process.vitals.read().running
    })
    .await;
    world.receiver.answer_with("/hook", |_| Answer::status(204));
    world.all(&id, "delivered").await;
}
