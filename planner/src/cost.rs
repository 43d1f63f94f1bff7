//! What the next units of an offer cost: by its card after what is free, by its load when it is paid already, or unknown.

use crate::offer::Offer;
use crate::plan::{Options, OwnedLoad};
use crate::rate_card::RateCard;
use crate::requirements::{LatencyClass, Requirements};
use crate::usage::ProviderState;

/// USD for the wanted units of an offer; infinite when nothing prices it.
pub(crate) fn cost(wanted: &Requirements, offer: &Offer, options: &Options<'_>) -> f64 {
    let units = if wanted.units == 0.0 { 1.0 } else { wanted.units };
    let pricing = &offer.pricing;
    if pricing.prepaid {
        return owned_load(&offer.capacity.utilization, &options.owned) * units;
    }
    let card = pricing.rate_card.as_ref().and_then(|id| options.rate_cards.get(id));
    let cost = match card {
        Some(card) => {
            let states = options.states;
            let state = states.get(&card.provider).or_else(|| states.get(&offer.provider));
            let urgent = matches!(
                wanted.latency_class,
                Some(LatencyClass::Critical | LatencyClass::Realtime)
            );
            marginal(card, state, units, options.now_ms, urgent)
        }
        None => pricing.marginal_usd_per_unit.map_or(f64::INFINITY, |usd| usd * units),
    };
    if cost.is_nan() { f64::INFINITY } else { cost }
}

/// USD for units that come on top of what the provider is expected to have used by the end of its period.
fn marginal(card: &RateCard, state: Option<&ProviderState>, units: f64, now_ms: i64, urgent: bool) -> f64 {
    let mut allowance = card.free_allowance;
    let mut expected = 0.0;
    if let Some(state) = state {
        expected = state.expected(&card.metric, now_ms);
        let reserve = if urgent {
            0.0
        } else {
            state.reserve.get(&card.metric).copied().unwrap_or(0.0)
        };
        allowance = card.free_allowance * (1.0 - reserve);
    }
    let difference = card.price(expected + units, allowance) - card.price(expected, allowance);
    difference.max(0.0)
}

/// USD for a unit of what is paid already: nothing until it is busy, then growing with the square of what is over.
fn owned_load(utilization: &[f64], owned: &OwnedLoad) -> f64 {
    let load = utilization.iter().copied().fold(0.0, f64::max);
    if load <= owned.busy {
        0.0
    } else if load >= owned.full {
        owned.max_usd
    } else {
        owned.max_usd * ((load - owned.busy) / (owned.full - owned.busy)).powi(2)
    }
}
