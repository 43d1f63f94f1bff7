//! What the pages say about code: the examples verify what the service signs, and refuse what they must.
//!
//! The examples in Python and JavaScript need their interpreters and are run by `scripts/docs.sh`, on the same deliveries.

mod verify;

use openvibe_events::domain::signature::{header_v2, verify_v2};
use serde_json::Value;

const PAGE: &str = include_str!("../../docs/delivery.md");
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
