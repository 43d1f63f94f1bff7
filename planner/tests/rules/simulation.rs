//! The simulator: the shipped scenarios come out as their page tells, and a file that is wrong is refused by name.

use openvibe_events_planner::simulate::{
    CarrierReport, ClassReport, Lane, Report, SCENARIO_BYTES_MAX, Scenario, ScenarioMistakes, draw, run,
};
use openvibe_events_planner::{Class, SHIPPED_RATE_CARDS};
use serde_json::{Value, json};

const OUTAGE: &str = include_str!("../../../scenarios/outage.json");
const SLOW_BROKER: &str = include_str!("../../../scenarios/slow-broker.json");
const ALLOWANCE: &str = include_str!("../../../scenarios/allowance.json");
const SWITCHES: &str = include_str!("../../../scenarios/switches.json");

fn ran(text: &str) -> Report {
    run(&Scenario::parse("scenario.json", text.as_bytes()).expect("a scenario"))
}

fn lane<'a>(report: &'a Report, name: &str) -> &'a Lane {
    report.lanes.iter().find(|lane| lane.traffic == name).expect("a stream")
}

fn class(report: &Report, class: Class) -> &ClassReport {
    report.classes.iter().find(|one| one.class == class).expect("a class")
}

fn carrier<'a>(report: &'a Report, id: &str) -> &'a CarrierReport {
    report
        .carriers
        .iter()
        .find(|carrier| carrier.id == id)
        .expect("a carrier")
}

/// Where a stream was: carriers, and the whole seconds at which it came to them.
fn course(report: &Report, name: &str) -> Vec<(String, i64)> {
    let segments = &lane(report, name).segments;
    segments
        .iter()
        .map(|one| (one.carrier.clone(), (one.from_ms - report.start_ms) / 1000))
        .collect()
}

/// The streams as they went, each moment within a few seconds of what is expected.
#[track_caller]
fn went(report: &Report, name: &str, expected: &[(&str, i64, i64)]) {
    let found = course(report, name);
    let fits = found.len() == expected.len()
        && found
            .iter()
            .zip(expected)
            .all(|((carrier, at_s), (other, from_s, to_s))| carrier == other && (from_s..=to_s).contains(&at_s));
    assert!(fits, "{name} went {found:?}, not {expected:?}");
}

#[test]
fn a_broker_that_dies_is_left_within_two_seconds_and_comes_back_by_itself() {
    let report = ran(OUTAGE);
    // Gone: noticed at once, back at once. Stalled: five calls run into their deadline; back with the next trial.
    went(
        &report,
        "posts",
        &[
            ("valkey-v1", 0, 0),
            ("pg-v1", 1200, 1202),
            ("valkey-v1", 1800, 1802),
            ("pg-v1", 3000, 3002),
            ("valkey-v1", 4800, 4860),
        ],
    );
    went(
        &report,
        "presence",
        &[("nats-v1", 0, 0), ("pg-v1", 3600, 3602), ("nats-v1", 3900, 3902)],
    );
    // Critical work does not go back: whoever has it keeps it.
    went(&report, "payments", &[("valkey-v1", 0, 0), ("pg-v1", 1200, 1202)]);
    let reasons: Vec<&str> = carrier(&report, "valkey-v1")
        .unavailable
        .iter()
        .map(|one| one.reason.as_str())
        .collect();
    assert_eq!(reasons, ["not connected (valkey-v1)", "breaker open (valkey-v1)"]);
    let queue = class(&report, Class::Queue);
    assert!(queue.left_to_poll > 0 && queue.failing_s <= 4.0, "{queue:?}");
    assert!(
        queue.without_carrier_s == 0.0,
        "the floor is an eligible carrier: {queue:?}"
    );
    assert_eq!(
        queue.events,
        lane(&report, "posts").events + lane(&report, "payments").events
    );
    let moved = &report
        .moves
        .iter()
        .find(|one| one.from.as_deref() == Some("valkey-v1"))
        .expect("a move")
        .reasons;
    assert_eq!(moved[0], "valkey-v1 is no longer eligible: moved");
}

#[test]
fn work_leaves_a_slow_broker_returns_when_it_is_fast_and_ignores_wavering() {
    let report = ran(SLOW_BROKER);
    for name in ["presence", "chat"] {
        // Nothing at 45 minutes, when NATS is a tenth slower than Valkey.
        went(
            &report,
            name,
            &[("nats-v1", 0, 0), ("valkey-v1", 900, 903), ("nats-v1", 1800, 1860)],
        );
    }
    // Its backlog keeps the key on the slow broker until it has drained.
    went(
        &report,
        "orders",
        &[("nats-js-v1", 0, 0), ("pg-v1", 2400, 2402), ("nats-js-v1", 3000, 3060)],
    );
    assert!(lane(&report, "orders").mean_wake_ms > lane(&report, "presence").mean_wake_ms);
}

#[test]
fn an_allowance_is_used_up_to_its_end_and_hardly_beyond() {
    let report = ran(ALLOWANCE);
    let notifications = lane(&report, "notifications");
    assert!(
        notifications.segments.iter().all(|one| one.carrier == "valkey-v1"),
        "it is after latency"
    );
    let cheap = course(&report, "statistics");
    assert!(
        cheap.len() > 2 && cheap.len() < 4 * 61,
        "it goes where it is free, a few times a day: {}",
        cheap.len()
    );
    // 200 million of each month are free; all of it on one carrier would have cost 81 dollars.
    let woken = carrier(&report, "valkey-v1").woken;
    assert!((380_000_000..430_000_000).contains(&woken), "{woken}");
    assert!(report.cost_usd > 0.0 && report.cost_usd < 4.0, "{}", report.cost_usd);
    let last = report.cost.last().expect("points");
    assert!((last.cost_usd - report.cost_usd).abs() < 1e-9 && last.at_ms == report.end_ms);
    assert!(
        report
            .cost
            .is_sorted_by(|a, b| a.at_ms <= b.at_ms && a.cost_usd <= b.cost_usd)
    );
    let events = (f64::from(u32::try_from(woken).expect("small")) - 4e8) * 0.2e-6;
    assert!(
        report.cost_usd <= events,
        "{}: what gathered is paid for once",
        report.cost_usd
    );
}

/// One stream on Valkey, of which every signal costs a dollar.
fn priced(per_second: u32, key: Option<&str>) -> Report {
    let mut cards: Value = serde_json::from_str(SHIPPED_RATE_CARDS).expect("JSON");
    for card in cards.as_array_mut().expect("cards") {
        card["free_allowance"] = json!(0);
        card["unit_price_usd"] = json!(if card["id"] == "rc-valkey-v1" { 1 } else { 1000 });
    }
    let mut scenario = json!({
        "title": "priced", "start": "2026-10-01T00:00:00Z", "duration": "10s", "rate_cards": cards,
        "carriers": [{ "id": "valkey-v1" }],
        "traffic": [{
            "name": "all", "per_second": per_second,
            "policy": { "class": "domain", "durability": "optional", "delivery_semantics": "at_least_once" },
        }],
    });
    if let Some(key) = key {
        scenario["traffic"][0]["key"] = json!(key);
    }
    ran(&scenario.to_string())
}

#[test]
fn signals_that_gather_are_paid_for_once() {
    let cost = |per_second| priced(per_second, None).cost_usd;
    assert!((cost(10) - 100.0).abs() < 0.5, "hardly two of them meet: {}", cost(10));
    // One each two milliseconds is the most there can be.
    let flood = cost(10_000);
    assert!((4_990.0..=5_000.0).contains(&flood), "{flood}");
    let busy = cost(500);
    assert!((3_600.0..3_700.0).contains(&busy), "{busy}");
}

#[test]
fn what_is_recorded_is_the_decision_of_the_policy() {
    for key in [None, Some("account:7")] {
        assert_eq!(priced(10, key).recorded, 1, "{key:?}");
    }
}

#[test]
fn switches_and_prices_take_effect_and_nobody_eligible_means_the_floor() {
    let report = ran(SWITCHES);
    went(
        &report,
        "orders",
        &[("nats-js-v1", 0, 0), ("pg-v1", 3600, 3602), ("nats-js-v1", 7200, 7260)],
    );
    assert_eq!(carrier(&report, "cloud-v1").woken, 0, "no price, no work");
    // Cheapest: the remote queue while it is cheaper than the database, or while that is switched off.
    went(
        &report,
        "webhooks",
        &[
            ("pg-v1", 0, 0),
            ("remote-v1", 10_800, 10_802),
            ("pg-v1", 21_600, 21_602),
            ("remote-v1", 26_400, 26_402),
            ("pg-v1", 27_600, 27_602),
        ],
    );
    // Only the remote queue meets the ceiling; without it nobody does.
    let fallbacks: Vec<bool> = lane(&report, "audit").segments.iter().map(|one| one.fallback).collect();
    assert_eq!(fallbacks, [false, true, false]);
    let without_s = class(&report, Class::Queue).without_carrier_s;
    assert!((1190.0..1270.0).contains(&without_s), "{without_s}");
    assert_eq!(
        class(&report, Class::Stream).without_carrier_s.to_bits(),
        0.0_f64.to_bits()
    );
    let said = "no eligible candidate: falling back to pg-v1";
    assert!(
        report
            .moves
            .iter()
            .any(|one| one.reasons.iter().any(|reason| reason == said))
    );
}

#[test]
fn the_same_scenario_gives_the_same_report_and_another_seed_another() {
    let again = || serde_json::to_string(&ran(OUTAGE)).expect("JSON");
    assert_eq!(again(), again());
    let other = ran(&OUTAGE.replace("\"seed\": 1", "\"seed\": 9"));
    assert_ne!(serde_json::to_string(&other).expect("JSON"), again());
}

/// Every event is accounted for: woken by a carrier or left to the poll.
#[test]
fn nothing_is_lost_in_a_report() {
    for text in [OUTAGE, SLOW_BROKER, SWITCHES] {
        let report = ran(text);
        let events: u64 = report.lanes.iter().map(|lane| lane.events).sum();
        let left: u64 = report.lanes.iter().map(|lane| lane.left_to_poll).sum();
        let woken: u64 = report.carriers.iter().map(|carrier| carrier.woken).sum();
        assert_eq!(events, woken + left, "{}", report.title);
        for lane in &report.lanes {
            assert_eq!(lane.segments.first().map(|one| one.from_ms), Some(report.start_ms));
            assert_eq!(lane.segments.last().map(|one| one.until_ms), Some(report.end_ms));
            assert!(
                lane.segments.windows(2).all(|pair| pair[0].until_ms == pair[1].from_ms),
                "without a hole"
            );
        }
    }
}

#[test]
fn a_picture_shows_every_stream_carrier_and_outage_and_escapes_what_it_was_given() {
    let picture = draw(&ran(OUTAGE));
    for part in [
        "A broker dies",
        "TOPIC",
        "QUEUE",
        "payments · account:7",
        "valkey-v1",
        "not connected (nats-v1)",
        "<polyline",
    ] {
        assert!(picture.contains(part), "{part}");
    }
    let slow = draw(&ran(SLOW_BROKER));
    assert!(
        slow.contains("nats-v1: latency 90 ms") && slow.contains("orders: backlog"),
        "what happened is told"
    );
    let mut named: Value = serde_json::from_str(OUTAGE).expect("JSON");
    named["title"] = json!("<script>alert(\"1\") & \u{7} more");
    named["traffic"][0]["name"] = json!("</title><b>");
    let hostile = draw(&ran(&named.to_string()));
    assert!(!hostile.contains("<script") && !hostile.contains("<b>") && !hostile.contains('\u{7}'));
    assert!(hostile.contains("&lt;script&gt;alert(&quot;1&quot;) &amp;  more"));
    for picture in [picture, hostile] {
        let (opened, closed) = (picture.matches("<text").count(), picture.matches("</text>").count());
        assert_eq!(opened, closed);
        assert!(picture.starts_with("<svg xmlns=") && picture.ends_with("</svg>\n") && !picture.contains("NaN"));
    }
}

#[test]
fn a_run_of_one_second_and_of_no_events_is_a_run() {
    let mut short: Value = serde_json::from_str(OUTAGE).expect("JSON");
    short["duration"] = json!("1s");
    short["happenings"] = json!([]);
    short["traffic"][0]["per_second"] = json!(0);
    let report = ran(&short.to_string());
    assert_eq!(
        (report.end_ms - report.start_ms, lane(&report, "posts").events),
        (1000, 0)
    );
    assert!(!draw(&report).contains("NaN"));
}

fn mistakes(scenario: &Value) -> ScenarioMistakes {
    Scenario::parse("mine.json", scenario.to_string().as_bytes()).expect_err("a mistake")
}

#[track_caller]
fn refused(change: impl FnOnce(&mut Value), words: &[&str]) {
    let mut scenario: Value = serde_json::from_str(OUTAGE).expect("JSON");
    change(&mut scenario);
    let said = mistakes(&scenario).to_string();
    for word in ["mine.json"].iter().chain(words) {
        assert!(said.contains(word), "{word} is missing from: {said}");
    }
}

#[test]
fn each_mistake_names_file_field_and_remedy() {
    refused(
        |one| one["colour"] = json!(1),
        &[
            "mine.json: colour: is no member of a scenario: remove it, or choose of title",
            "traffic",
        ],
    );
    refused(
        |one| one["traffic"][0]["perSecond"] = json!(1),
        &["traffic[0].perSecond: is no member of a stream of events", "per_second"],
    );
    refused(
        |one| one["carriers"][0]["speed"] = json!(1),
        &["carriers[0].speed: is no member of a carrier", "latency_ms"],
    );
    refused(
        |one| one["happenings"][0]["why"] = json!(1),
        &["happenings[0].why: is no member of a happening", "what"],
    );
    refused(
        |one| one["happenings"][0]["what"] = json!("flood"),
        &["happenings[0].what: must be one of outage", "got \"flood\""],
    );
    refused(
        |one| one["duration"] = json!("soon"),
        &["duration: must be a duration such as", "got \"soon\""],
    );
    refused(
        |one| one["duration"] = json!("401d"),
        &["duration: must be from 1s to 400d"],
    );
    refused(
        |one| one["start"] = json!("today"),
        &["start: must be a time such as", "got \"today\""],
    );
    refused(
        |one| one["poll_ms"] = json!(0),
        &["poll_ms: must be a number from 1 to 60000, got 0"],
    );
    refused(|one| one["traffic"] = json!([]), &["traffic: is empty"]);
    refused(
        |one| one["traffic"][1]["name"] = json!("posts"),
        &["traffic[1].name: \"posts\" is there already: choose another"],
    );
    refused(
        |one| one["traffic"][1]["per_second"] = json!(-1),
        &["traffic[1].per_second", "got -1"],
    );
    refused(
        |one| one["traffic"][1]["policy"] = json!({}),
        &["traffic[1].policy", "missing field `class`"],
    );
    refused(
        |one| one["traffic"][1]["policy"]["class"] = json!("warp"),
        &["unknown variant `warp`"],
    );
    refused(
        |one| one["carriers"][1]["id"] = json!("valkey-v1"),
        &["carriers[1]", "is there already"],
    );
    refused(
        |one| one["carriers"][0] = json!({ "id": "uds-v1", "classes": ["TOPIC"], "latency_ms": 1 }),
        &[
            "carriers[0].provider: is missing",
            "carriers[0].rate_card",
            "pg-v1, valkey-v1",
        ],
    );
    refused(
        |one| one["carriers"][0]["classes"] = json!(["ALL"]),
        &["carriers[0].classes: must be a list of TOPIC, QUEUE and STREAM, got [\"ALL\"]"],
    );
    refused(
        |one| one["happenings"][0]["carrier"] = json!("kafka-v1"),
        &["happenings[0].carrier", "there are pg-v1, valkey-v1"],
    );
    refused(
        |one| one["happenings"][0]["carrier"] = json!("pg-v1"),
        &["is the database itself"],
    );
    refused(
        |one| one["happenings"][0]["factor"] = json!(2),
        &["happenings[0].factor: has no meaning for this kind of happening: remove it"],
    );
    refused(
        |one| one["happenings"][0]["at"] = json!("3h"),
        &["happenings[0].at", "behind the end"],
    );
    refused(
        |one| one["happenings"][0] = json!({ "what": "latency", "carrier": "valkey-v1", "at": "1m" }),
        &["happenings[0].latency_ms: is missing"],
    );
    refused(
        |one| one["happenings"][0] = json!({ "what": "price", "rate_card": "rc-x", "at": "1m" }),
        &[
            "\"rc-x\" is not in this scenario",
            "rc-valkey-v1",
            "happenings[0].unit_price_usd: is missing",
        ],
    );
    refused(
        |one| one["happenings"][0] = json!({ "what": "backlog", "traffic": "posts", "at": "1m" }),
        &["happenings[0].traffic: has no key"],
    );
    refused(
        |one| one["rate_cards"] = json!([{ "id": "rc-a" }]),
        &["rate_cards: rc-a: metric: is missing"],
    );
    refused(
        |one| one["happenings"] = vec![one["happenings"][0].clone(); 1001].into(),
        &["happenings: has 1001 entries; a scenario has at most 1000: remove some"],
    );

    let several = |scenario: &str| {
        Scenario::parse("mine.json", scenario.as_bytes())
            .expect_err("a mistake")
            .to_string()
    };
    assert!(several("{").starts_with("mine.json: is not JSON"), "{}", several("{"));
    assert_eq!(
        several("[]"),
        "mine.json: must be an object, the members of a scenario between { and }"
    );
    assert!(
        several(r#"{"title":"a","title":"b"}"#).contains("mine.json: title: is given more than once: keep one"),
        "{}",
        several(r#"{"title":"a","title":"b"}"#)
    );
    assert!(several(&" ".repeat(SCENARIO_BYTES_MAX + 1)).contains("at most 1048576"));
}

#[test]
fn all_mistakes_are_told_at_once_and_none_that_only_follows_from_another() {
    let mut scenario: Value = serde_json::from_str(OUTAGE).expect("JSON");
    scenario["duration"] = json!(7);
    scenario["colour"] = json!("red");
    scenario.as_object_mut().expect("an object").remove("title");
    scenario["carriers"][0]["latency_ms"] = json!("slow");
    scenario["traffic"][0]["duration"] = json!("1h");
    scenario["traffic"][0]["per_second"] = json!(null);
    scenario["traffic"][1]["policy"] = json!({ "class": "domain" });
    scenario["rate_cards"] = json!([{ "id": "rc-a" }]);
    scenario["happenings"] = json!([
        { "what": "outage", "carrier": "valkey-v1", "at": "soon" },
        { "what": "price", "rate_card": "rc-b", "unit_price_usd": 1, "at": "1m" },
        { "what": "surge", "traffic": "posts", "at": "1m" },
        7
    ]);
    let found = mistakes(&scenario).mistakes;
    for start in [
        "colour: is no member",
        "title: is missing",
        "duration: must be a duration",
        "rate_cards: rc-a: provider: is missing",
        "carriers[0].latency_ms: must be a number, got \"slow\"",
        "traffic[0].duration: is no member of a stream of events",
        "traffic[0].per_second: is missing: give a number",
        "traffic[1].policy: is no delivery policy (missing field `durability`",
        "happenings[0].at: must be a duration",
        "happenings[2].factor: is missing",
        "happenings[3]: must be an object",
    ] {
        assert!(
            found.iter().any(|one| one.starts_with(start)),
            "{start} is missing from {found:#?}"
        );
    }
    // What is named is known, however it is described; and no card is missed where none can be read.
    assert!(
        !found.iter().any(|one| one.contains("is not in this scenario")),
        "{found:#?}"
    );

    let many: Vec<Value> = (0..60).map(|n| json!({ "name": format!("lane-{n}") })).collect();
    scenario["traffic"] = many.into();
    let found = mistakes(&scenario).mistakes;
    assert_eq!(found.len(), 51, "{found:#?}");
    assert!(found[50].starts_with("and "), "{}", found[50]);
}
