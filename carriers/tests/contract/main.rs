//! What every registered carrier must keep, whatever its broker does: a signal sent is offered once or lost, never
//! altered; nothing that breaks stays broken; nothing hangs, and nothing piles up.
//!
//! The brokers are real and run with the configurations this repository ships, so their rights are enough and are tested.

mod cloud_v1;
mod nats_js_v1;
mod nats_v1;
mod page;
mod pg_v1;
mod support;
mod valkey_v1;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use carriers::{Class, Heard, REGISTRY, Signal, SignalError};
use support::broker::NOTICED;
use support::process::{Process, open, unique};
use support::wait::{SOON, eventually, stays, within};
use support::world::World;
use tokio::time::timeout;

/// Runs the same test for every registered carrier, each as a test of its own so that they run at once.
macro_rules! for_every_carrier {
    ($($module:ident = $id:literal),+ $(,)?) => {
        /// The carriers that are tested here.
        const TESTED: &[&str] = &[$($id),+];

        $(mod $module {
            use super::*;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn a_signal_is_offered_once_and_unaltered() {
                offered_once(World::of($id).await).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn a_cut_broker_is_named_and_comes_back() {
                cut(World::of($id).await).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn a_broker_that_falls_silent_is_named_and_comes_back() {
                silent(World::of($id).await).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn a_broker_that_is_away_at_the_start_is_found_later() {
                away_at_start(World::of($id).await).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn run_stops_when_told_whatever_the_broker_does_and_can_run_again() {
                stops(World::of($id).await).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn opening_connects_to_nothing() {
                opens_quietly(World::of($id).await).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn a_way_in_that_is_full_holds_nothing_up() {
                full_way_in(World::of($id).await).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn many_signals_cost_one_round_trip() {
                one_round_trip(World::of($id).await).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn bytes_arrive_one_at_a_time_and_nothing_changes() {
                dripping(World::of($id).await).await;
            }
        })+
    };
}

for_every_carrier! {
    every_pg_v1 = "pg-v1",
    every_valkey_v1 = "valkey-v1",
    every_nats_v1 = "nats-v1",
    every_nats_js_v1 = "nats-js-v1",
    every_cloud_v1 = "cloud-v1",
}

#[test]
fn every_registered_carrier_is_tested() {
    assert_eq!(
        TESTED,
        World::ids().collect::<Vec<_>>(),
        "name the new carrier in for_every_carrier!"
    );
}

#[test]
fn descriptors_say_what_the_fabric_relies_on() {
    for descriptor in REGISTRY {
        let id = descriptor.id;
        assert!(!descriptor.classes.is_empty(), "{id} carries nothing");
        assert!(descriptor.default_latency_ms > 0.0, "{id}");
        assert!(descriptor.rate_card.starts_with("rc-"), "{id}");
        assert!(
            descriptor.capabilities.contains(&"events:gateway"),
            "{id} could never be chosen"
        );
        let kept = ["events:durable", "events:ordered"]
            .iter()
            .all(|it| descriptor.capabilities.contains(it));
        assert_eq!(
            descriptor.classes.contains(&Class::Stream),
            kept,
            "{id}: STREAM asks for both"
        );
        let same = REGISTRY
            .iter()
            .filter(|other| other.id == id || other.rate_card == descriptor.rate_card);
        assert_eq!(same.count(), 1, "{id} or its rate card is there twice");
    }
    assert_eq!(REGISTRY[0].id, "pg-v1", "the floor comes first");
}

#[test]
fn what_is_not_configured_is_not_opened_and_what_is_wrong_is_named() {
    let opened = |id: &str, variables: &[(&'static str, &str)]| {
        let variables = variables
            .iter()
            .map(|(name, value)| (*name, (*value).to_owned()))
            .collect();
        let descriptor = carriers::descriptor(id).expect("a registered carrier");
        open(descriptor, &variables, "test", support::process::wall_clock).map(|carrier| carrier.is_some())
    };
    let _runtime = tokio::runtime::Runtime::new().expect("a runtime");
    for id in ["valkey-v1", "nats-v1", "nats-js-v1", "cloud-v1"] {
        assert_eq!(opened(id, &[]), Ok(false), "{id}");
    }
    assert_eq!(
        opened("nats-js-v1", &[("NATS_URL", "nats://h"), ("NATS_JETSTREAM", "off")]),
        Ok(false)
    );
    assert_eq!(opened("nats-v1", &[("NATS_URL", "nats://token@h:4222")]), Ok(true));
    assert_eq!(opened("valkey-v1", &[("VALKEY_URL", "rediss://u:p@h/3")]), Ok(true));
    type Given<'a> = &'a [(&'static str, &'a str)];
    let wrong: &[(&str, Given<'_>, &str)] = &[
        ("pg-v1", &[], "DATABASE_URL"),
        (
            "pg-v1",
            &[("DATABASE_DIRECT_URL", "mysql://u:hush@h")],
            "DATABASE_DIRECT_URL",
        ),
        ("valkey-v1", &[("VALKEY_URL", "http://u:hush@h")], "VALKEY_URL"),
        ("valkey-v1", &[("VALKEY_URL", "redis://u:hush@h/one")], "VALKEY_URL"),
        ("nats-v1", &[("NATS_URL", "http://u:hush@h")], "NATS_URL"),
        (
            "nats-v1",
            &[("NATS_URL", "nats://h"), ("NATS_SUBJECT_PREFIX", "ov events.")],
            "NATS_SUBJECT_PREFIX",
        ),
        (
            "nats-v1",
            &[("NATS_URL", "nats://h"), ("NATS_SUBJECT_PREFIX", "ov.events")],
            "NATS_SUBJECT_PREFIX",
        ),
        (
            "nats-js-v1",
            &[("NATS_URL", "nats://h"), ("NATS_STREAM", "a.b")],
            "NATS_STREAM",
        ),
        (
            "nats-js-v1",
            &[("NATS_URL", "nats://h"), ("NATS_JETSTREAM", "maybe")],
            "NATS_JETSTREAM",
        ),
        ("cloud-v1", &[("CLOUD_QUEUE_URL", "sqs://u:hush@h")], "CLOUD_QUEUE_URL"),
        (
            "cloud-v1",
            &[("CLOUD_QUEUE_URL", "https://u:hush@h")],
            "CLOUD_QUEUE_URL",
        ),
        (
            "cloud-v1",
            &[("CLOUD_QUEUE_URL", "https://h"), ("CLOUD_QUEUE_SECRET_KEY", "hush")],
            "CLOUD_QUEUE_ACCESS_KEY",
        ),
        (
            "cloud-v1",
            &[("CLOUD_QUEUE_URL", "https://h"), ("CLOUD_QUEUE_CONSUME", "1")],
            "CLOUD_QUEUE_CONSUME",
        ),
    ];
    for (id, variables, named) in wrong {
        let told = opened(id, variables).expect_err("a mistake");
        assert!(
            told.contains(named) && !told.contains("hush"),
            "{id} with {variables:?}: {told}"
        );
    }
}

/// Counts how often each was heard by any of these.
fn counted(processes: &[&Process]) -> BTreeMap<Signal, usize> {
    let mut counts = BTreeMap::new();
    for signal in processes.iter().flat_map(|process| process.signals()) {
        *counts.entry(signal).or_default() += 1;
    }
    counts
}

async fn offered_once(world: World) {
    let (one, two) = world.pair().await;
    for class in world.descriptor.classes {
        let class = *class;
        let batches: Vec<Vec<Signal>> = (0..20)
            .map(|n| (0..1 + n % 12).map(|_| unique(class)).collect())
            .collect();
        for batch in &batches {
            one.send(class, batch).await.expect("a healthy broker takes it");
        }
        let sent: Vec<Signal> = batches.concat();
        let listeners: &[&Process] = if world.shares(class) { &[&one, &two] } else { &[&two] };
        eventually("all arrive", SOON, async || {
            let heard = counted(listeners);
            let missing = sent.iter().filter(|signal| !heard.contains_key(signal)).count();
            if missing == 0 {
                Ok(())
            } else {
                Err(format!("{missing} of {} are missing", sent.len()))
            }
        })
        .await;
        let heard = counted(listeners);
        for (signal, times) in &heard {
            // A queue of this kind promises at least once, and two that ask at the same moment may get the same.
            let most = if world.descriptor.id == "cloud-v1" { 2 } else { 1 };
            assert!(*times <= most, "{signal:?} was offered {times} times");
            assert!(sent.contains(signal), "{signal:?} was never sent");
        }
        if !world.shares(class) {
            assert!(one.signals().is_empty(), "a process hears itself");
        }
        one.heard.lock().clear();
        two.heard.lock().clear();
    }
}

async fn cut(world: World) {
    let class = world.descriptor.classes[0];
    let (one, two) = world.pair().await;
    world.line.cut();
    one.stands(world.severed(), NOTICED).await;
    let started = Instant::now();
    one.send(class, &[unique(class)])
        .await
        .expect_err("nobody could take it");
    assert!(
        started.elapsed() < Duration::from_secs(1),
        "a refused connection is no reason to wait"
    );
    assert!(one.runs() && two.runs(), "a lost broker is no reason to end");
    world.line.restore();
    world.connected(&one).await;
    world.connected(&two).await;
    one.reaches_any(&[&one, &two], class).await;
}

async fn silent(world: World) {
    let class = world.descriptor.classes[0];
    let (one, two) = world.pair().await;
    world.line.stall();
    // A queue may take its time over the question for messages, so there it is the next signal that notices.
    if world.descriptor.id != "cloud-v1" {
        one.stands(world.severed(), NOTICED).await;
    }
    one.send(class, &[unique(class)])
        .await
        .expect_err("nobody could take it");
    one.stands(world.severed(), NOTICED).await;
    assert!(one.runs() && two.runs());
    world.line.restore();
    world.connected(&one).await;
    world.connected(&two).await;
    one.reaches_any(&[&one, &two], class).await;
}

async fn away_at_start(world: World) {
    world.line.cut();
    let class = world.descriptor.classes[0];
    let (one, two) = (world.process(), world.process());
    stays("it runs and says so", Duration::from_millis(600), async || {
        one.runs() && one.carrier.health() == world.severed()
    })
    .await;
    one.send(class, &[unique(class)])
        .await
        .expect_err("nobody could take it");
    world.line.restore();
    world.connected(&one).await;
    world.connected(&two).await;
    one.reaches_any(&[&one, &two], class).await;
}

async fn stops(world: World) {
    let class = world.descriptor.classes[0];
    let (mut one, two) = world.pair().await;
    one.stop().await;
    one.run();
    world.connected(&one).await;
    world.line.stall();
    one.stop().await;
    one.run();
    world.line.cut();
    one.stands(world.severed(), NOTICED).await;
    one.stop().await;
    world.line.restore();
    one.run();
    world.connected(&one).await;
    world.connected(&two).await;
    one.reaches_any(&[&one, &two], class).await;
}

async fn opens_quietly(world: World) {
    let process = Process::open(world.descriptor, &world.variables);
    let _ = process.carrier.health();
    let none = async || world.line.accepted() == 0;
    stays("no connection is made", Duration::from_millis(300), none).await;
}

async fn full_way_in(world: World) {
    let mut deaf = Process::open(world.descriptor, &world.variables);
    let arrivals = deaf.run_unheard(1);
    world.connected(&deaf).await;
    let sender = world.process();
    world.connected(&sender).await;
    for class in world.descriptor.classes {
        if world.shares(*class) {
            // What is acknowledged waits until it was handled; whoever sends does not.
            for _ in 0..5 {
                let batch: Vec<_> = (0..10).map(|_| unique(*class)).collect();
                sender.send(*class, &batch).await.expect("it is taken");
            }
            continue;
        }
        let before = arrivals.dropped();
        eventually("what finds no room is dropped", SOON, async || {
            let batch: Vec<_> = (0..10).map(|_| unique(*class)).collect();
            sender.send(*class, &batch).await.map_err(|error| error.to_string())?;
            match arrivals.dropped() - before {
                0 => Err("nothing is dropped yet".to_owned()),
                _ => Ok(()),
            }
        })
        .await;
    }
    deaf.stop().await;
}

async fn one_round_trip(world: World) {
    if world.descriptor.id == "cloud-v1" {
        return batches_at_once(world).await;
    }
    let (one, _two) = world.pair().await;
    let class = world.descriptor.classes[0];
    one.send(class, &[unique(class)]).await.expect("a healthy broker");
    world.line.delay(Duration::from_millis(100));
    let many: Vec<_> = (0..100).map(|_| unique(class)).collect();
    let started = Instant::now();
    one.send(class, &many).await.expect("a slow broker takes them too");
    assert!(
        // The line carries large pieces one after another; one round trip for each signal would be 20 s.
        started.elapsed() < Duration::from_millis(1500),
        "{:?} for one round trip of 200 ms",
        started.elapsed()
    );
}

/// A queue takes ten at a time; eight times ten are under way at once.
async fn batches_at_once(world: World) {
    let one = Process::open(world.descriptor, &world.variables);
    let many: Vec<_> = (0..80).map(|_| unique(Class::Queue)).collect();
    one.send(Class::Queue, &many[..40]).await.expect("a healthy queue");
    world.line.delay(Duration::from_millis(200));
    let started = Instant::now();
    one.send(Class::Queue, &many[40..])
        .await
        .expect("a slow queue takes them too");
    assert!(
        started.elapsed() < Duration::from_millis(1500),
        "{:?} for four requests at once",
        started.elapsed()
    );
}

async fn dripping(world: World) {
    let (one, two) = world.pair().await;
    world.line.drip();
    for class in world.descriptor.classes {
        let sent: Vec<_> = (0..5).map(|_| unique(*class)).collect();
        one.send(*class, &sent).await.expect("a slow line is no broken one");
        eventually("all arrive", SOON, async || {
            let heard = counted(&[&one, &two]);
            sent.iter().all(|signal| heard.get(signal) == Some(&1))
        })
        .await;
    }
}

/// An hour of an outage in a few seconds: every kind of call, thousands of times, against a broker that is not there.
/// It runs in a process of its own, because memory is counted by process and the other tests use some as well.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[expect(clippy::disallowed_methods, reason = "it tells its two runs apart")]
async fn nothing_grows_in_a_long_outage() {
    const ALONE: &str = "OV_TEST_OUTAGE_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let mut alone = tokio::process::Command::new(std::env::current_exe().expect("this program has a path"));
        alone.args(["--exact", "nothing_grows_in_a_long_outage", "--nocapture"]);
        let ended = alone.env(ALONE, "1").kill_on_drop(true).output().await;
        let ended = ended.expect("the tests run once more");
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        return;
    }
    long_outage().await;
}

async fn long_outage() {
    let mut processes = Vec::new();
    for id in World::ids() {
        let world = World::of(id).await;
        let process = world.process();
        world.connected(&process).await;
        processes.push((world, process));
    }
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let outage = async |rounds: usize| {
        for _ in 0..rounds {
            for (world, process) in &processes {
                let class = world.descriptor.classes[0];
                let batch: Vec<_> = (0..200).map(|_| unique(class)).collect();
                let short = Duration::from_millis(5);
                let _ = timeout(short, process.carrier.signal(class, &batch)).await;
                let _ = timeout(short, process.carrier.probe()).await;
                let _ = process.carrier.health();
            }
        }
    };
    for (world, _) in &processes {
        world.line.stall();
    }
    outage(20).await;
    for (world, process) in &processes {
        process.stands(world.severed(), NOTICED).await;
    }
    outage(20).await;
    let tasks_before = tasks();
    outage(200).await;
    for (world, _) in &processes {
        world.line.cut();
    }
    // The line's own buffers of the silent part are let go, and the process has the size it needs.
    outage(200).await;
    let bytes_before = resident_bytes();
    outage(600).await;
    let grown = resident_bytes().saturating_sub(bytes_before);
    assert!(grown < 16 * 1024 * 1024, "{grown} bytes more than before");
    let settled = async || {
        if tasks() <= tasks_before + 20 {
            Ok(())
        } else {
            Err(format!("{} tasks", tasks()))
        }
    };
    eventually("no task is left of what was given up", SOON, settled).await;
    for (world, process) in &processes {
        world.line.restore();
        world.connected(process).await;
    }
}

/// What this process occupies. Where that cannot be read the tasks alone are counted.
fn resident_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").ok();
    let resident = pages.and_then(|pages| pages.split(' ').nth(1)?.parse::<usize>().ok());
    resident.unwrap_or_default() * 4096
}

#[tokio::test]
async fn a_class_that_a_carrier_does_not_carry_is_refused() {
    for id in World::ids() {
        let world = World::of(id).await;
        for class in Class::ALL
            .into_iter()
            .filter(|class| !world.descriptor.classes.contains(class))
        {
            let process = Process::open(world.descriptor, &world.variables);
            let refused = within("an answer", SOON, process.send(class, &[unique(class)])).await;
            assert!(
                matches!(refused, Err(SignalError::Refused(_) | SignalError::NotConnected)),
                "{id} took {class}: {refused:?}"
            );
            assert!(process.heard.lock().iter().all(|heard| *heard == Heard::Everything));
        }
    }
}
