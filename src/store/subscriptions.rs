//! Subscriptions: made, listed, switched and given new secrets by their consumer.
//!
//! Every change takes the counter row (a trigger of the table), so that it is in force for the next publish anywhere.

use crate::domain::ids::SubscriptionId;

use super::{Store, StoreError};

/// A subscription as its consumer sees it.
#[derive(Debug, Clone)]
pub struct Subscription {
    /// Its id.
    pub id: String,
    /// Who receives.
    pub consumer: String,
    /// What it receives.
    pub topic_pattern: String,
    /// Where.
    pub endpoint: String,
    /// Whether anything is queued and sent.
    pub enabled: bool,
    /// Its own retry rule, JSON text.
    pub retry_policy: Option<String>,
    /// How many deliveries it runs at a time, where it says so.
    pub max_inflight: Option<i32>,
    /// When it was made, epoch milliseconds.
    pub created_at: i64,
    /// When it last changed, epoch milliseconds.
    pub updated_at: i64,
}

/// What a new subscription is made of.
#[derive(Debug)]
pub struct NewSubscription<'a> {
    /// Who receives.
    pub consumer: &'a str,
    /// What it receives.
    pub topic_pattern: &'a str,
    /// Where; in normal form.
    pub endpoint: &'a str,
    /// What signs.
    pub secret: &'a str,
    /// Its own retry rule, JSON text.
    pub retry_policy: Option<&'a str>,
    /// How many it may run at a time, 1..=64; `None` follows the configuration.
    pub max_inflight: Option<i32>,
    /// How many subscriptions the consumer may hold.
    pub consumer_max: i64,
}

/// What is to change of a subscription; the outer `None` leaves a member as it is.
#[derive(Debug, Default)]
pub struct SubscriptionChange<'a> {
    /// Its own retry rule, JSON text; the inner `None` follows the configuration.
    pub retry_policy: Option<Option<&'a str>>,
    /// How many it may run at a time, 1..=64; the inner `None` follows the configuration.
    pub max_inflight: Option<Option<i32>>,
}

/// A new secret in force.
#[derive(Debug)]
pub struct Rotation {
    /// The subscription after it.
    pub subscription: Subscription,
    /// Until when the former secret signs as well, epoch milliseconds.
    pub previous_secret_until: i64,
}

impl Store {
    /// Makes a subscription. One for the same pattern and endpoint, or one too many, is refused; both are judged under
    /// the counter row, so also between requests that run at once.
    pub async fn create_subscription(&self, new: &NewSubscription<'_>) -> Result<Subscription, StoreError> {
        let mut transaction = self.begin().await?;
        sqlx::query!("SELECT version FROM store_counter WHERE name = 'events' FOR UPDATE")
            .fetch_one(self.run(&mut transaction))
            .await?;
        let held = sqlx::query!(
            r#"
            SELECT (SELECT id FROM subscriptions
                    WHERE consumer = $1 AND env = 'production' AND topic_pattern = $2 AND endpoint = $3) AS existing,
                   (SELECT count(*) FROM subscriptions WHERE consumer = $1) AS "count!"
            "#,
            new.consumer,
            new.topic_pattern,
            new.endpoint,
        )
        .fetch_one(self.run(&mut transaction))
        .await?;
        if let Some(existing) = held.existing {
            let id = SubscriptionId::parse(&existing).ok_or(StoreError::Corrupt {
                what: "subscription id",
            })?;
            return Err(StoreError::SubscriptionExists(id));
        }
        if held.count >= new.consumer_max {
            return Err(StoreError::SubscriptionLimit(new.consumer_max));
        }
        let id = SubscriptionId::generate();
        let created = sqlx::query_as!(
            Subscription,
            r#"
            INSERT INTO subscriptions (
                id, consumer, topic_pattern, endpoint, secret, retry_policy, max_inflight, created_at, updated_at
            )
            VALUES ($1, $2, $3, $4, $5, $6, $7, now_ms(), now_ms())
            RETURNING id, consumer, topic_pattern, endpoint, enabled = 1 AS "enabled!", retry_policy, max_inflight, created_at,
                      updated_at
            "#,
            id.as_str(),
            new.consumer,
            new.topic_pattern,
            new.endpoint,
            self.sealer.seal(new.secret, id.as_str()),
            new.retry_policy,
            new.max_inflight,
        )
        .fetch_one(self.run(&mut transaction))
        .await?;
        transaction.commit().await?;
        Ok(created)
    }

    /// A consumer's subscriptions, oldest first; a consumer holds a bounded number of them.
    pub async fn subscriptions(&self, consumer: &str) -> Result<Vec<Subscription>, StoreError> {
        let mut reader = self.reader().await?;
        Ok(sqlx::query_as!(
            Subscription,
            r#"
            SELECT id, consumer, topic_pattern, endpoint, enabled = 1 AS "enabled!", retry_policy, max_inflight,
                   created_at, updated_at
            FROM subscriptions
            WHERE consumer = $1
            ORDER BY created_at, id
            "#,
            consumer,
        )
        .fetch_all(self.run(&mut reader))
        .await?)
    }

    /// One of a consumer's subscriptions.
    pub async fn subscription(&self, consumer: &str, id: &SubscriptionId) -> Result<Option<Subscription>, StoreError> {
        let mut reader = self.reader().await?;
        Ok(sqlx::query_as!(
            Subscription,
            r#"
            SELECT id, consumer, topic_pattern, endpoint, enabled = 1 AS "enabled!", retry_policy, max_inflight,
                   created_at, updated_at
            FROM subscriptions
            WHERE id = $1 AND consumer = $2
            "#,
            id.as_str(),
            consumer,
        )
        .fetch_optional(self.run(&mut reader))
        .await?)
    }

    /// Whether anybody has a subscription of this id.
    pub async fn subscription_exists(&self, id: &SubscriptionId) -> Result<bool, StoreError> {
        let mut reader = self.reader().await?;
        Ok(sqlx::query_scalar!(
            r#"SELECT EXISTS (SELECT FROM subscriptions WHERE id = $1 AND project_id IS NULL) AS "exists!""#,
            id.as_str(),
        )
        .fetch_one(self.run(&mut reader))
        .await?)
    }

    /// Switches one of a consumer's subscriptions; repeating it changes nothing.
    pub async fn set_enabled(
        &self,
        consumer: &str,
        id: &SubscriptionId,
        enabled: Switch,
    ) -> Result<Option<Subscription>, StoreError> {
        let mut transaction = self.begin().await?;
        let switched = sqlx::query_as!(
            Subscription,
            r#"
            UPDATE subscriptions
            SET enabled = $3, updated_at = CASE WHEN enabled = $3 THEN updated_at ELSE now_ms() END
            WHERE id = $1 AND consumer = $2
            RETURNING id, consumer, topic_pattern, endpoint, enabled = 1 AS "enabled!", retry_policy, max_inflight, created_at,
                      updated_at
            "#,
            id.as_str(),
            consumer,
            i32::from(enabled == Switch::On),
        )
        .fetch_optional(self.run(&mut transaction))
        .await?;
        transaction.commit().await?;
        Ok(switched)
    }

    /// Changes one of a consumer's subscriptions; what stays the same leaves no trace. The next claim of any process
    /// follows it, since claims read the subscription they have locked; this process's view is brought up to date before
    /// the answer, so that it forgets who was at a former cap.
    pub async fn update_subscription(
        &self,
        consumer: &str,
        id: &SubscriptionId,
        change: &SubscriptionChange<'_>,
    ) -> Result<Option<Subscription>, StoreError> {
        let mut transaction = self.begin().await?;
        let updated = sqlx::query_as!(
            Subscription,
            r#"
            UPDATE subscriptions
            SET retry_policy = CASE WHEN $3 THEN $4 ELSE retry_policy END,
                max_inflight = CASE WHEN $5 THEN $6 ELSE max_inflight END,
                updated_at = CASE WHEN ($3 AND retry_policy IS DISTINCT FROM $4)
                                    OR ($5 AND max_inflight IS DISTINCT FROM $6)
                                  THEN now_ms() ELSE updated_at END
            WHERE id = $1 AND consumer = $2
            RETURNING id, consumer, topic_pattern, endpoint, enabled = 1 AS "enabled!", retry_policy, max_inflight, created_at,
                      updated_at
            "#,
            id.as_str(),
            consumer,
            change.retry_policy.is_some(),
            change.retry_policy.flatten(),
            change.max_inflight.is_some(),
            change.max_inflight.flatten(),
        )
        .fetch_optional(self.run(&mut transaction))
        .await?;
        let version = sqlx::query_scalar!("SELECT version FROM store_counter WHERE name = 'events'")
            .fetch_one(self.run(&mut transaction))
            .await?;
        transaction.commit().await?;
        if let Err(error) = self.refresh_view(version).await {
            // The change stands; the next heartbeat brings the view.
            tracing::warn!(error = %error, "the view could not be read after a change and is read again: {error}");
        }
        Ok(updated)
    }

    /// Puts a new secret in force; the former one signs beside it for `overlap_ms`, one before that no longer does.
    pub async fn rotate_secret(
        &self,
        consumer: &str,
        id: &SubscriptionId,
        secret: &str,
        overlap_ms: i64,
    ) -> Result<Option<Rotation>, StoreError> {
        let mut transaction = self.begin().await?;
        let rotated = sqlx::query!(
            r#"
            UPDATE subscriptions
            SET previous_secret = CASE WHEN $4::bigint > 0 THEN secret END, previous_secret_until = now_ms() + $4,
                secret = $3, updated_at = now_ms()
            WHERE id = $1 AND consumer = $2
            RETURNING id, consumer, topic_pattern, endpoint, enabled = 1 AS "enabled!", retry_policy, max_inflight, created_at,
                      updated_at, previous_secret_until AS "previous_secret_until!"
            "#,
            id.as_str(),
            consumer,
            self.sealer.seal(secret, id.as_str()),
            overlap_ms,
        )
        .fetch_optional(self.run(&mut transaction))
        .await?;
        transaction.commit().await?;
        Ok(rotated.map(|row| Rotation {
            previous_secret_until: row.previous_secret_until,
            subscription: Subscription {
                id: row.id,
                consumer: row.consumer,
                topic_pattern: row.topic_pattern,
                endpoint: row.endpoint,
                enabled: row.enabled,
                retry_policy: row.retry_policy,
                max_inflight: row.max_inflight,
                created_at: row.created_at,
                updated_at: row.updated_at,
            },
        }))
    }
}

/// Whether a subscription runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Switch {
    /// Events are queued and sent.
    On,
    /// Nothing new is queued, and what is queued waits.
    Off,
}
