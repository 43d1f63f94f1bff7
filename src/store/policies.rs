//! Delivery policies, written by operators. A write takes the counter row (a trigger of the table), so that it is in
//! force for the next publish anywhere.

use planner::PolicyKey;
use sqlx::PgConnection;

use crate::domain::policy::{Policies, Policy, Rule};
use crate::domain::time::Millis;
use crate::domain::topic::TopicPattern;

use super::{Store, StoreError};

/// A policy with what is on record of it.
#[derive(Debug, Clone)]
pub struct StoredPolicy {
    /// Which types it is for.
    pub pattern: TopicPattern,
    /// What it says.
    pub policy: Policy,
    /// How often it was written since it was made.
    pub revision: i32,
    /// When it was last written.
    pub updated_at: Millis,
    /// Who wrote it.
    pub updated_by: Option<String>,
}

/// A row as it comes back.
struct PolicyRow {
    pattern: String,
    policy: String,
    revision: i32,
    updated_at: i64,
    updated_by: Option<String>,
}

impl PolicyRow {
    fn read(self) -> Option<StoredPolicy> {
        Some(StoredPolicy {
            pattern: TopicPattern::parse(&self.pattern)?,
            policy: Policy::parse(&self.policy).ok()?,
            revision: self.revision,
            updated_at: Millis(self.updated_at),
            updated_by: self.updated_by,
        })
    }
}

impl Store {
    /// Every policy, by pattern.
    pub async fn policies(&self) -> Result<Vec<StoredPolicy>, StoreError> {
        let mut reader = self.reader().await?;
        self.policies_on(&mut reader).await
    }

    /// Writes a policy: a new one at revision 1, or the next revision of one that exists.
    pub async fn put_policy(
        &self,
        pattern: &TopicPattern,
        policy: &Policy,
        updated_by: &str,
    ) -> Result<StoredPolicy, StoreError> {
        let mut transaction = self.begin().await?;
        let written = sqlx::query_as!(
            PolicyRow,
            r#"
            INSERT INTO delivery_policies AS p (pattern, policy, updated_at, updated_by)
            VALUES ($1, $2::text::jsonb, now_ms(), $3)
            ON CONFLICT (pattern) DO UPDATE
            SET policy = excluded.policy, revision = p.revision + 1, updated_at = excluded.updated_at,
                updated_by = excluded.updated_by
            RETURNING pattern, policy::text AS "policy!", revision, updated_at, updated_by
            "#,
            pattern.as_str(),
            policy.document(),
            updated_by,
        )
        .fetch_one(self.run(&mut transaction))
        .await?;
        transaction.commit().await?;
        written.read().ok_or(StoreError::Corrupt {
            what: "delivery policy",
        })
    }

    /// Removes a policy; `false` when there was none.
    pub async fn delete_policy(&self, pattern: &TopicPattern) -> Result<bool, StoreError> {
        let mut transaction = self.begin().await?;
        let deleted = sqlx::query!("DELETE FROM delivery_policies WHERE pattern = $1", pattern.as_str())
            .execute(self.run(&mut transaction))
            .await?
            .rows_affected();
        transaction.commit().await?;
        Ok(deleted > 0)
    }

    /// The policies for a view. One that cannot be read is left out and named in the log.
    pub(super) async fn policy_rules(&self, connection: &mut PgConnection) -> Result<Policies, StoreError> {
        let rules = self.policies_on(connection).await?.into_iter().map(|stored| Rule {
            key: PolicyKey::new(Some(stored.pattern.as_str()), stored.revision),
            pattern: stored.pattern,
            policy: stored.policy,
        });
        Ok(Policies::new(rules.collect()))
    }

    async fn policies_on(&self, connection: &mut PgConnection) -> Result<Vec<StoredPolicy>, StoreError> {
        let rows = sqlx::query_as!(
            PolicyRow,
            r#"
            SELECT pattern, policy::text AS "policy!", revision, updated_at, updated_by
            FROM delivery_policies ORDER BY pattern
            "#
        )
        .fetch_all(self.run(connection))
        .await?;
        let read = rows.into_iter().filter_map(|row| {
            let pattern = row.pattern.clone();
            let read = row.read();
            if read.is_none() {
                tracing::warn!(%pattern, "the stored delivery policy of {pattern} cannot be read and is left out");
            }
            read
        });
        Ok(read.collect())
    }
}
