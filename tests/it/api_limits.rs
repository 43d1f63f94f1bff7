//! Limits per caller: fixed windows of a minute and an hour, counted by each process for each limit and principal.
//!
//! Windows are aligned to the clock, so what must lie in one minute is judged only where it did, and otherwise asked again
//! by principals that nobody counted yet.

use std::time::Duration;

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::json;

use crate::{
    api_world::{Site, consumer, refused, send},
    support::{
        client::{Client, Response, assert_problem},
        contracts::assert_valid,
        envelopes::{envelope, id},
        network::{ADMIN_CAP, TokenSpec, unix_now},
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

/// Asks until all of it fell into one minute. What is asked must begin with principals of its own each time, and is
/// judged afterwards.
async fn in_one_minute<T>(ask: impl AsyncFn() -> T) -> T {
    const TRIES: usize = 10;
    for _ in 0..TRIES {
        let minute = unix_now() / 60;
        let answers = ask().await;
        if unix_now() / 60 == minute {
            return answers;
        }
    }
    panic!("none of {TRIES} tries began and ended in one minute")
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

/// As many requests as a minute allows, and one more.
async fn one_too_many(client: &Client, token: &str) -> Vec<Response> {
    let mut answers = Vec::new();
    for _ in 0..=SMALL {
        answers.push(checkpoint(client, token).await);
    }
    answers
}

/// Judges what [`one_too_many`] was answered, and yields the refusal.
#[track_caller]
fn admitted_but_the_last(mut answers: Vec<Response>) -> Response {
    let last = answers.pop().expect("an answer");
    assert!(answers.iter().all(|answer| answer.status == 200), "{answers:?}");
    limited_by(&last, "events.checkpoint.read", SMALL);
    last
}

fn reader() -> String {
    TokenSpec::service(&consumer()).sign()
}

#[tokio::test]
async fn a_full_minute_answers_429_with_the_time_to_its_end() {
    let site = limited(&[]).await;
    let (answers, times) = in_one_minute(async || {
        let before = unix_now();
        let answers = one_too_many(site.one(), &reader()).await;
        (answers, [before, unix_now()])
    })
    .await;
    let answer = admitted_but_the_last(answers);
    let wait = limited_by(&answer, "events.checkpoint.read", SMALL);
    let ends: Vec<u64> = times.iter().map(|now| 60 - now % 60).collect();
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
    let event = format!("/api/v1/events/{}", id("evt"));
    let (one, other, mut reads, pull) = in_one_minute(async || {
        let (one, other) = (reader(), reader());
        let first = one_too_many(site.one(), &one).await;
        let second = one_too_many(site.one(), &other).await;
        let mut reads = Vec::new();
        for _ in 0..=SMALL {
            reads.push(site.one().get(&event, Some(&one)).await);
        }
        let pull = site.one().get("/api/v1/events", Some(&one)).await;
        (first, second, reads, pull)
    })
    .await;
    admitted_but_the_last(one);
    admitted_but_the_last(other);
    limited_by(&reads.pop().expect("an answer"), "events.event.read", SMALL);
    for read in &reads {
        refused(read, 404, "events.not_found");
    }
    pull.expect(200);
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
    const OWN: usize = 30;
    let site = limited(&[]).await;
    let answers = in_one_minute(async || {
        let token = reader();
        let mut answers = Vec::new();
        for turn in 0..OWN + 2 {
            let path = format!(
                "/api/v1/subscriptions/{}/{}",
                id("sub"),
                ["enable", "disable"][turn % 2]
            );
            answers.push(send(site.one(), "POST", &path, Some(&token), "{}".to_owned()).await);
        }
        answers
    })
    .await;
    for answer in &answers[..OWN] {
        refused(answer, 404, "events.not_found");
    }
    for answer in &answers[OWN..] {
        limited_by(answer, "events.subscription.toggle", OWN);
    }

    let policy = json!({ "class": "bulk", "durability": "none", "delivery_semantics": "at_least_once" });
    let answers = in_one_minute(async || {
        let operator = TokenSpec::service(&consumer()).caps(&[ADMIN_CAP]).sign();
        let mut answers = Vec::new();
        for turn in 0..OWN + 2 {
            let method = [Method::PUT, Method::DELETE][turn % 2].as_str().to_owned();
            let path = "/api/v1/delivery-policies/live.x";
            answers.push(send(site.one(), &method, path, Some(&operator), policy.to_string()).await);
        }
        answers
    })
    .await;
    for answer in &answers[..OWN] {
        assert!(matches!(answer.status, 200 | 204), "{answer:?}");
    }
    for answer in &answers[OWN..] {
        limited_by(answer, "events.delivery-policy.write", OWN);
    }
}

#[tokio::test]
async fn publishing_has_a_limit_of_its_own_which_never_holds_the_network() {
    const OWN: usize = 600;
    let site = limited(&[]).await;
    // What is refused by its content was counted all the same, and is cheap.
    let publish = async |token: &str| site.one().post("/api/v1/events", Some(token), &json!([])).await.status;
    let all = async |token: &str| {
        let mut statuses = Vec::new();
        for _ in 0..OWN / 20 + 1 {
            statuses.extend(join_all((0..20).map(|_| publish(token))).await);
        }
        statuses
    };
    let network = TokenSpec::service("network").sign();
    let (statuses, of_the_network) = in_one_minute(async || {
        let token = TokenSpec::service(&consumer()).sign();
        (all(&token).await, all(&network).await)
    })
    .await;
    let admitted = statuses.iter().filter(|status| **status != 429).count();
    assert_eq!((statuses.len(), admitted), (OWN + 20, OWN));
    assert!(!of_the_network.contains(&429), "{of_the_network:?}");
    let event = envelope("network");
    site.one().publish(&event).await.expect(201);
    // What it reads is limited like anybody's.
    let read = eventually(
        "a read of the network is refused",
        Duration::from_secs(90),
        async || {
            let answer = checkpoint(site.one(), &network).await;
            if answer.status == 429 {
                Ok(answer)
            } else {
                Err(answer.status)
            }
        },
    )
    .await;
    limited_by(&read, "events.checkpoint.read", SMALL);
}

#[tokio::test]
async fn the_state_of_the_service_is_never_limited() {
    let site = limited(&[("EVENTS_LIMITS_MINUTE", "1"), ("EVENTS_LIMITS_HOUR", "1")]).await;
    for path in ["/api/health", "/api/ready", "/release.json", "/limits.json", "/metrics"] {
        for _ in 0..20 {
            assert_eq!(site.one().get(path, None).await.status, 200, "{path}");
        }
    }
}

#[tokio::test]
async fn who_is_refused_for_want_of_authority_is_not_counted() {
    let site = limited(&[]).await;
    let (before, answers, after) = in_one_minute(async || {
        let slug = consumer();
        let bare = TokenSpec::service(&slug).caps(&["events.event.publish"]).sign();
        let token = TokenSpec::service(&slug).sign();
        let expired = TokenSpec::service(&slug).shifted(-400).sign();
        let unauthorised = async || {
            [
                (checkpoint(site.one(), &bare).await, 403, "capability.denied"),
                (checkpoint(site.one(), &expired).await, 401, "token.expired"),
                (site.one().get(CHECKPOINT, None).await, 401, "token.missing"),
            ]
        };
        let mut before = Vec::new();
        for _ in 0..2 * SMALL {
            before.extend(unauthorised().await);
        }
        let answers = one_too_many(site.one(), &token).await;
        (before, answers, unauthorised().await)
    })
    .await;
    admitted_but_the_last(answers);
    for (answer, status, code) in before.iter().chain(&after) {
        refused(answer, *status, code);
    }
}

#[tokio::test]
async fn a_metric_counts_what_was_refused() {
    let site = limited(&[]).await;
    let series = r#"events_rate_limited_total{limit="events.checkpoint.read",window="minute"}"#;
    let counted = async || {
        let metrics = site.one().get("/metrics", None).await.text;
        let line = metrics
            .lines()
            .find_map(|line| line.strip_prefix(series).map(str::to_owned));
        line.map_or(0, |value| value.trim().parse::<usize>().expect("a count"))
    };
    // Whichever minutes they fall into: what the callers saw is what is counted.
    let token = reader();
    let mut refusals = 0;
    while refusals < 4 {
        assert_eq!(counted().await, refusals);
        refusals += usize::from(checkpoint(site.one(), &token).await.status == 429);
    }
    assert_eq!(counted().await, refusals);
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
