//! What is said about deliveries in many rooms.

use serde::Serialize;

use super::time::Millis;

/// Deliveries by status, over all subscriptions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct DeliveryCounts {
    /// Never attempted, or replayed.
    pub pending: i64,
    /// Answered with a 2xx.
    pub delivered: i64,
    /// Attempted; waits for the next attempt.
    pub failed: i64,
    /// Given up: the dead-letter queue.
    pub dead: i64,
}

impl DeliveryCounts {
    /// Adds `change` to the count of a status as it is stored; another word changes nothing.
    pub fn add(&mut self, status: &str, change: i64) {
        match status {
            "pending" => self.pending += change,
            "delivered" => self.delivered += change,
            "failed" => self.failed += change,
            "dead" => self.dead += change,
            _ => {}
        }
    }
}

/// How long deliveries of enabled subscriptions have waited, by the clock of the database.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Waiting {
    /// How long the one that waits longest could have been claimed, in milliseconds; 0 where none waits.
    pub oldest_due_ms: i64,
    /// The age of the oldest one that has failed, is still tried and may hold up its key, in milliseconds; 0 where there is
    /// none, and nothing where that takes too long to find out.
    pub oldest_head_ms: Option<i64>,
}

/// The delivery worker of a process at one moment; the default is a process without one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct WorkerState {
    /// Whether this process has a worker.
    pub enabled: bool,
    /// Whether it may claim: it lives in the database's eyes and is not stopping.
    pub running: bool,
    /// Deliveries whose result is not recorded yet.
    pub inflight: usize,
    /// Subscriptions they belong to.
    pub busy_subscriptions: usize,
    /// When it last looked for work.
    pub last_tick_at: Option<Millis>,
}
