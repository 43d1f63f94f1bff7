//! What the archive command does in the database, on one connection of its own past any pooler: the lock of the month lives
//! and ends with it, and so does every change.

use std::collections::HashMap;
use std::time::Duration;

use sqlx::{Connection, PgConnection};

use crate::domain::packed::{PackedEvent, Packer};

use super::archived::ArchivedRow;
use super::{Addresses, StoreError};

/// How long to wait for a connection.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// How soon it is looked again whether another run for the month has ended.
const LOCK_INTERVAL: Duration = Duration::from_millis(500);

/// A connection that works on the archive.
pub struct ArchiveSession {
    connection: PgConnection,
    packer: Packer,
}

/// A line of an object, offered for the row that it was made of.
#[derive(Debug, Clone)]
pub struct Offer {
    /// The event.
    pub id: String,
    /// The line.
    pub text: String,
}

/// Where a reading of a month stands.
#[derive(Debug)]
pub struct MonthRows {
    from: i64,
    before: i64,
    /// Histories with their first and last position in the month, the next one last.
    spans: Vec<(i64, i64, i64)>,
}

/// A month of the replay tier.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ReplayMonth {
    /// `YYYY-MM`.
    pub month: String,
    /// Its rows.
    pub rows: i64,
    /// The first position.
    pub first_seq: i64,
    /// The last one.
    pub last_seq: i64,
    /// Rows that are kept whatever their age.
    pub held: i64,
}

/// The hot store.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct HotTier {
    /// The position of the oldest event.
    pub oldest_seq: Option<i64>,
    /// When it was stored, milliseconds.
    pub oldest_received_at: Option<i64>,
    /// Its rows.
    pub rows: i64,
}

/// What each tier holds.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct TierStatus {
    /// By month, the oldest first.
    pub replay: Vec<ReplayMonth>,
    /// The hot store.
    pub hot: HotTier,
}

impl ArchiveSession {
    /// Connects. The schema must be migrated.
    pub async fn open(addresses: &Addresses) -> Result<Self, StoreError> {
        let connecting = PgConnection::connect_with(&addresses.direct);
        let mut connection = match tokio::time::timeout(CONNECT_MAX, connecting).await {
            Ok(connected) => connected?,
            Err(_elapsed) => return Err(StoreError::Unavailable(sqlx::Error::PoolTimedOut)),
        };
        let migrated = sqlx::query_scalar!(r#"SELECT to_regclass('event_log') IS NOT NULL AS "there!""#)
            .fetch_one(&mut connection)
            .await?;
        if !migrated {
            return Err(StoreError::NotMigrated);
        }
        Ok(Self {
            connection,
            packer: Packer::default(),
        })
    }

    /// Takes the lock of a month, which ends with the connection. `waiting` is called once where another run holds it.
    pub async fn lock(&mut self, month: &str, waiting: impl FnOnce()) -> Result<(), StoreError> {
        let mut waiting = Some(waiting);
        loop {
            // Nobody waits in the database: that would hold a snapshot for as long.
            let taken = sqlx::query_scalar!(
                r#"SELECT pg_try_advisory_lock(hashtext('events-archive:' || $1)) AS "taken!""#,
                month
            )
            .fetch_one(&mut self.connection)
            .await?;
            if taken {
                return Ok(());
            }
            if let Some(waiting) = waiting.take() {
                waiting();
            }
            tokio::time::sleep(LOCK_INTERVAL).await;
        }
    }

    /// The clock of the database, milliseconds.
    pub async fn now_ms(&mut self) -> Result<i64, StoreError> {
        let now = sqlx::query_scalar!(r#"SELECT now_ms() AS "now!""#)
            .fetch_one(&mut self.connection)
            .await?;
        Ok(now)
    }

    /// What each tier holds.
    pub async fn status(&mut self) -> Result<TierStatus, StoreError> {
        let replay = sqlx::query_as!(
            ReplayMonth,
            r#"
            SELECT to_char(to_timestamp(received_at / 1000) AT TIME ZONE 'UTC', 'YYYY-MM') AS "month!",
                   count(*) AS "rows!", min(seq) AS "first_seq!", max(seq) AS "last_seq!",
                   count(*) FILTER (WHERE hold_until > now_ms()) AS "held!"
            FROM events_archive GROUP BY 1 ORDER BY 1
            "#
        )
        .fetch_all(&mut self.connection)
        .await?;
        let hot = sqlx::query_as!(
            HotTier,
            r#"
            SELECT count(*) AS "rows!", min(seq) AS oldest_seq,
                   (SELECT received_at FROM events ORDER BY seq LIMIT 1) AS oldest_received_at
            FROM events
            "#
        )
        .fetch_one(&mut self.connection)
        .await?;
        Ok(TierStatus { replay, hot })
    }

    /// Begins to read the rows that were received from `from` on and before `before`.
    pub async fn month_rows(&mut self, from: i64, before: i64) -> Result<MonthRows, StoreError> {
        let spans = sqlx::query!(
            r#"
            SELECT epoch, min(seq) AS "first!", max(seq) AS "last!" FROM events_archive
            WHERE received_at >= $1 AND received_at < $2
            GROUP BY epoch ORDER BY epoch DESC
            "#,
            from,
            before,
        )
        .fetch_all(&mut self.connection)
        .await?;
        let spans = spans.into_iter().map(|span| (span.epoch, span.first, span.last));
        Ok(MonthRows {
            from,
            before,
            spans: spans.collect(),
        })
    }

    /// The next rows in the order of their positions, at most `most`; none at the end. A row whose body is damaged is its id.
    pub async fn next_rows(
        &mut self,
        reading: &mut MonthRows,
        most: usize,
    ) -> Result<Vec<Result<PackedEvent, String>>, StoreError> {
        while let Some((epoch, first, last)) = reading.spans.last_mut() {
            let rows = sqlx::query_as!(
                ArchivedRow,
                r#"
                SELECT id, seq, epoch, event_type, source, subject_type, subject_id, visibility, project_id, env,
                       received_at, redacted_at, redacts, body, archived_at
                FROM events_archive
                WHERE epoch = $1 AND seq >= $2 AND seq <= $3 AND received_at >= $4 AND received_at < $5
                ORDER BY seq LIMIT $6
                "#,
                *epoch,
                *first,
                *last,
                reading.from,
                reading.before,
                i64::try_from(most).expect("a page"),
            )
            .fetch_all(&mut self.connection)
            .await?;
            if let Some(end) = rows.last() {
                *first = end.seq + 1;
                let unpack = |row: ArchivedRow| {
                    let id = row.id.clone();
                    row.unpack().ok_or(id)
                };
                return Ok(rows.into_iter().map(unpack).collect());
            }
            reading.spans.pop();
        }
        Ok(Vec::new())
    }

    /// Deletes the rows that still are what is offered, as `render` writes them; answers how many.
    pub async fn delete_matching(
        &mut self,
        offers: Vec<Offer>,
        render: impl Fn(PackedEvent) -> String,
    ) -> Result<u64, StoreError> {
        let offered: HashMap<String, String> = offers.into_iter().map(|offer| (offer.id, offer.text)).collect();
        let ids: Vec<&str> = offered.keys().map(String::as_str).collect();
        let mut transaction = self.connection.begin().await?;
        sqlx::query!("SELECT value FROM store_floor WHERE name = 'events' FOR UPDATE")
            .fetch_one(&mut *transaction)
            .await?;
        let rows = sqlx::query_as!(
            ArchivedRow,
            r#"
            SELECT id, seq, epoch, event_type, source, subject_type, subject_id, visibility, project_id, env,
                   received_at, redacted_at, redacts, body, archived_at
            FROM events_archive WHERE id = ANY($1)
            ORDER BY epoch, seq FOR UPDATE
            "#,
            &ids as &[&str],
        )
        .fetch_all(&mut *transaction)
        .await?;
        let same = rows.into_iter().filter_map(|row| {
            let id = row.id.clone();
            let text = render(row.unpack()?);
            (offered.get(&id) == Some(&text)).then_some(id)
        });
        let same: Vec<String> = same.collect();
        if same.is_empty() {
            return Ok(0);
        }
        let deleted = sqlx::query!("DELETE FROM events_archive WHERE id = ANY($1)", &same)
            .execute(&mut *transaction)
            .await?
            .rows_affected();
        sqlx::query!(
            r#"
            UPDATE store_floor f SET value = greatest(f.value, coalesce(
                (SELECT seq FROM event_log WHERE seq > f.value ORDER BY seq LIMIT 1) - 1,
                (SELECT head FROM log_bounds)))
            WHERE f.name = 'events'
            "#
        )
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(deleted)
    }

    /// Puts back the events that the database has not, in whatever tier, and answers how many. They are known as published
    /// for as long as they are held, and positions from the first of them on can be read again.
    pub async fn insert(&mut self, events: Vec<PackedEvent>, hold_until: i64) -> Result<u64, StoreError> {
        let columns = Columns::of(&events, &mut self.packer);
        let mut transaction = self.connection.begin().await?;
        sqlx::query!("SELECT value FROM store_floor WHERE name = 'events' FOR UPDATE")
            .fetch_one(&mut *transaction)
            .await?;
        let inserted = sqlx::query!(
            r#"
            INSERT INTO events_archive (
                id, seq, epoch, event_type, source, subject_type, subject_id, visibility, project_id, env, received_at,
                redacted_at, redacts, body, archived_at, hold_until, actor_id, size_bytes
            )
            SELECT t.id, t.seq, t.epoch, t.event_type, t.source, t.subject_type, t.subject_id, t.visibility, t.project_id,
                   t.env, t.received_at, t.redacted_at, t.redacts, t.body, t.archived_at, $18, t.actor_id, t.size_bytes
            FROM unnest(
                $1::text[], $2::bigint[], $3::bigint[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[],
                $9::text[], $10::text[], $11::bigint[], $12::bigint[], $13::integer[], $14::bytea[], $15::bigint[],
                $16::text[], $17::bigint[]
            ) AS t(
                id, seq, epoch, event_type, source, subject_type, subject_id, visibility, project_id, env, received_at,
                redacted_at, redacts, body, archived_at, actor_id, size_bytes
            )
            WHERE NOT EXISTS (SELECT FROM events e WHERE e.id = t.id)
            ORDER BY t.epoch, t.seq
            ON CONFLICT (id) DO NOTHING
            RETURNING id, seq, epoch = (SELECT value FROM store_epoch WHERE name = 'events') AS "current!"
            "#,
            &columns.id,
            &columns.seq,
            &columns.epoch,
            &columns.event_type,
            &columns.source,
            &columns.subject_type,
            &columns.subject_id,
            &columns.visibility,
            &columns.project_id as &[Option<String>],
            &columns.env,
            &columns.received_at,
            &columns.redacted_at as &[Option<i64>],
            &columns.redacts,
            &columns.body,
            &columns.archived_at,
            &columns.actor_id as &[Option<String>],
            &columns.size_bytes,
            hold_until,
        )
        .fetch_all(&mut *transaction)
        .await?;
        if inserted.is_empty() {
            return Ok(0);
        }
        let ids: Vec<&str> = inserted.iter().map(|row| row.id.as_str()).collect();
        sqlx::query!(
            r#"
            INSERT INTO idempotency_receipts AS r (consumer, event_id, processed_at)
            SELECT 'events:publish', i.id, $2 FROM unnest($1::text[]) AS i(id) ORDER BY i.id
            ON CONFLICT (consumer, event_id) DO UPDATE SET processed_at = greatest(r.processed_at, excluded.processed_at)
            "#,
            &ids as &[&str],
            hold_until,
        )
        .execute(&mut *transaction)
        .await?;
        let first = inserted.iter().filter(|row| row.current).map(|row| row.seq).min();
        sqlx::query!(
            "UPDATE store_floor SET value = least(value, $1 - 1) WHERE name = 'events' AND value >= $1",
            first,
        )
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(u64::try_from(inserted.len()).expect("a page"))
    }
}

/// The columns of rows, one array each.
#[derive(Default)]
struct Columns {
    id: Vec<String>,
    seq: Vec<i64>,
    epoch: Vec<i64>,
    event_type: Vec<String>,
    source: Vec<String>,
    subject_type: Vec<String>,
    subject_id: Vec<String>,
    visibility: Vec<String>,
    project_id: Vec<Option<String>>,
    env: Vec<String>,
    received_at: Vec<i64>,
    redacted_at: Vec<Option<i64>>,
    redacts: Vec<i32>,
    body: Vec<Vec<u8>>,
    archived_at: Vec<i64>,
    actor_id: Vec<Option<String>>,
    size_bytes: Vec<i64>,
}

impl Columns {
    fn of(events: &[PackedEvent], packer: &mut Packer) -> Self {
        let mut columns = Self::default();
        for event in events {
            columns.id.push(event.id.clone());
            columns.seq.push(event.seq);
            columns.epoch.push(event.epoch);
            columns.event_type.push(event.event_type.clone());
            columns.source.push(event.source.clone());
            columns.subject_type.push(event.subject_type.clone());
            columns.subject_id.push(event.subject_id.clone());
            columns.visibility.push(event.visibility.clone());
            columns.project_id.push(event.project_id.clone());
            columns.env.push(event.env.clone());
            columns.received_at.push(event.received_at);
            columns.redacted_at.push(event.redacted_at);
            columns.redacts.push(event.redacts);
            columns.body.push(packer.pack(&event.body));
            columns.archived_at.push(event.archived_at);
            let seen = event.visibility == "subject" && event.redacted_at.is_none();
            columns.actor_id.push(seen.then(|| event.body.user()).flatten());
            columns.size_bytes.push(event.body.size_bytes);
        }
        columns
    }
}
