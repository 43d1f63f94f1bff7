//! Prunes: an event is in one tier at a time, leaves with its deliveries, and no reader misses it.

use std::{collections::BTreeSet, sync::Arc};

use openvibe_events::{
    domain::{
        cursor::Cursor,
        envelope::{SubjectRef, Visibility},
        time::Millis,
        topic::TopicPattern,
    },
    store::{Aged, HistoryRequest, KnownEvent, PageRequest},
};

use crate::{
    store_fixture::{
        Fixture, assert_counts, broken_keys, claim, costs, delivered, event_of, events_of, heads, positions, put,
        settle_all, subscribe,
    },
    support::envelopes::{envelope, id},
    tiers_world::{DAY_MS, HOT_MS, age, move_all, rows, walk},
};

const SCAN: &str = "($7 IS NULL OR visibility = 'public') END";
const BY_TYPE: &str = "(event_type, seq) > ($3, (SELECT seq FROM start))";

#[tokio::test]
async fn events_in_both_tiers_are_read_as_one_sequence_with_the_same_cursors() {
    let fixture = Fixture::new().await;
    let events = events_of("live.tiers.x", 12);
    let all = put(&fixture.store, None, &events, None).await.expect("stored");
    let mut before = Vec::new();
    for event in &events {
        before.push(
            fixture
                .store
                .event(&event.event_id, None)
                .await
                .expect("read")
                .expect("there"),
        );
    }
    // Ages need not follow positions.
    age(&fixture, &[all[1], all[3], all[4], all[9]], 31).await;
    assert_eq!(move_all(&fixture.store).await, 4);
    assert_eq!(
        (rows(&fixture, "events").await, rows(&fixture, "events_archive").await),
        (8, 4)
    );
    for topic in ["*", "live.*", "live.tiers.x", "live.tiers.x,chat.other.x"] {
        for limit in [1, 2, 5, 100] {
            let (seen, gaps) = walk(&fixture.store, 0, topic, limit).await;
            assert_eq!((seen, gaps), (all.clone(), vec![]), "{topic} in pages of {limit}");
        }
    }
    for (event, before) in events.iter().zip(before) {
        let after = fixture
            .store
            .event(&event.event_id, None)
            .await
            .expect("read")
            .expect("there");
        assert_eq!((after.cursor, after.envelope), (before.cursor, before.envelope));
    }
    let topics = TopicPattern::parse_list("live.*").expect("a pattern");
    let history = fixture
        .store
        .history(&HistoryRequest {
            after: all[0],
            upto: all[11],
            topics: &topics,
            all: true,
            person: None,
            public_from: 0,
            limit: 100,
            bytes: i64::MAX,
        })
        .await
        .expect("history");
    let seen: Vec<i64> = history.events.iter().map(|event| event.position).collect();
    assert_eq!((seen, history.examined), (all[1..].to_vec(), all[11]));
    let tail = fixture.store.headings(all[0], 100).await.expect("headings");
    assert_eq!(tail.events.len(), 11, "a tail that lags sees what was moved meanwhile");
}

#[tokio::test]
async fn the_head_is_known_when_the_hot_store_is_empty() {
    let fixture = Fixture::new().await;
    let all = put(&fixture.store, None, &events_of("live.head.x", 3), None)
        .await
        .expect("stored");
    age(&fixture, &all, 31).await;
    move_all(&fixture.store).await;
    let positions = fixture.store.positions().await.expect("bounds");
    assert_eq!(
        (positions.head, positions.floor, rows(&fixture, "events").await),
        (all[2], 0, 0)
    );
    let next = put(&fixture.store, None, &[event_of("live.head.x")], None)
        .await
        .expect("stored");
    assert_eq!(
        walk(&fixture.store, all[0], "*", 2).await,
        (vec![all[1], all[2], next[0]], vec![])
    );
}

#[tokio::test]
async fn a_page_of_replay_rows_ends_at_its_bytes_too() {
    let fixture = Fixture::new().await;
    let all = put(&fixture.store, None, &events_of("live.bytes.x", 6), None)
        .await
        .expect("stored");
    age(&fixture, &all, 31).await;
    move_all(&fixture.store).await;
    let request = PageRequest {
        project: None,
        after: None,
        topics: TopicPattern::parse_list("*").expect("a pattern"),
        limit: 100,
        bytes: 1,
    };
    assert_eq!(fixture.store.pull(&request).await.expect("a page").events.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_processes_that_prune_at_once_move_each_event_once() {
    const COUNT: usize = 3_000;
    let fixture = Fixture::new().await;
    let subscription = subscribe(&fixture.store, "chat", "live.*", 64).await;
    let mut all = Vec::new();
    for _ in 0..COUNT / 250 {
        all.extend(
            put(&fixture.store, Some(&subscription), &events_of("live.two.x", 250), None)
                .await
                .expect("stored"),
        );
    }
    fixture
        .sql("UPDATE deliveries SET status = 'delivered', next_attempt_at = NULL, head = false; \
              UPDATE events SET received_at = received_at - 31 * 86400000::bigint; \
              TRUNCATE delivery_counts; \
              INSERT INTO delivery_counts (owner, role, period, delivered) SELECT '', 'folded', 0, count(*) FROM deliveries")
        .await;
    let others = [
        fixture.another().await,
        fixture.another().await,
        Arc::clone(&fixture.store),
    ];
    let pruning = others.map(|store| tokio::spawn(async move { move_all(&store).await }));
    let mut moved = 0;
    let mut busy = 0;
    for one in pruning {
        let by_this = one.await.expect("a task");
        moved += by_this;
        busy += usize::from(by_this > 0);
    }
    // A batch that another held is taken by a later prune.
    moved += move_all(&fixture.store).await;
    assert_eq!(
        moved,
        u64::try_from(COUNT).expect("small"),
        "each was moved by one of them"
    );
    assert!(busy >= 2, "they moved side by side");
    assert_eq!(
        (rows(&fixture, "events").await, rows(&fixture, "deliveries").await),
        (0, 0)
    );
    assert_eq!(walk(&fixture.store, 0, "*", 700).await, (all, vec![]));
    assert_counts(&fixture.store, fixture.pool()).await;
}

#[tokio::test]
async fn a_delivery_under_way_keeps_its_event_and_one_that_waits_is_ended_aloud() {
    let fixture = Fixture::new().await;
    let running = subscribe(&fixture.store, "chat", "live.run.x", 8).await;
    let waiting = subscribe(&fixture.store, "media", "live.wait.x", 8).await;
    let run = put(&fixture.store, Some(&running), &[event_of("live.run.x")], None)
        .await
        .expect("stored");
    let wait = put(&fixture.store, Some(&waiting), &events_of("live.wait.x", 3), Some("k"))
        .await
        .expect("stored");
    let pass = claim(&fixture.store, "one", &[&running]).await;
    assert_eq!(positions(&pass), run);
    age(&fixture, &[run[0], wait[0], wait[1]], 31).await;
    assert_eq!(
        move_all(&fixture.store).await,
        2,
        "the two that waited; not the one under way"
    );
    assert_eq!(
        fixture
            .number(&format!("SELECT count(*) FROM events WHERE seq = {}", run[0]))
            .await,
        1
    );
    // The key goes on with the row that is left.
    assert_eq!(heads(fixture.pool(), &waiting).await, vec![wait[2]]);
    assert!(broken_keys(fixture.pool()).await.is_empty());
    assert_counts(&fixture.store, fixture.pool()).await;
    settle_all(&fixture.store, "one", &pass, &delivered()).await;
    assert_eq!(move_all(&fixture.store).await, 1);
    assert_eq!(rows(&fixture, "deliveries").await, 1);
    assert_counts(&fixture.store, fixture.pool()).await;
}

#[tokio::test]
async fn sandbox_events_never_enter_the_replay_tier() {
    let fixture = Fixture::new().await;
    let all = put(&fixture.store, None, &events_of("app.demo.x", 4), None)
        .await
        .expect("stored");
    fixture
        .sql(&format!(
            "UPDATE events SET env = 'sandbox', project_id = 'prj_1' WHERE seq <= {}",
            all[1]
        ))
        .await;
    age(&fixture, &all, 31).await;
    assert_eq!(move_all(&fixture.store).await, 2);
    assert_eq!(rows(&fixture, "events").await, 2);
    let removed = fixture
        .store
        .remove_aged("sandbox", 7 * DAY_MS, Aged::FIRST)
        .await
        .expect("a batch");
    assert_eq!(
        (
            removed.events,
            rows(&fixture, "events").await,
            rows(&fixture, "events_archive").await
        ),
        (2, 0, 2)
    );
    // The floor is below the first that is left.
    let bounds = fixture.store.positions().await.expect("bounds");
    assert_eq!((bounds.floor, bounds.head), (all[1], all[3]));
}

#[tokio::test(flavor = "multi_thread")]
async fn removing_side_by_side_leaves_the_floor_at_the_first_that_is_left() {
    let fixture = Fixture::new().await;
    let all = put(&fixture.store, None, &events_of("live.floor.x", 240), None)
        .await
        .expect("stored");
    age(&fixture, &all, 400).await;
    move_all(&fixture.store).await;
    let kept = put(&fixture.store, None, &[event_of("live.floor.x")], None)
        .await
        .expect("stored");
    // Held rows split what is removed between the two.
    fixture
        .sql("UPDATE events_archive SET hold_until = now_ms() + 60000 WHERE seq % 40 = 0")
        .await;
    let stores = [Arc::clone(&fixture.store), fixture.another().await];
    let removing =
        stores.map(|store| tokio::spawn(async move { store.expire_replay(365 * DAY_MS).await.expect("a batch").rows }));
    let mut gone = 0;
    for one in removing {
        gone += one.await.expect("a task");
    }
    assert_eq!(gone, 234);
    assert_eq!(fixture.store.positions().await.expect("bounds").floor, 39);
    fixture.sql("UPDATE events_archive SET hold_until = now_ms() - 1").await;
    assert_eq!(
        fixture.store.expire_replay(365 * DAY_MS).await.expect("a batch").rows,
        6
    );
    assert_eq!(fixture.store.positions().await.expect("bounds").floor, all[239]);
    assert_eq!(walk(&fixture.store, 5, "*", 10).await, (kept, vec![(6, all[239])]));
}

#[tokio::test]
async fn a_removal_that_another_process_is_at_is_left_to_it() {
    let fixture = Fixture::new().await;
    let all = put(&fixture.store, None, &events_of("live.left.x", 2), None)
        .await
        .expect("stored");
    age(&fixture, &all, 400).await;
    let mut other = fixture.pool().begin().await.expect("a transaction");
    sqlx::query("SELECT FROM store_floor WHERE name = 'events' FOR UPDATE")
        .execute(&mut *other)
        .await
        .expect("the floor");
    assert_eq!(
        fixture
            .store
            .remove_aged("production", HOT_MS, Aged::FIRST)
            .await
            .expect("a batch")
            .events,
        0
    );
    assert_eq!(fixture.store.expire_replay(0).await.expect("a batch").rows, 0);
    other.rollback().await.expect("an end");
    assert_eq!(
        fixture
            .store
            .remove_aged("production", HOT_MS, Aged::FIRST)
            .await
            .expect("a batch")
            .events,
        2
    );
    let bounds = fixture.store.positions().await.expect("bounds");
    assert_eq!((bounds.floor, bounds.head), (all[1], all[1]));
}

#[tokio::test]
async fn an_event_in_the_replay_tier_is_known_and_a_receipt_is_forgotten_only_when_it_is_old() {
    let fixture = Fixture::new().await;
    let events = events_of("live.known.x", 2);
    let all = put(&fixture.store, None, &events, None).await.expect("stored");
    age(&fixture, &all[..1], 31).await;
    move_all(&fixture.store).await;
    let ids: Vec<&str> = events.iter().map(|event| event.event_id.as_str()).collect();
    let group = fixture.store.open_group(&ids).await.expect("a group");
    for (id, seq) in ids.iter().zip(&all) {
        let known = group.known.get(*id).expect("known");
        assert!(matches!(known, KnownEvent::Stored { position, source, .. } if position == seq && source == "live"));
    }
    drop(group);
    fixture
        .sql(&format!(
            "UPDATE idempotency_receipts SET processed_at = now_ms() - 400 * 86400000::bigint WHERE event_id = '{}'",
            ids[0]
        ))
        .await;
    let pass = fixture.store.forget_receipts(365 * DAY_MS, 0).await.expect("a pass");
    assert_eq!(
        (pass.forgotten, pass.next, rows(&fixture, "idempotency_receipts").await),
        (1, None, 1)
    );
}

#[tokio::test]
async fn a_person_resumes_from_replay_rows_that_are_theirs_alone() {
    let fixture = Fixture::new().await;
    let (me, somebody) = (id("usr"), id("usr"));
    let of = |actor: &str| {
        let mut event = event_of("live.mine.x");
        event.visibility = Visibility::Subject;
        event.actor = SubjectRef::parse_json(&format!(r#"{{"type":"user","id":"{actor}"}}"#)).expect("an actor");
        event
    };
    let (mine, other) = (of(&me), of(&somebody));
    let all = put(&fixture.store, None, &[mine, other], None).await.expect("stored");
    age(&fixture, &all, 31).await;
    move_all(&fixture.store).await;
    let topics = TopicPattern::parse_list("live.*").expect("a pattern");
    let seen = async |person: &str| {
        let request = HistoryRequest {
            after: 0,
            upto: all[1],
            topics: &topics,
            all: false,
            person: Some(person),
            public_from: i64::MAX,
            limit: 10,
            bytes: i64::MAX,
        };
        let history = fixture.store.history(&request).await.expect("history");
        history
            .events
            .iter()
            .map(|event| event.position)
            .collect::<BTreeSet<_>>()
    };
    assert_eq!(seen(&me).await, BTreeSet::from([all[0]]));
    assert_eq!(seen(&id("usr")).await, BTreeSet::new());
    fixture.sql("UPDATE events_archive SET redacted_at = 1").await;
    assert_eq!(
        seen(&me).await,
        BTreeSet::new(),
        "whose it was is not told once it is redacted"
    );
    let cursor = Cursor { epoch: 0, position: 0 };
    let bounds = fixture
        .store
        .start_bounds(Some(cursor), Some(300_000))
        .await
        .expect("bounds");
    assert_eq!(
        bounds.public_from,
        all[1] + 1,
        "the window of public events is judged across the tiers"
    );
}

#[tokio::test]
async fn a_withdrawal_of_sessions_holds_in_the_replay_tier() {
    let fixture = Fixture::new().await;
    let wire = envelope("network")
        .event_type("network.user.token_valid_after")
        .subject("user", "usr_gone")
        .payload(serde_json::json!({"valid_after": "2026-01-02T03:04:05Z"}));
    let event = crate::store_fixture::event_from(&wire);
    let all = put(&fixture.store, None, &[event], None).await.expect("stored");
    let hot = fixture.store.sessions_valid_after("usr_gone").await.expect("read");
    assert_ne!(hot, None::<Millis>);
    age(&fixture, &all, 31).await;
    assert_eq!(move_all(&fixture.store).await, 1);
    assert_eq!(fixture.store.sessions_valid_after("usr_gone").await.expect("read"), hot);
}

#[tokio::test]
async fn a_page_reads_as_little_of_a_long_replay_tier_as_of_the_hot_store() {
    let fixture = Fixture::new().await;
    fixture
        .sql(
            "INSERT INTO events_archive (id, seq, epoch, event_type, source, subject_type, subject_id, visibility, received_at, body, \
             archived_at) SELECT 'evt_' || n, n, 0, CASE WHEN n = 30000 THEN 'live.rare.x' ELSE 'chat.noise.x' END, 'live', 't', 's', \
             'public', 1, '', 1 FROM generate_series(1, 40000) n; ANALYZE events_archive",
        )
        .await;
    for cost in costs(
        fixture.pool(),
        SCAN,
        "0, 100, ARRAY['chat.%'], 10, 5000, 4194304, NULL, NULL, ARRAY[]::text[]",
    )
    .await
    {
        assert!(
            cost.rows < 10_100 && !cost.scanned.iter().any(|table| table == "events_archive"),
            "{cost:?}"
        );
        assert!(
            cost.buffers < 100,
            "a page that is full after ten rows reads no more: {cost:?}"
        );
    }
    for cost in costs(fixture.pool(), BY_TYPE, "0, 100, 'live.rare.x', 10, 4194304").await {
        assert!(
            cost.rows < 20 && cost.buffers < 60,
            "a rare type is found by its index: {cost:?}"
        );
    }
}
