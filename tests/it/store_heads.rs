//! Head marks: a key always has exactly one row that may run, and it is the first unfinished one.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use openvibe_events::{
    domain::ids::SubscriptionId,
    store::{Claimed, NewDelivery, Outcome, ReplaySelection, Settlement, SharedStore, Store},
};
use sqlx::PgPool;

use crate::{
    store_fixture::{
        Fixture, FloorAlone, assert_counts, broken_keys, candidate, claim, claim_with, dead, delivered, ending,
        event_of, events_of, heads, new_event, positions, put, put_keyed, retry, settle_all,
    },
    support::wait::{SOON, eventually, within},
};

const STORM: Duration = Duration::from_secs(3);

async fn replay(store: &Store, id: &SubscriptionId, event_id: &str) -> i64 {
    let selection = ReplaySelection::Events(vec![event_id.to_owned()]);
    let replayed = store.replay(id, &selection, &FloorAlone).await.expect("a replay");
    replayed.expect("a subscription").queued
}

#[tokio::test]
async fn the_first_row_of_a_key_carries_the_mark_and_unkeyed_rows_always_do() {
    let fixture = Fixture::new().await;
    let (store, id) = (&fixture.store, fixture.subscription(64).await);
    let events = events_of("live.a.b", 5);
    let keys = [Some("a"), Some("a"), None, Some("b"), None];
    let keyed: Vec<_> = events.iter().zip(keys).collect();
    let at = put_keyed(store, Some(&id), &keyed).await.expect("a group");
    assert_eq!(heads(fixture.pool(), &id).await, [at[0], at[2], at[3], at[4]]);
    put(store, Some(&id), &events_of("live.a.b", 2), Some("b"))
        .await
        .expect("a group");
    assert_eq!(
        heads(fixture.pool(), &id).await.len(),
        4,
        "a key that waits gets no second mark"
    );
}

#[tokio::test]
async fn keys_of_different_subscriptions_have_nothing_to_do_with_each_other() {
    let fixture = Fixture::new().await;
    let (one, two) = (fixture.subscription(1).await, fixture.subscription(1).await);
    for id in [&one, &two] {
        put(&fixture.store, Some(id), &events_of("live.a.b", 2), Some("k"))
            .await
            .expect("a group");
        assert_eq!(heads(fixture.pool(), id).await.len(), 1);
    }
}

#[tokio::test]
async fn a_head_keeps_its_mark_while_it_is_tried_again_and_passes_it_on_when_it_ends() {
    let fixture = Fixture::new().await;
    let (store, id) = (&fixture.store, fixture.subscription(64).await);
    let at = put(store, Some(&id), &events_of("live.a.b", 4), Some("k"))
        .await
        .expect("a group");
    let expected = [
        (retry(0), at[0]),
        (Outcome::Unsent, at[0]),
        (delivered(), at[1]),
        (dead(), at[2]),
    ];
    for (outcome, head) in expected {
        let pass = claim(store, "w", &[&id]).await;
        assert_eq!(pass.claimed.len(), 1, "only the head of the key runs");
        settle_all(store, "w", &pass, &outcome).await;
        assert_eq!(heads(fixture.pool(), &id).await, [head], "after {outcome:?}");
    }
    assert_counts(store, fixture.pool()).await;
}

#[tokio::test]
async fn a_row_that_becomes_head_late_is_due_now_or_later() {
    let fixture = Fixture::new().await;
    let (store, id) = (&fixture.store, fixture.subscription(64).await);
    let at = put(store, Some(&id), &events_of("live.a.b", 2), Some("k"))
        .await
        .expect("a group");
    fixture.sql("UPDATE deliveries SET next_attempt_at = 1").await;
    let before = fixture.number("SELECT now_ms()").await;
    let pass = claim(store, "w", &[&id]).await;
    settle_all(store, "w", &pass, &delivered()).await;
    let due = fixture
        .number(&format!("SELECT next_attempt_at FROM deliveries WHERE seq = {}", at[1]))
        .await;
    assert!(
        due >= before,
        "a claim that starts at {before} would not see a row due at {due}"
    );
}

#[tokio::test]
async fn an_expired_lease_keeps_the_order_of_its_key() {
    let fixture = Fixture::new().await;
    let (store, id) = (&fixture.store, fixture.subscription(64).await);
    let at = put(store, Some(&id), &events_of("live.a.b", 3), Some("k"))
        .await
        .expect("a group");
    let lost = claim_with(store, "gone", 0, &[candidate(&id)]).await;
    assert_eq!(
        store.release_lost(None).await.expect("a release").subscriptions,
        std::slice::from_ref(&id)
    );
    let pass = claim(store, "w", &[&id]).await;
    assert_eq!(positions(&pass), [at[0]]);
    assert_eq!(
        (lost.claimed[0].attempt, pass.claimed[0].attempt),
        (1, 2),
        "the lost attempt counts"
    );
}

#[tokio::test]
async fn an_earlier_row_replayed_while_a_later_one_runs_takes_its_turn_after_it() {
    let fixture = Fixture::new().await;
    let (store, id) = (&fixture.store, fixture.subscription(64).await);
    let events = events_of("live.a.b", 3);
    let at = put(store, Some(&id), &events, Some("k")).await.expect("a group");
    settle_all(store, "w", &claim(store, "w", &[&id]).await, &delivered()).await;
    let running = claim(store, "w", &[&id]).await;
    assert_eq!(positions(&running), [at[1]]);
    assert_eq!(replay(store, &id, events[0].event_id.as_str()).await, 1);
    assert!(
        claim(store, "x", &[&id]).await.claimed.is_empty(),
        "one attempt of a key at a time"
    );
    settle_all(store, "w", &running, &delivered()).await;
    for expected in [at[0], at[2]] {
        let pass = claim(store, "w", &[&id]).await;
        assert_eq!(positions(&pass), [expected]);
        settle_all(store, "w", &pass, &delivered()).await;
    }
    assert_counts(store, fixture.pool()).await;
}

#[tokio::test]
async fn an_earlier_row_replayed_while_a_later_one_is_tried_again_runs_before_it() {
    let fixture = Fixture::new().await;
    let (store, id) = (&fixture.store, fixture.subscription(64).await);
    let events = events_of("live.a.b", 2);
    let at = put(store, Some(&id), &events, Some("k")).await.expect("a group");
    settle_all(store, "w", &claim(store, "w", &[&id]).await, &delivered()).await;
    let running = claim(store, "w", &[&id]).await;
    replay(store, &id, events[0].event_id.as_str()).await;
    settle_all(store, "w", &running, &retry(0)).await;
    assert_eq!(heads(fixture.pool(), &id).await, [at[0]]);
    settle_all(store, "w", &claim(store, "w", &[&id]).await, &delivered()).await;
    assert_eq!(positions(&claim(store, "w", &[&id]).await), [at[1]]);
}

#[tokio::test]
async fn rows_replayed_one_after_the_other_while_a_later_one_runs_wait_for_it() {
    let fixture = Fixture::new().await;
    let (store, id) = (&fixture.store, fixture.subscription(64).await);
    let events = events_of("live.a.b", 3);
    let at = put(store, Some(&id), &events, Some("k")).await.expect("a group");
    for _ in 0..2 {
        settle_all(store, "w", &claim(store, "w", &[&id]).await, &delivered()).await;
    }
    let running = claim(store, "w", &[&id]).await;
    for event in &events[..2] {
        replay(store, &id, event.event_id.as_str()).await;
        assert!(
            claim(store, "x", &[&id]).await.claimed.is_empty(),
            "one attempt of a key at a time"
        );
    }
    settle_all(store, "w", &running, &delivered()).await;
    for expected in &at[..2] {
        let pass = claim(store, "w", &[&id]).await;
        assert_eq!(positions(&pass), [*expected]);
        settle_all(store, "w", &pass, &delivered()).await;
    }
}

#[tokio::test]
async fn a_waiting_head_gives_its_mark_to_an_earlier_row_that_is_replayed() {
    let fixture = Fixture::new().await;
    let (store, id) = (&fixture.store, fixture.subscription(64).await);
    let events = events_of("live.a.b", 3);
    let at = put(store, Some(&id), &events, Some("k")).await.expect("a group");
    settle_all(store, "w", &claim(store, "w", &[&id]).await, &dead()).await;
    settle_all(store, "w", &claim(store, "w", &[&id]).await, &retry(60_000)).await;
    assert_eq!(heads(fixture.pool(), &id).await, [at[1]]);
    replay(store, &id, events[0].event_id.as_str()).await;
    assert_eq!(
        heads(fixture.pool(), &id).await,
        [at[0]],
        "a dead row comes back in front"
    );
    replay(store, &id, events[1].event_id.as_str()).await;
    replay(store, &id, events[2].event_id.as_str()).await;
    assert_eq!(
        heads(fixture.pool(), &id).await,
        [at[0]],
        "a waiting row keeps its place"
    );
    for expected in at {
        let pass = claim(store, "w", &[&id]).await;
        assert_eq!(positions(&pass), [expected], "and is due at once");
        settle_all(store, "w", &pass, &delivered()).await;
    }
    assert_counts(store, fixture.pool()).await;
}

/// Positions of a key's waiting rows, as they are delivered.
async fn order(store: &Store, id: &SubscriptionId) -> Vec<i64> {
    let mut order = Vec::new();
    loop {
        let pass = claim(store, "w", &[id]).await;
        if pass.claimed.is_empty() {
            return order;
        }
        assert_eq!(pass.claimed.len(), 1, "one of a key at a time");
        order.extend(positions(&pass));
        settle_all(store, "w", &pass, &delivered()).await;
    }
}

#[tokio::test]
async fn a_new_event_waits_for_what_was_replayed_before_the_place_where_its_key_was_at_rest() {
    let fixture = Fixture::new().await;
    let (store, id) = (&fixture.store, fixture.subscription(64).await);
    let events = events_of("live.a.b", 4);
    let mut at = Vec::new();
    // At rest behind each of the first three.
    for event in &events[..3] {
        at.extend(
            put(store, Some(&id), std::slice::from_ref(event), Some("k"))
                .await
                .expect("a group"),
        );
        assert_eq!(order(store, &id).await, at[at.len() - 1..]);
    }
    // The first is put back, then the last; that one is ended by hand, so that the key is at rest behind the second.
    replay(store, &id, events[0].event_id.as_str()).await;
    replay(store, &id, events[2].event_id.as_str()).await;
    store.skip(&id, &[events[2].event_id.as_str()]).await.expect("a skip");
    at.extend(put(store, Some(&id), &events[3..], Some("k")).await.expect("a group"));
    assert_eq!(heads(fixture.pool(), &id).await, at[..1]);
    // A row that runs is told of what is put back behind it and before it.
    let running = claim(store, "w", &[&id]).await;
    replay(store, &id, events[1].event_id.as_str()).await;
    settle_all(store, "w", &running, &delivered()).await;
    let running = claim(store, "w", &[&id]).await;
    assert_eq!(positions(&running), at[1..2]);
    replay(store, &id, events[0].event_id.as_str()).await;
    settle_all(store, "w", &running, &retry(0)).await;
    assert_eq!(order(store, &id).await, [at[0], at[1], at[3]]);
    assert!(broken_keys(fixture.pool()).await.is_empty());
    let last = put(store, Some(&id), &events_of("live.a.b", 1), Some("k"))
        .await
        .expect("a group");
    assert_eq!(order(store, &id).await, last);
}

#[tokio::test]
async fn a_replay_while_a_new_event_of_its_key_is_stored_leaves_one_mark() {
    let fixture = Fixture::new().await;
    let (store, id) = (&fixture.store, fixture.subscription(64).await);
    let old = events_of("live.a.b", 1);
    put(store, Some(&id), &old, Some("k")).await.expect("a group");
    settle_all(store, "w", &claim(store, "w", &[&id]).await, &delivered()).await;

    let new = event_of("live.a.b");
    let mut group = store.open_group(&[new.event_id.as_str()]).await.expect("a group");
    let delivery = NewDelivery {
        event: 0,
        subscription_id: &id,
        ordering_key: Some("k"),
        at_most_once: false,
        carrier: "pg-v1",
        placement_id: None,
    };
    group.store(&[new_event(&new)], &[delivery]).await.expect("rows");
    let replayed = replay(store, &id, old[0].event_id.as_str());
    tokio::pin!(replayed);
    // It may wait for the group or not; the outcome must be the same.
    let early = tokio::time::timeout(Duration::from_millis(200), &mut replayed).await;
    group.commit().await.expect("an end");
    if early.is_err() {
        within("the replay goes on", SOON, replayed).await;
    }
    assert!(
        broken_keys(fixture.pool()).await.is_empty(),
        "{:?}",
        heads(fixture.pool(), &id).await
    );
}

#[tokio::test]
async fn a_settle_and_a_publish_take_the_rows_of_several_keys_in_one_order() {
    let fixture = Fixture::new().await;
    let (store, id) = (&fixture.store, fixture.subscription(64).await);
    let events = events_of("live.a.b", 2);
    let keyed = [(&events[0], Some("a")), (&events[1], Some("b"))];
    let at = put_keyed(store, Some(&id), &keyed).await.expect("a group");
    let pass = claim(store, "w", &[&id]).await;
    // Stored behind the second and named after it: whatever order a plan without a rule takes, it is the other one.
    fixture
        .sql(&format!(
            "UPDATE deliveries SET updated_at = updated_at + 1 WHERE seq = {}; ANALYZE deliveries",
            at[0]
        ))
        .await;
    let backwards: Vec<Settlement> = pass.claimed.iter().rev().map(|one| ending(one, delivered())).collect();
    let mut holder = fixture.pool().begin().await.expect("a transaction");
    sqlx::query("SELECT FROM deliveries WHERE seq = $1 FOR UPDATE")
        .bind(at[0])
        .execute(&mut *holder)
        .await
        .expect("the first row");
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let publish = tokio::spawn({
        let (store, id) = (fixture.another().await, id.clone());
        async move {
            let events = events_of("live.a.b", 2);
            let keyed = [(&events[0], Some("b")), (&events[1], Some("a"))];
            put_keyed(&store, Some(&id), &keyed).await
        }
    });
    eventually("the publish waits", SOON, async || fixture.number(waits).await == 1).await;
    let settle = tokio::spawn({
        let store = Arc::clone(store);
        async move { store.settle("w", &backwards).await }
    });
    eventually("both wait", SOON, async || fixture.number(waits).await == 2).await;
    holder.rollback().await.expect("an end");
    settle.await.expect("a task").expect("a settle without a deadlock");
    publish.await.expect("a task").expect("a publish without a deadlock");
    assert_eq!(heads(fixture.pool(), &id).await.len(), 2);
    assert!(broken_keys(fixture.pool()).await.is_empty());
}

#[tokio::test]
async fn a_publish_whose_last_row_ends_while_it_waits_holds_the_row_that_is_last_then() {
    let fixture = Fixture::new().await;
    let (store, id) = (&fixture.store, fixture.subscription(64).await);
    let events = events_of("live.a.b", 2);
    let at = put(store, Some(&id), &events, Some("k")).await.expect("a group");
    settle_all(store, "w", &claim(store, "w", &[&id]).await, &delivered()).await;
    let running = claim(store, "w", &[&id]).await;
    assert_eq!(positions(&running), [at[1]]);
    replay(store, &id, events[0].event_id.as_str()).await;

    // The last row of the key is recorded in a transaction that stays open for a moment.
    let mut recording = fixture.pool().begin().await.expect("a transaction");
    let lost: Option<Vec<i64>> = sqlx::query_scalar(
        "SELECT settle_deliveries('w', ARRAY[$1], ARRAY[$2], ARRAY[$3], ARRAY['delivered'], ARRAY[200], \
         ARRAY[NULL]::text[], ARRAY[0::bigint], '', NULL, 'w', 'settle', 10000)",
    )
    .bind(id.as_str())
    .bind(at[1])
    .bind(running.claimed[0].claim_id)
    .fetch_one(&mut *recording)
    .await
    .expect("a result");
    assert_eq!(lost, Some(Vec::new()));

    let new = event_of("live.a.b");
    let mut group = store.open_group(&[new.event_id.as_str()]).await.expect("a group");
    let delivery = NewDelivery {
        event: 0,
        subscription_id: &id,
        ordering_key: Some("k"),
        at_most_once: false,
        carrier: "pg-v1",
        placement_id: None,
    };
    let rows = [new_event(&new)];
    let deliveries = [delivery];
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    {
        let storing = group.store(&rows, &deliveries);
        tokio::pin!(storing);
        tokio::select! {
            _ = &mut storing => panic!("the row is held"),
            () = eventually("the publish waits", SOON, async || fixture.number(waits).await == 1) => {}
        }
        recording.commit().await.expect("an end");
        storing.await.expect("rows");
    }
    // The replayed row is the last unfinished one by now. If it could end before the group does, the new row would never
    // get the mark.
    assert!(
        claim(store, "x", &[&id]).await.claimed.is_empty(),
        "the publish holds it"
    );
    group.commit().await.expect("an end");
    for _ in 0..2 {
        settle_all(store, "x", &claim(store, "x", &[&id]).await, &delivered()).await;
    }
    let unfinished = "SELECT count(*) FROM deliveries WHERE status IN ('pending', 'failed')";
    assert_eq!(fixture.number(unfinished).await, 0);
}

/// What a storm is made of.
#[derive(Clone)]
struct Storm {
    stores: [SharedStore; 2],
    id: SubscriptionId,
    until: Instant,
}

impl Storm {
    async fn start(fixture: &Fixture) -> Self {
        Self {
            stores: [Arc::clone(&fixture.store), fixture.another().await],
            id: fixture.subscription(64).await,
            until: Instant::now() + STORM,
        }
    }

    fn rages(&self) -> bool {
        Instant::now() < self.until
    }

    /// Publishes to a few of 40 keys, so few at a time that keys keep running empty.
    async fn publish(self, process: usize) -> usize {
        let mut published = 0;
        while self.rages() {
            let events = events_of("live.a.b", 1 + rand::random_range(0..8));
            let keys: Vec<String> = events
                .iter()
                .map(|_| format!("k{}", rand::random_range(0..40)))
                .collect();
            let keyed: Vec<_> = events
                .iter()
                .zip(&keys)
                .map(|(event, key)| (event, Some(key.as_str())))
                .collect();
            put_keyed(&self.stores[process], Some(&self.id), &keyed)
                .await
                .expect("a group");
            published += events.len();
        }
        published
    }

    /// Claims and ends claims in every way; answers what ended for good, in the order in which this worker ended it.
    async fn work(self, process: usize, ends: tokio::sync::mpsc::UnboundedSender<Claimed>) {
        let (store, owner) = (&self.stores[process], format!("w{process}"));
        while self.rages() {
            if rand::random_range(0..10) == 0 {
                claim_with(store, &owner, 0, &[candidate(&self.id)]).await;
                store.release_lost(None).await.expect("a release");
            }
            let pass = claim(store, &owner, &[&self.id]).await;
            let mut endings: Vec<Settlement> = Vec::new();
            for claimed in pass.claimed {
                let outcome = match rand::random_range(0..8) {
                    0 => retry(0),
                    1 => Outcome::Unsent,
                    2 => dead(),
                    _ => delivered(),
                };
                endings.push(ending(&claimed, outcome.clone()));
                if matches!(outcome, Outcome::Delivered { .. } | Outcome::Dead { .. }) {
                    // Told before the settle: the next claim of the key can only come after it.
                    ends.send(claimed).expect("a listener");
                }
            }
            let lost = store.settle(&owner, &endings).await.expect("a settle");
            assert!(lost.is_empty());
        }
    }

    async fn look(self, pool: PgPool) -> usize {
        let mut looks = 0;
        while self.rages() {
            let broken = broken_keys(&pool).await;
            assert!(broken.is_empty(), "after {looks} looks: {broken:?}");
            looks += 1;
        }
        looks
    }

    /// Ends everything that is left; fails when something never gets its turn.
    async fn drain(&self, fixture: &Fixture) {
        let left = "SELECT count(*) FROM deliveries WHERE status IN ('pending', 'failed')";
        eventually("every row gets its turn", SOON, async || {
            self.stores[0].release_lost(None).await.expect("a release");
            settle_all(
                &self.stores[0],
                "drain",
                &claim(&self.stores[0], "drain", &[&self.id]).await,
                &delivered(),
            )
            .await;
            match fixture.number(left).await {
                0 => Ok(()),
                rows => Err(format!(
                    "{rows} rows wait, broken keys: {:?}",
                    broken_keys(fixture.pool()).await
                )),
            }
        })
        .await;
        assert_counts(&self.stores[1], fixture.pool()).await;
    }
}

async fn assert_no_deadlock(fixture: &Fixture) {
    // The statistics of a session are written when it ends at the latest.
    fixture.store.close().await;
    assert_eq!(
        fixture
            .number("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
            .await,
        0
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn racing_publishes_and_settles_never_leave_a_key_without_a_mark_nor_with_two() {
    let fixture = Fixture::new().await;
    let storm = Storm::start(&fixture).await;
    let (ends, mut ended) = tokio::sync::mpsc::unbounded_channel();
    let publishers = [0, 1].map(|process| tokio::spawn(storm.clone().publish(process)));
    let workers = [0, 1, 0].map(|process| tokio::spawn(storm.clone().work(process, ends.clone())));
    let looks = tokio::spawn(storm.clone().look(fixture.pool().clone()));
    drop(ends);
    let mut published = 0;
    for publisher in publishers {
        published += publisher.await.expect("a publisher");
    }
    for worker in workers {
        worker.await.expect("a worker");
    }
    assert!(looks.await.expect("the marks") > 20);
    storm.drain(&fixture).await;
    let keys: Vec<(i64, String)> = sqlx::query_as("SELECT seq, ordering_key FROM deliveries")
        .fetch_all(fixture.pool())
        .await
        .expect("the keys");
    assert_eq!(keys.len(), published);
    let keys: HashMap<i64, String> = keys.into_iter().collect();
    let (mut last, mut count) = (HashMap::new(), 0);
    while let Some(claimed) = ended.recv().await {
        let before = last
            .insert(keys[&claimed.position].clone(), claimed.position)
            .unwrap_or(0);
        assert!(
            before < claimed.position,
            "{} ended after {before} of its key",
            claimed.position
        );
        count += 1;
    }
    assert!(count > 200, "a storm of {count} ends is no storm");
    assert_no_deadlock(&fixture).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replays_in_a_storm_of_publishes_and_settles_keep_one_mark_and_never_deadlock() {
    let fixture = Fixture::new().await;
    let storm = Storm::start(&fixture).await;
    let (ends, ended) = tokio::sync::mpsc::unbounded_channel();
    let replays = |process: usize| {
        let storm = storm.clone();
        let pool = fixture.pool().clone();
        tokio::spawn(async move {
            while storm.rages() {
                let some = "SELECT event_id FROM deliveries ORDER BY random() LIMIT 8";
                let chosen: Vec<String> = sqlx::query_scalar(some).fetch_all(&pool).await.expect("some rows");
                let selection = ReplaySelection::Events(chosen);
                storm.stores[process]
                    .replay(&storm.id, &selection, &FloorAlone)
                    .await
                    .expect("a replay");
            }
        })
    };
    let mut tasks = vec![replays(0), replays(1)];
    tasks.extend([0, 1].map(|process| tokio::spawn(storm.clone().work(process, ends.clone()))));
    let publisher = tokio::spawn(storm.clone().publish(1));
    let looks = tokio::spawn(storm.clone().look(fixture.pool().clone()));
    for task in tasks {
        task.await.expect("a task of the storm");
    }
    publisher.await.expect("a publisher");
    looks.await.expect("the marks");
    storm.drain(&fixture).await;
    drop(ended);
    assert_no_deadlock(&fixture).await;
}
