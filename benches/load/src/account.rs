//! The account that publishers and the receiver of one run share.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::ledger::{Balance, Ledger, Order};
use crate::percentiles::Latency;

/// Shared by all tasks of a run; each call is a short lock.
#[derive(Debug)]
pub(crate) struct Account(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    ledger: Ledger,
    due: Vec<Instant>,
    latency: Latency,
    first: Option<Instant>,
    last: Option<Instant>,
}

/// How far a run is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Standing {
    /// Events answered with a 2xx.
    pub(crate) stored: u64,
    /// First arrivals.
    pub(crate) arrived: u64,
    /// Deliveries still owed.
    pub(crate) waiting: u64,
    /// The first arrival.
    pub(crate) first: Option<Instant>,
    /// The latest first arrival.
    pub(crate) last: Option<Instant>,
}

impl Account {
    /// An empty one.
    pub(crate) fn new(subscriptions: usize, order: Order) -> Self {
        Self(Mutex::new(Inner {
            ledger: Ledger::new(subscriptions, order),
            due: Vec::new(),
            latency: Latency::new(),
            first: None,
            last: None,
        }))
    }

    /// Notes events that were due at a time, before they are sent; answers the number of the first.
    pub(crate) fn sending(&self, count: usize, key: u32, due: Instant) -> u64 {
        let mut inner = self.lock();
        inner.due.extend(std::iter::repeat_n(due, count));
        inner.ledger.sending(count, key)
    }

    /// They were answered with a 2xx.
    pub(crate) fn stored(&self, first: u64, count: usize) {
        self.lock().ledger.stored(first, count);
    }

    /// One of them arrived; its latency counts from when it was due to be sent.
    pub(crate) fn arrived(&self, subscription: usize, number: u64, at: Instant) {
        let mut inner = self.lock();
        if inner.ledger.arrived(subscription, number) {
            inner.first.get_or_insert(at);
            inner.last = Some(at);
            let due = usize::try_from(number)
                .ok()
                .and_then(|index| inner.due.get(index))
                .copied();
            if let Some(due) = due {
                inner.latency.record(at.saturating_duration_since(due));
            }
        }
    }

    /// How far the run is.
    pub(crate) fn standing(&self) -> Standing {
        let inner = self.lock();
        Standing {
            stored: inner.ledger.stored_events(),
            arrived: inner.ledger.arrivals(),
            waiting: inner.ledger.waiting(),
            first: inner.first,
            last: inner.last,
        }
    }

    /// The account as it stands.
    pub(crate) fn balance(&self) -> Balance {
        self.lock().ledger.balance()
    }

    /// From when an event was due to be sent to its first arrival.
    pub(crate) fn latency(&self) -> Latency {
        self.lock().latency.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
