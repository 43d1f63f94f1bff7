//! One owner's life, judged by its own monotonic clock, which runs out before anybody else may call the owner dead.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::unheard::Known;

/// Without a renewal for so long the owner gives up, a second before others may take its work.
const GIVE_UP_AFTER: Duration = Duration::from_secs(3);
/// An owner judges others only once it has lived for so long: after an outage everybody looks dead until they renew.
const JUDGE_AFTER: Duration = Duration::from_secs(4);

/// The name under which claims are made, and whether it still holds.
pub(super) struct Life {
    owner: Arc<str>,
    /// The claims made under it that this process has heard of.
    pub(super) known: Arc<Known>,
    /// Cancelled when the owner must be taken for dead.
    pub(super) lost: CancellationToken,
    renewals: watch::Sender<Option<Renewals>>,
}

#[derive(Clone, Copy)]
struct Renewals {
    first: Instant,
    last: Instant,
}

impl Life {
    pub(super) fn new(owner: String) -> Arc<Self> {
        Arc::new(Self {
            owner: owner.into(),
            known: Arc::default(),
            lost: CancellationToken::new(),
            renewals: watch::Sender::new(None),
        })
    }

    pub(super) fn owner(&self) -> &Arc<str> {
        &self.owner
    }

    /// Notes a renewal that was asked for at `asked`: the database counts from no earlier than that.
    pub(super) fn renewed(&self, asked: Instant) {
        self.renewals.send_modify(|renewals| {
            let first = renewals.map_or(asked, |renewals| renewals.first);
            *renewals = Some(Renewals { first, last: asked });
        });
    }

    /// Whether claims made under this name can still be its own.
    pub(super) fn holds(&self, now: Instant) -> bool {
        !self.lost.is_cancelled() && self.ends_at().is_some_and(|end| now < end)
    }

    /// Whether this owner may take the work of those that did not renew.
    pub(super) fn may_judge(&self, now: Instant) -> bool {
        self.holds(now)
            && self
                .renewals
                .borrow()
                .is_some_and(|renewals| now.duration_since(renewals.first) >= JUDGE_AFTER)
    }

    /// Waits for the first renewal.
    pub(super) async fn begin(&self) {
        let mut renewals = self.renewals.subscribe();
        renewals
            .wait_for(Option::is_some)
            .await
            .expect("the sender is a field of self");
    }

    /// Cancels [`Life::lost`] when the renewals stop; returns only then.
    pub(super) async fn guard(&self) {
        self.begin().await;
        while let Some(end) = self.ends_at().filter(|end| *end > Instant::now()) {
            tokio::time::sleep_until(end).await;
        }
        self.lost.cancel();
    }

    fn ends_at(&self) -> Option<Instant> {
        self.renewals.borrow().map(|renewals| renewals.last + GIVE_UP_AFTER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secs(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    #[tokio::test(start_paused = true)]
    async fn a_life_ends_three_seconds_after_the_last_renewal_was_asked_for() {
        let life = Life::new("host:1:00000000".to_owned());
        let zero = Instant::now();
        assert!(!life.holds(zero), "no claim before the first renewal");
        let guard = tokio::spawn({
            let life = Arc::clone(&life);
            async move { life.guard().await }
        });
        life.renewed(zero);
        tokio::time::sleep(secs(2)).await;
        life.renewed(zero + secs(1));
        tokio::time::sleep(Duration::from_millis(1900)).await;
        assert!(life.holds(Instant::now()));
        guard.await.expect("the guard does not panic");
        assert_eq!(zero.elapsed().as_secs(), 4);
        assert!(life.lost.is_cancelled() && !life.holds(zero), "lost for good");
    }

    #[tokio::test(start_paused = true)]
    async fn one_renewal_begins_everything_that_waits_for_it() {
        let life = Life::new("host:1:00000000".to_owned());
        let all = async { tokio::join!(life.begin(), life.begin(), life.guard()) };
        let renew = async {
            tokio::task::yield_now().await;
            life.renewed(Instant::now());
        };
        tokio::join!(all, renew);
        assert!(life.lost.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn an_owner_judges_others_after_four_seconds_of_its_own() {
        let life = Life::new("host:1:00000000".to_owned());
        let zero = Instant::now();
        for second in 0..5 {
            let now = zero + secs(second);
            life.renewed(now);
            assert_eq!(life.may_judge(now), second >= 4, "{second}");
        }
        assert!(!life.may_judge(zero + secs(8)), "its own life has ended");
    }
}
