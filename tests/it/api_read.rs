//! Reading the log over HTTP: pages, gaps, single events and checkpoints.

use serde_json::{Value, json};

use crate::{
    api_world::{Site, consumer, cursor, refused, text},
    support::{
        contracts::assert_valid,
        envelopes::{Envelope, batch, envelope, envelopes, id, unique_segment},
    },
};

const EVENTS: &str = "/api/v1/events";
const CHECKPOINTS: &str = "/api/v1/checkpoints";

/// A page as `live` reads it from the first process.
async fn pull(site: &Site, query: &str) -> Value {
    let token = site.one().service_token("live");
    let page = site
        .one()
        .get(&format!("{EVENTS}?{query}"), Some(&token))
        .await
        .expect(200);
    assert_valid("events.read-result@1", &page);
    page
}

fn items(page: &Value) -> &Vec<Value> {
    page["events"].as_array().expect("a list of events")
}

fn ids(page: &Value) -> Vec<&str> {
    items(page)
        .iter()
        .map(|item| text(&item["event"], "event_id"))
        .collect()
}

/// Publishes events as `live` and yields their ids.
async fn publish(site: &Site, events: &[Envelope]) -> Vec<String> {
    for part in events.chunks(100) {
        site.one().publish_as("live", &batch(part)).await.expect(201);
    }
    events.iter().map(|event| event.id().to_owned()).collect()
}

#[tokio::test]
async fn pages_hold_every_event_once_and_in_order_whatever_their_size() {
    let site = Site::shared().await;
    let (mine, others) = (envelopes("live", 25), envelopes("live", 25));
    let mixed: Vec<Envelope> = mine
        .iter()
        .zip(&others)
        .flat_map(|(a, b)| [a.clone(), b.clone()])
        .collect();
    publish(&site, &mixed).await;
    let wanted: Vec<&str> = mine.iter().map(Envelope::id).collect();
    let exact = mine[0].type_name().to_owned();
    let family = format!("{}.*", exact.rsplit_once('.').expect("segments").0);
    for topic in [exact.clone(), family, format!("chat.none,{exact}")] {
        for limit in [1, 7, 25, 1000] {
            let mut seen = Vec::new();
            let mut after = String::new();
            loop {
                let page = pull(&site, &format!("topic={topic}&limit={limit}&after={after}")).await;
                assert!(page.get("gap").is_none() && items(&page).len() <= limit, "{page}");
                seen.extend(ids(&page).into_iter().map(str::to_owned));
                after = text(&page, "next_cursor").to_owned();
                if items(&page).len() < limit {
                    break;
                }
                assert_eq!(
                    items(&page)[limit - 1]["cursor"],
                    page["next_cursor"],
                    "a full page ends at its last event"
                );
            }
            assert_eq!(seen, wanted, "{topic} by {limit}");
        }
    }
}

#[tokio::test]
async fn a_page_holds_a_hundred_events_unless_asked_otherwise() {
    let site = Site::shared().await;
    let events = envelopes("live", 120);
    publish(&site, &events).await;
    let topic = events[0].type_name();
    assert_eq!(items(&pull(&site, &format!("topic={topic}")).await).len(), 100);
    assert_eq!(
        items(&pull(&site, &format!("topic={topic}&limit=1000")).await).len(),
        120
    );
    let from = pull(&site, &format!("topic={topic}&limit=50")).await;
    let item = &items(&from)[9];
    let rest = pull(
        &site,
        &format!("topic={topic}&limit=1000&after={}", text(item, "cursor")),
    )
    .await;
    assert_eq!(
        ids(&rest)[0],
        events[10].id(),
        "an event's own cursor is a place to go on from"
    );
    assert_eq!(items(&rest).len(), 110);
}

#[tokio::test]
async fn the_next_cursor_moves_past_what_does_not_match() {
    let site = Site::own(1, &[]).await;
    let empty = pull(&site, "").await;
    assert_eq!(
        empty,
        json!({ "events": [], "next_cursor": cursor(0, 0), "latest_cursor": cursor(0, 0) })
    );
    publish(&site, &envelopes("live", 5)).await;
    for topic in ["live.none.at_all", "live.none.*", "chat.*,games.*"] {
        let page = pull(&site, &format!("topic={topic}&after={}", cursor(0, 2))).await;
        assert_eq!(
            page,
            json!({ "events": [], "next_cursor": cursor(0, 5), "latest_cursor": cursor(0, 5) }),
            "{topic}"
        );
    }
    let page = pull(&site, "limit=2").await;
    assert_eq!(
        (&page["next_cursor"], &page["latest_cursor"]),
        (&json!(cursor(0, 2)), &json!(cursor(0, 5)))
    );
    for all in ["topic=*", "topic=", "after=", "topic=*&after="] {
        assert_eq!(items(&pull(&site, all).await).len(), 5, "{all}");
    }
}

#[tokio::test]
async fn a_topic_list_takes_whatever_any_of_its_patterns_matches() {
    let site = Site::shared().await;
    let stem = unique_segment();
    let types = [
        format!("live.{stem}.a"),
        format!("live.{stem}.a.b"),
        format!("live.{stem}_x.a"),
        format!("live.x.{stem}"),
        format!("live.{stem}.c.a"),
    ];
    let events: Vec<Envelope> = types.iter().map(|name| envelope("live").event_type(name)).collect();
    publish(&site, &events).await;
    for (topic, wanted) in [
        (format!("live.{stem}.*"), vec![0, 1, 4]),
        (format!("live.{stem}.a"), vec![0]),
        (format!("live.*.{stem}"), vec![3]),
        (format!("live.{stem}.*.a"), vec![4]),
        (format!("*.{stem}.*"), vec![0, 1, 4]),
        (format!("live.{stem}_x.*"), vec![2]),
        (format!("%20live.{stem}.a%20,%20live.x.{stem}"), vec![0, 3]),
        (format!("live.{stem}.*,live.{stem}.a,live.{stem}.a"), vec![0, 1, 4]),
        (format!("{stem}.*"), vec![]),
        (vec![format!("live.{stem}.a"); 20].join(","), vec![0]),
    ] {
        let page = pull(&site, &format!("topic={topic}&limit=1000")).await;
        let wanted: Vec<&str> = wanted.into_iter().map(|at: usize| events[at].id()).collect();
        assert_eq!(ids(&page), wanted, "{topic}");
    }
}

#[tokio::test]
async fn a_position_that_is_not_of_this_log_is_answered_with_the_gap() {
    let site = Site::own(1, &[]).await;
    publish(&site, &envelopes("live", 6)).await;
    site.run("DELETE FROM events WHERE seq <= 3; UPDATE store_floor SET value = 3 WHERE name = 'events'")
        .await;
    let gap = |page: &Value| {
        page.get("gap")
            .map(|gap| (gap["from_seq"].as_i64(), gap["to_seq"].as_i64()))
    };
    for (query, wanted, count) in [
        (String::new(), Some((Some(1), Some(3))), 3),
        (format!("after={}", cursor(0, 0)), Some((Some(1), Some(3))), 3),
        (format!("after={}", cursor(0, 2)), Some((Some(3), Some(3))), 3),
        (format!("after={}", cursor(0, 3)), None, 3),
        (format!("after={}", cursor(0, 5)), None, 1),
        (format!("after={}", cursor(0, 6)), None, 0),
        (format!("after={}", cursor(0, 9)), Some((Some(7), Some(9))), 0),
        (
            format!("after={}", cursor(0, 9_007_199_254_740_991)),
            Some((Some(7), Some(9_007_199_254_740_991))),
            0,
        ),
        (format!("after={}", cursor(7, 5)), Some((Some(1), Some(3))), 3),
        (
            format!("topic=live.none.*&after={}", cursor(7, 5)),
            Some((Some(1), Some(3))),
            0,
        ),
    ] {
        let page = pull(&site, &query).await;
        assert_eq!((gap(&page), items(&page).len()), (wanted, count), "{query}: {page}");
        assert_eq!(
            page["next_cursor"],
            json!(cursor(0, 6)),
            "{query}: never beyond the head: {page}"
        );
    }
    let first = site.one().get(EVENTS, Some(&site.one().service_token("live"))).await;
    assert!(
        first
            .text
            .starts_with(r#"{"gap":{"from_seq":1,"to_seq":3},"events":[{"cursor":"c1.0."#),
        "{}",
        first.text
    );

    // A new history: old cursors are answered with what is there, and new ones carry its number.
    site.run("UPDATE store_epoch SET value = 1 WHERE name = 'events'").await;
    let page = pull(&site, &format!("after={}", cursor(0, 6))).await;
    assert_eq!((gap(&page), items(&page).len()), (Some((Some(1), Some(3))), 3));
    assert_eq!(page["latest_cursor"], json!(cursor(1, 6)));
    let token = site.one().service_token("live");
    let last = text(&items(&page)[2]["event"], "event_id").to_owned();
    let single = site
        .one()
        .get(&format!("{EVENTS}/{last}"), Some(&token))
        .await
        .expect(200);
    assert_eq!(single["cursor"], json!(cursor(1, 6)));
    let published = site.one().publish(&envelope("live")).await.expect(201);
    assert_eq!(published["cursor"], json!(cursor(1, 7)), "publishing follows at once");

    // Nothing left: the head stays where it was.
    site.run("DELETE FROM events; UPDATE store_floor SET value = 7 WHERE name = 'events'")
        .await;
    let page = pull(&site, "").await;
    assert_eq!(page["latest_cursor"], json!(cursor(1, 7)), "{page}");
    assert_eq!(gap(&page), Some((Some(1), Some(7))));
}

#[tokio::test]
async fn an_event_by_id_is_whoever_publishes_but_never_one_of_a_sandbox() {
    let site = Site::shared().await;
    let event = envelope("live").visibility("subject");
    let result = site.one().publish(&event).await.expect(201);
    let reader = site.two().service_token(&consumer());
    let path = format!("{EVENTS}/{}", event.id());
    let read = site.two().get(&path, Some(&reader)).await.expect(200);
    assert_valid("events.read-result@1", &read);
    assert_eq!(read["cursor"], result["cursor"]);
    let encoded = path.replace("evt_", "%65vt%5F");
    site.two().get(&encoded, Some(&reader)).await.expect(200);
    refused(
        &site.two().get(&path.to_lowercase(), Some(&reader)).await,
        404,
        "events.not_found",
    );

    let project = id("prj");
    site.run(&format!(
        "UPDATE events SET project_id = '{project}' WHERE id = '{}'",
        event.id()
    ))
    .await;
    site.two().get(&path, Some(&reader)).await.expect(200);
    let topic = event.type_name();
    assert!(
        items(&pull(&site, &format!("topic={topic}")).await).is_empty(),
        "an app's event is not in a service's pages"
    );
    site.run(&format!(
        "UPDATE events SET env = 'sandbox' WHERE id = '{}'",
        event.id()
    ))
    .await;
    refused(&site.two().get(&path, Some(&reader)).await, 404, "events.not_found");
}

#[tokio::test]
async fn a_checkpoint_is_kept_for_each_consumer_and_pattern_on_every_process() {
    let site = Site::shared().await;
    let (mine, other) = (consumer(), consumer());
    let tokens = [mine.as_str(), other.as_str()].map(|name| site.one().service_token(name));
    let path = format!("{CHECKPOINTS}?topic=live.*");
    let nothing = site.one().get(&path, Some(&tokens[0])).await;
    assert_eq!(
        nothing.text,
        format!(r#"{{"consumer":"{mine}","topic":"live.*","cursor":null,"carrier":null,"updated_at":null}}"#)
    );
    assert_valid("events.read-result@1", &nothing.body);

    let body = json!({ "topic": "live.*", "cursor": cursor(0, 42), "carrier": "pg-v1", "ignored": true });
    let put = site.one().put(CHECKPOINTS, Some(&tokens[0]), &body).await;
    let stored = put.clone().expect(200);
    assert_valid("events.read-result@1", &stored);
    assert_eq!(
        (&stored["cursor"], &stored["carrier"]),
        (&json!(cursor(0, 42)), &json!("pg-v1"))
    );
    assert!(
        put.text
            .starts_with(&format!(r#"{{"consumer":"{mine}","topic":"live.*","cursor":"#)),
        "{}",
        put.text
    );
    assert_eq!(site.two().get(&path, Some(&tokens[0])).await.expect(200), stored);
    let others = site.two().get(&path, Some(&tokens[1])).await.expect(200);
    assert_eq!(others["cursor"], Value::Null, "another consumer's own");
    let narrower = site
        .two()
        .get(&format!("{CHECKPOINTS}?topic=live.a.*"), Some(&tokens[0]))
        .await
        .expect(200);
    assert_eq!(narrower["cursor"], Value::Null, "another pattern's own");

    // The last write wins: backwards, to another epoch, ahead of the head, without a carrier.
    for position in [cursor(0, 3), cursor(9, 1), cursor(0, 9_007_199_254_740_991)] {
        let body = json!({ "topic": "live.*", "cursor": position });
        let put = site.two().put(CHECKPOINTS, Some(&tokens[0]), &body).await.expect(200);
        assert_eq!((&put["cursor"], &put["carrier"]), (&json!(position), &Value::Null));
        assert_eq!(site.one().get(&path, Some(&tokens[0])).await.expect(200), put);
    }
    let rows = site
        .number("SELECT count(*) FROM consumer_checkpoints WHERE consumer = $1", &mine)
        .await;
    assert_eq!(rows, 1);
}
