//! A file of rate cards that cannot be used: `check-config` and `serve` say the same of it, and stop.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use serde_json::{Value, json};
use ulid::Ulid;

/// The service's own binary with these variables only.
fn run(command: &str, env: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_openvibe-events"))
        .arg(command)
        .env_clear()
        .envs(env.iter().copied())
        .output()
        .expect("the binary runs")
}

fn said(output: &Output) -> String {
    let both = [output.stdout.as_slice(), &output.stderr].concat();
    String::from_utf8_lossy(&both).into_owned()
}

#[test]
fn a_bad_file_of_cards_stops_check_config_and_serve_with_the_same_words() {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cards-{}.json", Ulid::generate()));
    let path = file.to_str().expect("text");
    let mut cards: Value = serde_json::from_str(include_str!("../../rate-cards/rate-cards.json")).expect("JSON");
    cards[0]["unit_price_usd"] = json!(-1);
    cards[1]["colour"] = json!("red");
    fs::write(&file, cards.to_string()).expect("a file");
    for (cards, mistakes) in [
        (
            path,
            vec![
                "unit_price_usd: must be a number of 0 or more, got -1",
                "colour: is no field of a rate card: remove it",
            ],
        ),
        ("/nope", vec!["/nope: cannot be read (No such file or directory"]),
    ] {
        // No server listens there: nothing may be asked of the database before the cards are known to be good.
        let env = [
            ("EVENTS_RATE_CARDS", cards),
            ("DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none"),
            ("EVENTS_WORKER", "perhaps"),
        ];
        for command in ["check-config", "serve"] {
            let output = run(command, &env);
            let said = said(&output);
            assert_eq!(output.status.code(), Some(2), "{command}: {said}");
            assert!(said.contains("EVENTS_WORKER must be on or off"), "{command}: {said}");
            for mistake in &mistakes {
                assert!(said.contains(mistake), "{command}: {mistake} is missing from {said}");
            }
            let named = format!("EVENTS_RATE_CARDS is wrong: {cards}: ");
            assert_eq!(said.matches(&named).count(), mistakes.len(), "{command}: {said}");
        }
    }
    fs::remove_file(&file).expect("it is there");
}

#[test]
fn what_is_no_regular_file_is_refused_at_once() {
    let fifo = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cards-{}.fifo", Ulid::generate()));
    let path = fifo.to_str().expect("text");
    let made = Command::new("mkfifo").arg(path).status().expect("mkfifo runs");
    assert!(made.success());
    // Nobody ever writes to the one, and the other has no end.
    for path in [path, "/dev/zero", "/"] {
        let output = run("check-config", &[("EVENTS_RATE_CARDS", path)]);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        let named = format!("{path}: cannot be read (it is no regular file)");
        assert!(said.contains(&named), "{named} is missing from {said}");
    }
    fs::remove_file(&fifo).expect("it is there");
}
