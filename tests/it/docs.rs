//! What the pages say about code: the examples verify what the service signs, and refuse what they must.
//!
//! The examples in Python and JavaScript need their interpreters and are run by `scripts/docs.sh`, on the same deliveries.

mod verify;

use std::sync::Arc;

use openvibe_events::domain::signature::{header_v2, verify_v2};
use planner::{
    Carrier, Class, Estimate, Health, Intent, Market, Objective, Offer, RateCards, Usage, Verdict, latency_op,
};
use serde_json::Value;

const PAGE: &str = include_str!("../../docs/delivery.md");
const FABRIC: &str = include_str!("../../docs/fabric.md");
const README: &str = include_str!("../../README.md");
/// The secret of the deliveries on the page.
const SECRET: &str = "0123456789abcdef0123456789abcdef";
const TOLERANCE_S: u64 = 300;

/// The only fenced block of a language that contains `word`.
fn block<'a>(page: &'a str, language: &str, word: &str) -> &'a str {
    let fence = format!("\n```{language}\n");
    let mut found = page.split(fence.as_str()).skip(1);
    let block = found.find(|block| block.contains(word)).expect("a block");
    block.split("```").next().expect("its end")
}

#[test]
fn the_deliveries_on_the_page_are_judged_as_it_says() {
    let deliveries: Vec<Value> = serde_json::from_str(block(PAGE, "json", "genuine")).expect("JSON");
    assert!(PAGE.contains(SECRET) && deliveries.len() > 10);
    for delivery in &deliveries {
        let text = |name: &str| delivery[name].as_str().expect("text");
        let (now_s, body, signature) = (
            delivery["now"].as_u64().expect("a time"),
            text("body"),
            text("signature"),
        );
        let service = verify_v2(
            signature,
            None,
            body.as_bytes(),
            SECRET,
            i64::try_from(now_s).expect("a time"),
            300,
        );
        let example = verify::verify(body.as_bytes(), signature, SECRET, now_s, TOLERANCE_S);
        assert_eq!(
            (Value::from(service), Value::from(example)),
            (delivery["genuine"].clone(), delivery["genuine"].clone()),
            "{delivery}"
        );
    }
    let signed = header_v2(1_761_033_600, &["new", SECRET], b"{}");
    assert!(verify::verify(b"{}", &signed, SECRET, 1_761_033_600, TOLERANCE_S));
    assert!(!verify::verify(b"{}", &signed, "other", 1_761_033_600, TOLERANCE_S));
}

#[test]
fn the_page_shows_the_example_that_is_tested_and_the_readme_the_same() {
    let (_, tested) = include_str!("docs/verify.rs")
        .split_once("\n\n")
        .expect("a first line of its own");
    assert_eq!(block(PAGE, "rust", "fn verify"), tested.replace("pub(super) fn", "fn"));
    assert_eq!(
        block(README, "python", "def verify"),
        block(PAGE, "python", "def verify")
    );
}

/// What the planner says of a type without a policy, on the carriers of the page, after so many signals of Valkey.
fn example(intent: &Intent, current: Option<&str>, signals: u64) -> Value {
    const NOW_MS: i64 = 1_797_076_800_000;
    let carrier = |id: &'static str, provider: &'static str, card: &'static str, ms: f64| Carrier {
        classes: vec![Class::Queue],
        offer: Offer {
            capabilities: vec!["events:gateway".into()],
            latency_ms: vec![(latency_op(Class::Queue).into(), ms)],
            ..Offer::of(id, provider, card)
        },
        health: Health::Up,
    };
    let carriers = vec![
        carrier("pg-v1", "postgres", "rc-pg-v1", 250.0),
        carrier("valkey-v1", "valkey", "rc-valkey-v1", 2.0),
        carrier("cloud-v1", "cloud", "rc-cloud-queue-v1", 40.0),
    ];
    let cards = include_bytes!("../../rate-cards/rate-cards.json");
    let cards = RateCards::parse("rate-cards.json", cards, NOW_MS).expect("the shipped cards");
    let mut usage = Usage::new(NOW_MS);
    usage.set("valkey", "signal-operation", signals, NOW_MS);
    let market = Market::new(carriers, Arc::new(cards), Arc::new(usage.states(NOW_MS)), NOW_MS);
    let mut placement = planner::decide(intent, &market, current, NOW_MS).placement;
    for candidate in &mut placement.candidates {
        // The difference of two large sums, of which the page shows what it is about.
        if let Verdict::Eligible(Estimate {
            cost_usd: Some(cost), ..
        }) = &mut candidate.verdict
        {
            *cost = (*cost * 1e12).round() / 1e12;
        }
    }
    serde_json::to_value(placement).expect("JSON")
}

#[test]
fn the_examples_of_the_fabric_are_what_the_planner_says() {
    let page = |word: &str| -> Value { serde_json::from_str(block(FABRIC, "json", word)).expect("JSON") };
    let (free, used_up) = (0, 2_000_000_000);
    assert_eq!(page("objective balanced"), example(&Intent::DEFAULT, None, free));
    assert_eq!(
        page("stays on valkey-v1"),
        example(&Intent::DEFAULT, Some("valkey-v1"), used_up)
    );
    let cheapest = Intent {
        objective: Objective::Cheapest,
        ..Intent::DEFAULT
    };
    assert_eq!(example(&cheapest, Some("valkey-v1"), used_up)["selected"], "pg-v1");
}
