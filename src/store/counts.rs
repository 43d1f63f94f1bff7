//! How many deliveries are in each status, without counting them.
//!
//! Every transaction adds its change to a row of its own process, role and period. A period is short, so that a row
//! does not collect versions while somebody holds a snapshot; ended periods are folded into one row.

use sqlx::PgConnection;

use crate::domain::deliveries::DeliveryCounts;

use super::{Store, StoreError};

/// How long one row collects changes, in milliseconds.
pub(super) const PERIOD_MS: i64 = 10_000;

/// Which part of the process counts: parts that may commit at the same time must not meet on one row.
#[derive(Debug, Clone, Copy)]
pub(super) enum CountRole {
    Publish,
    Settle,
    SettleLater,
    Recover,
    Operate,
    Prune,
}

impl CountRole {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Publish => "publish",
            Self::Settle => "settle",
            Self::SettleLater => "settle-later",
            Self::Recover => "recover",
            Self::Operate => "operate",
            Self::Prune => "prune",
        }
    }
}

impl Store {
    /// The counts as committed so far.
    pub async fn delivery_counts(&self) -> Result<DeliveryCounts, StoreError> {
        let mut reader = self.reader().await?;
        let counts = sqlx::query_as!(
            DeliveryCounts,
            r#"
            SELECT coalesce(sum(pending), 0)::bigint AS "pending!", coalesce(sum(failed), 0)::bigint AS "failed!",
                   coalesce(sum(delivered), 0)::bigint AS "delivered!", coalesce(sum(dead), 0)::bigint AS "dead!"
            FROM delivery_counts
            "#
        )
        .fetch_one(self.run(&mut reader))
        .await?;
        Ok(counts)
    }

    /// Adds a change inside the transaction that makes it.
    pub(super) async fn count(
        &self,
        transaction: &mut PgConnection,
        role: CountRole,
        change: DeliveryCounts,
    ) -> Result<(), StoreError> {
        if change == DeliveryCounts::default() {
            return Ok(());
        }
        sqlx::query!(
            r#"
            INSERT INTO delivery_counts AS c (owner, role, period, pending, failed, delivered, dead)
            VALUES ($1, $2, now_ms() / $3, $4, $5, $6, $7)
            ON CONFLICT (owner, role, period) DO UPDATE
            SET pending = c.pending + excluded.pending, failed = c.failed + excluded.failed,
                delivered = c.delivered + excluded.delivered, dead = c.dead + excluded.dead
            "#,
            self.counts_owner,
            role.name(),
            PERIOD_MS,
            change.pending,
            change.failed,
            change.delivered,
            change.dead,
        )
        .execute(self.run(transaction))
        .await?;
        Ok(())
    }

    /// Folds periods that ended, of any process, into one row. A late writer only makes a new row for its period.
    pub async fn fold_counts(&self) -> Result<(), StoreError> {
        let mut transaction = self.begin_relaxed().await?;
        sqlx::query!(
            r#"
            WITH ended AS (
                DELETE FROM delivery_counts
                WHERE (owner, role, period) IN (
                    SELECT owner, role, period FROM delivery_counts
                    WHERE owner <> '' AND period < now_ms() / $1 - 1
                    ORDER BY owner, role, period
                    LIMIT 1000
                    FOR UPDATE SKIP LOCKED
                )
                RETURNING pending, failed, delivered, dead
            )
            INSERT INTO delivery_counts AS c (owner, role, period, pending, failed, delivered, dead)
            SELECT '', 'folded', 0, sum(pending), sum(failed), sum(delivered), sum(dead) FROM ended HAVING count(*) > 0
            ON CONFLICT (owner, role, period) DO UPDATE
            SET pending = c.pending + excluded.pending, failed = c.failed + excluded.failed,
                delivered = c.delivered + excluded.delivered, dead = c.dead + excluded.dead
            "#,
            PERIOD_MS,
        )
        .execute(self.run(&mut transaction))
        .await?;
        transaction.commit().await?;
        Ok(())
    }
}
