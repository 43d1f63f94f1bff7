//! Reading the log: one event by id, and pages after a position.
//!
//! A page is decided in one statement, so that its end, the head and the epoch belong to one snapshot: a position that
//! is handed out never lies beyond what was examined.

use std::collections::HashSet;

use sqlx::PgConnection;

use crate::domain::app::{self, Project};
use crate::domain::cursor::Cursor;
use crate::domain::envelope::{Envelope, Priority, Subject, SubjectRef, Visibility};
use crate::domain::ids::EventId;
use crate::domain::time::Millis;
use crate::domain::topic::TopicPattern;

use super::{Store, StoreError};

/// Rows that one page examines at most, whatever matches.
const SCAN_ROWS_MAX: i64 = 5_000;

/// An event as it is stored.
#[derive(Debug, Clone)]
pub struct StoredEvent {
    /// Its position in the log.
    pub position: i64,
    /// What consumers see.
    pub envelope: Envelope,
    /// How deep it stands in its trace.
    pub hops: i32,
    /// When it was stored.
    pub received_at: Millis,
}

/// Where a log begins and ends.
#[derive(Debug, Clone, Copy)]
pub struct Positions {
    /// The history that positions belong to.
    pub epoch: i64,
    /// The last position; every one up to it is final.
    pub head: i64,
    /// Positions up to this one were removed from the log.
    pub floor: i64,
}

/// What a pull asks for.
#[derive(Debug, Clone)]
pub struct PageRequest {
    /// Read after this cursor; `None` is the oldest event.
    pub after: Option<Cursor>,
    /// Any of these; never empty.
    pub topics: Vec<TopicPattern>,
    /// An app's project: its own events are read, and public ones of services. `None` reads as a service.
    pub project: Option<Project>,
    /// Events wanted, 1..=1000.
    pub limit: i64,
    /// Stored bytes after which the page ends; the event that crosses the line is still part of it.
    pub bytes: i64,
}

/// An event and its position, as a pull answers them.
#[derive(Debug, Clone)]
pub struct PulledEvent {
    /// Where it stands.
    pub cursor: Cursor,
    /// What it says.
    pub envelope: Envelope,
}

/// One page of the log.
#[derive(Debug)]
pub struct Page {
    /// The bounds of the log in the page's snapshot.
    pub positions: Positions,
    /// Matching events, in position order.
    pub events: Vec<PulledEvent>,
    /// The last position examined.
    pub examined: i64,
}

/// What the statement that decides a page answers.
struct PageShape {
    epoch: i64,
    head: i64,
    floor: i64,
    start: i64,
    hits: Option<Vec<i64>>,
    /// Every hit of the scan fits the page.
    complete: bool,
    /// The last row scanned, where the scan stopped before the head.
    scan_end: Option<i64>,
}

impl Store {
    /// The bounds of the log.
    pub async fn positions(&self) -> Result<Positions, StoreError> {
        let mut reader = self.reader().await?;
        let positions = sqlx::query_as!(
            Positions,
            r#"
            SELECT epoch AS "epoch!", head AS "head!", floor AS "floor!" FROM log_bounds
            "#
        )
        .fetch_one(self.run(&mut reader))
        .await?;
        Ok(positions)
    }

    /// One event, with its cursor, where the reader may see it: an app that of its own project and public ones of services, a
    /// service every one of production.
    pub async fn event(&self, id: &EventId, project: Option<&Project>) -> Result<Option<PulledEvent>, StoreError> {
        let mut reader = self.reader().await?;
        let found = sqlx::query!(
            r#"
            SELECT e.seq AS "seq!", epoch.value AS "epoch!"
            FROM events e, store_epoch epoch
            WHERE e.id = $1 AND epoch.name = 'events'
              AND CASE WHEN $2::text IS NULL THEN e.env = 'production'
                       WHEN e.project_id IS NULL THEN e.env = 'production' AND e.visibility = 'public'
                       ELSE e.project_id = $2 AND e.env = $3 END
            "#,
            id.as_str(),
            project.map(|project| &*project.id),
            project.map(|project| project.env.as_str()),
        )
        .fetch_optional(self.run(&mut reader))
        .await?;
        // Events move to the replay tier and never back, so what is not found in the one is looked for in the other.
        let (cursor, event) = match found {
            Some(found) => {
                let cursor = Cursor {
                    epoch: found.epoch,
                    position: found.seq,
                };
                (cursor, self.events_at(&mut reader, &[found.seq]).await?.pop())
            }
            None => match self.archived_event(&mut reader, id, project).await? {
                Some((cursor, event)) => (cursor, event),
                None => return Ok(None),
            },
        };
        let event = event.ok_or(StoreError::Corrupt { what: "event" })?;
        Ok(Some(PulledEvent {
            cursor,
            envelope: event.envelope,
        }))
    }

    /// A page of the events after a position that the reader may see and asks for.
    pub async fn pull(&self, request: &PageRequest) -> Result<Page, StoreError> {
        let mut reader = self.reader().await?;
        let shape = match (&request.project, request.topics.as_slice()) {
            // Of an app's type, or for an app, there may be any number of rows that the reader does not see.
            (None, [only]) if let Some(event_type) = only.exact().filter(|_| !app::is_of_apps(only)) => {
                self.page_of_type(&mut reader, request, event_type).await?
            }
            (Some(project), topics) if topics.iter().all(app::is_of_apps) => {
                self.page_of_project(&mut reader, request, project).await?
            }
            _ => self.page_of_patterns(&mut reader, request).await?,
        };
        let hits = shape.hits.unwrap_or_default();
        let examined = match (shape.complete, hits.last()) {
            (true, _) => shape.scan_end.unwrap_or(shape.head),
            (false, Some(&last)) => last,
            (false, None) => shape.start,
        };
        let events = self.events_at(&mut reader, &hits).await?;
        Ok(Page {
            positions: Positions {
                epoch: shape.epoch,
                head: shape.head,
                floor: shape.floor,
            },
            events: events
                .into_iter()
                .map(|event| PulledEvent {
                    cursor: Cursor {
                        epoch: shape.epoch,
                        position: event.position,
                    },
                    envelope: event.envelope,
                })
                .collect(),
            examined,
        })
    }

    /// Scans the log in position order and keeps what matches. The scan ends with the last hit wanted, which is why the
    /// rows examined have no name of their own: the end of the scan is looked up again where it is needed.
    async fn page_of_patterns(
        &self,
        reader: &mut PgConnection,
        request: &PageRequest,
    ) -> Result<PageShape, StoreError> {
        let patterns = like(&request.topics);
        // A service finds events of apps through these alone.
        let of_apps: Vec<&str> = request
            .topics
            .iter()
            .zip(&patterns)
            .filter(|(topic, _)| app::is_of_apps(topic))
            .map(|(_, pattern)| pattern.as_str())
            .collect();
        let project = request.project.as_ref();
        let shape = sqlx::query_as!(
            PageShape,
            r#"
            WITH bounds AS MATERIALIZED (
                SELECT epoch, head, floor FROM log_bounds
            ), start AS MATERIALIZED (
                SELECT CASE WHEN $1::bigint = epoch THEN least($2::bigint, head) ELSE floor END AS seq FROM bounds
            ), hits AS MATERIALIZED (
                SELECT seq, size_bytes FROM (
                    SELECT seq, event_type, size_bytes, env, project_id, visibility FROM event_log
                    WHERE seq > (SELECT seq FROM start)
                    ORDER BY seq
                    LIMIT $5
                ) page
                WHERE event_type LIKE ANY($3::text[])
                  AND CASE WHEN $7::text IS NOT NULL AND project_id IS NOT NULL THEN project_id = $7 AND env = $8
                           WHEN project_id IS NOT NULL THEN env = 'production' AND event_type LIKE ANY($9::text[])
                           ELSE env = 'production' AND ($7 IS NULL OR visibility = 'public') END
                ORDER BY seq
                LIMIT $4
            ), kept AS MATERIALIZED (
                SELECT seq FROM (
                    SELECT seq, sum(size_bytes) OVER (ORDER BY seq ROWS UNBOUNDED PRECEDING) - size_bytes AS before
                    FROM hits
                ) h
                WHERE before < $6
            ), shape AS MATERIALIZED (
                SELECT (SELECT count(*) FROM hits) AS hits, (SELECT count(*) FROM kept) AS kept
            )
            SELECT epoch AS "epoch!", head AS "head!", floor AS "floor!", start.seq AS "start!",
                   (SELECT array_agg(seq ORDER BY seq) FROM kept) AS hits,
                   (shape.hits < $4 AND shape.kept = shape.hits) AS "complete!",
                   CASE WHEN shape.hits < $4 AND shape.kept = shape.hits
                        THEN (SELECT seq FROM event_log WHERE seq > (SELECT seq FROM start)
                              ORDER BY seq OFFSET $5 - 1 LIMIT 1) END AS scan_end
            FROM bounds, start, shape
            "#,
            request.after.map_or(-1, |cursor| cursor.epoch),
            request.after.map_or(0, |cursor| cursor.position),
            &patterns,
            request.limit,
            SCAN_ROWS_MAX,
            request.bytes as f64,
            project.map(|project| &*project.id),
            project.map(|project| project.env.as_str()),
            &of_apps as &[&str],
        )
        .fetch_one(self.run(reader))
        .await?;
        Ok(shape)
    }

    /// Scans what a project published, by its index: however much others publish meanwhile, it is no longer to read.
    async fn page_of_project(
        &self,
        reader: &mut PgConnection,
        request: &PageRequest,
        project: &Project,
    ) -> Result<PageShape, StoreError> {
        let shape = sqlx::query_as!(
            PageShape,
            r#"
            WITH bounds AS MATERIALIZED (
                SELECT epoch, head, floor FROM log_bounds
            ), start AS MATERIALIZED (
                SELECT CASE WHEN $1::bigint = epoch THEN least($2::bigint, head) ELSE floor END AS seq FROM bounds
            ), own AS MATERIALIZED (
                (SELECT seq, event_type, size_bytes FROM events
                 WHERE project_id = $7 AND env = $8 AND seq > (SELECT seq FROM start)
                 ORDER BY seq LIMIT $5)
                UNION ALL
                (SELECT seq, event_type, greatest(size_bytes, octet_length(body)) FROM events_archive
                 WHERE project_id = $7 AND env = $8 AND seq > (SELECT seq FROM start)
                   AND epoch = (SELECT epoch FROM bounds)
                 ORDER BY seq LIMIT $5)
            ), hits AS MATERIALIZED (
                SELECT seq, size_bytes FROM (SELECT * FROM own ORDER BY seq LIMIT $5) page
                WHERE event_type LIKE ANY($3::text[])
                ORDER BY seq
                LIMIT $4
            ), kept AS MATERIALIZED (
                SELECT seq FROM (
                    SELECT seq, sum(size_bytes) OVER (ORDER BY seq ROWS UNBOUNDED PRECEDING) - size_bytes AS before
                    FROM hits
                ) h
                WHERE before < $6
            ), shape AS MATERIALIZED (
                SELECT (SELECT count(*) FROM hits) AS hits, (SELECT count(*) FROM kept) AS kept
            )
            SELECT epoch AS "epoch!", head AS "head!", floor AS "floor!", start.seq AS "start!",
                   (SELECT array_agg(seq ORDER BY seq) FROM kept) AS hits,
                   (shape.hits < $4 AND shape.kept = shape.hits) AS "complete!",
                   CASE WHEN shape.hits < $4 AND shape.kept = shape.hits
                        THEN (SELECT seq FROM own ORDER BY seq OFFSET $5 - 1 LIMIT 1) END AS scan_end
            FROM bounds, start, shape
            "#,
            request.after.map_or(-1, |cursor| cursor.epoch),
            request.after.map_or(0, |cursor| cursor.position),
            &like(&request.topics),
            request.limit,
            SCAN_ROWS_MAX,
            request.bytes as f64,
            &*project.id,
            project.env.as_str(),
        )
        .fetch_one(self.run(reader))
        .await?;
        Ok(shape)
    }

    /// Reads one exact type by its index: as many rows as wanted, however rare the type is. The type is compared as a
    /// range, since an equality lets the planner walk the whole log in position order and filter.
    async fn page_of_type(
        &self,
        reader: &mut PgConnection,
        request: &PageRequest,
        event_type: &str,
    ) -> Result<PageShape, StoreError> {
        let shape = sqlx::query_as!(
            PageShape,
            r#"
            WITH bounds AS MATERIALIZED (
                SELECT epoch, head, floor FROM log_bounds
            ), start AS MATERIALIZED (
                SELECT CASE WHEN $1::bigint = epoch THEN least($2::bigint, head) ELSE floor END AS seq FROM bounds
            ), hits AS MATERIALIZED (
                SELECT seq, size_bytes FROM (
                    (SELECT event_type, seq, size_bytes FROM events
                     WHERE (event_type, seq) > ($3, (SELECT seq FROM start)) AND event_type <= $3
                       AND env = 'production' AND project_id IS NULL
                     ORDER BY event_type, seq)
                    UNION ALL
                    (SELECT event_type, seq, greatest(size_bytes, octet_length(body)) FROM events_archive
                     WHERE (event_type, seq) > ($3, (SELECT seq FROM start)) AND event_type <= $3
                       AND env = 'production' AND project_id IS NULL AND epoch = (SELECT epoch FROM bounds)
                     ORDER BY event_type, seq)
                ) typed
                ORDER BY event_type, seq
                LIMIT $4
            ), kept AS MATERIALIZED (
                SELECT seq FROM (
                    SELECT seq, sum(size_bytes) OVER (ORDER BY seq ROWS UNBOUNDED PRECEDING) - size_bytes AS before
                    FROM hits
                ) h
                WHERE before < $5
            ), shape AS MATERIALIZED (
                SELECT (SELECT count(*) FROM hits) AS hits, (SELECT count(*) FROM kept) AS kept
            )
            SELECT epoch AS "epoch!", head AS "head!", floor AS "floor!", start.seq AS "start!",
                   (SELECT array_agg(seq ORDER BY seq) FROM kept) AS hits,
                   (shape.hits < $4 AND shape.kept = shape.hits) AS "complete!",
                   NULL::bigint AS scan_end
            FROM bounds, start, shape
            "#,
            request.after.map_or(-1, |cursor| cursor.epoch),
            request.after.map_or(0, |cursor| cursor.position),
            event_type,
            request.limit,
            request.bytes as f64,
        )
        .fetch_one(self.run(reader))
        .await?;
        Ok(shape)
    }

    /// The events at these positions, in position order. What is gone is left out, and so is a row that this version cannot
    /// read: it is named in the log, and must not stop the others.
    pub(super) async fn events_at(
        &self,
        connection: &mut PgConnection,
        positions: &[i64],
    ) -> Result<Vec<StoredEvent>, StoreError> {
        if positions.is_empty() {
            return Ok(Vec::new());
        }
        let rows = sqlx::query_as!(
            EventRow,
            r#"
            SELECT id, seq, event_type, version, source, actor, on_behalf_of, subject_type, subject_id,
                   subject_revision, trace_id, priority, visibility, occurred_at, received_at, payload, hops
            FROM events
            WHERE seq = ANY($1)
            ORDER BY seq
            "#,
            positions,
        )
        .fetch_all(self.run(connection))
        .await?;
        if rows.len() == positions.len() {
            return Ok(rows.into_iter().filter_map(EventRow::read).collect());
        }
        let hot: HashSet<i64> = rows.iter().map(|row| row.seq).collect();
        let others: Vec<i64> = positions.iter().copied().filter(|seq| !hot.contains(seq)).collect();
        // After the hot store was read: what moves in between is found here.
        let archived = self.archived_at(connection, &others).await?;
        let mut events: Vec<StoredEvent> = rows.into_iter().filter_map(EventRow::read).chain(archived).collect();
        events.sort_unstable_by_key(|event| event.position);
        Ok(events)
    }
}

/// Patterns as SQL compares them.
fn like(topics: &[TopicPattern]) -> Vec<String> {
    let patterns = topics
        .iter()
        .map(|topic| topic.like().unwrap_or_else(|| "%".to_owned()));
    patterns.collect()
}

pub(super) struct EventRow {
    pub(super) id: String,
    pub(super) seq: i64,
    pub(super) event_type: String,
    pub(super) version: i64,
    pub(super) source: String,
    pub(super) actor: String,
    pub(super) on_behalf_of: Option<String>,
    pub(super) subject_type: String,
    pub(super) subject_id: String,
    pub(super) subject_revision: Option<i64>,
    pub(super) trace_id: String,
    pub(super) priority: String,
    pub(super) visibility: String,
    pub(super) occurred_at: String,
    pub(super) received_at: i64,
    pub(super) payload: String,
    pub(super) hops: i32,
}

impl EventRow {
    /// The event, unless it cannot be read.
    pub(super) fn read(self) -> Option<StoredEvent> {
        let position = self.seq;
        self.into_event()
            .inspect_err(|what| tracing::error!(position, "the event at {position} cannot be read: its {what}"))
            .ok()
    }

    /// The event, or the part of it that cannot be read.
    fn into_event(self) -> Result<StoredEvent, &'static str> {
        Ok(StoredEvent {
            position: self.seq,
            envelope: Envelope {
                event_id: EventId::parse(&self.id).ok_or("event id")?,
                trace_id: self.trace_id,
                event_type: self.event_type,
                version: self.version,
                source: self.source,
                actor: SubjectRef::parse_json(&self.actor).ok_or("actor")?,
                on_behalf_of: match self.on_behalf_of {
                    Some(text) => Some(SubjectRef::parse_json(&text).ok_or("on_behalf_of")?),
                    None => None,
                },
                timestamp: self.occurred_at,
                priority: Priority::parse(&self.priority).ok_or("priority")?,
                visibility: Visibility::parse(&self.visibility).ok_or("visibility")?,
                subject: Subject {
                    kind: self.subject_type,
                    id: self.subject_id,
                    revision: self.subject_revision,
                },
                payload: self.payload,
            },
            hops: self.hops,
            received_at: Millis(self.received_at),
        })
    }
}
