//! Healthy endpoints beside others that hang, drip or fail, and caps that two workers keep together.

use std::time::{Duration, Instant};

use openvibe_events::{domain::app::Holder, domain::ids::SubscriptionId, store::SubscriptionChange};

use crate::{
    delivery_worker::{Process, World, settings},
    support::{
        receiver::Answer,
        wait::{SOON, eventually},
    },
};

/// Longer than any of these tests: what hangs here holds its slot to the end.
const TO_THE_END: Duration = Duration::from_secs(60);

#[tokio::test]
async fn ten_healthy_subscriptions_are_served_while_one_hangs_one_drips_and_one_fails() {
    const SLOTS: usize = 16;
    const EVENTS: usize = 40;
    let world = World::new().await;
    let mut healthy = Vec::new();
    for n in 0..10 {
        healthy.push(
            world
                .subscribe_capped(&format!("healthy{n}"), &format!("/healthy/{n}"), 4)
                .await,
        );
    }
    world.receiver.answer_with("/hangs", |_| Answer::hang(204));
    world.receiver.answer_with("/drips", |_| Answer::trickle_head(200));
    world.receiver.answer_with("/fails", |_| Answer::status(503));
    let mut bad = Vec::new();
    for path in ["/hangs", "/drips", "/fails"] {
        bad.push(world.subscribe_capped(path.trim_start_matches('/'), path, 64).await);
    }
    let mut few = settings();
    few.max_inflight = SLOTS;
    few.timeout = TO_THE_END;
    few.retry.max_attempts = 20;
    let process = Process::start(world.database.url(), few).await;
    let good: Vec<&SubscriptionId> = healthy.iter().collect();
    let every: Vec<&SubscriptionId> = bad.iter().chain(&healthy).collect();
    world.publish(1, &good).await;
    for id in &healthy {
        world.all(id, "delivered").await;
    }
    for _ in 0..4 {
        world.publish(EVENTS / 4, &every).await;
        process.wake.subscriptions(every.iter().copied().cloned());
    }
    for id in &healthy {
        world.all(id, "delivered").await;
    }
    let calls = |path: &str| world.receiver.calls_to(path).len();
    for n in 0..10 {
        assert_eq!(calls(&format!("/healthy/{n}")), 1 + EVENTS, "once each");
    }
    let [hangs, drips, fails] = ["/hangs", "/drips", "/fails"].map(calls);
    assert!(
        hangs + drips <= SLOTS / 2,
        "{hangs} hang and {drips} drip, none of which has ended"
    );
    assert!(
        hangs > 0 && drips > 0 && fails > 0,
        "each has its turn: {hangs}, {drips}, {fails}"
    );
    world.receiver.release();
}

#[tokio::test]
async fn fifty_endpoints_that_hang_leave_room_among_the_slots_of_a_process_as_it_is_shipped() {
    let world = World::new().await;
    let healthy = world.subscribe("healthy", &world.receiver.url("/healthy")).await;
    let mut hanging = Vec::new();
    for n in 0..50 {
        let path = format!("/hangs/{n}");
        world.receiver.answer_with(&path, |_| Answer::hang(204));
        hanging.push(world.subscribe(&format!("hangs{n}"), &world.receiver.url(&path)).await);
    }
    let mut shipped = settings();
    shipped.max_inflight = 256;
    shipped.poll_interval = Duration::from_millis(500);
    shipped.timeout = TO_THE_END;
    let process = Process::start(world.database.url(), shipped).await;
    let all: Vec<&SubscriptionId> = hanging.iter().collect();
    world.publish(10, &all).await;
    process.wake.subscriptions(hanging.iter().cloned());
    let held = async |count: usize| {
        eventually("they hold what they may", SOON, async || {
            let held = process.vitals.read().inflight;
            (held == count).then_some(()).ok_or(held)
        })
        .await;
    };
    // Nothing is known of the healthy one yet.
    held(50).await;
    let mut sent = 0;
    let mut arrives = async || {
        let asked = Instant::now();
        sent += 1;
        world.publish(1, &[&healthy]).await;
        process.wake.subscriptions([healthy.clone()]);
        world.receiver.wait_calls_to("/healthy", sent, SOON).await;
        let took = asked.elapsed();
        assert!(took < Duration::from_secs(1), "{took:?}");
    };
    arrives().await;
    for (n, id) in hanging.iter().enumerate() {
        let change = SubscriptionChange {
            max_inflight: Some(Some(64)),
            ..SubscriptionChange::default()
        };
        let changed = world
            .store
            .update_subscription(&Holder::service(&format!("hangs{n}")), id, &change)
            .await;
        assert!(changed.expect("a change").is_some());
    }
    held(128).await;
    arrives().await;
    world.receiver.release();
}

#[tokio::test]
async fn a_cap_of_four_holds_for_a_thousand_events_of_two_processes_and_none_is_sent_twice() {
    const EVENTS: usize = 1_000;
    let world = World::new().await;
    world
        .receiver
        .answer_with("/slow", |_| Answer::status(204).after(Duration::from_millis(5)));
    let id = world.subscribe_capped("chat", "/slow", 4).await;
    let one = Process::start(world.database.url(), settings()).await;
    let two = Process::start(world.database.url(), settings()).await;
    for _ in 0..10 {
        world.publish(EVENTS / 10, &[&id]).await;
        one.wake.subscriptions([id.clone()]);
        two.wake.subscriptions([id.clone()]);
    }
    world.receiver.wait_calls(EVENTS, TO_THE_END).await;
    world.all(&id, "delivered").await;
    let calls = world.receiver.calls();
    let mut events: Vec<&str> = calls.iter().map(|call| call.event_id()).collect();
    events.sort_unstable();
    events.dedup();
    assert_eq!((events.len(), calls.len()), (EVENTS, EVENTS), "none is sent twice");
    assert_eq!(world.receiver.peak("/slow"), 4, "all of the cap is used");
}
