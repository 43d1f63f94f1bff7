//! `cloud-v1` under the service as it is run: signed, never chosen without a price, and of no consequence when it fails.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::{
    api_world::{Site, endpoint, operator, text},
    fabric_world::{candidate, carrier, explain, explain_delivery, keyed, metric, reason, subscribe, switch},
    support::{
        envelopes::{Envelope, envelope},
        receiver::{Answer, Receiver},
        wait::{SOON, eventually, stays},
    },
};

const ID: &str = "cloud-v1";
const TYPE: &str = "live.cloud.sent";
const SECRET: &str = "a-secret-of-the-queue";

fn event(subject: usize) -> Envelope {
    envelope("live").event_type(TYPE).subject("thing", &subject.to_string())
}

async fn with_queue(queue: &Receiver) -> Site {
    let env = [
        ("CLOUD_QUEUE_URL", queue.url("/1/events")),
        ("CLOUD_QUEUE_REGION", "eu-west-3".to_owned()),
        ("CLOUD_QUEUE_ACCESS_KEY", "AKIDTEST".to_owned()),
        ("CLOUD_QUEUE_SECRET_KEY", SECRET.to_owned()),
    ];
    let env: Vec<_> = env.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let site = Site::own(1, &env).await;
    keyed(site.one(), TYPE, "domain", "optional").await;
    site
}

/// Publishes an event of each subject, and has their keys wait on the queue's carrier.
async fn pin(site: &Site, subjects: usize) {
    for subject in 0..subjects {
        site.one().publish(&event(subject)).await.expect(201);
    }
    site.run("UPDATE deliveries SET carrier = 'cloud-v1'").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_price_it_is_shown_and_never_chosen() {
    let queue = Receiver::start().await;
    let site = with_queue(&queue).await;
    subscribe(site.one(), TYPE, &endpoint("cloud")).await;
    let explained = explain(site.one(), TYPE, None).await;
    assert_eq!(explained["placement"]["selected"], "pg-v1");
    let shown = candidate(&explained, ID).expect("it is configured");
    assert_eq!(shown["eligible"], true);
    assert_eq!(
        (&shown["score"], &shown["estimated_cost_usd"]),
        (&json!(null), &json!(null))
    );
    assert_eq!(
        shown["reasons"],
        json!(["no rate card rc-cloud-queue-v1", "unverified (cloud-v1)"]),
        "nothing was asked of it yet"
    );
    let state = carrier(site.one(), ID).await;
    assert_eq!(
        (&state["state"], &state["reason"]),
        (&json!("degraded"), &json!("unverified (cloud-v1)"))
    );
    assert_eq!(carrier(site.one(), ID).await["usage"]["priced"], false);
    site.one().publish(&event(1)).await.expect(201);
    stays("nothing is sent to it", Duration::from_millis(500), async || {
        queue.calls().is_empty()
    })
    .await;
    for (class, durability) in [("domain", "required"), ("realtime_ephemeral", "none")] {
        keyed(site.one(), "live.cloud.other", class, durability).await;
        let other = explain(site.one(), "live.cloud.other", None).await;
        assert_eq!(candidate(&other, ID), None, "it carries QUEUE only: {other}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_waits_on_it_sends_one_signed_message_with_two_ids() {
    let queue = Receiver::start().await;
    queue.answer_with("/1/events", |_| Answer::status(200));
    let site = with_queue(&queue).await;
    let subscription = subscribe(site.one(), TYPE, &endpoint("cloud")).await;
    pin(&site, 1).await;
    let second = event(0);
    site.one().publish(&second).await.expect(201);
    let calls = queue.wait_calls_to("/1/events", 1, SOON).await;
    let call = &calls[0];
    let body = String::from_utf8(call.body.to_vec()).expect("a form");
    let form: Vec<(String, String)> = url::form_urlencoded::parse(body.as_bytes()).into_owned().collect();
    let value = |name: &str| {
        form.iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    };
    assert_eq!(value("Action"), Some("SendMessage"), "{body}");
    let message: serde_json::Value = serde_json::from_str(value("MessageBody").expect("a message")).expect("JSON");
    assert_eq!(
        message,
        json!({ "event_id": second.id(), "subscription_id": subscription })
    );
    let authorization = call.header("authorization").expect("it is signed");
    assert!(
        authorization.starts_with("AWS4-HMAC-SHA256 Credential=AKIDTEST/"),
        "{authorization}"
    );
    assert!(authorization.contains("/eu-west-3/sqs/aws4_request"), "{authorization}");
    eventually("it has shown that it answers", SOON, async || {
        carrier(site.one(), ID).await["state"] == "up"
    })
    .await;
    let placed = explain_delivery(site.one(), &second, &subscription).await;
    assert_eq!(
        (text(&placed, "carrier"), text(&placed["decision"], "carrier")),
        (ID, "pg-v1")
    );
    assert!(!site.service().log().contains(SECRET));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_request_is_counted_whatever_it_asks_and_whatever_becomes_of_it() {
    let queue = Receiver::start().await;
    queue.answer_with("/1/events", |_| Answer::status(500));
    let url = queue.url("/1/events");
    let env = [
        ("CLOUD_QUEUE_URL", url.as_str()),
        ("CLOUD_QUEUE_CONSUME", "on"),
        ("EVENTS_WORKER", "on"),
    ];
    let site = Site::own(1, &env).await;
    // Nothing is sent: these are questions for messages.
    queue.wait_calls_to("/1/events", 1, SOON).await;
    eventually("they are counted", SOON, async || {
        let used = carrier(site.one(), ID).await["usage"]["used"].clone();
        (used.as_f64() >= Some(1.0)).then_some(()).ok_or(used)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn five_failures_open_the_breaker_and_switched_off_it_says_so() {
    let queue = Receiver::start().await;
    queue.answer_with("/1/events", |_| Answer::status(500));
    let site = with_queue(&queue).await;
    subscribe(site.one(), TYPE, &endpoint("cloud")).await;
    pin(&site, 1).await;
    for failures in 1..=5 {
        assert_eq!(
            reason(&explain(site.one(), TYPE, None).await, ID),
            "",
            "after {failures} publishes"
        );
        site.one().publish(&event(0)).await.expect(201);
        queue.wait_calls_to("/1/events", failures, SOON).await;
    }
    eventually("explain names the breaker", Duration::from_secs(2), async || {
        let explained = explain(site.one(), TYPE, None).await;
        let why = reason(&explained, ID);
        (why == "breaker open (cloud-v1)").then_some(()).ok_or(why)
    })
    .await;
    assert_eq!(explain(site.one(), TYPE, None).await["placement"]["selected"], "pg-v1");
    // It answers no probes, so a signal is the trial, and that closes it.
    queue.answer_with("/1/events", |_| Answer::status(200));
    eventually("a trial closes it", SOON, async || {
        site.one().publish(&event(0)).await.expect(201);
        carrier(site.one(), ID).await["state"] == "up"
    })
    .await;
    switch(site.one(), ID, true).await.expect(200);
    assert_eq!(
        reason(&explain(site.one(), TYPE, None).await, ID),
        "disabled by an operator"
    );
    let before = queue.calls().len();
    site.one().publish(&event(0)).await.expect(201);
    stays("it is not signalled", Duration::from_millis(500), async || {
        queue.calls().len() == before
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_never_answers_ends_by_a_time_out_that_counts_and_costs_no_publisher_a_moment() {
    let queue = Receiver::start().await;
    queue.answer_with("/1/events", |_| Answer::hang(200));
    let site = with_queue(&queue).await;
    for n in 0..8 {
        subscribe(site.one(), TYPE, &endpoint(&format!("cloud/{n}"))).await;
    }
    pin(&site, 1).await;
    let began = Instant::now();
    site.one().publish(&event(0)).await.expect(201);
    let took = began.elapsed();
    assert!(took < Duration::from_secs(1), "{took:?}");
    let failed = r#"events_carrier_signals_total{carrier="cloud-v1",kind="QUEUE",outcome="failed"}"#;
    eventually("the signals count as failed", Duration::from_secs(6), async || {
        metric(site.one(), failed).await >= 8.0
    })
    .await;
    assert!(began.elapsed() > Duration::from_secs(2), "it had its time");
    site.one().get("/api/v1/carriers", Some(&operator())).await.expect(200);
}
