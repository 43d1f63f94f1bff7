//! `openvibe-events carriers simulate` as an operator calls it: tables, JSON, a picture, and clear words for a bad file.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::{Value, json};
use ulid::Ulid;

const PAGE: &str = include_str!("../../docs/simulator.md");
const SCENARIOS: [&str; 4] = ["outage", "slow-broker", "allowance", "switches"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The command, in the repository's directory and without any configuration.
fn simulate(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_openvibe-events"))
        .args(["carriers", "simulate"])
        .args(args)
        .current_dir(root())
        .env_clear()
        .output()
        .expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// A file of this test, removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(content: &str) -> Self {
        let path = std::env::temp_dir().join(format!("ov-simulate-{}", Ulid::generate()));
        fs::write(&path, content).expect("a scratch file");
        Self(path)
    }

    fn name(&self) -> &str {
        self.0.to_str().expect("UTF-8")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_file(&self.0).ok();
    }
}

#[test]
fn the_page_shows_what_the_command_prints_and_draws() {
    let printed = simulate(&["--scenario", "scenarios/outage.json"]);
    assert!(printed.status.success(), "{}", text(&printed.stderr));
    let printed = text(&printed.stdout);
    assert!(
        PAGE.contains(printed.trim_end()),
        "docs/simulator.md shows another output than\n{printed}"
    );
    for name in SCENARIOS {
        let (scenario, picture) = (format!("scenarios/{name}.json"), Scratch::new(""));
        let output = simulate(&["--scenario", &scenario, "--svg", picture.name()]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let committed = fs::read_to_string(root().join(format!("docs/simulator/{name}.svg"))).expect("the picture");
        assert!(
            fs::read_to_string(&picture.0).expect("the drawing") == committed,
            "docs/simulator/{name}.svg is out of date: draw it with carriers simulate --scenario {scenario} --svg"
        );
        assert!(
            PAGE.contains(&format!("(simulator/{name}.svg)")) && PAGE.contains(&scenario),
            "{name} is on the page"
        );
    }
}

#[test]
fn json_has_every_move_and_the_same_sums() {
    let output = simulate(&["--scenario", "scenarios/switches.json", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("one document");
    let total = report["moves_total"].as_u64().expect("a count");
    let moves = report["moves"].as_array().expect("a list");
    let firsts = moves.iter().filter(|one| one["from"].is_null()).count() as u64;
    assert_eq!(moves.len() as u64, total + firsts);
    assert_eq!(report["start"], "2026-10-21T06:00:00.000Z");
    assert_eq!(report["classes"][0]["class"], "QUEUE");
    let spent: f64 = report["carriers"]
        .as_array()
        .expect("carriers")
        .iter()
        .filter_map(|one| one["cost_usd"].as_f64())
        .sum();
    assert!((spent - report["cost_usd"].as_f64().expect("a sum")).abs() < 1e-9);
}

#[test]
fn a_scenario_that_cannot_be_used_is_refused_with_file_field_and_remedy() {
    let outage = fs::read_to_string(root().join("scenarios/outage.json")).expect("the scenario");
    let outage: Value = serde_json::from_str(&outage).expect("JSON");
    let refused = |scenario: &str, words: &[&str]| {
        let output = simulate(&["--scenario", scenario]);
        let said = text(&output.stderr);
        assert_eq!(
            (output.status.code(), output.stdout.as_slice()),
            (Some(2), &b""[..]),
            "{said}"
        );
        for word in words {
            assert!(said.contains(word), "{word} is missing from: {said}");
        }
        let named = format!("openvibe-events: {scenario}: ");
        assert!(
            said.lines().all(|line| line.starts_with(&named)),
            "one line for each: {said}"
        );
    };
    refused(
        "scenarios/none.json",
        &["scenarios/none.json: cannot be read", "scenarios/outage.json"],
    );
    refused("scenarios", &["scenarios: cannot be read"]);
    let broken = Scratch::new("{\"title\": ");
    refused(broken.name(), &[broken.name(), "is not JSON"]);
    let mut unknown = outage.clone();
    unknown["trafic"] = json!([]);
    let unknown = Scratch::new(&unknown.to_string());
    refused(
        unknown.name(),
        &[unknown.name(), "trafic: is no member of a scenario", "traffic"],
    );
    // The policy is held to the whole contract, as the route that stores policies holds it.
    let mut policy = outage.clone();
    policy["traffic"][1]["policy"]["mode"] = json!("fast");
    policy["traffic"][2]["policy"]["max_payload_bytes"] = json!(0);
    policy["traffic"][2]["policy"]["ordering"] = json!({ "key": "subject" });
    policy["traffic"][0]["duration"] = json!("1h");
    policy["happenings"][0]["carrier"] = json!("kafka-v1");
    let policy = Scratch::new(&policy.to_string());
    refused(
        policy.name(),
        &[
            "traffic[1].policy: \"mode\" is no member of a policy",
            "traffic[2].policy.max_payload_bytes: must be a whole number",
            "traffic[2].policy.ordering.scope: is missing; it must be a string",
            "traffic[0].duration: is no member of a stream of events: remove it",
            "happenings[0].carrier: \"kafka-v1\" is not in this scenario; there are",
        ],
    );
    let output = simulate(&[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("--scenario"));
}

#[test]
fn a_picture_that_cannot_be_written_fails_and_says_where() {
    let output = simulate(&["--scenario", "scenarios/outage.json", "--svg", "/nowhere/picture.svg"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("cannot write /nowhere/picture.svg"), "{said}");
}

#[test]
fn help_names_the_page_and_the_exit_codes() {
    let output = simulate(&["--help"]);
    assert!(output.status.success());
    let said = text(&output.stdout);
    for word in [
        "--scenario <FILE>",
        "--json",
        "--svg <OUT>",
        "docs/simulator.md",
        "Exit codes",
    ] {
        assert!(said.contains(word), "{word} is missing from\n{said}");
    }
}
