//! Two real processes deliver the events of one database: with clocks that differ, while a policy changes under them, and
//! while their PostgreSQL restarts.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::Command,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, UNIX_EPOCH},
};

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::{
    api_world::operator,
    fabric_world::all_up,
    support::{
        client::Client,
        cluster::Cluster,
        database::Database,
        envelopes::{Envelope, batch, envelope},
        ledger::{Ledger, assert_in_order},
        network::Network,
        proxy::Proxy,
        receiver::{Answer, Call, Receiver},
        service::{Service, start_many},
        wait::{SOON, eventually},
    },
};

/// How far the clocks of two processes lie before and behind the database's, in seconds.
pub(crate) const SHIFT_S: i64 = 30;
/// Deliveries of the drain in which PostgreSQL restarts.
const DRAIN_ROWS: usize = 10_000;
/// How long everything may take to arrive.
const ALL: Duration = Duration::from_secs(90);

/// A library that shifts the wall clock of a program it is loaded into, and nothing else: every call of its libc that
/// tells the time of day.
const SHIFTED_CLOCK: &str = r#"
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift(void) { const char *by = getenv("OV_CLOCK_SHIFT_S"); return by ? atol(by) : 0; }

int clock_gettime(clockid_t which, struct timespec *now) {
    long failed = syscall(SYS_clock_gettime, which, now);
    if (!failed && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) now->tv_sec += shift();
    return (int)failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    (void)zone;
    struct timespec exact;
    int failed = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}
"#;

/// Compiles [`SHIFTED_CLOCK`], once. A C compiler is there: the service itself does not build without one.
pub(crate) fn shifted_clock() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(compiled_clock)
}

fn compiled_clock() -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (source, library) = (directory.join("shifted_clock.c"), directory.join("shifted_clock.so"));
    std::fs::write(&source, SHIFTED_CLOCK).expect("a file in the target folder");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .arg(&library)
        .arg(&source)
        .output();
    let built = built.expect("a C compiler");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    library
}

/// A database that was drained, and the server it lies on.
pub(crate) struct Drained {
    pub(crate) database: Database,
    _cluster: Cluster,
}

/// Puts a policy and fails unless it is in force.
async fn policy(client: &Client, event_type: &str, key: Option<&str>) {
    let mut policy = json!({ "class": "domain", "durability": "required", "delivery_semantics": "at_least_once" });
    if let Some(key) = key {
        policy["ordering"] = json!({ "scope": "key", "key": key });
    }
    let path = format!("/api/v1/delivery-policies/{event_type}");
    client.put(&path, Some(&operator()), &policy).await.expect(200);
}

async fn subscribe(client: &Client, consumer: &str, event_type: &str, endpoint: &str, max_inflight: i32) {
    let body = json!({
        "topic_pattern": event_type, "endpoint": endpoint, "max_inflight": max_inflight,
        "retry_policy": { "max_attempts": 20, "backoff_ms": [60] },
    });
    let token = client.service_token(consumer);
    client
        .post("/api/v1/subscriptions", Some(&token), &body)
        .await
        .expect(201);
}

fn subject(call: &Call) -> String {
    let event: &Value = &call.json()["event"];
    event["subject"]["id"].as_str().expect("a subject").to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn clocks_a_minute_apart_steal_no_lease_and_make_nobody_wait_for_the_poll() {
    const EVENTS: usize = 500;
    const SUBJECTS: usize = 20;
    const TYPE: &str = "live.clock.keyed";
    let (database, network, receiver) = tokio::join!(Database::create(), Network::start(), Receiver::start());
    let library = shifted_clock();
    let mut services = Vec::new();
    for shift_s in [SHIFT_S, -SHIFT_S] {
        let env = [
            ("LD_PRELOAD", library.to_str().expect("a plain path")),
            ("OV_CLOCK_SHIFT_S", &shift_s.to_string()),
            ("EVENTS_WORKER_INTERVAL_MS", "3600000"),
        ];
        services.push(Service::start(&database, &network, &env).await);
    }
    let client = services[0].client();
    policy(client, TYPE, Some("subject")).await;
    // A few attempts last for longer than an owner that does not renew is taken for alive.
    receiver.answer_with("/hook", |call| {
        let long = call.json()["event"]["payload"]["long"] == true;
        Answer::status(204).after(Duration::from_millis(if long { 6_000 } else { 3 }))
    });
    subscribe(client, "chat", TYPE, &receiver.url("/hook"), 16).await;
    let ledger = Ledger::default().route_type("/hook", TYPE);
    let publish = |process: usize| {
        let (client, ledger) = (services[process].client(), &ledger);
        async move {
            for n in 0..EVENTS / 2 {
                let subject = n % SUBJECTS;
                let event = envelope("live")
                    .event_type(TYPE)
                    .subject("thing", &subject.to_string())
                    .payload(json!({ "long": n < 4 }));
                let answer = client.publish(&event).await;
                assert_eq!(answer.status, 201, "{}", answer.text);
                ledger.note([&event], &answer);
            }
        }
    };
    tokio::join!(publish(0), publish(1));
    // The poll is an hour away.
    ledger.settle(&receiver, Duration::from_secs(30)).await;
    let calls = receiver.calls();
    assert_eq!(calls.len(), EVENTS, "nothing is sent twice");
    assert!(receiver.peak("/hook") <= 16);
    assert_in_order(&receiver, "/hook", database.pool(), subject).await;
    let unfinished = "SELECT count(*) FROM deliveries WHERE status <> 'delivered' OR attempt <> 1";
    eventually("every delivery is recorded at its first attempt", SOON, async || {
        let left: i64 = sqlx::query_scalar(unfinished)
            .fetch_one(database.pool())
            .await
            .expect("a count");
        (left == 0).then_some(()).ok_or(left)
    })
    .await;
    // Both took part, each by its own clock: it is what they sign with.
    let shifts: BTreeSet<i64> = calls.iter().map(|call| shift_of(call)).collect();
    let near = |shift: i64| shifts.iter().any(|seen| (seen - shift).abs() <= 2);
    assert!(near(SHIFT_S) && near(-SHIFT_S), "{shifts:?}");
}

/// How far ahead of the arrival a delivery is signed, in seconds.
pub(crate) fn shift_of(call: &Call) -> i64 {
    let signed: i64 = call
        .header("x-openvibe-timestamp")
        .and_then(|stamp| stamp.parse().ok())
        .expect("a time");
    let arrived = call
        .arrived_at
        .duration_since(UNIX_EPOCH)
        .expect("after 1970")
        .as_secs();
    signed - i64::try_from(arrived).expect("a time before the year 292 billion")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_switched_under_steady_publishing_orders_what_is_published_after_its_answer() {
    switch_a_policy(&[]).await;
}

/// Two processes with these variables publish while a policy gets a key and loses it again. Answers their database.
pub(crate) async fn switch_a_policy(env: &[(&str, &str)]) -> Database {
    const SUBJECTS: usize = 6;
    const EACH: usize = 25;
    const TYPE: &str = "live.switch.happened";
    let (database, network, receiver) = tokio::join!(Database::create(), Network::start(), Receiver::start());
    let services = start_many(&database, &network, 2, env).await;
    let client = services[0].client();
    // Every sixth first attempt fails, so that without a key later events overtake.
    receiver.answer_with("/hook", |call| match fails(call) {
        true => Answer::status(500),
        false => Answer::status(204),
    });
    subscribe(client, "chat", TYPE, &receiver.url("/hook"), 16).await;
    let ledger = Ledger::default().route_type("/hook", TYPE);
    // Which policy was in force for an event for certain: its publish began after one answer and ended before the next.
    let phase = AtomicUsize::new(0);
    let published = [const { AtomicUsize::new(0) }; 5];
    let publish = |subject: usize| {
        let (services, ledger, phase, published) = (&services, &ledger, &phase, &published);
        async move {
            let mut phases = Vec::new();
            for turn in 0.. {
                let before = phase.load(Ordering::SeqCst);
                if before == published.len() {
                    break;
                }
                let event = envelope("live").event_type(TYPE).subject("thing", &subject.to_string());
                let answer = services[(subject + turn) % 2].client().publish(&event).await;
                assert_eq!(answer.status, 201, "{}", answer.text);
                ledger.note([&event], &answer);
                published[before].fetch_add(1, Ordering::SeqCst);
                phases.push((event.id().to_owned(), before, phase.load(Ordering::SeqCst)));
            }
            phases
        }
    };
    // Even: a policy is in force. Odd: it is being changed.
    let enough = async |at: usize| {
        eventually("events of this policy", SOON, async || {
            published[at].load(Ordering::SeqCst) >= SUBJECTS * EACH
        })
        .await;
    };
    let switch = async {
        for (turn, key) in [Some("subject"), None].into_iter().enumerate() {
            enough(turn * 2).await;
            phase.store(turn * 2 + 1, Ordering::SeqCst);
            policy(services[turn].client(), TYPE, key).await;
            phase.store(turn * 2 + 2, Ordering::SeqCst);
        }
        enough(4).await;
        phase.store(published.len(), Ordering::SeqCst);
    };
    let (phases, ()) = tokio::join!(join_all((0..SUBJECTS).map(publish)), switch);
    ledger.settle(&receiver, ALL).await;
    ledger.assert_stored_once(database.pool()).await;
    eventually("everything is taken", ALL, async || {
        let left: i64 = sqlx::query_scalar("SELECT count(*) FROM deliveries WHERE status <> 'delivered'")
            .fetch_one(database.pool())
            .await
            .expect("a count");
        left == 0
    })
    .await;

    let certain = |wanted: usize| -> BTreeSet<&str> {
        let all = phases.iter().flatten();
        all.filter(|(_, before, after)| *before == wanted && *after <= wanted + 1)
            .map(|(id, ..)| id.as_str())
            .collect()
    };
    let keys: BTreeMap<String, Option<String>> = sqlx::query_as("SELECT event_id, ordering_key FROM deliveries")
        .fetch_all(database.pool())
        .await
        .expect("the deliveries")
        .into_iter()
        .collect();
    for (at, keyed) in [(0, false), (2, true), (4, false)] {
        assert!(certain(at).len() >= SUBJECTS * EACH);
        assert!(certain(at).iter().all(|id| keys[*id].is_some() == keyed), "phase {at}");
    }
    assert_eq!(out_of_order(&receiver, &phases, &certain(2)), 0);
    assert!(
        out_of_order(&receiver, &phases, &certain(0)) > 0,
        "or it would have been in order anyway"
    );
    database
}

/// Whether the receiver refuses: every sixth first attempt.
fn fails(call: &Call) -> bool {
    call.number.is_multiple_of(6) && call.attempt() == 1
}

/// How many of these events were first taken after a later one of their subject. Each list holds one subject's, in order.
fn out_of_order(receiver: &Receiver, subjects: &[Vec<(String, usize, usize)>], of: &BTreeSet<&str>) -> usize {
    let mut first = BTreeMap::new();
    for (at, call) in receiver.calls().iter().enumerate() {
        if !fails(call) {
            first.entry(call.event_id().to_owned()).or_insert(at);
        }
    }
    let late = |events: &Vec<(String, usize, usize)>| {
        let of_phase: Vec<usize> = events
            .iter()
            .filter(|(id, ..)| of.contains(id.as_str()))
            .map(|(id, ..)| first[id])
            .collect();
        of_phase.windows(2).filter(|pair| pair[1] < pair[0]).count()
    };
    subjects.iter().map(late).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_of_postgresql_in_the_middle_of_a_drain_repeats_what_was_leased_and_nothing_else() {
    drain_through_a_restart(DRAIN_ROWS, &[]).await;
}

/// Two processes with these variables deliver so many rows while PostgreSQL restarts. Answers what it must be asked with.
pub(crate) async fn drain_through_a_restart(rows: usize, own: &[(&str, &str)]) -> Drained {
    const TYPE: &str = "live.drain.happened";
    const SUBSCRIPTIONS: usize = 10;
    let (cluster, network, receiver) = tokio::join!(Cluster::start(""), Network::start(), Receiver::start());
    let database = Database::create_on(&cluster.server()).await;
    let proxy = Proxy::start(&database.server()).await;
    let through = database.url_through(proxy.address());
    let filler = Service::start(&database, &network, &[&[("EVENTS_WORKER", "off")], own].concat()).await;
    let client = filler.client();
    all_up(client).await;
    let mut ledger = Ledger::default();
    for n in 0..SUBSCRIPTIONS {
        let path = format!("/hook/{n}");
        subscribe(client, &format!("chat{n}"), TYPE, &receiver.url(&path), 16).await;
        ledger = ledger.route_type(&path, TYPE);
    }
    for _ in 0..rows / SUBSCRIPTIONS / 100 {
        let events: Vec<Envelope> = (0..100).map(|_| envelope("live").event_type(TYPE)).collect();
        let answer = client.publish_as("live", &batch(&events)).await;
        assert_eq!(answer.status, 201, "{}", answer.text);
        ledger.note(&events, &answer);
    }
    drop(filler);

    let env = [
        ("DATABASE_URL", through.as_str()),
        ("DATABASE_DIRECT_URL", through.as_str()),
    ];
    let _services = start_many(&database, &network, 2, &[&env, own].concat()).await;
    receiver.wait_calls(rows / 3, ALL).await;
    // Nobody gets back in before it is known who held what.
    cluster.stop();
    proxy.cut();
    let before = receiver.calls().len();
    assert!(before < rows, "it was to stop in the middle");
    cluster.start_again().await;
    let leased: BTreeSet<(String, String)> = sqlx::query_as(
        "SELECT d.event_id, s.endpoint FROM deliveries d JOIN subscriptions s ON s.id = d.subscription_id \
         WHERE d.lease_until IS NOT NULL",
    )
    .fetch_all(database.pool())
    .await
    .expect("what was leased")
    .into_iter()
    .collect();
    proxy.restore();
    ledger.settle(&receiver, ALL).await;
    let open = "SELECT count(*) FROM deliveries WHERE status <> 'delivered'";
    eventually("every result is recorded", SOON, async || {
        let left: i64 = sqlx::query_scalar(open)
            .fetch_one(database.pool())
            .await
            .expect("a count");
        (left == 0).then_some(()).ok_or(left)
    })
    .await;
    let mut seen = BTreeSet::new();
    let mut repeated = 0;
    for call in receiver.calls() {
        let one = (call.event_id().to_owned(), receiver.url(call.path()));
        if !seen.contains(&one) {
            seen.insert(one);
            continue;
        }
        repeated += 1;
        assert!(
            leased.contains(&one),
            "{one:?} came again and was not leased when the server stopped"
        );
    }
    assert!(!leased.is_empty());
    eprintln!(
        "{} were leased at the stop, {repeated} of them came again",
        leased.len()
    );
    Drained {
        database,
        _cluster: cluster,
    }
}
