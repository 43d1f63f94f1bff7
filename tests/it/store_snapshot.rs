//! A snapshot that somebody holds for long (`pg_dump`, a report): dead row versions stay, and neither a publish nor a claim
//! nor a settle may pay for them.

use openvibe_events::{
    domain::ids::SubscriptionId,
    store::{Candidate, Claim, Claimed, Settlement},
};

use crate::store_fixture::{CLAIM, Fixture, LEASE_MS, costs, delivered, ending, events_of, put};

const OWNER: &str = "w";
const PUBLISH: &str = "FROM publish_group(";

/// One process that publishes and delivers for one subscription and key, and remembers what a dispatcher remembers.
struct Work<'a> {
    fixture: &'a Fixture,
    id: SubscriptionId,
    key: Option<&'static str>,
    frontier: i64,
    claims_from: i64,
}

impl Work<'_> {
    async fn publish(&self, events: usize) {
        let events = events_of("live.a.b", events);
        put(&self.fixture.store, Some(&self.id), &events, self.key)
            .await
            .expect("a group");
    }

    /// Records what has ended and claims.
    async fn turn(&mut self, ended: &[Claimed]) -> Vec<Claimed> {
        let endings: Vec<Settlement> = ended.iter().map(|claimed| ending(claimed, delivered())).collect();
        let wanted = Claim {
            owner: OWNER,
            lease_ms: LEASE_MS,
            room: 1_000,
            inflight_default: 1,
        };
        let candidate = Candidate {
            id: self.id.clone(),
            frontier: [self.frontier; 3],
            claims_from: self.claims_from,
            room: 1_000,
            consumer_room: 1_000,
        };
        let turn = self
            .fixture
            .store
            .settle_and_claim(&endings, &wanted, &[candidate])
            .await;
        let (lost, pass) = turn.expect("a turn").expect("marks that nobody else moves");
        assert!(lost.is_empty());
        self.claims_from = pass.counted[0].claims_from;
        let due = pass.claimed.iter().map(|claimed| claimed.due_at.0).max();
        self.frontier = due.unwrap_or(self.frontier);
        pass.claimed
    }

    /// Publishes and delivers so many events, in groups.
    async fn carry(&mut self, events: usize, group: usize) {
        for _ in 0..events / group {
            self.publish(group).await;
            let (mut running, mut carried) = (self.turn(&[]).await, 0);
            while !running.is_empty() {
                carried += running.len();
                running = self.turn(&running).await;
            }
            assert_eq!(carried, group);
        }
    }

    /// Pages that a statement looks at.
    async fn price(&self, statement: &str, literals: &str) -> i64 {
        let [_, generic] = costs(self.fixture.pool(), statement, literals).await;
        assert!(generic.scanned.is_empty(), "{generic:?}");
        generic.buffers
    }

    async fn price_of_publish(&self) -> i64 {
        let version = self.fixture.store.view().version;
        let (id, key) = (&self.id, self.key.map_or("NULL".to_owned(), |key| format!("'{key}'")));
        let literals = format!(
            "{version}, 4, ARRAY[NULL], ARRAY['evt_price'], ARRAY['live.a.b'], ARRAY[1], ARRAY['live'], ARRAY['live'], \
             ARRAY[NULL], ARRAY['thing'], ARRAY['1'], ARRAY[NULL]::bigint[], ARRAY['trace'], ARRAY['important'], \
             ARRAY['internal'], ARRAY['2026-10-21T08:15:30Z'], ARRAY['{{}}'], ARRAY['svc:live'], ARRAY['req_1'], ARRAY[1], \
             ARRAY[]::text[], ARRAY[]::text[], ARRAY['production', 'sandbox'], ARRAY[120, 30], ARRAY[NULL, NULL]::bigint[], \
             ARRAY[1], ARRAY['{id}'], ARRAY[{key}]::text[], ARRAY[true], ARRAY[false], ARRAY['pg-v1'], \
             ARRAY[NULL]::bigint[], 'w', 'publish', 10000"
        );
        self.price(PUBLISH, &literals).await
    }

    async fn price_of_turn(&self, ended: &[Claimed]) -> i64 {
        let list = |of: fn(&Claimed) -> String| ended.iter().map(of).collect::<Vec<_>>().join(", ");
        let each = |value: &str| vec![value; ended.len()].join(", ");
        let literals = format!(
            "'{OWNER}', ARRAY[{}]::text[], ARRAY[{}]::bigint[], ARRAY[{}]::bigint[], ARRAY[{}]::text[], ARRAY[{}]::int[], \
             ARRAY[{}]::text[], ARRAY[{}]::bigint[], '', NULL, 'w', 'settle', 10000, ARRAY['{}'], ARRAY[{}::bigint], \
             ARRAY[{}::bigint], ARRAY[{}::bigint], ARRAY[{}::bigint], ARRAY[100], ARRAY[100], 100, {LEASE_MS}, 1",
            list(|claimed| format!("'{}'", claimed.subscription_id)),
            list(|claimed| claimed.position.to_string()),
            list(|claimed| claimed.claim_id.to_string()),
            each("'delivered'"),
            each("204"),
            each("NULL"),
            each("0"),
            self.id,
            self.frontier,
            self.frontier,
            self.frontier,
            self.claims_from,
        );
        self.price(CLAIM, &literals).await
    }

    /// What everything costs that is done all the time; nothing is left.
    async fn prices(&mut self) -> Vec<(&'static str, i64)> {
        let mut prices = vec![("a publish", self.price_of_publish().await)];
        self.publish(2).await;
        let mut running = self.turn(&[]).await;
        prices.push(("a publish behind others", self.price_of_publish().await));
        while !running.is_empty() {
            prices.push(("a turn", self.price_of_turn(&running).await));
            running = self.turn(&running).await;
        }
        prices.push(("a claim", self.price_of_turn(&[]).await));
        prices
    }
}

/// Under one snapshot: fails where anything costs more after `late` deliveries than after `early` ones.
async fn costs_the_same(key: Option<&'static str>, group: usize, early: usize, late: usize) {
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
    let mut work = Work {
        fixture: &fixture,
        id,
        key,
        frontier: 0,
        claims_from: 0,
    };
    work.carry(early, group).await;
    let before = work.prices().await;
    work.carry(late, group).await;
    let after = work.prices().await;
    snapshot.rollback().await.expect("it was held to the end");
    assert_eq!(before.len(), after.len());
    for ((what, before), (_, after)) in before.iter().zip(&after) {
        assert!(after < &(before + 60), "{key:?}, {what}: {before} pages, then {after}");
    }
}

#[tokio::test]
async fn a_snapshot_that_is_held_makes_nothing_dearer_without_keys() {
    costs_the_same(None, 16, 480, 6_400).await;
}

#[tokio::test]
async fn a_snapshot_that_is_held_makes_nothing_dearer_for_a_key_that_keeps_up() {
    costs_the_same(Some("k"), 1, 100, 500).await;
}

#[tokio::test]
async fn a_snapshot_that_is_held_makes_nothing_dearer_for_a_key_with_a_backlog() {
    costs_the_same(Some("k"), 100, 200, 800).await;
}
