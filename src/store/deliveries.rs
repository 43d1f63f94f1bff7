//! The operators' list of deliveries.

use super::{Store, StoreError};

/// Which deliveries a list shows.
#[derive(Debug, Clone, Default)]
pub struct DeliveryFilter {
    /// One of the four statuses.
    pub status: Option<String>,
    /// One subscription.
    pub subscription_id: Option<String>,
    /// Rows after this (position, subscription).
    pub after: (i64, String),
    /// Rows wanted.
    pub limit: i64,
}

/// The state of one delivery; never its payload.
#[derive(Debug, Clone)]
pub struct DeliveryRow {
    /// The event.
    pub event_id: String,
    /// Who receives it.
    pub subscription_id: String,
    /// The event's position.
    pub seq: i64,
    /// `pending`, `failed`, `delivered` or `dead`.
    pub status: String,
    /// Attempts made.
    pub attempt: i32,
    /// When it is due, epoch milliseconds.
    pub next_attempt_at: Option<i64>,
    /// The last HTTP status.
    pub last_status: Option<i32>,
    /// The last failure.
    pub last_error: Option<String>,
    /// When it was delivered, epoch milliseconds.
    pub delivered_at: Option<i64>,
}

impl Store {
    /// A page of deliveries by (position, subscription), a total order.
    pub async fn deliveries(&self, filter: &DeliveryFilter) -> Result<Vec<DeliveryRow>, StoreError> {
        let (position, subscription) = (filter.after.0, filter.after.1.as_str());
        let mut reader = self.reader().await?;
        // One statement per index: a single one with optional filters would be planned for none of them.
        let rows = match (filter.subscription_id.as_deref(), filter.status.as_deref()) {
            (Some(only), status) => {
                sqlx::query_as!(
                    DeliveryRow,
                    r#"
                    SELECT event_id, subscription_id, seq, status, attempt, next_attempt_at, last_status, last_error,
                           delivered_at
                    FROM deliveries
                    WHERE subscription_id = $1 AND seq >= $2 AND (seq > $2 OR subscription_id > $3)
                      AND ($4::text IS NULL OR status = $4)
                    ORDER BY seq
                    LIMIT $5
                    "#,
                    only,
                    position,
                    subscription,
                    status,
                    filter.limit,
                )
                .fetch_all(self.run(&mut reader))
                .await?
            }
            (None, Some("dead")) => {
                sqlx::query_as!(
                    DeliveryRow,
                    r#"
                    SELECT event_id, subscription_id, seq, status, attempt, next_attempt_at, last_status, last_error,
                           delivered_at
                    FROM deliveries
                    WHERE status = 'dead' AND (seq, subscription_id) > ($1, $2)
                    ORDER BY seq, subscription_id
                    LIMIT $3
                    "#,
                    position,
                    subscription,
                    filter.limit,
                )
                .fetch_all(self.run(&mut reader))
                .await?
            }
            (None, status) => {
                sqlx::query_as!(
                    DeliveryRow,
                    r#"
                    SELECT event_id, subscription_id, seq, status, attempt, next_attempt_at, last_status, last_error,
                           delivered_at
                    FROM deliveries
                    WHERE (seq, subscription_id) > ($1, $2) AND ($3::text IS NULL OR status = $3)
                    ORDER BY seq, subscription_id
                    LIMIT $4
                    "#,
                    position,
                    subscription,
                    status,
                    filter.limit,
                )
                .fetch_all(self.run(&mut reader))
                .await?
            }
        };
        Ok(rows)
    }
}
