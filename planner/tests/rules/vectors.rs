//! Values that every planner of the network computes alike, and the texts that go with them.

use openvibe_events_planner::{
    LatencyClass, Objective, Offer, Options, ProviderStates, RateCards, Requirements, Resources, Status, Trust, plan,
};
use serde_json::{Value, json};

use crate::offers::{NOW_MS, because, card, estimate, half_way, offer, options};

const FREE: &str = "no marginal cost (already-paid capacity or a free allowance)";

fn wanting(objective: Objective) -> Requirements {
    Requirements {
        objective,
        ..Requirements::default()
    }
}

#[track_caller]
fn scores(objective: Objective, offers: &[Offer], expected: &[(&str, f64)], selected: &str) {
    let placement = plan(&wanting(objective), offers, &Options::at(NOW_MS));
    let found: Vec<_> = expected
        .iter()
        .map(|(id, _)| (*id, estimate(&placement, id).score.expect("a score")))
        .collect();
    assert_eq!(found, expected);
    assert_eq!(placement.selected.as_deref(), Some(selected));
    assert_eq!(
        placement.reasons.last().map(AsRef::as_ref),
        Some(format!("objective {}", objective.as_str())).as_deref()
    );
}

#[test]
fn each_objective_weighs_cost_and_latency_its_own_way() {
    let offers = [offer("A", 4e-7, 250.0), offer("B", 2e-7, 5.0)];
    scores(Objective::Balanced, &offers, &[("A", 1.0), ("B", 0.26)], "B");
    scores(Objective::Cheapest, &offers, &[("A", 1.001), ("B", 0.500_02)], "B");
    scores(Objective::LowestLatency, &offers, &[("A", 1.001), ("B", 0.020_5)], "B");
    for other in [
        Objective::LocalOnly,
        Objective::HighReliability,
        Objective::Private,
        Objective::FirstPartyOnly,
    ] {
        scores(other, &offers, &[("A", 1.0), ("B", 0.26)], "B");
    }
}

#[test]
fn between_equals_the_one_with_a_known_latency_and_then_the_first() {
    let free = [offer("B", 0.0, None), offer("A", 0.0, 40.0)];
    scores(Objective::Cheapest, &free, &[("A", 0.001), ("B", 0.001)], "A");
    let alike = [offer("B", 1e-7, 40.0), offer("A", 1e-7, 40.0)];
    scores(Objective::Balanced, &alike, &[("A", 1.0), ("B", 1.0)], "B");
}

#[test]
fn work_stays_until_another_place_is_better_by_fifteen_percent() {
    let wanted = wanting(Objective::Balanced);
    let current = |offers: &[Offer]| {
        plan(
            &wanted,
            offers,
            &Options {
                current: Some("A"),
                ..Options::at(NOW_MS)
            },
        )
    };

    let placement = current(&[offer("A", 4e-7, 40.0), offer("B", 3.8e-7, 36.0)]);
    assert_eq!(
        (estimate(&placement, "A").score, estimate(&placement, "B").score),
        (Some(1.0), Some(0.925))
    );
    assert_eq!(placement.selected.as_deref(), Some("A"));
    let stays = "stays on A: the best alternative is only 7.5% better (needs 15%)";
    assert_eq!(placement.reasons, [stays, "objective balanced"]);

    // Exactly fifteen moves.
    let placement = current(&[offer("A", 0.0, 100.0), offer("B", 0.0, 70.0)]);
    assert_eq!(placement.selected.as_deref(), Some("B"));
    let exact = Options {
        current: Some("A"),
        min_gain: 0.5,
        ..Options::at(NOW_MS)
    };
    let halves = [offer("A", 2e-7, 50.0), offer("B", 1e-7, 25.0)];
    assert_eq!(plan(&wanted, &halves, &exact).selected.as_deref(), Some("B"));

    let placement = current(&[offer("A", 0.0, 10.0), offer("B", 0.0, 9.0)]);
    assert_eq!(
        placement.selected.as_deref(),
        Some("A"),
        "9 ms is no reason to leave 10 ms"
    );
    let placement = current(&[offer("A", 0.0, 10.0), offer("B", 0.0, 1.0)]);
    assert_eq!(placement.selected.as_deref(), Some("B"));

    // Failover knows no hysteresis.
    let mut down = offer("A", 0.0, 1.0);
    down.status = Some(Status::Down);
    let placement = current(&[down, offer("B", 0.0, 1.1)]);
    assert_eq!(placement.selected.as_deref(), Some("B"));
    assert_eq!(
        placement.reasons,
        ["A is no longer eligible: moved", FREE, "objective balanced"]
    );
    let placement = current(&[offer("B", 1e-7, 1.1)]);
    assert_eq!(
        placement.reasons,
        ["A is no longer eligible: moved", "objective balanced"]
    );

    // A score of 0 cannot be improved.
    let nothing = Options {
        current: Some("A"),
        min_gain: 0.0,
        ..Options::at(NOW_MS)
    };
    let placement = plan(&wanted, &[offer("B", 0.0, 0.0), offer("A", 0.0, 0.0)], &nothing);
    assert_eq!(
        placement.selected.as_deref(),
        Some("B"),
        "no gain is needed, and none is asked for"
    );
}

#[test]
fn critical_work_stays_with_its_authority_while_that_is_eligible() {
    let offers = [offer("A", 9e-7, 900.0), offer("B", 1e-7, 1.0), offer("C", 5e-7, 50.0)];
    let placed = |wanted: &Requirements, current| {
        plan(
            wanted,
            &offers,
            &Options {
                current,
                ..Options::at(NOW_MS)
            },
        )
    };
    let kept = ["the authority keeps critical work", "objective correctness"];

    let wanted = wanting(Objective::Correctness);
    let placement = placed(&wanted, Some("A"));
    assert_eq!(
        (placement.selected.as_deref(), &placement.reasons[..]),
        (Some("A"), &kept.map(Into::into)[..])
    );
    assert_eq!(placed(&wanted, None).selected.as_deref(), Some("B"));
    let placement = placed(&wanted, Some("gone"));
    assert_eq!(placement.selected.as_deref(), Some("B"));
    assert_eq!(
        placement.reasons,
        ["objective correctness"],
        "nothing is said of a move here"
    );

    let wanted = Requirements {
        latency_class: Some(LatencyClass::Critical),
        authority: Some("C".into()),
        ..Requirements::default()
    };
    assert_eq!(placed(&wanted, Some("A")).selected.as_deref(), Some("C"));
    let wanted = Requirements {
        authority: Some("gone".into()),
        ..wanted
    };
    assert_eq!(
        placed(&wanted, Some("A")).selected.as_deref(),
        Some("A"),
        "who has it keeps it"
    );
}

#[test]
fn what_is_paid_already_costs_by_its_load_and_not_by_its_card() {
    let cards: RateCards = [card("rc", 1.0, 5.0, 0.0)].into_iter().collect();
    let states = ProviderStates::none();
    for (load, usd) in [(0.6, 0.0), (0.75, 0.000_25), (0.9, 0.001), (1.0, 0.001)] {
        let mut owned = Offer::of("A", "p", "rc");
        owned.pricing.prepaid = true;
        owned.capacity.utilization = vec![0.1, load];
        let wanted = Requirements {
            units: 2.0,
            ..Requirements::default()
        };
        let placement = plan(&wanted, &[owned], &options(&cards, &states));
        let cost = estimate(&placement, "A").cost_usd.expect("a cost");
        assert!((cost - usd * 2.0).abs() < 1e-12, "{load}: {cost}");
    }
}

#[test]
fn a_price_behind_a_large_allowance_is_shown_without_the_noise_of_its_sums() {
    let cards: RateCards = [card("rc", 1.0, 2e-7, 1e9)].into_iter().collect();
    for used in [1e9, 1.234_567_8e9, 7.7e9] {
        let states = half_way(used, 0.0);
        let placement = plan(
            &Requirements::default(),
            &[Offer::of("A", "p", "rc")],
            &options(&cards, &states),
        );
        let shown = serde_json::to_value(&placement.candidates).expect("JSON");
        assert_eq!(shown[0]["estimated_cost_usd"].to_string(), "2e-7", "{used}");
    }
}

#[test]
fn an_allowance_that_the_forecast_exhausts_makes_the_next_unit_paid_now() {
    let cards: RateCards = [card("rc", 1e6, 0.4, 1.5e6)].into_iter().collect();
    let cost = |used, reserve, latency_class| {
        let states = half_way(used, reserve);
        let wanted = Requirements {
            latency_class,
            ..Requirements::default()
        };
        let placement = plan(&wanted, &[Offer::of("A", "p", "rc")], &options(&cards, &states));
        estimate(&placement, "A").cost_usd.expect("a cost")
    };
    let paid = |cost: f64| (cost - 4e-7).abs() < 1e-12;
    assert!(paid(cost(1e6, 0.0, None)));
    assert!(cost(6e5, 0.0, None).abs() < 1e-15);
    assert!(paid(cost(6e5, 0.3, None)), "a reserve is not for normal work");
    for urgent in [LatencyClass::Critical, LatencyClass::Realtime] {
        assert!(cost(6e5, 0.3, Some(urgent)).abs() < 1e-15, "it is for urgent work");
    }
    assert!(paid(cost(6e5, 0.3, Some(LatencyClass::Interactive))));
}

#[test]
fn a_price_comes_from_the_card_else_from_the_offer_else_there_is_none() {
    let cards: RateCards = [card("rc", 0.0, 0.5, 0.0)].into_iter().collect();
    let states = ProviderStates::none();
    let priced = |rate_card: &'static str, usd| {
        let mut one = Offer::of("A", "p", rate_card);
        one.pricing.marginal_usd_per_unit = usd;
        let placement = plan(
            &Requirements {
                units: 3.0,
                ..Requirements::default()
            },
            &[one],
            &options(&cards, &states),
        );
        estimate(&placement, "A").clone()
    };
    assert_eq!(priced("rc", Some(7.0)).cost_usd, Some(1.5), "a unit size of 0 is 1");
    assert_eq!(priced("gone", Some(7.0)).cost_usd, Some(21.0));
    let unpriced = priced("gone", None);
    assert_eq!((unpriced.cost_usd, unpriced.score), (None, None));
    assert_eq!(unpriced.reasons, ["no rate card gone"]);

    // The usage of the provider named on the offer counts where the card's has none.
    let mut renamed = card("rc", 1e6, 0.4, 1.5e6);
    renamed.provider = "other".to_owned();
    let (cards, states) = ([renamed].into_iter().collect(), half_way(1e6, 0.0));
    let placement = plan(
        &Requirements::default(),
        &[Offer::of("A", "p", "rc")],
        &options(&cards, &states),
    );
    assert!(estimate(&placement, "A").cost_usd.is_some_and(|usd| usd > 3e-7));
}

#[test]
fn an_unpriced_offer_is_eligible_never_selected_and_says_why() {
    let (cards, states) = (RateCards::none(), ProviderStates::none());
    let unpriced = || Offer::of("cloud-v1", "cloud", "rc-cloud-queue-v1");
    let placement = plan(&Requirements::default(), &[unpriced()], &options(&cards, &states));
    assert_eq!(
        (placement.selected.as_deref(), &placement.reasons[..]),
        (None, &["no eligible candidate".into()][..])
    );
    let document = serde_json::to_value(&placement).expect("JSON");
    assert_eq!(
        document,
        json!({
            "selected": null,
            "objective": "balanced",
            "reasons": ["no eligible candidate"],
            "candidates": [{ "id": "cloud-v1", "eligible": true, "reasons": ["no rate card rc-cloud-queue-v1"] }],
            "decided_at": "2026-10-21T12:00:00.000Z",
        })
    );
    let placement = plan(
        &Requirements::default(),
        &[unpriced(), offer("A", 1e9, 1e9)],
        &options(&cards, &states),
    );
    assert_eq!(placement.selected.as_deref(), Some("A"));
    let capped = Requirements {
        max_cost_usd: Some(0.5),
        ..Requirements::default()
    };
    let placement = plan(
        &capped,
        &[unpriced(), offer("A", 0.000_000_5, 1.0)],
        &options(&cards, &states),
    );
    assert_eq!(because(&placement, "cloud-v1"), "estimated $Infinity over $0.5");
}

#[test]
fn the_first_test_that_fails_names_the_reason() {
    let mut wanted = Requirements {
        capabilities: vec!["worker:render".into(), "events:durable".into(), "events:ordered".into()],
        trust: vec![Trust::FirstParty, Trust::Partner],
        residency: Some("eu".into()),
        region: Some("eu-west".into()),
        max_latency_ms: Some(20.5),
        max_cost_usd: Some(4e-7),
        resources: Resources {
            cpu: 2.5,
            memory_mb: 512.0,
            gpu: true,
        },
        ..Requirements::default()
    };
    let mut one = offer("A", 1.25e-6, 30.25);
    one.trust = None;
    one.status = None;
    one.capacity.available_cores = Some(2.0);
    one.capacity.available_memory_mb = Some(511.5);
    one.capacity.workers = vec![("render".into(), 0)];
    let mut said = Vec::new();
    let mut judge = |wanted: &Requirements, one: &Offer| {
        let placement = plan(wanted, std::slice::from_ref(one), &Options::at(NOW_MS));
        said.push(because(&placement, "A").to_owned());
    };
    judge(&wanted, &one);
    one.capabilities = vec!["worker:render".into(), "events:durable".into()];
    judge(&wanted, &one);
    one.capabilities.push("events:ordered".into());
    judge(&wanted, &one);
    one.trust = Some(Trust::Community);
    wanted.trust.clear();
    wanted.objective = Objective::Private;
    judge(&wanted, &one);
    wanted.objective = Objective::Balanced;
    one.trust = None;
    judge(&wanted, &one);
    one.trust = Some(Trust::External);
    judge(&wanted, &one);
    one.regions.push("eu".into());
    judge(&wanted, &one);
    one.region = "global".into();
    judge(&wanted, &one);
    one.status = Some(Status::Draining);
    judge(&wanted, &one);
    one.status = Some(Status::Degraded);
    judge(&wanted, &one);
    one.latency_ms.clear();
    judge(&wanted, &one);
    one.capacity.available_cores = None;
    judge(&wanted, &one);
    one.capacity.available_memory_mb = None;
    judge(&wanted, &one);
    one.capacity.gpu_type = Some("any".into());
    judge(&wanted, &one);
    one.capacity.workers.clear();
    judge(&wanted, &one);
    assert_eq!(
        said,
        [
            "lacks worker:render",
            "lacks events:ordered",
            "workload requires first-party or partner trust",
            "workload requires first-party trust",
            "workload requires first-party or user-owned or partner or community or external trust",
            "outside eu",
            "not in eu-west",
            "health unknown",
            "health draining",
            "p95 30.25 ms over 20.5 ms",
            "2 cores free, needs 2.5",
            "511.5 MB free, needs 512",
            "no GPU",
            "no free render worker",
            "estimated $0.000001 over $4e-7",
        ]
    );
    wanted.max_cost_usd = Some(1.25e-6);
    wanted.region = Some("nearest".into());
    one.region = "mars".into();
    let placement = plan(&wanted, &[one], &Options::at(NOW_MS));
    assert_eq!(
        placement.selected.as_deref(),
        Some("A"),
        "a ceiling is only passed from above"
    );
}

#[test]
fn the_latency_is_that_of_the_operation_else_the_best_p95_else_unknown() {
    let mut one = offer("A", 0.0, None);
    one.latency_ms = vec![
        ("ack_p95".into(), 9.0),
        ("publish_p95".into(), 7.0),
        ("mean".into(), 1.0),
        ("p95_bad".into(), f64::NAN),
    ];
    assert_eq!(one.latency(Some("ack_p95")), Some(9.0));
    assert_eq!(one.latency(Some("mean")), Some(1.0));
    assert_eq!(
        one.latency(Some("topic_p95")),
        Some(7.0),
        "an operation that it lacks does not make it unknown"
    );
    assert_eq!(one.latency(None), Some(7.0));
    let at_the_ceiling = Requirements {
        latency_op: Some("ack_p95".into()),
        max_latency_ms: Some(9.0),
        ..Requirements::default()
    };
    let placement = plan(&at_the_ceiling, std::slice::from_ref(&one), &Options::at(NOW_MS));
    assert_eq!(placement.selected.as_deref(), Some("A"), "a ceiling may be reached");
    one.latency_ms.truncate(0);
    assert_eq!(one.latency(Some("ack_p95")), None);
    let ceiling = Requirements {
        max_latency_ms: Some(20.0),
        ..Requirements::default()
    };
    let placement = plan(&ceiling, &[one], &Options::at(NOW_MS));
    assert_eq!(
        placement.reasons,
        [FREE, "meets the 20 ms latency ceiling", "objective balanced"]
    );
}

#[test]
fn the_answer_is_the_documented_one() {
    let mut slow = offer("nats-v1", 0.0, 1.0);
    slow.status = Some(Status::Down);
    let offers = [offer("pg-v1", 0.0, 250.0), slow, offer("valkey-v1", 4e-7, 2.5)];
    let placement = plan(&wanting(Objective::LowestLatency), &offers, &Options::at(NOW_MS + 7));
    let expected: Value = json!({
        "selected": "valkey-v1",
        "objective": "lowest-latency",
        "reasons": ["objective lowest-latency"],
        "candidates": [
            { "id": "pg-v1", "eligible": true, "estimated_cost_usd": 0, "estimated_latency_ms": 250, "score": 1 },
            { "id": "nats-v1", "eligible": false, "excluded_because": "health down" },
            { "id": "valkey-v1", "eligible": true, "estimated_cost_usd": 4e-7, "estimated_latency_ms": 2.5,
              "score": 0.011 },
        ],
        "decided_at": "2026-10-21T12:00:00.007Z",
    });
    assert_eq!(serde_json::to_value(&placement).expect("JSON"), expected);
}
