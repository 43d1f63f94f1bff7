//! What a placement costs: remembered, planned anew, and decided for the fabric.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{Criterion, criterion_group, criterion_main};
use openvibe_events_planner::{
    Ask, Carrier, Class, Decided, Health, Intent, Key, Market, Memory, Offer, Options, PolicyKey, RateCards, Usage,
    capabilities, decide, latency_op, plan,
};

const NOW_MS: i64 = 1_792_584_000_000;
const CARDS: &[u8] = include_bytes!("../../rate-cards/rate-cards.json");

fn carrier(id: &'static str, provider: &'static str, card: &'static str, ms: f64) -> Carrier {
    let mut offer = Offer::of(id, provider, card);
    offer.capabilities = capabilities(Class::Stream).iter().map(|name| (*name).into()).collect();
    offer.latency_ms = Class::ALL.iter().map(|class| (latency_op(*class).into(), ms)).collect();
    Carrier {
        classes: Class::ALL.to_vec(),
        offer,
        health: Health::Up,
    }
}

fn market() -> Market {
    let carriers = vec![
        carrier("pg-v1", "postgres", "rc-pg-v1", 250.0),
        carrier("valkey-v1", "valkey", "rc-valkey-v1", 2.1),
        carrier("nats-v1", "nats", "rc-nats-v1", 1.3),
        carrier("nats-js-v1", "nats", "rc-nats-js-v1", 1.7),
        carrier("cloud-v1", "cloud", "rc-cloud-queue-v1", 30.0),
    ];
    let cards = RateCards::parse("rate-cards.json", CARDS, NOW_MS).expect("the shipped cards");
    let mut usage = Usage::new(NOW_MS);
    for (provider, metric) in [
        ("postgres", "delivery-operation"),
        ("valkey", "signal-operation"),
        ("nats", "signal-operation"),
    ] {
        usage.add(provider, metric, 40_000_000, NOW_MS);
    }
    Market::new(carriers, Arc::new(cards), Arc::new(usage.states(NOW_MS)), NOW_MS)
}

fn remembered(criterion: &mut Criterion) {
    let market = market();
    let mut memory = Memory::new();
    let policies: Vec<PolicyKey> = (0..500)
        .map(|number| PolicyKey::new(Some(&format!("some.long.name.of.a.topic.{number}.*")), 3))
        .collect();
    for policy in &policies {
        let ask = Ask {
            policy,
            intent: &Intent::DEFAULT,
            key: None,
        };
        if let Decided::Proposed(proposal) = memory.decide(ask, &market, NOW_MS) {
            proposal.committed(&mut memory);
        }
    }
    for number in 0..10_000 {
        let (name, backlog) = (format!("stream:{number}"), Some("pg-v1"));
        let ask = Ask {
            policy: &policies[0],
            intent: &Intent::DEFAULT,
            key: Some(Key { name: &name, backlog }),
        };
        if let Decided::Proposed(proposal) = memory.decide(ask, &market, NOW_MS) {
            proposal.committed(&mut memory);
        }
    }
    let keys = [
        ("without a key", None),
        (
            "of a key",
            Some(Key {
                name: "stream:with-a-usual-id",
                backlog: None,
            }),
        ),
    ];
    for (name, key) in keys {
        let mut turn = 0;
        criterion.bench_function(&format!("remembered, {name}"), |bencher| {
            bencher.iter(|| {
                turn = (turn + 7) % policies.len();
                let ask = Ask {
                    policy: &policies[turn],
                    intent: &Intent::DEFAULT,
                    key,
                };
                matches!(
                    black_box(&memory).decide(black_box(ask), &market, NOW_MS),
                    Decided::Remembered(_)
                )
            });
        });
    }
}

fn planned(criterion: &mut Criterion) {
    let market = market();
    let offers: Vec<Offer> = market.carriers.iter().map(|carrier| carrier.offer.clone()).collect();
    let wanted = Intent::DEFAULT.requirements();
    let options = Options {
        rate_cards: &market.cards,
        states: &market.states,
        current: Some("pg-v1"),
        ..Options::at(NOW_MS)
    };
    criterion.bench_function("plan over five offers", |bencher| {
        bencher.iter(|| plan(black_box(&wanted), black_box(&offers), black_box(&options)));
    });
    criterion.bench_function("decide among five carriers", |bencher| {
        bencher.iter(|| decide(black_box(&Intent::DEFAULT), black_box(&market), Some("pg-v1"), NOW_MS));
    });
}

criterion_group!(benches, remembered, planned);
criterion_main!(benches);
