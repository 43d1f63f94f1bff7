//! What carriers were used for this month, counted here and summed in the store over every process, so that an allowance
//! is consumed and price decides.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use planner::{ProviderStates, Usage};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::domain::time::Millis;
use crate::store::{Used, answered};

use super::Fabric;

/// How often counts go to the store.
const INTERVAL: Duration = Duration::from_secs(5);
/// How long the last count may take.
const LAST_COUNT_MAX: Duration = Duration::from_secs(1);

/// The usage that placement reads.
pub(super) struct Counts(Mutex<Usage>);

impl Counts {
    pub(super) fn new(now: Millis) -> Self {
        Self(Mutex::new(Usage::new(now.0)))
    }

    pub(super) fn states(&self, now: Millis) -> Arc<ProviderStates> {
        Arc::new(self.0.lock().states(now.0))
    }

    /// Operations this month, by every process.
    pub(super) fn used(&self, provider: &str, metric: &str, now: Millis) -> f64 {
        self.0.lock().used(provider, metric, now.0)
    }
}

impl Fabric {
    /// Moves counts to the store and takes over the sums, until the stop and once more then. The first time is at once, so
    /// that an allowance that is used up is not taken for a new one at each start.
    pub(super) async fn count(&self, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(INTERVAL);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut failing = false;
        loop {
            if stop.run_until_cancelled(ticks.tick()).await.is_none() {
                // A stop waits for nobody long; what is not counted now costs a moment of an allowance.
                let _ = timeout(LAST_COUNT_MAX, self.count_once()).await;
                return;
            }
            match self.count_once().await {
                Ok(()) => failing = false,
                Err(error) if !failing => {
                    failing = true;
                    tracing::warn!("the use of carriers could not be recorded and is kept: {error}");
                }
                Err(_) => {}
            }
        }
    }

    async fn count_once(&self) -> Result<(), crate::store::StoreError> {
        let now = (self.clock)();
        let month = planner::Month::of(now.0);
        let taken: Vec<u64> = self.guards.iter().map(|guard| guard.take_uncounted()).collect();
        let mut used: Vec<Used> = Vec::new();
        for (guard, operations) in self.guards.iter().zip(&taken) {
            let (provider, metric) = (guard.descriptor.provider, guard.descriptor.price_unit);
            let operations = i64::try_from(*operations).unwrap_or(i64::MAX);
            match used
                .iter_mut()
                .find(|one| one.provider == provider && one.metric == metric)
            {
                Some(same) => same.operations += operations,
                None => used.push(Used {
                    provider: provider.to_owned(),
                    metric: metric.to_owned(),
                    period_start: Millis(month.start_ms),
                    operations,
                }),
            }
        }
        match answered(self.store.add_carrier_usage(&used)).await {
            Ok(all) => {
                let mut usage = self.counts.0.lock();
                for one in all {
                    let operations = u64::try_from(one.operations).unwrap_or(0);
                    usage.set(&one.provider, &one.metric, operations, now.0);
                }
                drop(usage);
                self.renew_market();
                Ok(())
            }
            Err(error) => {
                for (guard, operations) in self.guards.iter().zip(taken) {
                    guard.count(operations);
                }
                Err(error)
            }
        }
    }
}
