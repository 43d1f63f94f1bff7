//! The cards that come with the service, their schema, and every mistake that a file of cards can hold.

use openvibe_events_planner::simulate::Scenario;
use openvibe_events_planner::{CARDS_BYTES_MAX, CardMistakes, Charged, RateCards};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::offers::NOW_MS;

const SHIPPED: &str = include_str!("../../../rate-cards/rate-cards.json");
const SCHEMA: &str = include_str!("../../../rate-cards/rate-cards.schema.json");

fn schema() -> jsonschema::Validator {
    let schema: Value = serde_json::from_str(SCHEMA).expect("JSON");
    jsonschema::draft202012::options()
        .should_validate_formats(true)
        .should_ignore_unknown_formats(false)
        .offline()
        .build(&schema)
        .expect("a schema")
}

fn parsed(cards: &Value) -> Result<RateCards, CardMistakes> {
    RateCards::parse("cards.json", cards.to_string().as_bytes(), NOW_MS)
}

fn valid() -> Value {
    serde_json::from_str(SHIPPED).expect("JSON")
}

/// The shipped cards with the second one changed.
fn changed(change: impl FnOnce(&mut serde_json::Map<String, Value>)) -> Value {
    let mut cards = valid();
    change(cards[1].as_object_mut().expect("a card"));
    cards
}

#[test]
fn the_shipped_cards_are_the_four_and_the_cloud_queue_has_no_price() {
    let cards = RateCards::parse("rate-cards.json", SHIPPED.as_bytes(), NOW_MS).expect("valid");
    let found: Vec<_> = cards
        .iter()
        .map(|card| (card.id.as_str(), card.unit_price_usd, card.free_allowance))
        .collect();
    assert_eq!(
        found,
        [
            ("rc-nats-js-v1", 0.000_000_2, 1e9),
            ("rc-nats-v1", 0.000_000_1, 1e9),
            ("rc-pg-v1", 0.000_000_5, 1e9),
            ("rc-valkey-v1", 0.000_000_2, 1e9),
        ]
    );
    assert!(cards.get("rc-cloud-queue-v1").is_none());
    assert!(schema().is_valid(&valid()));
}

/// The schema is for editors and other readers; what one refuses the other must refuse, except what only the file as a
/// whole, or the day it is read, can tell.
#[test]
fn the_schema_and_the_reader_agree() {
    let schema = schema();
    let mut cases = vec![
        valid(),
        json!([]),
        json!({}),
        json!([1]),
        json!([{}]),
        json!("cards"),
        json!([valid()[0]]),
    ];
    for field in valid()[1].as_object().expect("a card").keys() {
        cases.push(changed(|card| {
            card.remove(field);
        }));
        for wrong in [
            json!(null),
            json!(""),
            json!(" "),
            json!("x"),
            json!(-1),
            json!(0),
            json!(1.5),
            json!(true),
            json!([]),
        ] {
            cases.push(changed(|card| {
                card.insert(field.clone(), wrong);
            }));
        }
    }
    for (field, value) in [
        ("effective_until", json!("2027-01-01")),
        ("effective_until", json!("2027-02-30")),
        ("effective_until", json!("tomorrow")),
        ("effective_from", json!("2026-9-1")),
        ("verified_at", json!("2026-09-01T00:00:00Z")),
        ("source", json!("prices")),
        ("source", json!("mailto:prices@example.org")),
        ("unit_price", json!(1)),
        ("reset_period", json!("week")),
        ("reset_period", json!("day")),
        ("reset_period", json!("none")),
    ] {
        cases.push(changed(|card| {
            card.insert(field.to_owned(), value);
        }));
    }
    cases.push(changed(|card| {
        card.insert("reset_period".to_owned(), json!("none"));
        card.insert("free_allowance".to_owned(), json!(0));
    }));
    for case in cases {
        assert_eq!(
            parsed(&case).is_ok(),
            schema.is_valid(&case),
            "{case:#}\n{:?}",
            parsed(&case).err()
        );
    }
}

#[track_caller]
fn refused(cards: &Value, card: &str, field: &str, words: &str) {
    let mistakes = parsed(cards).expect_err("a mistake");
    let [mistake] = &mistakes.mistakes[..] else {
        panic!("one mistake, not {mistakes}")
    };
    assert_eq!(
        (mistake.card.as_deref(), mistake.field.as_deref()),
        (Some(card), Some(field)),
        "{mistakes}"
    );
    assert!(mistake.message.contains(words), "{mistakes}");
    let line = mistakes.to_string();
    for part in ["cards.json", card, field] {
        assert!(line.contains(part), "{part} is missing from {line}");
    }
}

#[test]
fn each_mistake_names_card_field_and_remedy() {
    let with = |field: &str, value: Value| {
        changed(|card| {
            card.insert(field.to_owned(), value);
        })
    };
    let id = "rc-valkey-v1";
    refused(
        &changed(|card| {
            card.remove("metric");
        }),
        id,
        "metric",
        "is missing: give a text",
    );
    refused(
        &changed(|card| {
            card.remove("id");
        }),
        "card 2",
        "id",
        "is missing",
    );
    refused(
        &with("colour", json!("red")),
        id,
        "colour",
        "is no field of a rate card: remove it",
    );
    refused(
        &with("unit_price_usd", json!(-1e-7)),
        id,
        "unit_price_usd",
        "0 or more, got -1e-7",
    );
    refused(
        &with("free_allowance", json!("many")),
        id,
        "free_allowance",
        "0 or more, got \"many\"",
    );
    refused(
        &with("id", json!("rc-pg-v1")),
        "rc-pg-v1",
        "id",
        "is the id of an earlier card too",
    );
    for period in ["day", "none"] {
        refused(
            &with("reset_period", json!(period)),
            id,
            "reset_period",
            &format!(
                "must be month where free_allowance is more than 0, since use is counted by the month, got \"{period}\""
            ),
        );
        let free_of_none = changed(|card| {
            card.insert("reset_period".to_owned(), json!(period));
            card.insert("free_allowance".to_owned(), json!(0));
        });
        assert!(parsed(&free_of_none).is_ok(), "no allowance begins anew");
    }
    refused(
        &with("effective_from", json!("2026-13-01")),
        id,
        "effective_from",
        "such as 2026-09-01",
    );
    refused(
        &with("effective_until", json!("2026-08-31")),
        id,
        "effective_until",
        "lies before effective_from",
    );
    refused(
        &with("effective_until", json!("2026-10-20")),
        id,
        "effective_until",
        "expired on 2026-10-20",
    );
    assert!(
        parsed(&with("effective_until", json!("2026-10-21"))).is_ok(),
        "its last day is not over"
    );
    refused(&with("source", json!("the owner")), id, "source", "must be an address");
    let repeated = valid()
        .to_string()
        .replacen(r#""metric":"#, r#""metric":"x","metric":"#, 1);
    let mistakes = RateCards::parse("cards.json", repeated.as_bytes(), NOW_MS).expect_err("a mistake");
    assert_eq!(
        mistakes.to_string(),
        "cards.json: rc-pg-v1: metric: is given more than once: keep one"
    );
}

#[test]
fn a_card_names_what_its_carrier_is_counted_by() {
    let valkey = Charged {
        carrier: "valkey-v1",
        rate_card: "rc-valkey-v1",
        provider: "valkey",
        metric: "signal-operation",
    };
    let absent = Charged {
        rate_card: "rc-absent-v1",
        ..valkey
    };
    let checked = |card: &Value| parsed(card).expect("cards").check("cards.json", &[valkey, absent]);
    assert_eq!(checked(&valid()), Ok(()));
    let both = changed(|card| {
        card.insert("provider".to_owned(), json!("Valkey"));
        card.insert("metric".to_owned(), json!("signals"));
    });
    assert_eq!(
        checked(&both).expect_err("two mistakes").lines(),
        [
            "cards.json: rc-valkey-v1: provider: must be \"valkey\", which is what valkey-v1 is counted by, got \"Valkey\"",
            "cards.json: rc-valkey-v1: metric: must be \"signal-operation\", which is what valkey-v1 is counted by, got \"signals\"",
        ]
    );
}

#[test]
fn all_mistakes_come_together() {
    let mut cards = valid();
    cards[0]["unit_price_usd"] = json!(-1);
    cards[1]["id"] = json!("rc-pg-v1");
    cards[2]["colour"] = json!(1);
    cards[3] = json!("a card");
    let mistakes = parsed(&cards).expect_err("four mistakes").mistakes;
    let found: Vec<_> = mistakes
        .iter()
        .map(|one| (one.card.as_deref(), one.field.as_deref()))
        .collect();
    assert_eq!(
        found,
        [
            (Some("rc-pg-v1"), Some("unit_price_usd")),
            (Some("rc-pg-v1"), Some("id")),
            (Some("rc-nats-v1"), Some("colour")),
            (Some("card 4"), None),
        ]
    );
}

#[test]
fn a_file_of_another_kind_is_refused_as_a_whole() {
    for (text, words) in [
        ("", "is not JSON"),
        ("[{]", "is not JSON"),
        ("[1, 2", "is not JSON"),
        ("{\"cards\": []}", "must be a JSON array of rate cards"),
        ("\u{feff}[]", "is not JSON"),
    ] {
        let mistakes = RateCards::parse("cards.json", text.as_bytes(), NOW_MS).expect_err("a mistake");
        assert!(mistakes.to_string().contains(words), "{text}: {mistakes}");
        assert_eq!(mistakes.mistakes.len(), 1);
    }
    assert!(RateCards::parse("cards.json", b"[\"\xff\"]", NOW_MS).is_err());
    let large = vec![b' '; CARDS_BYTES_MAX + 1];
    let mistakes = RateCards::parse("cards.json", &large, NOW_MS).expect_err("too large");
    assert!(mistakes.to_string().contains("at most 1048576"), "{mistakes}");
    let numbers = Value::from((0..1000).collect::<Vec<_>>());
    let mistakes = parsed(&numbers).expect_err("a thousand mistakes");
    assert_eq!((mistakes.mistakes.len(), mistakes.unlisted), (50, 950));
    assert!(mistakes.to_string().ends_with("and 950 more"));
}

proptest! {
    /// A damaged file is read or refused, with at least one mistake, and never more than that.
    #[test]
    fn a_damaged_file_is_refused_and_nothing_else(cut in any::<prop::sample::Index>(), length in 0_usize..60, put in "\\PC{0,6}") {
        for text in [SHIPPED, include_str!("../../../scenarios/switches.json")] {
            let at = cut.index(text.len());
            let damaged = [&text.as_bytes()[..at], put.as_bytes(), &text.as_bytes()[(at + length).min(text.len())..]].concat();
            if let Err(found) = RateCards::parse("cards.json", &damaged, NOW_MS) {
                prop_assert!(!found.mistakes.is_empty());
            }
            if let Err(found) = Scenario::parse("scenario.json", &damaged) {
                prop_assert!(!found.mistakes.is_empty());
            }
        }
    }
}
