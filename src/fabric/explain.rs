//! What operators are told: what would be decided now and why, and how each carrier stands.

use planner::{Ask, Class, Health, Intent, Key, Offer, Placement, PolicyKey, Status};

use crate::domain::time::Millis;

use super::Fabric;

/// What would be decided at this moment, in this process.
#[derive(Debug, Clone, PartialEq)]
pub struct Explained {
    /// What is woken.
    pub class: Class,
    /// The choice, every candidate and the reasons.
    pub placement: Placement,
}

/// How a carrier stands in this process.
#[derive(Debug, Clone, PartialEq)]
pub struct CarrierState {
    /// Its id.
    pub id: &'static str,
    /// What it can wake.
    pub classes: &'static [Class],
    /// `up`, `degraded`, `down` or `disabled`.
    pub state: &'static str,
    /// What is wrong.
    pub reason: Option<String>,
    /// `closed`, `open` or `half-open`.
    pub breaker: &'static str,
    /// Milliseconds until an open breaker lets a trial through.
    pub trial_in_ms: Option<u64>,
    /// What it offers for each class, in milliseconds.
    pub latency_ms: Vec<(Class, f64)>,
    /// Signals that wait to be sent.
    pub queue_depth: usize,
    /// Whose usage they add to.
    pub provider: &'static str,
    /// What its operations are counted as.
    pub metric: &'static str,
    /// Operations this month, by every process, as far as they are counted.
    pub used: f64,
    /// Its rate card.
    pub rate_card: &'static str,
    /// Whether that card is in force; without it the carrier is never chosen.
    pub priced: bool,
    /// Switched off by the environment.
    pub by_configuration: bool,
    /// Switched off by an operator.
    pub by_operator: bool,
    /// What placement weighs it by.
    pub offer: Offer,
    /// When it was looked at.
    pub checked_at: Millis,
}

impl Fabric {
    /// What would be decided now for a policy, or for a key of it whose waiting deliveries are on `backlog`. Changes
    /// nothing.
    pub fn explain(&self, policy: &PolicyKey, intent: &Intent, key: Option<(&str, Option<&str>)>) -> Explained {
        self.renew_market();
        let ask = Ask {
            policy,
            intent,
            key: key.map(|(name, backlog)| Key { name, backlog }),
        };
        let market = self.market.load();
        let decision = self.places.lock().memory.explain(ask, &market, (self.clock)().0);
        Explained {
            class: decision.class,
            placement: decision.placement,
        }
    }

    /// How every configured carrier stands, in the order of the registry.
    pub fn carriers(&self) -> Vec<CarrierState> {
        let now = (self.clock)();
        let cards = self.cards.load();
        let state = |guard: &std::sync::Arc<super::Guard>| {
            let snapshot = guard.snapshot();
            let (state, reason) = match snapshot.health {
                Health::Up => ("up", None),
                Health::Degraded(reason) => ("degraded", Some(reason.into_owned())),
                Health::Down(reason) => ("down", Some(reason.into_owned())),
                Health::Disabled(reason) => ("disabled", Some(reason.into_owned())),
            };
            let status = match state {
                "up" => Status::Up,
                "degraded" => Status::Degraded,
                _ => Status::Down,
            };
            let descriptor = guard.descriptor;
            let switches = guard.switches();
            CarrierState {
                id: descriptor.id,
                classes: descriptor.classes,
                state,
                reason,
                breaker: snapshot.breaker.as_str(),
                trial_in_ms: snapshot
                    .trial_in
                    .map(|wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)),
                latency_ms: snapshot.latency_ms,
                queue_depth: snapshot.waiting,
                provider: descriptor.provider,
                metric: descriptor.price_unit,
                used: self.counts.used(descriptor.provider, descriptor.price_unit, now),
                rate_card: descriptor.rate_card,
                priced: cards.get(descriptor.rate_card).is_some(),
                by_configuration: switches.by_configuration,
                by_operator: switches.by_operator,
                offer: Offer {
                    status: Some(status),
                    ..guard.offer()
                },
                checked_at: now,
            }
        };
        self.guards.iter().map(state).collect()
    }
}
