//! Decisions of the fabric: their words, their floor, and what is remembered of them.

use std::sync::Arc;

use openvibe_events_planner::{
    Ask, Candidate, Carrier, Class, Decided, Decision, FLOOR, Health, Intent, KEYS_MAX, Key, Market, Memory, Objective,
    POLICIES_MAX, PolicyClass, PolicyKey, ProviderStates, RateCards, Usage, Verdict, capabilities, decide, latency_op,
};
use proptest::prelude::*;

use crate::offers::{NOW_MS, because, card, estimate, half_way};

/// A carrier with the latency `ms` for each of its classes, priced by a card of its own.
pub(crate) fn carrier(id: &str, classes: &[Class], ms: f64) -> Carrier {
    let mut offer = openvibe_events_planner::Offer::of(id.to_owned(), "p", format!("rc-{id}"));
    offer.capabilities = classes
        .iter()
        .flat_map(|class| capabilities(*class))
        .map(|name| (*name).into())
        .collect();
    offer.latency_ms = classes.iter().map(|class| (latency_op(*class).into(), ms)).collect();
    Carrier {
        classes: classes.to_vec(),
        offer,
        health: Health::Up,
    }
}

fn carriers() -> Vec<Carrier> {
    vec![
        carrier("pg-v1", &Class::ALL, 250.0),
        carrier("valkey-v1", &[Class::Queue, Class::Topic], 2.0),
        carrier("nats-v1", &[Class::Topic], 1.0),
        carrier("nats-js-v1", &[Class::Stream], 1.0),
        carrier("cloud-v1", &[Class::Queue], 1.0),
    ]
}

fn cards() -> Arc<RateCards> {
    let ids = ["rc-pg-v1", "rc-valkey-v1", "rc-nats-v1", "rc-nats-js-v1"];
    Arc::new(ids.iter().map(|id| card(id, 1.0, 2e-7, 1e9)).collect())
}

fn market(carriers: Vec<Carrier>) -> Market {
    Market::new(carriers, cards(), Arc::default(), NOW_MS)
}

fn with(change: impl FnOnce(&mut Vec<Carrier>)) -> Market {
    let mut all = carriers();
    change(&mut all);
    market(all)
}

fn intent(class: Class) -> Intent {
    Intent {
        class,
        ..Intent::DEFAULT
    }
}

#[test]
fn each_class_goes_to_the_fastest_priced_carrier_that_serves_it() {
    let market = market(carriers());
    for (class, selected, scores) in [
        (
            Class::Queue,
            "valkey-v1",
            vec![("pg-v1", Some(0.5)), ("valkey-v1", Some(0.004)), ("cloud-v1", None)],
        ),
        (
            Class::Topic,
            "nats-v1",
            vec![
                ("pg-v1", Some(0.5)),
                ("valkey-v1", Some(0.004)),
                ("nats-v1", Some(0.002)),
            ],
        ),
        (
            Class::Stream,
            "nats-js-v1",
            vec![("pg-v1", Some(0.5)), ("nats-js-v1", Some(0.002))],
        ),
    ] {
        let decision = decide(&intent(class), &market, None, NOW_MS);
        assert_eq!(
            (decision.carrier.as_ref(), decision.route.as_ref()),
            (selected, selected)
        );
        let found: Vec<_> = decision
            .placement
            .candidates
            .iter()
            .map(|candidate| {
                (
                    candidate.id.as_ref(),
                    estimate(&decision.placement, &candidate.id).score,
                )
            })
            .collect();
        assert_eq!(found, scores);
        assert!(!decision.is_fallback());
    }
}

#[test]
fn the_carriers_own_words_are_the_reasons() {
    let market = with(|all| {
        all[1].health = Health::Down("not connected (valkey-v1)".into());
        all[4].health = Health::DISABLED_BY_CONFIGURATION;
    });
    let placement = decide(&intent(Class::Queue), &market, Some("valkey-v1"), NOW_MS).placement;
    assert_eq!(placement.selected.as_deref(), Some("pg-v1"));
    assert_eq!(placement.reasons[0], "valkey-v1 is no longer eligible: moved");
    assert_eq!(because(&placement, "valkey-v1"), "not connected (valkey-v1)");
    assert_eq!(because(&placement, "cloud-v1"), "disabled by configuration");

    let market = with(|all| {
        all[1].health = Health::Degraded("slow to answer (valkey-v1)".into());
        all[1].offer.pricing.rate_card = Some("rc-valkey-v1".into());
        all[4].health = Health::breaker_open("cloud-v1");
    });
    let placement = decide(&intent(Class::Queue), &market, None, NOW_MS).placement;
    assert_eq!(
        placement.selected.as_deref(),
        Some("valkey-v1"),
        "degraded may be chosen"
    );
    assert_eq!(
        estimate(&placement, "valkey-v1").reasons,
        ["slow to answer (valkey-v1)"]
    );
    assert_eq!(because(&placement, "cloud-v1"), "breaker open (cloud-v1)");
    // A carrier that is down says so, whatever else speaks against it.
    let market = with(|all| {
        all[1].health = Health::Down("permission denied (valkey-v1)".into());
        all[1].offer.capabilities.clear();
    });
    let placement = decide(&intent(Class::Queue), &market, None, NOW_MS).placement;
    assert_eq!(because(&placement, "valkey-v1"), "permission denied (valkey-v1)");
}

#[test]
fn the_floor_delivers_whatever_is_switched_off_or_down() {
    let market = with(|all| {
        all[0].health = Health::DISABLED_BY_CONFIGURATION;
        all[1].health = Health::breaker_open("valkey-v1");
    });
    let decision = decide(&intent(Class::Queue), &market, None, NOW_MS);
    assert_eq!(
        (decision.carrier.as_ref(), decision.placement.selected.as_deref()),
        (FLOOR, Some(FLOOR))
    );
    let reasons = ["no eligible candidate", "no eligible candidate: falling back to pg-v1"];
    assert_eq!(decision.placement.reasons, reasons);
    assert_eq!(because(&decision.placement, "pg-v1"), "disabled by configuration");
    assert!(decision.is_fallback());
    // A class that nobody serves, and a ceiling that nobody meets.
    let market = with(Vec::clear);
    assert_eq!(decide(&intent(Class::Topic), &market, None, NOW_MS).carrier, FLOOR);
    let ceiling = Intent {
        max_latency_ms: Some(0.5),
        ..intent(Class::Queue)
    };
    let decision = decide(&ceiling, &with(|_| {}), None, NOW_MS);
    assert_eq!(because(&decision.placement, "pg-v1"), "p95 250 ms over 0.5 ms");
    assert_eq!(decision.carrier, FLOOR);
}

#[test]
fn a_critical_policy_keeps_its_carrier_and_a_plain_one_moves() {
    let critical = Intent {
        policy_class: PolicyClass::Critical,
        ..intent(Class::Queue)
    };
    let market = market(carriers());
    let decision = decide(&critical, &market, Some("pg-v1"), NOW_MS);
    assert_eq!(
        (decision.carrier.as_ref(), decision.placement.reasons[0].as_ref()),
        ("pg-v1", "the authority keeps critical work")
    );
    assert_eq!(
        decide(&intent(Class::Queue), &market, Some("pg-v1"), NOW_MS).carrier,
        "valkey-v1"
    );
}

#[test]
fn an_exhausted_allowance_lets_price_decide() {
    let cheapest = Intent {
        objective: Objective::Cheapest,
        ..intent(Class::Queue)
    };
    let mut all = carriers();
    all[0].offer.provider = "q".into();
    let mut cards: Vec<_> = cards().iter().cloned().collect();
    for card in &mut cards {
        if card.id == "rc-pg-v1" {
            card.provider = "q".to_owned();
        }
    }
    let market = Market::new(
        all,
        Arc::new(cards.into_iter().collect()),
        Arc::new(half_way(2e9, 0.0)),
        NOW_MS,
    );
    let decision = decide(&cheapest, &market, None, NOW_MS);
    assert_eq!(decision.carrier, "pg-v1", "{:?}", decision.placement);
}

/// A memory and what it is asked.
struct Desk {
    memory: Memory,
    policy: PolicyKey,
    intent: Intent,
}

impl Desk {
    fn new() -> Self {
        Self {
            memory: Memory::new(),
            policy: PolicyKey::new(Some("live.*"), 3),
            intent: intent(Class::Queue),
        }
    }

    fn ask<'a>(&'a self, key: Option<&'a str>, backlog: Option<&'a str>) -> Ask<'a> {
        Ask {
            policy: &self.policy,
            intent: &self.intent,
            key: key.map(|name| Key { name, backlog }),
        }
    }

    /// Decides and commits: the decision, and whether it came from memory or was written down, and for which key.
    fn publish(&mut self, market: &Market, key: Option<&str>, backlog: Option<&str>) -> (Arc<Decision>, &'static str) {
        match self.memory.decide(self.ask(key, backlog), market, NOW_MS) {
            Decided::Remembered(decision) => (Arc::clone(decision), "remembered"),
            Decided::Proposed(proposal) => {
                let how = match proposal.record() {
                    Some(record) if record.key.is_some() => "recorded for the key",
                    Some(_) => "recorded",
                    None => "renewed",
                };
                let decision = Arc::clone(proposal.decision());
                proposal.committed(&mut self.memory);
                (decision, how)
            }
        }
    }

    #[track_caller]
    fn expect(&mut self, market: &Market, key: Option<&str>, backlog: Option<&str>, carrier: &str, how: &str) {
        let (decision, found) = self.publish(market, key, backlog);
        assert_eq!(
            (decision.carrier.as_ref(), found),
            (carrier, how),
            "{:?}",
            decision.placement.reasons
        );
    }
}

#[test]
fn a_decision_is_recorded_once_until_it_changes() {
    let mut desk = Desk::new();
    let first = market(carriers());
    desk.expect(&first, None, None, "valkey-v1", "recorded");
    desk.expect(&first, None, None, "valkey-v1", "remembered");
    desk.expect(&first, Some("a"), None, "valkey-v1", "remembered");
    let renewed = first.renewed();
    desk.expect(&renewed, None, None, "valkey-v1", "renewed");
    desk.expect(&renewed, None, None, "valkey-v1", "remembered");
    let mut all = carriers();
    all[1].health = Health::breaker_open("valkey-v1");
    let open = renewed
        .next(all, cards(), Arc::default(), NOW_MS)
        .expect("a carrier went down");
    desk.expect(&open, None, None, "pg-v1", "recorded");
    // Another revision of the policy is another policy, and so is another pattern.
    desk.policy = PolicyKey::new(Some("live.*"), 4);
    desk.expect(&open, None, None, "pg-v1", "recorded");
    desk.policy = PolicyKey::new(None, 3);
    desk.expect(&open, None, None, "pg-v1", "recorded");
    assert_eq!(desk.memory.len(), 3);
}

#[test]
fn a_policy_that_is_written_again_and_asks_for_something_else_is_decided_for_anew() {
    let mut desk = Desk::new();
    let market = market(carriers());
    desk.expect(&market, None, None, "valkey-v1", "recorded");
    desk.expect(&market, Some("a"), Some("pg-v1"), "pg-v1", "recorded for the key");
    // It was removed meanwhile, so it begins at the same revision.
    desk.intent.objective = Objective::Cheapest;
    let explained = desk.memory.explain(desk.ask(None, None), &market, NOW_MS);
    assert_eq!(explained.placement.objective, Objective::Cheapest);
    let (decision, found) = desk.publish(&market, None, None);
    assert_eq!((decision.placement.objective, found), (Objective::Cheapest, "recorded"));
    let (held, _) = desk.publish(&market, Some("a"), Some("pg-v1"));
    assert_eq!(held.placement.objective, Objective::Cheapest);
    let (again, found) = desk.publish(&market, None, None);
    assert_eq!((&again, found), (&decision, "remembered"));
}

#[test]
fn what_is_not_committed_is_not_remembered() {
    let mut desk = Desk::new();
    let market = market(carriers());
    for _ in 0..2 {
        let Decided::Proposed(proposal) = desk.memory.decide(desk.ask(None, None), &market, NOW_MS) else {
            panic!("it was never committed")
        };
        assert!(proposal.record().is_some());
        drop(proposal);
        assert!(desk.memory.is_empty());
    }
    desk.expect(&market, None, None, "valkey-v1", "recorded");

    // A commit that comes late does not bring back what was true before.
    let late = Desk::new();
    let Decided::Proposed(old) = late.memory.decide(late.ask(None, None), &market, NOW_MS) else {
        panic!("new")
    };
    let mut all = carriers();
    all[1].health = Health::breaker_open("valkey-v1");
    let open = market
        .next(all, cards(), Arc::default(), NOW_MS)
        .expect("a carrier went down");
    desk.expect(&open, None, None, "pg-v1", "recorded");
    old.committed(&mut desk.memory);
    desk.expect(&open, None, None, "pg-v1", "remembered");
}

#[test]
fn hysteresis_knows_where_the_work_of_the_policy_is() {
    let mut desk = Desk::new();
    let mut all = carriers();
    all[4].offer.pricing.rate_card = Some("rc-valkey-v1".into());
    all[4].offer.latency_ms = vec![("queue_p95".into(), 10.0)];
    all[1].offer.latency_ms[0].1 = 12.0;
    all.remove(0);
    let first = market(all.clone());
    desk.expect(&first, None, None, "cloud-v1", "recorded");
    all[0].offer.latency_ms[0].1 = 9.0;
    let closer = first
        .next(all.clone(), cards(), Arc::default(), NOW_MS)
        .expect("it moved by a quarter");
    desk.expect(&closer, None, None, "cloud-v1", "renewed");
    assert!(desk.publish(&closer, None, None).0.placement.reasons[0].starts_with("stays on cloud-v1"));
    all[0].offer.latency_ms[0].1 = 1.0;
    let better = closer.next(all, cards(), Arc::default(), NOW_MS).expect("it moved");
    desk.expect(&better, None, None, "valkey-v1", "recorded");
    assert_eq!(desk.memory.current(Class::Queue, &desk.policy), Some("valkey-v1"));
}

#[test]
fn a_key_with_a_backlog_stays_and_is_remembered_only_while_it_differs() {
    let mut desk = Desk::new();
    let market = market(carriers());
    desk.expect(&market, Some("a"), Some("valkey-v1"), "valkey-v1", "recorded");
    assert_eq!(desk.memory.len(), 1, "it does not differ");
    desk.expect(&market, Some("a"), Some("pg-v1"), "pg-v1", "recorded for the key");
    desk.expect(&market, Some("a"), Some("pg-v1"), "pg-v1", "remembered");
    let (decision, _) = desk.publish(&market, Some("a"), Some("pg-v1"));
    assert_eq!(
        decision.placement.reasons[0],
        "the backlog of this key stays on pg-v1 until it has drained"
    );
    assert_eq!(
        (decision.route.as_ref(), decision.placement.selected.as_deref()),
        ("pg-v1", Some("pg-v1"))
    );
    // A backlog of another subscription, on a third carrier: its rows stay there, and nothing is recorded to and fro.
    desk.expect(&market, Some("a"), Some("gone-v1"), "gone-v1", "renewed");
    desk.expect(&market, Some("a"), Some("pg-v1"), "pg-v1", "remembered");
    desk.expect(&market, Some("b"), None, "valkey-v1", "remembered");
    // Drained.
    desk.expect(&market, Some("a"), None, "valkey-v1", "recorded for the key");
    desk.expect(&market, Some("a"), None, "valkey-v1", "remembered");
    assert_eq!(desk.memory.len(), 1);
}

#[test]
fn signals_of_a_key_go_elsewhere_while_its_carrier_is_not_eligible() {
    let mut desk = Desk::new();
    let market = with(|all| all[0].health = Health::Down("never".into()));
    let (decision, _) = desk.publish(&market, Some("a"), Some("pg-v1"));
    assert_eq!(
        (decision.carrier.as_ref(), decision.route.as_ref()),
        ("pg-v1", "valkey-v1")
    );
    let said = "the backlog of this key stays on pg-v1 until it has drained; signals go through valkey-v1 meanwhile";
    assert_eq!(decision.placement.reasons[0], said);
    desk.expect(&market, Some("a"), Some("pg-v1"), "pg-v1", "remembered");
    let explained = desk
        .memory
        .explain(desk.ask(Some("a"), Some("cloud-v1")), &market, NOW_MS);
    assert_eq!(
        (explained.carrier.as_ref(), explained.route.as_ref()),
        ("cloud-v1", "cloud-v1"),
        "unpriced is never chosen, and keeps what waits on it"
    );
}

#[test]
fn explaining_changes_nothing_and_tells_of_this_moment() {
    let mut desk = Desk::new();
    let market = market(carriers());
    let explained = desk.memory.explain(desk.ask(Some("a"), None), &market, NOW_MS + 1);
    assert_eq!((explained.carrier.as_ref(), desk.memory.len()), ("valkey-v1", 0));
    assert_eq!(explained.placement.decided_at_ms, NOW_MS + 1);
    desk.expect(&market, None, None, "valkey-v1", "recorded");
}

#[test]
fn memory_is_bounded_in_policies_and_keys() {
    let mut desk = Desk::new();
    let market = market(carriers());
    for revision in 0..5_000 {
        desk.policy = PolicyKey::new(Some("a.*"), revision);
        desk.publish(&market, None, None);
    }
    assert_eq!(desk.memory.len(), POLICIES_MAX);
    for number in 0..12_000 {
        desk.publish(&market, Some(&format!("key-{number}")), Some("pg-v1"));
    }
    assert_eq!(desk.memory.len(), POLICIES_MAX + KEYS_MAX);
    for number in 0..12_000 {
        desk.publish(&market, Some(&format!("key-{number}")), None);
    }
    assert_eq!(desk.memory.len(), POLICIES_MAX);
}

#[test]
fn an_epoch_begins_when_something_has_moved_and_not_before() {
    let first = market(carriers());
    let next = |market: &Market, change: &dyn Fn(&mut Vec<Carrier>)| {
        let mut all = market.carriers.clone();
        change(&mut all);
        market.next(all, cards(), Arc::default(), NOW_MS)
    };
    assert!(next(&first, &|_| {}).is_none());
    assert!(next(&first, &|all| all[1].offer.latency_ms[0].1 = 2.19).is_none());
    assert!(next(&first, &|all| all[1].offer.latency_ms[0].1 = 1.81).is_none());
    let moved = next(&first, &|all| all[1].offer.latency_ms[0].1 = 2.2).expect("a tenth");
    assert_eq!((first.epoch(), moved.epoch()), (1, 2));
    assert!(
        next(&moved, &|all| all[1].offer.latency_ms[0].1 = 2.05).is_none(),
        "it is compared with what was planned"
    );
    assert!(next(&first, &|all| all[2].health = Health::Degraded("slow".into())).is_some());
    let down = next(&first, &|all| all[2].health = Health::Down("a".into())).expect("down");
    assert!(
        next(&down, &|all| all[2].health = Health::Down("b".into())).is_some(),
        "another reason"
    );
    assert!(next(&first, &|all| all.truncate(4)).is_some());
    assert!(next(&first, &|all| all.swap(1, 2)).is_some());
    let dearer = Arc::new([card("rc-pg-v1", 1.0, 1.0, 0.0)].into_iter().collect());
    assert!(
        first
            .next(first.carriers.clone(), dearer, Arc::default(), NOW_MS)
            .is_some()
    );
}

#[test]
fn usage_begins_an_epoch_when_its_forecast_moves_and_rarely_otherwise() {
    const HOUR_MS: i64 = 3_600_000;
    let states = |used: u64, now_ms| -> Arc<ProviderStates> {
        let mut usage = Usage::new(now_ms);
        usage.set("p", "op", used, now_ms);
        Arc::new(usage.states(now_ms))
    };
    let at =
        |market: &Market, used, now_ms| market.next(market.carriers.clone(), cards(), states(used, now_ms), now_ms);
    let first = Market::new(carriers(), cards(), states(1000, NOW_MS), NOW_MS);
    assert!(at(&first, 2000, NOW_MS + 59_999).is_none(), "once a minute at most");
    assert!(at(&first, 1050, NOW_MS + 60_000).is_none(), "a twentieth");
    let second = at(&first, 1200, NOW_MS + 60_000).expect("a fifth");
    assert_eq!(second.epoch(), 2);
    assert!(at(&second, 1201, NOW_MS + 5 * HOUR_MS).is_none());
    assert!(
        at(&second, 1201, NOW_MS + 7 * HOUR_MS).is_some(),
        "after six hours anything counts"
    );
    // An epoch that begins for another reason does not pass on usage that has not moved.
    let mut all = first.carriers.clone();
    all[1].health = Health::breaker_open("valkey-v1");
    let down = first
        .next(all, cards(), states(1050, NOW_MS + 60_000), NOW_MS + 60_000)
        .expect("down");
    assert_eq!(down.states, first.states);
}

proptest! {
    /// Whatever goes up and down, a decision has a carrier, and it is an eligible one or the floor.
    #[test]
    fn there_is_always_a_carrier(
        health in prop::collection::vec(0_u8..4, 5), class in prop::sample::select(&Class::ALL[..]),
        current in prop::sample::select(vec![None, Some("pg-v1"), Some("valkey-v1"), Some("gone-v1")]),
        backlog in prop::sample::select(vec![None, Some("pg-v1"), Some("nats-v1"), Some("gone-v1")]),
    ) {
        let market = with(|all| for (carrier, health) in all.iter_mut().zip(&health) {
            carrier.health = match health {
                0 => Health::Up,
                1 => Health::Degraded("slow".into()),
                2 => Health::breaker_open(&carrier.offer.id),
                _ => Health::DISABLED_BY_CONFIGURATION,
            };
        });
        let decision = decide(&intent(class), &market, current, NOW_MS);
        prop_assert_eq!(decision.placement.selected.as_ref(), Some(&decision.carrier));
        match decision.placement.candidate(&decision.carrier) {
            Some(Candidate { verdict: Verdict::Eligible(estimate), .. }) => prop_assert!(estimate.score.is_some()),
            _ => prop_assert!(decision.carrier == FLOOR && decision.is_fallback()),
        }
        let document = serde_json::to_string(&decision.placement).expect("JSON");
        prop_assert!(!document.contains("null"), "the contract has no null: {}", document);
        let desk = Desk { intent: intent(class), ..Desk::new() };
        let decided = desk.memory.decide(desk.ask(Some("k"), backlog), &market, NOW_MS);
        let keyed = decided.decision();
        let plain = desk.memory.explain(desk.ask(None, None), &market, NOW_MS);
        prop_assert_eq!(keyed.carrier.as_ref(), backlog.unwrap_or(&plain.carrier));
        let route = keyed.placement.candidate(&keyed.route);
        let routable = matches!(route, Some(Candidate { verdict: Verdict::Eligible(_), .. }));
        prop_assert!(routable || keyed.route == FLOOR, "signals go to {}", keyed.route);
        if let Some(backlog) = backlog.filter(|backlog| *backlog != plain.carrier) {
            prop_assert_eq!(plain.route_of(backlog), keyed.route.as_ref(), "what is done is what is told");
        }
    }
}
