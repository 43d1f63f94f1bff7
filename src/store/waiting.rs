//! How long deliveries have waited, for whoever watches the service.

use crate::domain::deliveries::Waiting;

use super::{Store, StoreError};

/// Failed deliveries that are looked at for the oldest one, at most.
const FAILED_MAX: i64 = 10_000;

impl Store {
    /// How long the deliveries that wait longest have waited, over every process. One look in an index for each
    /// subscription and priority, and at the oldest that have failed.
    pub async fn waiting(&self) -> Result<Waiting, StoreError> {
        let mut reader = self.reader().await?;
        let found = sqlx::query!(
            r#"
            WITH failed AS MATERIALIZED (
                SELECT d.subscription_id, d.head, d.created_at FROM deliveries d
                WHERE d.status = 'failed'
                ORDER BY d.seq, d.subscription_id LIMIT $1
            )
            SELECT (
                SELECT min(first.due)
                FROM subscriptions s
                CROSS JOIN (VALUES (0), (1), (2)) AS p(priority)
                CROSS JOIN LATERAL (
                    SELECT d.next_attempt_at AS due FROM deliveries d
                    WHERE d.subscription_id = s.id AND d.priority = p.priority AND d.next_attempt_at <= now_ms()
                      AND d.head AND d.lease_until IS NULL AND d.status IN ('pending', 'failed')
                    ORDER BY d.next_attempt_at LIMIT 1
                ) first
                WHERE s.enabled = 1
            ) AS oldest_due, (
                SELECT min(f.created_at) FROM failed f
                JOIN subscriptions s ON s.id = f.subscription_id AND s.enabled = 1
                WHERE f.head
            ) AS oldest_head, (SELECT count(*) FROM failed) AS "failed!", now_ms() AS "now_ms!"
            "#,
            FAILED_MAX,
        )
        .fetch_one(self.run(&mut reader))
        .await?;
        let age_ms = |since: i64| (found.now_ms - since).max(0);
        Ok(Waiting {
            oldest_due_ms: found.oldest_due.map_or(0, age_ms),
            oldest_head_ms: match found.oldest_head {
                Some(since) => Some(age_ms(since)),
                None => (found.failed < FAILED_MAX).then_some(0),
            },
        })
    }
}
