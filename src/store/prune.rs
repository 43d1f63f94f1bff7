//! Events that are old enough leave the hot store: to the replay tier, or for good. Any number of processes may do it at
//! once; each takes rows that no other has.
//!
//! An event leaves together with its deliveries, in one transaction. One with a delivery under way stays for another time,
//! and one with a delivery that waits is left until that has been ended as an operator would end it, key marks and all. No
//! row of deliveries is waited for.
//!
//! What leaves for good moves the floor of the log in the same transaction, under the lock of the floor: two that
//! removed rows side by side would each still see those of the other, and the floor would stay below both.

use std::collections::{BTreeMap, HashMap, HashSet};

use sqlx::{PgConnection, Postgres, Transaction};

use crate::domain::packed::{Body, Packer};

use super::counts::CountRole;
use super::{DeliveryCounts, Store, StoreError};

/// Events that one transaction moves or removes.
const BATCH: i64 = 500;
/// Stored bytes after which a batch ends, so that packing keeps no transaction open for long.
const BATCH_BYTES: i64 = 4 * 1024 * 1024;
/// Rows of the replay tier that one transaction removes.
const REPLAY_BATCH: i64 = 1_000;
/// Pages of receipts that one statement looks through.
const RECEIPT_PAGES: i64 = 64;

/// What is on record of a delivery whose event left the hot store before it was made.
const EXPIRED_ERROR: &str = "its event is older than EVENTS_RETENTION_DAYS";

/// Where a pass over old events goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Aged {
    /// Received at this time, or
    received_at: i64,
    /// at it, behind this position.
    position: i64,
}

impl Aged {
    /// The oldest of all.
    pub const FIRST: Self = Self {
        received_at: i64::MIN,
        position: 0,
    };
}

/// What a batch of old events came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Moved {
    /// Events that left.
    pub events: u64,
    /// Deliveries that waited and were ended; their events leave with a later batch.
    pub expired: u64,
    /// Where to go on; nothing where there are no more for now.
    pub next: Option<Aged>,
}

/// What a batch that left for good came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Removed {
    /// Rows.
    pub rows: u64,
    /// There may be more.
    pub more: bool,
}

/// Where a pass over receipts stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReceiptsPass {
    /// Receipts that this statement forgot.
    pub forgotten: u64,
    /// The page to go on with; nothing at the end of the table.
    pub next: Option<i64>,
}

/// Events that a batch holds, in the order of their age.
struct Batch {
    positions: Vec<i64>,
    next: Option<Aged>,
}

impl Store {
    /// Moves a batch of production events that were received `age_ms` ago or earlier to the replay tier.
    pub async fn move_to_replay(&self, age_ms: i64, from: Aged) -> Result<Moved, StoreError> {
        let mut transaction = self.begin_prune().await?;
        let batch = self.take_aged(&mut transaction, "production", age_ms, from).await?;
        let (leaving, waiting) = self.split_by_deliveries(&mut transaction, &batch.positions).await?;
        if !leaving.is_empty() {
            self.pack(&mut transaction, &leaving).await?;
            self.remove_hot(&mut transaction, &leaving).await?;
        }
        transaction.commit().await?;
        Ok(Moved {
            events: u64::try_from(leaving.len()).expect("a batch"),
            expired: self.expire(waiting).await?,
            next: batch.next,
        })
    }

    /// Removes a batch of events of `env` that were received `age_ms` ago or earlier, for good. Does nothing where another
    /// process is removing.
    pub async fn remove_aged(&self, env: &str, age_ms: i64, from: Aged) -> Result<Moved, StoreError> {
        let mut transaction = self.begin_prune().await?;
        if !self.take_floor(&mut transaction).await? {
            return Ok(Moved::default());
        }
        let batch = self.take_aged(&mut transaction, env, age_ms, from).await?;
        let (leaving, waiting) = self.split_by_deliveries(&mut transaction, &batch.positions).await?;
        if !leaving.is_empty() {
            self.remove_hot(&mut transaction, &leaving).await?;
            self.raise_floor(&mut transaction).await?;
        }
        transaction.commit().await?;
        Ok(Moved {
            events: u64::try_from(leaving.len()).expect("a batch"),
            expired: self.expire(waiting).await?,
            next: batch.next,
        })
    }

    /// Removes a batch of the replay tier that was received `age_ms` ago or earlier and that nobody holds. Does nothing where
    /// another process is removing.
    pub async fn expire_replay(&self, age_ms: i64) -> Result<Removed, StoreError> {
        let mut transaction = self.begin_prune().await?;
        if !self.take_floor(&mut transaction).await? {
            return Ok(Removed::default());
        }
        let rows = sqlx::query!(
            r#"
            DELETE FROM events_archive WHERE id IN (
                SELECT id FROM events_archive
                WHERE received_at < now_ms() - $1 AND (hold_until IS NULL OR hold_until <= now_ms())
                ORDER BY received_at, epoch, seq LIMIT $2 FOR UPDATE SKIP LOCKED
            )
            "#,
            age_ms,
            REPLAY_BATCH,
        )
        .execute(self.run(&mut transaction))
        .await?
        .rows_affected();
        if rows > 0 {
            self.raise_floor(&mut transaction).await?;
        }
        transaction.commit().await?;
        Ok(Removed {
            rows,
            more: rows == REPLAY_BATCH.unsigned_abs(),
        })
    }

    /// Forgets receipts older than `age_ms` on some pages of their table, from `page` on. They have no index by age, which
    /// every publish would pay for; the table is walked instead.
    pub async fn forget_receipts(&self, age_ms: i64, page: i64) -> Result<ReceiptsPass, StoreError> {
        let mut transaction = self.begin_relaxed().await?;
        let done = sqlx::query!(
            r#"
            WITH gone AS (
                DELETE FROM idempotency_receipts
                WHERE ctid >= format('(%s,0)', $2::bigint)::tid AND ctid < format('(%s,0)', $2::bigint + $3::bigint)::tid
                  AND processed_at < now_ms() - $1
                RETURNING 1
            )
            SELECT (SELECT count(*) FROM gone) AS "forgotten!",
                   ($2::bigint + $3::bigint) * current_setting('block_size')::bigint
                       < pg_relation_size('idempotency_receipts') AS "more!"
            "#,
            age_ms,
            page,
            RECEIPT_PAGES,
        )
        .fetch_one(self.run(&mut transaction))
        .await?;
        transaction.commit().await?;
        Ok(ReceiptsPass {
            forgotten: done.forgotten.unsigned_abs(),
            next: done.more.then_some(page + RECEIPT_PAGES),
        })
    }

    /// Locks old events that nobody else holds, the oldest first.
    async fn take_aged(
        &self,
        transaction: &mut Transaction<'static, Postgres>,
        env: &str,
        age_ms: i64,
        from: Aged,
    ) -> Result<Batch, StoreError> {
        let rows = sqlx::query!(
            r#"
            SELECT seq, received_at, size_bytes FROM events
            WHERE received_at < now_ms() - $1 AND (received_at, seq) > ($2, $3) AND env = $4
            ORDER BY received_at, seq
            LIMIT $5
            FOR UPDATE SKIP LOCKED
            "#,
            age_ms,
            from.received_at,
            from.position,
            env,
            BATCH,
        )
        .fetch_all(self.run(transaction))
        .await?;
        let full = i64::try_from(rows.len()).is_ok_and(|count| count == BATCH);
        let (mut positions, mut bytes, mut last) = (Vec::with_capacity(rows.len()), 0_i64, None);
        let count = rows.len();
        for row in rows {
            if bytes >= BATCH_BYTES {
                break;
            }
            bytes += row.size_bytes;
            positions.push(row.seq);
            last = Some(Aged {
                received_at: row.received_at,
                position: row.seq,
            });
        }
        Ok(Batch {
            next: last.filter(|_| full || positions.len() < count),
            positions,
        })
    }

    /// Which of these events may leave: their deliveries, if any, have ended, and are locked. Answers as well the deliveries
    /// that wait, by subscription.
    async fn split_by_deliveries(
        &self,
        transaction: &mut PgConnection,
        positions: &[i64],
    ) -> Result<(Vec<i64>, BTreeMap<String, Vec<i64>>), StoreError> {
        if positions.is_empty() {
            return Ok((Vec::new(), BTreeMap::new()));
        }
        let held = sqlx::query!(
            r#"
            SELECT subscription_id, seq, status IN ('delivered', 'dead') AS "ended!", lease_until IS NOT NULL AS "claimed!"
            FROM deliveries WHERE seq = ANY($1)
            ORDER BY seq, subscription_id
            FOR UPDATE SKIP LOCKED
            "#,
            positions,
        )
        .fetch_all(self.run(transaction))
        .await?;
        let all = sqlx::query!(
            r#"SELECT seq, count(*) AS "rows!" FROM deliveries WHERE seq = ANY($1) GROUP BY seq"#,
            positions,
        )
        .fetch_all(self.run(transaction))
        .await?;
        let mut unheld: HashMap<i64, i64> = all.into_iter().map(|row| (row.seq, row.rows)).collect();
        let mut staying = HashSet::new();
        let mut waiting: BTreeMap<String, Vec<i64>> = BTreeMap::new();
        for row in held {
            *unheld.entry(row.seq).or_default() -= 1;
            if row.claimed || !row.ended {
                staying.insert(row.seq);
            }
            if !row.claimed && !row.ended {
                waiting.entry(row.subscription_id).or_default().push(row.seq);
            }
        }
        staying.extend(unheld.into_iter().filter(|(_, left)| *left != 0).map(|(seq, _)| seq));
        let leaving = positions.iter().copied().filter(|seq| !staying.contains(seq)).collect();
        Ok((leaving, waiting))
    }

    /// Ends deliveries that wait although their events are too old. That is told: they were promised.
    async fn expire(&self, waiting: BTreeMap<String, Vec<i64>>) -> Result<u64, StoreError> {
        let mut expired = 0;
        for (subscription_id, positions) in waiting {
            let ended = self.end_deliveries(&subscription_id, &positions, EXPIRED_ERROR).await?;
            tracing::warn!(
                subscription_id,
                deliveries = ended.len(),
                "{} deliveries of {subscription_id} were still waiting when their events left the hot store, and are not made",
                ended.len(),
            );
            expired += u64::try_from(ended.len()).expect("a batch");
        }
        Ok(expired)
    }

    /// Copies events into the replay tier, packed.
    async fn pack(&self, transaction: &mut PgConnection, positions: &[i64]) -> Result<(), StoreError> {
        let rows = sqlx::query!(
            r#"
            SELECT seq, version, actor, on_behalf_of, subject_revision, trace_id, priority, visibility, occurred_at, payload,
                   hops, publisher, request_id, size_bytes, redacted_by
            FROM events WHERE seq = ANY($1)
            "#,
            positions,
        )
        .fetch_all(self.run(transaction))
        .await?;
        let packing = tokio::task::spawn_blocking(move || {
            let mut packer = Packer::default();
            let (mut seqs, mut bodies, mut actors) = (Vec::new(), Vec::new(), Vec::new());
            for row in rows {
                let body = Body {
                    version: row.version,
                    actor: row.actor,
                    subject_revision: row.subject_revision,
                    trace_id: row.trace_id,
                    priority: row.priority,
                    occurred_at: row.occurred_at,
                    payload: row.payload,
                    hops: row.hops,
                    publisher: row.publisher,
                    request_id: row.request_id,
                    size_bytes: row.size_bytes,
                    redacted_by: row.redacted_by,
                    on_behalf_of: row.on_behalf_of,
                };
                seqs.push(row.seq);
                bodies.push(packer.pack(&body));
                actors.push((row.visibility == "subject").then(|| body.user()).flatten());
            }
            (seqs, bodies, actors)
        });
        let (seqs, bodies, actors) = packing.await.expect("packing neither panics nor is given up");
        sqlx::query!(
            r#"
            INSERT INTO events_archive (
                id, seq, epoch, event_type, source, subject_type, subject_id, visibility, project_id, env, received_at,
                redacted_at, redacts, body, archived_at, actor_id, size_bytes
            )
            SELECT e.id, e.seq, epoch.value, e.event_type, e.source, e.subject_type, e.subject_id, e.visibility,
                   e.project_id, e.env, e.received_at, e.redacted_at, e.redacts, p.body, now_ms(), p.actor_id,
                   e.size_bytes
            FROM unnest($1::bigint[], $2::bytea[], $3::text[]) AS p(seq, body, actor_id)
            JOIN events e ON e.seq = p.seq
            JOIN store_epoch epoch ON epoch.name = 'events'
            ON CONFLICT (id) DO NOTHING
            "#,
            &seqs,
            &bodies,
            &actors as &[Option<String>],
        )
        .execute(self.run(transaction))
        .await?;
        Ok(())
    }

    /// Takes events and their deliveries out of the hot store. Every event that leaves it does so here, so what is counted of
    /// hot events per project is to be credited here.
    async fn remove_hot(&self, transaction: &mut PgConnection, positions: &[i64]) -> Result<(), StoreError> {
        let deliveries = sqlx::query!(
            r#"
            WITH gone AS (DELETE FROM deliveries WHERE seq = ANY($1) RETURNING status)
            SELECT status AS "status!", count(*) AS "rows!" FROM gone GROUP BY status
            "#,
            positions,
        )
        .fetch_all(self.run(transaction))
        .await?;
        sqlx::query!("DELETE FROM events WHERE seq = ANY($1)", positions)
            .execute(self.run(transaction))
            .await?;
        // The head stays known when the last event leaves. Mostly a later one is there, and two that leave at once do not
        // meet on this row.
        sqlx::query!(
            r#"
            UPDATE store_floor SET value = greatest(value, $1)
            WHERE name = 'head' AND value < $1 AND NOT EXISTS (SELECT FROM events WHERE seq > $1)
            "#,
            positions.iter().max(),
        )
        .execute(self.run(transaction))
        .await?;
        let mut change = DeliveryCounts::default();
        for row in deliveries {
            change.add(&row.status, -row.rows);
        }
        self.count(transaction, CountRole::Prune, change).await
    }

    /// Locks the floor of the log, unless another process is removing.
    async fn take_floor(&self, transaction: &mut PgConnection) -> Result<bool, StoreError> {
        let taken = sqlx::query_scalar!("SELECT value FROM store_floor WHERE name = 'events' FOR UPDATE SKIP LOCKED")
            .fetch_optional(self.run(transaction))
            .await?;
        Ok(taken.is_some())
    }

    /// Moves the floor up to what is left, in a statement after the one that removed.
    async fn raise_floor(&self, transaction: &mut PgConnection) -> Result<(), StoreError> {
        // What lies below the floor is gone, but for entries that a held snapshot keeps in the indexes.
        sqlx::query!(
            r#"
            UPDATE store_floor f SET value = greatest(f.value, coalesce(
                (SELECT seq FROM event_log WHERE seq > f.value ORDER BY seq LIMIT 1) - 1,
                (SELECT head FROM log_bounds)))
            WHERE f.name = 'events'
            "#
        )
        .execute(self.run(transaction))
        .await?;
        Ok(())
    }
}
