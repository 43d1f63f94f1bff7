//! What the worker of this process is doing, read without asking it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use crate::domain::deliveries::WorkerState;
use crate::domain::time::Millis;

use super::shares::Shares;

/// A handle on the worker's state.
#[derive(Clone)]
pub struct Vitals(Option<Arc<Inner>>);

struct Inner {
    shares: Arc<Shares>,
    running: AtomicBool,
    /// Epoch milliseconds; 0 before the first.
    last_tick_ms: AtomicI64,
}

impl Vitals {
    pub(super) fn enabled(shares: Arc<Shares>) -> Self {
        Self(Some(Arc::new(Inner {
            shares,
            running: AtomicBool::new(false),
            last_tick_ms: AtomicI64::new(0),
        })))
    }

    /// Of a process without a worker.
    pub fn disabled() -> Self {
        Self(None)
    }

    /// The state now.
    pub fn read(&self) -> WorkerState {
        let Some(inner) = &self.0 else {
            return WorkerState::default();
        };
        let usage = inner.shares.usage();
        let last_tick_ms = inner.last_tick_ms.load(Ordering::Relaxed);
        WorkerState {
            enabled: true,
            running: inner.running.load(Ordering::Relaxed),
            inflight: usage.inflight,
            busy_subscriptions: usage.subscriptions,
            last_tick_at: (last_tick_ms != 0).then_some(Millis(last_tick_ms)),
        }
    }

    pub(super) fn set_running(&self, running: bool) {
        if let Some(inner) = &self.0 {
            inner.running.store(running, Ordering::Relaxed);
        }
    }

    pub(super) fn tick(&self, now: Millis) {
        if let Some(inner) = &self.0 {
            inner.last_tick_ms.store(now.0, Ordering::Relaxed);
        }
    }
}
