//! Deliveries that an operator ends, beside claims, settles and publishes.

use std::collections::HashSet;

use openvibe_events::{
    domain::{envelope::Envelope, ids::SubscriptionId},
    store::{Outcome, ReplaySelection, SKIPPED_ERROR, Skip},
};

use sqlx::{AssertSqlSafe, PgConnection};

use crate::support::wait::{SOON, eventually};

use crate::store_fixture::{
    Fixture, FloorAlone, assert_counts, broken_keys, claim, costs, delivered, events_of, heads, positions, put,
    put_keyed, retry, settle_all,
};

const TYPE: &str = "live.stream.started";

/// Ends the deliveries of these events; answers what was found of each.
async fn skip(fixture: &Fixture, id: &SubscriptionId, events: &[Envelope]) -> Vec<Skip> {
    let ids: Vec<&str> = events.iter().map(|event| event.event_id.as_str()).collect();
    let found = fixture.store.skip(id, &ids).await.expect("a skip");
    ids.iter().map(|id| found[*id]).collect()
}

/// Status and last error of a delivery.
async fn state(fixture: &Fixture, position: i64) -> (String, i32, Option<String>) {
    sqlx::query_as("SELECT status, attempt, last_error FROM deliveries WHERE seq = $1")
        .bind(position)
        .fetch_one(fixture.pool())
        .await
        .expect("the delivery")
}

#[tokio::test]
async fn a_key_goes_on_behind_what_was_skipped() {
    let fixture = Fixture::new().await;
    let id = fixture.subscription(8).await;
    let (a, b) = (events_of(TYPE, 5), events_of(TYPE, 2));
    let at = put(&fixture.store, Some(&id), &a, Some("a")).await.expect("events");
    let beside = put(&fixture.store, Some(&id), &b, Some("b")).await.expect("events");
    assert_eq!(heads(fixture.pool(), &id).await, [at[0], beside[0]]);

    // One in the middle does not move the mark; the first, with what follows it, does.
    assert_eq!(skip(&fixture, &id, &a[2..3]).await, [Skip::Skipped]);
    assert_eq!(heads(fixture.pool(), &id).await, [at[0], beside[0]]);
    assert_eq!(skip(&fixture, &id, &a[..2]).await, [Skip::Skipped, Skip::Skipped]);
    assert_eq!(heads(fixture.pool(), &id).await, [at[3], beside[0]]);
    assert_eq!(broken_keys(fixture.pool()).await, []);
    assert_counts(&fixture.store, fixture.pool()).await;

    let pass = claim(&fixture.store, "w", &[&id]).await;
    let mut claimed = positions(&pass);
    claimed.sort_unstable();
    assert_eq!(claimed, [at[3], beside[0]], "due at once");
    settle_all(&fixture.store, "w", &pass, &delivered()).await;
    assert_eq!(skip(&fixture, &id, &a[3..4]).await, [Skip::Delivered]);

    // With the last one gone the key begins anew.
    assert_eq!(skip(&fixture, &id, &a[4..]).await, [Skip::Skipped]);
    let next = put(&fixture.store, Some(&id), &events_of(TYPE, 1), Some("a"))
        .await
        .expect("an event");
    assert_eq!(heads(fixture.pool(), &id).await, [beside[1], next[0]]);
    assert_counts(&fixture.store, fixture.pool()).await;
}

#[tokio::test]
async fn a_skip_behind_a_running_attempt_gives_its_mark_to_nobody() {
    let fixture = Fixture::new().await;
    let id = fixture.subscription(8).await;
    let events = events_of(TYPE, 3);
    let at = put(&fixture.store, Some(&id), &events, Some("k"))
        .await
        .expect("events");
    settle_all(
        &fixture.store,
        "w",
        &claim(&fixture.store, "w", &[&id]).await,
        &delivered(),
    )
    .await;
    let running = claim(&fixture.store, "w", &[&id]).await;
    let selection = ReplaySelection::Events(vec![events[0].event_id.as_str().to_owned()]);
    fixture
        .store
        .replay(&id, &selection, &FloorAlone)
        .await
        .expect("a replay");
    assert_eq!(skip(&fixture, &id, &events[2..]).await, [Skip::Skipped]);
    assert_eq!(
        heads(fixture.pool(), &id).await,
        [at[1]],
        "what was replayed waits for what runs"
    );
    settle_all(&fixture.store, "w", &running, &delivered()).await;
    assert_eq!(heads(fixture.pool(), &id).await, [at[0]]);
}

#[tokio::test]
async fn an_attempt_that_runs_is_the_last_one_and_keeps_its_key_until_it_ends() {
    let fixture = Fixture::new().await;
    for (outcome, status, error) in [
        (retry(0), "dead", Some("skipped by an operator; before that: HTTP 500")),
        (delivered(), "delivered", None),
    ] {
        let id = fixture.subscription(8).await;
        let events = events_of(TYPE, 2);
        let at = put(&fixture.store, Some(&id), &events, Some("k"))
            .await
            .expect("events");
        let pass = claim(&fixture.store, "w", &[&id]).await;
        assert_eq!(skip(&fixture, &id, &events[..1]).await, [Skip::InFlight]);
        assert_eq!(heads(fixture.pool(), &id).await, [at[0]]);
        assert!(
            claim(&fixture.store, "w", &[&id]).await.claimed.is_empty(),
            "two of a key"
        );
        settle_all(&fixture.store, "w", &pass, &outcome).await;
        assert_eq!(
            state(&fixture, at[0]).await,
            (status.to_owned(), 1, error.map(str::to_owned))
        );
        assert_eq!(heads(fixture.pool(), &id).await, [at[1]]);
        assert_counts(&fixture.store, fixture.pool()).await;
    }
}

#[tokio::test]
async fn what_ran_without_a_result_is_given_up_by_the_next_claim() {
    let fixture = Fixture::new().await;
    let id = fixture.subscription(1).await;
    let events = events_of(TYPE, 1);
    let at = put(&fixture.store, Some(&id), &events, Some("k"))
        .await
        .expect("an event");
    claim(&fixture.store, "gone", &[&id]).await;
    assert_eq!(skip(&fixture, &id, &events).await, [Skip::InFlight]);
    fixture
        .sql("UPDATE deliveries SET lease_until = 1 WHERE lease_until IS NOT NULL")
        .await;
    fixture.store.release_lost(None).await.expect("a release");
    let pass = claim(&fixture.store, "w", &[&id]).await;
    assert!(pass.claimed[0].skipped, "so that it is not sent");
    let given_up = Outcome::GivenUp {
        error: SKIPPED_ERROR.to_owned(),
    };
    settle_all(&fixture.store, "w", &pass, &given_up).await;
    assert_eq!(
        state(&fixture, at[0]).await,
        ("dead".to_owned(), 1, Some(SKIPPED_ERROR.to_owned()))
    );
    assert_counts(&fixture.store, fixture.pool()).await;
}

#[tokio::test]
async fn the_last_of_a_skip_and_a_replay_decides_about_a_running_attempt() {
    let fixture = Fixture::new().await;
    let id = fixture.subscription(1).await;
    let events = events_of(TYPE, 1);
    let at = put(&fixture.store, Some(&id), &events, None).await.expect("an event");
    let again = ReplaySelection::Events(vec![events[0].event_id.to_string()]);
    let pass = claim(&fixture.store, "w", &[&id]).await;
    skip(&fixture, &id, &events).await;
    fixture.store.replay(&id, &again, &FloorAlone).await.expect("a replay");
    settle_all(&fixture.store, "w", &pass, &retry(0)).await;
    assert_eq!(state(&fixture, at[0]).await.0, "pending", "replayed last");
    let pass = claim(&fixture.store, "w", &[&id]).await;
    assert!(!pass.claimed[0].skipped);
    settle_all(&fixture.store, "w", &pass, &retry(0)).await;
    // The result of the attempt that a skip found running is the last word, also where a replay came before it.
    let last = "skipped by an operator; before that: HTTP 500";
    for (outcome, status, error) in [(retry(0), "dead", Some(last)), (delivered(), "delivered", None)] {
        fixture.store.replay(&id, &again, &FloorAlone).await.expect("a replay");
        let pass = claim(&fixture.store, "w", &[&id]).await;
        fixture.store.replay(&id, &again, &FloorAlone).await.expect("a replay");
        assert_eq!(skip(&fixture, &id, &events).await, [Skip::InFlight]);
        settle_all(&fixture.store, "w", &pass, &outcome).await;
        assert_eq!(
            state(&fixture, at[0]).await,
            (status.to_owned(), 1, error.map(str::to_owned))
        );
    }
    assert_counts(&fixture.store, fixture.pool()).await;
}

#[tokio::test]
async fn skips_publishes_and_settles_at_once_leave_every_key_with_one_mark() {
    let fixture = Fixture::new().await;
    let id = fixture.subscription(16).await;
    let keys = ["a", "b", "c"];
    let mut made: Vec<Envelope> = Vec::new();
    for round in 0..30 {
        let events = events_of(TYPE, 9);
        let keyed: Vec<_> = events
            .iter()
            .enumerate()
            .map(|(n, event)| (event, Some(keys[n % 3])))
            .collect();
        let chosen: Vec<Envelope> = made.iter().rev().take(6).cloned().collect();
        let other = fixture.another().await;
        let settle = async {
            let pass = claim(&other, "w", &[&id]).await;
            let outcome = if round % 2 == 0 { delivered() } else { retry(0) };
            settle_all(&other, "w", &pass, &outcome).await;
        };
        let (stored, _, _) = tokio::join!(
            put_keyed(&fixture.store, Some(&id), &keyed),
            skip(&fixture, &id, &chosen),
            settle,
        );
        stored.expect("stored events");
        made.extend(events);
        assert_eq!(broken_keys(fixture.pool()).await, [], "round {round}");
        assert_counts(&fixture.store, fixture.pool()).await;
    }
    let marked: HashSet<i64> = heads(fixture.pool(), &id).await.into_iter().collect();
    assert_eq!(marked.len(), 3);
}

#[tokio::test]
async fn a_skip_in_front_of_a_long_queue_reads_a_few_rows_of_it() {
    let fixture = Fixture::new().await;
    let id = fixture.subscription(1).await;
    let at = put(&fixture.store, Some(&id), &events_of(TYPE, 1), Some("k"))
        .await
        .expect("an event");
    fixture
        .sql(&format!(
            "INSERT INTO deliveries (event_id, subscription_id, seq, priority, next_attempt_at, created_at, updated_at, \
             ordering_key, head) SELECT 'evt_' || n, '{id}', {} + n, 2, 1, 1, 1, 'k', false FROM generate_series(1, 50000) n; \
             ANALYZE deliveries",
            at[0]
        ))
        .await;
    let first = at[0];
    let chosen = format!("'{id}', ARRAY[{first}]::bigint[]");
    for (fragment, literals) in [
        ("AS ending", chosen.clone()),
        (
            "SELECT k.position AS",
            format!("{chosen}, ARRAY['k'], ARRAY[{first}]::bigint[], ARRAY[{first}]::bigint[]"),
        ),
    ] {
        for cost in costs(fixture.pool(), fragment, &literals).await {
            assert!(cost.rows < 20 && cost.scanned.is_empty(), "{fragment}: {cost:?}");
        }
    }
}

#[tokio::test]
async fn a_skip_holds_the_row_that_may_be_marked_next_also_when_that_came_while_it_waited() {
    let fixture = Fixture::new().await;
    let id = fixture.subscription(1).await;
    let events = events_of(TYPE, 2);
    let at = put(&fixture.store, Some(&id), &events[..1], Some("k"))
        .await
        .expect("an event");
    // A skip that ends a row stops here until it is let go, holding what it holds.
    fixture
        .sql(
            "CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS \
             $$ BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NEW; END $$; \
             CREATE TRIGGER hold BEFORE UPDATE ON deliveries FOR EACH ROW WHEN (NEW.status = 'dead') EXECUTE FUNCTION hold()",
        )
        .await;
    let waiting = async |what: &str| {
        let sql = format!(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' \
             AND wait_event {what} 'advisory'"
        );
        eventually("the skip waits", SOON, async || fixture.number(&sql).await == 1).await;
    };
    let mut gate = fixture.pool().acquire().await.expect("a connection");
    sql_on(&mut gate, "SELECT pg_advisory_lock(7)").await;
    let mut publish = fixture.pool().begin().await.expect("a transaction");
    let first = format!("SELECT FROM deliveries WHERE seq = {} FOR UPDATE", at[0]);
    sql_on(&mut publish, &first).await;
    let skipping = skip(&fixture, &id, &events[..1]);
    let meanwhile = async {
        waiting("<>").await;
        let behind = format!(
            "INSERT INTO deliveries (event_id, subscription_id, seq, priority, next_attempt_at, created_at, updated_at, \
             ordering_key, head) VALUES ('e', '{id}', {}, 2, 1, 1, 1, 'k', false)",
            at[0] + 1
        );
        sql_on(&mut publish, &behind).await;
        publish.commit().await.expect("a commit");
        waiting("=").await;
        let free = "WITH free AS (SELECT FROM deliveries WHERE event_id = 'e' FOR UPDATE SKIP LOCKED) SELECT count(*) FROM free";
        assert_eq!(fixture.number(free).await, 0, "another skip could end it unseen");
        sql_on(&mut gate, "SELECT pg_advisory_unlock(7)").await;
    };
    let (skipped, ()) = tokio::join!(skipping, meanwhile);
    assert_eq!(skipped, [Skip::Skipped]);
    assert_eq!(heads(fixture.pool(), &id).await, [at[0] + 1]);
}

async fn sql_on(connection: &mut PgConnection, statement: &str) {
    sqlx::raw_sql(AssertSqlSafe(statement))
        .execute(connection)
        .await
        .unwrap_or_else(|error| panic!("{statement}: {error}"));
}
