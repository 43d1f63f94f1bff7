//! A broker that is there or not, and how the carrier and the guard around it see that.

use std::time::Duration;

use super::carriers::{DEADLINE, KNOWN};
use super::dice::Dice;
use super::scenario::CarrierSetup;
use crate::FLOOR;
use crate::class::Class;
use crate::health::{AGES_OUT_AFTER, Breaker, BreakerState, LatencyWindow, OPENS_AFTER};
use crate::intent::{capabilities, latency_op};
use crate::market::{Carrier, Health};
use crate::offer::Offer;

/// A carrier without traffic is asked this often.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// Most samples that are drawn for a carrier at once: more would not change their p95.
const SAMPLES_MAX: u64 = 32;

/// A broker as it is, and what the guard around its carrier knows.
pub(super) struct Broker {
    pub(super) id: String,
    pub(super) rate_card: String,
    carrier: Carrier,
    deadline: Duration,
    pub(super) usual_latency_ms: f64,
    pub(super) latency_ms: f64,
    pub(super) gone: bool,
    pub(super) stalled: bool,
    pub(super) disabled: bool,
    /// The carrier has noticed that its connection broke.
    noticed: bool,
    breaker: Breaker,
    windows: Vec<(Class, Sampled)>,
}

struct Sampled {
    window: LatencyWindow,
    last: Option<Duration>,
}

/// What became of signals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    /// They woke somebody.
    Woke,
    /// They are lost, and the poll finds what they were about.
    Lost,
}

impl Broker {
    pub(super) fn new(setup: &CarrierSetup) -> Self {
        let mut offer = Offer::of(setup.id.clone(), setup.provider.clone(), setup.rate_card.clone());
        let widest = if setup.classes.contains(&Class::Stream) {
            Class::Stream
        } else {
            Class::Queue
        };
        offer.capabilities = capabilities(widest).iter().map(|name| (*name).into()).collect();
        offer.latency_ms = setup
            .classes
            .iter()
            .map(|class| (latency_op(*class).into(), setup.latency_ms))
            .collect();
        let window = |class: &Class| {
            (
                *class,
                Sampled {
                    window: LatencyWindow::new(setup.latency_ms),
                    last: None,
                },
            )
        };
        Self {
            id: setup.id.clone(),
            rate_card: setup.rate_card.clone(),
            carrier: Carrier {
                classes: setup.classes.clone(),
                offer,
                health: Health::Up,
            },
            deadline: KNOWN
                .iter()
                .find(|known| known.id == setup.id)
                .map_or(DEADLINE, |known| known.deadline),
            usual_latency_ms: setup.latency_ms,
            latency_ms: setup.latency_ms,
            gone: false,
            stalled: false,
            disabled: false,
            noticed: false,
            breaker: Breaker::new(),
            windows: setup.classes.iter().map(window).collect(),
        }
    }

    fn is_floor(&self) -> bool {
        self.id == FLOOR
    }

    pub(super) fn answers(&self) -> bool {
        !self.gone && !self.stalled
    }

    /// When the breaker wants to be asked next, while it is not closed.
    pub(super) fn trial_at(&self, now: Duration) -> Option<Duration> {
        match self.breaker.state(now) {
            BreakerState::Open { trial_at } => Some(trial_at),
            _ => None,
        }
    }

    pub(super) fn provider(&self) -> &str {
        &self.carrier.offer.provider
    }

    /// The carrier's side of a moment: it notices what happened to its connection, its guard makes the trials that are due
    /// and asks it where nobody else does. Returns whether its breaker turned.
    pub(super) fn watch(&mut self, now: Duration, step: Duration, dice: &mut Dice) -> bool {
        if self.is_floor() || self.disabled {
            return false;
        }
        if !self.gone {
            self.noticed = false;
        }
        if self.noticed {
            // A carrier that knows it is not connected is not tried: the trial waits for the connection.
            return false;
        }
        if !self.breaker.is_closed() {
            let Some(permit) = self.breaker.permit(now) else {
                return false;
            };
            if self.answers() {
                return self.breaker.succeeded(permit).is_some();
            }
            self.breaker.failed(permit, now, dice.roll());
            return false;
        }
        let mut turned = false;
        for index in 0..self.windows.len() {
            let (class, sampled) = &self.windows[index];
            let (class, due) = (
                *class,
                sampled.last.is_none_or(|last| now + step > last + PROBE_INTERVAL),
            );
            if due && self.answers() {
                let probes = step.min(AGES_OUT_AFTER).as_secs() / PROBE_INTERVAL.as_secs();
                self.sample(class, probes.max(1), end_of(now, step), dice);
            } else if due && self.breaker.is_closed() {
                turned |= self.fail(now, dice);
                self.windows[index].1.last = Some(now);
            }
        }
        turned
    }

    /// The carrier as the planner sees it.
    pub(super) fn offered(&mut self, now: Duration) -> Carrier {
        if !self.is_floor() {
            for ((_, ms), (_, sampled)) in self.carrier.offer.latency_ms.iter_mut().zip(&self.windows) {
                *ms = sampled.window.offered_ms(now);
            }
        }
        self.carrier.health = if self.disabled {
            Health::Disabled("disabled by an operator".into())
        } else if self.noticed {
            Health::Down(format!("not connected ({})", self.id).into())
        } else if self.breaker.is_closed() {
            Health::Up
        } else {
            Health::breaker_open(&self.id)
        };
        self.carrier.clone()
    }

    /// What is wrong with it, in its own words.
    pub(super) fn trouble(&self) -> Option<&str> {
        match &self.carrier.health {
            Health::Up => None,
            Health::Degraded(reason) | Health::Down(reason) | Health::Disabled(reason) => Some(reason),
        }
    }

    /// Sends signals through it within a step. Returns what became of them and whether the breaker turned.
    pub(super) fn send(
        &mut self,
        class: Class,
        signals: u64,
        now: Duration,
        step: Duration,
        dice: &mut Dice,
    ) -> (Sent, bool) {
        if self.is_floor() {
            return (Sent::Woke, false);
        }
        if self.disabled {
            return (Sent::Lost, false);
        }
        if self.answers() {
            let Some(permit) = self.breaker.permit(now).filter(|permit| !permit.is_trial()) else {
                return (Sent::Lost, false);
            };
            self.breaker.succeeded(permit);
            self.sample(class, signals, end_of(now, step), dice);
            return (Sent::Woke, false);
        }
        // A call that is refused fails at once; one that is not answered holds up those behind it for its deadline.
        let calls = if self.stalled {
            u64::try_from(step.as_millis() / self.deadline.as_millis())
                .unwrap_or(u64::MAX)
                .max(1)
        } else {
            u64::from(OPENS_AFTER)
        };
        let mut turned = false;
        for _ in 0..calls.min(signals).min(u64::from(OPENS_AFTER)) {
            if self.breaker.is_closed() {
                turned |= self.fail(now, dice);
            }
        }
        (Sent::Lost, turned)
    }

    /// The end of a step: a broken connection has been noticed by now.
    pub(super) fn settle(&mut self) {
        self.noticed = self.gone;
    }

    fn fail(&mut self, now: Duration, dice: &mut Dice) -> bool {
        let permit = self.breaker.permit(now);
        permit
            .and_then(|permit| self.breaker.failed(permit, now, dice.roll()))
            .is_some()
    }

    fn sample(&mut self, class: Class, count: u64, now: Duration, dice: &mut Dice) {
        let latency_ms = self.latency_ms;
        let Some((_, sampled)) = self.windows.iter_mut().find(|(own, _)| *own == class) else {
            return;
        };
        for _ in 0..count.min(SAMPLES_MAX) {
            sampled
                .window
                .record(Duration::from_secs_f64(spread(latency_ms, dice.roll()) / 1000.0), now);
        }
        if count > 0 {
            sampled.last = Some(now);
        }
    }

    /// What a wake-up takes on average, in milliseconds.
    pub(super) fn mean_ms(&self) -> f64 {
        if self.is_floor() {
            self.latency_ms
        } else {
            spread(self.latency_ms, 0.5)
        }
    }
}

/// The last moment of a step: what was measured then is what the next look finds, however long the step is.
fn end_of(now: Duration, step: Duration) -> Duration {
    now + step.saturating_sub(Duration::from_millis(1))
}

/// Latencies are spread evenly so that the given one is their p95.
fn spread(p95_ms: f64, roll: f64) -> f64 {
    const LEAST: f64 = 0.3;
    p95_ms * (LEAST + roll * (1.0 - LEAST) / 0.95)
}
