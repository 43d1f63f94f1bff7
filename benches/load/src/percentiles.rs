//! Latencies in a histogram of three digits, so that the tail is as exact as the middle.

use std::time::Duration;

use hdrhistogram::Histogram;

/// The longest latency told apart, in microseconds.
const LONGEST_US: u64 = 600_000_000;

/// Latencies of one kind.
#[derive(Debug, Clone)]
pub(crate) struct Latency(Histogram<u64>);

impl Latency {
    /// None yet.
    pub(crate) fn new() -> Self {
        Self(Histogram::new_with_bounds(1, LONGEST_US, 3).expect("bounds and digits are in range"))
    }

    /// Adds one.
    pub(crate) fn record(&mut self, latency: Duration) {
        let latency_us = u64::try_from(latency.as_micros()).unwrap_or(LONGEST_US);
        self.0.saturating_record(latency_us.max(1));
    }

    /// Adds those of another.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.0.add(&other.0).expect("the bounds are the same");
    }

    /// In milliseconds; 0 where there are none.
    pub(crate) fn quantile_ms(&self, quantile: f64) -> f64 {
        if self.0.is_empty() {
            return 0.0;
        }
        #[expect(clippy::cast_precision_loss, reason = "microseconds below 2^52")]
        let micros = self.0.value_at_quantile(quantile) as f64;
        micros / 1000.0
    }

    /// How many.
    #[cfg(test)]
    pub(crate) fn len(&self) -> u64 {
        self.0.len()
    }
}
