//! The fuzz targets for a moment, on any compiler: the whole corpus, then mutations of it.
//!
//! `OV_FUZZ_SECONDS` lengthens the time for each target, `OV_FUZZ_SEED` repeats a run. `scripts/fuzz.sh` fuzzes in earnest.

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    time::{Duration, Instant},
};

use crate::support::{dice::Dice, process::setting};

#[path = "../../fuzz/src/lib.rs"]
#[expect(unreachable_pub, reason = "it is a crate of its own as well")]
mod targets;

/// Pieces that the parsers give a meaning to.
const PIECES: [&str; 28] = [
    "\0",
    "\"",
    "\\",
    "\\u0000",
    "\\ud800",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    ".",
    "*",
    "@",
    "//",
    "%2e",
    "\n",
    " ",
    "-",
    "0x7f",
    "127.0.0.1",
    "[::1]",
    "::ffff:",
    "localhost",
    "é",
    "。",
    "t=",
    ",v2=",
];
const INPUT_MAX: usize = 4096;

fn run(name: &str, target: fn(&[u8])) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
    let mut files: Vec<_> = fs::read_dir(&directory)
        .unwrap_or_else(|error| panic!("{}: {error}", directory.display()))
        .map(|entry| entry.expect("a file of the corpus").path())
        .collect();
    files.sort();
    let corpus: Vec<Vec<u8>> = files
        .iter()
        .map(|file| fs::read(file).expect("a readable file"))
        .collect();
    assert!(corpus.len() >= 5, "the corpus of {name} has {} files", corpus.len());
    let seed = setting("OV_FUZZ_SEED").unwrap_or_else(rand::random);
    let judge = |input: &[u8]| {
        let judged = catch_unwind(AssertUnwindSafe(|| target(input)));
        assert!(
            judged.is_ok(),
            "OV_FUZZ_SEED={seed}: {name} fails on {:?}",
            String::from_utf8_lossy(input)
        );
    };
    corpus.iter().for_each(|input| judge(input));
    let mut dice = Dice::of(seed);
    let until = Instant::now() + Duration::from_secs(setting("OV_FUZZ_SECONDS").unwrap_or(1));
    while Instant::now() < until {
        let mut input = corpus[dice.below(corpus.len())].clone();
        for _ in 0..=dice.below(4) {
            mutate(&mut input, &corpus, &mut dice);
        }
        input.truncate(INPUT_MAX);
        judge(&input);
    }
}

fn mutate(input: &mut Vec<u8>, corpus: &[Vec<u8>], dice: &mut Dice) {
    let at = dice.below(input.len() + 1);
    let end = at + dice.below(input.len() - at + 1);
    match dice.below(6) {
        0 if at < input.len() => input[at] ^= 1 << dice.below(8),
        0 | 1 => drop(input.drain(at..end)),
        2 => {
            let copy = input[at..end].to_vec();
            input.splice(at..at, copy);
        }
        3 => {
            let piece = PIECES[dice.below(PIECES.len())];
            input.splice(at..at, piece.bytes());
        }
        4 => {
            let other = &corpus[dice.below(corpus.len())];
            let from = dice.below(other.len() + 1);
            input.splice(at..end, other[from..].iter().copied());
        }
        _ => input.insert(at, u8::try_from(dice.below(256)).expect("a byte")),
    }
}

#[test]
fn envelopes() {
    run("envelope", targets::envelope);
}

#[test]
fn topic_patterns() {
    run("topic_pattern", targets::topic_pattern);
}

#[test]
fn cursors() {
    run("cursor", targets::cursor);
}

#[test]
fn signature_headers() {
    run("signature", targets::signature);
}

#[test]
fn trace_contexts() {
    run("traceparent", targets::traceparent);
}

#[test]
fn endpoints_of_apps() {
    run("app_endpoint", targets::app_endpoint);
}
