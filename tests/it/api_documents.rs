//! The documents that say what runs here and what it allows.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use openvibe_events::identity::limits::Limit;
use reqwest::Method;
use serde_json::{Value, json};

use crate::{
    api_world::{Site, consumer, operator, refused, send, text},
    support::{
        client::Response,
        contracts::{self, assert_valid},
        network::TokenSpec,
    },
};

const RELEASE: &str = "/release.json";
const LIMITS: &str = "/limits.json";

async fn document(site: &Site, path: &str) -> Response {
    let answer = site.one().get(path, None).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(answer.header("content-type"), "application/json; charset=utf-8");
    assert_eq!(answer.header("access-control-allow-origin"), "*");
    answer
}

/// The newest migration in the repository.
fn newest_migration() -> i64 {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations");
    let names = fs::read_dir(folder).expect("the migrations").map(|entry| {
        let name = entry.expect("a file").file_name().into_string().expect("an ASCII name");
        name.split('_').next().and_then(|number| number.parse().ok())
    });
    names.flatten().max().expect("a migration")
}

#[tokio::test]
async fn the_release_is_told_with_every_member_in_order_and_named_alike_everywhere() {
    let env = [
        ("RELEASE_COMMIT", "0123456789ABCDEF0123456789abcdef01234567"),
        ("RELEASE_AT", "2026-11-02T10:30:00+01:00"),
        ("MIN_CLIENT_RELEASE", "89abcdef"),
    ];
    let site = Site::own(1, &env).await;
    let answer = document(&site, RELEASE).await;
    assert_eq!(answer.header("cache-control"), "no-cache, max-age=0");
    assert_valid("registry.release-manifest@1", &answer.body);
    let start =
        r#"{"service":"events","release":"0123456789ab","released_at":"2026-11-02T09:30:00.000Z","booted_at":"2"#;
    assert!(answer.text.starts_with(start), "{}", answer.text);
    let members = [
        ("contracts_version", json!("0.215.0")),
        ("packages", json!({})),
        ("min_client_release", json!("89abcdef")),
        ("mixed_version_window_hours", json!(24)),
        (
            "components",
            json!({ "server": { "kind": "server", "version": "0123456789ab" } }),
        ),
        ("assets", json!({})),
        ("schema_generation", json!(newest_migration())),
        ("schema_compatible_from", json!(1)),
        ("contract_ranges", answer.body["contract_ranges"].clone()),
        ("metrics_url", Value::Null),
        ("client_generation", Value::Null),
        ("min_client_generation", Value::Null),
        ("shell", Value::Null),
    ];
    let places: Vec<_> = members
        .iter()
        .map(|(member, value)| {
            assert_eq!(answer.body[member], *value, "{member}");
            answer.text.find(&format!("\"{member}\":"))
        })
        .collect();
    assert!(
        places.iter().all(Option::is_some) && places.is_sorted(),
        "{}",
        answer.text
    );
    let named = answer.body.as_object().map(serde_json::Map::len);
    assert_eq!(named, Some(members.len() + 4), "{}", answer.text);

    let report = site.one().get("/api/ready", None).await.expect(200);
    assert_eq!(text(&report, "release"), "0123456789ab");
    let metrics = site.one().get("/metrics", None).await.text;
    let series = r#"release_info{service="events",release="0123456789ab"} 1"#;
    assert!(metrics.contains(series), "{metrics}");
}

#[tokio::test]
async fn a_release_that_nobody_names_is_the_commit_of_the_binary() {
    let site = Site::shared().await;
    let answer = document(&site, RELEASE).await;
    assert_valid("registry.release-manifest@1", &answer.body);
    assert_eq!(answer.body["min_client_release"], Value::Null);
    let again = document(&site, RELEASE).await;
    assert_eq!(again.text, answer.text, "it stays what it is");
    let head = site.one().request(Method::HEAD, RELEASE, None);
    let head = site.one().send(head).await;
    assert_eq!((head.status, head.text.as_str()), (200, ""));
    let written = send(site.one(), "POST", RELEASE, None, "{}".to_owned()).await;
    refused(&written, 404, "events.not_found");
}

#[tokio::test]
async fn every_contract_of_the_wire_is_told_in_the_major_that_is_in_the_repository() {
    let site = Site::shared().await;
    let answer = document(&site, RELEASE).await;
    let told: Vec<String> = answer.body["contract_ranges"]
        .as_object()
        .expect("ranges by id")
        .iter()
        .map(|(id, range)| {
            let major = text(range, "version").split('.').next().expect("a major").to_owned();
            assert_eq!(
                range["accepts"],
                format!(">={major}.0.0 <{}.0.0", major.parse::<u32>().expect("a number") + 1)
            );
            format!("{id}@{major}")
        })
        .collect();
    let kept: BTreeSet<&String> = contracts::all().keys().filter(|id| id.starts_with("events.")).collect();
    assert_eq!(told.iter().collect::<BTreeSet<_>>(), kept);
}

/// The members of a limit of apps: unit, production, sandbox, capability and what happens beyond it.
fn shown<'a>(document: &'a Value, id: &str) -> [&'a Value; 5] {
    let limits = document["limits"].as_array().expect("limits");
    let found = limits.iter().find(|limit| limit["id"] == id);
    let limit = found.unwrap_or_else(|| panic!("no {id} in {document}"));
    ["unit", "production", "sandbox", "capability", "exceeded"].map(|member| &limit[member])
}

#[tokio::test]
async fn limits_of_apps_are_those_of_the_running_configuration() {
    let env = [
        ("EVENTS_APP_SANDBOX_PUBLISH_PER_MINUTE", "7"),
        ("EVENTS_APP_MAX_SUBSCRIPTIONS", "0"),
        ("EVENTS_RETENTION_DAYS", "20"),
        ("EVENTS_REPLAY_RETENTION_DAYS", "0"),
        ("EVENTS_MAX_PAYLOAD_BYTES", "1000"),
        ("REALTIME_MAX_TOPICS", "3"),
    ];
    let (own, shared) = tokio::join!(Site::own(1, &env), Site::shared());
    let configured = document(&own, LIMITS).await;
    assert_eq!(configured.header("cache-control"), "public, max-age=300");
    assert_valid("service.limits@1", &configured.body);
    let start =
        r#"{"service":"events","scope":"project and environment","limits":[{"id":"publish_per_minute","label":""#;
    assert!(configured.text.starts_with(start), "{}", configured.text);
    let default = document(&shared, LIMITS).await.body;
    assert_valid("service.limits@1", &default);

    let quota = "429 events.quota_exceeded";
    let publish = "events.app.publish";
    let read = "events.app.read";
    for (id, unit, capability, exceeded, by_default, here) in [
        (
            "publish_per_minute",
            "per_minute",
            json!(publish),
            quota,
            json!([120, 30]),
            json!([120, 7]),
        ),
        (
            "retained_bytes",
            "bytes",
            json!(publish),
            quota,
            json!([52_428_800, 5_242_880]),
            json!([52_428_800, 5_242_880]),
        ),
        (
            "retention_days",
            "days",
            json!(read),
            "pruned",
            json!([30, 7]),
            json!([20, 7]),
        ),
        (
            "replay_retention_days",
            "days",
            json!(read),
            "gap",
            json!([365, 0]),
            json!([0, 0]),
        ),
        (
            "subscriptions",
            "count",
            json!("events.app.subscribe"),
            quota,
            json!([20, 5]),
            json!([null, 5]),
        ),
        (
            "payload_bytes",
            "bytes",
            json!(publish),
            "413 events.payload_too_large",
            json!([65_536, 65_536]),
            json!([1000, 1000]),
        ),
        (
            "batch",
            "count",
            json!(publish),
            "413 events.batch_too_large",
            json!([100, 100]),
            json!([100, 100]),
        ),
        (
            "realtime_topics",
            "count",
            Value::Null,
            "400 realtime.too_many_topics",
            json!([20, 20]),
            json!([3, 3]),
        ),
    ] {
        for (document, values) in [(&default, by_default), (&configured.body, here)] {
            let wanted = [&json!(unit), &values[0], &values[1], &capability, &json!(exceeded)];
            assert_eq!(shown(document, id), wanted, "{id}");
        }
    }
    assert_eq!(default["limits"].as_array().map(Vec::len), Some(8));
    assert_eq!(
        default["rate_limits"],
        json!([]),
        "the shared world does not limit its callers"
    );
}

#[tokio::test]
async fn limits_of_callers_are_those_that_refuse_them() {
    let env = [
        ("EVENTS_LIMITS", "on"),
        ("EVENTS_LIMITS_MINUTE", "2"),
        ("EVENTS_LIMITS_HOUR", "3"),
    ];
    let site = Site::own(1, &env).await;
    let answer = document(&site, LIMITS).await;
    assert_valid("service.limits@1", &answer.body);
    let rates = answer.body["rate_limits"].as_array().expect("limits of callers");
    let told: Vec<&str> = rates.iter().map(|rate| text(rate, "id")).collect();
    assert_eq!(told, Limit::ALL.map(Limit::id));
    let rate = |id: &str| rates.iter().find(|rate| rate["id"] == id).expect("a limit");
    for (id, minute, hour) in [
        ("events.event.publish", 600, 20_000),
        ("events.subscription.update", 30, 300),
        ("events.delivery.skip", 6, 60),
        ("events.checkpoint.read", 2, 3),
    ] {
        let wanted = json!({
            "id": id, "minute": minute, "hour": hour, "per": "principal", "exceeded": "429 rate_limited"
        });
        assert_eq!(*rate(id), wanted);
    }
    // One more than it says is refused, whichever of its windows is full.
    let token = TokenSpec::service(&consumer()).sign();
    let mut admitted = 0;
    let refusal = loop {
        let answer = site.one().get("/api/v1/checkpoints?topic=live.*", Some(&token)).await;
        if answer.status != 200 {
            break answer;
        }
        admitted += 1;
    };
    assert_eq!(refusal.status, 429, "{}", refusal.text);
    assert!((2..=3).contains(&admitted), "{admitted}");
    let skip = json!({ "subscription_id": "sub_x", "event_ids": [] });
    let mut answers = Vec::new();
    for _ in 0..13 {
        let answer = site
            .one()
            .post("/api/v1/deliveries/skip", Some(&operator()), &skip)
            .await;
        answers.push(answer.status);
    }
    assert!(answers[..6].iter().all(|status| *status == 404), "{answers:?}");
    assert_eq!(answers.last(), Some(&429), "{answers:?}");
}
