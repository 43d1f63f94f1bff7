//! Wake-ups: "these subscriptions may have work". They never block, never grow without bound, and losing one costs
//! latency only.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use planner::Class;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::domain::ids::SubscriptionId;

/// Subscriptions remembered one by one; beyond it, everything is looked at.
const NAMED_MAX: usize = 4096;

/// What tells this process of work that others have made, and wants to know what came of it.
pub trait Waker: Send + Sync {
    /// Its name in metrics.
    fn id(&self) -> &'static str;

    /// Its word led to a claim of deliveries of this class, so long after it was heard. The process had nothing else to
    /// do, so no other work was waited for.
    fn claimed(&self, class: Class, after: Duration);
}

/// Why a subscription is looked at.
#[derive(Clone)]
pub(super) enum Cause {
    /// A search of the store found something due.
    Poll,
    /// This process committed something.
    Local,
    /// This process knew: a result was recorded, or a time came that it remembered.
    Next,
    /// Others have made work, and this told of it.
    Heard(Arc<dyn Waker>),
}

impl Cause {
    /// Its name in metrics.
    pub(super) fn path(&self) -> &'static str {
        match self {
            Self::Poll => "poll",
            Self::Local => "local",
            Self::Next => "next",
            Self::Heard(waker) => waker.id(),
        }
    }
}

/// A word that a subscription may have work.
#[derive(Clone)]
pub(super) struct Told {
    pub(super) cause: Cause,
    pub(super) at: Instant,
}

impl Told {
    pub(super) fn now(cause: Cause) -> Self {
        Self {
            cause,
            at: Instant::now(),
        }
    }
}

impl fmt::Debug for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {:?}", self.cause.path(), self.at)
    }
}

/// A recorded result, as the dispatcher cares for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Recorded {
    /// Whose delivery it was.
    pub(super) subscription_id: SubscriptionId,
    /// When the same delivery is due again.
    pub(super) due_at: Option<Instant>,
}

/// What was asked for since the dispatcher last looked.
#[derive(Debug, Default)]
pub(super) struct Woken {
    /// These may have work. Of several words about one the first stands.
    pub(super) subscriptions: HashMap<SubscriptionId, Told>,
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

    /// Whether anybody listens.
    pub fn is_heard(&self) -> bool {
        self.0.is_some()
    }

    /// These subscriptions may have work, which this process has committed.
    pub fn subscriptions(&self, ids: impl IntoIterator<Item = SubscriptionId>) {
        self.told(&Told::now(Cause::Local), ids);
    }

    /// These subscriptions may have work, as `waker` has heard at `at`.
    pub fn heard(&self, waker: &Arc<dyn Waker>, at: Instant, ids: impl IntoIterator<Item = SubscriptionId>) {
        let cause = Cause::Heard(Arc::clone(waker));
        self.told(&Told { cause, at }, ids);
    }

    fn told(&self, told: &Told, ids: impl IntoIterator<Item = SubscriptionId>) {
        self.ring(|woken| {
            if woken.everything {
                return;
            }
            for id in ids {
                if let Entry::Vacant(free) = woken.subscriptions.entry(id) {
                    free.insert(told.clone());
                }
            }
            if woken.subscriptions.len() > NAMED_MAX {
                woken.everything = true;
                woken.subscriptions = HashMap::new();
            }
        });
    }

    /// Any subscription may have work.
    pub fn everything(&self) {
        self.ring(|woken| woken.everything = true);
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
        let woken = wake.take().subscriptions;
        assert_eq!(woken.into_keys().collect::<Vec<_>>(), [id]);
        let again = wake.take();
        assert!(again.subscriptions.is_empty() && !again.everything, "taken once");
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

    #[test]
    fn the_first_word_stands() {
        struct Bell;
        impl Waker for Bell {
            fn id(&self) -> &'static str {
                "bell-v1"
            }

            fn claimed(&self, _class: Class, _after: Duration) {}
        }
        let (wake, bell): (_, Arc<dyn Waker>) = (Wake::new(), Arc::new(Bell));
        let (here, there) = (SubscriptionId::generate(), SubscriptionId::generate());
        wake.subscriptions([here.clone()]);
        wake.heard(&bell, Instant::now(), [here.clone(), there.clone()]);
        wake.subscriptions([there.clone()]);
        let woken = wake.take().subscriptions;
        assert_eq!(
            (woken[&here].cause.path(), woken[&there].cause.path()),
            ("local", "bell-v1")
        );
    }

    #[tokio::test]
    async fn a_wake_up_before_the_wait_is_not_lost() {
        let wake = Wake::new();
        wake.look();
        wake.rung().await;
    }
}
