//! The life of the worker: heartbeats, one dispatcher per life, recovery of what the dead have left, and the stop.

use std::collections::HashSet;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use crate::store::{Heartbeat, Released, SharedStore, StoreError, answered};
use crate::telemetry;

use super::DeliverySettings;
use super::dispatcher::Dispatcher;
use super::life::Life;
use super::sender::Sender;
use super::settler::{self, Finished};
use super::shares::Shares;
use super::unheard::Doubts;
use super::vitals::Vitals;
use super::wake::{Recorded, Wake};

const RENEW_INTERVAL: Duration = Duration::from_secs(1);
const RENEW_DEADLINE: Duration = Duration::from_secs(1);
const RENEW_AGAIN_AFTER: Duration = Duration::from_millis(200);
const RECOVER_INTERVAL: Duration = Duration::from_millis(250);
/// How often all claims are looked at though no owner has died: a lease may end by itself, and an owner may have died before
/// anybody looked. A look passes over all claims that ended since the oldest snapshot that somebody holds.
const RECOVER_ALL_INTERVAL: Duration = Duration::from_secs(10);
/// How long after a death every turn looks.
const RECOVER_AFTER_DEATH: Duration = Duration::from_secs(1);
const FOLD_INTERVAL: Duration = Duration::from_secs(10);
/// How long running attempts may go on after a stop.
const DRAIN: Duration = Duration::from_secs(8);
/// How long the last results may take to be recorded after it.
const LAST_RESULTS: Duration = Duration::from_secs(1);
/// When a stop is over in any case. What was not handed back by then moves on with the owner's death.
const STOP_MAX: Duration = Duration::from_millis(9_800);
const VERSION_DEADLINE: Duration = Duration::from_secs(5);
/// The pause after a defect, so that one that repeats does not spin.
const AFTER_PANIC: Duration = Duration::from_secs(1);

/// Everything that delivers in this process.
pub(super) struct Worker {
    pub(super) store: SharedStore,
    pub(super) settings: Arc<DeliverySettings>,
    pub(super) sender: Arc<Sender>,
    pub(super) shares: Arc<Shares>,
    pub(super) wake: Wake,
    pub(super) vitals: Vitals,
}

impl Worker {
    /// Works until the stop, and a bounded time longer.
    pub(super) async fn run(self, stop: CancellationToken) {
        let too_late = async {
            stop.cancelled().await;
            sleep(STOP_MAX).await;
        };
        tokio::select! {
            () = self.lives(&stop) => {}
            () = too_late => tracing::warn!("the stop took too long; what is left moves on when this owner has died"),
        }
    }

    /// Lives one life after another until the stop.
    async fn lives(&self, stop: &CancellationToken) {
        let (kept, results) = mpsc::channel(self.settings.max_inflight.max(1));
        // It outlives each life: a result that waits for the database is still good when the database returns before
        // anybody else has taken the claim.
        let settler = AbortOnDropHandle::new(tokio::spawn(settler::run(
            Arc::clone(&self.store),
            results,
            self.wake.clone(),
        )));
        let host = host_name();
        let mut doubts = Doubts::default();
        while !stop.is_cancelled() {
            let life = Life::new(format!(
                "{host}:{}:{}",
                std::process::id(),
                hex::encode(rand::random::<[u8; 4]>())
            ));
            // However this life ends, its attempts end with it.
            let end = life.lost.clone().drop_guard();
            let lived = AssertUnwindSafe(self.live(&life, &kept, &mut doubts, stop))
                .catch_unwind()
                .await;
            self.vitals.set_running(false);
            drop(end);
            if lived.is_err() {
                tracing::error!("the delivery worker failed by a defect and starts again");
                let _ = timeout(AFTER_PANIC, stop.cancelled()).await;
            }
        }
        drop(kept);
        let _ = timeout(LAST_RESULTS, settler).await;
    }

    /// One owner's life, to the stop or to the moment when it can no longer prove that it lives.
    async fn live(
        &self,
        life: &Arc<Life>,
        kept: &mpsc::Sender<Finished>,
        doubts: &mut Doubts,
        stop: &CancellationToken,
    ) {
        let ended = CancellationToken::new();
        let (versions, seen) = watch::channel(0);
        let beat = AbortOnDropHandle::new(tokio::spawn(beat(
            Arc::clone(&self.store),
            Arc::clone(life),
            versions,
            ended.clone(),
        )));
        let guarded = Arc::clone(life);
        let _guard = AbortOnDropHandle::new(tokio::spawn(async move { guarded.guard().await }));
        let _follow = AbortOnDropHandle::new(tokio::spawn(follow(Arc::clone(&self.store), seen, self.wake.clone())));

        tokio::select! {
            () = life.begin() => self.work(life, kept, doubts, stop).await,
            () = stop.cancelled() => {}
        }
        if !life.lost.is_cancelled() {
            ended.cancel();
            let _ = beat.await;
        }
    }

    async fn work(
        &self,
        life: &Arc<Life>,
        kept: &mpsc::Sender<Finished>,
        doubts: &mut Doubts,
        stop: &CancellationToken,
    ) {
        tracing::info!(owner = %life.owner(), "the delivery worker {} begins", life.owner());
        self.vitals.set_running(true);
        let recover = AbortOnDropHandle::new(tokio::spawn(recover(
            Arc::clone(&self.store),
            Arc::clone(life),
            self.wake.clone(),
        )));
        let attempts = TaskTracker::new();
        let interrupt = CancellationToken::new();
        let (finished, mut results) = mpsc::channel(self.settings.max_inflight.max(1));
        let dispatcher = Dispatcher {
            store: Arc::clone(&self.store),
            settings: Arc::clone(&self.settings),
            sender: Arc::clone(&self.sender),
            shares: Arc::clone(&self.shares),
            wake: self.wake.clone(),
            vitals: self.vitals.clone(),
            life: Arc::clone(life),
            finished,
            kept: kept.clone(),
            attempts: attempts.clone(),
            interrupt: interrupt.clone(),
            stop: stop.clone(),
        };
        dispatcher.run(&mut results, doubts).await;
        drop(dispatcher);
        let passing = tokio::spawn(pass_on(results, kept.clone()));
        self.vitals.set_running(false);
        drop(recover);
        attempts.close();
        if life.lost.is_cancelled() {
            tracing::warn!(owner = %life.owner(), "no heartbeat for three seconds; {} ends its attempts", life.owner());
        } else if timeout(DRAIN, attempts.wait()).await.is_err() {
            let cut = attempts.len();
            let what = if cut == 1 { "attempt is" } else { "attempts are" };
            tracing::warn!(attempts = cut, "{cut} {what} interrupted by the stop");
            interrupt.cancel();
        }
        // The heartbeat goes on meanwhile: nobody else may take what is still to be recorded.
        if timeout(LAST_RESULTS, async {
            attempts.wait().await;
            let _ = passing.await;
            if !life.lost.is_cancelled() {
                self.shares.empty().await;
            }
        })
        .await
        .is_err()
        {
            tracing::warn!("some results could not be recorded; their deliveries run again");
        }
    }
}

/// Leaves the results of attempts that outlast their dispatcher to whoever tries until they are recorded.
async fn pass_on(mut results: mpsc::Receiver<Finished>, kept: mpsc::Sender<Finished>) {
    while let Some(one) = results.recv().await {
        if kept.send(one).await.is_err() {
            return;
        }
    }
}

/// Renews the owner's row until it has ended or is lost, and passes on the version of the store that comes back.
async fn beat(store: SharedStore, life: Arc<Life>, versions: watch::Sender<i64>, ended: CancellationToken) {
    let mut heartbeat: Option<Heartbeat> = None;
    let mut failing = false;
    while !life.lost.is_cancelled() {
        let asked = Instant::now();
        let renewal = timeout(RENEW_DEADLINE, renew(&store, &mut heartbeat, life.owner())).await;
        let next = match renewal {
            Ok(Ok(Some(version))) => {
                life.renewed(asked);
                versions.send_replace(version);
                failing = false;
                asked + RENEW_INTERVAL
            }
            Ok(Ok(None)) => {
                // The database's clock says that it died, whatever this process's says.
                life.lost.cancel();
                return;
            }
            failed => {
                // The state of the connection is unknown; the next renewal uses a new one.
                heartbeat = None;
                if !failing {
                    let reason = match failed {
                        Ok(Err(error)) => error.to_string(),
                        _ => "no answer in time".to_owned(),
                    };
                    tracing::warn!(owner = %life.owner(), "a heartbeat of {} failed: {reason}", life.owner());
                }
                failing = true;
                Instant::now() + RENEW_AGAIN_AFTER
            }
        };
        tokio::select! {
            () = sleep_until(next) => {}
            () = life.lost.cancelled() => {}
            () = ended.cancelled() => {
                if let Some(heartbeat) = heartbeat.take() {
                    // Without it others wait four seconds, no more.
                    let _ = timeout(RENEW_DEADLINE, heartbeat.end(life.owner())).await;
                }
                return;
            }
        }
    }
}

async fn renew(store: &SharedStore, heartbeat: &mut Option<Heartbeat>, owner: &str) -> Result<Option<i64>, StoreError> {
    let open = match heartbeat {
        Some(open) => open,
        None => heartbeat.insert(store.heartbeat().await?),
    };
    open.renew(owner).await
}

/// Brings the view up to each version that heartbeats report, and has everything looked at anew.
async fn follow(store: SharedStore, mut versions: watch::Receiver<i64>, wake: Wake) {
    while versions.changed().await.is_ok() {
        let version = *versions.borrow_and_update();
        let before = store.view().version;
        if let Err(error) = answered(store.refresh_view(version)).await {
            tracing::warn!(error = %error, "the subscriptions could not be read and are read again: {error}");
        }
        if store.view().version != before {
            wake.look();
        }
    }
}

/// Tells when claims may have lost their owners.
struct Losses {
    living: HashSet<String>,
    judges: bool,
    /// Every turn looks until then.
    look_until: Instant,
    look_at: Instant,
}

impl Losses {
    fn new(now: Instant) -> Self {
        Self {
            living: HashSet::new(),
            judges: false,
            look_until: now,
            look_at: now,
        }
    }

    /// Takes in who lives, and whether this process may call others dead.
    fn see(&mut self, living: HashSet<String>, judges: bool, now: Instant) {
        let died = self.living.iter().any(|owner| !living.contains(owner));
        if died || judges && !self.judges {
            self.look_until = now + RECOVER_AFTER_DEATH;
        }
        self.living = living;
        self.judges = judges;
    }

    /// Whether it is time to look at all claims.
    fn look(&mut self, now: Instant) -> bool {
        let looks = now < self.look_until || now >= self.look_at;
        if looks {
            self.look_at = now + RECOVER_ALL_INTERVAL;
        }
        looks
    }
}

/// Frees the claims of the dead, and folds what is counted.
async fn recover(store: SharedStore, life: Arc<Life>, wake: Wake) {
    let mut fold_at = Instant::now() + FOLD_INTERVAL;
    let mut losses = Losses::new(Instant::now());
    loop {
        sleep(RECOVER_INTERVAL).await;
        let now = Instant::now();
        let judge = life.may_judge(now).then(|| &**life.owner());
        let released = async {
            losses.see(store.living_owners().await?, judge.is_some(), now);
            if losses.look(now) {
                store.release_lost(judge).await
            } else {
                Ok(Released::default())
            }
        };
        match answered(released).await {
            Ok(released) if released.claims == 0 => {}
            Ok(released) => {
                let subscriptions = released.subscriptions;
                tracing::info!("claims that ended without a result are free again: {subscriptions:?}");
                telemetry::leases_expired(released.claims);
                losses.look_until = now + RECOVER_AFTER_DEATH;
                wake.recorded(subscriptions.into_iter().map(|subscription_id| Recorded {
                    subscription_id,
                    due_at: None,
                }));
            }
            Err(error) => {
                losses.look_at = now;
                tracing::debug!(error = %error, "claims of the dead could not be freed yet: {error}");
            }
        }
        if Instant::now() >= fold_at {
            fold_at = Instant::now() + FOLD_INTERVAL;
            if let Err(error) = answered(store.fold_counts()).await {
                tracing::debug!(error = %error, "counts could not be folded yet: {error}");
            }
        }
    }
}

/// Keeps the view of a process without a worker at most a second behind.
pub(super) async fn watch_version(store: SharedStore, stop: CancellationToken) {
    let watching = async {
        loop {
            sleep(RENEW_INTERVAL).await;
            let current = async { store.refresh_view(store.version().await?).await };
            match timeout(VERSION_DEADLINE, current).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(error = %error, "the version could not be read yet: {error}"),
                Err(_elapsed) => tracing::debug!("the version could not be read in time"),
            }
        }
    };
    let _: Option<()> = stop.run_until_cancelled(watching).await;
}

fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| name.trim().to_owned())
        .ok()
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| "localhost".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_claims_are_looked_at_when_an_owner_died_and_now_and_then() {
        let owners = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<HashSet<_>>();
        let zero = Instant::now();
        let after = |ms| zero + Duration::from_millis(ms);
        let mut losses = Losses::new(zero);
        losses.see(owners(&["a", "b"]), false, zero);
        assert!(losses.look(zero), "whoever died before");
        losses.see(owners(&["a", "b"]), false, after(250));
        assert!(!losses.look(after(250)), "nobody died");
        losses.see(owners(&["a", "b"]), true, after(500));
        assert!(losses.look(after(500)), "its word counts from now on");
        losses.see(owners(&["a", "b", "c"]), true, after(1_600));
        assert!(!losses.look(after(1_600)));
        losses.see(owners(&["a", "c"]), true, after(1_850));
        assert!(losses.look(after(1_850)), "one died");
        losses.see(owners(&["a", "c"]), true, after(2_100));
        assert!(losses.look(after(2_100)), "it may have claimed a moment ago");
        losses.see(owners(&["a", "c"]), true, after(3_000));
        assert!(!losses.look(after(3_000)));
        assert!(losses.look(after(12_100)), "a lease may have ended");
    }
}
