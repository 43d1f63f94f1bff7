//! What an app may call, name and see: its own project in its own environment, and what is public.

use std::slice;

use reqwest::Method;
use serde_json::{Value, json};

use crate::{
    api_world::{consumer, operator, refused, text},
    apps_world::{App, FREE, free, pulled},
    support::{
        client::Client,
        contracts::assert_valid,
        envelopes::{batch, envelope, id},
        network::TokenSpec,
    },
};

/// A token of a service that owns no namespace and may read.
fn reader() -> String {
    TokenSpec::service(&consumer()).sign()
}

#[tokio::test]
async fn an_app_publishes_under_its_own_names_only() {
    let site = free(1).await;
    let (app, other) = (App::new("sandbox"), App::new("sandbox"));
    let good = app.event("order.created");
    let answer = app.publish(site.one(), good.json()).await.expect(201);
    assert_valid("events.publish-result@1", &answer);
    let key = app.prefix();
    let key = key.trim_end_matches('.');
    for (bad, code) in [
        (
            app.event("x").event_type(&format!("{}x", other.prefix())),
            "events.type_not_allowed",
        ),
        (
            app.event("x").event_type("live.stream.started"),
            "events.type_not_allowed",
        ),
        (app.event("x").event_type("app.other.thing"), "events.type_not_allowed"),
        (
            app.event("x").event_type(&format!("{key}x.order.created")),
            "events.type_not_allowed",
        ),
        (
            app.event("x").event_type("provider.health.degraded"),
            "events.type_not_allowed",
        ),
        (app.event("x").set("source", "live"), "events.source_mismatch"),
        (app.event("x").set("source", other.source()), "events.source_mismatch"),
        (
            app.event("x").set("actor", json!({ "type": "service", "id": "live" })),
            "events.actor_mismatch",
        ),
        (
            app.event("x").set("actor", json!({ "type": "app", "id": other.id })),
            "events.actor_mismatch",
        ),
        (
            app.event("x").set("actor", json!({ "type": "user", "id": id("usr") })),
            "events.actor_mismatch",
        ),
    ] {
        let document = refused(&app.publish(site.one(), bad.json()).await, 403, code);
        assert!(!document.to_string().contains(&other.project), "{document}");
        assert_eq!(site.traces_of(bad.id()).await, 0, "{code}");
    }
    let mixed = batch(&[app.event("x"), app.event("x").set("source", "live")]);
    let document = refused(&app.publish(site.one(), &mixed).await, 403, "events.source_mismatch");
    assert_eq!(document["index"], 1);
    let as_service = site.one().publish_as("live", app.event("x").json()).await;
    refused(&as_service, 403, "events.source_mismatch");
}

#[tokio::test]
async fn whom_an_app_acts_for_is_what_its_token_says() {
    let site = free(1).await;
    let app = App::new("sandbox");
    let (person, stranger) = (id("usr"), id("usr"));
    let token = app.spec().claim("on_behalf_of", person.as_str()).sign();
    let user = |id: &str| json!({ "type": "user", "id": id });
    let publish = async |event: &Value| site.one().post("/api/v1/events", Some(&token), event).await;
    let by_person = app
        .event("x")
        .set("actor", user(&person))
        .set("on_behalf_of", user(&person));
    publish(by_person.json()).await.expect(201);
    let for_stranger = app.event("x").set("on_behalf_of", user(&stranger));
    publish(for_stranger.json()).await.expect(201);
    let read = async |id: &str| {
        let path = format!("/api/v1/events/{id}");
        site.one().get(&path, Some(&app.token())).await.expect(200)["event"].clone()
    };
    assert_eq!(read(by_person.id()).await["on_behalf_of"], user(&person));
    assert!(
        read(for_stranger.id()).await.get("on_behalf_of").is_none(),
        "it is dropped"
    );
    let foreign = app.event("x").set("actor", user(&stranger));
    refused(&publish(foreign.json()).await, 403, "events.actor_mismatch");
}

#[tokio::test]
async fn what_each_reader_finds_by_pull_and_by_id() {
    let site = free(1).await;
    let client = site.one();
    let sandbox = App::new("sandbox");
    let (production, colleague, stranger) = (sandbox.elsewhere(), sandbox.colleague(), App::new("sandbox"));
    let kind = envelope("live").type_name().to_owned();
    let of_live = |visibility: &str| envelope("live").event_type(&kind).visibility(visibility);
    let mine = sandbox.published(client, &sandbox.event("a.x")).await;
    let theirs = colleague.published(client, &colleague.event("a.y")).await;
    let real = production.published(client, &production.event("a.x")).await;
    let foreign = stranger
        .published(client, &stranger.event("a.x").visibility("public"))
        .await;
    let (public, internal) = (of_live("public"), of_live("internal"));
    let personal = of_live("subject").subject("user", &id("usr"));
    for event in [&public, &internal, &personal] {
        client.publish(event).await.expect(201);
    }
    let namespace = kind.rsplit_once('.').expect("segments").0.to_owned();

    let own = [mine.clone(), theirs.clone()];
    assert_eq!(
        sandbox.reads(client, &sandbox.all()).await,
        own,
        "whichever app of the project published"
    );
    assert_eq!(
        sandbox.reads(client, &format!("{}a.x", sandbox.prefix())).await,
        slice::from_ref(&mine)
    );
    assert_eq!(production.reads(client, &sandbox.all()).await, slice::from_ref(&real));
    for app in [&sandbox, &production] {
        for topic in [format!("{namespace}.*"), kind.clone()] {
            assert_eq!(app.reads(client, &topic).await, [public.id()], "{topic}");
        }
    }
    let both = format!("{namespace}.*,{}", sandbox.all());
    assert_eq!(
        sandbox.reads(client, &both).await,
        [mine.clone(), theirs.clone(), public.id().to_owned()]
    );
    let all: Vec<String> = [&public, &internal, &personal]
        .map(|event| event.id().to_owned())
        .into();
    let service = reader();
    assert_eq!(pulled(client, &service, "*").await, all, "a star finds no app's event");
    assert_eq!(pulled(client, &service, "*.x").await, Vec::<String>::new());
    for topic in ["app.*".to_owned(), sandbox.all(), format!("{}a.x", sandbox.prefix())] {
        assert_eq!(
            pulled(client, &service, &topic).await,
            slice::from_ref(&real),
            "production alone: {topic}"
        );
    }
    assert_eq!(pulled(client, &service, &format!("{namespace}.*,app.*")).await.len(), 4);

    let status = async |id: &str, token: &str| client.get(&format!("/api/v1/events/{id}"), Some(token)).await.status;
    for (token, id, expected) in [
        (sandbox.token(), mine.as_str(), 200),
        (sandbox.token(), &theirs, 200),
        (sandbox.token(), &real, 404),
        (production.token(), &mine, 404),
        (sandbox.token(), &foreign, 404),
        (sandbox.token(), public.id(), 200),
        (sandbox.token(), internal.id(), 404),
        (sandbox.token(), personal.id(), 404),
        (service.clone(), &real, 200),
        (service.clone(), &mine, 404),
        (service, internal.id(), 200),
    ] {
        assert_eq!(status(id, &token).await, expected, "{id}");
    }
}

#[tokio::test]
async fn patterns_stay_in_the_scope_of_the_app() {
    let site = free(1).await;
    let (app, other) = (App::new("production"), App::new("production"));
    let (token, foreign) = (app.token(), other.all());
    for topic in [
        "*",
        "*.created",
        "app",
        "app.*",
        "app.*.order.created",
        foreign.as_str(),
    ] {
        let pull = site
            .one()
            .get(&format!("/api/v1/events?topic={topic}"), Some(&token))
            .await;
        let document = refused(&pull, 403, "events.topic_not_allowed");
        assert!(text(&document, "detail").contains(&app.prefix()), "{document}");
        let stored = json!({ "topic": topic, "cursor": "c1.0.NDI" });
        refused(
            &site.one().put("/api/v1/checkpoints", Some(&token), &stored).await,
            403,
            "events.topic_not_allowed",
        );
        let asked = site
            .one()
            .get(&format!("/api/v1/checkpoints?topic={topic}"), Some(&token))
            .await;
        refused(&asked, 403, "events.topic_not_allowed");
        refused(
            &app.subscribe(site.one(), topic, "x").await,
            403,
            "events.topic_not_allowed",
        );
    }
    let any_of = format!("/api/v1/events?topic=live.*,{foreign}");
    refused(
        &site.one().get(&any_of, Some(&token)).await,
        403,
        "events.topic_not_allowed",
    );
    refused(
        &site.one().get("/api/v1/events", Some(&token)).await,
        403,
        "events.topic_not_allowed",
    );
    refused(
        &site.one().get("/api/v1/events?topic=*.*", Some(&token)).await,
        400,
        "events.bad_topic",
    );
}

#[tokio::test]
async fn an_id_belongs_to_whoever_used_it_first() {
    let site = free(2).await;
    let app = App::new("sandbox");
    let event = app.event("x.y");
    app.published(site.one(), &event).await;
    let again = app.publish(site.two(), event.json()).await.expect(200);
    assert_eq!(again["duplicate"], true);
    assert!(again["cursor"].is_string());
    let (real, colleague, stranger) = (app.elsewhere(), app.colleague(), App::new("sandbox"));
    let refusals = async || {
        for other in [&real, &colleague, &stranger] {
            let same = other.event("x.y").with_id(event.id());
            let document = refused(&other.publish(site.one(), same.json()).await, 409, "events.id_conflict");
            assert!(!document.to_string().contains(&app.project), "{document}");
        }
        let of_service = site.one().publish(&envelope("live").with_id(event.id())).await;
        refused(&of_service, 409, "events.id_conflict");
        let of_type = app.event("x.z").with_id(event.id());
        refused(
            &app.publish(site.one(), of_type.json()).await,
            409,
            "events.id_conflict",
        );
    };
    refusals().await;
    // Only its receipt is left.
    site.run(&format!("DELETE FROM events WHERE id = '{}'", event.id()))
        .await;
    let again = app.publish(site.one(), event.json()).await.expect(200);
    assert_eq!((&again["duplicate"], &again["pruned"]), (&json!(true), &json!(true)));
    refusals().await;
    let of_service = envelope("live");
    site.one().publish(&of_service).await.expect(201);
    site.run(&format!("DELETE FROM events WHERE id = '{}'", of_service.id()))
        .await;
    let taken = app.event("x.y").with_id(of_service.id());
    refused(&app.publish(site.one(), taken.json()).await, 409, "events.id_conflict");
}

#[tokio::test]
async fn checkpoints_are_kept_apart_by_app_and_environment() {
    let site = free(1).await;
    let app = App::new("sandbox");
    let topic = "live.*";
    let path = format!("/api/v1/checkpoints?topic={topic}");
    let body = |cursor: &str| json!({ "topic": topic, "cursor": cursor });
    let stored = site
        .one()
        .put("/api/v1/checkpoints", Some(&app.token()), &body("c1.0.NDI"))
        .await
        .expect(200);
    assert_eq!(text(&stored, "consumer"), app.consumer());
    site.one()
        .put("/api/v1/checkpoints", Some(&app.elsewhere().token()), &body("c1.0.Nw"))
        .await
        .expect(200);
    for (caller, cursor) in [
        (app.clone(), json!("c1.0.NDI")),
        (app.elsewhere(), json!("c1.0.Nw")),
        (app.colleague(), Value::Null),
    ] {
        let read = site.one().get(&path, Some(&caller.token())).await.expect(200);
        assert_eq!(read["cursor"], cursor, "{caller:?}");
    }
}

#[tokio::test]
async fn an_export_token_reads_its_project_and_does_nothing_else() {
    let site = free(1).await;
    let app = App::new("production");
    let exported = app.published(site.one(), &app.event("x.y")).await;
    let of = |env: &'static str| App {
        id: format!("app_{}", &app.project["prj_".len()..]),
        project: app.project.clone(),
        env,
    };
    let token = |env| {
        let spec = of(env).spec().caps(&["events.app.read"]).claim("purpose", "export");
        spec.claim("on_behalf_of", id("usr"))
            .claim("ns", json!([app.project, format!("app.{}.*", app.project)]))
            .sign()
    };
    assert_eq!(pulled(site.one(), &token("production"), &app.all()).await, [exported]);
    assert_eq!(
        pulled(site.one(), &token("sandbox"), &app.all()).await,
        Vec::<String>::new()
    );
    let publish = of("production").event("x.y");
    let answer = site
        .one()
        .post("/api/v1/events", Some(&token("production")), publish.json())
        .await;
    refused(&answer, 403, "capability.denied");
    let list = site
        .one()
        .get("/api/v1/subscriptions", Some(&token("production")))
        .await;
    refused(&list, 403, "capability.denied");
}

#[tokio::test]
async fn what_apps_publish_makes_no_trace_deeper_but_their_own() {
    let site = free(1).await;
    let (app, other) = (App::new("sandbox"), App::new("sandbox"));
    let trace = |event: crate::support::envelopes::Envelope| event.set("trace_id", "0af7651916cd43dd8448eb211c80319c");
    for _ in 0..8 {
        app.published(site.one(), &trace(app.event("poke.it"))).await;
    }
    let one_more = app.publish(site.one(), trace(app.event("poke.it")).json()).await;
    refused(&one_more, 409, "events.loop_detected");
    other.published(site.one(), &trace(other.event("poke.it"))).await;
    app.elsewhere()
        .published(site.one(), &trace(app.elsewhere().event("poke.it")))
        .await;
    // Eight hops of services, none of them made any deeper by the apps.
    let kinds = [envelope("live"), envelope("media")];
    for n in 0..8 {
        let hop = trace(kinds[n % 2].clone()).with_id(&id("evt"));
        site.one().publish(&hop).await.expect(201);
    }
    let ninth = trace(kinds[0].clone()).with_id(&id("evt"));
    refused(&site.one().publish(&ninth).await, 409, "events.loop_detected");
    let of_third = App::new("production");
    let deep = of_third
        .publish(site.one(), trace(of_third.event("poke.it")).json())
        .await;
    refused(&deep, 409, "events.loop_detected");
}

#[tokio::test]
async fn an_apps_subscriptions_are_its_own_and_as_wide_as_its_reading() {
    let site = free(2).await;
    let client = site.one();
    let app = App::new("sandbox");
    let own = app.subscribe(client, &app.all(), "own").await.expect(201);
    assert_valid("events.subscription@1", &own);
    assert_eq!(
        (text(&own, "consumer"), text(&own, "env")),
        (app.consumer().as_str(), "sandbox")
    );
    assert_eq!(text(&own, "project_id"), app.project);
    app.subscribe(client, "live.*", "public").await.expect(201);
    app.elsewhere().subscribe(client, &app.all(), "own").await.expect(201);

    let exists = refused(
        &app.subscribe(site.two(), &app.all(), "own").await,
        409,
        "events.subscription_exists",
    );
    assert_eq!(exists["subscription_id"], own["id"]);
    let path = format!("/api/v1/subscriptions/{}", text(&own, "id"));
    let renamed = App {
        project: id("prj"),
        ..app.clone()
    };
    let strangers = [
        app.colleague().token(),
        app.elsewhere().token(),
        renamed.token(),
        reader(),
    ];
    for token in &strangers {
        for (method, tail) in [
            ("GET", ""),
            ("PATCH", ""),
            ("POST", "/enable"),
            ("POST", "/disable"),
            ("POST", "/rotate-secret"),
        ] {
            let method: Method = method.parse().expect("a method");
            let request = client.request(method, &format!("{path}{tail}"), Some(token));
            let answer = client
                .send(request.header("content-type", "application/json").body("{}"))
                .await;
            refused(&answer, 404, "events.not_found");
        }
        let list = client.get("/api/v1/subscriptions", Some(token)).await.expect(200);
        assert!(!list.to_string().contains(text(&own, "id")), "{list}");
    }
    let list = site
        .two()
        .get("/api/v1/subscriptions", Some(&app.token()))
        .await
        .expect(200);
    assert_eq!(list["subscriptions"].as_array().map(Vec::len), Some(2));
    let rotated = client
        .post(&format!("{path}/rotate-secret"), Some(&app.token()), &json!({}))
        .await
        .expect(200);
    assert_ne!(rotated["secret"], own["secret"]);
    let change = json!({ "max_inflight": 4 });
    let request = client.request(Method::PATCH, &path, Some(&app.token()));
    let changed = client
        .send(crate::support::client::json(request, &change))
        .await
        .expect(200);
    assert_eq!(changed["max_inflight"], 4);
}

#[tokio::test]
async fn an_event_is_queued_for_whoever_may_see_it() {
    let site = free(1).await;
    let client = site.one();
    let app = App::new("sandbox");
    let (real, stranger) = (app.elsewhere(), App::new("sandbox"));
    let kind = envelope("live").type_name().to_owned();
    let id_of = |view: Value| text(&view, "id").to_owned();
    let own = id_of(app.subscribe(client, &app.all(), "a").await.expect(201));
    let public = id_of(app.subscribe(client, &kind, "b").await.expect(201));
    let in_production = id_of(real.subscribe(client, &app.all(), "c").await.expect(201));
    let foreign = id_of(stranger.subscribe(client, &stranger.all(), "d").await.expect(201));
    let of_apps = id_of(site.subscribe(&consumer(), "app.*", "e").await);
    let of_all = id_of(site.subscribe(&consumer(), "*", "f").await);
    let to = async |event_id: &str| {
        let rows: Vec<(String,)> =
            sqlx::query_as("SELECT subscription_id FROM deliveries WHERE event_id = $1 ORDER BY 1")
                .bind(event_id)
                .fetch_all(&site.pool)
                .await
                .expect("the deliveries of an event");
        rows.into_iter().map(|(id,)| id).collect::<Vec<_>>()
    };
    let sorted = |mut ids: Vec<&String>| {
        ids.sort();
        ids.into_iter().cloned().collect::<Vec<_>>()
    };
    let test = app.published(client, &app.event("x.y").visibility("public")).await;
    assert_eq!(to(&test).await, sorted(vec![&own]));
    let sold = real.published(client, &real.event("x.y")).await;
    assert_eq!(to(&sold).await, sorted(vec![&in_production, &of_apps]));
    let shown = envelope("live").event_type(&kind).visibility("public");
    client.publish(&shown).await.expect(201);
    assert_eq!(to(shown.id()).await, sorted(vec![&public, &of_all]));
    let hidden = envelope("live").event_type(&kind);
    client.publish(&hidden).await.expect(201);
    assert_eq!(to(hidden.id()).await, sorted(vec![&of_all]));

    // A replay queues the same, and nothing else.
    let everything = [&test, &sold, shown.id(), hidden.id()];
    for (subscription, expected) in [
        (&own, 1),
        (&public, 1),
        (&in_production, 1),
        (&foreign, 0),
        (&of_apps, 1),
        (&of_all, 2),
    ] {
        for selection in [json!({ "event_ids": everything }), json!({ "from_seq": 0 })] {
            let mut body = selection;
            body["subscription_id"] = json!(subscription);
            let replayed = client
                .post("/api/v1/deliveries/replay", Some(&operator()), &body)
                .await
                .expect(200);
            assert_eq!(replayed["queued"], expected, "{body}");
        }
    }
}

#[tokio::test]
async fn an_endpoint_of_an_app_is_https_and_may_be_public() {
    let site = free(1).await;
    let app = App::new("sandbox");
    for endpoint in [
        json!("http://hooks.example.com/"),
        json!("https://localhost/x"),
        json!("https://intranet/x"),
        json!("https://a.internal/x"),
        json!("https://user:secret@8.8.8.8/x"),
        json!("https://hooks.example.com./x"),
        json!(7),
        Value::Null,
    ] {
        let body = json!({ "topic_pattern": app.all(), "endpoint": endpoint });
        let answer = site
            .one()
            .post("/api/v1/subscriptions", Some(&app.token()), &body)
            .await;
        refused(&answer, 422, "events.endpoint_not_allowed");
    }
}

#[tokio::test]
async fn with_apps_off_their_tokens_are_judged_like_any_other_and_refused() {
    let site = crate::api_world::Site::own(1, &[("EVENTS_APPS", "off")]).await;
    for (method, path) in crate::api_world::routes(&id("sub")) {
        for (env, status, code) in [
            ("production", 403, "capability.denied"),
            ("sandbox", 401, "token.sandbox_refused"),
        ] {
            let token = App::new(env).spec().caps(&["events.*"]).sign();
            let answer = crate::api_world::send(site.one(), method, &path, Some(&token), "{}".to_owned()).await;
            refused(&answer, status, code);
        }
    }
}

#[tokio::test]
async fn the_limits_in_force_are_told() {
    let mut env: Vec<(&str, &str)> = FREE.into_iter().filter(|(name, _)| *name != "EVENTS_LIMITS").collect();
    env.extend([("EVENTS_LIMITS", "on"), ("EVENTS_APP_MAX_SUBSCRIPTIONS", "7")]);
    let site = crate::api_world::Site::own(1, &env).await;
    let told = site.one().get("/limits.json", None).await.expect(200);
    let limit = |id: &str| {
        let limits = told["limits"].as_array().expect("limits");
        limits.iter().find(|limit| limit["id"] == id).expect("a limit").clone()
    };
    assert_eq!(limit("subscriptions")["production"], 7);
    assert_eq!(limit("subscriptions")["sandbox"], Value::Null);
    assert_eq!(limit("retained_bytes")["production"], Value::Null);
    let rates = told["rate_limits"].as_array().expect("rates");
    let publish = rates
        .iter()
        .find(|rate| rate["id"] == "events.app.publish")
        .expect("a rate");
    assert_eq!((&publish["minute"], &publish["hour"]), (&json!(60), &json!(1_200)));

    let app = App::new("sandbox");
    let token = app.token();
    let publish = async |client: &Client| {
        client
            .post("/api/v1/events", Some(&token), app.event("x.y").json())
            .await
    };
    let mut last = publish(site.one()).await;
    for _ in 0..130 {
        if last.status != 201 {
            break;
        }
        last = publish(site.one()).await;
    }
    refused(&last, 429, "rate_limited");
    assert!(!last.text.contains(&app.project), "{}", last.text);
}
