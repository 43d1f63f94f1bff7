//! Leases: a claim ends with its time or its owner, and a result counts only for the claim that made it.

use std::sync::Arc;

use openvibe_events::{
    domain::ids::SubscriptionId,
    store::{Heartbeat, Outcome, ReplaySelection, Settlement, SharedStore},
};

use crate::store_fixture::{
    Fixture, FloorAlone, assert_counts, candidate, claim, claim_with, dead, delivered, ending, events_of, positions,
    put, retry, settle_all,
};

/// Everything about a row that a lost claim must not change.
async fn row(fixture: &Fixture, position: i64) -> (String, i32, Option<i64>, Option<i64>, Option<i32>, Option<String>) {
    sqlx::query_as(
        "SELECT status, attempt, next_attempt_at, claim_id, last_status, last_error FROM deliveries WHERE seq = $1",
    )
    .bind(position)
    .fetch_one(fixture.pool())
    .await
    .expect("the row")
}

async fn one_row(fixture: &Fixture) -> (SharedStore, SubscriptionId, i64) {
    let id = fixture.subscription(1).await;
    let at = put(&fixture.store, Some(&id), &events_of("live.a.b", 1), None)
        .await
        .expect("a group");
    (Arc::clone(&fixture.store), id, at[0])
}

async fn replay_everything(store: &SharedStore, id: &SubscriptionId) {
    let replayed = store
        .replay(id, &ReplaySelection::FromPosition(0), &FloorAlone)
        .await
        .expect("a replay");
    assert!(replayed.expect("a subscription").queued > 0);
}

#[tokio::test]
async fn a_lease_that_ran_out_is_released_and_its_attempt_counts() {
    let fixture = Fixture::new().await;
    let (store, id, _) = one_row(&fixture).await;
    claim_with(&store, "gone", 0, &[candidate(&id)]).await;
    assert!(
        claim(&store, "w", &[&id]).await.claimed.is_empty(),
        "until it is released it counts for the cap"
    );
    let released = store.release_lost(None).await.expect("a release");
    assert_eq!(
        (released.claims, released.subscriptions.as_slice()),
        (1, std::slice::from_ref(&id))
    );
    let pass = claim(&store, "w", &[&id]).await;
    assert_eq!(pass.claimed[0].attempt, 2);
    assert_counts(&store, fixture.pool()).await;
}

/// The heartbeat of an owner that has just renewed.
async fn alive(store: &SharedStore, owner: &str) -> Heartbeat {
    let mut heartbeat = store.heartbeat().await.expect("a heartbeat");
    heartbeat
        .renew(owner)
        .await
        .expect("a renewal")
        .expect("an owner that lives");
    heartbeat
}

#[tokio::test]
async fn a_lease_in_its_time_whose_owner_lives_stays() {
    let fixture = Fixture::new().await;
    let (store, id, _) = one_row(&fixture).await;
    let (_worker, _judge) = (alive(&store, "w").await, alive(&store, "judge").await);
    let pass = claim(&store, "w", &[&id]).await;
    for judge in [None, Some("judge"), Some("w")] {
        assert!(
            store
                .release_lost(judge)
                .await
                .expect("a release")
                .subscriptions
                .is_empty()
        );
    }
    settle_all(&store, "w", &pass, &delivered()).await;
}

#[tokio::test]
async fn a_dead_owners_lease_is_released_by_a_judge_that_lives_itself() {
    let fixture = Fixture::new().await;
    let (store, id, _) = one_row(&fixture).await;
    let _worker = alive(&store, "w").await;
    claim(&store, "w", &[&id]).await;
    fixture.sql("UPDATE workers SET alive_until = now_ms() - 1").await;
    for judge in [None, Some("w"), Some("nobody")] {
        assert!(
            store
                .release_lost(judge)
                .await
                .expect("a release")
                .subscriptions
                .is_empty(),
            "{judge:?} may not judge"
        );
    }
    let _judge = alive(&store, "judge").await;
    assert_eq!(
        store
            .release_lost(Some("judge"))
            .await
            .expect("a release")
            .subscriptions,
        std::slice::from_ref(&id)
    );
}

#[tokio::test]
async fn an_owner_that_was_dead_once_stays_dead() {
    let fixture = Fixture::new().await;
    let mut heartbeat = alive(&fixture.store, "w").await;
    fixture.sql("UPDATE workers SET alive_until = now_ms() - 1").await;
    for _ in 0..2 {
        assert_eq!(heartbeat.renew("w").await.expect("an answer"), None);
    }
    let living = "SELECT count(*) FROM workers WHERE alive_until > now_ms()";
    assert_eq!(fixture.number(living).await, 0);
}

#[tokio::test]
async fn an_owner_that_says_goodbye_is_not_waited_for() {
    let fixture = Fixture::new().await;
    let (store, id, _) = one_row(&fixture).await;
    let (worker, _judge) = (alive(&store, "w").await, alive(&store, "judge").await);
    claim(&store, "w", &[&id]).await;
    worker.end("w").await.expect("a goodbye");
    assert_eq!(
        store
            .release_lost(Some("judge"))
            .await
            .expect("a release")
            .subscriptions,
        std::slice::from_ref(&id)
    );
}

#[tokio::test]
async fn a_renewal_gives_four_seconds_tells_the_version_and_removes_who_died_a_minute_ago() {
    let fixture = Fixture::new().await;
    fixture
        .sql("INSERT INTO workers VALUES ('old', now_ms() - 61000), ('late', now_ms() - 5000)")
        .await;
    let mut heartbeat = fixture.store.heartbeat().await.expect("a heartbeat");
    let version = heartbeat.renew("w").await.expect("a renewal");
    let version = version.expect("an owner that lives");
    assert_eq!(version, fixture.number("SELECT version FROM store_counter").await);
    let owners: Vec<String> = sqlx::query_scalar("SELECT owner FROM workers ORDER BY owner")
        .fetch_all(fixture.pool())
        .await
        .expect("the owners");
    assert_eq!(owners, ["late", "w"]);
    let left = fixture
        .number("SELECT alive_until - now_ms() FROM workers WHERE owner = 'w'")
        .await;
    assert!((3_000..=4_000).contains(&left), "{left} ms");
}

#[tokio::test]
async fn a_result_of_a_lost_claim_changes_nothing_and_is_named() {
    let fixture = Fixture::new().await;
    let (store, id, at) = one_row(&fixture).await;
    let slow = claim_with(&store, "slow", 0, &[candidate(&id)]).await;
    store.release_lost(None).await.expect("a release");
    let late = |outcome| ending(&slow.claimed[0], outcome);
    let before = row(&fixture, at).await;
    for outcome in [delivered(), dead(), retry(0), Outcome::Unsent] {
        let lost = store.settle("slow", &[late(outcome)]).await.expect("a settle");
        assert_eq!(lost.into_iter().collect::<Vec<_>>(), [slow.claimed[0].claim_id]);
        assert_eq!(row(&fixture, at).await, before, "while nobody holds the row");
    }
    let fast = claim(&store, "fast", &[&id]).await;
    let before = row(&fixture, at).await;
    for owner in ["slow", "fast"] {
        let lost = store.settle(owner, &[late(delivered())]).await.expect("a settle");
        assert_eq!(lost.len(), 1);
        assert_eq!(row(&fixture, at).await, before, "while another holds the row");
    }
    settle_all(&store, "fast", &fast, &delivered()).await;
    let before = row(&fixture, at).await;
    assert_eq!(store.settle("slow", &[late(dead())]).await.expect("a settle").len(), 1);
    assert_eq!(row(&fixture, at).await, before, "a final state stays final");
    assert_counts(&store, fixture.pool()).await;
}

#[tokio::test]
async fn a_result_must_name_its_own_claim_and_owner() {
    let fixture = Fixture::new().await;
    let (store, id, at) = one_row(&fixture).await;
    let pass = claim(&store, "w", &[&id]).await;
    let good = ending(&pass.claimed[0], delivered());
    let before = row(&fixture, at).await;
    let stranger = store.settle("x", std::slice::from_ref(&good)).await.expect("a settle");
    assert_eq!(stranger.len(), 1);
    let other_claim = Settlement {
        claim_id: good.claim_id + 1,
        ..good.clone()
    };
    assert_eq!(store.settle("w", &[other_claim]).await.expect("a settle").len(), 1);
    assert_eq!(row(&fixture, at).await, before);
    assert!(store.settle("w", &[good]).await.expect("a settle").is_empty());
}

#[tokio::test]
async fn a_lost_claim_does_not_hold_back_the_results_beside_it() {
    let fixture = Fixture::new().await;
    let (store, id) = (&fixture.store, fixture.subscription(2).await);
    put(store, Some(&id), &events_of("live.a.b", 2), None)
        .await
        .expect("a group");
    let pass = claim(store, "w", &[&id]).await;
    fixture
        .sql(&format!(
            "UPDATE deliveries SET lease_until = 1 WHERE seq = {}",
            pass.claimed[0].position
        ))
        .await;
    store.release_lost(None).await.expect("a release");
    let endings: Vec<Settlement> = pass
        .claimed
        .iter()
        .map(|claimed| ending(claimed, delivered()))
        .collect();
    let lost = store.settle("w", &endings).await.expect("a settle");
    assert_eq!(lost.into_iter().collect::<Vec<_>>(), [pass.claimed[0].claim_id]);
    assert_eq!(row(&fixture, pass.claimed[1].position).await.0, "delivered");
    assert_counts(store, fixture.pool()).await;
}

#[tokio::test]
async fn an_attempt_that_never_left_is_given_back() {
    let fixture = Fixture::new().await;
    let (store, id, at) = one_row(&fixture).await;
    settle_all(&store, "w", &claim(&store, "w", &[&id]).await, &retry(0)).await;
    let before = row(&fixture, at).await;
    settle_all(&store, "w", &claim(&store, "w", &[&id]).await, &Outcome::Unsent).await;
    let after = row(&fixture, at).await;
    assert_eq!(
        (&after.0, after.1, after.4, &after.5),
        (&before.0, 1, before.4, &before.5),
        "as if it had not been claimed"
    );
    assert_eq!(
        claim(&store, "w", &[&id]).await.claimed[0].attempt,
        2,
        "and is due at once"
    );
}

#[tokio::test]
async fn a_row_replayed_while_it_runs_starts_anew_whatever_that_attempt_says() {
    for outcome in [delivered(), dead(), retry(60_000), Outcome::Unsent] {
        let fixture = Fixture::new().await;
        let (store, id, at) = one_row(&fixture).await;
        settle_all(&store, "w", &claim(&store, "w", &[&id]).await, &retry(0)).await;
        let running = claim(&store, "w", &[&id]).await;
        replay_everything(&store, &id).await;
        assert!(
            claim(&store, "x", &[&id]).await.claimed.is_empty(),
            "the attempt in flight is respected"
        );
        settle_all(&store, "w", &running, &outcome).await;
        let (status, attempt, _, claim_id, last_status, last_error) = row(&fixture, at).await;
        assert_eq!(
            (status.as_str(), attempt, claim_id, last_status, last_error),
            ("pending", 0, None, None, None),
            "{outcome:?}"
        );
        assert_counts(&store, fixture.pool()).await;
        assert_eq!(claim(&store, "w", &[&id]).await.claimed[0].attempt, 1, "due at once");
    }
}

#[tokio::test]
async fn a_row_replayed_while_it_runs_starts_anew_when_its_owner_dies() {
    let fixture = Fixture::new().await;
    let (store, id, at) = one_row(&fixture).await;
    settle_all(&store, "w", &claim(&store, "w", &[&id]).await, &retry(0)).await;
    claim_with(&store, "gone", 0, &[candidate(&id)]).await;
    replay_everything(&store, &id).await;
    store.release_lost(None).await.expect("a release");
    let (status, attempt, ..) = row(&fixture, at).await;
    assert_eq!((status.as_str(), attempt), ("pending", 0));
    assert_counts(&store, fixture.pool()).await;
}

#[tokio::test]
async fn a_replay_makes_deliveries_for_events_from_before_the_subscription_once() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    let at = put(store, None, &events_of("live.a.b", 3), None)
        .await
        .expect("a group");
    let id = fixture.subscription(64).await;
    for _ in 0..2 {
        replay_everything(store, &id).await;
    }
    assert_eq!(positions(&claim(store, "w", &[&id]).await), at);
    assert_counts(store, fixture.pool()).await;
}

#[tokio::test]
async fn an_error_that_no_column_can_hold_does_not_lose_the_result() {
    let fixture = Fixture::new().await;
    let (store, id, at) = one_row(&fixture).await;
    let error = format!("a\0b{}", "é".repeat(2_000));
    let outcome = Outcome::Retry {
        status: None,
        error,
        wait_ms: 0,
    };
    settle_all(&store, "w", &claim(&store, "w", &[&id]).await, &outcome).await;
    let kept = row(&fixture, at).await.5.expect("an error");
    assert!(kept.starts_with("abé") && kept.chars().count() == 500, "{kept}");
}

#[tokio::test(flavor = "multi_thread")]
async fn kept_counts_are_what_counting_gives_after_two_processes_did_everything_at_once() {
    let fixture = Fixture::new().await;
    let stores = [Arc::clone(&fixture.store), fixture.another().await];
    let id = fixture.subscription(64).await;
    let work = stores.iter().enumerate().map(|(process, store)| {
        let (store, id) = (Arc::clone(store), id.clone());
        tokio::spawn(async move {
            let owner = format!("w{process}");
            for round in 0..40 {
                put(&store, Some(&id), &events_of("live.a.b", 4), None)
                    .await
                    .expect("a group");
                let lease_ms = if round % 5 == 0 { 0 } else { 60_000 };
                let pass = claim_with(&store, &owner, lease_ms, &[candidate(&id)]).await;
                let outcome = [delivered(), dead(), retry(0), Outcome::Unsent][round % 4].clone();
                let endings: Vec<Settlement> = pass.claimed.iter().map(|one| ending(one, outcome.clone())).collect();
                store.release_lost(None).await.expect("a release");
                if round % 7 == 0 {
                    replay_everything(&store, &id).await;
                }
                store.settle(&owner, &endings).await.expect("a settle");
                store.fold_counts().await.expect("a fold");
            }
        })
    });
    for ended in futures_util::future::join_all(work.collect::<Vec<_>>()).await {
        ended.expect("the work");
    }
    assert_counts(&stores[1], fixture.pool()).await;
    fixture.sql("UPDATE delivery_counts SET period = period - 5").await;
    let (one, two) = tokio::join!(stores[0].fold_counts(), stores[1].fold_counts());
    one.and(two).expect("two folds at once");
    stores[0].fold_counts().await.expect("a fold");
    assert_eq!(
        fixture.number("SELECT count(*) FROM delivery_counts").await,
        1,
        "ended periods become one row"
    );
    assert_counts(&stores[1], fixture.pool()).await;
}
