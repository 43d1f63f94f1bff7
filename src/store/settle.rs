//! Ending claims: results are recorded by the claim that made them, and the mark of a key moves on.

use std::collections::HashSet;

use sqlx::PgConnection;

use crate::domain::ids::SubscriptionId;

use super::counts::{CountRole, PERIOD_MS};
use super::skip::SKIPPED_ERROR;
use super::{Store, StoreError};

/// Characters of an error that are kept.
const ERROR_CHARS_MAX: usize = 500;

/// How long to wait for rows that others hold where it is worth a moment, not seconds.
pub(super) const BRIEF_LOCK_TIMEOUT: &str = "100ms";

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
    /// No row of the key before this position is unfinished.
    pub(super) from: i64,
}

impl Store {
    /// Records results of claims that `owner` holds, durably. Answers the claims that were lost meanwhile: their
    /// results changed nothing.
    pub async fn settle(&self, owner: &str, settlements: &[Settlement]) -> Result<HashSet<i64>, StoreError> {
        for _ in 0..ROUNDS_MAX {
            if let Some(lost) = self.settle_once(owner, settlements, None).await? {
                return Ok(lost);
            }
        }
        Err(StoreError::marks_keep_moving())
    }

    /// As [`Store::settle`], but waits only a moment for rows that others hold.
    pub async fn settle_briefly(&self, owner: &str, settlements: &[Settlement]) -> Result<HashSet<i64>, StoreError> {
        let settled = self.settle_once(owner, settlements, Some(BRIEF_LOCK_TIMEOUT)).await?;
        settled.ok_or_else(StoreError::marks_keep_moving)
    }

    async fn settle_once(
        &self,
        owner: &str,
        settlements: &[Settlement],
        lock_timeout: Option<&str>,
    ) -> Result<Option<HashSet<i64>>, StoreError> {
        let columns = ResultColumns::of(settlements);
        let mut at_once = self.at_once().await?;
        let lost = sqlx::query_scalar!(
            "SELECT settle_deliveries($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)",
            owner,
            &columns.subscription_id as &[&str],
            &columns.position,
            &columns.claim_id,
            &columns.outcome as &[&str],
            &columns.http_status as &[Option<i32>],
            &columns.error as &[Option<String>],
            &columns.wait_ms,
            SKIPPED_ERROR,
            lock_timeout,
            self.counts_owner,
            CountRole::SettleLater.name(),
            PERIOD_MS,
        )
        .fetch_one(self.run(&mut at_once))
        .await?;
        at_once.end().await?;
        Ok(lost.map(HashSet::from_iter))
    }

    /// Puts the mark of each key on its first unfinished row, inside a transaction that changed some of its rows.
    pub(super) async fn move_heads(&self, transaction: &mut PgConnection, keys: &[Key<'_>]) -> Result<(), StoreError> {
        if keys.is_empty() {
            return Ok(());
        }
        let subscriptions: Vec<&str> = keys.iter().map(|key| key.subscription_id).collect();
        let names: Vec<&str> = keys.iter().map(|key| key.key).collect();
        let positions: Vec<i64> = keys.iter().map(|key| key.position).collect();
        let from: Vec<i64> = keys.iter().map(|key| key.from).collect();
        sqlx::query!(
            r#"SELECT move_heads($1, $2, $3, $4)::text AS "done!""#,
            &subscriptions as &[&str],
            &names as &[&str],
            &positions,
            &from,
        )
        .fetch_one(self.run(transaction))
        .await?;
        Ok(())
    }
}

/// The columns of results, one array each.
#[derive(Default)]
pub(super) struct ResultColumns<'a> {
    pub(super) subscription_id: Vec<&'a str>,
    pub(super) position: Vec<i64>,
    pub(super) claim_id: Vec<i64>,
    pub(super) outcome: Vec<&'static str>,
    pub(super) http_status: Vec<Option<i32>>,
    pub(super) error: Vec<Option<String>>,
    pub(super) wait_ms: Vec<i64>,
}

impl<'a> ResultColumns<'a> {
    pub(super) fn of(settlements: &'a [Settlement]) -> Self {
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
