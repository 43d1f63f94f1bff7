//! Ending claims: results are recorded by the claim that made them, and the mark of a key moves on.

use std::collections::HashSet;

use sqlx::{PgConnection, Postgres, Transaction};

use crate::domain::ids::SubscriptionId;

use super::counts::CountRole;
use super::skip::SKIPPED_ERROR;
use super::{DeliveryCounts, Store, StoreError};

/// Characters of an error that are kept.
const ERROR_CHARS_MAX: usize = 500;

/// How often a change begins anew because the marks of its keys moved while it waited for them.
pub(super) const ROUNDS_MAX: u32 = 50;

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Answered with this 2xx.
    Delivered {
        /// The HTTP status.
        status: u16,
    },
    /// Failed; tried again after the wait.
    Retry {
        /// The HTTP status, where there was an answer.
        status: Option<u16>,
        /// What went wrong.
        error: String,
        /// The wait from now, milliseconds.
        wait_ms: i64,
    },
    /// Failed for good.
    Dead {
        /// The HTTP status, where there was an answer.
        status: Option<u16>,
        /// What went wrong.
        error: String,
    },
    /// Given up without another attempt.
    GivenUp {
        /// Why.
        error: String,
    },
    /// Says nothing of the receiver: due again after the wait, and not counted as an attempt.
    Held {
        /// What stands in its way.
        error: String,
        /// The wait from now, milliseconds.
        wait_ms: i64,
    },
    /// Never left the process: due again at once, and not counted as an attempt.
    Unsent,
}

/// The end of one claim.
#[derive(Debug, Clone)]
pub struct Settlement {
    /// Who was to receive.
    pub subscription_id: SubscriptionId,
    /// The event's position.
    pub position: i64,
    /// The claim that this ends.
    pub claim_id: i64,
    /// How.
    pub outcome: Outcome,
}

/// A row of an ordering key whose state changed.
pub(super) struct Key<'a> {
    pub(super) subscription_id: &'a str,
    pub(super) key: &'a str,
    pub(super) position: i64,
}

impl Store {
    /// Records results of claims that `owner` holds, durably. Answers the claims that were lost meanwhile: their
    /// results changed nothing.
    ///
    /// The rows, and the ones that may carry the marks of their keys next, are locked in position order, the order in
    /// which a publish locks the rows it extends; marks move in a later statement, which sees what such a publish added.
    pub async fn settle(&self, owner: &str, settlements: &[Settlement]) -> Result<HashSet<i64>, StoreError> {
        for _ in 0..ROUNDS_MAX {
            let transaction = self.begin().await?;
            if let Some(lost) = self.settle_in(transaction, owner, settlements).await? {
                return Ok(lost);
            }
        }
        Err(StoreError::marks_keep_moving())
    }

    /// As [`Store::settle`], but waits only a moment for rows that others hold.
    pub async fn settle_briefly(&self, owner: &str, settlements: &[Settlement]) -> Result<HashSet<i64>, StoreError> {
        let transaction = self.begin_brief().await?;
        let settled = self.settle_in(transaction, owner, settlements).await?;
        settled.ok_or_else(StoreError::marks_keep_moving)
    }

    async fn settle_in(
        &self,
        mut transaction: Transaction<'static, Postgres>,
        owner: &str,
        settlements: &[Settlement],
    ) -> Result<Option<HashSet<i64>>, StoreError> {
        let subscriptions: Vec<&str> = settlements.iter().map(|s| s.subscription_id.as_str()).collect();
        let positions: Vec<i64> = settlements.iter().map(|s| s.position).collect();
        let claims: Vec<i64> = settlements.iter().map(|s| s.claim_id).collect();
        let locked = sqlx::query!(
            r#"
            WITH mine AS (
                SELECT d.subscription_id, d.seq, d.ordering_key
                FROM unnest($1::text[], $2::bigint[], $3::bigint[]) AS s(subscription_id, seq, claim_id)
                JOIN deliveries d ON d.subscription_id = s.subscription_id AND d.seq = s.seq
                WHERE d.claim_id = s.claim_id AND d.lease_owner = $4
            ), wanted AS (
                SELECT subscription_id, seq FROM mine
                UNION
                SELECT m.subscription_id, next.seq FROM mine m
                CROSS JOIN LATERAL (
                    SELECT n.seq FROM deliveries n
                    WHERE n.subscription_id = m.subscription_id AND n.ordering_key = m.ordering_key
                      AND n.status IN ('pending', 'failed') AND n.seq <> m.seq
                    ORDER BY n.seq LIMIT 1
                ) next
                WHERE m.ordering_key IS NOT NULL
            )
            SELECT d.subscription_id AS "subscription_id!", d.seq AS "seq!", d.claim_id, d.ordering_key,
                   d.status AS "status!", d.generation = d.claimed_generation AS current
            FROM deliveries d
            JOIN wanted w ON w.subscription_id = d.subscription_id AND w.seq = d.seq
            ORDER BY d.seq, d.subscription_id
            FOR UPDATE OF d
            "#,
            &subscriptions as &[&str],
            &positions,
            &claims,
            owner,
        )
        .fetch_all(self.run(&mut transaction))
        .await?;

        if locked.iter().any(|row| row.ordering_key.is_some()) {
            // A replay may have put other rows in front while this waited. To lock those now would break the order, and
            // two that wait for each other would follow: everything is let go and taken anew.
            let next = sqlx::query!(
                r#"
                SELECT m.subscription_id AS "subscription_id!", next.seq AS "seq!"
                FROM unnest($1::text[], $2::bigint[]) AS s(subscription_id, seq)
                JOIN deliveries m ON m.subscription_id = s.subscription_id AND m.seq = s.seq
                CROSS JOIN LATERAL (
                    SELECT n.seq FROM deliveries n
                    WHERE n.subscription_id = m.subscription_id AND n.ordering_key = m.ordering_key
                      AND n.status IN ('pending', 'failed') AND n.seq <> m.seq
                    ORDER BY n.seq LIMIT 1
                ) next
                WHERE m.ordering_key IS NOT NULL
                "#,
                &subscriptions as &[&str],
                &positions,
            )
            .fetch_all(self.run(&mut transaction))
            .await?;
            let rows: HashSet<(&str, i64)> = locked
                .iter()
                .map(|row| (row.subscription_id.as_str(), row.seq))
                .collect();
            if next
                .iter()
                .any(|row| !rows.contains(&(row.subscription_id.as_str(), row.seq)))
            {
                return Ok(None);
            }
        }

        let held: HashSet<i64> = locked.iter().filter_map(|row| row.claim_id).collect();
        let (settled, lost): (Vec<&Settlement>, Vec<&Settlement>) = settlements
            .iter()
            .partition(|settlement| held.contains(&settlement.claim_id));
        let columns = ResultColumns::of(&settled);
        let recorded = sqlx::query!(
            r#"
            UPDATE deliveries d
            SET status = CASE WHEN d.generation <> d.claimed_generation THEN 'pending'
                              WHEN r.outcome = 'unsent' THEN d.status
                              WHEN r.outcome = 'given_up' OR r.outcome IN ('failed', 'held') AND d.skipped THEN 'dead'
                              WHEN r.outcome = 'held' THEN 'failed'
                              ELSE r.outcome END,
                attempt = CASE WHEN d.generation <> d.claimed_generation THEN 0
                               WHEN r.outcome IN ('unsent', 'given_up', 'held') THEN d.attempt
                               ELSE d.attempt + 1 END,
                next_attempt_at = CASE WHEN d.generation <> d.claimed_generation OR r.outcome = 'unsent'
                                         OR r.outcome IN ('failed', 'held') AND NOT d.skipped
                                       THEN now_ms() + CASE WHEN d.generation = d.claimed_generation
                                                            THEN r.wait_ms ELSE 0 END END,
                last_status = CASE WHEN d.generation <> d.claimed_generation THEN NULL
                                   WHEN r.outcome IN ('unsent', 'held') THEN d.last_status ELSE r.http_status END,
                last_error = CASE WHEN d.generation <> d.claimed_generation THEN NULL
                                  WHEN r.outcome = 'unsent' THEN d.last_error
                                  WHEN r.outcome IN ('failed', 'held') AND d.skipped
                                  THEN left(concat_ws('; before that: ', $9::text, r.error), 500)
                                  ELSE r.error END,
                delivered_at = CASE WHEN d.generation = d.claimed_generation AND r.outcome = 'delivered'
                                    THEN now_ms() END,
                lease_owner = NULL, lease_until = NULL, claim_id = NULL, updated_at = now_ms()
            FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::text[], $5::integer[], $6::text[], $7::bigint[])
                AS r(subscription_id, seq, claim_id, outcome, http_status, error, wait_ms)
            WHERE d.subscription_id = r.subscription_id AND d.seq = r.seq AND d.claim_id = r.claim_id
              AND d.lease_owner = $8
            RETURNING d.subscription_id, d.seq, d.ordering_key, d.status
            "#,
            &columns.subscription_id as &[&str],
            &columns.position,
            &columns.claim_id,
            &columns.outcome as &[&str],
            &columns.http_status as &[Option<i32>],
            &columns.error as &[Option<String>],
            &columns.wait_ms,
            owner,
            SKIPPED_ERROR,
        )
        .fetch_all(self.run(&mut transaction))
        .await?;

        let mut change = DeliveryCounts::default();
        for row in &recorded {
            let former = locked
                .iter()
                .find(|l| l.seq == row.seq && l.subscription_id == row.subscription_id);
            change.add(former.map_or("", |former| &former.status), -1);
            change.add(&row.status, 1);
        }
        let keys: Vec<Key<'_>> = recorded
            .iter()
            .filter_map(|row| {
                let key = row.ordering_key.as_deref()?;
                Some(Key {
                    subscription_id: &row.subscription_id,
                    key,
                    position: row.seq,
                })
            })
            .collect();
        self.move_heads(&mut transaction, &keys).await?;
        self.count(&mut transaction, CountRole::Settle, change).await?;
        transaction.commit().await?;
        Ok(Some(lost.into_iter().map(|settlement| settlement.claim_id).collect()))
    }

    /// Puts the mark of each key on its first unfinished row. A row that was waiting behind becomes due now at the
    /// earliest, so that claims which no longer look at old due times find it.
    pub(super) async fn move_heads(&self, transaction: &mut PgConnection, keys: &[Key<'_>]) -> Result<(), StoreError> {
        if keys.is_empty() {
            return Ok(());
        }
        let subscriptions: Vec<&str> = keys.iter().map(|key| key.subscription_id).collect();
        let names: Vec<&str> = keys.iter().map(|key| key.key).collect();
        let positions: Vec<i64> = keys.iter().map(|key| key.position).collect();
        sqlx::query!(
            r#"
            WITH firsts AS MATERIALIZED (
                SELECT k.subscription_id, k.position, first.seq
                FROM unnest($1::text[], $2::text[], $3::bigint[]) AS k(subscription_id, ordering_key, position)
                CROSS JOIN LATERAL (
                    SELECT f.seq FROM deliveries f
                    WHERE f.subscription_id = k.subscription_id AND f.ordering_key = k.ordering_key
                      AND f.status IN ('pending', 'failed')
                    ORDER BY f.seq LIMIT 1
                ) first
            ), marked AS (
                UPDATE deliveries d SET head = true, next_attempt_at = greatest(d.next_attempt_at, now_ms())
                FROM (SELECT DISTINCT subscription_id, seq FROM firsts) f
                WHERE d.subscription_id = f.subscription_id AND d.seq = f.seq AND NOT d.head
            )
            UPDATE deliveries d SET head = false
            FROM firsts f
            WHERE d.subscription_id = f.subscription_id AND d.seq = f.position AND f.position > f.seq
              AND d.head AND d.status IN ('pending', 'failed')
            "#,
            &subscriptions as &[&str],
            &names as &[&str],
            &positions,
        )
        .execute(self.run(transaction))
        .await?;
        Ok(())
    }
}

/// The columns of results, one array each.
#[derive(Default)]
struct ResultColumns<'a> {
    subscription_id: Vec<&'a str>,
    position: Vec<i64>,
    claim_id: Vec<i64>,
    outcome: Vec<&'static str>,
    http_status: Vec<Option<i32>>,
    error: Vec<Option<String>>,
    wait_ms: Vec<i64>,
}

impl<'a> ResultColumns<'a> {
    fn of(settlements: &[&'a Settlement]) -> Self {
        let mut columns = Self::default();
        for settlement in settlements {
            columns.subscription_id.push(settlement.subscription_id.as_str());
            columns.position.push(settlement.position);
            columns.claim_id.push(settlement.claim_id);
            let (outcome, status, error, wait_ms) = match &settlement.outcome {
                Outcome::Delivered { status } => ("delivered", Some(*status), None, 0),
                Outcome::Retry { status, error, wait_ms } => ("failed", *status, Some(error), *wait_ms),
                Outcome::Dead { status, error } => ("dead", *status, Some(error), 0),
                Outcome::GivenUp { error } => ("given_up", None, Some(error), 0),
                Outcome::Held { error, wait_ms } => ("held", None, Some(error), *wait_ms),
                Outcome::Unsent => ("unsent", None, None, 0),
            };
            columns.outcome.push(outcome);
            columns.http_status.push(status.map(i32::from));
            // Text columns cannot hold NUL, and an error may quote what a receiver answered.
            columns
                .error
                .push(error.map(|text| text.chars().filter(|c| *c != '\0').take(ERROR_CHARS_MAX).collect()));
            columns.wait_ms.push(wait_ms);
        }
        columns
    }
}
