//! What a project may use: exact under concurrency in two processes, free for what is refused, and given back once.

use futures_util::future::join_all;
use serde_json::json;

use crate::{
    api_world::{Site, refused},
    apps_world::{App, FREE},
    support::{
        envelopes::batch,
        wait::{SOON, eventually},
    },
};

/// A world with these quotas and no other limit.
async fn with(processes: usize, quotas: &[(&'static str, &'static str)]) -> Site {
    let mut env: Vec<(&str, &str)> = FREE.to_vec();
    env.retain(|(name, _)| quotas.iter().all(|(other, _)| other != name));
    env.extend(quotas);
    Site::own(processes, &env).await
}

const RETAINED: &str = "SELECT coalesce(sum(retained_bytes), 0)::bigint FROM app_totals WHERE project_id = $1";
const STORED: &str = "SELECT coalesce(sum(size_bytes), 0)::bigint FROM events WHERE project_id = $1";

#[tokio::test]
async fn events_of_a_minute_are_counted_by_project_and_environment() {
    let site = with(
        2,
        &[
            ("EVENTS_APP_PUBLISH_PER_MINUTE", "3"),
            ("EVENTS_APP_SANDBOX_PUBLISH_PER_MINUTE", "2"),
        ],
    )
    .await;
    let app = App::new("production");
    let first = app.event("x.y");
    app.published(site.one(), &first).await;
    for _ in 0..3 {
        app.publish(site.two(), first.json()).await.expect(200);
    }
    let too_many = batch(&[app.event("x.y"), app.event("x.y"), app.event("x.y")]);
    refused(&app.publish(site.two(), &too_many).await, 429, "events.quota_exceeded");
    let looped = app.event("x.y").set("source", "live");
    refused(
        &app.publish(site.two(), looped.json()).await,
        403,
        "events.source_mismatch",
    );
    // Neither the repeats nor what was refused has cost anything.
    app.publish(site.two(), &batch(&[first, app.event("x.y"), app.event("x.y")]))
        .await
        .expect(201);
    let answer = app
        .colleague()
        .publish(site.one(), app.colleague().event("x.y").json())
        .await;
    refused(&answer, 403, "events.source_mismatch");
    let colleague = app.colleague();
    let refusal = colleague.event("x.y");
    let answer = colleague.publish(site.one(), refusal.json()).await;
    let document = refused(&answer, 429, "events.quota_exceeded");
    let told = ["quota", "limit", "window", "retry_after"].map(|name| document[name].clone());
    assert_eq!(told, [json!("publish_rate"), json!(3), json!("minute"), json!(60)]);
    assert_eq!(answer.header("retry-after"), "60");
    assert_eq!(site.traces_of(refusal.id()).await, 0);
    let sandbox = app.elsewhere();
    for status in [201, 201, 429] {
        assert_eq!(
            sandbox.publish(site.one(), sandbox.event("x.y").json()).await.status,
            status
        );
    }
    let other = App::new("production");
    other.published(site.one(), &other.event("x.y")).await;
    // An hour later there is room again.
    site.run("UPDATE events SET received_at = received_at - 61000 WHERE project_id IS NOT NULL")
        .await;
    app.published(site.one(), &app.event("x.y")).await;
}

#[tokio::test]
async fn bytes_are_counted_while_they_are_kept_and_given_back_once() {
    let site = with(2, &[("EVENTS_APP_SANDBOX_RETAINED_BYTES", "3000")]).await;
    let app = App::new("sandbox");
    let big = || app.event("x.y").payload(json!({ "blob": "x".repeat(1_200) }));
    let (one, two) = (big(), big());
    app.published(site.one(), &one).await;
    app.published(site.two(), &two).await;
    let held = site.number(STORED, &app.project).await;
    assert_eq!(site.number(RETAINED, &app.project).await, held);
    for client in [site.one(), site.two()] {
        let answer = app.publish(client, big().json()).await;
        let document = refused(&answer, 429, "events.quota_exceeded");
        let told = ["quota", "limit", "used"].map(|name| document[name].clone());
        assert_eq!(told, [json!("retained_bytes"), json!(3_000), json!(held)]);
        assert_eq!(answer.header("retry-after"), "");
    }
    assert_eq!(
        site.number(RETAINED, &app.project).await,
        held,
        "what is refused costs nothing"
    );
    let small = app.event("x.y").payload(json!({}));
    app.published(site.one(), &small).await;
    // What shrinks and what goes is free for its project again, however often it is done.
    for _ in 0..2 {
        site.run(&format!(
            "UPDATE events SET payload = '{{}}', size_bytes = 100 WHERE id = '{}'",
            one.id()
        ))
        .await;
        site.run(&format!("DELETE FROM events WHERE id = '{}'", two.id())).await;
        let stored = site.number(STORED, &app.project).await;
        assert_eq!(site.number(RETAINED, &app.project).await, stored);
    }
    app.published(site.two(), &big()).await;
    site.run("TRUNCATE events").await;
    assert_eq!(site.number(RETAINED, &app.project).await, 0);
}

#[tokio::test]
async fn a_storm_in_two_processes_stores_exactly_what_is_allowed() {
    const ALLOWED: usize = 40;
    let site = with(
        2,
        &[
            ("EVENTS_APP_SANDBOX_PUBLISH_PER_MINUTE", "40"),
            ("EVENTS_APP_RETAINED_BYTES", "20000"),
            ("EVENTS_APP_SANDBOX_MAX_SUBSCRIPTIONS", "5"),
        ],
    )
    .await;
    let apps: Vec<App> = (0..3).map(|_| App::new("sandbox")).collect();
    let requests = (0..180_usize).map(|n| {
        let (app, client) = (&apps[n % 3], if n % 2 == 0 { site.one() } else { site.two() });
        async move {
            let events: Vec<_> = (0..=n % 2).map(|_| app.event("x.y")).collect();
            (n % 3, events.len(), app.publish(client, &batch(&events)).await.status)
        }
    });
    let answers = join_all(requests).await;
    for (n, app) in apps.iter().enumerate() {
        let own = answers.iter().filter(|(of, ..)| *of == n);
        let stored: usize = own
            .clone()
            .filter(|(.., status)| *status == 201)
            .map(|(_, events, _)| events)
            .sum();
        assert!(
            own.clone().all(|(.., status)| [201, 429].contains(status)),
            "{answers:?}"
        );
        assert_eq!(stored, ALLOWED, "one event more would have fitted, or one was too many");
        let counted = site
            .number("SELECT count(*) FROM events WHERE project_id = $1", &app.project)
            .await;
        assert_eq!(usize::try_from(counted), Ok(ALLOWED));
    }

    let app = App::new("production");
    let requests = (0..120_usize).map(|n| {
        let client = if n % 2 == 0 { site.one() } else { site.two() };
        let event = app.event("x.y").payload(json!({ "blob": "x".repeat(400) }));
        let app = &app;
        async move { app.publish(client, event.json()).await.status }
    });
    let stored = join_all(requests)
        .await
        .into_iter()
        .filter(|status| *status == 201)
        .count();
    let held = site.number(STORED, &app.project).await;
    let each = held / i64::try_from(stored).expect("few");
    assert!(
        held <= 20_000 && held + each > 20_000,
        "{held} bytes of {stored} events"
    );
    assert_eq!(site.number(RETAINED, &app.project).await, held);

    let app = App::new("sandbox");
    let requests = (0..20_usize).map(|n| {
        let client = if n % 2 == 0 { site.one() } else { site.two() };
        let holder = if n % 3 == 0 { app.clone() } else { app.colleague() };
        async move { holder.subscribe(client, &holder.all(), &n.to_string()).await }
    });
    let answers = join_all(requests).await;
    assert_eq!(answers.iter().filter(|answer| answer.status == 201).count(), 5);
    let refusal = answers
        .iter()
        .find(|answer| answer.status != 201)
        .expect("one too many");
    let document = refused(refusal, 429, "events.quota_exceeded");
    assert_eq!(
        (&document["quota"], &document["limit"]),
        (&json!("subscriptions"), &json!(5))
    );
    let same = join_all((0..6_usize).map(|n| {
        let client = if n % 2 == 0 { site.one() } else { site.two() };
        let real = app.elsewhere();
        async move { real.subscribe(client, "live.*", "same").await.status }
    }));
    let mut same = same.await;
    same.sort_unstable();
    assert_eq!(same, [201, 409, 409, 409, 409, 409]);
}

#[tokio::test]
async fn room_that_is_freed_while_others_publish_is_never_lost_nor_doubled() {
    let site = with(2, &[]).await;
    let app = App::new("sandbox");
    let publishing = async {
        for n in 0..40_usize {
            let client = if n % 2 == 0 { site.one() } else { site.two() };
            app.published(client, &app.event("x.y")).await;
        }
    };
    let removing = async {
        for _ in 0..40 {
            let oldest = "DELETE FROM events WHERE id IN (SELECT id FROM events WHERE project_id IS NOT NULL ORDER BY seq LIMIT 2)";
            site.run(oldest).await;
        }
    };
    tokio::join!(publishing, removing);
    eventually("the totals are what is stored", SOON, async || {
        site.number(RETAINED, &app.project).await == site.number(STORED, &app.project).await
    })
    .await;
}
