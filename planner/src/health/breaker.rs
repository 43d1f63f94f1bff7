//! Keeps calls away from a carrier that keeps failing, and lets one through now and then to see whether it is back.
//!
//! Times are durations since a moment of the driver's choice, on a clock that never goes back.

use std::time::Duration;

/// Failures in a row that open it.
pub const OPENS_AFTER: u32 = 5;
/// From opening to the first trial.
pub const PAUSE_MIN: Duration = Duration::from_secs(1);
/// The longest pause between two trials.
pub const PAUSE_MAX: Duration = Duration::from_secs(60);
/// After this long a trial of which nothing was heard no longer stands in the way of another.
pub const TRIAL_MAX: Duration = Duration::from_secs(10);
/// How much of a pause jitter can take away, so that several processes do not try at the same moment.
const JITTER: f64 = 0.2;

/// What a breaker lets through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BreakerState {
    /// Every call.
    Closed,
    /// No call until `trial_at`.
    Open {
        /// When a trial may be made.
        trial_at: Duration,
    },
    /// One call at a time: the trial.
    HalfOpen,
}

impl BreakerState {
    /// Its name in answers and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open { .. } => "open",
            Self::HalfOpen => "half-open",
        }
    }
}

/// A turn that is worth a line in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Calls no longer pass; a trial may be made after the pause.
    Opened {
        /// Until the trial.
        pause: Duration,
    },
    /// Calls pass again.
    Closed,
}

/// The right to make one call. Its result is told with [`Breaker::succeeded`] or [`Breaker::failed`]; a result that comes
/// after the breaker has opened or closed meanwhile changes nothing.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a permit is for a call, whose result the breaker wants to know"]
pub struct Permit {
    /// The time of the breaker between two changes, or one trial.
    term: u64,
    trial: bool,
}

impl Permit {
    /// Whether it is the one call that decides about closing: it should be cheap to lose.
    pub fn is_trial(&self) -> bool {
        self.trial
    }
}

/// The breaker of one carrier.
#[derive(Debug, Clone)]
pub struct Breaker {
    failures: u32,
    term: u64,
    opened: Option<Opened>,
    pause_max: Duration,
}

#[derive(Debug, Clone, Copy)]
struct Opened {
    /// The pause that led or leads to the trial, without jitter.
    pause: Duration,
    trial_at: Duration,
    /// When the trial that runs was begun.
    trying_since: Option<Duration>,
}

impl Default for Breaker {
    fn default() -> Self {
        Self::new()
    }
}

impl Breaker {
    /// A closed breaker.
    pub fn new() -> Self {
        Self::pausing(PAUSE_MAX)
    }

    /// A closed breaker whose pauses never get longer than this.
    pub fn pausing(pause_max: Duration) -> Self {
        Self {
            failures: 0,
            term: 0,
            opened: None,
            pause_max,
        }
    }

    /// What it lets through at a moment. Reading changes nothing.
    pub fn state(&self, now: Duration) -> BreakerState {
        match self.opened {
            None => BreakerState::Closed,
            Some(opened) if now < opened.trial_at => BreakerState::Open {
                trial_at: opened.trial_at,
            },
            Some(_) => BreakerState::HalfOpen,
        }
    }

    /// Whether calls pass. A carrier whose breaker waits for a trial is not one to choose.
    pub fn is_closed(&self) -> bool {
        self.opened.is_none()
    }

    /// Asks for a call; `None` while none may be made.
    pub fn permit(&mut self, now: Duration) -> Option<Permit> {
        let Some(opened) = &mut self.opened else {
            return Some(Permit {
                term: self.term,
                trial: false,
            });
        };
        let busy = opened.trying_since.is_some_and(|since| now < since + TRIAL_MAX);
        if now < opened.trial_at || busy {
            return None;
        }
        opened.trying_since = Some(now);
        // The result of an earlier trial, should it come now, is no longer waited for.
        self.term += 1;
        Some(Permit {
            term: self.term,
            trial: true,
        })
    }

    /// The call was answered.
    pub fn succeeded(&mut self, permit: Permit) -> Option<Change> {
        if permit.term != self.term {
            return None;
        }
        self.failures = 0;
        self.opened.take()?;
        self.term += 1;
        Some(Change::Closed)
    }

    /// The call was answered, which says nothing about so many failures in a row of calls of another kind.
    pub fn eased(&mut self, permit: Permit, standing: u32) -> Option<Change> {
        if permit.term != self.term {
            return None;
        }
        let change = self.succeeded(permit);
        self.failures = standing;
        change
    }

    /// The call failed or took too long. `jitter`, from 0 to 1, shortens the pause that may follow by up to a fifth.
    pub fn failed(&mut self, permit: Permit, now: Duration, jitter: f64) -> Option<Change> {
        if permit.term != self.term {
            return None;
        }
        let pause = match self.opened {
            Some(opened) => (opened.pause * 2).min(self.pause_max),
            None => {
                self.failures += 1;
                if self.failures < OPENS_AFTER {
                    return None;
                }
                PAUSE_MIN.min(self.pause_max)
            }
        };
        let shortened = pause.mul_f64(1.0 - JITTER * jitter.clamp(0.0, 1.0));
        self.failures = 0;
        self.term += 1;
        self.opened = Some(Opened {
            pause,
            trial_at: now + shortened,
            trying_since: None,
        });
        Some(Change::Opened { pause: shortened })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn permit(breaker: &mut Breaker, now: Duration) -> Permit {
        breaker.permit(now).expect("a permit")
    }

    fn open(now: Duration) -> Breaker {
        let mut breaker = Breaker::new();
        for _ in 0..OPENS_AFTER {
            let permit = permit(&mut breaker, now);
            breaker.failed(permit, now, 0.0);
        }
        breaker
    }

    #[test]
    fn five_failures_in_a_row_open_it() {
        let mut breaker = Breaker::new();
        for call in [false, false, false, false, true, false, false, false, false] {
            let permit = permit(&mut breaker, ms(5));
            let change = if call {
                breaker.succeeded(permit)
            } else {
                breaker.failed(permit, ms(5), 0.0)
            };
            assert_eq!((change, breaker.state(ms(5))), (None, BreakerState::Closed));
        }
        let fifth = permit(&mut breaker, ms(6));
        assert_eq!(
            breaker.failed(fifth, ms(6), 0.0),
            Some(Change::Opened { pause: PAUSE_MIN })
        );
        assert_eq!(breaker.state(ms(7)), BreakerState::Open { trial_at: ms(1006) });
        assert!(!breaker.is_closed());
        assert_eq!(breaker.permit(ms(1005)), None);
    }

    #[test]
    fn reading_changes_nothing_however_late() {
        let mut breaker = open(ms(0));
        for now in [999, 1000, 60_000, 3_600_000] {
            let expected = if now < 1000 {
                BreakerState::Open { trial_at: ms(1000) }
            } else {
                BreakerState::HalfOpen
            };
            assert_eq!((breaker.state(ms(now)), breaker.state(ms(now))), (expected, expected));
        }
        assert!(!breaker.is_closed());
        let trial = permit(&mut breaker, ms(3_600_000));
        assert!(trial.is_trial());
    }

    #[test]
    fn one_trial_at_a_time_and_a_failed_one_opens_it_again_for_twice_as_long() {
        let mut breaker = open(ms(0));
        let mut now = ms(0);
        for pause_s in [1, 2, 4, 8, 16, 32, 60, 60] {
            let pause = Duration::from_secs(pause_s);
            assert_eq!(
                breaker.permit(now + pause - ms(1)),
                None,
                "before the pause of {pause:?} is over"
            );
            now += pause;
            let trial = permit(&mut breaker, now);
            assert_eq!(
                (breaker.permit(now), breaker.permit(now + ms(9_999))),
                (None, None),
                "a second trial"
            );
            let change = breaker.failed(trial, now, 0.0);
            assert!(matches!(change, Some(Change::Opened { .. })));
            assert!(matches!(breaker.state(now), BreakerState::Open { .. }));
        }
        now += PAUSE_MAX;
        let trial = permit(&mut breaker, now);
        assert_eq!(breaker.succeeded(trial), Some(Change::Closed));
        assert_eq!(breaker.state(now), BreakerState::Closed);
        // The next opening begins with the short pause.
        for _ in 1..OPENS_AFTER {
            let one = permit(&mut breaker, now);
            assert_eq!(breaker.failed(one, now, 0.0), None);
        }
        let last = permit(&mut breaker, now);
        assert_eq!(
            breaker.failed(last, now, 0.0),
            Some(Change::Opened { pause: PAUSE_MIN })
        );
    }

    #[test]
    fn pauses_have_the_bound_they_were_given() {
        let mut breaker = Breaker::pausing(PAUSE_MIN);
        for _ in 0..OPENS_AFTER {
            let one = permit(&mut breaker, ms(0));
            breaker.failed(one, ms(0), 0.0);
        }
        for second in 1..5 {
            let trial = permit(&mut breaker, ms(second * 1000));
            let change = breaker.failed(trial, ms(second * 1000), 0.0);
            assert_eq!(change, Some(Change::Opened { pause: PAUSE_MIN }));
        }
    }

    #[test]
    fn an_answer_to_another_kind_of_call_leaves_the_failures_that_stand() {
        let mut breaker = Breaker::new();
        for standing in 1..OPENS_AFTER {
            let one = permit(&mut breaker, ms(0));
            assert_eq!(breaker.failed(one, ms(0), 0.0), None);
            for _ in 0..3 {
                let other = permit(&mut breaker, ms(0));
                assert_eq!(breaker.eased(other, standing), None);
            }
        }
        let fifth = permit(&mut breaker, ms(0));
        assert!(matches!(breaker.failed(fifth, ms(0), 0.0), Some(Change::Opened { .. })));
        let trial = permit(&mut breaker, ms(1000));
        assert_eq!(breaker.eased(trial, 0), Some(Change::Closed));
    }

    #[test]
    fn jitter_only_shortens_a_pause() {
        for (jitter, pause_ms) in [(0.0, 1000), (0.5, 900), (1.0, 800), (7.0, 800), (-1.0, 1000)] {
            let mut breaker = open(ms(0));
            // From the second pause on it is seen by itself.
            let trial = permit(&mut breaker, ms(1000));
            let change = breaker.failed(trial, ms(1000), jitter);
            assert_eq!(
                change,
                Some(Change::Opened {
                    pause: ms(pause_ms * 2)
                }),
                "{jitter}"
            );
        }
    }

    #[test]
    fn what_began_before_a_change_has_no_say_after_it() {
        let mut breaker = Breaker::new();
        let early: Vec<Permit> = (0..3).map(|_| permit(&mut breaker, ms(0))).collect();
        for _ in 0..OPENS_AFTER {
            let one = permit(&mut breaker, ms(0));
            breaker.failed(one, ms(0), 0.0);
        }
        let mut early = early.into_iter();
        assert_eq!(
            breaker.succeeded(early.next().expect("three")),
            None,
            "a late success closes nothing"
        );
        assert_eq!(breaker.failed(early.next().expect("three"), ms(900), 0.0), None);
        assert_eq!(
            breaker.state(ms(900)),
            BreakerState::Open { trial_at: ms(1000) },
            "a late failure delays nothing"
        );
        let trial = permit(&mut breaker, ms(1000));
        assert_eq!(breaker.succeeded(trial), Some(Change::Closed));
        assert_eq!(breaker.failed(early.next().expect("three"), ms(1001), 0.0), None);
    }

    #[test]
    fn a_trial_that_was_never_heard_of_again_blocks_nobody_for_long() {
        let mut breaker = open(ms(0));
        let lost = permit(&mut breaker, ms(1000));
        assert_eq!(breaker.permit(ms(10_999)), None);
        let next = permit(&mut breaker, ms(11_000));
        assert_eq!(breaker.succeeded(lost), None, "it is no longer waited for");
        assert_eq!(breaker.succeeded(next), Some(Change::Closed));
    }

    proptest! {
        /// Whatever happens in whatever order: while open nothing passes, while half-open one at a time, and it closes
        /// only by the trial that was asked for last.
        #[test]
        fn it_never_lets_two_trials_run_and_always_recovers(
            steps in prop::collection::vec((0_u64..3000, 0_u8..4, any::<prop::sample::Index>()), 1..200),
        ) {
            let mut breaker = Breaker::new();
            let mut now = Duration::ZERO;
            let mut running: Vec<(Duration, Permit)> = Vec::new();
            for (wait, step, which) in steps {
                now += ms(wait);
                let before = breaker.state(now);
                match step {
                    0 | 1 => if let Some(permit) = breaker.permit(now) {
                        prop_assert_eq!(permit.is_trial(), before == BreakerState::HalfOpen);
                        if permit.is_trial() {
                            let live = running.iter().filter(|(since, one)| {
                                one.is_trial() && one.term == permit.term - 1 && now < *since + TRIAL_MAX
                            });
                            prop_assert_eq!(live.count(), 0, "a second trial");
                        }
                        running.push((now, permit));
                    } else {
                        prop_assert_ne!(before, BreakerState::Closed);
                    },
                    _ if running.is_empty() => {}
                    _ => {
                        let (_, permit) = running.swap_remove(which.index(running.len()));
                        let change = if step == 2 { breaker.succeeded(permit) } else { breaker.failed(permit, now, 0.5) };
                        match change {
                            Some(Change::Closed) => prop_assert_ne!(before, BreakerState::Closed),
                            Some(Change::Opened { pause }) => prop_assert!(pause <= PAUSE_MAX && pause >= ms(800)),
                            None => {}
                        }
                    }
                }
                prop_assert_eq!(breaker.is_closed(), breaker.state(now) == BreakerState::Closed);
            }
            now += PAUSE_MAX + TRIAL_MAX;
            let permit = breaker.permit(now).expect("a call may be made in the end");
            breaker.succeeded(permit);
            prop_assert!(breaker.is_closed());
        }
    }
}
