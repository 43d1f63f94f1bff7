//! Recorded decisions: which carrier wakes the deliveries of a policy. A row is written in the transaction of the publish
//! that first acts on it.

use std::time::Duration;

use crate::domain::ids::{EventId, SubscriptionId};
use crate::domain::time::Millis;

use super::publish::Group;
use super::{Store, StoreError};

/// Decisions that one statement forgets.
const FORGOTTEN_MAX: i64 = 1000;
/// How long a process may place deliveries by a decision after it said so.
pub const PLACED_BY_MAX: Duration = Duration::from_secs(60 * 60);
const PLACED_BY_MAX_MS: i64 = 60 * 60 * 1000;
/// A word that was said within this time stands for a new one.
const SAID_INTERVAL_MS: i64 = PLACED_BY_MAX_MS / 12;

/// A decision that is not on record yet.
#[derive(Debug, Clone, PartialEq)]
pub struct NewPlacement<'a> {
    /// `TOPIC`, `QUEUE` or `STREAM`.
    pub class: &'a str,
    /// The policy's pattern; none for the default one.
    pub pattern: Option<&'a str>,
    /// The policy's revision; 0 for the default one.
    pub revision: i32,
    /// Who was chosen.
    pub carrier: &'a str,
    /// `platform.placement-result@1`, JSON.
    pub result: String,
}

/// A decision on record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredPlacement {
    /// `TOPIC`, `QUEUE` or `STREAM`.
    pub class: String,
    /// The policy's pattern; none for the default one.
    pub pattern: Option<String>,
    /// The policy's revision; 0 for the default one.
    pub revision: i32,
    /// Who was chosen.
    pub carrier: String,
    /// `platform.placement-result@1`, JSON.
    pub result: String,
    /// When.
    pub decided_at: Millis,
}

/// How one delivery is woken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeliveryPlacement {
    /// Its carrier; none for a row that is older than carriers.
    pub carrier: Option<String>,
    /// The decision it was made under, while that is on record.
    pub decision: Option<StoredPlacement>,
}

impl Group<'_> {
    /// Puts decisions on record; answers their ids, in their order. One that is on record already is not written again,
    /// whichever process wrote it. They stand when the group is committed.
    pub async fn record_placements(&mut self, placements: &[NewPlacement<'_>]) -> Result<Vec<i64>, StoreError> {
        if placements.is_empty() {
            return Ok(Vec::new());
        }
        let classes: Vec<&str> = placements.iter().map(|placement| placement.class).collect();
        let patterns: Vec<Option<&str>> = placements.iter().map(|placement| placement.pattern).collect();
        let revisions: Vec<i32> = placements.iter().map(|placement| placement.revision).collect();
        let carriers: Vec<&str> = placements.iter().map(|placement| placement.carrier).collect();
        let results: Vec<&str> = placements.iter().map(|placement| placement.result.as_str()).collect();
        // The group holds the counter row, so nobody else records at the same time.
        let ids = sqlx::query_scalar!(
            r#"
            WITH wanted AS MATERIALIZED (
                SELECT * FROM unnest($1::text[], $2::text[], $3::integer[], $4::text[], $5::text[])
                    WITH ORDINALITY AS t(class, pattern, revision, carrier, result, ordinal)
            ), known AS MATERIALIZED (
                SELECT w.ordinal, last.id
                FROM wanted w
                LEFT JOIN delivery_policies f ON f.pattern = w.pattern AND f.revision = w.revision
                CROSS JOIN LATERAL (
                    SELECT p.id, p.carrier, p.decided_at FROM delivery_placements p
                    WHERE p.carrier_class = w.class AND p.policy_pattern IS NOT DISTINCT FROM w.pattern
                      AND p.policy_revision = w.revision AND p.ordering_key IS NULL
                    ORDER BY p.decided_at DESC, p.id DESC LIMIT 1
                ) last
                -- One that was removed and written again has the revision of the one before, and asks for something else.
                WHERE last.carrier = w.carrier AND last.decided_at >= coalesce(f.updated_at, 0)
            ), new AS (
                INSERT INTO delivery_placements (
                    carrier_class, policy_pattern, policy_revision, carrier, result, decided_at, used_at
                )
                SELECT class, pattern, revision, carrier, result::jsonb, $6, $6
                FROM wanted WHERE ordinal NOT IN (SELECT ordinal FROM known)
                RETURNING id, carrier_class, policy_pattern, policy_revision
            ), used AS (
                UPDATE delivery_placements p SET used_at = $6
                FROM known k
                WHERE p.id = k.id AND coalesce(p.used_at, 0) < $6 - $7
            )
            SELECT coalesce(k.id, n.id) AS "id!"
            FROM wanted w
            LEFT JOIN known k ON k.ordinal = w.ordinal
            LEFT JOIN new n ON n.carrier_class = w.class AND n.policy_pattern IS NOT DISTINCT FROM w.pattern
                AND n.policy_revision = w.revision
            ORDER BY w.ordinal
            "#,
            &classes as &[&str],
            &patterns as &[Option<&str>],
            &revisions,
            &carriers as &[&str],
            &results as &[&str],
            self.now_ms,
            SAID_INTERVAL_MS,
        )
        .fetch_all(self.store.run(&mut self.transaction))
        .await?;
        Ok(ids)
    }
}

impl Store {
    /// Says that this process still places deliveries by these decisions. It may do that for [`PLACED_BY_MAX`] and then has
    /// to say so again: after that nothing keeps them from being forgotten.
    pub async fn use_placements(&self, ids: &[i64]) -> Result<(), StoreError> {
        let mut transaction = self.begin_relaxed().await?;
        // What another process has just said need not be said again, nor waited for.
        sqlx::query!(
            r#"
            UPDATE delivery_placements p SET used_at = now_ms()
            WHERE p.id IN (
                SELECT u.id FROM delivery_placements u
                WHERE u.id = ANY($1) AND coalesce(u.used_at, 0) < now_ms() - $2
                ORDER BY u.id
                FOR UPDATE
            )
            "#,
            ids,
            SAID_INTERVAL_MS,
        )
        .execute(self.run(&mut transaction))
        .await?;
        transaction.commit().await?;
        Ok(())
    }

    /// Forgets decisions by which nothing was placed for `retention_ms`, a bounded number of them, and answers whether
    /// there may be more. What was decided last stays: of each class and key, and of each policy in force, of which
    /// `default_class` is that of the default one.
    pub async fn forget_placements(&self, retention_ms: i64, default_class: &str) -> Result<bool, StoreError> {
        let mut transaction = self.begin_relaxed().await?;
        // Nothing old becomes the newest again, so a snapshot that is a little late keeps more and never less. Rows that
        // another process is about to delete are left to it.
        let forgotten = sqlx::query!(
            r#"
            DELETE FROM delivery_placements WHERE id IN (
                SELECT p.id FROM delivery_placements p
                WHERE greatest(p.decided_at, p.used_at) < now_ms() - $1
                  AND p.id NOT IN (
                    SELECT DISTINCT ON (carrier_class, ordering_key) id FROM delivery_placements
                    ORDER BY carrier_class, ordering_key, decided_at DESC, id DESC
                  )
                  AND p.id NOT IN (
                    SELECT DISTINCT ON (l.carrier_class, l.policy_pattern, l.policy_revision, l.ordering_key) l.id
                    FROM delivery_placements l
                    LEFT JOIN delivery_policies f ON f.pattern = l.policy_pattern AND f.revision = l.policy_revision
                    WHERE f.pattern IS NOT NULL
                       OR (l.policy_pattern IS NULL AND l.policy_revision = 0 AND l.carrier_class = $2)
                    ORDER BY l.carrier_class, l.policy_pattern, l.policy_revision, l.ordering_key,
                             l.decided_at DESC, l.id DESC
                  )
                ORDER BY p.id
                LIMIT $3
                FOR UPDATE SKIP LOCKED
            )
            "#,
            retention_ms.saturating_add(2 * PLACED_BY_MAX_MS),
            default_class,
            FORGOTTEN_MAX,
        )
        .execute(self.run(&mut transaction))
        .await?
        .rows_affected();
        transaction.commit().await?;
        Ok(i64::try_from(forgotten).is_ok_and(|count| count == FORGOTTEN_MAX))
    }

    /// The last decision on record for a policy, or for one key of it where the key has one of its own.
    pub async fn last_placement(
        &self,
        class: &str,
        pattern: Option<&str>,
        revision: i32,
        key: Option<&str>,
    ) -> Result<Option<StoredPlacement>, StoreError> {
        let mut reader = self.reader().await?;
        let found = sqlx::query!(
            r#"
            SELECT carrier_class AS class, policy_pattern AS pattern, policy_revision AS revision, carrier,
                   result::text AS "result!", decided_at
            FROM delivery_placements
            WHERE carrier_class = $1 AND (ordering_key IS NULL OR ordering_key = $4)
              AND policy_pattern IS NOT DISTINCT FROM $2 AND policy_revision = $3
              -- What was decided for one that was removed since is not about the one that has its revision now.
              AND decided_at >= coalesce(
                (SELECT f.updated_at FROM delivery_policies f WHERE f.pattern = $2 AND f.revision = $3), 0
              )
            ORDER BY ordering_key IS NULL, decided_at DESC, id DESC
            LIMIT 1
            "#,
            class,
            pattern,
            revision,
            key,
        )
        .fetch_optional(self.run(&mut reader))
        .await?;
        Ok(found.map(|row| StoredPlacement {
            class: row.class,
            pattern: row.pattern,
            revision: row.revision,
            carrier: row.carrier,
            result: row.result,
            decided_at: Millis(row.decided_at),
        }))
    }

    /// The carrier that the oldest waiting delivery of a key is on, whoever receives it.
    pub async fn carrier_of_backlog(&self, key: &str) -> Result<Option<String>, StoreError> {
        let mut reader = self.reader().await?;
        let carrier = sqlx::query_scalar!(
            r#"
            SELECT oldest.carrier AS "carrier!"
            FROM subscriptions s
            CROSS JOIN LATERAL (
                SELECT d.carrier, d.seq FROM deliveries d
                WHERE d.subscription_id = s.id AND d.ordering_key = $1 AND d.status IN ('pending', 'failed')
                ORDER BY d.seq LIMIT 1
            ) oldest
            WHERE oldest.carrier IS NOT NULL
            ORDER BY oldest.seq LIMIT 1
            "#,
            key,
        )
        .fetch_optional(self.run(&mut reader))
        .await?;
        Ok(carrier)
    }

    /// How a delivery is woken, and why; `None` when there is no such delivery.
    pub async fn delivery_placement(
        &self,
        event_id: &EventId,
        subscription_id: &SubscriptionId,
    ) -> Result<Option<DeliveryPlacement>, StoreError> {
        let mut reader = self.reader().await?;
        let found = sqlx::query!(
            r#"
            SELECT d.carrier, p.carrier_class AS "class?", p.policy_pattern AS "pattern?",
                   p.policy_revision AS "revision?", p.carrier AS "decided?", p.result::text AS "result?",
                   p.decided_at AS "decided_at?"
            FROM events e
            JOIN deliveries d ON d.subscription_id = $2 AND d.seq = e.seq
            LEFT JOIN delivery_placements p ON p.id = d.placement_id
            WHERE e.id = $1
            "#,
            event_id.as_str(),
            subscription_id.as_str(),
        )
        .fetch_optional(self.run(&mut reader))
        .await?;
        let Some(row) = found else { return Ok(None) };
        let decision = match (row.class, row.decided, row.result, row.decided_at) {
            (Some(class), Some(carrier), Some(result), Some(decided_at)) => Some(StoredPlacement {
                class,
                pattern: row.pattern,
                revision: row.revision.unwrap_or(0),
                carrier,
                result,
                decided_at: Millis(decided_at),
            }),
            _ => None,
        };
        Ok(Some(DeliveryPlacement {
            carrier: row.carrier,
            decision,
        }))
    }
}
