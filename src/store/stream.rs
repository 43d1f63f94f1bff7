//! What live streams read: the log as it grows, the history that a stream resumes from, and who may open one.

use crate::domain::cursor::Cursor;
use crate::domain::envelope::Visibility;
use crate::domain::packed::Body;
use crate::domain::time::{Millis, parse_rfc3339};
use crate::domain::topic::TopicPattern;

use super::events::EventRow;
use super::{Positions, Store, StoreError, StoredEvent};

/// Rows that one page of history examines at most, whatever matches.
pub const HISTORY_ROWS_MAX: i64 = 5_000;
/// Withdrawals of one person that are looked at, from the newest on. The latest moment counts, which an older one may name:
/// they can come late.
const WITHDRAWALS_MAX: i64 = 1_000;
/// Used tickets that are removed at a time.
const TICKETS_BATCH: i64 = 1_000;

/// What a stream needs to know of an event to tell whether anybody wants it.
#[derive(Debug, Clone)]
pub struct Heading {
    /// Its position in the log.
    pub position: i64,
    /// Its type.
    pub event_type: String,
    /// Who may see it.
    pub visibility: Visibility,
}

/// The next part of the log.
#[derive(Debug)]
pub struct Headings {
    /// The bounds of the log in the snapshot of the page.
    pub positions: Positions,
    /// First-party events in position order. Others are never streamed.
    pub events: Vec<Heading>,
    /// The last position examined.
    pub examined: i64,
}

/// The next few events of the log, whole.
#[derive(Debug)]
pub struct Tail {
    /// The bounds of the log in the snapshot of the page.
    pub positions: Positions,
    /// First-party events in position order.
    pub events: Vec<StoredEvent>,
    /// The last position examined.
    pub examined: i64,
}

/// Where a stream may begin.
#[derive(Debug, Clone, Copy)]
pub struct StartBounds {
    /// The bounds of the log.
    pub positions: Positions,
    /// The first position from which on public events are sent again; past the head where there is none.
    pub public_from: i64,
}

/// What a stream that resumes asks for.
#[derive(Debug, Clone)]
pub struct HistoryRequest<'a> {
    /// Read after this position.
    pub after: i64,
    /// Read up to this one.
    pub upto: i64,
    /// Any of these; never empty.
    pub topics: &'a [TopicPattern],
    /// Everything, whoever may see it.
    pub all: bool,
    /// What this person may see, besides what is public.
    pub person: Option<&'a str>,
    /// Nothing public before this position.
    pub public_from: i64,
    /// Events wanted.
    pub limit: i64,
    /// Stored bytes after which the page ends; the event that crosses the line is still part of it.
    pub bytes: i64,
}

/// A page of history.
#[derive(Debug)]
pub struct History {
    /// Events that may be wanted, in position order: whether they are is decided by whoever asked.
    pub events: Vec<StoredEvent>,
    /// The last position examined.
    pub examined: i64,
    /// The bounds of the log. What is missing from the page since it was pruned lies up to their floor.
    pub positions: Positions,
}

struct HeadingsRow {
    epoch: i64,
    head: i64,
    floor: i64,
    examined: Option<i64>,
    seqs: Option<Vec<i64>>,
    types: Option<Vec<String>>,
    visibilities: Option<Vec<String>>,
}

impl Store {
    /// The log after a position, up to `limit` rows of it.
    pub async fn headings(&self, after: i64, limit: i64) -> Result<Headings, StoreError> {
        let mut reader = self.own_reader().await?;
        let row = sqlx::query_as!(
            HeadingsRow,
            r#"
            WITH page AS MATERIALIZED (
                SELECT seq, event_type, visibility, env, project_id FROM event_log
                WHERE seq > $1
                ORDER BY seq
                LIMIT $2
            ), ours AS MATERIALIZED (
                SELECT seq, event_type, visibility FROM page WHERE env = 'production' AND project_id IS NULL
            )
            SELECT epoch AS "epoch!", head AS "head!", floor AS "floor!",
                   (SELECT max(seq) FROM page) AS examined,
                   (SELECT array_agg(seq ORDER BY seq) FROM ours) AS seqs,
                   (SELECT array_agg(event_type ORDER BY seq) FROM ours) AS types,
                   (SELECT array_agg(visibility ORDER BY seq) FROM ours) AS visibilities
            FROM log_bounds
            "#,
            after,
            limit,
        )
        .fetch_one(self.run(&mut reader))
        .await?;
        let columns = row.seqs.into_iter().flatten();
        let columns = columns.zip(row.types.into_iter().flatten());
        let events = columns
            .zip(row.visibilities.into_iter().flatten())
            .filter_map(|((position, event_type), visibility)| {
                // One that cannot be read is named in the log where it is loaded, and is nobody's.
                let visibility = Visibility::parse(&visibility)?;
                Some(Heading {
                    position,
                    event_type,
                    visibility,
                })
            })
            .collect();
        Ok(Headings {
            positions: Positions {
                epoch: row.epoch,
                head: row.head,
                floor: row.floor,
            },
            events,
            examined: row.examined.unwrap_or(after),
        })
    }

    /// The log after a position with what the events say, up to `limit` rows of it: one round trip where little is new.
    pub async fn tail(&self, after: i64, limit: i64) -> Result<Tail, StoreError> {
        let mut reader = self.own_reader().await?;
        let rows = sqlx::query!(
            r#"
            SELECT bounds.epoch AS "epoch!", bounds.head AS "head!", bounds.floor AS "floor!",
                   e.env = 'production' AND e.project_id IS NULL AS "ours?",
                   e.seq AS "seq?", e.id AS "id?", e.event_type AS "event_type?", e.version AS "version?",
                   e.source AS "source?", e.actor AS "actor?", e.on_behalf_of, e.subject_type AS "subject_type?",
                   e.subject_id AS "subject_id?", e.subject_revision, e.trace_id AS "trace_id?",
                   e.priority AS "priority?", e.visibility AS "visibility?", e.occurred_at AS "occurred_at?",
                   e.received_at AS "received_at?", e.payload AS "payload?", e.hops AS "hops?"
            FROM log_bounds bounds
            LEFT JOIN LATERAL (SELECT * FROM events WHERE seq > $1 ORDER BY seq LIMIT $2) e ON true
            ORDER BY e.seq
            "#,
            after,
            limit,
        )
        .fetch_all(self.run(&mut reader))
        .await?;
        let bounds = rows.first().ok_or(sqlx::Error::RowNotFound)?;
        let positions = Positions {
            epoch: bounds.epoch,
            head: bounds.head,
            floor: bounds.floor,
        };
        let examined = rows.last().and_then(|row| row.seq).unwrap_or(after);
        let whole = rows.into_iter().filter(|row| row.ours == Some(true)).filter_map(|row| {
            Some(EventRow {
                id: row.id?,
                seq: row.seq?,
                event_type: row.event_type?,
                version: row.version?,
                source: row.source?,
                actor: row.actor?,
                on_behalf_of: row.on_behalf_of,
                subject_type: row.subject_type?,
                subject_id: row.subject_id?,
                subject_revision: row.subject_revision,
                trace_id: row.trace_id?,
                priority: row.priority?,
                visibility: row.visibility?,
                occurred_at: row.occurred_at?,
                received_at: row.received_at?,
                payload: row.payload?,
                hops: row.hops?,
            })
        });
        Ok(Tail {
            positions,
            events: whole.filter_map(EventRow::read).collect(),
            examined,
        })
    }

    /// The events at these positions, in position order; what is gone is left out.
    pub async fn events_of(&self, positions: &[i64]) -> Result<Vec<StoredEvent>, StoreError> {
        let mut reader = self.own_reader().await?;
        self.events_at(&mut reader, positions).await
    }

    /// The bounds of the log for a stream that begins at `position`, or at the head. `window_ms` says for how long
    /// public events are sent again; `None` is for ever.
    pub async fn start_bounds(
        &self,
        position: Option<Cursor>,
        window_ms: Option<i64>,
    ) -> Result<StartBounds, StoreError> {
        let mut reader = self.reader().await?;
        let row = sqlx::query!(
            r#"
            WITH bounds AS MATERIALIZED (
                SELECT epoch, head, floor FROM log_bounds
            )
            SELECT epoch AS "epoch!", head AS "head!", floor AS "floor!",
                   CASE WHEN $1::bigint IS NULL OR $3::bigint = 0 THEN head + 1
                        WHEN $3 IS NULL THEN 0
                        ELSE first_received_since(
                            CASE WHEN $1 = epoch THEN greatest(least($2::bigint, head), floor) ELSE floor END,
                            head, now_ms() - $3)
                   END AS "public_from!"
            FROM bounds
            "#,
            position.map(|cursor| cursor.epoch),
            position.map_or(0, |cursor| cursor.position),
            window_ms,
        )
        .fetch_one(self.run(&mut reader))
        .await?;
        Ok(StartBounds {
            positions: Positions {
                epoch: row.epoch,
                head: row.head,
                floor: row.floor,
            },
            public_from: row.public_from,
        })
    }

    /// A page of the history that a stream resumes from. What the statement keeps is somewhat more than is wanted.
    pub async fn history(&self, request: &HistoryRequest<'_>) -> Result<History, StoreError> {
        let mut reader = self.reader().await?;
        let patterns: Vec<String> = request
            .topics
            .iter()
            .map(|topic| topic.like().unwrap_or_else(|| "%".to_owned()))
            .collect();
        let row = sqlx::query!(
            r#"
            WITH hits AS MATERIALIZED (
                SELECT seq, size_bytes FROM (
                    SELECT seq, event_type, size_bytes, env, project_id, visibility, subject_type, subject_id, actor
                    FROM event_log
                    WHERE seq > $1 AND seq <= $2
                    ORDER BY seq
                    LIMIT $9
                ) page
                WHERE event_type LIKE ANY($3::text[]) AND env = 'production' AND project_id IS NULL
                  AND ($4::boolean
                       OR (visibility = 'public' AND seq >= $5)
                       OR (visibility = 'subject'
                           AND ((subject_type = 'user' AND subject_id = $6) OR strpos(actor, $6) > 0)))
                ORDER BY seq
                LIMIT $7
            ), kept AS MATERIALIZED (
                SELECT seq FROM (
                    SELECT seq, sum(size_bytes) OVER (ORDER BY seq ROWS UNBOUNDED PRECEDING) - size_bytes AS before
                    FROM hits
                ) h
                WHERE before < $8
            ), shape AS MATERIALIZED (
                SELECT (SELECT count(*) FROM hits) < $7
                       AND (SELECT count(*) FROM kept) = (SELECT count(*) FROM hits) AS complete
            )
            SELECT (SELECT array_agg(seq ORDER BY seq) FROM kept) AS hits, complete AS "complete!",
                   epoch AS "epoch!", head AS "head!", floor AS "floor!",
                   CASE WHEN complete
                        THEN (SELECT seq FROM event_log WHERE seq > $1 AND seq <= $2
                              ORDER BY seq OFFSET $9 - 1 LIMIT 1) END AS scan_end
            FROM shape, log_bounds
            "#,
            request.after,
            request.upto,
            &patterns,
            request.all,
            request.public_from,
            request.person,
            request.limit,
            request.bytes as f64,
            HISTORY_ROWS_MAX,
        )
        .fetch_one(self.run(&mut reader))
        .await?;
        let hits = row.hits.unwrap_or_default();
        let examined = match (row.complete, hits.last()) {
            (true, _) => row.scan_end.unwrap_or(request.upto),
            (false, Some(&last)) => last,
            (false, None) => request.after,
        };
        let events = self.events_at(&mut reader, &hits).await?;
        let mut positions = Positions {
            epoch: row.epoch,
            head: row.head,
            floor: row.floor,
        };
        if events.len() < hits.len() {
            drop(reader);
            positions = self.positions().await?;
        }
        Ok(History {
            events,
            examined,
            positions,
        })
    }

    /// When a person's sessions were withdrawn last: a token that was issued before holds no longer.
    pub async fn sessions_valid_after(&self, subject: &str) -> Result<Option<Millis>, StoreError> {
        let mut reader = self.reader().await?;
        let payloads = sqlx::query_scalar!(
            r#"
            SELECT payload FROM events
            WHERE event_type = 'network.user.token_valid_after' AND source = 'network' AND subject_id = $1
              AND subject_type = 'user'
            ORDER BY seq DESC
            LIMIT $2
            "#,
            subject,
            WITHDRAWALS_MAX,
        )
        .fetch_all(self.run(&mut reader))
        .await?;
        if let Some(newest) = payloads.iter().filter_map(|payload| valid_after(payload)).max() {
            return Ok(Some(newest));
        }
        // What left the hot store is older.
        let bodies = sqlx::query_scalar!(
            r#"
            SELECT body FROM events_archive
            WHERE event_type = 'network.user.token_valid_after' AND source = 'network' AND subject_id = $1
              AND subject_type = 'user'
            ORDER BY seq DESC
            LIMIT $2
            "#,
            subject,
            WITHDRAWALS_MAX,
        )
        .fetch_all(self.run(&mut reader))
        .await?;
        let payloads = bodies.iter().filter_map(|body| Body::unpack(body));
        Ok(payloads.filter_map(|body| valid_after(&body.payload)).max())
    }

    /// Uses a ticket up, in whatever process and whenever it is asked: true for the first that asks, false for all others.
    pub async fn spend_ticket(&self, id: &str, expires_at: Millis) -> Result<bool, StoreError> {
        let mut transaction = self.begin().await?;
        let spent = sqlx::query!(
            "INSERT INTO realtime_tickets (id, expires_at) VALUES ($1, $2) ON CONFLICT (id) DO NOTHING",
            id,
            expires_at.0,
        )
        .execute(self.run(&mut transaction))
        .await?;
        transaction.commit().await?;
        Ok(spent.rows_affected() == 1)
    }

    /// Forgets used tickets that would no longer open anything; answers whether there are more. A minute is left for
    /// clocks that disagree.
    pub async fn forget_tickets(&self) -> Result<bool, StoreError> {
        let mut transaction = self.begin_relaxed().await?;
        let gone = sqlx::query!(
            r#"
            DELETE FROM realtime_tickets WHERE id IN (
                SELECT id FROM realtime_tickets WHERE expires_at < now_ms() - 60000
                ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED
            )
            "#,
            TICKETS_BATCH,
        )
        .execute(self.run(&mut transaction))
        .await?;
        transaction.commit().await?;
        Ok(gone.rows_affected() == TICKETS_BATCH.unsigned_abs())
    }
}

/// The moment in the payload of `network.user.token_valid_after`.
pub fn valid_after(payload: &str) -> Option<Millis> {
    #[derive(serde::Deserialize)]
    struct Payload {
        valid_after: String,
    }
    let payload: Payload = serde_json::from_str(payload).ok()?;
    parse_rfc3339(&payload.valid_after)
}
