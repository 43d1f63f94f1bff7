//! `/api/v1/deliveries`, for operators: the list, sending again, and ending what waits.

use std::collections::HashSet;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Serialize;
use serde_json::Value;

use crate::domain::cursor::Cursor;
use crate::domain::ids::{EventId, SubscriptionId};
use crate::domain::json::SAFE_INTEGER_MAX as POSITION_MAX;
use crate::domain::time::{Millis, parse_rfc3339};
use crate::problem::ApiError;
use crate::store::{DeliveryCounts, DeliveryFilter, DeliveryRow, Replay, ReplaySelection, Skip};

use super::answer::{json, json_in};
use super::api::Api;
use super::body::read_members;
use super::caller::{Caller, ListDeliveries, ReplayDeliveries, SkipDeliveries};
use super::query::Query;

/// Bytes of a request to replay or skip: its ids, and room for how they are written.
const BODY_LIMIT: usize = 256 * 1024;
/// Deliveries on one page when the caller does not say.
const LIMIT_DEFAULT: u64 = 100;
/// Deliveries on one page at most.
const LIMIT_MAX: u64 = 1000;
/// Ids in one replay or skip at most.
const IDS_MAX: usize = 1000;

#[derive(Serialize)]
struct DeliveryView {
    event_id: String,
    subscription_id: String,
    seq: i64,
    status: String,
    attempt: i32,
    next_attempt_at: Option<Millis>,
    last_status: Option<i32>,
    last_error: Option<String>,
    delivered_at: Option<Millis>,
}

#[derive(Serialize)]
struct DeliveryList {
    deliveries: Vec<DeliveryView>,
    counts: DeliveryCounts,
    /// Opaque; absent on the last page. A page that looked at many rows may hold few or none and have it.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

#[derive(Serialize)]
struct ReplayView {
    subscription_id: String,
    queued: i64,
    /// The `cursor` to continue with; absent when nothing remains.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
    /// Only for who asks for it: callers of the service before compare the whole answer.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    details: Option<ReplayDetails>,
}

#[derive(Serialize)]
struct ReplayDetails {
    /// Of those that were queued: how many were made, and how many go out again when their running attempt has ended.
    created: i64,
    in_flight: i64,
    /// False: what was queued waits until the subscription is enabled.
    enabled: bool,
    /// What became of each event, in the order asked for, each once; only where events were named.
    #[serde(skip_serializing_if = "Option::is_none")]
    results: Option<Vec<EventResult>>,
}

#[derive(Serialize)]
struct SkipView {
    subscription_id: String,
    /// How many are dead now that were not before.
    skipped: usize,
    /// What became of each event, in the order asked for, each once.
    results: Vec<EventResult>,
}

#[derive(Serialize)]
struct EventResult {
    event_id: String,
    result: &'static str,
}

/// The state of deliveries, by position and subscription.
pub(super) async fn list(
    State(api): State<Arc<Api>>,
    _caller: Caller<ListDeliveries>,
    query: Query,
) -> Result<Response, ApiError> {
    let status = query.non_empty("status")?;
    if status.is_some_and(|status| !matches!(status, "pending" | "delivered" | "failed" | "dead")) {
        return Err(ApiError::BadRequest(
            "status must be pending, delivered, failed or dead".into(),
        ));
    }
    let limit = query.integer("limit", 1..=LIMIT_MAX)?.unwrap_or(LIMIT_DEFAULT);
    let after = match (
        query.non_empty("after")?,
        query.integer("after_seq", 0..=POSITION_MAX.unsigned_abs())?,
    ) {
        (Some(_), Some(_)) => return Err(ApiError::BadRequest("send after or after_seq, not both".into())),
        (Some(next), None) => {
            place_of(next).ok_or(ApiError::BadRequest("after must be the next of an earlier page".into()))?
        }
        // Every row of that position was seen.
        (None, Some(seq)) => (i64::try_from(seq).unwrap_or(POSITION_MAX) + 1, String::new()),
        (None, None) => (0, String::new()),
    };
    let filter = DeliveryFilter {
        status: status.map(str::to_owned),
        // A text with NUL names no subscription, and PostgreSQL could not even look for it.
        subscription_id: query
            .non_empty("subscription_id")?
            .map(|id| id.replace('\0', "\u{fffd}")),
        after,
        limit: usize::try_from(limit).unwrap_or(usize::MAX),
    };
    let room = api.rooms.page().await;
    let page = api.store.deliveries(&filter).await?;
    let counts = api.store.delivery_counts().await?;
    let next = page.next.map(|(seq, subscription_id)| place(seq, &subscription_id));
    let deliveries = page.rows.into_iter().map(DeliveryView::from).collect();
    let list = DeliveryList {
        deliveries,
        counts,
        next,
    };
    Ok(json_in(room, &list))
}

/// Queues deliveries of a subscription again.
pub(super) async fn replay(
    State(api): State<Arc<Api>>,
    _caller: Caller<ReplayDeliveries>,
    request: Request,
) -> Result<Response, ApiError> {
    let body: Value = serde_json::from_str(&read_members(request, BODY_LIMIT, ApiError::BadRequest).await?)
        .map_err(|error| ApiError::BadJson(format!("the body cannot be read: {error}").into()))?;
    let id = existing(&api, &body).await?;
    let epoch = api.store.positions().await?.epoch;
    let (selection, named) = selection(&body, epoch)?;
    let detailed = match body.get("details") {
        None | Some(Value::Bool(false)) => false,
        Some(Value::Bool(true)) => true,
        Some(_) => return Err(ApiError::BadRequest("details must be true or false".into())),
    };
    let replayed = api
        .store
        .replay(&id, &selection, &*api.fabric)
        .await?
        .ok_or_else(unknown)?;
    (api.wake)(std::slice::from_ref(&id));
    let before = |position: i64| Cursor {
        epoch,
        position: position - 1,
    };
    let details = detailed.then(|| ReplayDetails {
        created: replayed.created,
        in_flight: replayed.in_flight,
        enabled: replayed.enabled,
        results: named.map(|named| {
            results(named, |event_id| match replayed.events.get(event_id) {
                Some(Replay::Created) => "created",
                Some(Replay::Again) => "queued",
                Some(Replay::InFlight) => "in_flight",
                Some(Replay::Unmatched) => "not_matched",
                None => "not_found",
            })
        }),
    });
    let view = ReplayView {
        subscription_id: id.to_string(),
        queued: replayed.queued,
        next: replayed.next.map(|position| before(position).to_string()),
        details,
    };
    Ok(json(StatusCode::OK, &view))
}

/// Ends deliveries of a subscription that wait, so that what waits behind them goes on.
pub(super) async fn skip(
    State(api): State<Arc<Api>>,
    _caller: Caller<SkipDeliveries>,
    request: Request,
) -> Result<Response, ApiError> {
    let body: Value = serde_json::from_str(&read_members(request, BODY_LIMIT, ApiError::BadRequest).await?)
        .map_err(|error| ApiError::BadJson(format!("the body cannot be read: {error}").into()))?;
    let id = existing(&api, &body).await?;
    let wanted = event_ids(&body["event_ids"])?;
    let found = api.store.skip(&id, &storable(&wanted)).await?;
    (api.wake)(std::slice::from_ref(&id));
    let results = results(wanted, |event_id| match found.get(event_id) {
        Some(Skip::Skipped) => "skipped",
        Some(Skip::InFlight) => "in_flight",
        Some(Skip::Delivered) => "delivered",
        Some(Skip::Dead) => "dead",
        None => "not_found",
    });
    let view = SkipView {
        subscription_id: id.to_string(),
        skipped: found.values().filter(|skip| **skip == Skip::Skipped).count(),
        results,
    };
    Ok(json(StatusCode::OK, &view))
}

/// The subscription that a body names, whoever owns it.
async fn existing(api: &Api, body: &Value) -> Result<SubscriptionId, ApiError> {
    let id = body["subscription_id"].as_str().and_then(SubscriptionId::parse);
    let id = id.ok_or_else(unknown)?;
    if api.store.subscription_exists(&id).await? {
        Ok(id)
    } else {
        Err(unknown())
    }
}

fn unknown() -> ApiError {
    ApiError::NotFound("no such subscription".into())
}

/// The event ids of a body, each once, in the order given.
fn event_ids(ids: &Value) -> Result<Vec<&str>, ApiError> {
    let bad = |detail: &'static str| ApiError::BadRequest(detail.into());
    let ids = ids.as_array().filter(|ids| ids.len() <= IDS_MAX);
    let ids = ids.ok_or(bad("event_ids must be an array of at most 1000 event ids"))?;
    let texts: Option<Vec<&str>> = ids.iter().map(Value::as_str).collect();
    let mut texts = texts.ok_or(bad("event_ids must hold strings only"))?;
    let mut seen = HashSet::new();
    texts.retain(|event_id| seen.insert(*event_id));
    Ok(texts)
}

/// Those that can be stored: what does not look like an id cannot.
fn storable<'a>(event_ids: &[&'a str]) -> Vec<&'a str> {
    let known = event_ids.iter().filter(|event_id| EventId::parse(event_id).is_some());
    known.copied().collect()
}

fn results(event_ids: Vec<&str>, result: impl Fn(&str) -> &'static str) -> Vec<EventResult> {
    let results = event_ids.into_iter().map(|event_id| EventResult {
        event_id: event_id.to_owned(),
        result: result(event_id),
    });
    results.collect()
}

/// Which events a body asks for, and the ids where it names them.
fn selection(body: &Value, epoch: i64) -> Result<(ReplaySelection, Option<Vec<&str>>), ApiError> {
    let bad = |detail: &'static str| ApiError::BadRequest(detail.into());
    let member = |name: &str| body.get(name);
    let selection = match (
        member("event_ids"),
        member("from_seq"),
        member("cursor"),
        member("since"),
    ) {
        (Some(ids), None, None, None) => {
            let named = event_ids(ids)?;
            let storable = storable(&named).into_iter().map(str::to_owned).collect();
            return Ok((ReplaySelection::Events(storable), Some(named)));
        }
        (None, Some(from), None, None) => {
            let from = from.as_i64().filter(|from| (0..=POSITION_MAX).contains(from));
            ReplaySelection::FromPosition(from.ok_or(bad("from_seq must be an integer of 0 or more"))?)
        }
        (None, None, Some(cursor), None) => {
            let cursor: Option<Cursor> = cursor.as_str().and_then(|text| text.parse().ok());
            // Sending a whole log again is not what a place in another history asks for.
            let cursor = cursor.filter(|cursor| cursor.epoch == epoch).ok_or(bad(
                "cursor must be a cursor of the present log, such as the next of an earlier replay",
            ))?;
            ReplaySelection::FromPosition(cursor.position + 1)
        }
        (None, None, None, Some(since)) => {
            let since = since.as_str().and_then(parse_rfc3339);
            ReplaySelection::Since(since.ok_or(bad(
                "since must be an RFC 3339 date and time with a zone, such as 2026-10-21T08:15:30Z",
            ))?)
        }
        _ => return Err(bad("send exactly one of event_ids, from_seq, cursor and since")),
    };
    Ok((selection, None))
}

/// The place of a row in the list, opaque to callers.
fn place(seq: i64, subscription_id: &str) -> String {
    URL_SAFE_NO_PAD.encode(format!("{seq}.{subscription_id}"))
}

fn place_of(text: &str) -> Option<(i64, String)> {
    let decoded = String::from_utf8(URL_SAFE_NO_PAD.decode(text).ok()?).ok()?;
    let (seq, subscription_id) = decoded.split_once('.')?;
    let seq = seq.parse().ok().filter(|seq| (0..=POSITION_MAX).contains(seq))?;
    SubscriptionId::parse(subscription_id)?;
    Some((seq, subscription_id.to_owned()))
}

impl From<DeliveryRow> for DeliveryView {
    fn from(row: DeliveryRow) -> Self {
        Self {
            event_id: row.event_id,
            subscription_id: row.subscription_id,
            seq: row.seq,
            status: row.status,
            attempt: row.attempt,
            next_attempt_at: row.next_attempt_at.map(Millis),
            last_status: row.last_status,
            last_error: row.last_error,
            delivered_at: row.delivered_at.map(Millis),
        }
    }
}
