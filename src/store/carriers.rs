//! What is on record of carriers: their use in a period, and what operators switched off.

use std::collections::BTreeSet;

use sqlx::PgConnection;

use crate::domain::time::Millis;

use super::{Store, StoreError};

/// Operations of one provider, in the unit that its rate card prices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Used {
    /// Who is paid.
    pub provider: String,
    /// What is counted.
    pub metric: String,
    /// When the period began in which it counts.
    pub period_start: Millis,
    /// How many.
    pub operations: i64,
}

impl Store {
    /// Adds operations, and answers how many every process together counted in those periods.
    pub async fn add_carrier_usage(&self, used: &[Used]) -> Result<Vec<Used>, StoreError> {
        let providers: Vec<&str> = used.iter().map(|used| used.provider.as_str()).collect();
        let metrics: Vec<&str> = used.iter().map(|used| used.metric.as_str()).collect();
        let starts: Vec<i64> = used.iter().map(|used| used.period_start.0).collect();
        let operations: Vec<i64> = used.iter().map(|used| used.operations).collect();
        let mut transaction = self.begin_relaxed().await?;
        let all = sqlx::query!(
            r#"
            INSERT INTO carrier_usage AS u (provider, metric, period_start, used)
            SELECT provider, metric, period_start, used
            FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[]) AS t(provider, metric, period_start, used)
            -- One order for every process, so that no two wait for each other.
            ORDER BY provider, metric, period_start
            ON CONFLICT (provider, metric, period_start) DO UPDATE SET used = u.used + excluded.used
            RETURNING provider, metric, period_start, used
            "#,
            &providers as &[&str],
            &metrics as &[&str],
            &starts,
            &operations,
        )
        .fetch_all(self.run(&mut transaction))
        .await?;
        transaction.commit().await?;
        let all = all.into_iter().map(|row| Used {
            provider: row.provider,
            metric: row.metric,
            period_start: Millis(row.period_start),
            operations: row.used,
        });
        Ok(all.collect())
    }

    /// Switches a carrier off or on again, for every process.
    pub async fn switch_carrier(&self, carrier: &str, disabled: bool, updated_by: &str) -> Result<(), StoreError> {
        let mut transaction = self.begin().await?;
        sqlx::query!(
            r#"
            INSERT INTO carrier_switches (carrier, disabled, updated_at, updated_by)
            VALUES ($1, $2, now_ms(), $3)
            ON CONFLICT (carrier) DO UPDATE
            SET disabled = excluded.disabled, updated_at = excluded.updated_at, updated_by = excluded.updated_by
            "#,
            carrier,
            disabled,
            updated_by,
        )
        .execute(self.run(&mut transaction))
        .await?;
        transaction.commit().await?;
        Ok(())
    }

    /// The carriers that operators switched off, for a view.
    pub(super) async fn switched_off(&self, connection: &mut PgConnection) -> Result<BTreeSet<String>, StoreError> {
        let carriers = sqlx::query_scalar!("SELECT carrier FROM carrier_switches WHERE disabled")
            .fetch_all(self.run(connection))
            .await?;
        Ok(carriers.into_iter().collect())
    }
}
