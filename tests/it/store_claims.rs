//! Claims: caps hold across processes, the order is urgency, and the price does not grow with what may not run.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use openvibe_events::{
    domain::{app::Holder, envelope::Envelope, ids::SubscriptionId},
    store::{Addresses, Candidate, Claim, Store, Switch},
};

use crate::{
    store_fixture::{
        CLAIM, Cost, Fixture, LEASE_MS, assert_counts, candidate, claim, claim_literals, claim_with, costs, delivered,
        event_from, event_of, events_of, positions, put, retry, settle_all, sql, subscribe,
    },
    support::envelopes::envelope,
};

const DUE: &str = "FROM (VALUES (0, c.critical)";
const RELEASE: &str = "WITH lost AS (";

/// What `DUE` takes for one subscription.
fn due_literals(id: &SubscriptionId) -> String {
    format!("ARRAY['{id}'], ARRAY[0]::bigint[], ARRAY[0]::bigint[], ARRAY[0]::bigint[]")
}

/// A backlog made in bulk; `columns` names and fills `head`, `ordering_key` and the like.
async fn backlog(fixture: &Fixture, id: &SubscriptionId, rows: i64, columns: (&str, &str)) {
    let (names, values) = columns;
    fixture
        .sql(&format!(
            "INSERT INTO deliveries (event_id, subscription_id, seq, priority, next_attempt_at, created_at, updated_at, {names}) \
             SELECT 'evt_' || n, '{id}', n, 1, n, 1, 1, {values} FROM generate_series(1, {rows}) n"
        ))
        .await;
}

fn prioritized(priority: &str) -> Envelope {
    event_from(&envelope("live").priority(priority))
}

/// Eight workers of two processes fight over one subscription for a while; answers the most that ran at once.
async fn fight(cap: i32) -> i64 {
    const CLAIMS: i64 = 200;

    let fixture = Fixture::new().await;
    let stores = [Arc::clone(&fixture.store), fixture.another().await];
    let id = fixture.subscription(cap).await;
    for _ in 0..6 {
        put(&fixture.store, Some(&id), &events_of("live.a.b", 250), None)
            .await
            .expect("a group");
    }
    let (running, peak, done) = (
        Arc::new(AtomicI64::new(0)),
        Arc::new(AtomicI64::new(0)),
        Arc::new(AtomicI64::new(0)),
    );
    let until = Instant::now() + Duration::from_secs(15);
    let workers = (0..8).map(|worker| {
        let (store, id) = (Arc::clone(&stores[worker % 2]), id.clone());
        let (running, peak, done) = (Arc::clone(&running), Arc::clone(&peak), Arc::clone(&done));
        tokio::spawn(async move {
            let owner = format!("w{worker}");
            while done.load(SeqCst) < CLAIMS && Instant::now() < until {
                let pass = claim(&store, &owner, &[&id]).await;
                let count = i64::try_from(pass.claimed.len()).expect("few");
                peak.fetch_max(running.fetch_add(count, SeqCst) + count, SeqCst);
                // The attempt takes a while, as long as another worker needs to make the mistake.
                store.ping().await.expect("a ping");
                // Noted before the settle: a claim that only that settle allows is never counted on top.
                running.fetch_sub(count, SeqCst);
                if count > 0 {
                    done.fetch_add(count, SeqCst);
                    settle_all(&store, &owner, &pass, &delivered()).await;
                }
            }
        })
    });
    for ended in join_all(workers.collect::<Vec<_>>()).await {
        ended.expect("a worker");
    }
    assert!(done.load(SeqCst) >= CLAIMS, "{} claims are no fight", done.load(SeqCst));
    let twice = "SELECT count(*) FROM deliveries WHERE attempt > 1";
    assert_eq!(fixture.number(twice).await, 0, "each row was claimed once");
    assert_counts(&fixture.store, fixture.pool()).await;
    peak.load(SeqCst)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cap_of_one_holds_under_eight_workers_of_two_processes() {
    assert_eq!(fight(1).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subscriptions_own_cap_is_used_and_never_exceeded() {
    assert_eq!(fight(3).await, 3);
}

#[tokio::test]
async fn a_claim_counts_what_was_claimed_while_it_waited_for_nothing() {
    let fixture = Fixture::new().await;
    let id = fixture.subscription(2).await;
    put(&fixture.store, Some(&id), &events_of("live.a.b", 5), None)
        .await
        .expect("a group");
    assert_eq!(claim(&fixture.store, "w", &[&id]).await.claimed.len(), 2);
    let full = claim(&fixture.store, "w", &[&id]).await;
    assert!(full.claimed.is_empty());
    assert_eq!((&full.counted[0].id, full.counted[0].free), (&id, 0));
    fixture.sql("UPDATE subscriptions SET max_inflight = 3").await;
    assert_eq!(
        claim(&fixture.store, "x", &[&id]).await.claimed.len(),
        1,
        "a raised cap holds at once"
    );
}

#[tokio::test]
async fn urgent_rows_are_claimed_first_then_those_due_first_then_those_stored_first() {
    let fixture = Fixture::new().await;
    let id = fixture.subscription(64).await;
    let priorities = ["low", "important", "critical", "important", "low", "critical"];
    let events: Vec<Envelope> = priorities.into_iter().map(prioritized).collect();
    let at = put(&fixture.store, Some(&id), &events, None).await.expect("a group");
    fixture
        .sql(&format!(
            "UPDATE deliveries SET next_attempt_at = 7 WHERE seq IN ({}, {})",
            at[3], at[5]
        ))
        .await;
    let pass = claim(&fixture.store, "w", &[&id]).await;
    assert_eq!(positions(&pass), [at[5], at[2], at[3], at[1], at[0], at[4]]);
    assert!(pass.claimed.iter().all(|claimed| claimed.attempt == 1));
}

/// Notes with which durability each claim commits: the last that its transaction said.
const NOTE_DURABILITY: &str = "
    CREATE TABLE noted (at_most_once boolean, setting text);
    CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO noted VALUES (NEW.at_most_once, current_setting('synchronous_commit'));
        RETURN NULL;
    END $$;
    CREATE CONSTRAINT TRIGGER note AFTER UPDATE ON deliveries DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (NEW.claim_id IS NOT NULL AND NEW.claim_id IS DISTINCT FROM OLD.claim_id) EXECUTE FUNCTION note()";

#[tokio::test]
async fn a_claim_that_may_leave_once_only_is_on_the_disk_before_it_is_sent_and_others_do_not_wait_for_it() {
    let fixture = Fixture::new().await;
    fixture.sql(NOTE_DURABILITY).await;
    // A pooler is assumed where the two differ: there the transaction is spelt out.
    let apart = format!("{}?application_name=apart", fixture.url());
    let addresses = Addresses::parse(fixture.url(), &apart).expect("the URL of a test database");
    let pooled = Store::connect(addresses).await.expect("a store");
    for store in [&*fixture.store, &pooled] {
        let (once, again) = (fixture.subscription(1).await, fixture.subscription(1).await);
        for id in [&once, &again] {
            put(store, Some(id), &events_of("live.a.b", 3), None)
                .await
                .expect("a group");
        }
        fixture
            .sql(&format!(
                "UPDATE deliveries SET at_most_once = true WHERE subscription_id = '{once}'"
            ))
            .await;
        // On one connection in turn, so that none of them is left with what the one before said.
        for (ids, durability) in [
            (vec![&again], vec![(false, "off")]),
            (vec![&once], vec![(true, "on")]),
            (vec![&again], vec![(false, "off")]),
            (vec![&again, &once], vec![(false, "on"), (true, "on")]),
        ] {
            let pass = claim(store, "w", &ids).await;
            let noted: Vec<(bool, String)> = sqlx::query_as("DELETE FROM noted RETURNING at_most_once, setting")
                .fetch_all(fixture.pool())
                .await
                .expect("what was noted");
            let mut noted: Vec<(bool, &str)> = noted.iter().map(|(once, setting)| (*once, &**setting)).collect();
            noted.sort_unstable();
            assert_eq!(noted, durability, "{ids:?}");
            settle_all(store, "w", &pass, &delivered()).await;
        }
    }
}

#[tokio::test]
async fn a_waiting_retry_is_not_due() {
    let fixture = Fixture::new().await;
    let (store, id) = (&fixture.store, fixture.subscription(1).await);
    put(store, Some(&id), &events_of("live.a.b", 1), None)
        .await
        .expect("a group");
    assert_eq!(
        store.due(&[candidate(&id)]).await.expect("what is due"),
        std::slice::from_ref(&id)
    );
    settle_all(store, "w", &claim(store, "w", &[&id]).await, &retry(60_000)).await;
    assert!(store.due(&[candidate(&id)]).await.expect("what is due").is_empty());
    assert!(claim(store, "w", &[&id]).await.claimed.is_empty());
}

#[tokio::test]
async fn a_consumers_share_bounds_all_of_its_subscriptions_together() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    let (one, two) = (
        subscribe(store, "chat", "*", 64).await,
        subscribe(store, "chat", "live.*", 64).await,
    );
    let other = subscribe(store, "live", "*", 64).await;
    for id in [&one, &two, &other] {
        put(store, Some(id), &events_of("live.a.b", 10), None)
            .await
            .expect("a group");
    }
    let shares = [(&one, 4), (&two, 4), (&other, 100)];
    let candidates = shares.map(|(id, consumer_room)| Candidate {
        consumer_room,
        ..candidate(id)
    });
    let pass = claim_with(store, "w", LEASE_MS, &candidates).await;
    let of = |consumer: &str| {
        pass.claimed
            .iter()
            .filter(|claimed| claimed.consumer == consumer)
            .count()
    };
    assert_eq!((of("chat"), of("live")), (4, 10));
}

#[tokio::test]
async fn the_room_of_a_process_is_shared_between_consumers() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    let (busy, quiet) = (
        subscribe(store, "chat", "*", 64).await,
        subscribe(store, "live", "*", 64).await,
    );
    put(store, Some(&busy), &events_of("live.a.b", 50), None)
        .await
        .expect("a group");
    put(store, Some(&quiet), &events_of("live.a.b", 2), None)
        .await
        .expect("a group");
    let wanted = Claim {
        owner: "w",
        lease_ms: LEASE_MS,
        room: 6,
        inflight_default: 1,
    };
    let pass = store
        .claim(&wanted, &[candidate(&busy), candidate(&quiet)])
        .await
        .expect("a claim");
    let of = |consumer: &str| {
        pass.claimed
            .iter()
            .filter(|claimed| claimed.consumer == consumer)
            .count()
    };
    assert_eq!(
        (of("chat"), of("live")),
        (4, 2),
        "a backlog in front does not take the room of others"
    );

    // A single slot goes to the consumer that holds less, however long the other has waited.
    let one = Claim { room: 1, ..wanted };
    let with_room = |id, consumer_room| Candidate {
        consumer_room,
        ..candidate(id)
    };
    put(store, Some(&quiet), &events_of("live.a.b", 2), None)
        .await
        .expect("a group");
    let pass = store
        .claim(&one, &[with_room(&busy, 2), with_room(&quiet, 4)])
        .await
        .expect("a claim");
    assert_eq!(pass.claimed.len(), 1);
    assert_eq!(pass.claimed[0].consumer, "live");
}

#[tokio::test]
async fn a_count_of_what_is_in_flight_may_start_where_the_one_before_found_the_oldest() {
    let fixture = Fixture::new().await;
    let stores = [Arc::clone(&fixture.store), fixture.another().await];
    let id = fixture.subscription(3).await;
    put(&stores[0], Some(&id), &events_of("live.a.b", 20), None)
        .await
        .expect("a group");
    let (mut claims_from, mut last) = (0, 0);
    for turn in 0..4 {
        let (store, owner) = (&stores[turn % 2], format!("w{turn}"));
        let from = Candidate {
            claims_from,
            room: 1,
            ..candidate(&id)
        };
        let one = claim_with(store, &owner, LEASE_MS, std::slice::from_ref(&from)).await;
        let other = claim_with(store, &owner, LEASE_MS, &[from]).await;
        let claims = [one.claimed[0].claim_id, other.claimed[0].claim_id];
        assert!(
            last < claims[0] && claims[0] < claims[1],
            "claims grow, whoever makes them"
        );
        claims_from = other.counted[0].claims_from;
        assert!(claims_from <= claims[0], "the first is in flight");
        settle_all(store, &owner, &one, &delivered()).await;
        let rest = Candidate {
            claims_from,
            ..candidate(&id)
        };
        let rest = claim_with(store, &owner, LEASE_MS, &[rest]).await;
        assert_eq!(rest.claimed.len(), 2, "the second counts");
        assert_eq!(rest.counted[0].claims_from, claims[1], "and is the oldest");
        last = rest.claimed.iter().map(|claimed| claimed.claim_id).max().expect("two");
        settle_all(store, &owner, &other, &delivered()).await;
        settle_all(store, &owner, &rest, &delivered()).await;
        claims_from = rest.counted[0].claims_from;
    }
}

#[tokio::test]
async fn rows_due_before_the_frontier_are_seen_by_a_sweep_only() {
    let fixture = Fixture::new().await;
    let (store, id) = (&fixture.store, fixture.subscription(64).await);
    let at = put(store, Some(&id), &[prioritized("critical"), prioritized("low")], None)
        .await
        .expect("a group");
    fixture.sql("UPDATE deliveries SET next_attempt_at = 1000").await;
    let beyond = Candidate {
        frontier: [1001, 0, 1001],
        ..candidate(&id)
    };
    assert!(
        store
            .due(std::slice::from_ref(&beyond))
            .await
            .expect("what is due")
            .is_empty()
    );
    assert!(claim_with(store, "w", LEASE_MS, &[beyond]).await.claimed.is_empty());
    let until = Candidate {
        frontier: [1000, 0, 1001],
        ..candidate(&id)
    };
    assert_eq!(
        positions(&claim_with(store, "w", LEASE_MS, &[until]).await),
        [at[0]],
        "each priority has its own"
    );
    assert_eq!(
        positions(&claim(store, "w", &[&id]).await),
        [at[1]],
        "a sweep sees everything"
    );
}

#[tokio::test]
async fn a_subscription_that_is_claimed_for_elsewhere_is_skipped_and_named_worth_another_look() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    let (one, two) = (fixture.subscription(1).await, fixture.subscription(1).await);
    for id in [&one, &two] {
        put(store, Some(id), &events_of("live.a.b", 1), None)
            .await
            .expect("a group");
    }
    let mut holder = fixture.pool().begin().await.expect("a transaction");
    sqlx::query("SELECT FROM subscriptions WHERE id = $1 FOR NO KEY UPDATE")
        .bind(one.as_str())
        .execute(&mut *holder)
        .await
        .expect("the lock");
    let alone = claim(store, "w", &[&one]).await;
    assert!(alone.skipped && alone.claimed.is_empty() && alone.version > 0);
    let both = claim(store, "w", &[&one, &two]).await;
    assert!(both.skipped && both.claimed.len() == 1 && both.claimed[0].subscription_id == two);
    holder.rollback().await.expect("an end");
    let freed = claim(store, "w", &[&one]).await;
    assert!(!freed.skipped && freed.claimed.len() == 1);
}

#[tokio::test]
async fn what_is_disabled_is_not_claimed_and_not_worth_another_look() {
    let fixture = Fixture::new().await;
    let (store, id) = (&fixture.store, fixture.subscription(1).await);
    let at = put(store, Some(&id), &events_of("live.a.b", 2), None)
        .await
        .expect("a group");
    store
        .set_enabled(&Holder::service("chat"), &id, Switch::Off, 0)
        .await
        .expect("a switch")
        .expect("a subscription");
    let pass = claim(store, "w", &[&id]).await;
    assert!(pass.claimed.is_empty() && !pass.skipped, "{pass:?}");
    assert_eq!(
        pass.version,
        fixture.number("SELECT version FROM store_counter").await,
        "its process learns of the change"
    );
    store
        .set_enabled(&Holder::service("chat"), &id, Switch::On, 0)
        .await
        .expect("a switch")
        .expect("a subscription");
    assert_eq!(
        positions(&claim(store, "w", &[&id]).await),
        [at[0]],
        "what was queued goes on"
    );
}

#[tokio::test]
async fn a_disabled_subscription_waits_for_no_claim_and_a_claim_does_not_wait_for_it() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    let (off, on) = (fixture.subscription(64).await, fixture.subscription(64).await);
    backlog(&fixture, &off, 50_000, ("head", "true")).await;
    let at = put(store, Some(&on), &[event_of("live.a.b")], None)
        .await
        .expect("a group");
    store
        .set_enabled(&Holder::service("chat"), &off, Switch::Off, 0)
        .await
        .expect("a switch");
    fixture.sql("ANALYZE deliveries").await;
    assert_eq!(positions(&claim(store, "w", &[&off, &on]).await), at);
    fixture
        .sql("UPDATE deliveries SET lease_until = NULL WHERE lease_until IS NOT NULL")
        .await;
    let both = claim_literals(&[&off, &on], 0);
    for cost in costs(fixture.pool(), CLAIM, &both).await {
        assert!(cost.buffers < 100, "{cost:?}");
    }
}

#[tokio::test]
async fn three_hundred_thousand_rows_behind_one_head_cost_a_claim_nothing() {
    let fixture = Fixture::new().await;
    let id = fixture.subscription(1).await;
    backlog(&fixture, &id, 300_000, ("ordering_key, head", "'k', n = 1")).await;
    fixture.sql("ANALYZE deliveries").await;
    let check = |what: &str, index: &str, cost: &Cost| {
        assert!(cost.indexes.iter().any(|used| used == index), "{what}: {cost:?}");
        assert!(cost.rows < 20 && cost.buffers < 60, "{what}: {cost:?}");
        assert!(
            !cost.scanned.iter().any(|table| table == "deliveries"),
            "{what}: {cost:?}"
        );
    };
    // What a function reads shows in its pages alone.
    for cost in costs(fixture.pool(), CLAIM, &claim_literals(&[&id], 0)).await {
        assert!(cost.buffers < 100, "a claim: {cost:?}");
    }
    for cost in costs(fixture.pool(), DUE, &due_literals(&id)).await {
        check("a look at what is due", "deliveries_runnable", &cost);
    }
    sql(
        fixture.pool(),
        "UPDATE deliveries SET lease_until = 1, lease_owner = 'gone', claim_id = 1 WHERE seq = 1",
    )
    .await;
    for literals in ["NULL, 500, 'x'", "'judge', 500, 'x'"] {
        for cost in costs(fixture.pool(), RELEASE, literals).await {
            check("a release", "deliveries_leased", &cost);
        }
    }
    for cost in costs(fixture.pool(), DUE, &due_literals(&id)).await {
        check("a look while the head runs", "deliveries_runnable", &cost);
    }
}
