//! The prune as a part of the running service.

use serde_json::Value;

use crate::{
    api_world::{Site, consumer, send, text},
    support::{
        envelopes::{envelope, unique_type},
        network::TokenSpec,
        wait::{SOON, eventually},
    },
};

async fn publish(site: &Site, event_type: &str) -> Value {
    site.one()
        .publish(&envelope("live").event_type(event_type))
        .await
        .expect(201)
}

#[tokio::test]
async fn old_events_leave_the_hot_store_of_a_running_service_and_keep_their_cursors() {
    let site = Site::own(2, &[("EVENTS_PRUNE_INTERVAL_MS", "100")]).await;
    let event_type = unique_type("live");
    let stored = publish(&site, &event_type).await;
    let id = text(&stored, "event_id").to_owned();
    site.run(&format!(
        "UPDATE events SET received_at = received_at - 31 * 86400000::bigint WHERE id = '{id}'"
    ))
    .await;
    let archived = "SELECT count(*) FROM events_archive WHERE id = $1";
    eventually("the event moves", SOON, async || site.number(archived, &id).await == 1).await;
    let token = TokenSpec::service(&consumer()).sign();
    let read = send(
        site.two(),
        "GET",
        &format!("/api/v1/events/{id}"),
        Some(&token),
        String::new(),
    )
    .await;
    assert_eq!((read.status, &read.body["cursor"]), (200, &stored["cursor"]));
    let pulled = send(
        site.one(),
        "GET",
        &format!("/api/v1/events?topic={event_type}"),
        Some(&token),
        String::new(),
    )
    .await;
    let pulled = pulled.body;
    assert_eq!(pulled["events"][0]["cursor"], stored["cursor"]);
    assert!(pulled.get("gap").is_none(), "{pulled}");
}

#[tokio::test]
async fn without_a_replay_tier_old_events_are_deleted_and_the_tier_is_emptied_of_what_nobody_holds() {
    let site = Site::own(
        1,
        &[
            ("EVENTS_PRUNE_INTERVAL_MS", "100"),
            ("EVENTS_REPLAY_RETENTION_DAYS", "0"),
        ],
    )
    .await;
    let stored = publish(&site, &unique_type("live")).await;
    let id = text(&stored, "event_id").to_owned();
    let row = |id: &str, seq: i64, hold: &str| {
        format!(
            "INSERT INTO events_archive (id, seq, epoch, event_type, source, subject_type, subject_id, visibility, received_at, \
             body, archived_at, hold_until) VALUES ('{id}', {seq}, 0, 'live.x.y', 'live', 't', 's', 'public', now_ms(), '', 1, {hold});"
        )
    };
    site.run(&(row("evt_left", -9, "NULL") + &row("evt_held", -8, "now_ms() + 3600000")))
        .await;
    site.run(&format!(
        "UPDATE events SET received_at = received_at - 31 * 86400000::bigint WHERE id = '{id}'"
    ))
    .await;
    let left = "SELECT (SELECT count(*) FROM events WHERE id = $1) + (SELECT count(*) FROM events_archive WHERE hold_until IS NULL)";
    eventually("nothing is left", SOON, async || site.number(left, &id).await == 0).await;
    let held = "SELECT count(*) FROM events_archive WHERE id = $1";
    assert_eq!(site.number(held, "evt_held").await, 1);
}
