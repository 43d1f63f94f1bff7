//! Offers, cards and moments for the tests.

use openvibe_events_planner::{
    Candidate, Estimate, Offer, Options, Placement, ProviderState, ProviderStates, RateCard, RateCards, ResetPeriod,
    Verdict,
};
use time::macros::date;

/// 2026-10-21T12:00:00Z.
pub(crate) const NOW_MS: i64 = 1_792_584_000_000;

/// An offer whose unit costs this much, with or without a known latency.
pub(crate) fn offer(id: &'static str, cost_usd: f64, latency_ms: impl Into<Option<f64>>) -> Offer {
    let mut offer = Offer::of(id, "p", "");
    offer.pricing.rate_card = None;
    offer.pricing.marginal_usd_per_unit = Some(cost_usd);
    offer.latency_ms = latency_ms.into().map(|ms| ("ack_p95".into(), ms)).into_iter().collect();
    offer
}

/// A card of a metered provider `p`.
pub(crate) fn card(id: &str, unit_size: f64, unit_price_usd: f64, free_allowance: f64) -> RateCard {
    RateCard {
        id: id.to_owned(),
        provider: "p".to_owned(),
        adapter: None,
        metric: "op".to_owned(),
        unit_size,
        unit_price_usd,
        free_allowance,
        reset_period: ResetPeriod::Month,
        region: None,
        effective_from: date!(2026 - 09 - 01),
        effective_until: None,
        source: "https://example.org/prices".to_owned(),
        verified_at: date!(2026 - 09 - 01),
    }
}

/// `used` units half way through a period of twenty days.
pub(crate) fn half_way(used: f64, reserve: f64) -> ProviderStates {
    const DAY_MS: i64 = 86_400_000;
    let state = ProviderState {
        period_start_ms: NOW_MS - 10 * DAY_MS,
        period_end_ms: NOW_MS + 10 * DAY_MS,
        usage: [("op".to_owned(), used)].into(),
        reserve: [("op".to_owned(), reserve)].into(),
        ..ProviderState::default()
    };
    [("p".to_owned(), state)].into_iter().collect()
}

/// The usual options with these cards and this usage.
pub(crate) fn options<'a>(rate_cards: &'a RateCards, states: &'a ProviderStates) -> Options<'a> {
    Options {
        rate_cards,
        states,
        ..Options::at(NOW_MS)
    }
}

/// What an eligible candidate would cost and take.
pub(crate) fn estimate<'a>(placement: &'a Placement, id: &str) -> &'a Estimate {
    match placement.candidate(id) {
        Some(Candidate {
            verdict: Verdict::Eligible(estimate),
            ..
        }) => estimate,
        other => panic!("{id} is not eligible: {other:?}"),
    }
}

/// Why a candidate is excluded.
pub(crate) fn because<'a>(placement: &'a Placement, id: &str) -> &'a str {
    match placement.candidate(id) {
        Some(Candidate {
            verdict: Verdict::Excluded(because),
            ..
        }) => because,
        other => panic!("{id} is not excluded: {other:?}"),
    }
}
