//! Limits per caller: fixed windows of a minute and an hour, counted by each process for each limit and principal.
//!
//! Windows are aligned to the clock, so what takes several requests is done early in a minute, or again.

use std::time::Duration;

use reqwest::Method;
use serde_json::json;

use crate::{
    api_world::{Site, consumer, operator, refused, send},
    support::{
        client::{Client, Response, assert_problem},
        contracts::assert_valid,
        envelopes::{envelope, id},
        network::{TokenSpec, unix_now},
        wait::{eventually, stays},
    },
};

/// What a minute allows where a route says nothing of its own.
const SMALL: usize = 3;
const CHECKPOINT: &str = "/api/v1/checkpoints?topic=live.*";

/// A service that limits, with little allowed by default.
async fn limited(env: &[(&str, &str)]) -> Site {
    let small = SMALL.to_string();
    let all: Vec<(&str, &str)> = [("EVENTS_LIMITS", "on"), ("EVENTS_LIMITS_MINUTE", &small)]
        .into_iter()
        .chain(env.iter().copied())
        .collect();
    Site::own(1, &all).await
}

/// Waits until enough of the minute is left for what follows.
async fn early_in_a_minute() {
    eventually("a minute with 20 seconds left", Duration::from_secs(30), async || {
        unix_now() % 60 < 40
    })
    .await;
}

/// Judges a 429 by its contract, and that it tells of this limit. Answers the seconds to wait.
#[track_caller]
fn limited_by(answer: &Response, limit: &str, allowed: usize) -> u64 {
    let document = assert_problem(answer, 429, "rate_limited");
    assert_valid("errors.rate-limit-problem@1", &document);
    let detail = document["detail"].as_str().expect("a detail");
    assert!(
        detail.contains(limit) && detail.contains(&allowed.to_string()),
        "{detail}"
    );
    document["retry_after_seconds"].as_u64().expect("seconds")
}

async fn checkpoint(client: &Client, token: &str) -> Response {
    client.get(CHECKPOINT, Some(token)).await
}

async fn fill(client: &Client, token: &str) {
    for _ in 0..SMALL {
        checkpoint(client, token).await.expect(200);
    }
}

fn reader() -> String {
    TokenSpec::service(&consumer()).sign()
}

#[tokio::test]
async fn a_full_minute_answers_429_with_the_time_to_its_end() {
    let site = limited(&[]).await;
    early_in_a_minute().await;
    let token = reader();
    fill(site.one(), &token).await;
    let before = unix_now();
    let answer = checkpoint(site.one(), &token).await;
    let wait = limited_by(&answer, "events.checkpoint.read", SMALL);
    let ends: Vec<u64> = [before, unix_now()].iter().map(|now| 60 - now % 60).collect();
    assert!(wait <= ends[0] && wait >= ends[1], "{wait} s, {ends:?}");
    let wait = wait.to_string();
    assert_eq!(answer.header("retry-after"), wait);
    assert_eq!(answer.header("cache-control"), "no-store");
    let start = r#"{"type":"https://openvibe.network/problems/rate_limited","title":"Too many requests","status":429,"#;
    let codes = r#""code":"rate_limited","error":"rate_limited","#;
    let detail = &answer.body["detail"];
    assert_eq!(
        answer.text,
        format!(r#"{start}{codes}"detail":{detail},"retry_after_seconds":{wait}}}"#)
    );
    let log = site.service().log();
    assert!(
        log.contains("[limits]") && log.contains("events.checkpoint.read"),
        "{log}"
    );
}

#[tokio::test]
async fn principals_and_limits_count_apart() {
    let site = limited(&[]).await;
    early_in_a_minute().await;
    let (one, other) = (reader(), reader());
    fill(site.one(), &one).await;
    limited_by(&checkpoint(site.one(), &one).await, "events.checkpoint.read", SMALL);
    fill(site.one(), &other).await;
    let event = format!("/api/v1/events/{}", id("evt"));
    for _ in 0..SMALL {
        refused(&site.one().get(&event, Some(&one)).await, 404, "events.not_found");
    }
    let answer = site.one().get(&event, Some(&one)).await;
    limited_by(&answer, "events.event.read", SMALL);
    site.one().get("/api/v1/events", Some(&one)).await.expect(200);
}

#[tokio::test]
async fn refused_requests_do_not_count_for_the_hour() {
    let hour = (SMALL + 1).to_string();
    let site = limited(&[("EVENTS_LIMITS_HOUR", &hour)]).await;
    // Two minutes of one hour are needed.
    eventually(
        "an hour that goes on for a minute and a half",
        Duration::from_secs(120),
        async || unix_now() % 3_600 < 3_500,
    )
    .await;
    let token = reader();
    // However late in its minute this begins: whatever is left of it is used up.
    let mut admitted = 0;
    let mut refusals = 0;
    while refusals < 5 {
        let answer = checkpoint(site.one(), &token).await;
        if answer.status == 200 {
            admitted += 1;
        } else {
            refusals += 1;
        }
    }
    assert!(admitted == SMALL || admitted == SMALL + 1, "{admitted}");
    if admitted == SMALL {
        eventually(
            "the next minute admits the last of the hour",
            Duration::from_secs(70),
            async || checkpoint(site.one(), &token).await.status == 200,
        )
        .await;
    }
    let before = unix_now();
    let wait = limited_by(
        &checkpoint(site.one(), &token).await,
        "events.checkpoint.read",
        SMALL + 1,
    );
    assert!(
        wait <= 3_600 - before % 3_600 && wait > 60,
        "{wait}: the hour is full, and ends later"
    );
}

#[tokio::test]
async fn enabling_and_disabling_share_one_limit_and_policies_are_written_under_one() {
    let site = limited(&[]).await;
    early_in_a_minute().await;
    let token = reader();
    let toggle = async |verb: &str| {
        let path = format!("/api/v1/subscriptions/{}/{verb}", id("sub"));
        send(site.one(), "POST", &path, Some(&token), "{}".to_owned()).await
    };
    for turn in 0..30 {
        let verb = ["enable", "disable"][turn % 2];
        refused(&toggle(verb).await, 404, "events.not_found");
    }
    for verb in ["enable", "disable"] {
        limited_by(&toggle(verb).await, "events.subscription.toggle", 30);
    }

    let policy = json!({ "class": "bulk", "durability": "none", "delivery_semantics": "at_least_once" });
    let path = "/api/v1/delivery-policies/live.x";
    let write = async |method: Method| {
        let body = policy.to_string();
        send(site.one(), method.as_str(), path, Some(&operator()), body).await
    };
    for turn in 0..30 {
        let answer = write(if turn % 2 == 0 { Method::PUT } else { Method::DELETE }).await;
        assert!(matches!(answer.status, 200 | 204), "{answer:?}");
    }
    for method in [Method::PUT, Method::DELETE] {
        limited_by(&write(method).await, "events.delivery-policy.write", 30);
    }
}

#[tokio::test]
async fn publishing_has_a_limit_of_its_own_which_never_holds_the_network() {
    let site = limited(&[]).await;
    early_in_a_minute().await;
    let publish = async |slug: &str| {
        // What is refused by its content was counted all the same, and is cheap.
        let token = TokenSpec::service(slug).sign();
        site.one().post("/api/v1/events", Some(&token), &json!([])).await.status
    };
    for turn in 0..620 {
        let status = publish("live").await;
        assert_eq!(status == 429, turn >= 600, "request {turn}: {status}");
        assert_ne!(publish("network").await, 429, "request {turn}");
    }
    let event = envelope("network");
    site.one().publish(&event).await.expect(201);
    let network = TokenSpec::service("network").sign();
    fill(site.one(), &network).await;
    let answer = checkpoint(site.one(), &network).await;
    limited_by(&answer, "events.checkpoint.read", SMALL);
}

#[tokio::test]
async fn the_state_of_the_service_is_never_limited() {
    let site = limited(&[("EVENTS_LIMITS_MINUTE", "1"), ("EVENTS_LIMITS_HOUR", "1")]).await;
    for path in ["/api/health", "/api/ready", "/metrics"] {
        for _ in 0..20 {
            assert_eq!(site.one().get(path, None).await.status, 200, "{path}");
        }
    }
}

#[tokio::test]
async fn who_is_refused_for_want_of_authority_is_not_counted() {
    let site = limited(&[]).await;
    early_in_a_minute().await;
    let slug = consumer();
    let bare = TokenSpec::service(&slug).caps(&["events.event.publish"]).sign();
    let token = TokenSpec::service(&slug).sign();
    let expired = TokenSpec::service(&slug).shifted(-400).sign();
    for _ in 0..2 * SMALL {
        refused(&checkpoint(site.one(), &bare).await, 403, "capability.denied");
        refused(&checkpoint(site.one(), &expired).await, 401, "token.expired");
        refused(&site.one().get(CHECKPOINT, None).await, 401, "token.missing");
    }
    fill(site.one(), &token).await;
    limited_by(&checkpoint(site.one(), &token).await, "events.checkpoint.read", SMALL);
    refused(&checkpoint(site.one(), &bare).await, 403, "capability.denied");
    refused(&site.one().get(CHECKPOINT, None).await, 401, "token.missing");
}

#[tokio::test]
async fn a_metric_counts_what_was_refused() {
    let site = limited(&[]).await;
    early_in_a_minute().await;
    let token = reader();
    let series = r#"events_rate_limited_total{limit="events.checkpoint.read",window="minute"}"#;
    let counted = async || {
        let metrics = site.one().get("/metrics", None).await.text;
        let line = metrics
            .lines()
            .find_map(|line| line.strip_prefix(series).map(str::to_owned));
        line.map_or(0, |value| value.trim().parse::<u64>().expect("a count"))
    };
    fill(site.one(), &token).await;
    assert_eq!(counted().await, 0);
    for _ in 0..4 {
        assert_eq!(checkpoint(site.one(), &token).await.status, 429);
    }
    assert_eq!(counted().await, 4);
}

#[tokio::test]
async fn limits_that_are_off_limit_nobody() {
    let site = limited(&[("EVENTS_LIMITS", "off")]).await;
    let token = reader();
    stays("every request is admitted", Duration::from_millis(300), async || {
        checkpoint(site.one(), &token).await.status == 200
    })
    .await;
    for _ in 0..3 * SMALL {
        checkpoint(site.one(), &token).await.expect(200);
    }
}
