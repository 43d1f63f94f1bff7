//! The counter row: what orders every publish, and what nobody can hold for long.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use openvibe_events::{domain::cursor::Cursor, store::StoreError};
use serde_json::json;

use crate::{
    store_fixture::{Door, Fixture, event, event_of, events_of, ids, new_event, number, pull, put, request, subscribe},
    support::{
        envelopes::{batch, envelope, envelopes},
        wait::{SOON, eventually, within},
    },
};

#[tokio::test]
async fn publishing_never_writes_the_counter_row() {
    let fixture = Fixture::new().await;
    put(&fixture.store, None, &[event()], None)
        .await
        .expect("the first group");
    let version = async || -> (String, String) {
        sqlx::query_as("SELECT ctid::text, xmin::text FROM store_counter")
            .fetch_one(fixture.pool())
            .await
            .expect("the row's version")
    };
    let before = version().await;
    for _ in 0..10 {
        put(&fixture.store, None, &[event()], None).await.expect("a group");
    }
    let door = Door::open(&fixture.store);
    for _ in 0..10 {
        door.publish(request("live", envelope("live").json()))
            .await
            .expect("a publish");
    }
    assert_eq!(version().await, before, "the row that publishes wait on is only locked");
}

#[tokio::test(flavor = "multi_thread")]
async fn positions_become_visible_in_their_order_whichever_process_stores_them() {
    let fixture = Fixture::new().await;
    let stores = [Arc::clone(&fixture.store), fixture.another().await];
    let done = Arc::new(AtomicBool::new(false));
    let writers = stores.iter().flat_map(|store| {
        (0..3).map(|writer| {
            let store = Arc::clone(store);
            tokio::spawn(async move {
                for group in 0..25 {
                    let events = events_of("live.a.b", 1 + (writer + group) % 7);
                    put(&store, None, &events, None).await.expect("a group");
                }
            })
        })
    });
    let writers: Vec<_> = writers.collect();
    let looks = tokio::spawn({
        let (pool, done) = (fixture.pool().clone(), Arc::clone(&done));
        async move {
            let mut looks = Vec::new();
            while !done.load(Relaxed) {
                let look: (i64, i64) = sqlx::query_as("SELECT coalesce(max(seq), 0), count(*) FROM events")
                    .fetch_one(&pool)
                    .await
                    .expect("a look");
                looks.push(look);
            }
            looks
        }
    });
    for ended in join_all(writers).await {
        ended.expect("a writer");
    }
    done.store(true, Relaxed);
    let looks = looks.await.expect("the looks");
    assert!(looks.len() > 10, "{} looks", looks.len());
    let stored: Vec<i64> = sqlx::query_scalar("SELECT seq FROM events ORDER BY seq")
        .fetch_all(fixture.pool())
        .await
        .expect("the positions");
    for (head, seen) in looks {
        let below = stored.partition_point(|seq| *seq <= head);
        assert_eq!(
            below,
            usize::try_from(seen).expect("a count"),
            "events appeared below {head} after it was seen"
        );
    }
}

#[tokio::test]
async fn a_hole_left_by_a_rolled_back_group_is_passed_and_is_no_gap() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    let first = put(store, None, &[event_of("live.a.b")], None).await.expect("a group")[0];
    let lost = events_of("live.a.b", 7);
    let ids_lost: Vec<&str> = lost.iter().map(|event| event.event_id.as_str()).collect();
    let mut group = store.open_group(&ids_lost).await.expect("a group");
    let rows: Vec<_> = lost.iter().map(new_event).collect();
    group.store(&rows, &[]).await.expect("rows that are never committed");
    drop(group);
    let next = event_of("live.a.b");
    let second = put(store, None, std::slice::from_ref(&next), None)
        .await
        .expect("a group")[0];
    assert_eq!(second, first + 8, "the numbers of the lost group are gone");
    for topic in ["live.a.b", "live.*"] {
        let page = pull(
            store,
            Some(Cursor {
                epoch: 0,
                position: first,
            }),
            topic,
            5,
        )
        .await;
        assert_eq!(ids(&page), [&next.event_id]);
        assert_eq!(
            (page.examined, page.positions.head, page.positions.floor),
            (second, second, 0)
        );
    }
}

#[tokio::test]
async fn whoever_changes_subscriptions_or_the_epoch_changes_the_next_publish_of_every_process() {
    let fixture = Fixture::new().await;
    let elsewhere = Door::open(&fixture.another().await);
    let made = subscribe(&fixture.store, "chat", "live.*", 1).await;
    let publish = async || {
        let answer = elsewhere
            .publish(request("live", envelope("live").json()))
            .await
            .expect("a publish");
        answer[0].cursor.expect("a cursor")
    };
    let fanout = async |cursor: Cursor| {
        fixture
            .number(&format!(
                "SELECT count(*) FROM deliveries WHERE seq = {}",
                cursor.position
            ))
            .await
    };
    assert_eq!(fanout(publish().await).await, 1, "made by another process");

    let insert = "INSERT INTO subscriptions (id, consumer, topic_pattern, endpoint, secret, created_at, updated_at) \
                  VALUES ('sub_01ARZ3NDEKTSV4RRFFQ69G5FAV', 'chat', 'live.*', 'https://b.example/', 's', 1, 1)";
    for (change, receivers) in [
        (insert.to_owned(), 2),
        (format!("UPDATE subscriptions SET enabled = 0 WHERE id = '{made}'"), 1),
        (
            format!("UPDATE subscriptions SET enabled = 1, topic_pattern = 'chat.*' WHERE id = '{made}'"),
            1,
        ),
        (format!("DELETE FROM subscriptions WHERE id <> '{made}'"), 0),
        (
            format!("UPDATE subscriptions SET topic_pattern = '*' WHERE id = '{made}'"),
            1,
        ),
        ("TRUNCATE subscriptions".to_owned(), 0),
    ] {
        let version = fixture.number("SELECT version FROM store_counter").await;
        fixture.sql(&change).await;
        assert!(
            fixture.number("SELECT version FROM store_counter").await > version,
            "{change}"
        );
        assert_eq!(fanout(publish().await).await, receivers, "{change}");
    }
    fixture.sql("UPDATE store_epoch SET value = 3").await;
    assert_eq!(publish().await.epoch, 3, "positions belong to the new history at once");
}

#[tokio::test]
async fn a_change_of_subscriptions_waits_for_the_publish_that_runs() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    let one = event();
    let group = store.open_group(&[one.event_id.as_str()]).await.expect("a group");
    let change = subscribe(store, "chat", "*", 1);
    tokio::pin!(change);
    let early = tokio::time::timeout(Duration::from_millis(200), &mut change).await;
    assert!(
        early.is_err(),
        "it must not be answered while a publish decides without it"
    );
    group.commit().await.expect("an end");
    within("the change goes on", SOON, change).await;
}

#[tokio::test]
async fn a_publish_decides_by_the_view_checked_under_the_counter_row() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    let door = Door::open(store);
    subscribe(store, "chat", "*", 1).await;
    // The publish is held where it has checked the view and has not decided yet.
    let mut held = fixture.pool().begin().await.expect("a transaction");
    sqlx::query("LOCK TABLE events IN ACCESS EXCLUSIVE MODE")
        .execute(&mut *held)
        .await
        .expect("a lock");
    let publish = door.publish(request("live", envelope("live").json()));
    let interfere = async {
        let waiting = "SELECT count(*) FROM pg_locks WHERE relation = 'events'::regclass AND NOT granted \
                       AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
        eventually("the publish waits", SOON, async || fixture.number(waiting).await == 1).await;
        // A reader that began before the subscription ends now: it puts what it read then in the view's place.
        let without_trigger = async |enabled: i32| {
            fixture
                .sql(&format!(
                    "SET session_replication_role = replica; UPDATE subscriptions SET enabled = {enabled}; \
                     RESET session_replication_role"
                ))
                .await;
        };
        without_trigger(0).await;
        store.refresh_view(-1).await.expect("the slow reader's end");
        without_trigger(1).await;
        held.rollback().await.expect("an end");
    };
    let (published, ()) = tokio::join!(publish, interfere);
    published.expect("a publish");
    assert!(
        store.view().subscribers().is_empty(),
        "the store's view is the older one"
    );
    assert_eq!(fixture.number("SELECT count(*) FROM deliveries").await, 1);
}

#[tokio::test]
async fn another_timeline_makes_positions_jump_and_old_cursors_go_on() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    let before = put(store, None, &events_of("live.a.b", 3), None)
        .await
        .expect("a group");
    fixture.sql("UPDATE store_counter SET timeline = '00000009'").await;
    let after = put(fixture.another().await.as_ref(), None, &events_of("live.a.b", 2), None)
        .await
        .expect("a group");
    assert!(
        after[0] > before[2] + (1 << 32) && after[1] == after[0] + 1,
        "{before:?} then {after:?}"
    );
    assert!(after[1] < 1 << 53, "a position fits a JavaScript number");
    let next = put(store, None, &events_of("live.a.b", 1), None)
        .await
        .expect("a group");
    assert_eq!(next[0], after[1] + 1, "the jump is made once");
    let page = pull(
        store,
        Some(Cursor {
            epoch: 0,
            position: before[1],
        }),
        "live.*",
        10,
    )
    .await;
    let read: Vec<i64> = page.events.iter().map(|event| event.cursor.position).collect();
    assert_eq!(read, [before[2], after[0], after[1], next[0]]);
}

#[tokio::test]
async fn a_change_after_a_fail_over_that_lost_one_is_seen_by_processes_that_saw_the_lost_one() {
    let fixture = Fixture::new().await;
    let other = fixture.another().await;
    let rows = "SELECT count(*) FROM deliveries";
    let before = fixture.number("SELECT version FROM store_counter").await;
    fixture.subscription(1).await;
    // The other process has seen the subscription; the fail-over takes it and the version back.
    put(&other, None, &events_of("live.stream.started", 1), None)
        .await
        .expect("a group");
    assert_ne!(other.view().version, before);
    fixture
        .sql(&format!(
            "SET session_replication_role = replica; DELETE FROM subscriptions; \
             UPDATE store_counter SET version = {before}; SET session_replication_role = DEFAULT"
        ))
        .await;
    subscribe(&fixture.store, "bell", "live.*", 1).await;
    Door::open(&other)
        .publish(request("live", envelope("live").json()))
        .await
        .expect("a publish");
    assert_eq!(fixture.number(rows).await, 1, "the new subscription is known");
}

#[tokio::test]
async fn a_timeline_that_lost_events_never_gives_their_positions_again() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    let seen = put(store, None, &events_of("live.a.b", 5), None)
        .await
        .expect("a group");
    // What a fail-over to a standby that was behind looks like: rows and the sequence's own state are older.
    fixture
        .sql("DELETE FROM events WHERE seq > 2; SELECT setval('event_positions', 2); UPDATE store_counter SET timeline = '00000009'")
        .await;
    let after = put(store, None, &events_of("live.a.b", 1), None)
        .await
        .expect("a group");
    assert!(after[0] > seen[4], "{seen:?} then {after:?}");
}

#[tokio::test]
async fn a_process_that_freezes_in_a_group_stops_the_others_for_two_seconds_at_most() {
    let fixture = Fixture::new().await;
    let other = fixture.another().await;
    let (frozen_event, next) = (event(), event());
    let mut frozen = fixture
        .store
        .open_group(&[frozen_event.event_id.as_str()])
        .await
        .expect("a group");
    let started = Instant::now();
    let mut refusals = 0;
    loop {
        match put(&other, None, std::slice::from_ref(&next), None).await {
            Ok(_) => break,
            Err(StoreError::Unavailable(_)) => refusals += 1,
            Err(error) => panic!("a wait is answered as not available: {error:?}"),
        }
        assert!(
            started.elapsed() < Duration::from_secs(6),
            "still refused after {refusals} refusals"
        );
    }
    assert!(started.elapsed() < Duration::from_secs(6), "{:?}", started.elapsed());
    let thawed = frozen.store(&[new_event(&frozen_event)], &[]).await;
    assert!(matches!(thawed, Err(StoreError::Unavailable(_))), "{thawed:?}");
    drop(frozen);
    assert_eq!(fixture.number("SELECT count(*) FROM events").await, 1);
}

#[tokio::test]
async fn a_publish_that_waits_behind_somebody_for_too_long_is_refused_and_not_stored() {
    let fixture = Fixture::new().await;
    let door = Door::open(&fixture.store);
    let mut holder = fixture.pool().begin().await.expect("a transaction");
    sqlx::query("SELECT FROM store_counter FOR UPDATE")
        .execute(&mut *holder)
        .await
        .expect("the row");
    let started = Instant::now();
    let refused = door.publish(request("live", envelope("live").json())).await;
    assert!(
        matches!(refused, Err(openvibe_events::publish::PublishError::Unavailable)),
        "{refused:?}"
    );
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    holder.rollback().await.expect("an end");
    assert_eq!(fixture.number("SELECT count(*) FROM events").await, 0);
    door.publish(request("live", envelope("live").json()))
        .await
        .expect("the next one is stored");
}

/// A future that is given up after a number of polls.
struct GivenUp<F> {
    future: Pin<Box<F>>,
    polls: usize,
}

impl<F: Future> Future for GivenUp<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if self.polls == 0 {
            return Poll::Ready(None);
        }
        self.polls -= 1;
        let polled = self.future.as_mut().poll(context).map(Some);
        if polled.is_pending() && self.polls == 0 {
            return Poll::Ready(None);
        }
        polled
    }
}

#[tokio::test]
async fn a_group_that_is_dropped_at_any_await_leaves_no_lock_and_no_row() {
    let fixture = Fixture::new().await;
    let (store, other) = (&fixture.store, fixture.another().await);
    let subscription = fixture.subscription(1).await;
    put(store, None, &[event()], None).await.expect("a first group");
    let mut ended = false;
    for polls in 0..200 {
        let dropped = events_of("live.dropped.x", 2);
        let work = GivenUp {
            future: Box::pin(put(store, Some(&subscription), &dropped, Some("k"))),
            polls,
        };
        ended = work.await.is_some();
        let kept = event();
        let next = put(&other, Some(&subscription), std::slice::from_ref(&kept), Some("k"));
        within("the next group goes on at once", Duration::from_millis(1_500), next)
            .await
            .unwrap_or_else(|error| panic!("after {polls} polls: {error:?}"));
        let left = fixture
            .number("SELECT count(*) FROM events WHERE event_type = 'live.dropped.x'")
            .await;
        let delivered = fixture
            .number("SELECT count(*) FROM deliveries d JOIN events e USING (seq) WHERE e.event_type = 'live.dropped.x'")
            .await;
        assert!(
            left == delivered && (left == 0 || left == 2),
            "after {polls} polls: {left} events, {delivered} deliveries"
        );
        if left == 2 {
            break; // the commit had left before the future was dropped: whole
        }
        assert!(!ended, "a group that ended has its rows");
    }
    let held = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'";
    eventually("no transaction is left open", SOON, async || {
        number(fixture.pool(), held).await == 0
    })
    .await;
    assert!(
        ended
            || fixture
                .number("SELECT count(*) FROM events WHERE event_type = 'live.dropped.x'")
                .await
                == 2
    );
}

#[tokio::test]
async fn a_request_that_is_dropped_while_it_waits_is_stored_whole_or_not_at_all() {
    let fixture = Fixture::new().await;
    let door = Door::open(&fixture.store);
    for polls in 0..12 {
        let events = envelopes("live", 5);
        let marker = events[0].type_name().to_owned();
        let work = GivenUp {
            future: Box::pin(door.publish(request("live", &batch(&events)))),
            polls,
        };
        work.await;
        door.publish(request("live", &json!({ "events": [envelope("live").json()] })))
            .await
            .expect("the next");
        let stored = fixture
            .number(&format!("SELECT count(*) FROM events WHERE event_type = '{marker}'"))
            .await;
        assert!(stored == 0 || stored == 5, "{stored} of 5 after {polls} polls");
    }
}
