//! Who uses the delivery slots of this process; a slot is taken from the claim until its result is recorded.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::domain::ids::SubscriptionId;

use super::breaker::{Endpoints, Heard, Turned};
use super::wake::Wake;

/// The slots of a process and what holds them.
pub(super) struct Shares {
    slots: usize,
    used: Mutex<Used>,
    emptied: Notify,
    wake: Wake,
}

struct Used {
    total: usize,
    by_consumer: HashMap<Box<str>, usize>,
    by_subscription: HashMap<SubscriptionId, usize>,
    endpoints: Endpoints,
}

/// One delivery's right to a slot, given back when dropped.
pub(super) struct Slot {
    shares: Arc<Shares>,
    consumer: Box<str>,
    subscription_id: SubscriptionId,
    endpoint: Arc<str>,
}

/// Slots in use at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Usage {
    /// Deliveries.
    pub(super) inflight: usize,
    /// Subscriptions with at least one.
    pub(super) subscriptions: usize,
}

impl Shares {
    pub(super) fn new(slots: usize, wake: Wake) -> Arc<Self> {
        Arc::new(Self {
            slots,
            used: Mutex::new(Used {
                total: 0,
                by_consumer: HashMap::new(),
                by_subscription: HashMap::new(),
                endpoints: Endpoints::new(slots),
            }),
            emptied: Notify::new(),
            wake,
        })
    }

    /// Slots nobody holds.
    pub(super) fn room(&self) -> usize {
        self.slots.saturating_sub(self.used.lock().total)
    }

    /// Slots that this consumer may still take: no consumer holds more than half of all, and each may hold one.
    pub(super) fn consumer_room(&self, consumer: &str) -> usize {
        let held = self.used.lock().by_consumer.get(consumer).copied().unwrap_or(0);
        (self.slots / 2).max(1).saturating_sub(held)
    }

    /// Whether a delivery of this subscription holds a slot.
    pub(super) fn runs(&self, subscription_id: &SubscriptionId) -> bool {
        self.used.lock().by_subscription.contains_key(subscription_id)
    }

    pub(super) fn usage(&self) -> Usage {
        let used = self.used.lock();
        Usage {
            inflight: used.total,
            subscriptions: used.by_subscription.len(),
        }
    }

    /// Takes a slot. What the store has granted is counted even beyond the limit.
    pub(super) fn take(self: &Arc<Self>, consumer: &str, subscription_id: &SubscriptionId, endpoint: &str) -> Slot {
        let endpoint = Arc::from(endpoint);
        let mut used = self.used.lock();
        used.total += 1;
        used.endpoints.take(&endpoint);
        *used.by_consumer.entry(consumer.into()).or_default() += 1;
        *used.by_subscription.entry(subscription_id.clone()).or_default() += 1;
        Slot {
            shares: Arc::clone(self),
            consumer: consumer.into(),
            subscription_id: subscription_id.clone(),
            endpoint,
        }
    }

    /// Looks at the endpoints as they are now.
    pub(super) fn endpoints<T>(&self, look: impl FnOnce(&mut Endpoints) -> T) -> T {
        look(&mut self.used.lock().endpoints)
    }

    /// Waits until no slot is held.
    pub(super) async fn empty(&self) {
        loop {
            let emptied = self.emptied.notified();
            if self.used.lock().total == 0 {
                return;
            }
            emptied.await;
        }
    }
}

impl Slot {
    /// The attempt has told something about its endpoint.
    pub(super) fn heard(&self, heard: Heard) {
        let id = &self.subscription_id;
        match self
            .shares
            .endpoints(|endpoints| endpoints.heard(&self.endpoint, heard))
        {
            Some(Turned::Alone) => {
                tracing::info!(subscription_id = %id, "the endpoint of {id} keeps failing and is tried alone until it answers");
            }
            Some(Turned::Together) => tracing::info!(subscription_id = %id, "the endpoint of {id} answers again"),
            None => {}
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut used = self.shares.used.lock();
        used.total -= 1;
        used.endpoints.release(&self.endpoint);
        release(&mut used.by_consumer, &self.consumer);
        release(&mut used.by_subscription, &self.subscription_id);
        if used.total == 0 {
            self.shares.emptied.notify_waiters();
        }
        drop(used);
        self.shares.wake.look();
    }
}

fn release<K, Q>(counts: &mut HashMap<K, usize>, key: &Q)
where
    K: std::borrow::Borrow<Q> + std::hash::Hash + Eq,
    Q: std::hash::Hash + Eq + ?Sized,
{
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_consumer_gets_half_of_the_slots_and_at_least_one() {
        for (slots, half) in [(1, 1), (2, 1), (3, 1), (4, 2), (256, 128)] {
            let shares = Shares::new(slots, Wake::nobody());
            assert_eq!(shares.consumer_room("media"), half, "{slots} slots");
        }
    }

    #[tokio::test]
    async fn a_dropped_slot_is_free_and_rings() {
        let wake = Wake::new();
        let shares = Shares::new(4, wake.clone());
        let id = SubscriptionId::generate();
        let slot = shares.take("media", &id, "http://127.0.0.1/");
        assert_eq!(
            (shares.room(), shares.consumer_room("media"), shares.runs(&id)),
            (3, 1, true)
        );
        drop(slot);
        wake.rung().await;
        shares.empty().await;
        assert_eq!(
            (shares.room(), shares.consumer_room("media"), shares.runs(&id)),
            (4, 2, false)
        );
    }

    proptest! {
        #[test]
        fn room_is_what_is_not_held(takes in prop::collection::vec((0_usize..3, any::<bool>()), 0..60)) {
            let shares = Shares::new(8, Wake::nobody());
            let ids: Vec<_> = (0..3).map(|_| SubscriptionId::generate()).collect();
            let mut held: Vec<(usize, Slot)> = Vec::new();
            for (consumer, take) in takes {
                let name = format!("c{consumer}");
                if take && shares.room() > 0 && shares.consumer_room(&name) > 0 {
                    held.push((consumer, shares.take(&name, &ids[consumer], "http://127.0.0.1/")));
                } else if !take && !held.is_empty() {
                    held.remove(0);
                }
                prop_assert_eq!(shares.room(), 8 - held.len());
                for other in 0..3 {
                    let own = held.iter().filter(|(c, _)| *c == other).count();
                    prop_assert!(own <= 4, "never more than half");
                    prop_assert_eq!(shares.consumer_room(&format!("c{other}")), 4 - own);
                }
            }
            drop(held);
            prop_assert_eq!(shares.usage(), Usage { inflight: 0, subscriptions: 0 });
        }
    }
}
