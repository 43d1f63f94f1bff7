//! Keeps results that the dispatcher could not record, and tries again: their receivers already have the events.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use crate::backoff::Backoff;
use crate::store::{Outcome, Settlement, SharedStore, StoreError, answered};
use crate::telemetry::{self, AttemptOutcome, PriorityLabel};

use super::shares::Slot;
use super::unheard::Known;
use super::wake::{Recorded, Wake};

/// Results recorded in one transaction.
const BATCH_MAX: usize = 256;
/// How often results whose rows are held are tried again.
const ASIDE_INTERVAL: Duration = Duration::from_millis(250);
const BACKOFF_FIRST: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_millis(500);

/// A result that waits to be recorded.
pub(super) struct Finished {
    /// Who holds the claim.
    pub(super) owner: Arc<str>,
    /// What its owner knows of; the claim is part of it until it has ended.
    pub(super) known: Arc<Known>,
    /// What to record.
    pub(super) settlement: Settlement,
    /// From the receipt of the event to the end of the attempt.
    pub(super) latency: Duration,
    /// 0 critical, 1 important, 2 low.
    pub(super) priority: i32,
    /// When the lease has ended for certain; recording is pointless after it.
    pub(super) lease_ends_at: Instant,
    /// Given back once the result is recorded or given up.
    pub(super) slot: Slot,
}

/// Records until every sender of `results` is gone and nothing is kept.
pub(super) async fn run(store: SharedStore, mut results: mpsc::Receiver<Finished>, wake: Wake) {
    let mut batch: Vec<Finished> = Vec::new();
    // Results whose rows somebody holds; they are tried alone, so that they hold up no others.
    let mut aside: Vec<Finished> = Vec::new();
    let mut backoff = Backoff::new(BACKOFF_FIRST, BACKOFF_MAX);
    loop {
        if batch.is_empty() && aside.is_empty() {
            if results.recv_many(&mut batch, BATCH_MAX).await == 0 {
                return;
            }
        } else if batch.is_empty() {
            let _ = timeout(ASIDE_INTERVAL, results.recv_many(&mut batch, BATCH_MAX)).await;
        }
        while batch.len() < BATCH_MAX {
            match results.try_recv() {
                Ok(finished) => batch.push(finished),
                Err(_empty) => break,
            }
        }
        let held = record_alone(&store, std::mem::take(&mut aside), &wake).await;
        aside.extend(held);
        if !batch.is_empty() {
            // One owner a transaction; there are two only after a life has ended.
            let owner = Arc::clone(&batch[0].owner);
            let (of_owner, others): (Vec<_>, Vec<_>) = batch.drain(..).partition(|finished| finished.owner == owner);
            batch = others;
            match record(&store, of_owner, &wake).await {
                Ok(held) => {
                    aside.extend(held);
                    backoff.succeeded();
                }
                Err((error, of_owner)) => {
                    tracing::warn!(
                        error = %error, results = of_owner.len(), "{} results cannot be recorded yet: {error}",
                        of_owner.len()
                    );
                    batch.extend(of_owner);
                    tokio::time::sleep(backoff.failed()).await;
                }
            }
        }
        give_up_late(&mut batch);
        give_up_late(&mut aside);
    }
}

/// Records the results of one owner together, and answers those whose rows are held by somebody. The error gives all of
/// them back: each is worth another try.
async fn record(
    store: &SharedStore,
    finished: Vec<Finished>,
    wake: &Wake,
) -> Result<Vec<Finished>, (StoreError, Vec<Finished>)> {
    let owner = Arc::clone(&finished[0].owner);
    let settlements: Vec<Settlement> = finished.iter().map(|finished| finished.settlement.clone()).collect();
    match answered(store.settle(&owner, &settlements)).await {
        Ok(lost) => {
            wake.recorded(recorded(finished, &lost));
            Ok(Vec::new())
        }
        Err(error @ StoreError::Unavailable(_)) if !error.is_lock_wait() => Err((error, finished)),
        Err(error) => {
            tracing::warn!(error = %error, cause = ?error, "a batch of results is recorded one by one: {error}");
            Ok(record_alone(store, finished, wake).await)
        }
    }
}

/// Records results one by one, and answers those that are worth another try. One refused result holds no other back.
async fn record_alone(store: &SharedStore, finished: Vec<Finished>, wake: &Wake) -> Vec<Finished> {
    let mut held = Vec::new();
    for one in finished {
        let settlement = std::slice::from_ref(&one.settlement);
        match answered(store.settle_briefly(&one.owner, settlement)).await {
            Ok(lost) => wake.recorded(recorded([one], &lost)),
            Err(StoreError::Unavailable(_)) => held.push(one),
            Err(error) => tracing::error!(
                error = %error, subscription_id = %one.settlement.subscription_id, position = one.settlement.position,
                "a result was refused and its delivery runs again when its lease ends: {error}"
            ),
        }
    }
    held
}

/// Counts recorded results and gives their slots back; answers what the dispatcher cares for.
pub(super) fn recorded(results: impl IntoIterator<Item = Finished>, lost: &HashSet<i64>) -> Vec<Recorded> {
    let now = Instant::now();
    let mut open = Vec::new();
    for finished in results {
        let Finished {
            known,
            settlement,
            latency,
            priority,
            slot,
            ..
        } = finished;
        known.ended(settlement.claim_id);
        let mut due_at = None;
        if lost.contains(&settlement.claim_id) {
            telemetry::late_result();
            tracing::warn!(
                subscription_id = %settlement.subscription_id, position = settlement.position,
                "a late result of {} changed nothing: its claim had moved on", settlement.subscription_id
            );
        } else {
            match &settlement.outcome {
                Outcome::Delivered { .. } => {
                    telemetry::delivery_attempt(AttemptOutcome::Delivered);
                    telemetry::delivery_latency(label(priority), latency);
                }
                Outcome::Retry { wait_ms, .. } => {
                    telemetry::delivery_attempt(AttemptOutcome::Retry);
                    due_at = u64::try_from(*wait_ms)
                        .ok()
                        .map(|wait_ms| now + Duration::from_millis(wait_ms));
                }
                Outcome::Held { wait_ms, .. } => {
                    due_at = u64::try_from(*wait_ms)
                        .ok()
                        .map(|wait_ms| now + Duration::from_millis(wait_ms));
                }
                Outcome::Dead { .. } | Outcome::GivenUp { .. } => telemetry::delivery_attempt(AttemptOutcome::Dead),
                Outcome::Unsent => {}
            }
        }
        drop(slot);
        open.push(Recorded {
            subscription_id: settlement.subscription_id,
            due_at,
        });
    }
    open
}

/// Drops results whose leases have ended: the deliveries run again.
fn give_up_late(batch: &mut Vec<Finished>) {
    let now = Instant::now();
    batch.retain(|finished| {
        let keep = finished.lease_ends_at > now;
        if !keep {
            tracing::error!(
                subscription_id = %finished.settlement.subscription_id, position = finished.settlement.position,
                "a result could not be recorded while its lease held; its delivery runs again"
            );
        }
        keep
    });
}

fn label(priority: i32) -> PriorityLabel {
    match priority {
        0 => PriorityLabel::Critical,
        1 => PriorityLabel::Important,
        _ => PriorityLabel::Low,
    }
}
