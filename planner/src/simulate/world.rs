//! What happens in a scenario, and how much traffic there is.

use std::time::Duration;

use super::broker::Broker;
use super::scenario::{Happening, Scenario, Traffic, What};
use crate::rate_card::RateCards;

/// What is different now from how things are usually.
pub(super) fn happen(
    scenario: &Scenario,
    now: Duration,
    brokers: &mut [Broker],
    lanes: &mut [Conditions],
) -> RateCards {
    for broker in &mut *brokers {
        (broker.gone, broker.stalled, broker.disabled) = (false, false, false);
        broker.latency_ms = broker.usual_latency_ms;
    }
    for lane in &mut *lanes {
        (lane.factor, lane.backlog) = (1.0, false);
    }
    let mut cards: Vec<_> = scenario.cards.iter().cloned().collect();
    let in_force = |one: &&Happening| one.at.0 <= now && one.until.is_none_or(|until| now < until.0);
    for happening in scenario.happenings.iter().filter(in_force) {
        let broker = |brokers: &mut [Broker], id: &str, change: fn(&mut Broker)| {
            brokers.iter_mut().filter(|broker| broker.id == id).for_each(change);
        };
        match &happening.what {
            What::Outage { carrier } => broker(brokers, carrier, |broker| broker.gone = true),
            What::Stall { carrier } => broker(brokers, carrier, |broker| broker.stalled = true),
            What::Disabled { carrier } => broker(brokers, carrier, |broker| broker.disabled = true),
            What::Latency { carrier, latency_ms } => {
                for broker in brokers.iter_mut().filter(|broker| broker.id == *carrier) {
                    broker.latency_ms = *latency_ms;
                }
            }
            What::Price {
                rate_card,
                unit_price_usd,
                free_allowance,
            } => {
                for card in cards.iter_mut().filter(|card| card.id == *rate_card) {
                    card.unit_price_usd = unit_price_usd.unwrap_or(card.unit_price_usd);
                    card.free_allowance = free_allowance.unwrap_or(card.free_allowance);
                }
            }
            What::Backlog { traffic } => {
                for (lane, _) in lanes
                    .iter_mut()
                    .zip(&scenario.traffic)
                    .filter(|(_, own)| own.name == *traffic)
                {
                    lane.backlog = true;
                }
            }
            What::Surge { traffic, factor } => {
                for (lane, _) in lanes
                    .iter_mut()
                    .zip(&scenario.traffic)
                    .filter(|(_, own)| own.name == *traffic)
                {
                    lane.factor *= factor;
                }
            }
        }
    }
    cards.into_iter().collect()
}

/// What holds for a stream of events now.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Conditions {
    pub(super) factor: f64,
    pub(super) backlog: bool,
}

/// Events a second of a stream at a moment: least at four in the morning, most at four in the afternoon, UTC.
pub(super) fn rate(traffic: &Traffic, conditions: Conditions, at_ms: i64) -> f64 {
    const DAY_MS: i64 = 86_400_000;
    const LEAST_AT: f64 = 4.0 / 24.0;
    #[expect(clippy::cast_precision_loss, reason = "a part of a day")]
    let day = at_ms.rem_euclid(DAY_MS) as f64 / DAY_MS as f64;
    let swing = 1.0 - traffic.daily_swing * ((day - LEAST_AT) * std::f64::consts::TAU).cos();
    traffic.per_second * conditions.factor * swing
}
