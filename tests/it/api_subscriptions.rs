//! Subscriptions over HTTP: whose they are, what they show, and from when they count.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use serde_json::{Value, json};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::{
    api_world::{SUBSCRIPTIONS_MAX, Site, consumer, endpoint, refused, send, text},
    support::{
        client::{Client, Response},
        contracts::assert_valid,
        envelopes::{batch, envelope, envelopes, id, unique_segment},
    },
};

const SUBSCRIPTIONS: &str = "/api/v1/subscriptions";

async fn create(client: &Client, slug: &str, body: &Value) -> Response {
    client
        .post(SUBSCRIPTIONS, Some(&client.service_token(slug)), body)
        .await
}

/// Posts to an action of a subscription, with an empty object.
async fn act(client: &Client, slug: &str, id: &str, action: &str, body: &Value) -> Response {
    let token = client.service_token(slug);
    client
        .post(&format!("{SUBSCRIPTIONS}/{id}/{action}"), Some(&token), body)
        .await
}

async fn get(client: &Client, slug: &str, path: &str) -> Response {
    client
        .get(&format!("{SUBSCRIPTIONS}{path}"), Some(&client.service_token(slug)))
        .await
}

fn time_of(value: &Value, member: &str) -> OffsetDateTime {
    OffsetDateTime::parse(text(value, member), &Rfc3339).expect("a time")
}

#[tokio::test]
async fn a_new_subscription_is_shown_whole_with_its_secret_this_once() {
    let site = Site::shared().await;
    let slug = consumer();
    let body = json!({ "topic_pattern": "live.*", "endpoint": "HTTP://127.0.0.1:80/a/../hook?x=1", "more": "ignored" });
    let answer = create(site.one(), &slug, &body).await;
    assert_eq!(answer.header("cache-control"), "no-store");
    let start = r#"{"id":"sub_"#;
    assert!(answer.text.starts_with(start), "{}", answer.text);
    let members: Vec<&str> = answer
        .text
        .split('"')
        .filter(|word| answer.body.get(word).is_some())
        .collect();
    assert_eq!(
        members,
        [
            "id",
            "consumer",
            "topic_pattern",
            "endpoint",
            "enabled",
            "retry_policy",
            "created_at",
            "updated_at",
            "secret"
        ]
    );
    let view = answer.expect(201);
    assert_valid("events.subscription@1", &view);
    assert_eq!(text(&view, "consumer"), slug);
    assert_eq!(
        text(&view, "endpoint"),
        "http://127.0.0.1/hook?x=1",
        "in its normal form"
    );
    assert_eq!((&view["enabled"], &view["retry_policy"]), (&json!(true), &Value::Null));
    let secret = text(&view, "secret");
    let random = secret.strip_prefix("whsec_").expect("a generated secret");
    assert!(
        random.len() == 64 && random.bytes().all(|b| b.is_ascii_hexdigit() && !b.is_ascii_uppercase()),
        "{secret}"
    );

    let id = text(&view, "id");
    let shown = [
        get(site.two(), &slug, "").await,
        get(site.two(), &slug, &format!("/{id}")).await,
        act(site.two(), &slug, id, "disable", &json!({})).await,
        act(site.two(), &slug, id, "enable", &json!({})).await,
    ];
    for answer in shown {
        assert_eq!(answer.header("cache-control"), "no-store");
        assert!(
            !answer.text.contains("secret") && !answer.text.contains(random),
            "{}",
            answer.text
        );
        assert_valid("events.subscription-result@1", &answer.clone().expect(200));
    }
}

#[tokio::test]
async fn what_the_caller_gives_is_kept_and_topic_is_another_name_for_topic_pattern() {
    let site = Site::shared().await;
    let slug = consumer();
    let secret = "s3cret-é".repeat(8);
    let body = json!({ "topic": "live.a.*", "endpoint": endpoint("a"), "secret": secret,
        "retry_policy": { "backoff_ms": [0, 86_400_000], "max_attempts": 20 } });
    let view = create(site.one(), &slug, &body).await.expect(201);
    assert_valid("events.subscription@1", &view);
    assert_eq!(
        (text(&view, "topic_pattern"), text(&view, "secret")),
        ("live.a.*", secret.as_str())
    );
    assert_eq!(
        view["retry_policy"],
        json!({ "max_attempts": 20, "backoff_ms": [0, 86_400_000] })
    );
    let read = get(site.two(), &slug, &format!("/{}", text(&view, "id")))
        .await
        .expect(200);
    assert_eq!(read["retry_policy"], view["retry_policy"]);

    for (policy, shown) in [
        (json!({}), Value::Null),
        (Value::Null, Value::Null),
        (json!({ "max_attempts": 1 }), json!({ "max_attempts": 1 })),
    ] {
        let body = json!({ "topic_pattern": "live.b.*", "topic": "*.*", "endpoint": endpoint(&unique_segment()),
            "retry_policy": policy });
        let view = create(site.one(), &slug, &body).await.expect(201);
        assert_eq!(
            (text(&view, "topic_pattern"), &view["retry_policy"]),
            ("live.b.*", &shown)
        );
    }
    for (at, length) in [32, 256].into_iter().enumerate() {
        let body = json!({ "topic": "live.c.*", "endpoint": endpoint(&at.to_string()), "secret": "x".repeat(length) });
        create(site.one(), &slug, &body).await.expect(201);
    }
}

#[tokio::test]
async fn the_same_subscription_twice_is_refused_with_the_id_of_the_first() {
    let site = Site::shared().await;
    let (slug, other) = (consumer(), consumer());
    let first = site.subscribe(&slug, "live.*", "same").await;
    for spelling in [endpoint("same"), "HTTP://127.0.0.1:9/x/../same".to_owned()] {
        let body = json!({ "topic_pattern": "live.*", "endpoint": spelling });
        let document = refused(
            &create(site.two(), &slug, &body).await,
            409,
            "events.subscription_exists",
        );
        assert_eq!(document["subscription_id"], first["id"]);
        assert!(document.get("secret").is_none(), "{document}");
    }
    // A disabled one is still there.
    act(site.one(), &slug, text(&first, "id"), "disable", &json!({}))
        .await
        .expect(200);
    let body = json!({ "topic_pattern": "live.*", "endpoint": endpoint("same") });
    refused(
        &create(site.one(), &slug, &body).await,
        409,
        "events.subscription_exists",
    );
    create(site.one(), &other, &body).await.expect(201);
    site.subscribe(&slug, "live.a.*", "same").await;
    site.subscribe(&slug, "live.*", "other").await;
}

#[tokio::test]
async fn of_many_equal_creates_at_once_over_two_processes_exactly_one_succeeds() {
    let site = Site::shared().await;
    let slug = consumer();
    let body = json!({ "topic_pattern": "live.*", "endpoint": endpoint("race") });
    let sent = (0..20).map(|n| create(if n % 2 == 0 { site.one() } else { site.two() }, &slug, &body));
    let answers = join_all(sent).await;
    let made: Vec<&Response> = answers.iter().filter(|answer| answer.status == 201).collect();
    assert_eq!(
        made.len(),
        1,
        "{:?}",
        answers.iter().map(|answer| answer.status).collect::<Vec<_>>()
    );
    for answer in answers.iter().filter(|answer| answer.status != 201) {
        let document = refused(answer, 409, "events.subscription_exists");
        assert_eq!(document["subscription_id"], made[0].body["id"]);
    }
    assert_eq!(
        site.number("SELECT count(*) FROM subscriptions WHERE consumer = $1", &slug)
            .await,
        1
    );
}

#[tokio::test]
async fn the_limit_holds_when_many_subscriptions_are_made_at_once() {
    let site = Site::shared().await;
    let slug = consumer();
    let bodies: Vec<Value> = (0..SUBSCRIPTIONS_MAX + 8)
        .map(|n| json!({ "topic_pattern": "live.*", "endpoint": endpoint(&n.to_string()) }))
        .collect();
    let sent = bodies.iter().enumerate().map(|(n, body)| {
        let client = if n % 2 == 0 { site.one() } else { site.two() };
        create(client, &slug, body)
    });
    let answers = join_all(sent).await;
    let made = answers.iter().filter(|answer| answer.status == 201).count();
    assert_eq!(
        made,
        SUBSCRIPTIONS_MAX,
        "{:?}",
        answers.iter().map(|answer| answer.status).collect::<Vec<_>>()
    );
    for answer in answers.iter().filter(|answer| answer.status != 201) {
        let document = refused(answer, 409, "events.subscription_limit");
        assert_eq!(document["limit"], SUBSCRIPTIONS_MAX);
    }
    // What exists is told before what is too much.
    let known = answers
        .iter()
        .position(|answer| answer.status == 201)
        .expect("one was made");
    refused(
        &create(site.one(), &slug, &bodies[known]).await,
        409,
        "events.subscription_exists",
    );
}

#[tokio::test]
async fn a_list_holds_the_callers_own_subscriptions_oldest_first() {
    let site = Site::shared().await;
    let (slug, other) = (consumer(), consumer());
    assert_eq!(get(site.one(), &slug, "").await.text, r#"{"subscriptions":[]}"#);
    let mut made = Vec::new();
    for path in ["c", "a", "b"] {
        made.push(site.subscribe(&slug, "live.*", path).await["id"].clone());
    }
    site.subscribe(&other, "live.*", "d").await;
    site.run(&format!(
        "UPDATE subscriptions SET created_at = created_at - 5000 WHERE id = {}",
        quoted(&made[2])
    ))
    .await;
    let list = get(site.two(), &slug, "").await.expect(200);
    assert_valid("events.subscription-result@1", &list);
    let listed: Vec<&Value> = list["subscriptions"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|view| &view["id"])
        .collect();
    assert_eq!(listed, [&made[2], &made[0], &made[1]]);
}

fn quoted(id: &Value) -> String {
    format!("'{}'", id.as_str().expect("an id"))
}

#[tokio::test]
async fn a_subscription_of_another_consumer_looks_like_one_that_does_not_exist() {
    let site = Site::shared().await;
    let (owner, stranger) = (consumer(), consumer());
    let view = site.subscribe(&owner, "live.*", "mine").await;
    let (theirs, none) = (text(&view, "id").to_owned(), id("sub"));
    for (method, action, body) in [
        ("GET", "", ""),
        ("PATCH", "", r#"{"max_inflight":4}"#),
        ("PATCH", "", r#"{"max_inflight":400}"#),
        ("POST", "/enable", "{}"),
        ("POST", "/disable", "{}"),
        ("POST", "/rotate-secret", "{}"),
        ("POST", "/rotate-secret", r#"{"secret":"short","overlap_s":-1}"#),
    ] {
        let token = site.one().service_token(&stranger);
        let mut details = BTreeSet::new();
        for id in [&theirs, &none] {
            let path = format!("{SUBSCRIPTIONS}/{id}{action}");
            let answer = send(site.one(), method, &path, Some(&token), body.to_owned()).await;
            let document = refused(&answer, 404, "events.not_found");
            assert_eq!(answer.header("cache-control"), "no-store", "{method} {action}");
            details.insert(text(&document, "detail").to_owned());
        }
        assert_eq!(details.len(), 1, "the two cannot be told apart: {details:?}");
    }
    let kept = get(site.two(), &owner, &format!("/{theirs}")).await.expect(200);
    assert_eq!(
        (&kept["enabled"], &kept["updated_at"]),
        (&json!(true), &view["updated_at"])
    );
}

#[tokio::test]
async fn no_answer_of_these_routes_may_be_stored() {
    let site = Site::shared().await;
    let slug = consumer();
    let denied = site.one().get(SUBSCRIPTIONS, None).await;
    let bad = create(site.one(), &slug, &json!({})).await;
    let token = site.one().service_token(&slug);
    let broken = send(site.one(), "POST", SUBSCRIPTIONS, Some(&token), "{".to_owned()).await;
    for (answer, status) in [(denied, 401), (bad, 422), (broken, 400)] {
        assert_eq!(
            (answer.status, answer.header("cache-control")),
            (status, "no-store"),
            "{}",
            answer.text
        );
    }
}

#[tokio::test]
async fn switching_is_idempotent_and_seen_by_every_process() {
    let site = Site::shared().await;
    let slug = consumer();
    let made = site.subscribe(&slug, "live.*", "switch").await;
    let id = text(&made, "id");
    let unchanged = act(site.one(), &slug, id, "enable", &json!({})).await.expect(200);
    assert_eq!(unchanged["updated_at"], made["updated_at"], "nothing was switched");
    for (action, enabled) in [
        ("disable", false),
        ("disable", false),
        ("enable", true),
        ("enable", true),
    ] {
        let token = site.one().service_token(&slug);
        // A caller need not send a body at all.
        let request = site.one().request(
            reqwest::Method::POST,
            &format!("{SUBSCRIPTIONS}/{id}/{action}"),
            Some(&token),
        );
        let view = site.one().send(request).await.expect(200);
        assert_valid("events.subscription@1", &view);
        assert_eq!(view["enabled"], enabled, "{action}");
        assert_eq!(get(site.two(), &slug, &format!("/{id}")).await.expect(200), view);
    }
}

#[tokio::test]
async fn a_change_of_how_it_is_delivered_to_is_shown_whole_and_undone_by_null() {
    let site = Site::shared().await;
    let slug = consumer();
    let made = site.subscribe(&slug, "live.*", "update").await;
    let id = text(&made, "id");
    let token = site.one().service_token(&slug);
    let path = format!("{SUBSCRIPTIONS}/{id}");
    let policy = json!({ "max_attempts": 3, "backoff_ms": [10] });
    for (body, inflight, retry_policy) in [
        (json!({ "max_inflight": 64 }), json!(64), Value::Null),
        (json!({ "retry_policy": policy }), json!(64), policy.clone()),
        (json!({}), json!(64), policy.clone()),
        (json!({ "max_inflight": null }), Value::Null, policy.clone()),
        (json!({ "max_inflight": 1, "retry_policy": {} }), json!(1), Value::Null),
        (
            json!({ "retry_policy": policy, "max_inflight": 2 }),
            json!(2),
            policy.clone(),
        ),
        (
            json!({ "retry_policy": null, "max_inflight": null }),
            Value::Null,
            Value::Null,
        ),
    ] {
        assert_valid("events.subscription-update-request@1", &body);
        let answer = send(site.one(), "PATCH", &path, Some(&token), body.to_string()).await;
        assert_eq!(answer.header("cache-control"), "no-store");
        assert!(!answer.text.contains("secret"), "{}", answer.text);
        let view = answer.expect(200);
        assert_valid("events.subscription@1", &view);
        assert_eq!(view["retry_policy"], retry_policy, "{body}");
        assert_eq!(view.get("max_inflight").unwrap_or(&Value::Null), &inflight, "{body}");
        for kept in ["topic_pattern", "endpoint", "enabled", "created_at"] {
            assert_eq!(view[kept], made[kept], "{body}");
        }
        assert_eq!(get(site.two(), &slug, &format!("/{id}")).await.expect(200), view);
        // The same again is no change.
        let again = send(site.two(), "PATCH", &path, Some(&token), body.to_string()).await;
        assert_eq!(again.expect(200), view, "{body}");
    }
    let view = get(site.one(), &slug, &format!("/{id}")).await.expect(200);
    assert!(time_of(&view, "updated_at") > time_of(&made, "updated_at"));
    // A caller need not send a body at all.
    let request = site.one().request(reqwest::Method::PATCH, &path, Some(&token));
    assert_eq!(site.one().send(request).await.expect(200), view);
}

#[tokio::test]
async fn simultaneous_rotations_leave_two_secrets_that_were_shown_and_no_older_one() {
    let site = Site::shared().await;
    let slug = consumer();
    let made = site.subscribe(&slug, "live.*", "rotate-at-once").await;
    let id = text(&made, "id").to_owned();
    let rotations = (0..8).map(|n| {
        let client = if n % 2 == 0 { site.one() } else { site.two() };
        let (slug, id) = (slug.clone(), id.clone());
        async move { act(client, &slug, &id, "rotate-secret", &json!({})).await.expect(200) }
    });
    let views = join_all(rotations).await;
    let shown: BTreeSet<&str> = views.iter().map(|view| text(view, "secret")).collect();
    assert_eq!(shown.len(), 8);
    let (secret, previous): (String, Option<String>) =
        sqlx::query_as("SELECT secret, previous_secret FROM subscriptions WHERE id = $1")
            .bind(&id)
            .fetch_one(&site.pool)
            .await
            .expect("the subscription");
    let previous = previous.expect("a former secret within its overlap");
    assert!(secret != previous && shown.contains(secret.as_str()) && shown.contains(previous.as_str()));
}

#[tokio::test]
async fn a_rotation_shows_the_new_secret_once_and_keeps_the_former_one_for_the_overlap() {
    let site = Site::shared().await;
    let slug = consumer();
    let made = site.subscribe(&slug, "live.*", "rotate").await;
    let id = text(&made, "id").to_owned();
    let mut former = text(&made, "secret").to_owned();
    let given = "y".repeat(32);
    for (body, seconds) in [
        (json!({}), 86_400.0),
        (json!({ "overlap_s": 3600 }), 3600.0),
        (json!({ "overlap_s": "3600" }), 3600.0),
        (json!({ "overlap_s": " 1e3 " }), 1000.0),
        (json!({ "overlap_s": 0.5 }), 0.5),
        (json!({ "overlap_s": 604_800 }), 604_800.0),
        (json!({ "overlap_s": "604800.0" }), 604_800.0),
        (json!({ "secret": given, "overlap_s": 60 }), 60.0),
        (json!({ "overlap_s": 0 }), 0.0),
    ] {
        let answer = act(site.two(), &slug, &id, "rotate-secret", &body).await;
        assert_eq!(answer.header("cache-control"), "no-store");
        let view = answer.expect(200);
        assert_valid("events.rotate-secret-result@1", &view);
        // Both times are of the one statement that rotates.
        let overlap = time_of(&view, "previous_secret_valid_until") - time_of(&view, "updated_at");
        assert_eq!(overlap, time::Duration::seconds_f64(seconds), "{body}");
        let secret = text(&view, "secret").to_owned();
        assert_ne!(secret, former);
        match body.get("secret") {
            Some(given) => assert_eq!(given, &secret),
            None => assert!(secret.starts_with("whsec_") && secret.len() == 70, "{secret}"),
        }
        let stored: (String, Option<String>) =
            sqlx::query_as("SELECT secret, previous_secret FROM subscriptions WHERE id = $1")
                .bind(&id)
                .fetch_one(&site.pool)
                .await
                .expect("the subscription");
        let previous = (seconds > 0.0).then_some(former);
        assert_eq!(stored, (secret.clone(), previous), "{body}");
        let read = get(site.one(), &slug, &format!("/{id}")).await;
        assert!(!read.text.contains("secret"), "{}", read.text);
        assert!(time_of(&read.body, "updated_at") >= time_of(&made, "updated_at"));
        former = secret;
    }
    // No body at all is a rotation with every default.
    let token = site.one().service_token(&slug);
    let request = site.one().request(
        reqwest::Method::POST,
        &format!("{SUBSCRIPTIONS}/{id}/rotate-secret"),
        Some(&token),
    );
    site.one().send(request).await.expect(200);
}

#[tokio::test]
async fn a_change_made_on_one_process_counts_for_the_next_publish_on_the_other() {
    let site = Site::shared().await;
    let slug = consumer();
    let event = envelope("live");
    let made = site.subscribe(&slug, event.type_name(), "switch").await;
    let id = text(&made, "id");
    let publish = async || {
        let next = envelope("live").event_type(event.type_name());
        site.two().publish(&next).await.expect(201);
    };
    let mut expected = 0;
    publish().await;
    expected += 1;
    assert_eq!(site.deliveries_of(id).await, expected, "made on one, published on two");
    for _ in 0..10 {
        act(site.one(), &slug, id, "disable", &json!({})).await.expect(200);
        publish().await;
        assert_eq!(site.deliveries_of(id).await, expected, "disabled");
        act(site.one(), &slug, id, "enable", &json!({})).await.expect(200);
        publish().await;
        expected += 1;
        assert_eq!(site.deliveries_of(id).await, expected, "enabled again");
    }
}

#[tokio::test]
async fn an_event_is_queued_once_for_each_subscription_that_matches_it() {
    let site = Site::shared().await;
    let slug = consumer();
    let stem = unique_segment();
    let mut subscriptions = Vec::new();
    for (pattern, wanted) in [
        (format!("live.{stem}.*"), 3),
        (format!("live.{stem}.a"), 2),
        (format!("*.{stem}.a"), 2),
        (format!("live.*.{stem}"), 1),
        (format!("live.{stem}"), 0),
        (format!("live.{stem}.a.*"), 0),
        (format!("chat.{stem}.*"), 0),
    ] {
        let view = site.subscribe(&slug, &pattern, "match").await;
        subscriptions.push((text(&view, "id").to_owned(), pattern, wanted));
    }
    let types = ["a", "b", "a"].map(|last| format!("live.{stem}.{last}"));
    let mut events: Vec<_> = types.iter().map(|name| envelope("live").event_type(name)).collect();
    events.push(envelope("live").event_type(&format!("live.z.{stem}")));
    events.push(envelopes("live", 1).remove(0));
    site.two().publish_as("live", &batch(&events)).await.expect(201);
    // A repeat queues nothing.
    site.one().publish_as("live", &batch(&events)).await.expect(200);
    for (id, pattern, wanted) in &subscriptions {
        assert_eq!(site.deliveries_of(id).await, *wanted, "{pattern}");
    }
}
