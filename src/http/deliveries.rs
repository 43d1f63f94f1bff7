//! `GET /api/v1/deliveries` and `POST /api/v1/deliveries/replay`, for operators.

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
use crate::domain::time::Millis;
use crate::problem::ApiError;
use crate::store::{DeliveryCounts, DeliveryFilter, DeliveryRow, ReplaySelection};

use super::answer::json;
use super::api::Api;
use super::body::read_members;
use super::caller::{Caller, ListDeliveries, ReplayDeliveries};
use super::query::Query;

/// Bytes of a replay request: its ids, and room for how they are written.
const BODY_LIMIT: usize = 256 * 1024;
/// Deliveries on one page when the caller does not say.
const LIMIT_DEFAULT: u64 = 100;
/// Deliveries on one page at most.
const LIMIT_MAX: u64 = 1000;
/// Ids in one replay at most.
const REPLAY_IDS_MAX: usize = 1000;

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
    /// Opaque; absent on the last page.
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
        // One more tells whether the page is the last.
        limit: i64::try_from(limit).unwrap_or(i64::MAX).saturating_add(1),
    };
    let mut rows = api.store.deliveries(&filter).await?;
    let counts = api.store.delivery_counts().await?;
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let more = rows.len() > limit;
    rows.truncate(limit);
    let next = rows
        .last()
        .filter(|_| more)
        .map(|row| place(row.seq, &row.subscription_id));
    let deliveries = rows.into_iter().map(DeliveryView::from).collect();
    Ok(json(
        StatusCode::OK,
        &DeliveryList {
            deliveries,
            counts,
            next,
        },
    ))
}

/// Queues deliveries of a subscription again.
pub(super) async fn replay(
    State(api): State<Arc<Api>>,
    _caller: Caller<ReplayDeliveries>,
    request: Request,
) -> Result<Response, ApiError> {
    let body: Value = serde_json::from_str(&read_members(request, BODY_LIMIT).await?)
        .map_err(|error| ApiError::BadJson(format!("the body cannot be read: {error}").into()))?;
    let unknown = || ApiError::NotFound("no such subscription".into());
    let id = body["subscription_id"]
        .as_str()
        .and_then(SubscriptionId::parse)
        .ok_or_else(unknown)?;
    if !api.store.subscription_exists(&id).await? {
        return Err(unknown());
    }
    let epoch = api.store.positions().await?.epoch;
    let selection = selection(&body, epoch)?;
    let replayed = api.store.replay(&id, &selection).await?.ok_or_else(unknown)?;
    (api.wake)(std::slice::from_ref(&id));
    let before = |position: i64| Cursor {
        epoch,
        position: position - 1,
    };
    let view = ReplayView {
        subscription_id: id.to_string(),
        queued: replayed.queued,
        next: replayed.next.map(|position| before(position).to_string()),
    };
    Ok(json(StatusCode::OK, &view))
}

fn selection(body: &Value, epoch: i64) -> Result<ReplaySelection, ApiError> {
    let bad = |detail: &'static str| ApiError::BadRequest(detail.into());
    match (body.get("event_ids"), body.get("from_seq"), body.get("cursor")) {
        (Some(ids), None, None) => {
            let ids = ids.as_array().filter(|ids| ids.len() <= REPLAY_IDS_MAX);
            let ids = ids.ok_or(bad("event_ids must be an array of at most 1000 event ids"))?;
            let ids: Option<Vec<&str>> = ids.iter().map(Value::as_str).collect();
            let ids = ids.ok_or(bad("event_ids must hold strings only"))?;
            // What does not look like an id cannot be stored.
            let known = ids.into_iter().filter(|id| EventId::parse(id).is_some());
            Ok(ReplaySelection::Events(known.map(str::to_owned).collect()))
        }
        (None, Some(from), None) => {
            let from = from.as_i64().filter(|from| (0..=POSITION_MAX).contains(from));
            Ok(ReplaySelection::FromPosition(
                from.ok_or(bad("from_seq must be an integer of 0 or more"))?,
            ))
        }
        (None, None, Some(cursor)) => {
            let cursor: Option<Cursor> = cursor.as_str().and_then(|text| text.parse().ok());
            // Sending a whole log again is not what a place in another history asks for.
            let cursor = cursor.filter(|cursor| cursor.epoch == epoch).ok_or(bad(
                "cursor must be a cursor of the present log, such as the next of an earlier replay",
            ))?;
            Ok(ReplaySelection::FromPosition(cursor.position + 1))
        }
        _ => Err(bad("send exactly one of event_ids, from_seq and cursor")),
    }
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
