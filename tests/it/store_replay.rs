//! Replays that meet one another and their bounds.

use openvibe_events::{
    domain::{ids::SubscriptionId, policy::Policy, topic::TopicPattern},
    store::{Replay, ReplaySelection, Replayed, Store},
};

use crate::{
    store_fixture::{
        Door, Fixture, FloorAlone, assert_counts, broken_keys, claim, costs, delivered, ending, event_from, event_of,
        events_of, heads, positions, put, put_keyed, request, settle_all, subscribe,
    },
    support::envelopes::envelope,
};

const TYPE: &str = "live.stream.started";

/// Writes a policy for [`TYPE`].
async fn policy(fixture: &Fixture, semantics: &str, key: Option<&str>) {
    let ordering = key.map_or(String::new(), |key| {
        format!(r#","ordering":{{"scope":"any","key":"{key}"}}"#)
    });
    let text = format!(r#"{{"class":"domain","durability":"required","delivery_semantics":"{semantics}"{ordering}}}"#);
    let policy = Policy::parse(&text).expect("a policy");
    let pattern = TopicPattern::parse(TYPE).expect("a pattern");
    let other = fixture.another().await;
    other
        .put_policy(&pattern, &policy, "ops")
        .await
        .expect("a written policy");
}

/// Stores one event for each key; answers their positions.
async fn stored(fixture: &Fixture, subscription: Option<&SubscriptionId>, keys: &[&str]) -> Vec<i64> {
    let events: Vec<_> = keys
        .iter()
        .map(|key| event_from(&envelope("live").event_type(TYPE).subject("stream", key)))
        .collect();
    let labels: Vec<String> = keys.iter().map(|key| format!("stream:{key}")).collect();
    let keyed: Vec<_> = events
        .iter()
        .zip(&labels)
        .map(|(event, label)| (event, Some(label.as_str())))
        .collect();
    put_keyed(&fixture.store, subscription, &keyed).await.expect("events")
}

async fn replay(fixture: &Fixture, id: &SubscriptionId, from: i64) -> i64 {
    let replayed = fixture
        .store
        .replay(id, &ReplaySelection::FromPosition(from), &FloorAlone)
        .await;
    replayed.expect("a replay").expect("a subscription").queued
}

/// Sends what may run until nothing is left; answers the positions that ran together, pass by pass.
async fn drained(fixture: &Fixture, id: &SubscriptionId) -> Vec<Vec<i64>> {
    let mut passes = Vec::new();
    loop {
        assert_eq!(broken_keys(fixture.pool()).await, [], "after {passes:?}");
        let pass = claim(&fixture.store, "worker", &[id]).await;
        if pass.claimed.is_empty() {
            return passes;
        }
        let mut together = positions(&pass);
        together.sort_unstable();
        passes.push(together);
        settle_all(&fixture.store, "worker", &pass, &delivered()).await;
    }
}

#[tokio::test]
async fn a_replay_gives_rows_it_makes_the_keys_of_the_policy_and_one_head_for_each() {
    let fixture = Fixture::new().await;
    let at = stored(&fixture, None, &["a", "b", "a", "a", "b"]).await;
    let id = fixture.subscription(64).await;
    // Written through another process after this one had its view.
    policy(&fixture, "at_least_once", Some("subject")).await;
    assert_eq!(replay(&fixture, &id, 0).await, 5);
    assert_eq!(broken_keys(fixture.pool()).await, []);
    assert_eq!(heads(fixture.pool(), &id).await, [at[0], at[1]]);
    let keys: Vec<Option<String>> = sqlx::query_scalar("SELECT ordering_key FROM deliveries ORDER BY seq")
        .fetch_all(fixture.pool())
        .await
        .expect("the keys");
    let expected = ["a", "b", "a", "a", "b"].map(|key| Some(format!("stream:{key}")));
    assert_eq!(keys, expected);
    assert_counts(&fixture.store, fixture.pool()).await;
    assert_eq!(
        drained(&fixture, &id).await,
        [vec![at[0], at[1]], vec![at[2], at[4]], vec![at[3]]]
    );
    assert_counts(&fixture.store, fixture.pool()).await;
}

#[tokio::test]
async fn rows_that_a_replay_puts_in_front_of_a_waiting_head_come_first() {
    let fixture = Fixture::new().await;
    policy(&fixture, "at_least_once", Some("subject")).await;
    let early = stored(&fixture, None, &["a", "b"]).await;
    let id = fixture.subscription(64).await;
    let late = stored(&fixture, Some(&id), &["a", "a", "c"]).await;
    assert_eq!(heads(fixture.pool(), &id).await, [late[0], late[2]]);
    assert_eq!(replay(&fixture, &id, 0).await, 5);
    assert_eq!(broken_keys(fixture.pool()).await, []);
    assert_eq!(heads(fixture.pool(), &id).await, [early[0], early[1], late[2]]);
    assert_eq!(
        drained(&fixture, &id).await,
        [vec![early[0], early[1], late[2]], vec![late[0]], vec![late[1]]]
    );
    assert_counts(&fixture.store, fixture.pool()).await;
}

#[tokio::test]
async fn rows_that_a_replay_puts_in_front_of_a_running_head_wait_for_it() {
    let fixture = Fixture::new().await;
    policy(&fixture, "at_least_once", Some("subject")).await;
    let early = stored(&fixture, None, &["a", "a"]).await;
    let id = fixture.subscription(64).await;
    let late = stored(&fixture, Some(&id), &["a", "a"]).await;
    let running = claim(&fixture.store, "worker", &[&id]).await;
    assert_eq!(positions(&running), [late[0]]);
    let only_early = ReplaySelection::Events(
        sqlx::query_scalar("SELECT id FROM events WHERE seq < $1")
            .bind(late[0])
            .fetch_all(fixture.pool())
            .await
            .expect("ids"),
    );
    let replayed = fixture.store.replay(&id, &only_early, &FloorAlone).await;
    assert_eq!(replayed.expect("a replay").expect("a subscription").queued, 2);
    assert_eq!(broken_keys(fixture.pool()).await, []);
    assert_eq!(heads(fixture.pool(), &id).await, [late[0]], "two of one key never run");
    assert!(claim(&fixture.store, "worker", &[&id]).await.claimed.is_empty());
    settle_all(&fixture.store, "worker", &running, &delivered()).await;
    assert_eq!(
        drained(&fixture, &id).await,
        [vec![early[0]], vec![early[1]], vec![late[1]]]
    );
    assert_counts(&fixture.store, fixture.pool()).await;
}

#[tokio::test]
async fn replays_publishes_and_claims_of_one_key_at_once_leave_one_head() {
    let fixture = Fixture::new().await;
    policy(&fixture, "at_least_once", Some("subject")).await;
    let keys = ["a", "b"].repeat(30);
    stored(&fixture, None, &keys).await;
    let id = fixture.subscription(64).await;
    let (one, two, three) = (
        fixture.another().await,
        fixture.another().await,
        fixture.another().await,
    );
    let everything = ReplaySelection::FromPosition(0);
    let replays = async |store: &Store| {
        for _ in 0..5 {
            store
                .replay(&id, &everything, &FloorAlone)
                .await
                .expect("a replay")
                .expect("a subscription");
        }
    };
    let door = Door::open(&three);
    let publishes = async {
        for turn in 0..20 {
            let subject = ["a", "b"][turn % 2];
            let body = envelope("live").event_type(TYPE).subject("stream", subject);
            door.publish(request("live", body.json()))
                .await
                .expect("a stored event");
        }
    };
    let claims = async {
        for _ in 0..20 {
            let pass = claim(&fixture.store, "worker", &[&id]).await;
            settle_all(&fixture.store, "worker", &pass, &delivered()).await;
            assert_eq!(broken_keys(fixture.pool()).await, []);
        }
    };
    tokio::join!(replays(&one), replays(&two), publishes, claims);
    assert_eq!(broken_keys(fixture.pool()).await, []);
    assert_eq!(fixture.number("SELECT count(*) FROM deliveries").await, 80);
    drained(&fixture, &id).await;
    assert_eq!(
        fixture
            .number("SELECT count(*) FROM deliveries WHERE status = 'delivered'")
            .await,
        80
    );
    assert_counts(&fixture.store, fixture.pool()).await;
}

#[tokio::test]
async fn a_row_keeps_what_it_was_made_with_when_it_is_replayed() {
    let fixture = Fixture::new().await;
    let id = fixture.subscription(64).await;
    let kept = put(&fixture.store, Some(&id), &events_of(TYPE, 2), None)
        .await
        .expect("events");
    put(&fixture.store, None, &events_of(TYPE, 2), None)
        .await
        .expect("events");
    policy(&fixture, "at_most_once", Some("subject")).await;
    assert_eq!(replay(&fixture, &id, 0).await, 4);
    let without =
        "SELECT count(*) FROM deliveries WHERE ordering_key IS NULL AND head AND NOT at_most_once AND seq <= ";
    assert_eq!(fixture.number(&format!("{without}{}", kept[1])).await, 2);
    let made = "SELECT count(*) FROM deliveries WHERE ordering_key IS NOT NULL AND at_most_once AND seq > ";
    assert_eq!(fixture.number(&format!("{made}{}", kept[1])).await, 2);
    assert_eq!(broken_keys(fixture.pool()).await, []);
}

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
        a.replay(&id, &everything, &FloorAlone),
        b.replay(&id, &everything, &FloorAlone),
        c.replay(&id, &everything, &FloorAlone)
    );
    let mut created = 0;
    for replayed in [a, b, c] {
        let replayed = replayed.expect("a replay").expect("a subscription");
        created += replayed.created;
        let all = Replayed {
            queued: 1_000,
            created: replayed.created,
            enabled: true,
            ..Replayed::default()
        };
        assert_eq!(replayed, all);
    }
    assert_eq!(created, 1_000, "each row was made once");
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
            .replay(&id, &selection, &FloorAlone)
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

/// A thousand events, twice what one transaction of a replay takes, that a subscription has been sent.
async fn a_thousand_delivered(fixture: &Fixture) -> (SubscriptionId, Vec<i64>) {
    let id = fixture.subscription(1).await;
    for _ in 0..5 {
        let events = events_of(TYPE, 200);
        put(&fixture.store, Some(&id), &events, None)
            .await
            .expect("stored events");
    }
    fixture
        .sql(
            "UPDATE deliveries SET status = 'delivered', next_attempt_at = NULL; UPDATE delivery_counts \
             SET delivered = pending, pending = 0",
        )
        .await;
    let positions = sqlx::query_scalar("SELECT seq FROM deliveries ORDER BY seq");
    (id, positions.fetch_all(fixture.pool()).await.expect("positions"))
}

#[tokio::test]
async fn a_replay_that_fails_half_way_tells_what_it_queued_and_where_to_go_on() {
    let fixture = Fixture::new().await;
    let (id, at) = a_thousand_delivered(&fixture).await;
    let mut held = fixture.pool().begin().await.expect("a transaction");
    sqlx::query("SELECT FROM deliveries WHERE seq = $1 FOR UPDATE")
        .bind(at[700])
        .execute(&mut *held)
        .await
        .expect("a held row");
    let replayed = fixture
        .store
        .replay(&id, &ReplaySelection::FromPosition(0), &FloorAlone)
        .await;
    let replayed = replayed.expect("a part of it").expect("a subscription");
    assert_eq!((replayed.queued, replayed.next), (500, Some(at[500])));
    assert_counts(&fixture.store, fixture.pool()).await;
    // Who names events hears of all of them or of none.
    let named: Vec<String> = sqlx::query_scalar("SELECT event_id FROM deliveries WHERE status = 'delivered'")
        .fetch_all(fixture.pool())
        .await
        .expect("five hundred events");
    let refused = fixture
        .store
        .replay(&id, &ReplaySelection::Events(named.clone()), &FloorAlone)
        .await;
    assert!(refused.is_err(), "{refused:?}");
    let waiting = "SELECT count(*) FROM deliveries WHERE status = 'pending'";
    assert_eq!(fixture.number(waiting).await, 500);
    held.rollback().await.expect("the row is free");

    let rest = fixture
        .store
        .replay(&id, &ReplaySelection::FromPosition(at[500]), &FloorAlone)
        .await;
    let rest = rest.expect("the rest").expect("a subscription");
    assert_eq!((rest.queued, rest.next), (500, None));
    assert_eq!(fixture.number(waiting).await, 1_000);
    assert_counts(&fixture.store, fixture.pool()).await;
}

#[tokio::test]
async fn a_replay_that_takes_too_long_stops_between_transactions_and_says_where_to_go_on() {
    let fixture = Fixture::new().await;
    let id = fixture.subscription(1).await;
    for _ in 0..10 {
        put(&fixture.store, None, &events_of(TYPE, 200), None)
            .await
            .expect("stored events");
    }
    fixture
        .sql(
            "CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS \
             $$ BEGIN PERFORM pg_sleep(3.5); RETURN NULL; END $$; \
             CREATE TRIGGER dawdle BEFORE INSERT ON deliveries FOR EACH STATEMENT EXECUTE FUNCTION dawdle()",
        )
        .await;
    let replayed = fixture
        .store
        .replay(&id, &ReplaySelection::FromPosition(0), &FloorAlone)
        .await;
    let replayed = replayed.expect("a part of it").expect("a subscription");
    let next = fixture
        .number("SELECT seq FROM events ORDER BY seq LIMIT 1 OFFSET 1500")
        .await;
    assert_eq!((replayed.queued, replayed.next), (1_500, Some(next)));
}

#[tokio::test]
async fn a_replay_of_named_events_says_what_became_of_each() {
    let fixture = Fixture::new().await;
    let id = subscribe(&fixture.store, "chat", "live.*", 4).await;
    let known = events_of(TYPE, 3);
    put(&fixture.store, Some(&id), &known, None)
        .await
        .expect("stored events");
    let before = event_of(TYPE);
    let other = event_of("chat.message.created");
    let of_an_app = event_of(TYPE);
    put(
        &fixture.store,
        None,
        &[before.clone(), other.clone(), of_an_app.clone()],
        None,
    )
    .await
    .expect("stored events");
    let app = of_an_app.event_id.as_str();
    fixture
        .sql(&format!("UPDATE events SET project_id = 'prj_1' WHERE id = '{app}'"))
        .await;
    // The first is delivered, the second runs.
    let pass = claim(&fixture.store, "worker", &[&id]).await;
    let ended = ending(&pass.claimed[0], delivered());
    fixture.store.settle("worker", &[ended]).await.expect("a settle");
    fixture
        .sql(&format!(
            "UPDATE deliveries SET lease_owner = NULL, lease_until = NULL, claim_id = NULL WHERE event_id = '{}'",
            known[2].event_id.as_str()
        ))
        .await;
    let names = [&known[0], &known[1], &known[2], &before, &other, &of_an_app].map(|event| event.event_id.to_string());
    let selection = ReplaySelection::Events(names.iter().cloned().chain(["evt_gone".to_owned()]).collect());
    let replayed = fixture.store.replay(&id, &selection, &FloorAlone).await;
    let replayed = replayed.expect("a replay").expect("a subscription");
    let what = names.each_ref().map(|name| replayed.events.get(name).copied());
    let wanted = [
        Replay::Again,
        Replay::InFlight,
        Replay::Again,
        Replay::Created,
        Replay::Unmatched,
        Replay::Unmatched,
    ];
    assert_eq!(what, wanted.map(Some));
    assert_eq!(
        replayed.events.len(),
        names.len(),
        "nothing is said of what is not stored"
    );
    let counts = (replayed.queued, replayed.created, replayed.in_flight, replayed.next);
    assert_eq!(counts, (4, 1, 1, None));
    assert_counts(&fixture.store, fixture.pool()).await;
}

#[tokio::test]
async fn the_first_event_of_a_time_is_found_without_reading_the_log() {
    let fixture = Fixture::new().await;
    fixture
        .sql(
            "INSERT INTO events (id, seq, event_type, version, source, actor, subject_type, subject_id, trace_id, priority, \
             visibility, occurred_at, received_at, payload, publisher) \
             SELECT 'evt_' || lpad(n::text, 26, '0'), n * 3, 'live.a.b', 1, 'live', '{}', 'thing', 'x', 'trc_1', 'low', \
             'public', 't', n * 100, '{}', 'svc:live' FROM generate_series(1, 50000) n; ANALYZE events",
        )
        .await;
    for time in [0, 1, 2_500_000, 4_999_950, 9_999_999] {
        for cost in costs(fixture.pool(), "WITH RECURSIVE search", &time.to_string()).await {
            assert!(cost.rows < 60 && cost.scanned.is_empty(), "{time}: {cost:?}");
        }
    }
    for cost in costs(fixture.pool(), "OVER (ORDER BY seq) AS row", "74700, 2500000, 200000").await {
        assert!(
            cost.rows < 300 && cost.scanned.is_empty(),
            "ten seconds of the log: {cost:?}"
        );
    }
}
