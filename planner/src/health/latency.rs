//! How long it takes from a signal to the claim that it led to, as the p95 of the last half minute.
//!
//! Samples are counted in buckets of a few slices of time, so memory has a bound at any rate, and what is old goes away
//! even when nothing new comes: a carrier that was slow once is not slow for ever.

use std::time::Duration;

/// How long a sample counts.
pub const AGES_OUT_AFTER: Duration = Duration::from_secs(30);
/// Slices of that time.
const SLICES: usize = 6;
const SLICE: Duration = Duration::from_secs(AGES_OUT_AFTER.as_secs() / SLICES as u64);
/// Buckets for each doubling: a bucket is 3 % wide.
const BUCKETS_PER_DOUBLING: u64 = 32;
const DOUBLING_BITS: u32 = BUCKETS_PER_DOUBLING.trailing_zeros();
/// Longer samples count as this one, in microseconds: two minutes.
const SAMPLE_MAX_US: u64 = 120_000_000;
const BUCKETS: usize = bucket(SAMPLE_MAX_US) + 1;
/// Share of a p95 by which it is offered higher, divided by the number of samples …
const DOUBT_OF_ONE: f64 = 4.0;
/// … and never more than this.
const DOUBT_MAX: f64 = 1.0;
/// Share of a latency by which it must differ before anything is planned anew.
pub const MOVE_MIN: f64 = 0.1;

/// Whether a latency, in milliseconds, has moved far enough from the one that was planned with.
pub fn has_moved(planned_ms: f64, now_ms: f64) -> bool {
    // A little less than a tenth, because a tenth has no exact form.
    (now_ms - planned_ms).abs() >= planned_ms * MOVE_MIN * (1.0 - 1e-9) && now_ms.to_bits() != planned_ms.to_bits()
}

/// What the floor offers, in milliseconds, for the interval of its poll: half of it, since that is what it promises.
pub fn floor_latency_ms(poll_interval_ms: f64) -> f64 {
    (poll_interval_ms / 2.0).max(1.0)
}

/// The latency of one carrier for one class.
#[derive(Debug, Clone)]
pub struct LatencyWindow {
    default_ms: f64,
    slices: Vec<Slice>,
}

#[derive(Debug, Clone)]
struct Slice {
    /// Which slice of time since the beginning it counts.
    number: u64,
    count: u32,
    /// The highest bucket that is not empty.
    highest: usize,
    buckets: Vec<u32>,
}

impl LatencyWindow {
    /// No samples yet; `default_ms` is offered until there are some, and again when all are old.
    pub fn new(default_ms: f64) -> Self {
        Self {
            default_ms,
            slices: Vec::new(),
        }
    }

    /// A claim came this long after its signal. `now` is a duration on a clock that never goes back.
    pub fn record(&mut self, sample: Duration, now: Duration) {
        let number = slice_number(now);
        let sample_us = u64::try_from(sample.as_micros())
            .unwrap_or(SAMPLE_MAX_US)
            .min(SAMPLE_MAX_US);
        let index = self.slice(number);
        let slice = &mut self.slices[index];
        slice.count = slice.count.saturating_add(1);
        let bucket = bucket(sample_us);
        slice.highest = slice.highest.max(bucket);
        slice.buckets[bucket] = slice.buckets[bucket].saturating_add(1);
    }

    /// What to offer, in milliseconds: the p95 of what is not old, or the default.
    ///
    /// The p95 of a few samples is too good too often, and an idle carrier has only those of its probes. So that work does
    /// not follow chance to and fro between two carriers that are alike, few samples are offered as more than they say.
    pub fn offered_ms(&self, now: Duration) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "far fewer than 2^53")]
        let doubt = 1.0 + (DOUBT_OF_ONE / self.samples(now).max(1) as f64).min(DOUBT_MAX);
        self.p95_ms(now).map_or(self.default_ms, |p95_ms| p95_ms * doubt)
    }

    /// The p95 of what is not old, in milliseconds; `None` without samples.
    pub fn p95_ms(&self, now: Duration) -> Option<f64> {
        let live = || {
            self.slices
                .iter()
                .filter(move |slice| is_live(slice.number, slice_number(now)))
        };
        let count: u64 = live().map(|slice| u64::from(slice.count)).sum();
        if count == 0 {
            return None;
        }
        // The smallest sample that 95 of 100 do not exceed; from above, because the few are quicker to count.
        let exceeding_max = count - (count * 95).div_ceil(100);
        let mut exceeding = 0;
        let highest = live().map(|slice| slice.highest).max()?;
        let index = (0..=highest).rev().find(|index| {
            exceeding += live().map(|slice| u64::from(slice.buckets[*index])).sum::<u64>();
            exceeding > exceeding_max
        })?;
        #[expect(clippy::cast_precision_loss, reason = "at most two minutes in microseconds")]
        Some(upper_us(index) as f64 / 1000.0)
    }

    /// Samples that are not old.
    pub fn samples(&self, now: Duration) -> u64 {
        let live = self
            .slices
            .iter()
            .filter(|slice| is_live(slice.number, slice_number(now)));
        live.map(|slice| u64::from(slice.count)).sum()
    }

    /// The slice of this number, taken from the oldest when all are in use.
    fn slice(&mut self, number: u64) -> usize {
        if let Some(index) = self.slices.iter().position(|slice| slice.number == number) {
            return index;
        }
        if self.slices.len() < SLICES {
            self.slices.push(Slice {
                number,
                count: 0,
                highest: 0,
                buckets: vec![0; BUCKETS],
            });
            return self.slices.len() - 1;
        }
        let oldest = (0..SLICES)
            .min_by_key(|index| self.slices[*index].number)
            .expect("there are some");
        let slice = &mut self.slices[oldest];
        // A sample that comes later than everything that is kept is counted with the oldest.
        if slice.number < number {
            (slice.number, slice.count, slice.highest) = (number, 0, 0);
            slice.buckets.fill(0);
        }
        oldest
    }
}

fn slice_number(now: Duration) -> u64 {
    now.as_secs() / SLICE.as_secs()
}

fn is_live(number: u64, now: u64) -> bool {
    number <= now && now - number < SLICES as u64
}

/// The bucket of a sample: exact below 32 µs, then 32 for each doubling.
const fn bucket(us: u64) -> usize {
    if us < BUCKETS_PER_DOUBLING {
        return us as usize;
    }
    let shift = us.ilog2() - DOUBLING_BITS;
    (shift as u64 * BUCKETS_PER_DOUBLING + (us >> shift)) as usize
}

/// The longest sample of a bucket.
fn upper_us(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    let shift = (bucket / BUCKETS_PER_DOUBLING).saturating_sub(1);
    let base = bucket - shift * BUCKETS_PER_DOUBLING;
    ((base + 1) << shift) - 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn near(found: f64, expected: f64) -> bool {
        found >= expected * 0.999 && found <= expected * 1.04
    }

    #[test]
    fn without_samples_the_default_is_offered_and_again_when_all_are_old() {
        let mut window = LatencyWindow::new(2.0);
        assert_eq!(
            (window.offered_ms(s(0)).to_bits(), window.p95_ms(s(0))),
            (2.0_f64.to_bits(), None)
        );
        window.record(Duration::from_millis(1000), s(100));
        for now in [s(100), s(124)] {
            assert!(window.p95_ms(now).is_some_and(|p95_ms| near(p95_ms, 1000.0)));
        }
        assert_eq!(
            window.offered_ms(s(130)).to_bits(),
            2.0_f64.to_bits(),
            "half a minute later it is gone"
        );
        assert_eq!(window.samples(s(130)), 0);
    }

    #[test]
    fn microseconds_count() {
        let mut window = LatencyWindow::new(1.0);
        for us in [0, 7, 31, 12] {
            window.record(Duration::from_micros(us), s(1));
        }
        assert_eq!(window.p95_ms(s(1)).map(f64::to_bits), Some(0.031_f64.to_bits()));
        window.record(Duration::from_secs(86_400), s(1));
        assert!(near(window.p95_ms(s(1)).unwrap_or_default(), 120_000.0));
    }

    #[test]
    fn one_slow_sample_of_many_does_not_show() {
        let mut window = LatencyWindow::new(1.0);
        for index in 0..1000_u64 {
            let ms = if index % 25 == 0 { 900 } else { 3 };
            window.record(Duration::from_millis(ms), s(index / 40));
        }
        assert!(near(window.offered_ms(s(25)), 3.0), "{}", window.offered_ms(s(25)));
        // What was slow ages out beside what is fast.
        for second in 26..60 {
            window.record(Duration::from_millis(500), s(second));
        }
        assert!(near(window.p95_ms(s(59)).unwrap_or_default(), 500.0));
        for second in 60..=90 {
            window.record(Duration::from_micros(800), s(second));
        }
        assert!(near(window.p95_ms(s(90)).unwrap_or_default(), 0.8));
    }

    #[test]
    fn few_samples_are_offered_with_a_doubt() {
        let mut window = LatencyWindow::new(1.0);
        for (count, offered) in [(1, 20.0), (4, 20.0), (8, 15.0), (40, 11.0), (400, 10.1)] {
            while window.samples(s(1)) < count {
                window.record(Duration::from_millis(10), s(1));
            }
            assert!(
                near(window.offered_ms(s(1)), offered),
                "{count}: {}",
                window.offered_ms(s(1))
            );
        }
    }

    #[test]
    fn memory_has_a_bound_at_any_rate_and_age() {
        let mut window = LatencyWindow::new(1.0);
        for index in 0..20_000_u64 {
            window.record(Duration::from_micros(index * 37), s(index * 7919 % 100_000));
        }
        assert_eq!(window.slices.len(), SLICES);
        assert!(BUCKETS < 1000 && window.slices.iter().all(|slice| slice.buckets.len() == BUCKETS));
    }

    #[test]
    fn the_floor_offers_half_its_poll() {
        for (interval_ms, offered_ms) in [(500.0, 250.0), (5000.0, 2500.0), (1.0, 1.0)] {
            assert!((floor_latency_ms(interval_ms) - offered_ms).abs() < f64::EPSILON);
        }
    }

    #[test]
    fn a_tenth_is_a_move() {
        for (planned, now, moved) in [
            (10.0, 10.9, false),
            (10.0, 11.0, true),
            (10.0, 9.0, true),
            (10.0, 9.1, false),
            (10.0, 10.0, false),
            (0.0, 0.1, true),
            (0.0, 0.0, false),
            (0.031, 0.034_1, true),
        ] {
            assert_eq!(has_moved(planned, now), moved, "{planned} → {now}");
        }
    }

    proptest! {
        /// The bucketed p95 is the sorted one, or up to a bucket above it.
        #[test]
        fn it_is_the_p95(samples in prop::collection::vec(0_u64..5_000_000, 1..300)) {
            let mut window = LatencyWindow::new(1.0);
            for sample in &samples {
                window.record(Duration::from_micros(*sample), s(3));
            }
            let mut sorted = samples.clone();
            sorted.sort_unstable();
            let exact = sorted[(samples.len() * 95).div_ceil(100) - 1];
            let found = window.p95_ms(s(3)).expect("samples");
            #[expect(clippy::cast_precision_loss, reason = "small")]
            let exact_ms = exact as f64 / 1000.0;
            prop_assert!(found >= exact_ms && found <= exact_ms * 1.032 + 1e-9, "{} for {}", found, exact_ms);
        }
    }
}
