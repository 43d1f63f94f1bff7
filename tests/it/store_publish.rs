//! Publishing decisions as they are stored: duplicates, conflicts, loops and whole batches, inside one group and across
//! processes.

use futures_util::future::join_all;
use openvibe_events::{
    domain::cursor::Cursor,
    publish::{PublishError, Published},
};
use serde_json::json;

use crate::{
    store_fixture::{Door, Fixture, HOPS_MAX, costs, request, request_in},
    support::{
        envelopes::{Envelope, batch, envelope, envelopes},
        wait::refused,
    },
};

/// The one result of a request for one event.
fn single(answer: Result<Vec<Published>, PublishError>) -> Published {
    let mut results = answer.expect("a stored request");
    assert_eq!(results.len(), 1);
    results.remove(0)
}

async fn stored(fixture: &Fixture) -> i64 {
    fixture.number("SELECT count(*) FROM events").await
}

async fn hops_of(fixture: &Fixture, event: &Envelope) -> i64 {
    fixture
        .number(&format!("SELECT hops::bigint FROM events WHERE id = '{}'", event.id()))
        .await
}

#[tokio::test]
async fn a_refused_request_does_not_spoil_its_group() {
    let fixture = Fixture::new().await;
    let door = Door::open(&fixture.store);
    let taken = envelope("live");
    door.publish(request("live", taken.json()))
        .await
        .expect("the first use of the id");
    let conflicting = envelope("live").with_id(taken.id());
    let (good, also_good) = (envelopes("live", 3), envelope("chat"));
    let before = stored(&fixture).await;
    let answers = door
        .publish_as_group(
            &fixture,
            [
                request("live", &batch(&good)),
                request("live", conflicting.json()),
                request("chat", also_good.json()),
            ],
        )
        .await;
    let [Ok(first), Err(PublishError::IdConflict { event_id }), Ok(third)] = &answers[..] else {
        panic!("{answers:?}")
    };
    assert_eq!((first.len(), third.len(), event_id.as_str()), (3, 1, taken.id()));
    assert_eq!(stored(&fixture).await, before + 4);
}

#[tokio::test]
async fn a_group_that_fails_as_a_whole_is_run_again_request_by_request() {
    let fixture = Fixture::new().await;
    fixture
        .sql(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             IF NEW.payload LIKE '%poison%' THEN RAISE EXCEPTION 'no' USING ERRCODE = '22000'; END IF; RETURN NEW; END $$; \
             CREATE TRIGGER refuse BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION refuse()",
        )
        .await;
    let door = Door::open(&fixture.store);
    let (one, poison, two) = (
        envelope("live"),
        envelope("live").payload(json!({ "poison": 1 })),
        envelope("live"),
    );
    let publish = |event: &Envelope| door.publish(request("live", event.json()));
    let answers = join_all([publish(&one), publish(&poison), publish(&two)]).await;
    assert!(
        matches!(&answers[..], [Ok(_), Err(PublishError::Internal), Ok(_)]),
        "{answers:?}"
    );
    assert_eq!(stored(&fixture).await, 2);
}

#[tokio::test]
async fn an_id_that_comes_twice_in_one_group_is_stored_once_and_both_learn_where() {
    let fixture = Fixture::new().await;
    let door = Door::open(&fixture.store);
    let (event, beside) = (envelope("live"), envelope("live"));
    let requests = [&event, &event, &beside].map(|event| request("live", event.json()));
    let answers = door.publish_as_group(&fixture, requests).await;
    let [first, second, _] = answers.try_into().expect("three answers");
    let (first, second) = (single(first), single(second));
    assert_eq!((first.duplicate, second.duplicate), (false, true));
    assert!(
        first.cursor.is_some() && first.cursor == second.cursor,
        "{first:?} {second:?}"
    );
    assert_eq!(stored(&fixture).await, 2);
}

#[tokio::test]
async fn an_id_of_another_type_in_the_same_group_is_a_conflict() {
    let fixture = Fixture::new().await;
    let door = Door::open(&fixture.store);
    let event = envelope("live");
    let other = envelope("live").with_id(event.id());
    let answers = door
        .publish_as_group(&fixture, [request("live", event.json()), request("live", other.json())])
        .await;
    assert!(
        matches!(&answers[..], [Ok(_), Err(PublishError::IdConflict { .. })]),
        "{answers:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_identical_publishes_over_two_processes_store_one_event_and_answer_one_cursor() {
    let fixture = Fixture::new().await;
    let doors = [Door::open(&fixture.store), Door::open(&fixture.another().await)];
    let event = envelope("live");
    let answers = (0..50).map(|n| doors[n % 2].publish(request("live", event.json())));
    let results: Vec<Published> = join_all(answers).await.into_iter().map(single).collect();
    assert_eq!(results.iter().filter(|one| !one.duplicate).count(), 1);
    let cursor = results[0].cursor;
    assert!(
        cursor.is_some() && results.iter().all(|one| one.cursor == cursor),
        "{results:?}"
    );
    assert_eq!(stored(&fixture).await, 1);
}

#[tokio::test]
async fn an_event_of_which_only_the_receipt_is_left_is_a_duplicate_without_a_cursor() {
    let fixture = Fixture::new().await;
    let door = Door::open(&fixture.store);
    let event = envelope("live");
    door.publish(request("live", event.json())).await.expect("a publish");
    fixture.sql("DELETE FROM events").await;
    let again = single(door.publish(request("live", event.json())).await);
    assert_eq!((again.duplicate, again.cursor), (true, None::<Cursor>));
    assert_eq!(stored(&fixture).await, 0, "what was pruned does not come back");
}

#[tokio::test]
async fn a_conflict_tells_nothing_about_the_stored_event() {
    let fixture = Fixture::new().await;
    let door = Door::open(&fixture.store);
    let secret = envelope("chat").payload(json!({ "word": "xyzzy" }));
    door.publish(request("chat", secret.json())).await.expect("a publish");
    for (source, attempt) in [("live", envelope("live")), ("chat", envelope("chat"))] {
        let attempt = attempt.with_id(secret.id());
        let error = refused("the id is taken", door.publish(request(source, attempt.json())).await);
        assert!(matches!(error, PublishError::IdConflict { .. }), "{error:?}");
        for told in [error.to_string(), format!("{error:?}")] {
            assert!(
                !told.contains(secret.type_name()) && !told.contains("xyzzy") && !told.contains("chat"),
                "{told}"
            );
        }
    }
    assert_eq!(
        fixture
            .number("SELECT count(*) FROM events WHERE payload LIKE '%xyzzy%'")
            .await,
        1
    );
}

#[tokio::test]
async fn an_event_of_a_developer_app_is_a_conflict_whatever_it_says() {
    let fixture = Fixture::new().await;
    let door = Door::open(&fixture.store);
    let event = envelope("live");
    door.publish(request("live", event.json())).await.expect("a publish");
    for owner in ["project_id = 'prj_1'", "project_id = NULL, env = 'sandbox'"] {
        fixture.sql(&format!("UPDATE events SET {owner}")).await;
        let answer = door.publish(request("live", event.json())).await;
        assert!(
            matches!(answer, Err(PublishError::IdConflict { .. })),
            "{owner}: {answer:?}"
        );
    }
}

#[tokio::test]
async fn a_batch_is_stored_whole_or_not_at_all() {
    let fixture = Fixture::new().await;
    let door = Door::open(&fixture.store);
    let taken = envelope("live");
    door.publish(request("live", taken.json())).await.expect("a publish");
    let conflicting = envelope("live").with_id(taken.id());
    let items = [envelope("live"), conflicting, envelope("live")];
    let answer = door.publish(request("live", &batch(&items))).await;
    assert!(matches!(answer, Err(PublishError::IdConflict { .. })), "{answer:?}");
    let left = "SELECT (SELECT count(*) FROM events) + (SELECT count(*) FROM idempotency_receipts)";
    assert_eq!(fixture.number(left).await, 2, "one event and its receipt");
    let again = door
        .publish(request("live", &batch(&[items[0].clone(), items[2].clone()])))
        .await;
    assert!(again.expect("the others alone").iter().all(|one| !one.duplicate));
}

#[tokio::test]
async fn a_trace_that_goes_round_between_sources_is_refused_beyond_the_limit() {
    let fixture = Fixture::new().await;
    let door = Door::open(&fixture.store);
    for hop in 1..=HOPS_MAX {
        let source = ["live", "chat"][usize::try_from(hop).expect("small") % 2];
        let event = envelope(source).subject("thing", &hop.to_string());
        door.publish(request_in("trc_round", source, event.json()))
            .await
            .expect("below the limit");
        assert_eq!(hops_of(&fixture, &event).await, i64::from(hop));
    }
    let next = envelope("chat").subject("thing", "x");
    let answer = door.publish(request_in("trc_round", "chat", next.json())).await;
    assert!(
        matches!(
            answer,
            Err(PublishError::Loop {
                hops: 4,
                max_hops: 4,
                ..
            })
        ),
        "{answer:?}"
    );
    assert_eq!(stored(&fixture).await, i64::from(HOPS_MAX));
    door.publish(request_in("trc_other", "chat", envelope("chat").json()))
        .await
        .expect("another trace is free");
}

#[tokio::test]
async fn repeats_are_counted_by_request_and_siblings_of_one_batch_are_no_loop() {
    let fixture = Fixture::new().await;
    let door = Door::open(&fixture.store);
    let kind = envelope("live");
    let again = || envelope("live").event_type(kind.type_name());
    let siblings: Vec<Envelope> = (0..40).map(|_| again()).collect();
    door.publish(request_in("trc_repeat", "live", &batch(&siblings)))
        .await
        .expect("siblings are no loop");
    for hop in 2..=i64::from(HOPS_MAX) {
        let next = again();
        door.publish(request_in("trc_repeat", "live", next.json()))
            .await
            .expect("below the limit");
        assert_eq!(hops_of(&fixture, &next).await, hop);
    }
    let answer = door.publish(request_in("trc_repeat", "live", again().json())).await;
    assert!(matches!(answer, Err(PublishError::Loop { .. })), "{answer:?}");
    let elsewhere = again().subject("thing", "another");
    door.publish(request_in("trc_repeat", "live", elsewhere.json()))
        .await
        .expect("another subject is another count");
}

#[tokio::test]
async fn a_repeat_of_a_stored_event_is_no_hop() {
    let fixture = Fixture::new().await;
    let door = Door::open(&fixture.store);
    let event = envelope("live");
    for _ in 0..10 {
        door.publish(request_in("trc_retry", "live", event.json()))
            .await
            .expect("a retry");
    }
    assert_eq!(hops_of(&fixture, &event).await, 1);
}

#[tokio::test]
async fn the_loop_guard_counts_what_its_own_group_adds() {
    let fixture = Fixture::new().await;
    let door = Door::open(&fixture.store);
    let kind = envelope("live");
    let requests = (0..=HOPS_MAX).map(|_| {
        request_in(
            "trc_group",
            "live",
            envelope("live").event_type(kind.type_name()).json(),
        )
    });
    let answers = door.publish_as_group(&fixture, requests.collect::<Vec<_>>()).await;
    assert!(
        matches!(
            &answers[..],
            [Ok(_), Ok(_), Ok(_), Ok(_), Err(PublishError::Loop { .. })]
        ),
        "{answers:?}"
    );

    fixture.sql("DELETE FROM events").await;
    let chain = ["live", "chat", "live", "chat", "live"].into_iter().enumerate();
    let requests = chain.map(|(n, source)| {
        request_in(
            "trc_chain",
            source,
            envelope(source).subject("n", &n.to_string()).json(),
        )
    });
    let answers = door.publish_as_group(&fixture, requests.collect::<Vec<_>>()).await;
    assert!(
        matches!(
            &answers[..],
            [Ok(_), Ok(_), Ok(_), Ok(_), Err(PublishError::Loop { .. })]
        ),
        "{answers:?}"
    );
}

#[tokio::test]
async fn a_trace_that_the_server_made_is_not_guarded() {
    let fixture = Fixture::new().await;
    let door = Door::open(&fixture.store);
    let kind = envelope("live");
    for _ in 0..HOPS_MAX + 2 {
        let event = envelope("live").event_type(kind.type_name());
        door.publish(request("live", event.json())).await.expect("no loop");
    }
}

#[tokio::test]
async fn the_loop_guard_reads_a_bounded_part_of_a_long_trace() {
    let fixture = Fixture::new().await;
    fixture
        .sql(
            "INSERT INTO events (id, seq, event_type, version, source, actor, subject_type, subject_id, trace_id, priority, \
             visibility, occurred_at, received_at, payload, hops, publisher, request_id) \
             SELECT 'evt_' || n, n, 'live.a.b', 1, CASE n % 4 WHEN 0 THEN 'chat' ELSE 'live' END, '{}', 'thing', 'x' || n, \
             'trc_long', 'low', 'public', 't', 1, '{}', 1 + n % 3, 'svc:live', 'req_' || n FROM generate_series(1, 20000) n; \
             ANALYZE events",
        )
        .await;
    let literals = "ARRAY['trc_long'], ARRAY['live'], ARRAY['live.a.b'], ARRAY['thing'], ARRAY['x1'], 512";
    for cost in costs(fixture.pool(), "FROM trace_depths(", literals).await {
        assert!(cost.buffers < 1_500, "{cost:?}");
    }
}
