//! The operators' list of deliveries.

use super::{Store, StoreError};

/// Rows that a page looks at, at most, when few of them are asked for.
const LOOKED_AT_MAX: i64 = 5_000;

/// Which deliveries a list shows.
#[derive(Debug, Clone, Default)]
pub struct DeliveryFilter {
    /// One of the four statuses.
    pub status: Option<String>,
    /// One subscription.
    pub subscription_id: Option<String>,
    /// Rows after this (position, subscription).
    pub after: (i64, String),
    /// Rows wanted at most.
    pub limit: usize,
}

/// A page of a list.
#[derive(Debug, Clone, Default)]
pub struct DeliveryPage {
    /// What was found.
    pub rows: Vec<DeliveryRow>,
    /// The `after` of the next page, where there may be more. A page with fewer rows than wanted, or none, may have it:
    /// so far it has looked.
    pub next: Option<(i64, String)>,
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
    /// A page of deliveries by (position, subscription), a total order. What it costs has a bound, whatever is stored.
    pub async fn deliveries(&self, filter: &DeliveryFilter) -> Result<DeliveryPage, StoreError> {
        let mut reader = self.reader().await?;
        let rows = sqlx::query!(
            r#"
            SELECT event_id AS "event_id!", subscription_id AS "subscription_id!", seq AS "seq!", status AS "status!",
                   attempt AS "attempt!", next_attempt_at, last_status, last_error, delivered_at, wanted AS "wanted!"
            FROM list_deliveries($1, $2, $3, $4, $5, $6)
            "#,
            filter.status,
            filter.subscription_id,
            filter.after.0,
            filter.after.1,
            // One more tells whether the page is the last.
            i64::try_from(filter.limit).unwrap_or(i64::MAX).saturating_add(1),
            LOOKED_AT_MAX,
        )
        .fetch_all(self.run(&mut reader))
        .await?;
        let mut page = DeliveryPage::default();
        for row in rows {
            if !row.wanted {
                page.next = Some((row.seq, row.subscription_id));
            } else if page.rows.len() == filter.limit {
                page.next = page.rows.last().map(|last| (last.seq, last.subscription_id.clone()));
            } else {
                page.rows.push(DeliveryRow {
                    event_id: row.event_id,
                    subscription_id: row.subscription_id,
                    seq: row.seq,
                    status: row.status,
                    attempt: row.attempt,
                    next_attempt_at: row.next_attempt_at,
                    last_status: row.last_status,
                    last_error: row.last_error,
                    delivered_at: row.delivered_at,
                });
            }
        }
        Ok(page)
    }
}
