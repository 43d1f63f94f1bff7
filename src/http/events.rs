//! `GET /api/v1/events` and `GET /api/v1/events/:id`.

use std::fmt::Write as _;
use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;

use crate::domain::cursor::Cursor;
use crate::domain::ids::EventId;
use crate::domain::topic::TopicPattern;
use crate::problem::ApiError;
use crate::store::{Page, PageRequest, PulledEvent};

use super::answer::json_text;
use super::api::Api;
use super::caller::{Caller, PullEvents, ReadEvent};
use super::query::{PathOf, Query};

/// Events on one page when the caller does not say.
const LIMIT_DEFAULT: u64 = 100;
/// Events on one page at most.
const LIMIT_MAX: u64 = 1000;

/// A page of the log after a cursor.
pub(super) async fn pull(
    State(api): State<Arc<Api>>,
    caller: Caller<PullEvents>,
    query: Query,
) -> Result<Response, ApiError> {
    let topics = match query.non_empty("topic")? {
        None => TopicPattern::parse_list("*"),
        Some(list) => TopicPattern::parse_list(list),
    };
    let topics = topics.ok_or(ApiError::BadTopic(
        "topic must be 1 to 20 comma-separated patterns of [a-z0-9_] segments or *, at most 200 characters each".into(),
    ))?;
    for topic in &topics {
        caller.naming(topic)?;
    }
    let limit = query.integer("limit", 1..=LIMIT_MAX)?.unwrap_or(LIMIT_DEFAULT);
    if query.has("after_seq") {
        return Err(ApiError::BadRequest(
            "after_seq is not a position; send after=<next_cursor>".into(),
        ));
    }
    let after = match query.non_empty("after")? {
        None => None,
        Some(text) => Some(text.parse::<Cursor>().map_err(|_not_one| {
            ApiError::BadRequest("after must be a cursor as a page answered it, such as next_cursor".into())
        })?),
    };
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let room = api.rooms.page().await;
    let request = PageRequest {
        after,
        topics,
        project: caller.holder().project.cloned(),
        limit,
        bytes: room.bytes,
    };
    let page = api.store.pull(&request).await?;
    Ok(json_text(room.keep(page_json(after, &page))))
}

/// One event by its id.
pub(super) async fn by_id(
    State(api): State<Arc<Api>>,
    caller: Caller<ReadEvent>,
    PathOf(id): PathOf<String>,
) -> Result<Response, ApiError> {
    // What does not look like an id cannot be stored.
    let room = api.rooms.event().await;
    let event = match EventId::parse(&id) {
        Some(id) => api.store.event(&id, caller.holder().project).await?,
        None => None,
    };
    let event = event.ok_or(ApiError::NotFound("no such event".into()))?;
    let mut body = String::new();
    write_event(&mut body, &event);
    Ok(json_text(room.keep(body)))
}

/// The answer's text, written once: envelopes carry their payload as it was received, and are never parsed again.
fn page_json(after: Option<Cursor>, page: &Page) -> String {
    let positions = page.positions;
    let mut body = String::from("{");
    if let Some((from, to)) = gap(after, page) {
        let _ = write!(body, r#""gap":{{"from_seq":{from},"to_seq":{to}}},"#);
    }
    body.push_str(r#""events":["#);
    for (index, event) in page.events.iter().enumerate() {
        if index > 0 {
            body.push(',');
        }
        write_event(&mut body, event);
    }
    let cursor = |position| Cursor {
        epoch: positions.epoch,
        position,
    };
    let _ = write!(
        body,
        r#"],"next_cursor":"{}","latest_cursor":"{}"}}"#,
        cursor(page.examined),
        cursor(positions.head)
    );
    body
}

/// What the caller missed, where its position is not one of this log: of another epoch, removed, or ahead of the head. Positions that were never given to an event are no gap.
fn gap(after: Option<Cursor>, page: &Page) -> Option<(i64, i64)> {
    let positions = page.positions;
    match after {
        Some(cursor) if cursor.epoch != positions.epoch => Some((1, positions.floor)),
        Some(cursor) if cursor.position > positions.head => Some((positions.head + 1, cursor.position)),
        _ => {
            let position = after.map_or(0, |cursor| cursor.position);
            (position < positions.floor).then_some((position + 1, positions.floor))
        }
    }
}

fn write_event(body: &mut String, event: &PulledEvent) {
    let _ = write!(body, r#"{{"cursor":"{}","event":"#, event.cursor);
    event.envelope.write_json(body);
    body.push('}');
}
