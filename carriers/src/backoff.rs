//! Waits between two tries to connect: longer each time, and never in step with another process.

use std::time::Duration;

/// Doubling waits with a fifth of jitter to either side.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Backoff {
    /// Waits of `first`, twice that, and so on up to `longest`.
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self {
            first,
            longest,
            next: first,
        }
    }

    /// How long to wait before the next try.
    pub fn wait(&mut self) -> Duration {
        let wait = self.next;
        self.next = self.longest.min(wait * 2);
        wait.mul_f64(rand::random_range(0.8..=1.2))
    }

    /// A try succeeded: the next wait is the first again.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

impl Default for Backoff {
    /// For brokers beside the service: 250 ms, doubling to 5 s.
    fn default() -> Self {
        Self::new(Duration::from_millis(250), Duration::from_secs(5))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_to_the_longest_within_a_fifth_and_begin_again_after_a_success() {
        let mut backoff = Backoff::default();
        for meant in [250, 500, 1000, 2000, 4000, 5000, 5000] {
            let wait = backoff.wait().as_millis();
            assert!(
                (meant * 8 / 10 - 1..=meant * 12 / 10 + 1).contains(&wait),
                "{wait} ms instead of about {meant}"
            );
        }
        backoff.reset();
        assert!(backoff.wait() <= Duration::from_millis(301));
    }
}
