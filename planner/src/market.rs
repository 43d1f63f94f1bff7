//! What there is to choose from at a moment: every carrier with its offer and health, the prices and the usage. A market
//! has an epoch; decisions are planned anew only when another epoch begins.

use std::sync::Arc;

use crate::Text;
use crate::class::Class;
use crate::health::has_moved;
use crate::offer::Offer;
use crate::rate_card::RateCards;
use crate::usage::ProviderStates;

/// Moved usage is looked at this often at most.
const USAGE_PAUSE_MS: i64 = 60_000;
/// Usage that moved only a little is looked at after this long. While an allowance is about to end, every look can move
/// work to and fro, so they are rare.
const USAGE_AGE_MAX_MS: i64 = 6 * 60 * 60 * 1000;

/// Whether a carrier may be chosen. Reasons are shown as they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    /// It works.
    Up,
    /// It works, and something is wrong.
    Degraded(Text),
    /// It does not work.
    Down(Text),
    /// Somebody has switched it off.
    Disabled(Text),
}

impl Health {
    /// Switched off by the environment.
    pub const DISABLED_BY_CONFIGURATION: Self = Self::Disabled(Text::Borrowed("disabled by configuration"));

    /// Its breaker is not closed.
    pub fn breaker_open(carrier: &str) -> Self {
        Self::Down(format!("breaker open ({carrier})").into())
    }
}

/// A carrier at a moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Carrier {
    /// What it can wake.
    pub classes: Vec<Class>,
    /// What it offers; the status in it is replaced by the health.
    pub offer: Offer,
    /// Whether it may be chosen.
    pub health: Health,
}

/// Everything that decisions depend on besides what is asked.
#[derive(Debug, Clone, PartialEq)]
pub struct Market {
    epoch: u64,
    /// Every carrier, in the order in which answers show them.
    pub carriers: Vec<Carrier>,
    /// The prices in force.
    pub cards: Arc<RateCards>,
    /// This month's usage.
    pub states: Arc<ProviderStates>,
    /// When the usage was looked at, in milliseconds since 1970.
    usage_at_ms: i64,
}

impl Market {
    /// The first market of a process.
    pub fn new(carriers: Vec<Carrier>, cards: Arc<RateCards>, states: Arc<ProviderStates>, now_ms: i64) -> Self {
        Self {
            epoch: 1,
            carriers,
            cards,
            states,
            usage_at_ms: now_ms,
        }
    }

    /// The same, where its usage stands for what has not been read yet: it is replaced as soon as another is known.
    #[must_use]
    pub fn usage_unread(self) -> Self {
        Self {
            usage_at_ms: i64::MIN,
            ..self
        }
    }

    /// Its number; decisions of another epoch are out of date.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The market that follows this one, or `None` when nothing has changed that is worth planning anew: a carrier, its
    /// health or its reason; a latency or a forecast by a tenth; a price. What moves slowly is compared with what was
    /// planned with, so it is not missed.
    #[must_use]
    pub fn next(
        &self,
        carriers: Vec<Carrier>,
        cards: Arc<RateCards>,
        states: Arc<ProviderStates>,
        now_ms: i64,
    ) -> Option<Self> {
        let usage_moved = self.usage_moved(&cards, &states, now_ms);
        let moved = usage_moved
            || (!Arc::ptr_eq(&self.cards, &cards) && self.cards != cards)
            || self.carriers.len() != carriers.len()
            || self
                .carriers
                .iter()
                .zip(&carriers)
                .any(|(before, now)| carrier_moved(before, now));
        if !moved {
            return None;
        }
        let (states, usage_at_ms) = if usage_moved {
            (states, now_ms)
        } else {
            (Arc::clone(&self.states), self.usage_at_ms)
        };
        Some(Self {
            epoch: self.epoch + 1,
            carriers,
            cards,
            states,
            usage_at_ms,
        })
    }

    /// The same again as another epoch, after something changed that a market does not hold, such as the policies.
    #[must_use]
    pub fn renewed(&self) -> Self {
        Self {
            epoch: self.epoch + 1,
            ..self.clone()
        }
    }

    fn usage_moved(&self, cards: &RateCards, states: &ProviderStates, now_ms: i64) -> bool {
        let age = now_ms.saturating_sub(self.usage_at_ms);
        if age < USAGE_PAUSE_MS {
            return false;
        }
        let expected = |states: &ProviderStates, provider: &str, metric: &str| {
            states.get(provider).map_or(0.0, |state| state.expected(metric, now_ms))
        };
        cards.iter().any(|card| {
            let before = expected(&self.states, &card.provider, &card.metric);
            let now = expected(states, &card.provider, &card.metric);
            has_moved(before, now) || (age >= USAGE_AGE_MAX_MS && before.to_bits() != now.to_bits())
        })
    }
}

fn carrier_moved(before: &Carrier, now: &Carrier) -> bool {
    let (old, new) = (&before.offer.latency_ms, &now.offer.latency_ms);
    let latency_moved = old.len() != new.len()
        || old
            .iter()
            .zip(new)
            .any(|((op, old), (other, new))| op != other || has_moved(*old, *new));
    latency_moved
        || before.health != now.health
        || before.classes != now.classes
        || before.offer.id != now.offer.id
        || before.offer.provider != now.offer.provider
        || before.offer.region != now.offer.region
        || before.offer.regions != now.offer.regions
        || before.offer.trust != now.offer.trust
        || before.offer.capabilities != now.offer.capabilities
        || before.offer.capacity != now.offer.capacity
        || before.offer.pricing != now.offer.pricing
}
