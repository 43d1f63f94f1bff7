//! Subscriptions: made, listed, switched and given new secrets by their consumer.
//!
//! Every change takes the counter row (a trigger of the table), so that it is in force for the next publish anywhere.

use sqlx::PgConnection;

use crate::domain::app::{Holder, QuotaFault};
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
    /// Whose events an app receives; `None` for a service.
    pub project_id: Option<String>,
    /// The environment of those.
    pub env: String,
}

/// What a new subscription is made of.
#[derive(Debug)]
pub struct NewSubscription<'a> {
    /// Who receives.
    pub holder: Holder<'a>,
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
    /// How many the project may hold in this environment; `None` for no limit.
    pub project_max: Option<i64>,
    /// When the token of an app was issued, in seconds since 1970: a grant that was withdrawn since makes nothing.
    pub issued_at_s: i64,
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
        let holder = new.holder;
        self.refuse_withdrawn(&mut transaction, &holder, new.issued_at_s)
            .await?;
        let held = sqlx::query!(
            r#"
            SELECT (SELECT id FROM subscriptions
                    WHERE consumer = $1 AND env = $4 AND topic_pattern = $2 AND endpoint = $3
                      AND project_id IS NOT DISTINCT FROM $5) AS existing,
                   (SELECT count(*) FROM subscriptions WHERE consumer = $1) AS "count!",
                   CASE WHEN $6::bigint IS NOT NULL THEN (
                       SELECT count(*) FROM subscriptions WHERE project_id = $5 AND env = $4
                   ) END AS of_project
            "#,
            holder.consumer,
            new.topic_pattern,
            new.endpoint,
            holder.env(),
            holder.project_id(),
            new.project_max,
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
        if let (Some(limit), Some(of_project)) = (new.project_max, held.of_project)
            && of_project >= limit
        {
            return Err(StoreError::Quota(QuotaFault::Subscriptions { limit }));
        }
        let id = SubscriptionId::generate();
        let created = sqlx::query_as!(
            Subscription,
            r#"
            INSERT INTO subscriptions (
                id, consumer, topic_pattern, endpoint, secret, retry_policy, max_inflight, created_at, updated_at, project_id,
                env
            )
            VALUES ($1, $2, $3, $4, $5, $6, $7, now_ms(), now_ms(), $8, $9)
            RETURNING id, consumer, topic_pattern, endpoint, enabled = 1 AS "enabled!", retry_policy, max_inflight, created_at,
                      updated_at, project_id, env
            "#,
            id.as_str(),
            holder.consumer,
            new.topic_pattern,
            new.endpoint,
            self.sealer.seal(new.secret, id.as_str()),
            new.retry_policy,
            new.max_inflight,
            holder.project_id(),
            holder.env(),
        )
        .fetch_one(self.run(&mut transaction))
        .await?;
        transaction.commit().await?;
        Ok(created)
    }

    /// Refuses an app from which something was withdrawn that it needs to make a subscription run. The caller holds the counter
    /// row, so whatever another process stored is seen.
    async fn refuse_withdrawn(
        &self,
        connection: &mut PgConnection,
        holder: &Holder<'_>,
        issued_at_s: i64,
    ) -> Result<(), StoreError> {
        if holder.project.is_none() {
            return Ok(());
        }
        let withdrawn = self.withdrawn_on(connection, holder.consumer).await?;
        if withdrawn.ends_token(issued_at_s) {
            return Err(StoreError::AppRevoked);
        }
        match withdrawn.ends_subscribing(issued_at_s) {
            true => Err(StoreError::SubscribingWithdrawn),
            false => Ok(()),
        }
    }

    /// A consumer's subscriptions, oldest first; a consumer holds a bounded number of them.
    pub async fn subscriptions(&self, holder: &Holder<'_>) -> Result<Vec<Subscription>, StoreError> {
        let mut reader = self.reader().await?;
        Ok(sqlx::query_as!(
            Subscription,
            r#"
            SELECT id, consumer, topic_pattern, endpoint, enabled = 1 AS "enabled!", retry_policy, max_inflight,
                   created_at, updated_at, project_id, env
            FROM subscriptions
            WHERE consumer = $1 AND env = $2 AND project_id IS NOT DISTINCT FROM $3
            ORDER BY created_at, id
            "#,
            holder.consumer,
            holder.env(),
            holder.project_id(),
        )
        .fetch_all(self.run(&mut reader))
        .await?)
    }

    /// One of a consumer's subscriptions.
    pub async fn subscription(
        &self,
        holder: &Holder<'_>,
        id: &SubscriptionId,
    ) -> Result<Option<Subscription>, StoreError> {
        let mut reader = self.reader().await?;
        Ok(sqlx::query_as!(
            Subscription,
            r#"
            SELECT id, consumer, topic_pattern, endpoint, enabled = 1 AS "enabled!", retry_policy, max_inflight,
                   created_at, updated_at, project_id, env
            FROM subscriptions
            WHERE id = $1 AND consumer = $2 AND env = $3 AND project_id IS NOT DISTINCT FROM $4
            "#,
            id.as_str(),
            holder.consumer,
            holder.env(),
            holder.project_id(),
        )
        .fetch_optional(self.run(&mut reader))
        .await?)
    }

    /// Whether anybody has a subscription of this id.
    pub async fn subscription_exists(&self, id: &SubscriptionId) -> Result<bool, StoreError> {
        let mut reader = self.reader().await?;
        Ok(sqlx::query_scalar!(
            r#"SELECT EXISTS (SELECT FROM subscriptions WHERE id = $1) AS "exists!""#,
            id.as_str(),
        )
        .fetch_one(self.run(&mut reader))
        .await?)
    }

    /// Switches one of a consumer's subscriptions; repeating it changes nothing. `issued_at_s` is when the token of an app was
    /// issued: one whose grant was withdrawn since cannot resume anything.
    pub async fn set_enabled(
        &self,
        holder: &Holder<'_>,
        id: &SubscriptionId,
        enabled: Switch,
        issued_at_s: i64,
    ) -> Result<Option<Subscription>, StoreError> {
        let mut transaction = self.begin().await?;
        if enabled == Switch::On && holder.project.is_some() {
            // In a statement of its own: what follows must see what was withdrawn while this waited.
            sqlx::query!("SELECT version FROM store_counter WHERE name = 'events' FOR UPDATE")
                .fetch_one(self.run(&mut transaction))
                .await?;
            self.refuse_withdrawn(&mut transaction, holder, issued_at_s).await?;
        }
        let switched = sqlx::query_as!(
            Subscription,
            r#"
            UPDATE subscriptions
            SET enabled = $3, updated_at = CASE WHEN enabled = $3 THEN updated_at ELSE now_ms() END
            WHERE id = $1 AND consumer = $2 AND env = $4 AND project_id IS NOT DISTINCT FROM $5
            RETURNING id, consumer, topic_pattern, endpoint, enabled = 1 AS "enabled!", retry_policy, max_inflight, created_at,
                      updated_at, project_id, env
            "#,
            id.as_str(),
            holder.consumer,
            i32::from(enabled == Switch::On),
            holder.env(),
            holder.project_id(),
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
        holder: &Holder<'_>,
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
            WHERE id = $1 AND consumer = $2 AND env = $7 AND project_id IS NOT DISTINCT FROM $8
            RETURNING id, consumer, topic_pattern, endpoint, enabled = 1 AS "enabled!", retry_policy, max_inflight, created_at,
                      updated_at, project_id, env
            "#,
            id.as_str(),
            holder.consumer,
            change.retry_policy.is_some(),
            change.retry_policy.flatten(),
            change.max_inflight.is_some(),
            change.max_inflight.flatten(),
            holder.env(),
            holder.project_id(),
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
        holder: &Holder<'_>,
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
            WHERE id = $1 AND consumer = $2 AND env = $5 AND project_id IS NOT DISTINCT FROM $6
            RETURNING id, consumer, topic_pattern, endpoint, enabled = 1 AS "enabled!", retry_policy, max_inflight, created_at,
                      updated_at, project_id, env, previous_secret_until AS "previous_secret_until!"
            "#,
            id.as_str(),
            holder.consumer,
            self.sealer.seal(secret, id.as_str()),
            overlap_ms,
            holder.env(),
            holder.project_id(),
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
                project_id: row.project_id,
                env: row.env,
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
