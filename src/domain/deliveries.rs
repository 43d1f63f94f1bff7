//! What is said about deliveries in many rooms.

use serde::Serialize;

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
