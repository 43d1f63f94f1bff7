//! What operators see and do: the list of deliveries and the replay.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::{
    api_world::{Site, consumer, cursor, operator, text},
    support::{
        client::Response,
        contracts::assert_valid,
        envelopes::{Envelope, batch, envelope, envelopes, event_id, id},
    },
};

const DELIVERIES: &str = "/api/v1/deliveries";

async fn list(site: &Site, query: &str) -> Response {
    let answer = site
        .one()
        .get(&format!("{DELIVERIES}?{query}"), Some(&operator()))
        .await;
    assert_eq!(answer.status, 200, "{query}: {}", answer.text);
    assert_valid("events.delivery-admin-result@1", &answer.body);
    answer
}

async fn replay(site: &Site, body: &Value) -> Value {
    let answer = site
        .one()
        .post(&format!("{DELIVERIES}/replay"), Some(&operator()), body)
        .await
        .expect(200);
    assert_valid("events.delivery-admin-result@1", &answer);
    answer
}

fn rows(page: &Value) -> Vec<(i64, String)> {
    let rows = page["deliveries"].as_array().expect("a list");
    rows.iter()
        .map(|row| {
            (
                row["seq"].as_i64().expect("a position"),
                text(row, "subscription_id").to_owned(),
            )
        })
        .collect()
}

/// Walks the list from its start, checking that every page but the last names the next one.
async fn walk(site: &Site, query: &str, limit: usize) -> Vec<(i64, String)> {
    let mut seen = Vec::new();
    let mut after = String::new();
    loop {
        let page = list(site, &format!("{query}&limit={limit}&after={after}")).await.body;
        let mut rows = rows(&page);
        assert!(rows.len() <= limit);
        assert!(
            seen.is_empty() || !rows.is_empty(),
            "a page that names the next one is not the last"
        );
        let full = rows.len() == limit;
        seen.append(&mut rows);
        match page.get("next") {
            Some(next) => {
                assert!(full, "a page that is not full is the last: {page}");
                after = next.as_str().expect("a text").to_owned();
            }
            None => return seen,
        }
    }
}

/// A site with 40 events, each on its way to three subscriptions, in every state.
async fn filled() -> (Site, Vec<String>, Vec<(i64, String)>) {
    let site = Site::own(1, &[]).await;
    let (slug, events) = (consumer(), envelopes("live", 40));
    let mut ids = Vec::new();
    for path in ["a", "b", "c"] {
        ids.push(text(&site.subscribe(&slug, "live.*", path).await, "id").to_owned());
    }
    site.one().publish_as("live", &batch(&events)).await.expect(201);
    site.run(
        "UPDATE deliveries SET status = (ARRAY['pending', 'failed', 'delivered', 'dead'])[1 + seq % 4], \
         attempt = seq % 4, last_status = 503, last_error = 'HTTP 503', \
         delivered_at = CASE WHEN seq % 4 = 2 THEN now_ms() END, \
         next_attempt_at = CASE WHEN seq % 4 < 2 THEN now_ms() + 86400000 END; \
         TRUNCATE delivery_counts; \
         INSERT INTO delivery_counts (owner, role, period, pending, failed, delivered, dead) \
         SELECT '', '', 0, count(*) FILTER (WHERE status = 'pending'), count(*) FILTER (WHERE status = 'failed'), \
         count(*) FILTER (WHERE status = 'delivered'), count(*) FILTER (WHERE status = 'dead') FROM deliveries",
    )
    .await;
    ids.sort();
    let all = (1..=40)
        .flat_map(|seq| ids.iter().map(move |id| (seq, id.clone())))
        .collect();
    (site, ids, all)
}

#[tokio::test]
async fn the_list_walks_every_row_once_by_position_and_subscription() {
    let (site, ids, all) = filled().await;
    for limit in [1, 7, 40, 60, 120, 1000] {
        assert_eq!(walk(&site, "", limit).await, all, "by {limit}");
    }
    let of = |wanted: &str| all.iter().filter(|(_, id)| id == wanted).cloned().collect::<Vec<_>>();
    assert_eq!(
        walk(&site, &format!("subscription_id={}", ids[1]), 7).await,
        of(&ids[1])
    );
    for (at, status) in ["pending", "failed", "delivered", "dead"].into_iter().enumerate() {
        let wanted: Vec<_> = all.iter().filter(|(seq, _)| seq % 4 == at as i64).cloned().collect();
        assert_eq!(walk(&site, &format!("status={status}"), 7).await, wanted, "{status}");
        let one: Vec<_> = wanted.iter().filter(|(_, id)| *id == ids[2]).cloned().collect();
        assert_eq!(
            walk(&site, &format!("status={status}&subscription_id={}", ids[2]), 3).await,
            one,
            "{status}"
        );
    }
    for nobody in [id("sub"), "x".to_owned(), "%00".to_owned()] {
        assert!(rows(&list(&site, &format!("subscription_id={nobody}")).await.body).is_empty());
    }
}

/// Makes deliveries of a subscription at these positions, tomorrow's where they wait.
async fn make(site: &Site, subscription: &str, positions: std::ops::RangeInclusive<i64>, status: &str) {
    let (first, last) = positions.into_inner();
    site.run(&format!(
        "INSERT INTO deliveries (event_id, subscription_id, seq, priority, status, next_attempt_at, created_at, \
         updated_at, head) SELECT 'evt_' || lpad(n::text, 26, '0'), '{subscription}', n, 1, '{status}', \
         CASE WHEN '{status}' IN ('pending', 'failed') THEN now_ms() + 86400000 END, 1, 1, true \
         FROM generate_series({first}, {last}) n"
    ))
    .await;
}

/// The positions on each page of a list, from its start to the last page.
async fn pages(site: &Site, query: &str) -> Vec<Vec<i64>> {
    let mut pages = Vec::new();
    let mut after = String::new();
    loop {
        let page = list(site, &format!("{query}&limit=1000{after}")).await.body;
        pages.push(rows(&page).into_iter().map(|(seq, _)| seq).collect());
        match page.get("next") {
            Some(next) => after = format!("&after={}", next.as_str().expect("a text")),
            None => return pages,
        }
        assert!(pages.len() < 50, "{query}: pages without an end");
    }
}

#[tokio::test]
async fn few_rows_among_many_are_found_by_looking_at_so_many_at_a_time() {
    let site = Site::own(1, &[]).await;
    let slug = consumer();
    let mut ids = Vec::new();
    for path in ["a", "b"] {
        ids.push(text(&site.subscribe(&slug, "live.*", path).await, "id").to_owned());
    }
    let [one, two] = [&ids[0], &ids[1]];
    make(&site, one, 1..=12_000, "delivered").await;
    make(&site, one, 12_001..=12_003, "pending").await;
    make(&site, one, 12_004..=12_006, "failed").await;
    make(&site, one, 12_007..=12_009, "dead").await;
    make(&site, two, 12_010..=12_012, "delivered").await;
    make(&site, two, 12_013..=12_016, "pending").await;
    // One is in flight, and two wait behind another of their key.
    site.run(
        "UPDATE deliveries SET lease_owner = 'x', lease_until = now_ms() + 86400000, claim_id = 1 WHERE seq = 12013; \
         UPDATE deliveries SET ordering_key = 'k', head = seq = 12014 WHERE seq >= 12014",
    )
    .await;
    let waiting: Vec<i64> = (12_001..=12_003).chain(12_013..=12_016).collect();
    // However much was delivered before them.
    for (query, wanted) in [
        ("status=pending".to_owned(), waiting),
        (
            format!("status=pending&subscription_id={one}"),
            (12_001..=12_003).collect(),
        ),
        (
            format!("status=pending&subscription_id={two}"),
            (12_013..=12_016).collect(),
        ),
        ("status=failed".to_owned(), (12_004..=12_006).collect()),
        ("status=dead".to_owned(), (12_007..=12_009).collect()),
        (
            format!("status=dead&subscription_id={one}"),
            (12_007..=12_009).collect(),
        ),
        (format!("status=failed&subscription_id={two}"), vec![]),
        (
            format!("status=delivered&subscription_id={two}"),
            (12_010..=12_012).collect(),
        ),
        (format!("subscription_id={two}"), (12_010..=12_016).collect()),
    ] {
        assert_eq!(pages(&site, &query).await, [wanted], "{query}");
    }

    // Where many wait as well, a page says how far it looked.
    make(&site, two, 20_001..=26_000, "pending").await;
    make(&site, one, 26_001..=26_003, "delivered").await;
    let found = pages(&site, "status=delivered").await;
    let wanted: Vec<i64> = (1..=12_000).chain(12_010..=12_012).chain(26_001..=26_003).collect();
    assert_eq!(found.concat(), wanted);
    assert!(
        found.iter().any(|page| page.len() < 1000),
        "a page looks at so many only"
    );
    let found = pages(&site, "status=pending").await;
    let wanted: Vec<i64> = (12_001..=12_003)
        .chain(12_013..=12_016)
        .chain(20_001..=26_000)
        .collect();
    assert_eq!(found.concat(), wanted);
    assert!(found[0].is_empty() && found.len() <= 11, "{} pages", found.len());
}

#[tokio::test]
async fn the_list_still_takes_a_position_and_counts_everything_whatever_the_filter() {
    let (site, ids, all) = filled().await;
    let first = list(&site, "").await;
    assert_eq!(rows(&first.body), all[..100], "a hundred when nothing is said");
    let counts = json!({ "pending": 30, "failed": 30, "delivered": 30, "dead": 30 });
    for query in [
        "",
        "status=dead",
        "after_seq=40",
        &format!("subscription_id={}", ids[0]),
    ] {
        assert_eq!(list(&site, query).await.body["counts"], counts, "{query}");
    }
    let after = |seq: i64| all.iter().filter(|(at, _)| *at > seq).cloned().collect::<Vec<_>>();
    for seq in [0, 1, 17, 39, 40, 9_007_199_254_740_991] {
        assert_eq!(
            rows(&list(&site, &format!("after_seq={seq}&limit=1000")).await.body),
            after(seq),
            "{seq}"
        );
    }
    let page = list(&site, "after_seq=17&limit=4").await.body;
    let next = list(&site, &format!("limit=1000&after={}", text(&page, "next")))
        .await
        .body;
    assert_eq!(
        [rows(&page), rows(&next)].concat(),
        after(17),
        "after_seq and next go together"
    );
}

#[tokio::test]
async fn a_row_of_the_list_is_shown_with_the_members_of_the_contract_and_without_the_payload() {
    let (site, ids, _) = filled().await;
    let answer = list(&site, &format!("status=delivered&limit=1&subscription_id={}", ids[0])).await;
    let row = &answer.body["deliveries"][0];
    let start = format!(
        r#"{{"deliveries":[{{"event_id":"{}","subscription_id":"{}","seq":2,"status":"delivered","attempt":2,"next_attempt_at":null,"last_status":503,"last_error":"HTTP 503","delivered_at":"2"#,
        text(row, "event_id"),
        ids[0]
    );
    assert!(answer.text.starts_with(&start), "{}", answer.text);
    assert!(
        !answer.text.contains("payload") && !answer.text.contains("secret"),
        "{}",
        answer.text
    );
}

#[tokio::test]
async fn a_replay_of_events_queues_those_that_are_stored_and_match() {
    let site = Site::shared().await;
    let slug = consumer();
    let events = envelopes("live", 6);
    let made = site.subscribe(&slug, events[0].type_name(), "replay").await;
    let sub = text(&made, "id").to_owned();
    let other = envelope("live");
    site.one().publish_as("live", &batch(&events)).await.expect(201);
    site.one().publish(&other).await.expect(201);
    site.run(&format!(
        "UPDATE deliveries SET status = 'delivered', attempt = 3, last_status = 200, last_error = 'x', \
         delivered_at = 5, next_attempt_at = NULL WHERE subscription_id = '{sub}'"
    ))
    .await;
    // A row that is gone is made again.
    site.run(&format!("DELETE FROM deliveries WHERE event_id = '{}'", events[0].id()))
        .await;
    site.run(&format!(
        "UPDATE events SET env = 'sandbox' WHERE id = '{}'",
        events[5].id()
    ))
    .await;

    let chosen = [
        events[0].id(),
        events[1].id(),
        events[1].id(),
        events[3].id(),
        other.id(),
        events[5].id(),
        "evt_x",
        "\u{0}",
        "",
    ];
    let mut ids: Vec<String> = chosen.into_iter().map(str::to_owned).collect();
    ids.push(event_id());
    // An attempt of the fourth is running.
    site.run(&format!(
        "UPDATE deliveries SET status = 'failed', lease_owner = 'w', lease_until = now_ms() + 60000, claim_id = 7, \
         claimed_generation = 0 WHERE event_id = '{}'",
        events[3].id()
    ))
    .await;
    let answer = replay(
        &site,
        &json!({ "subscription_id": sub, "event_ids": ids, "more": 1, "details": true }),
    )
    .await;
    let result = |event_id: &str, result: &str| json!({ "event_id": event_id, "result": result });
    assert_eq!(
        answer,
        json!({ "subscription_id": sub, "queued": 3, "created": 1, "in_flight": 1, "enabled": true, "results": [
            result(events[0].id(), "created"),
            result(events[1].id(), "queued"),
            result(events[3].id(), "in_flight"),
            result(other.id(), "not_matched"),
            result(events[5].id(), "not_matched"),
            result("evt_x", "not_found"),
            result("\u{0}", "not_found"),
            result("", "not_found"),
            result(&ids[9], "not_found"),
        ] })
    );
    let reset = site
        .number(
            "SELECT count(*) FROM deliveries WHERE subscription_id = $1 AND status = 'pending' AND attempt = 0 \
             AND next_attempt_at <= now_ms() AND last_status IS NULL AND last_error IS NULL AND delivered_at IS NULL",
            &sub,
        )
        .await;
    assert_eq!(
        (reset, site.deliveries_of(&sub).await),
        (2, 6),
        "two are due, the others stay as they were"
    );

    assert_eq!(
        replay(
            &site,
            &json!({ "subscription_id": sub, "event_ids": [], "details": true })
        )
        .await,
        json!({ "subscription_id": sub, "queued": 0, "created": 0, "in_flight": 0, "enabled": true, "results": [] })
    );
    let many: Vec<String> = (0..1000).map(|_| event_id()).collect();
    assert_eq!(
        replay(
            &site,
            &json!({ "subscription_id": sub, "event_ids": many, "details": false })
        )
        .await,
        json!({ "subscription_id": sub, "queued": 0 })
    );
}

#[tokio::test]
async fn a_replay_from_a_position_queues_what_matches_from_there_on_even_while_disabled() {
    let site = Site::shared().await;
    let slug = consumer();
    let events = envelopes("live", 10);
    let others = envelopes("live", 10);
    let mixed: Vec<Envelope> = events
        .iter()
        .zip(&others)
        .flat_map(|(a, b)| [a.clone(), b.clone()])
        .collect();
    site.one().publish_as("live", &batch(&mixed)).await.expect(201);
    let made = site.subscribe(&slug, events[0].type_name(), "replay").await;
    let sub = text(&made, "id").to_owned();
    let path = format!("/api/v1/subscriptions/{sub}/disable");
    site.one()
        .post(&path, Some(&site.one().service_token(&slug)), &json!({}))
        .await
        .expect(200);
    let fourth = site
        .number("SELECT seq FROM events WHERE id = $1", events[3].id())
        .await;
    let answered = |queued: i64, created: i64| {
        json!({
            "subscription_id": sub, "queued": queued, "created": created, "in_flight": 0, "enabled": false
        })
    };
    for (from, queued, created) in [
        (fourth, 7, 7),
        (fourth + 1, 6, 0),
        (0, 10, 3),
        (9_007_199_254_740_991, 0, 0),
    ] {
        let answer = replay(
            &site,
            &json!({ "subscription_id": sub, "from_seq": from, "details": true }),
        )
        .await;
        assert_eq!(answer, answered(queued, created), "from {from}");
    }
    for (after, queued) in [(fourth, 6), (fourth - 1, 7), (0, 10), (9_007_199_254_740_991, 0)] {
        let answer = replay(
            &site,
            &json!({ "subscription_id": sub, "cursor": cursor(0, after), "details": true }),
        )
        .await;
        assert_eq!(answer, answered(queued, 0), "after {after}");
    }
    assert_eq!(site.deliveries_of(&sub).await, 10);
}

#[tokio::test]
async fn a_replay_of_more_than_ten_thousand_says_where_to_go_on() {
    let site = Site::own(1, &[]).await;
    let slug = consumer();
    let sub = text(&site.subscribe(&slug, "live.many.*", "replay").await, "id").to_owned();
    let made = 20_050;
    // Every second event matches; the log has holes.
    site.run(&format!(
        "INSERT INTO events (id, seq, event_type, version, source, actor, subject_type, subject_id, trace_id, \
         priority, visibility, occurred_at, received_at, payload, publisher) \
         SELECT 'evt_' || lpad(n::text, 26, '0'), n * 3, CASE WHEN n % 2 = 0 THEN 'live.many.x' ELSE 'live.other.x' END, \
         1, 'live', '{{\"type\":\"service\",\"id\":\"live\"}}', 't', '1', repeat('1', 32), 'low', 'internal', \
         '2026-10-21T08:15:30Z', 1, '{{}}', 'svc:live' FROM generate_series(1, {made}) n"
    ))
    .await;
    let first = replay(&site, &json!({ "subscription_id": sub, "from_seq": 0 })).await;
    // Who asks for no details gets the answer of the service before, and where to go on.
    assert_eq!(
        first,
        json!({ "subscription_id": sub, "queued": 10_000, "next": cursor(0, 20_002 * 3 - 1) })
    );
    let rest = replay(&site, &json!({ "subscription_id": sub, "cursor": first["next"] })).await;
    assert_eq!(rest, json!({ "subscription_id": sub, "queued": 25 }));
    assert_eq!(site.deliveries_of(&sub).await, 10_025);
    // Exactly ten thousand leave nothing.
    let from = 2 * 26 * 3;
    assert_eq!(
        replay(&site, &json!({ "subscription_id": sub, "from_seq": from })).await,
        json!({ "subscription_id": sub, "queued": 10_000 })
    );
    let counts = list(&site, "limit=1").await.body["counts"].clone();
    assert_eq!(
        counts,
        json!({ "pending": 10_025, "failed": 0, "delivered": 0, "dead": 0 })
    );
    let walked = walk(&site, "", 1000).await;
    assert_eq!(walked.len(), 10_025);
    assert_eq!(walked.iter().collect::<BTreeSet<_>>().len(), 10_025);
}

#[tokio::test]
async fn replays_and_states_are_counted_as_they_change() {
    let (site, ids, _) = filled().await;
    let (mut pending, mut dead) = (30, 30);
    let dead_events: Vec<String> =
        sqlx::query_scalar("SELECT event_id FROM deliveries WHERE subscription_id = $1 AND status = 'dead'")
            .bind(&ids[0])
            .fetch_all(&site.pool)
            .await
            .expect("ten rows");
    for chosen in dead_events.chunks(4) {
        replay(&site, &json!({ "subscription_id": ids[0], "event_ids": chosen })).await;
        (pending, dead) = (pending + chosen.len(), dead - chosen.len());
        let counts = list(&site, "status=dead").await.body["counts"].clone();
        assert_eq!(
            counts,
            json!({ "pending": pending, "failed": 30, "delivered": 30, "dead": dead })
        );
    }
    let answer = list(&site, &format!("status=dead&subscription_id={}", ids[0])).await;
    assert!(rows(&answer.body).is_empty(), "{}", answer.text);
}

#[tokio::test]
async fn a_replay_by_time_begins_with_the_first_event_received_at_or_after_it() {
    let site = Site::own(1, &[]).await;
    let slug = consumer();
    let sub = text(&site.subscribe(&slug, "live.timed.*", "replay").await, "id").to_owned();
    // A log with holes: event n is received n seconds after 2026-10-21T08:00:00Z, several at once.
    let start = 1_792_569_600_000_i64;
    site.run(&format!(
        "INSERT INTO events (id, seq, event_type, version, source, actor, subject_type, subject_id, trace_id, \
         priority, visibility, occurred_at, received_at, payload, publisher) \
         SELECT 'evt_' || lpad(n::text, 26, '0'), n * 5 + (n / 100) * 4294967296, \
         CASE WHEN n % 2 = 0 THEN 'live.timed.x' ELSE 'live.other.x' END, 1, 'live', \
         '{{\"type\":\"service\",\"id\":\"live\"}}', 't', '1', repeat('1', 32), 'low', 'internal', '2026-10-21T08:15:30Z', \
         {start} + (n / 4) * 4000, '{{}}', 'svc:live' FROM generate_series(1, 400) n"
    ))
    .await;
    for (since, queued) in [
        ("2026-10-21T08:00:00Z", 200),
        ("1970-01-01T00:00:00Z", 200),
        ("0000-01-01T00:00:00Z", 200),
        ("2026-10-21T08:00:00.001Z", 199),
        ("2026-10-21T08:00:04Z", 199),
        ("2026-10-21T10:00:04+02:00", 199),
        ("2026-10-21T08:00:04.001Z", 197),
        ("2026-10-21T08:06:36.000Z", 3),
        ("2026-10-21T08:06:40Z", 1),
        ("2026-10-21T08:06:40.001Z", 0),
        ("9999-12-31T23:59:59Z", 0),
    ] {
        let body = json!({ "subscription_id": sub, "since": since });
        assert_valid("events.delivery-admin-request@1", &body);
        let answer = replay(&site, &body).await;
        assert_eq!(answer, json!({ "subscription_id": sub, "queued": queued }), "{since}");
    }
    // The clock was set back by eight seconds: what it called the same time before and after is all there.
    site.run(&format!(
        "UPDATE events SET received_at = received_at - 8000 WHERE received_at >= {start} + 200000"
    ))
    .await;
    let from = |seconds: i64| format!("2026-10-21T08:{:02}:{:02}Z", seconds / 60, seconds % 60);
    for seconds in (180..212).step_by(4) {
        let answer = replay(&site, &json!({ "subscription_id": sub, "since": from(seconds) })).await;
        let first = site
            .number(
                "SELECT min(seq) FROM events WHERE received_at >= $1::bigint",
                &(start + seconds * 1000).to_string(),
            )
            .await;
        let wanted = site
            .number(
                "SELECT count(*) FROM events WHERE seq >= $1::bigint AND event_type = 'live.timed.x'",
                &first.to_string(),
            )
            .await;
        assert_eq!(answer["queued"], wanted, "{seconds} s");
    }
}

async fn skip(site: &Site, body: &Value) -> Value {
    assert_valid("events.delivery-skip-request@1", body);
    let answer = site
        .one()
        .post(&format!("{DELIVERIES}/skip"), Some(&operator()), body)
        .await
        .expect(200);
    assert_valid("events.delivery-admin-result@1", &answer);
    answer
}

#[tokio::test]
async fn a_skip_ends_what_waits_and_says_what_it_found_of_each() {
    let (site, ids, _) = filled().await;
    let events: Vec<String> = sqlx::query_scalar("SELECT id FROM events ORDER BY seq")
        .fetch_all(&site.pool)
        .await
        .expect("forty events");
    let event = |seq: usize| events[seq - 1].clone();
    // By position: 4 is pending, 1 failed, 2 delivered, 3 dead; 8 is being sent.
    site.run(&format!(
        "UPDATE deliveries SET lease_until = now_ms() + 60000, lease_owner = 'w', claim_id = 1, claimed_generation = 0 \
         WHERE subscription_id = '{}' AND seq = 8",
        ids[0]
    ))
    .await;
    let nobody = event_id();
    let wanted = [
        event(4),
        event(1),
        "\u{0}".to_owned(),
        event(2),
        event(3),
        event(4),
        event(8),
        nobody.clone(),
    ];
    let answer = skip(
        &site,
        &json!({ "subscription_id": ids[0], "event_ids": wanted, "more": 1 }),
    )
    .await;
    let result = |id: &str, result: &str| json!({ "event_id": id, "result": result });
    assert_eq!(
        answer,
        json!({ "subscription_id": ids[0], "skipped": 2, "results": [
            result(&event(4), "skipped"), result(&event(1), "skipped"), result("\u{0}", "not_found"),
            result(&event(2), "delivered"), result(&event(3), "dead"), result(&event(8), "in_flight"),
            result(&nobody, "not_found"),
        ] })
    );
    let page = list(&site, &format!("status=dead&limit=3&subscription_id={}", ids[0]))
        .await
        .body;
    let dead: Vec<_> = page["deliveries"].as_array().expect("rows").iter().collect();
    assert_eq!(rows(&page).iter().map(|row| row.0).collect::<Vec<_>>(), [1, 3, 4]);
    assert_eq!(
        (
            text(dead[0], "last_error"),
            &dead[0]["next_attempt_at"],
            &dead[0]["attempt"]
        ),
        ("skipped by an operator; before that: HTTP 503", &Value::Null, &json!(1))
    );
    assert_eq!(text(dead[1], "last_error"), "HTTP 503", "dead before");
    assert_eq!(
        page["counts"],
        json!({ "pending": 29, "failed": 29, "delivered": 30, "dead": 32 })
    );
    // A second time there is nothing left to end, and another subscription was not touched.
    let again = skip(
        &site,
        &json!({ "subscription_id": ids[0], "event_ids": [event(4), event(8)] }),
    )
    .await;
    assert_eq!(
        (&again["skipped"], &again["results"]),
        (
            &json!(0),
            &json!([result(&event(4), "dead"), result(&event(8), "in_flight")])
        )
    );
    let other = list(&site, &format!("status=dead&limit=1000&subscription_id={}", ids[1]))
        .await
        .body;
    assert_eq!(rows(&other).len(), 10);
    // A replay takes it back.
    replay(
        &site,
        &json!({ "subscription_id": ids[0], "event_ids": [event(4), event(8)] }),
    )
    .await;
    let skipped = site
        .number(
            "SELECT count(*) FROM deliveries WHERE subscription_id = $1 AND skipped",
            &ids[0],
        )
        .await;
    assert_eq!(skipped, 0);
}
