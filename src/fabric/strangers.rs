//! Word of subscriptions that this process has not heard of yet. They may be new, or switched on again a moment ago, so the
//! store is asked, once for all that gathered meanwhile. They may be forged as well, so the store is asked ever more
//! rarely while that finds nobody.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::delivery::{Wake, Waker};
use crate::domain::ids::SubscriptionId;
use crate::store::answered;

use super::Fabric;

/// Names that wait at most; the poll finds what the others would have said.
const WAITING_MAX: usize = 256;
/// Between two questions of which the first found somebody.
const PAUSE_MIN: Duration = Duration::from_millis(50);
/// Between two questions while nobody is found. The view is renewed as often anyway.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Those that were named and not met yet.
#[derive(Default)]
pub(super) struct Strangers {
    waiting: Mutex<Vec<Stranger>>,
    rung: Notify,
}

struct Stranger {
    id: SubscriptionId,
    waker: Arc<dyn Waker>,
    at: Instant,
}

impl Strangers {
    /// These were named.
    pub(super) fn push(&self, waker: &Arc<dyn Waker>, at: Instant, ids: Vec<SubscriptionId>) {
        if ids.is_empty() {
            return;
        }
        {
            let mut waiting = self.waiting.lock();
            let room = WAITING_MAX.saturating_sub(waiting.len());
            waiting.extend(ids.into_iter().take(room).map(|id| Stranger {
                id,
                waker: Arc::clone(waker),
                at,
            }));
        }
        self.rung.notify_one();
    }
}

/// How long to wait before the next question.
fn pause_after(before: Duration, found: bool) -> Duration {
    if found { PAUSE_MIN } else { (before * 2).min(PAUSE_MAX) }
}

impl Fabric {
    /// Looks for those that were named, until the stop.
    pub(super) async fn meet_strangers(&self, wake: &Wake, stop: CancellationToken) {
        let mut pause = PAUSE_MIN;
        while stop.run_until_cancelled(self.strangers.rung.notified()).await.is_some() {
            let waiting = std::mem::take(&mut *self.strangers.waiting.lock());
            let current = async { self.store.refresh_view(self.store.version().await?).await };
            if let Err(error) = answered(current).await {
                tracing::debug!(error = %error, "new subscriptions could not be looked for: {error}");
            }
            let view = self.store.view();
            let mut found = false;
            for stranger in waiting.into_iter().filter(|stranger| view.knows(&stranger.id)) {
                found = true;
                wake.heard(&stranger.waker, stranger.at, [stranger.id]);
            }
            pause = pause_after(pause, found);
            stop.run_until_cancelled(sleep(pause)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use planner::Class;

    use super::*;

    struct Bell;

    impl Waker for Bell {
        fn id(&self) -> &'static str {
            "bell-v1"
        }

        fn claimed(&self, _class: Class, _after: Duration) {}
    }

    #[test]
    fn a_flood_of_names_is_bounded_and_asked_about_ever_more_rarely() {
        let (strangers, bell): (_, Arc<dyn Waker>) = (Strangers::default(), Arc::new(Bell));
        for _ in 0..10 {
            let ids = (0..100).map(|_| SubscriptionId::generate()).collect();
            strangers.push(&bell, Instant::now(), ids);
        }
        assert_eq!(strangers.waiting.lock().len(), WAITING_MAX);
        let mut pauses = vec![PAUSE_MIN];
        for _ in 0..8 {
            pauses.push(pause_after(pauses[pauses.len() - 1], false));
        }
        assert!(pauses.iter().sum::<Duration>() > Duration::from_secs(5), "{pauses:?}");
        assert_eq!((pauses[8], pause_after(pauses[8], true)), (PAUSE_MAX, PAUSE_MIN));
    }
}
