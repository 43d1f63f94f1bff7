//! Delivery policies over HTTP: written by operators, in force for the next publish of every process.

use std::collections::HashMap;

use reqwest::Method;
use serde_json::{Value, json};

use crate::{
    api_world::{Site, consumer, operator, refused, send, text},
    support::{
        client::{Client, Response},
        contracts::{all, assert_valid, entries, folder, read_json},
        envelopes::{Envelope, envelope, unique_segment},
        network::TokenSpec,
    },
};

const POLICIES: &str = "/api/v1/delivery-policies";
const RESULT: &str = "events.delivery-policy-result@1";

/// A policy that asks for nothing special.
fn plain() -> Value {
    json!({ "class": "domain", "durability": "required", "delivery_semantics": "at_least_once" })
}

/// The same with one more or another member.
fn with(member: &str, value: impl Into<Value>) -> Value {
    let mut policy = plain();
    policy[member] = value.into();
    policy
}

/// A policy that orders by what the path names.
fn ordered(key: &str) -> Value {
    with("ordering", json!({ "scope": "any", "key": key }))
}

async fn put(client: &Client, pattern: &str, policy: &Value) -> Response {
    client
        .put(&format!("{POLICIES}/{pattern}"), Some(&operator()), policy)
        .await
}

/// Writes a policy and judges the answer.
async fn written(client: &Client, pattern: &str, policy: &Value) -> Value {
    let row = put(client, pattern, policy).await.expect(200);
    assert_valid(RESULT, &row);
    assert_eq!((text(&row, "pattern"), &row["policy"]), (pattern, policy));
    row
}

async fn delete(client: &Client, pattern: &str) -> Response {
    let path = format!("{POLICIES}/{pattern}");
    client
        .send(client.request(Method::DELETE, &path, Some(&operator())))
        .await
}

/// What is in force for a type.
async fn resolved(client: &Client, event_type: &str) -> Value {
    let path = format!("{POLICIES}/resolve?event_type={event_type}");
    let answer = client.get(&path, Some(&operator())).await.expect(200);
    assert_valid(RESULT, &answer);
    assert_eq!(answer["event_type"], event_type);
    answer
}

/// The only delivery of an event: its key, whether it may run, and whether it may be sent once only.
async fn delivery(site: &Site, event_id: &str) -> (Option<String>, bool, bool) {
    sqlx::query_as("SELECT ordering_key, head, at_most_once FROM deliveries WHERE event_id = $1")
        .bind(event_id)
        .fetch_one(&site.pool)
        .await
        .unwrap_or_else(|error| panic!("one delivery of {event_id}: {error}"))
}

async fn publish(client: &Client, event: &Envelope) {
    client.publish(event).await.expect(201);
}

#[tokio::test]
async fn a_policy_is_written_counted_listed_and_removed() {
    let site = Site::own(2, &[]).await;
    let list = async |client: &Client| {
        let answer = client.get(POLICIES, Some(&operator())).await.expect(200);
        assert_valid(RESULT, &answer);
        answer["policies"].as_array().expect("a list").clone()
    };
    assert_eq!(list(site.one()).await, Vec::<Value>::new());

    let first = written(site.one(), "live.stream.*", &ordered("subject")).await;
    assert_eq!((&first["revision"], text(&first, "updated_by")), (&json!(1), "ops"));
    assert_eq!(first.get("warnings"), None, "everything in it has an effect");
    let token = TokenSpec::service("night").caps(&["events.delivery.*"]).sign();
    let path = format!("{POLICIES}/live.stream.*");
    let second = site.two().put(&path, Some(&token), &plain()).await.expect(200);
    assert_eq!((&second["revision"], text(&second, "updated_by")), (&json!(2), "night"));
    assert!(text(&second, "updated_at") >= text(&first, "updated_at"));
    written(site.one(), "*", &plain()).await;
    let exact = written(site.two(), "live.stream.ended", &plain()).await;
    let rows = list(site.one()).await;
    let patterns: Vec<&str> = rows.iter().map(|row| text(row, "pattern")).collect();
    assert_eq!(patterns, ["*", "live.stream.*", "live.stream.ended"]);
    assert_eq!(rows[1..], [second, exact], "as the writes answered");

    let gone = delete(site.one(), "live.stream.*").await;
    assert_eq!((gone.status, gone.text.as_str()), (204, ""));
    refused(&delete(site.two(), "live.stream.*").await, 404, "events.not_found");
    assert_eq!(list(site.two()).await.len(), 2);
    let again = written(site.one(), "live.stream.*", &plain()).await;
    assert_eq!(again["revision"], 1, "what was removed is forgotten");
}

#[tokio::test]
async fn what_has_no_effect_is_kept_and_named() {
    let site = Site::shared().await;
    let pattern = format!("live.{}.*", unique_segment());
    let policy = json!({
        "class": "critical", "durability": "required", "delivery_semantics": "at_least_once",
        "ordering": { "scope": "any", "key": "subject" },
        "latency": { "target_p95_ms": 1.5e-300, "maximum_p95_ms": 1e300 },
        "retention": { "hot": "30d", "archive": "7y" },
        "routing": { "objective": "cheapest", "multi_provider": true },
        "batching": { "max_messages": 10 },
        "residency": { "region": "eu \u{1f30d}" },
        "max_payload_bytes": 65_536,
    });
    let row = written(site.one(), &pattern, &policy).await;
    let warnings: Vec<&str> = row["warnings"]
        .as_array()
        .expect("warnings")
        .iter()
        .flat_map(Value::as_str)
        .collect();
    let named: Vec<&str> = warnings
        .iter()
        .filter_map(|warning| warning.split(' ').next())
        .collect();
    assert_eq!(
        named,
        [
            "latency.target_p95_ms",
            "retention",
            "routing.multi_provider",
            "batching",
            "residency",
            "max_payload_bytes"
        ]
    );
    assert!(
        warnings.iter().all(|warning| warning.contains("no effect")),
        "{warnings:?}"
    );
    assert_eq!(resolved(site.two(), &pattern.replace('*', "x")).await["policy"], policy);
}

#[tokio::test]
async fn the_policy_in_force_is_the_most_specific_one_or_the_default() {
    let site = Site::shared().await;
    let topic = format!("live.{}", unique_segment());
    let of = async |rest: &str| resolved(site.two(), &format!("{topic}.{rest}")).await;
    assert_eq!(
        of("order.placed").await,
        json!({
            "event_type": format!("{topic}.order.placed"), "pattern": null, "revision": 0, "policy": plain(),
            "carrier_class": "QUEUE",
        })
    );
    for rest in ["*", "order.*", "order.placed"] {
        written(site.one(), &format!("{topic}.{rest}"), &plain()).await;
    }
    let second = with("class", "bulk");
    written(site.one(), &format!("{topic}.order.*"), &second).await;
    for (rest, winner, revision) in [
        ("order.placed", "order.placed", 1),
        ("order.paid", "order.*", 2),
        ("order.line.added", "order.*", 2),
        ("stock.low", "*", 1),
    ] {
        let found = of(rest).await;
        assert_eq!(found["pattern"], format!("{topic}.{winner}"), "{rest}");
        assert_eq!(found["revision"], revision, "{rest}");
    }
    assert_eq!(of("order.paid").await["policy"], second);
    assert_eq!(delete(site.one(), &format!("{topic}.order.*")).await.status, 204);
    assert_eq!(
        of("order.paid").await["pattern"],
        format!("{topic}.*"),
        "in force on every process at once"
    );
}

#[tokio::test]
async fn the_carrier_class_follows_from_the_policy() {
    let site = Site::shared().await;
    let topic = format!("live.{}", unique_segment());
    let mut ephemeral = ordered("subject");
    ephemeral["class"] = json!("realtime_ephemeral");
    let mut loose = ephemeral.clone();
    loose["durability"] = json!("optional");
    for (policy, class) in [
        (plain(), "QUEUE"),
        (ordered("subject"), "STREAM"),
        (ordered(""), "QUEUE"),
        (ephemeral, "STREAM"),
        (loose, "TOPIC"),
        (with("class", "realtime_ephemeral"), "TOPIC"),
        (with("class", "critical"), "QUEUE"),
    ] {
        let row = written(site.one(), &format!("{topic}.x"), &policy).await;
        assert_eq!(row["carrier_class"], class, "{policy}");
        assert_eq!(
            resolved(site.one(), &format!("{topic}.x")).await["carrier_class"],
            class,
            "{policy}"
        );
    }
}

#[tokio::test]
async fn what_is_no_policy_is_refused_by_the_name_of_its_fault() {
    let site = Site::shared().await;
    let pattern = format!("live.{}.x", unique_segment());
    let about = HashMap::from([
        ("unknown-class", "class"),
        ("no-class", "class"),
        ("no-durability", "durability"),
        ("no-semantics", "delivery_semantics"),
        ("unknown-durability", "durability"),
        ("exactly-once", "delivery_semantics"),
        ("carrier-class-stated", "carrier"),
        ("ordering-without-scope", "scope"),
        ("ordering-without-key", "key"),
        ("ordering-with-more", "direction"),
        ("numeric-key", "key"),
        ("ordering-is-text", "ordering"),
        ("negative-latency", "target_p95_ms"),
        ("latency-is-text", "maximum_p95_ms"),
        ("latency-with-more", "p50_ms"),
        ("years-in-the-log", "hot"),
        ("years-for-replay", "replay"),
        ("archive-without-unit", "archive"),
        ("retention-with-more", "cold"),
        ("objective-of-the-planner", "objective"),
        ("multi-provider-is-text", "multi_provider"),
        ("routing-with-more", "via"),
        ("batch-of-none", "max_messages"),
        ("batch-delay-with-a-fraction", "max_delay_ms"),
        ("batching-with-more", "max_bytes"),
        ("numeric-region", "region"),
        ("inherited-region-is-text", "inherit_project_region"),
        ("residency-with-more", "zone"),
        ("payload-over-64-kib", "max_payload_bytes"),
        ("payload-of-no-bytes", "max_payload_bytes"),
        ("list", "object"),
    ]);
    let fixtures = folder().join("events/fixtures/delivery-policy.v1");
    let invalid = entries(&fixtures.join("invalid"));
    assert_eq!(invalid.len(), about.len(), "every bad example has its member here");
    let judge = async |body: String, member: &str| {
        let path = format!("{POLICIES}/{pattern}");
        let answer = send(site.one(), "PUT", &path, Some(&operator()), body.clone()).await;
        let document = refused(&answer, 400, "events.bad_request");
        assert!(text(&document, "detail").contains(member), "{body}: {document}");
    };
    for file in invalid {
        let name = file.file_stem().and_then(|name| name.to_str()).expect("a name");
        judge(read_json(&file).to_string(), about[name]).await;
    }
    let base = r#""class":"domain","durability":"required","delivery_semantics":"at_least_once""#;
    for (members, member) in [
        (r#","class":"bulk""#, "class"),
        (r#","latency":{"target_p95_ms":1e131073}"#, "target_p95_ms"),
        (r#","latency":{"target_p95_ms":1e-20000}"#, "target_p95_ms"),
        (r#","batching":{"max_delay_ms":0e99999}"#, "max_delay_ms"),
        (r#","ordering":{"scope":"\u0000","key":"subject"}"#, "scope"),
        (r#","residency":{"region":"\ud800"}"#, "region"),
        (r#","\u0000":1"#, "no member"),
    ] {
        judge(format!("{{{base}{members}}}"), member).await;
    }
    assert_eq!(
        resolved(site.one(), &pattern).await["revision"],
        0,
        "nothing was stored"
    );

    let valid = &all()["events.delivery-policy@1"];
    for file in entries(&fixtures.join("valid")) {
        let policy = read_json(&file);
        assert_eq!(valid.mistakes(&policy), Vec::<String>::new());
        written(site.one(), &pattern, &policy).await;
    }
}

#[tokio::test]
async fn a_pattern_or_a_type_that_is_none_is_refused() {
    let site = Site::shared().await;
    let long = format!("live.{}", "x".repeat(196));
    for pattern in [
        "Live.x",
        "live..x",
        "live.*.*",
        "live.x-y",
        "live.x%20",
        "a,b",
        long.as_str(),
    ] {
        refused(&put(site.one(), pattern, &plain()).await, 422, "events.bad_topic");
        refused(&delete(site.one(), pattern).await, 422, "events.bad_topic");
    }
    refused(
        &delete(site.one(), &format!("live.{}", unique_segment())).await,
        404,
        "events.not_found",
    );
    let token = operator();
    for query in [
        "",
        "?event_type=",
        &format!("?event_type={long}"),
        "?type=live.x",
        "?event_type=a&event_type=b",
    ] {
        let answer = site
            .one()
            .get(&format!("{POLICIES}/resolve{query}"), Some(&token))
            .await;
        let document = refused(&answer, 400, "events.bad_request");
        assert!(text(&document, "detail").contains("event_type"), "{query}: {document}");
    }
    resolved(site.one(), &long[..200]).await;
}

#[tokio::test]
async fn only_operators_see_and_write_policies() {
    let site = Site::shared().await;
    let pattern = format!("live.{}.x", unique_segment());
    let (row, resolve) = (
        format!("{POLICIES}/{pattern}"),
        format!("{POLICIES}/resolve?event_type=live.x"),
    );
    let service = site.one().service_token("live");
    for (method, path) in [("GET", POLICIES), ("GET", &resolve), ("PUT", &row), ("DELETE", &row)] {
        let body = plain().to_string();
        let foreign = send(site.one(), method, path, Some(&service), body.clone()).await;
        let document = refused(&foreign, 403, "capability.denied");
        assert!(
            text(&document, "detail").contains("events.delivery.admin"),
            "{document}"
        );
        refused(&send(site.one(), method, path, None, body).await, 401, "token.missing");
    }
    assert_eq!(
        resolved(site.one(), &pattern).await["revision"],
        0,
        "nothing was stored"
    );
}

#[tokio::test]
async fn a_policy_answered_by_one_process_orders_the_next_publish_of_the_other() {
    let site = Site::shared().await;
    let topic = format!("live.{}.x", unique_segment());
    site.subscribe(&consumer(), &topic, "policies").await;
    let event = |account: &str| {
        envelope("live")
            .event_type(&topic)
            .payload(json!({ "account": account }))
    };
    let before = event("a");
    publish(site.two(), &before).await;
    assert_eq!(delivery(&site, before.id()).await, (None, true, false));
    // Often, so that a process that only looks at times would be caught.
    for turn in 0..10 {
        let (writes, publishes) = match turn % 2 {
            0 => (site.one(), site.two()),
            _ => (site.two(), site.one()),
        };
        written(writes, &topic, &ordered("payload.account")).await;
        let (first, second, other) = (
            event(&format!("a{turn}")),
            event(&format!("a{turn}")),
            event(&format!("b{turn}")),
        );
        for one in [&first, &second, &other] {
            publish(publishes, one).await;
        }
        let key = |account: char| Some(format!("{account}{turn}"));
        assert_eq!(
            delivery(&site, first.id()).await,
            (key('a'), true, false),
            "the first of its key may run"
        );
        assert_eq!(
            delivery(&site, second.id()).await,
            (key('a'), false, false),
            "the next one waits"
        );
        assert_eq!(delivery(&site, other.id()).await, (key('b'), true, false));

        let mut once = plain();
        once["delivery_semantics"] = json!("at_most_once");
        written(writes, &topic, &once).await;
        let single = event("a");
        publish(publishes, &single).await;
        assert_eq!(delivery(&site, single.id()).await, (None, true, true));
        assert_eq!(delete(writes, &topic).await.status, 204);
        let after = event("a");
        publish(publishes, &after).await;
        assert_eq!(
            delivery(&site, after.id()).await,
            (None, true, false),
            "no policy, no order"
        );
    }
}

#[tokio::test]
async fn the_key_of_a_delivery_is_what_the_policy_names_or_the_subject() {
    let site = Site::shared().await;
    let topic = format!("live.{}.x", unique_segment());
    site.subscribe(&consumer(), &topic, "keys").await;
    let event = || {
        envelope("live")
            .event_type(&topic)
            .subject("stream", "str_42")
            .payload(json!({ "room": 17, "deep": { "x": "inner" }, "empty": "", "long": "é".repeat(500) }))
    };
    let key = async || {
        let event = event();
        publish(site.two(), &event).await;
        delivery(&site, event.id()).await.0
    };
    assert_eq!(key().await, None, "no policy, no key");
    for (path, expected) in [
        ("subject", "stream:str_42"),
        ("payload.room", "17"),
        ("actor.id", "live"),
        ("payload.deep.x", "inner"),
        ("payload.none", "stream:str_42"),
        ("payload.empty", "stream:str_42"),
        ("payload.deep", "stream:str_42"),
        ("trace_id", "stream:str_42"),
    ] {
        written(site.one(), &topic, &ordered(path)).await;
        assert_eq!(key().await.as_deref(), Some(expected), "{path}");
    }
    written(site.one(), &topic, &ordered("payload.long")).await;
    let long = key().await.expect("a key");
    assert_eq!(long.chars().count(), 200);
    assert!(long.starts_with("éééé"), "{long}");
}

#[tokio::test]
async fn a_key_that_text_cannot_hold_stops_no_publish() {
    let site = Site::shared().await;
    let topic = format!("live.{}.x", unique_segment());
    site.subscribe(&consumer(), &topic, "odd-keys").await;
    written(site.one(), &topic, &ordered("payload.room")).await;
    let room = |room: String| envelope("live").event_type(&topic).payload(json!({ "room": room }));
    for make in [
        |end: char| format!("a\0{end}"),
        |end: char| format!("{}{end}", "\u{1f30d}".repeat(300)),
    ] {
        let (one, other, same) = (room(make('1')), room(make('2')), room(make('1')));
        for event in [&one, &other, &same] {
            publish(site.one(), event).await;
        }
        let keys = [
            delivery(&site, one.id()).await.0.expect("a key"),
            delivery(&site, other.id()).await.0.expect("a key"),
            delivery(&site, same.id()).await.0.expect("a key"),
        ];
        assert_ne!(keys[0], keys[1], "two rooms keep two orders");
        assert_eq!(keys[0], keys[2]);
        assert!(keys[0].chars().count() <= 200);
    }
}
