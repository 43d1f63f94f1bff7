//! What runs beside the service, in every process and without any hurry: secrets at rest, decisions that are old, and
//! indexes that are built after the start.

use std::sync::Arc;
use std::time::Duration;

use planner::Intent;

use crate::config::Retention;
use crate::http::health::Readiness;
use crate::store::{self, IndexBuilds, LATER_INDEXES, SharedStore};

/// Between two batches of the same work.
const BATCH_PAUSE: Duration = Duration::from_millis(100);
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
