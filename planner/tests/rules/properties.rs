//! What holds for any offers and prices.

use openvibe_events_planner::{
    LatencyClass, MIN_GAIN, Objective, Offer, Options, Placement, ProviderStates, RateCards, Requirements, Status,
    Verdict, plan,
};
use proptest::prelude::*;

use crate::offers::{NOW_MS, card, options};

/// An offer as carriers make them: healthy or not, with or without a latency, with a card or without.
fn any_offer() -> impl Strategy<Value = Offer> {
    let status = prop_oneof![3 => Just(Some(Status::Up)), 1 => Just(Some(Status::Down)), 1 => Just(None)];
    let latency = prop_oneof![Just(None), (0.0_f64..300.0).prop_map(Some), Just(Some(5.0))];
    let price = prop_oneof![
        Just(Some(0.0)),
        Just(Some(2e-7)),
        (0.0_f64..1e-6).prop_map(Some),
        Just(None)
    ];
    (status, latency, price).prop_map(|(status, latency, price)| {
        let mut offer = Offer::of("", "p", "none");
        offer.status = status;
        offer.latency_ms = latency.map(|ms| ("ack_p95".into(), ms)).into_iter().collect();
        offer.pricing.marginal_usd_per_unit = price;
        offer
    })
}

fn any_offers() -> impl Strategy<Value = Vec<Offer>> {
    prop::collection::vec(any_offer(), 0..6).prop_map(|mut offers| {
        for (index, offer) in offers.iter_mut().enumerate() {
            offer.id = format!("c{index}").into();
        }
        offers
    })
}

fn any_wanted() -> impl Strategy<Value = Requirements> {
    let objective = prop_oneof![
        Just(Objective::Balanced),
        Just(Objective::Cheapest),
        Just(Objective::LowestLatency),
        Just(Objective::Correctness)
    ];
    let class = prop_oneof![
        Just(None),
        Just(Some(LatencyClass::Interactive)),
        Just(Some(LatencyClass::Critical))
    ];
    let ceiling = prop_oneof![Just(None), (0.0_f64..300.0).prop_map(Some)];
    (objective, class, ceiling).prop_map(|(objective, latency_class, max_latency_ms)| Requirements {
        objective,
        latency_class,
        max_latency_ms,
        ..Requirements::default()
    })
}

fn score(placement: &Placement, id: &str) -> Option<f64> {
    match &placement.candidate(id)?.verdict {
        Verdict::Eligible(estimate) => estimate.score,
        Verdict::Excluded(_) => None,
    }
}

fn options_from(current: Option<&str>) -> Options<'_> {
    Options {
        current,
        ..Options::at(NOW_MS)
    }
}

proptest! {
    #[test]
    fn never_an_excluded_or_unpriced_carrier(
        wanted in any_wanted(), offers in any_offers(), unpriced in 0_usize..6, current in "c[0-6]",
    ) {
        let mut offers = offers;
        let cards: RateCards = [card("priced", 1.0, 2e-7, 0.0)].into_iter().collect();
        let states = ProviderStates::none();
        for (index, offer) in offers.iter_mut().enumerate() {
            offer.pricing.marginal_usd_per_unit = None;
            offer.pricing.rate_card = Some(if index == unpriced { "missing" } else { "priced" }.into());
        }
        let placement = plan(&wanted, &offers, &Options { current: Some(&current), ..options(&cards, &states) });
        prop_assert_eq!(placement.candidates.len(), offers.len());
        let Some(selected) = &placement.selected else {
            prop_assert!(offers.iter().all(|offer| score(&placement, &offer.id).is_none()), "somebody could be chosen");
            return Ok(());
        };
        prop_assert!(score(&placement, selected).is_some());
        prop_assert_ne!(selected.as_ref(), format!("c{unpriced}"), "no price is not a price of nothing");
    }

    #[test]
    fn the_order_of_offers_does_not_matter_apart_from_ties(
        wanted in any_wanted(), offers in any_offers(), turn in 0_usize..6, current in "c[0-6]",
    ) {
        let mut turned = offers.clone();
        turned.reverse();
        if !turned.is_empty() {
            let by = turn % turned.len();
            turned.rotate_left(by);
        }
        let (one, other) =
            (plan(&wanted, &offers, &options_from(Some(&current))), plan(&wanted, &turned, &options_from(Some(&current))));
        for offer in &offers {
            prop_assert_eq!(one.candidate(&offer.id), other.candidate(&offer.id));
        }
        if one.selected != other.selected {
            let best = |placement: &Placement| {
                let id = placement.selected.clone().expect("both chose");
                let offer = offers.iter().find(|offer| offer.id == id).expect("an offer");
                (score(placement, &id).expect("a score").to_bits(), offer.latency(None).map(f64::to_bits))
            };
            prop_assert_eq!(best(&one), best(&other), "only equals may be exchanged");
        }
    }

    /// Work that has a place leaves it only for one that is better by the margin.
    #[test]
    fn a_current_one_stays_below_the_margin(offers in any_offers(), current in 0_usize..6) {
        let wanted = Requirements::default();
        let current = format!("c{current}");
        let placement = plan(&wanted, &offers, &options_from(Some(&current)));
        if let Some(own) = score(&placement, &current) {
            let selected = placement.selected.clone().expect("at least the current one");
            let best = offers.iter().filter_map(|offer| score(&placement, &offer.id)).fold(f64::INFINITY, f64::min);
            let gain = if own == 0.0 { 0.0 } else { (own - best) / own };
            prop_assert_eq!(selected != current, gain >= MIN_GAIN, "a gain of {}", gain);
        }
    }

    /// Placement after placement at equal prices and latencies, nothing moves, in whatever order the offers come.
    #[test]
    fn equal_prices_never_flap(
        latencies in prop::collection::vec(0_u8..3, 2..6), orders in prop::collection::vec(0_usize..6, 1..20),
    ) {
        let mut offers: Vec<Offer> = latencies.iter().enumerate().map(|(index, noise)| {
            let mut offer = Offer::of(format!("c{index}"), "p", "none");
            offer.pricing.marginal_usd_per_unit = Some(2e-7);
            // A few per cent of noise, as measured latencies have it.
            offer.latency_ms = vec![("ack_p95".into(), 10.0 + f64::from(*noise) * 0.3)];
            offer
        }).collect();
        let mut current: Option<String> = None;
        for turn in orders {
            let count = offers.len();
            offers.rotate_left(turn % count);
            let placement = plan(&Requirements::default(), &offers, &options_from(current.as_deref()));
            let selected = placement.selected.expect("all are eligible").into_owned();
            if let Some(before) = &current {
                prop_assert_eq!(before, &selected);
            }
            current = Some(selected);
        }
    }
}
