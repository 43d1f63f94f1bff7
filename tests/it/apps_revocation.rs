//! What a revoked app loses: its tokens, its subscriptions and what waits for them, in every process, with the answer.

use openvibe_events::{
    domain::{
        self,
        app::{Env, Holder, Project},
        ids::SubscriptionId,
        sources::SourceMap,
    },
    publish::{PublishError, PublishRequest, RequestTrace, Rules},
    store::{NewSubscription, StoreError, Switch},
};
use serde_json::json;

use crate::{
    api_world::{refused, text},
    apps_world::{App, HOOK, free, of_network, revocation, withdrawal},
    store_fixture::{Door, Fixture, claim, event_from, put, request, retry, settle_all},
    support::{
        client::Client,
        envelopes::{Envelope, batch, envelope, id, now_text},
        network::unix_now,
    },
};

/// A token of the app that was issued so many seconds from now.
fn later(app: &App, seconds: i64) -> String {
    let at = i64::try_from(unix_now()).expect("a time") + seconds;
    app.spec().claim("iat", at).claim("exp", at + 300).sign()
}

/// Everything that an app may ask for.
async fn ask(client: &Client, app: &App, token: &str, subscription: &str) -> Vec<(u16, String)> {
    let path = format!("/api/v1/subscriptions/{subscription}");
    let topic = app.all();
    let answers = [
        client.get(&format!("/api/v1/events?topic={topic}"), Some(token)).await,
        client.get(&format!("/api/v1/events/{}", id("evt")), Some(token)).await,
        client
            .get(&format!("/api/v1/checkpoints?topic={topic}"), Some(token))
            .await,
        client.get("/api/v1/subscriptions", Some(token)).await,
        client.get(&path, Some(token)).await,
        client.post(&format!("{path}/enable"), Some(token), &json!({})).await,
        client
            .post(&format!("{path}/rotate-secret"), Some(token), &json!({}))
            .await,
        app_subscribes(client, app, token).await,
        // Last: the process looks at what is in force when it publishes.
        client
            .post("/api/v1/events", Some(token), app.event("x.y").json())
            .await,
    ];
    let of = |answer: crate::support::client::Response| {
        (
            answer.status,
            answer.body["code"].as_str().unwrap_or_default().to_owned(),
        )
    };
    answers.into_iter().map(of).collect()
}

async fn app_subscribes(client: &Client, app: &App, token: &str) -> crate::support::client::Response {
    let body = json!({ "topic_pattern": app.all(), "endpoint": format!("{HOOK}/again") });
    client.post("/api/v1/subscriptions", Some(token), &body).await
}

#[tokio::test]
async fn a_revocation_stored_by_one_process_is_in_force_for_the_next_request_of_another() {
    let site = free(2).await;
    let app = App::new("sandbox");
    let mut subscriptions = Vec::new();
    for holder in [app.clone(), app.elsewhere()] {
        let made = holder.subscribe(site.one(), &app.all(), "hook").await.expect(201);
        subscriptions.push(text(&made, "id").to_owned());
    }
    let colleague = app.colleague();
    let other = colleague.subscribe(site.one(), &app.all(), "hook").await.expect(201);
    let (token, production) = (app.token(), app.elsewhere().token());
    // The other process has seen the app and knows of nothing yet.
    app.published(site.two(), &app.event("x.y")).await;

    site.one().publish(&revocation(&app)).await.expect(201);
    for client in [site.two(), site.one()] {
        for (n, answer) in ask(client, &app, &token, &subscriptions[0])
            .await
            .into_iter()
            .enumerate()
        {
            assert_eq!(answer, (401, "token.revoked".to_owned()), "request {n}");
        }
    }
    let answer = site.two().get("/api/v1/subscriptions", Some(&production)).await;
    refused(&answer, 401, "token.revoked");
    let enabled = "SELECT count(*) FROM subscriptions WHERE consumer = $1 AND enabled = 1";
    assert_eq!(site.number(enabled, &app.consumer()).await, 0, "in both environments");
    assert_eq!(site.number(enabled, &colleague.consumer()).await, 1, "nobody else's");
    colleague.published(site.two(), &colleague.event("x.y")).await;
    assert_eq!(site.deliveries_of(text(&other, "id")).await, 2);
    assert_eq!(
        site.deliveries_of(&subscriptions[0]).await,
        1,
        "nothing is queued any more"
    );

    // A token that was issued later holds, and finds its subscriptions as they are.
    let fresh = later(&app, 2);
    let read = site
        .two()
        .get(&format!("/api/v1/subscriptions/{}", subscriptions[0]), Some(&fresh))
        .await
        .expect(200);
    assert_eq!(read["enabled"], false);
    site.two()
        .post("/api/v1/events", Some(&fresh), app.event("x.y").json())
        .await
        .expect(201);
}

#[tokio::test]
async fn a_withdrawn_grant_stops_subscriptions_and_nothing_else() {
    let site = free(2).await;
    let app = App::new("sandbox");
    let made = app.subscribe(site.one(), &app.all(), "hook").await.expect(201);
    let path = format!("/api/v1/subscriptions/{}", text(&made, "id"));
    let token = app.token();
    site.one().publish(&withdrawal(&app)).await.expect(201);
    app.published(site.two(), &app.event("x.y")).await;
    assert_eq!(app.reads(site.two(), &app.all()).await.len(), 1);
    let read = site.two().get(&path, Some(&token)).await.expect(200);
    assert_eq!(read["enabled"], false);
    let again = site
        .two()
        .post(&format!("{path}/enable"), Some(&token), &json!({}))
        .await;
    refused(&again, 403, "capability.denied");
    let unknown = format!("/api/v1/subscriptions/{}/enable", id("sub"));
    refused(
        &site.two().post(&unknown, Some(&token), &json!({})).await,
        403,
        "capability.denied",
    );
    refused(
        &app_subscribes(site.two(), &app, &token).await,
        403,
        "capability.denied",
    );
    let answer = app.subscribe(site.two(), "*.*", "x").await;
    refused(&answer, 422, "events.bad_topic");
    site.two()
        .post(&format!("{path}/disable"), Some(&later(&app, 2)), &json!({}))
        .await
        .expect(200);

    // Granted again, a new token resumes what an operator or the app wants resumed; nothing resumes by itself.
    let granted = of_network(
        "network.grant.changed",
        &app,
        &now_text(),
        json!({ "project_id": app.project,
        "capability": "events.app.subscribe", "audience": "openvibe.events", "from": "revoked", "to": "approved" }),
    );
    site.one().publish(&granted).await.expect(201);
    assert_eq!(site.two().get(&path, Some(&token)).await.expect(200)["enabled"], false);
    let resumed = site
        .two()
        .post(&format!("{path}/enable"), Some(&later(&app, 2)), &json!({}))
        .await
        .expect(200);
    assert_eq!(resumed["enabled"], true);
}

#[tokio::test]
async fn the_latest_revocation_counts_and_a_repeat_changes_nothing() {
    let site = free(1).await;
    let app = App::new("production");
    let of = |at: &str| of_network("network.app.revoked", &app, at, json!({}));
    let (late, early) = (of("2030-01-01T00:00:00.5Z"), of("2020-01-01T00:00:00Z"));
    let moment = "SELECT revoked_at FROM app_revocations WHERE consumer = $1 AND scope = 'app'";
    for event in [&early, &late, &early, &of("2021-01-01T00:00:00+02:00")] {
        let status = site.one().publish(event).await.status;
        assert!([200, 201].contains(&status), "{status}");
    }
    assert_eq!(site.number(moment, &app.consumer()).await, 1_893_456_000_500);

    let app = App::new("production");
    let token = later(&app, -20);
    let old = of_network("network.app.revoked", &app, "2020-01-01T00:00:00Z", json!({}));
    site.one().publish(&old).await.expect(201);
    let made = app.subscribe(site.one(), &app.all(), "hook").await.expect(201);
    site.one().publish(&old).await.expect(200);
    let path = format!("/api/v1/subscriptions/{}", text(&made, "id"));
    assert_eq!(
        site.one().get(&path, Some(&token)).await.expect(200)["enabled"],
        true,
        "a repeat disables nothing"
    );
}

#[tokio::test]
async fn nothing_but_a_stored_event_of_the_network_revokes() {
    let site = free(1).await;
    let app = App::new("sandbox");
    let refused_batch = batch(&[revocation(&app), envelope("network").event_type("live.stream.started")]);
    refused(
        &site.one().publish_as("network", &refused_batch).await,
        403,
        "events.type_not_allowed",
    );
    let conflicting = envelope("network");
    site.one().publish(&conflicting).await.expect(201);
    let taken = batch(&[revocation(&app), envelope("network").with_id(conflicting.id())]);
    refused(
        &site.one().publish_as("network", &taken).await,
        409,
        "events.id_conflict",
    );
    for (event, status) in [
        (revocation(&app).set("source", "live"), 403),
        (revocation(&app).subject("app", &app.consumer()), 201),
        (revocation(&app).subject("project", &app.id), 201),
        (revocation(&app).event_type("network.app.created"), 201),
    ] {
        let token = site.one().service_token(if status == 403 { "live" } else { "network" });
        let answer = site.one().post("/api/v1/events", Some(&token), event.json()).await;
        assert_eq!(answer.status, status, "{}", answer.text);
    }
    app.published(site.one(), &app.event("x.y")).await;
    let rows: i64 = sqlx::query_scalar("SELECT count(*) FROM app_revocations")
        .fetch_one(&site.pool)
        .await
        .expect("a count");
    assert_eq!(rows, 0);
}

#[tokio::test]
async fn what_waits_for_a_revoked_app_is_claimed_by_no_process() {
    let fixture = Fixture::new().await;
    let second = fixture.another().await;
    let app = App::new("sandbox");
    let project = Project {
        id: app.project.as_str().into(),
        env: Env::Sandbox,
    };
    let new = NewSubscription {
        holder: Holder {
            consumer: &app.consumer(),
            project: Some(&project),
        },
        topic_pattern: "live.*",
        endpoint: HOOK,
        secret: "whsec_test",
        retry_policy: None,
        max_inflight: Some(1),
        consumer_max: 100,
        project_max: None,
        issued_at_s: 0,
    };
    let made = fixture.store.create_subscription(&new).await.expect("a subscription");
    let id = SubscriptionId::parse(&made.id).expect("an id");
    second
        .refresh_view(second.version().await.expect("a version"))
        .await
        .expect("a view");
    let public: Vec<_> = (0..3)
        .map(|_| event_from(&envelope("live").visibility("public")))
        .collect();
    put(&fixture.store, Some(&id), &public, None).await.expect("a group");
    let before = claim(&second, "before", &[&id]).await;
    assert_eq!(before.claimed.len(), 1, "one runs when the revocation comes");

    let version = second.view().version;
    let stored = Door::open(&fixture.store)
        .publish(request("network", revocation(&app).json()))
        .await;
    stored.expect("a stored revocation");
    assert_eq!(
        second.view().version,
        version,
        "the second process has not looked since"
    );
    settle_all(&second, "before", &before, &retry(0)).await;
    let after = claim(&second, "before", &[&id]).await;
    assert!(
        after.claimed.is_empty(),
        "neither what waited nor the attempt that failed: {after:?}"
    );
    let waiting = "SELECT count(*) FROM deliveries WHERE status IN ('pending', 'failed')";
    assert_eq!(
        fixture.number(waiting).await,
        3,
        "it waits for an operator or for retention"
    );
}

#[tokio::test]
async fn what_a_process_began_before_it_knew_of_a_withdrawal_is_judged_by_the_store() {
    let fixture = Fixture::new().await;
    let second = fixture.another().await;
    let door = Door::open(&fixture.store);
    let rules = Rules {
        sources: SourceMap::default(),
        max_payload_bytes: 65_536,
    };
    for (event, revoked) in [(revocation as fn(&App) -> Envelope, true), (withdrawal, false)] {
        let app = App::new("sandbox");
        let project = Project {
            id: app.project.as_str().into(),
            env: Env::Sandbox,
        };
        let consumer = app.consumer();
        let holder = Holder {
            consumer: &consumer,
            project: Some(&project),
        };
        let issued_at_s = i64::try_from(unix_now()).expect("a time");
        let new = |pattern| NewSubscription {
            holder,
            topic_pattern: pattern,
            endpoint: HOOK,
            secret: "whsec_test",
            retry_policy: None,
            max_inflight: None,
            consumer_max: 100,
            project_max: None,
            issued_at_s,
        };
        let made = second
            .create_subscription(&new("live.*"))
            .await
            .expect("a subscription");
        let id = SubscriptionId::parse(&made.id).expect("an id");
        second
            .refresh_view(second.version().await.expect("a version"))
            .await
            .expect("a view");
        let version = second.view().version;
        door.publish(request("network", event(&app).json()))
            .await
            .expect("a stored event");

        let caller = domain::app::App::new(&app.id, project.clone(), None, issued_at_s);
        let trace = RequestTrace {
            id: "4bf92f3577b34da6a3ce929d0e0e4736",
            given: false,
        };
        let body = app.event("x.y").json().to_string();
        let publish = PublishRequest::of_app(&body, caller, trace, &rules).expect("a valid request");
        assert_eq!(second.view().version, version, "it has not looked since");
        let answer = Door::open(&second).publish(publish).await;
        assert_eq!(matches!(answer, Err(PublishError::Revoked)), revoked, "{answer:?}");
        let created = second.create_subscription(&new("chat.*")).await;
        let enabled = second.set_enabled(&holder, &id, Switch::On, issued_at_s).await;
        for refused in [
            created.expect_err("no subscription"),
            enabled.expect_err("no resumption"),
        ] {
            let is_it = match revoked {
                true => matches!(refused, StoreError::AppRevoked),
                false => matches!(refused, StoreError::SubscribingWithdrawn),
            };
            assert!(is_it, "{refused:?}");
        }
        let disabled = second.set_enabled(&holder, &id, Switch::Off, issued_at_s).await;
        assert!(disabled.expect("to end it is always allowed").is_some());
    }
}
