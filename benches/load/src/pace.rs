//! Open loop: when each request is due, whatever became of those before it.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;

/// Times at an even pace. A latency is measured from here, so that what a stalled server makes late counts in full.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Schedule {
    start: Instant,
    rate: f64,
}

impl Schedule {
    /// `rate` a second from `start` on.
    pub(crate) fn new(start: Instant, rate: f64) -> Self {
        Self { start, rate }
    }

    /// When the request of that number is due, from 0.
    pub(crate) fn due(&self, number: u64) -> Instant {
        #[expect(clippy::cast_precision_loss, reason = "numbers of requests are far below 2^52")]
        let after_s = number as f64 / self.rate;
        self.start + Duration::from_secs_f64(after_s)
    }

    /// How many are due within `length` of the start.
    pub(crate) fn count(&self, length: Duration) -> u64 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a positive count far below 2^53"
        )]
        let count = (length.as_secs_f64() * self.rate).ceil() as u64;
        count
    }

    /// Gives one permit at each due time, for `count` of them. On a thread of its own, since timers of the runtime tick in
    /// whole milliseconds.
    pub(crate) fn ring(self, count: u64) -> Arc<Semaphore> {
        let permits = Arc::new(Semaphore::new(0));
        let given = Arc::clone(&permits);
        thread::spawn(move || {
            for number in 0..count {
                let wait = self.due(number).saturating_duration_since(Instant::now());
                if !wait.is_zero() {
                    thread::sleep(wait);
                }
                given.add_permits(1);
            }
        });
        permits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn due_times_are_even_and_do_not_depend_on_answers() {
        let start = Instant::now();
        let schedule = Schedule::new(start, 200.0);
        assert_eq!(schedule.due(0), start);
        assert_eq!(schedule.due(3), start + Duration::from_millis(15));
        assert_eq!(schedule.count(Duration::from_secs(2)), 400);
    }

    #[tokio::test]
    async fn no_permit_comes_before_its_time_and_none_is_lost() {
        let schedule = Schedule::new(Instant::now(), 1000.0);
        let permits = schedule.ring(20);
        for number in 0..20 {
            permits.acquire().await.expect("never closed").forget();
            assert!(Instant::now() >= schedule.due(number), "permit {number}");
        }
        assert_eq!(permits.available_permits(), 0);
    }
}
