//! Wake-ups: "these subscriptions may have work". They never block, never grow without bound, and losing one costs
//! latency only.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::domain::ids::SubscriptionId;

/// Subscriptions remembered one by one; beyond it, everything is looked at.
const NAMED_MAX: usize = 4096;

/// A recorded result, as the dispatcher cares for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Recorded {
    /// Whose delivery it was.
    pub(super) subscription_id: SubscriptionId,
    /// When the same delivery is due again.
    pub(super) due_at: Option<Instant>,
}

/// What was asked for since the dispatcher last looked.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Woken {
    /// These may have work.
    pub(super) subscriptions: HashSet<SubscriptionId>,
    /// Results that were recorded; at most one for each slot.
    pub(super) recorded: Vec<Recorded>,
    /// Anything may have work.
    pub(super) everything: bool,
}

/// Tells the dispatcher of this process to look. Cheap to clone and to call; usable from any thread.
#[derive(Clone)]
pub struct Wake(Option<Arc<Bell>>);

struct Bell {
    woken: Mutex<Woken>,
    rung: Notify,
}

impl Wake {
    pub(super) fn new() -> Self {
        Self(Some(Arc::new(Bell {
            woken: Mutex::new(Woken::default()),
            rung: Notify::new(),
        })))
    }

    /// For a process without a worker: nobody listens.
    pub fn nobody() -> Self {
        Self(None)
    }

    /// These subscriptions may have work.
    pub fn subscriptions(&self, ids: impl IntoIterator<Item = SubscriptionId>) {
        self.ring(|woken| {
            if woken.everything {
                return;
            }
            woken.subscriptions.extend(ids);
            if woken.subscriptions.len() > NAMED_MAX {
                woken.everything = true;
                woken.subscriptions = HashSet::new();
            }
        });
    }

    /// These results stand; their subscriptions may go on.
    pub(super) fn recorded(&self, results: impl IntoIterator<Item = Recorded>) {
        self.ring(|woken| woken.recorded.extend(results));
    }

    /// A slot is free again; what waits for one can go on.
    pub(super) fn look(&self) {
        self.ring(|_woken| {});
    }

    fn ring(&self, note: impl FnOnce(&mut Woken)) {
        if let Some(bell) = &self.0 {
            note(&mut bell.woken.lock());
            bell.rung.notify_one();
        }
    }

    /// What was asked for since the last call.
    pub(super) fn take(&self) -> Woken {
        self.0
            .as_ref()
            .map(|bell| std::mem::take(&mut *bell.woken.lock()))
            .unwrap_or_default()
    }

    /// Waits until something is asked for; at once if it was before.
    pub(super) async fn rung(&self) {
        match &self.0 {
            Some(bell) => bell.rung.notified().await,
            None => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wake_ups_for_one_subscription_are_one() {
        let wake = Wake::new();
        let id = SubscriptionId::generate();
        for _ in 0..3 {
            wake.clone().subscriptions([id.clone()]);
        }
        assert_eq!(wake.take().subscriptions, HashSet::from([id]));
        assert_eq!(wake.take(), Woken::default(), "taken once");
    }

    #[test]
    fn a_flood_of_names_becomes_everything() {
        let wake = Wake::new();
        for _ in 0..=NAMED_MAX {
            wake.subscriptions([SubscriptionId::generate()]);
        }
        wake.subscriptions([SubscriptionId::generate()]);
        let woken = wake.take();
        assert!(woken.everything && woken.subscriptions.is_empty());
    }

    #[tokio::test]
    async fn a_wake_up_before_the_wait_is_not_lost() {
        let wake = Wake::new();
        wake.look();
        wake.rung().await;
    }
}
