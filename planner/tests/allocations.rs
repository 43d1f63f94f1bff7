//! A decision that is remembered costs no memory. The crate that counts replaces the allocator of the whole program, so
//! this test has one of its own.

use std::sync::Arc;

use openvibe_events_planner::{
    Ask, Carrier, Class, Decided, Health, Intent, Key, Market, Memory, Offer, PolicyKey, RateCards, latency_op,
};

const NOW_MS: i64 = 1_792_584_000_000;

fn carrier(id: &'static str, ms: f64) -> Carrier {
    let mut offer = Offer::of(id, "p", "none");
    offer.capabilities = vec!["events:gateway".into()];
    offer.latency_ms = vec![(latency_op(Class::Queue).into(), ms)];
    offer.pricing.marginal_usd_per_unit = Some(0.0);
    Carrier {
        classes: vec![Class::Queue],
        offer,
        health: Health::Up,
    }
}

#[test]
fn a_remembered_decision_allocates_nothing() {
    let cards: Arc<RateCards> = Arc::default();
    let market = Market::new(
        vec![carrier("pg-v1", 250.0), carrier("valkey-v1", 2.0)],
        cards,
        Arc::default(),
        NOW_MS,
    );
    let policy = PolicyKey::new(Some("live.stream.*"), 7);
    let mut memory = Memory::new();
    let ask = |key| Ask {
        policy: &policy,
        intent: &Intent::DEFAULT,
        key,
    };
    let key = |backlog| {
        Some(Key {
            name: "stream:A",
            backlog,
        })
    };
    for key in [None, key(Some("pg-v1"))] {
        if let Decided::Proposed(proposal) = memory.decide(ask(key), &market, NOW_MS) {
            proposal.committed(&mut memory);
        }
    }

    let remembered = |key| matches!(memory.decide(ask(key), &market, NOW_MS), Decided::Remembered(_));
    let other = Some(Key {
        name: "stream:B",
        backlog: None,
    });
    let agreeing = Some(Key {
        name: "stream:B",
        backlog: Some("valkey-v1"),
    });
    let found = allocation_counter::measure(|| {
        for key in [None, key(Some("pg-v1")), other, agreeing] {
            assert!(remembered(key), "{key:?}");
        }
    });
    assert_eq!((found.count_total, found.bytes_total), (0, 0));

    // The counter does count.
    let renewed = market.renewed();
    let found = allocation_counter::measure(|| {
        assert!(matches!(
            memory.decide(ask(None), &renewed, NOW_MS),
            Decided::Proposed(_)
        ));
    });
    assert!(found.count_total > 0);
}
