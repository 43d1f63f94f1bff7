//! Pulls: a reader that follows the log skips nothing and repeats nothing, and no page costs more than its bounds.

use std::{collections::HashSet, sync::Arc, time::Duration};

use openvibe_events::{
    domain::{cursor::Cursor, ids::EventId, topic::TopicPattern},
    store::{Page, PageRequest, Store},
};

use crate::{
    store_fixture::{Door, Fixture, PAGE_BYTES, costs, event_of, events_of, ids, pull, put, request},
    support::{
        envelopes::{batch, envelopes},
        wait::{eventually, within},
    },
};

const SCAN: &str = "event_type LIKE ANY($9::text[])";
const OF_PROJECT: &str = "WHERE project_id = $7 AND env = $8 AND seq > (SELECT seq FROM start)";
const BY_TYPE: &str = "(event_type, seq) > ($3, (SELECT seq FROM start))";

fn at(position: i64) -> Option<Cursor> {
    Some(Cursor { epoch: 0, position })
}

/// Where a reader goes on after a page.
fn next(page: &Page) -> Option<Cursor> {
    Some(Cursor {
        epoch: page.positions.epoch,
        position: page.examined,
    })
}

fn read(page: &Page) -> Vec<i64> {
    page.events.iter().map(|event| event.cursor.position).collect()
}

/// Events of a type made in bulk, from one position to another.
async fn log(fixture: &Fixture, event_type: &str, from: i64, to: i64) {
    fixture
        .sql(&format!(
            "INSERT INTO events (id, seq, event_type, version, source, actor, subject_type, subject_id, trace_id, priority, \
             visibility, occurred_at, received_at, payload, publisher, size_bytes) \
             SELECT 'evt_' || lpad(n::text, 26, '0'), n, '{event_type}', 1, 'live', '{{\"type\":\"service\",\"id\":\"live\"}}', \
             'thing', 'x', 'trc_1', 'low', 'public', 't', 1, '{{}}', 'svc:live', 100 FROM generate_series({from}, {to}) n; \
             SELECT setval('event_positions', {to})"
        ))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_chases_the_head_of_two_racing_processes_skips_and_repeats_nothing() {
    const EACH: usize = 625;
    let fixture = Fixture::new().await;
    let doors = [
        Arc::new(Door::open(&fixture.store)),
        Arc::new(Door::open(&fixture.another().await)),
    ];
    let publishers = (0..8).map(|publisher: usize| {
        let door = Arc::clone(&doors[publisher % 2]);
        tokio::spawn(async move {
            let mut sent = 0;
            while sent < EACH {
                let events = envelopes("live", (1 + (sent + publisher) % 9).min(EACH - sent));
                door.publish(request("live", &batch(&events))).await.expect("a publish");
                sent += events.len();
            }
        })
    });
    let publishers: Vec<_> = publishers.collect();
    let (mut after, mut seen, mut last) = (None, HashSet::new(), 0);
    within("the reader gets everything", Duration::from_secs(60), async {
        while seen.len() < 8 * EACH {
            let page = pull(&fixture.store, after, "live.*", 5).await;
            assert!(page.events.len() <= 5 && page.examined <= page.positions.head);
            for event in &page.events {
                assert!(event.cursor.position > last, "{} after {last}", event.cursor.position);
                last = event.cursor.position;
                assert!(
                    seen.insert(event.envelope.event_id.clone()),
                    "{} twice",
                    event.envelope.event_id
                );
            }
            after = next(&page);
        }
    })
    .await;
    for publisher in publishers {
        publisher.await.expect("a publisher");
    }
    let stored: HashSet<EventId> = sqlx::query_scalar::<_, String>("SELECT id FROM events")
        .fetch_all(fixture.pool())
        .await
        .expect("the ids")
        .iter()
        .map(|id| EventId::parse(id).expect("an id"))
        .collect();
    assert_eq!(seen, stored);
}

#[tokio::test]
async fn a_filter_that_matches_nothing_advances_five_thousand_rows_at_a_time() {
    let fixture = Fixture::new().await;
    log(&fixture, "chat.noise.x", 1, 12_000).await;
    let wanted = event_of("live.a.b");
    let last = put(&fixture.store, None, std::slice::from_ref(&wanted), None)
        .await
        .expect("a group")[0];
    let mut after = None;
    for examined in [5_000, 10_000] {
        let page = pull(&fixture.store, after, "live.*", 10).await;
        assert_eq!(
            (page.examined, page.positions.head, page.events.len()),
            (examined, last, 0)
        );
        after = next(&page);
    }
    let page = pull(&fixture.store, after, "live.*", 10).await;
    assert_eq!(ids(&page), [&wanted.event_id]);
    assert_eq!(page.examined, last);
    let rest = pull(&fixture.store, next(&page), "live.*", 10).await;
    assert_eq!(
        (rest.examined, rest.events.len()),
        (last, 0),
        "at the head it stays there"
    );
}

#[tokio::test]
async fn no_page_reads_more_than_its_bounds_however_long_the_log_is() {
    let fixture = Fixture::new().await;
    log(&fixture, "chat.noise.x", 1, 40_000).await;
    log(&fixture, "live.rare.x", 40_001, 40_003).await;
    fixture.sql("ANALYZE events").await;
    for cost in costs(
        fixture.pool(),
        SCAN,
        "-1, 0, ARRAY['live.%'], 10, 5000, 4194304, NULL, NULL, ARRAY[]::text[]",
    )
    .await
    {
        assert!(
            cost.rows < 10_100 && !cost.scanned.iter().any(|table| table == "events"),
            "{cost:?}"
        );
    }
    for cost in costs(fixture.pool(), BY_TYPE, "-1, 0, 'live.rare.x', 10, 4194304").await {
        assert!(
            cost.rows < 20 && cost.buffers < 60,
            "a rare type is found by its index: {cost:?}"
        );
    }
    let page = pull(&fixture.store, None, "live.rare.x", 10).await;
    assert_eq!(read(&page), [40_001, 40_002, 40_003]);
    fixture
        .sql("UPDATE events SET project_id = 'prj_1', env = 'sandbox' WHERE event_type = 'live.rare.x'; ANALYZE events")
        .await;
    for cost in costs(
        fixture.pool(),
        OF_PROJECT,
        "-1, 0, ARRAY['live.%'], 10, 5000, 4194304, 'prj_1', 'sandbox'",
    )
    .await
    {
        assert!(
            cost.rows < 30 && cost.buffers < 80,
            "a project finds its own among everybody's: {cost:?}"
        );
    }
}

#[tokio::test]
async fn a_page_ends_after_four_mebibytes_and_goes_on_where_it_ended() {
    let fixture = Fixture::new().await;
    let at_ = put(&fixture.store, None, &events_of("live.a.b", 9), None)
        .await
        .expect("a group");
    fixture.sql("UPDATE events SET size_bytes = 1100000").await;
    fixture
        .sql(&format!(
            "UPDATE events SET size_bytes = 99000000 WHERE seq = {}",
            at_[4]
        ))
        .await;
    for topic in ["live.a.b", "live.*"] {
        let (mut after, mut pages) = (None, Vec::new());
        loop {
            let page = pull(&fixture.store, after, topic, 1_000).await;
            if page.events.is_empty() {
                break;
            }
            assert_eq!(page.examined, *read(&page).last().expect("an event"));
            after = next(&page);
            pages.push(read(&page));
        }
        assert_eq!(
            pages,
            [&at_[..4], &at_[4..5], &at_[5..]],
            "{topic}: the event that crosses the line is part of its page"
        );
    }
}

#[tokio::test]
async fn a_position_of_another_history_starts_at_the_floor_and_one_ahead_at_the_head() {
    let fixture = Fixture::new().await;
    let at_ = put(&fixture.store, None, &events_of("live.a.b", 4), None)
        .await
        .expect("a group");
    for topic in ["live.a.b", "live.*"] {
        let page = pull(
            &fixture.store,
            Some(Cursor {
                epoch: 7,
                position: at_[2],
            }),
            topic,
            10,
        )
        .await;
        assert_eq!(
            (read(&page), page.positions.epoch, page.examined),
            (at_.clone(), 0, at_[3])
        );
        let page = pull(&fixture.store, at(at_[3] + 1_000), topic, 10).await;
        assert_eq!(
            (page.events.len(), page.examined, page.positions.head),
            (0, at_[3], at_[3])
        );
    }
}

#[tokio::test]
async fn what_was_removed_raises_the_floor_and_never_lowers_the_head() {
    let fixture = Fixture::new().await;
    let at_ = put(&fixture.store, None, &events_of("live.a.b", 4), None)
        .await
        .expect("a group");
    let remove =
        |up_to: i64| format!("DELETE FROM events WHERE seq <= {up_to}; UPDATE store_floor SET value = {up_to}");
    fixture.sql(&remove(at_[1])).await;
    for (topic, after) in [
        ("live.a.b", None),
        ("live.*", None),
        ("live.a.b", at(at_[0])),
        ("live.*", at(at_[0])),
    ] {
        let page = pull(&fixture.store, after, topic, 10).await;
        assert_eq!(
            (page.positions.floor, read(&page)),
            (at_[1], at_[2..].to_vec()),
            "{topic} after {after:?}"
        );
    }
    fixture.sql(&remove(at_[3])).await;
    let page = pull(&fixture.store, at(at_[3]), "live.*", 10).await;
    assert_eq!(
        (page.positions.head, page.positions.floor, page.examined),
        (at_[3], at_[3], at_[3])
    );
    let positions = fixture.store.positions().await.expect("the bounds");
    assert_eq!((positions.head, positions.floor), (at_[3], at_[3]));
}

#[tokio::test]
async fn an_empty_log_is_a_page_at_its_beginning() {
    let fixture = Fixture::new().await;
    for topic in ["live.a.b", "*"] {
        let page = pull(&fixture.store, None, topic, 10).await;
        assert_eq!((page.events.len(), page.examined, page.positions.head), (0, 0, 0));
    }
}

/// The same page through the index of types and through the scan of the log.
async fn both(store: &Store, after: Option<Cursor>, event_type: &str, limit: i64) -> [Page; 2] {
    let topic = TopicPattern::parse(event_type).expect("a pattern");
    let once = PageRequest {
        after,
        topics: vec![topic.clone()],
        project: None,
        limit,
        bytes: PAGE_BYTES,
    };
    let twice = PageRequest {
        after,
        topics: vec![topic.clone(), topic],
        project: None,
        limit,
        bytes: PAGE_BYTES,
    };
    [
        store.pull(&once).await.expect("a page"),
        store.pull(&twice).await.expect("a page"),
    ]
}

#[tokio::test]
async fn a_page_of_one_type_is_the_page_that_a_scan_gives() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    for n in 0..60 {
        let event_type = ["live.a.b", "live.a.bc", "live.a_b.c", "live.axb.c", "live.a.b.c"][n * n % 7 % 5];
        put(store, None, &[event_of(event_type)], None).await.expect("a group");
    }
    fixture.sql("UPDATE events SET project_id = 'prj_1' WHERE seq % 11 = 0; UPDATE events SET env = 'sandbox' WHERE seq % 13 = 0").await;
    for event_type in ["live.a.b", "live.a_b.c", "live.a.b.c", "live.none.x"] {
        for limit in [1, 7, 1_000] {
            for after in [None, at(5), at(59), at(60), at(99)] {
                let [typed, scanned] = both(store, after, event_type, limit).await;
                assert_eq!(read(&typed), read(&scanned), "{event_type} after {after:?} by {limit}");
                assert_eq!(
                    typed.examined, scanned.examined,
                    "{event_type} after {after:?} by {limit}"
                );
            }
        }
    }
}

#[tokio::test]
async fn a_page_seen_while_a_group_commits_holds_the_whole_group_or_nothing_of_it() {
    let fixture = Fixture::new().await;
    let (writer, reader) = (fixture.another().await, &fixture.store);
    let writing = tokio::spawn(async move {
        for _ in 0..30 {
            put(&writer, None, &events_of("live.a.b", 10), None)
                .await
                .expect("a group");
        }
    });
    eventually("every group was seen whole", Duration::from_secs(20), async || {
        let page = pull(reader, None, "live.*", 1_000).await;
        assert_eq!(page.events.len() % 10, 0, "{} events", page.events.len());
        assert_eq!(page.examined, page.positions.head);
        page.events.len() == 300
    })
    .await;
    writing.await.expect("the writer");
}
