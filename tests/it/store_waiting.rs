//! How long deliveries have waited, as whoever watches the service is told.

use openvibe_events::domain::deliveries::Waiting;

use crate::store_fixture::{Fixture, claim, ending, events_of, put, retry};

#[tokio::test]
async fn what_could_be_claimed_and_what_keeps_failing_tell_their_age_and_disabled_subscriptions_do_not() {
    let fixture = Fixture::new().await;
    let (store, id) = (&fixture.store, fixture.subscription(2).await);
    let waiting = async || store.waiting().await.expect("the ages");
    let none = Waiting {
        oldest_due_ms: 0,
        oldest_head_ms: Some(0),
    };
    assert_eq!(waiting().await, none);
    let at = put(store, Some(&id), &events_of("live.a.b", 3), Some("k"))
        .await
        .expect("a group");
    fixture
        .sql("UPDATE deliveries SET next_attempt_at = now_ms() - 5000, created_at = now_ms() - 9000")
        .await;
    let due = waiting().await;
    assert!((5000..9000).contains(&due.oldest_due_ms), "{due:?}");
    assert_eq!(due.oldest_head_ms, Some(0), "nothing has failed");
    let pass = claim(store, "w", &[&id]).await;
    assert_eq!(
        waiting().await,
        none,
        "what is under way waits for nobody, what is behind it is no head"
    );

    let failed = [ending(&pass.claimed[0], retry(60_000))];
    store.settle("w", &failed).await.expect("a result");
    let failing = waiting().await;
    assert_eq!(failing.oldest_due_ms, 0, "its time has not come");
    assert!(
        failing
            .oldest_head_ms
            .is_some_and(|age_ms| (9000..60_000).contains(&age_ms)),
        "{failing:?}"
    );
    fixture
        .sql("UPDATE deliveries SET next_attempt_at = now_ms() - 7000 WHERE head")
        .await;
    let late = waiting().await;
    assert!((7000..60_000).contains(&late.oldest_due_ms), "{late:?}");
    fixture.sql("UPDATE subscriptions SET enabled = 0").await;
    assert_eq!(waiting().await, none);
    assert_eq!(at.len(), 3);
}
