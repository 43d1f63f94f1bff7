//! Waits between tries of something that keeps failing: each twice as long as the one before, up to a longest.

use std::time::Duration;

/// The waits of one thing that is tried again and again.
#[derive(Debug, Clone)]
pub(crate) struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Backoff {
    /// Nothing has failed yet.
    pub(crate) const fn new(first: Duration, longest: Duration) -> Self {
        Self {
            first,
            longest,
            next: first,
        }
    }

    /// The wait after one more failure.
    pub(crate) fn failed(&mut self) -> Duration {
        let wait = self.next;
        self.next = (wait * 2).min(self.longest);
        wait
    }

    /// Begins with the first wait again.
    pub(crate) fn succeeded(&mut self) {
        self.next = self.first;
    }

    /// Whether nothing has failed since the last success.
    pub(crate) fn is_fresh(&self) -> bool {
        self.next == self.first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_longest_and_begin_anew_after_a_success() {
        let mut backoff = Backoff::new(Duration::from_millis(10), Duration::from_millis(50));
        assert!(backoff.is_fresh());
        let waits: Vec<u128> = (0..5).map(|_| backoff.failed().as_millis()).collect();
        assert_eq!(waits, [10, 20, 40, 50, 50]);
        assert!(!backoff.is_fresh());
        backoff.succeeded();
        assert_eq!((backoff.is_fresh(), backoff.failed().as_millis()), (true, 10));
    }
}
