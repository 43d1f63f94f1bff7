//! A snapshot that somebody holds for long (`pg_dump`, a report): dead row versions stay, and claims must not pay for them.

use openvibe_events::{domain::ids::SubscriptionId, store::Candidate};

use crate::store_fixture::{
    CLAIM, Cost, Fixture, claim_literals, claim_with, costs, delivered, events_of, put, settle_all,
};

/// Deliveries before the first look.
const DELIVERIES: usize = 500;

/// Publishes and delivers so many events, from a frontier that moves on as a dispatcher's does; answers where it ends.
async fn carry(fixture: &Fixture, id: &SubscriptionId, mut frontier: i64, lease_ms: i64, events: usize) -> i64 {
    let mut left = events;
    while left > 0 {
        let count = left.min(100);
        left -= count;
        put(&fixture.store, Some(id), &events_of("live.a.b", count), None)
            .await
            .expect("a group");
        let mut open = count;
        while open > 0 {
            let candidate = Candidate {
                id: id.clone(),
                frontier: [frontier; 3],
                room: i64::MAX,
                consumer_room: 1_000,
            };
            let pass = claim_with(&fixture.store, "w", lease_ms, &[candidate]).await;
            assert!(!pass.claimed.is_empty(), "{open} are left");
            open -= pass.claimed.len();
            frontier = pass
                .claimed
                .iter()
                .map(|claimed| claimed.due_at.0)
                .max()
                .expect("a claim");
            settle_all(&fixture.store, "w", &pass, &delivered()).await;
        }
    }
    frontier
}

/// What a claim costs that finds nothing.
async fn price(fixture: &Fixture, id: &SubscriptionId, frontier: i64) -> Cost {
    let [custom, _] = costs(fixture.pool(), CLAIM, &claim_literals(&[id], frontier)).await;
    custom
}

/// What a claim costs after so many deliveries, and after six times as many, all under one snapshot.
async fn grows(lease_ms: i64) -> (i64, i64) {
    let fixture = Fixture::new().await;
    let id = fixture.subscription(16).await;
    let mut snapshot = fixture
        .pool()
        .begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ")
        .await
        .expect("a transaction");
    sqlx::query("SELECT FROM events LIMIT 1")
        .execute(&mut *snapshot)
        .await
        .expect("a snapshot");
    let early = carry(&fixture, &id, 0, lease_ms, DELIVERIES).await;
    let before = price(&fixture, &id, early).await;
    let late = carry(&fixture, &id, early, lease_ms, 5 * DELIVERIES).await;
    let after = price(&fixture, &id, late).await;
    snapshot.rollback().await.expect("it was held to the end");
    assert!(after.scanned.is_empty(), "{after:?}");
    (before.buffers, after.buffers)
}

#[tokio::test]
async fn a_snapshot_that_is_held_makes_no_claim_dearer_than_the_leases_of_its_last_seconds() {
    let ((before, after), (recent, most)) = tokio::join!(grows(1), grows(40_000));
    // Finished deliveries lie behind the frontier; their leases have ended and are not counted.
    assert!(after < before + 40, "{before} pages, then {after}");
    // A lease that was in force until a moment ago is passed over in the index, where hundreds share a page.
    let allowed = 5 * i64::try_from(DELIVERIES).expect("a small number") / 8;
    assert!(most < recent + allowed, "{recent} pages, then {most}");
}
