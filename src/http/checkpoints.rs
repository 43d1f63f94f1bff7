//! `GET` and `PUT /api/v1/checkpoints`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Serialize;
use serde_json::Value;

use crate::domain::cursor::Cursor;
use crate::domain::time::Millis;
use crate::domain::topic::TopicPattern;
use crate::problem::ApiError;
use crate::store::Checkpoint;

use super::answer::json;
use super::api::Api;
use super::body::read_members;
use super::caller::{Caller, ReadCheckpoint, WriteCheckpoint};
use super::query::Query;

/// Bytes of a request.
const BODY_LIMIT: usize = 64 * 1024;
/// Characters of a carrier's name.
const CARRIER_CHARS_MAX: usize = 64;

#[derive(Serialize)]
struct CheckpointView<'a> {
    consumer: &'a str,
    topic: &'a str,
    cursor: Option<String>,
    carrier: Option<String>,
    updated_at: Option<Millis>,
}

/// What the caller stored for a pattern; all nulls when it stored nothing.
pub(super) async fn read(
    State(api): State<Arc<Api>>,
    caller: Caller<ReadCheckpoint>,
    query: Query,
) -> Result<Response, ApiError> {
    let topic = query
        .one("topic")?
        .and_then(TopicPattern::parse)
        .ok_or(ApiError::BadTopic(
            "topic must be one pattern of [a-z0-9_] segments or *, at most 200 characters".into(),
        ))?;
    caller.naming(&topic)?;
    let stored = api.store.checkpoint(&caller.holder(), &topic).await?;
    Ok(view(&caller.consumer, &topic, stored))
}

/// Stores the caller's position for a pattern.
pub(super) async fn write(
    State(api): State<Arc<Api>>,
    caller: Caller<WriteCheckpoint>,
    request: Request,
) -> Result<Response, ApiError> {
    let body: Value = serde_json::from_str(&read_members(request, BODY_LIMIT, ApiError::BadRequest).await?)
        .map_err(|error| ApiError::BadJson(format!("the body cannot be read: {error}").into()))?;
    let bad = |detail: &'static str| ApiError::BadRequest(detail.into());
    let topic = body["topic"].as_str().and_then(TopicPattern::parse).ok_or(bad(
        "topic must be one pattern of [a-z0-9_] segments or *, at most 200 characters",
    ))?;
    let cursor: Cursor = body["cursor"].as_str().and_then(|text| text.parse().ok()).ok_or(bad(
        "cursor must be a cursor as a page answered it; a number is not one",
    ))?;
    let carrier = match &body["carrier"] {
        Value::Null => None,
        Value::String(name)
            if !name.is_empty() && name.chars().count() <= CARRIER_CHARS_MAX && !name.contains('\0') =>
        {
            Some(name.as_str())
        }
        _ => return Err(bad("carrier must be a string of 1 to 64 characters, or absent")),
    };
    caller.naming(&topic)?;
    let stored = api
        .store
        .set_checkpoint(&caller.holder(), &topic, cursor, carrier)
        .await?;
    Ok(view(&caller.consumer, &topic, Some(stored)))
}

fn view(consumer: &str, topic: &TopicPattern, stored: Option<Checkpoint>) -> Response {
    let view = CheckpointView {
        consumer,
        topic: topic.as_str(),
        updated_at: stored.as_ref().map(|checkpoint| checkpoint.updated_at),
        cursor: stored.as_ref().map(|checkpoint| checkpoint.cursor.to_string()),
        carrier: stored.and_then(|checkpoint| checkpoint.carrier),
    };
    json(StatusCode::OK, &view)
}
