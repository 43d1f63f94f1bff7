//! What runs beside the service, in every process and without any hurry: secrets at rest, decisions and events that
//! are old, and indexes that are built after the start.

use std::sync::Arc;
use std::time::Duration;

use planner::Intent;

use crate::config::Retention;
use crate::http::health::Readiness;
use crate::store::{self, Aged, IndexBuilds, LATER_INDEXES, SharedStore, StoreError};

/// Between two batches of the same work.
const BATCH_PAUSE: Duration = Duration::from_millis(100);
/// Between two batches of a prune: long enough for others to come between.
const PRUNE_PAUSE: Duration = Duration::from_millis(2);
/// How soon a batch is tried again when the database failed.
const BATCH_RETRY: Duration = Duration::from_secs(5);
/// How often secrets are looked through that another process may have stored otherwise.
const RESEAL_INTERVAL: Duration = Duration::from_secs(600);
/// How often former secrets are looked for that no longer sign.
const ERASE_INTERVAL: Duration = Duration::from_secs(10);
/// How often used tickets are looked for that have ended.
const TICKETS_INTERVAL: Duration = Duration::from_secs(60);
/// Between two looks whether the process is ready.
const READY_INTERVAL: Duration = Duration::from_secs(1);

/// Seals with the newest key what is stored otherwise, a few at a time; now and then again, for what a process with other
/// keys has stored meanwhile.
pub(crate) async fn keep_sealed(store: SharedStore) {
    loop {
        let (mut after, mut sealed, mut unopened) = (String::new(), 0, Vec::new());
        let failed = loop {
            match store::answered(store.reseal(&after)).await {
                Ok(done) => {
                    sealed += done.sealed;
                    unopened.extend(done.unopened);
                    let Some(next) = done.next else { break false };
                    after = next;
                    tokio::time::sleep(BATCH_PAUSE).await;
                }
                Err(error) => {
                    tracing::warn!(error = %error, "signing secrets could not be sealed anew yet: {error}");
                    break true;
                }
            }
        };
        if sealed > 0 {
            tracing::info!("the signing secrets of {sealed} subscriptions are sealed with the newest key");
        }
        if !unopened.is_empty() {
            tracing::error!("EVENTS_SECRET_KEY holds no key for the signing secrets of {unopened:?}");
        }
        tokio::time::sleep(if failed { BATCH_RETRY } else { RESEAL_INTERVAL }).await;
    }
}

/// Erases former secrets soon after they signed for the last time.
pub(crate) async fn erase_former_secrets(store: SharedStore) {
    loop {
        let pause = match store::answered(store.erase_former_secrets()).await {
            Ok(erased) if erased.more => BATCH_PAUSE,
            Ok(_) => ERASE_INTERVAL,
            Err(error) => {
                tracing::warn!(error = %error, "former signing secrets could not be erased yet: {error}");
                BATCH_RETRY
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// Forgets used tickets that have ended.
pub(crate) async fn forget_tickets(store: SharedStore) {
    loop {
        let pause = match store::answered(store.forget_tickets()).await {
            Ok(true) => BATCH_PAUSE,
            Ok(false) => TICKETS_INTERVAL,
            Err(error) => {
                tracing::warn!(error = %error, "used tickets could not be forgotten yet: {error}");
                BATCH_RETRY
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// Forgets which carriers were chosen long ago, and keeps what was chosen last.
pub(crate) async fn forget_placements(store: SharedStore, retention: Retention) {
    let retention_ms = i64::try_from(retention.hot.as_millis()).unwrap_or(i64::MAX);
    let default_class = Intent::DEFAULT.class.label();
    loop {
        let pause = match store::answered(store.forget_placements(retention_ms, default_class)).await {
            Ok(true) => BATCH_PAUSE,
            Ok(false) => retention.prune_interval,
            Err(error) => {
                tracing::warn!(error = %error, "old placements could not be forgotten yet: {error}");
                BATCH_RETRY
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// Builds the indexes of this release that are missing, once the process is ready.
pub(crate) async fn build_indexes(store: SharedStore, readiness: Arc<Readiness>, builds: IndexBuilds) {
    while !readiness.report().await.ready {
        tokio::time::sleep(READY_INTERVAL).await;
    }
    store.build_indexes(&LATER_INDEXES, &builds).await;
}

/// Moves and removes what is old enough, without any hurry and beside other processes that do the same.
pub(crate) async fn prune(store: SharedStore, retention: Retention, sandbox: Duration) {
    loop {
        let pause = match prune_once(&store, &retention, sandbox).await {
            Ok(()) => retention.prune_interval,
            Err(error) => {
                tracing::warn!(error = %error, "old events could not be pruned yet: {error}");
                BATCH_RETRY.min(retention.prune_interval)
            }
        };
        tokio::time::sleep(pause).await;
    }
}

async fn prune_once(store: &SharedStore, retention: &Retention, sandbox: Duration) -> Result<(), StoreError> {
    let millis = |age: Duration| i64::try_from(age.as_millis()).unwrap_or(i64::MAX);
    let hot = millis(retention.hot);
    let mut left = 0;
    let mut from = Aged::FIRST;
    loop {
        let batch = store::answered(store.remove_aged("sandbox", hot.min(millis(sandbox)), from)).await?;
        left += batch.events;
        // What waited has ended; the same rows are looked at again.
        from = match batch.next {
            _ if batch.expired > 0 => from,
            Some(next) => next,
            None => break,
        };
        tokio::time::sleep(PRUNE_PAUSE).await;
    }
    from = Aged::FIRST;
    loop {
        let batch = match retention.replay {
            Some(_) => store::answered(store.move_to_replay(hot, from)).await?,
            None => store::answered(store.remove_aged("production", hot, from)).await?,
        };
        left += batch.events;
        from = match batch.next {
            _ if batch.expired > 0 => from,
            Some(next) => next,
            None => break,
        };
        tokio::time::sleep(PRUNE_PAUSE).await;
    }
    // Without a replay tier no rule but this one would ever remove what an earlier setting left in it.
    let replay = retention.replay.map_or(0, millis);
    let mut expired = 0;
    loop {
        let batch = store::answered(store.expire_replay(replay)).await?;
        expired += batch.rows;
        if !batch.more {
            break;
        }
        tokio::time::sleep(PRUNE_PAUSE).await;
    }
    let (mut receipts, mut page) = (0, 0);
    loop {
        let pass = store::answered(store.forget_receipts(millis(retention.receipts), page)).await?;
        receipts += pass.forgotten;
        let Some(next) = pass.next else { break };
        page = next;
        tokio::time::sleep(BATCH_PAUSE).await;
    }
    if left + expired + receipts > 0 {
        tracing::info!(
            "{left} events left the hot store, {expired} the replay tier, and {receipts} receipts were forgotten"
        );
    }
    Ok(())
}
