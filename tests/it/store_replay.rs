//! Replays that meet one another and their bounds.

use openvibe_events::store::{ReplaySelection, Replayed};

use crate::store_fixture::{Fixture, assert_counts, event_of, events_of, put};

#[tokio::test]
async fn replays_that_make_the_same_rows_at_once_count_each_row_once() {
    let fixture = Fixture::new().await;
    for _ in 0..5 {
        let events = events_of("live.stream.started", 200);
        put(&fixture.store, None, &events, None).await.expect("stored events");
    }
    let id = fixture.subscription(1).await;
    let everything = ReplaySelection::FromPosition(0);
    let stores = [
        fixture.another().await,
        fixture.another().await,
        fixture.another().await,
    ];
    let [a, b, c] = &stores;
    let (a, b, c) = tokio::join!(
        a.replay(&id, &everything),
        b.replay(&id, &everything),
        c.replay(&id, &everything)
    );
    for replayed in [a, b, c] {
        let replayed = replayed.expect("a replay").expect("a subscription");
        assert_eq!(
            replayed,
            Replayed {
                queued: 1_000,
                next: None
            }
        );
    }
    assert_eq!(fixture.number("SELECT count(*) FROM deliveries").await, 1_000);
    assert_counts(&fixture.store, fixture.pool()).await;
}

#[tokio::test]
async fn a_replay_that_meets_its_bound_says_where_to_go_on() {
    let fixture = Fixture::new().await;
    let first = event_of("live.stream.started");
    put(&fixture.store, None, std::slice::from_ref(&first), None)
        .await
        .expect("a stored event");
    fixture
        .sql(
            "INSERT INTO events (id, seq, event_type, version, source, actor, subject_type, subject_id, trace_id, \
                 priority, visibility, occurred_at, received_at, payload, publisher) \
             SELECT 'evt_' || n, n, 'live.stream.started', 1, 'live', actor, 'stream', '1', trace_id, 'low', 'public', \
                 occurred_at, received_at, '{}', 'svc:live' \
             FROM events, generate_series(10, 10509) n",
        )
        .await;
    let id = fixture.subscription(1).await;
    let mut from = 0;
    let mut queued = Vec::new();
    loop {
        let selection = ReplaySelection::FromPosition(from);
        let replayed = fixture
            .store
            .replay(&id, &selection)
            .await
            .expect("a replay")
            .expect("a subscription");
        queued.push(replayed.queued);
        match replayed.next {
            Some(next) => from = next,
            None => break,
        }
    }
    assert_eq!(queued, [10_000, 501]);
    assert_eq!(fixture.number("SELECT count(*) FROM deliveries").await, 10_501);
    assert_counts(&fixture.store, fixture.pool()).await;
}
