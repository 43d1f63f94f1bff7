//! The carrier fabric in the service as it is run: what placement says, what is on record, and what crosses between
//! processes.

use std::time::Duration;

use serde_json::{Value, json};

use crate::{
    api_world::{Site, operator, send},
    fabric_world::{
        Pair, QUICK, candidate, carriers, explain, explain_delivery, keyed, median, number, put_policy, reason,
        subscribe, switch, topic,
    },
    support::{
        client::{Client, assert_problem},
        envelopes::{Envelope, envelope},
        process::signal,
        wait::{SOON, eventually},
    },
};

#[tokio::test(flavor = "multi_thread")]
async fn work_of_a_process_that_sends_nothing_wakes_another_without_a_poll() {
    const TYPE: &str = "live.doorbell.rung";
    let pair = Pair::start(&[]).await;
    let subscription = pair.subscribe(TYPE, "/hook").await;
    let event = envelope("live").event_type(TYPE);
    pair.client().publish(&event).await.expect(201);
    pair.receiver.wait_calls(1, SOON).await;
    // A replay is work as well.
    eventually("the delivery is recorded", SOON, async || {
        let delivered = "SELECT count(*) FROM deliveries WHERE status = 'delivered'";
        number(&pair.database, delivered).await == 1
    })
    .await;
    let body = json!({ "subscription_id": subscription, "event_ids": [event.id()] });
    replay(pair.client(), &body).await;
    pair.receiver.wait_calls(2, SOON).await;
}

/// Replays what a body says.
async fn replay(client: &Client, body: &Value) {
    client
        .post("/api/v1/deliveries/replay", Some(&operator()), body)
        .await
        .expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doorbell_of_the_database_crosses_long_before_any_poll() {
    const TYPE: &str = "live.doorbell.quick";
    let pair = Pair::start(&[]).await;
    pair.subscribe(TYPE, "/hook").await;
    let mut took = Vec::new();
    for _ in 0..50 {
        took.push(pair.round(&envelope("live").event_type(TYPE), SOON).await);
    }
    let median = median(took);
    println!("pg-v1: median from the publish to its POST: {median:?}");
    assert!(median < QUICK, "{median:?}");
    pair.all_sent_once(50, SOON).await;
    assert_eq!(pair.placed_on("pg-v1").await, 50);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_event_of_a_new_subscription_crosses_as_soon_as_any_other() {
    let pair = Pair::start(&[]).await;
    let mut took = Vec::new();
    for n in 0..15 {
        let event_type = format!("live.fresh.n{n}");
        pair.subscribe(&event_type, "/hook").await;
        took.push(pair.round(&envelope("live").event_type(&event_type), SOON).await);
    }
    let median = median(took);
    println!("pg-v1: median from the publish to its POST for a new subscription: {median:?}");
    // Other processes look for new ones once a second; the first look after others may be 50 ms away.
    assert!(median < QUICK + Duration::from_millis(50), "{median:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_committed_during_a_stop_is_heard_elsewhere() {
    const TYPE: &str = "live.doorbell.last";
    let pair = Pair::start(&[]).await;
    pair.subscribe(TYPE, "/hook").await;
    pair.round(&envelope("live").event_type(TYPE), SOON).await;
    let mut held = pair.database.pool().begin().await.expect("a transaction");
    sqlx::query("SELECT 1 FROM store_counter FOR UPDATE")
        .execute(&mut *held)
        .await
        .expect("the row that every publish needs");
    let last = envelope("live").event_type(TYPE);
    let publish = pair.client().publish(&last);
    let stop = async {
        eventually("the publish waits", SOON, async || {
            let waiting = "SELECT count(*) FROM pg_stat_activity
                           WHERE datname = current_database() AND wait_event_type = 'Lock'";
            number(&pair.database, waiting).await > 0
        })
        .await;
        signal("TERM", pair.publisher.pid());
        let address = pair.publisher.base().trim_start_matches("http://").to_owned();
        eventually("it takes no new connections", SOON, async || {
            tokio::net::TcpStream::connect(&address).await.is_err()
        })
        .await;
        // By now everything has ended that does not wait for this publish.
        tokio::time::timeout(Duration::from_millis(300), std::future::pending::<()>())
            .await
            .expect_err("nothing to wait for");
        held.commit().await.expect("let go");
    };
    let (answer, ()) = tokio::join!(publish, stop);
    assert_eq!(answer.status, 201, "{}", answer.text);
    // The poll is an hour away.
    pair.receiver.wait_calls(2, SOON).await;
    pair.publisher.wait_exit(SOON).await;
}

#[tokio::test]
async fn placement_says_what_holds_for_a_type_and_what_held_for_a_delivery() {
    let site = Site::own(2, &[("EVENTS_WORKER_INTERVAL_MS", "500")]).await;
    let explained = explain(site.one(), "live.placed.never", None).await;
    assert_eq!(explained["carrier_class"], "QUEUE");
    assert_eq!(
        (&explained["pattern"], &explained["ordering_key"]),
        (&Value::Null, &Value::Null)
    );
    assert_eq!(explained["placement"]["selected"], "pg-v1");
    assert_eq!(explained["last_decision"], Value::Null);
    let floor = candidate(&explained, "pg-v1").expect("the floor");
    assert_eq!(
        (&floor["eligible"], &floor["estimated_latency_ms"]),
        (&json!(true), &json!(250)),
        "half of the poll's interval"
    );

    const TYPE: &str = "live.placed.here";
    keyed(site.one(), "live.placed.*", "domain", "required").await;
    let subscription = subscribe(site.one(), TYPE, "http://127.0.0.1:9/placed").await;
    let first = envelope("live").event_type(TYPE).subject("stream", "K1");
    site.one().publish(&first).await.expect(201);
    let second = envelope("live").event_type(TYPE).subject("stream", "K1");
    site.two().publish(&second).await.expect(201);
    let (one, two) = (
        explain_delivery(site.one(), &first, &subscription).await,
        explain_delivery(site.two(), &second, &subscription).await,
    );
    assert_eq!(one["carrier"], "pg-v1");
    assert_eq!(one["carrier_class"], "STREAM");
    assert_eq!(
        (&one["pattern"], &one["revision"]),
        (&json!("live.placed.*"), &json!(1))
    );
    assert_eq!(one["decision"]["result"]["selected"], "pg-v1");
    assert_eq!(one["decision"], two["decision"], "both processes act on one record");
    let last = explain(site.two(), TYPE, Some("stream:K1")).await;
    assert_eq!(last["ordering_key"], "stream:K1");
    assert_eq!(last["last_decision"]["decided_at"], one["decision"]["decided_at"]);

    // What a policy says later changes nothing about what was made before.
    keyed(site.one(), "live.placed.*", "bulk", "none").await;
    let third = envelope("live").event_type(TYPE).subject("stream", "K2");
    site.two().publish(&third).await.expect(201);
    assert_eq!(explain_delivery(site.one(), &first, &subscription).await, one);
    let changed = explain_delivery(site.one(), &third, &subscription).await;
    assert_eq!(
        (&changed["carrier_class"], &changed["revision"]),
        (&json!("QUEUE"), &json!(2))
    );

    let unknown = format!("/api/v1/placement/deliveries/evt_01K7AAB2CD3EF4GH5JK6MN7PQR/{subscription}");
    let refused = site.one().get(&unknown, Some(&operator())).await;
    assert_problem(&refused, 404, "events.not_found");
}

#[tokio::test]
async fn a_backlog_keeps_its_key_on_its_carrier_until_it_has_drained() {
    const TYPE: &str = "live.pinned.here";
    let site = Site::own(1, &[]).await;
    keyed(site.one(), TYPE, "domain", "optional").await;
    let subscription = subscribe(site.one(), TYPE, "http://127.0.0.1:9/pinned").await;
    let event = |subject: &str| envelope("live").event_type(TYPE).subject("stream", subject);
    let first = event("K");
    site.one().publish(&first).await.expect(201);
    sqlx::query("UPDATE deliveries SET carrier = 'other-v1' WHERE event_id = $1")
        .bind(first.id())
        .execute(&site.pool)
        .await
        .expect("an update");
    let (second, third, elsewhere) = (event("K"), event("K"), event("L"));
    let token = site.one().service_token("live");
    let both = json!({ "events": [second.json(), third.json(), elsewhere.json()] });
    site.one().post("/api/v1/events", Some(&token), &both).await.expect(201);
    let carrier = async |event: &Envelope| explain_delivery(site.one(), event, &subscription).await["carrier"].clone();
    assert_eq!(carrier(&second).await, "other-v1");
    assert_eq!(carrier(&third).await, "other-v1", "the whole group joins the backlog");
    assert_eq!(carrier(&elsewhere).await, "pg-v1");
    sqlx::query("UPDATE deliveries SET status = 'delivered', head = false WHERE ordering_key = 'stream:K'")
        .execute(&site.pool)
        .await
        .expect("an update");
    let later = event("K");
    site.one().publish(&later).await.expect(201);
    assert_eq!(carrier(&later).await, "pg-v1", "it has drained");
}

#[tokio::test]
async fn a_replay_places_deliveries_by_the_policy_in_force_and_puts_the_decision_on_record() {
    const TYPE: &str = "live.replayed.here";
    let site = Site::own(1, &[]).await;
    let event = |subject: &str| envelope("live").event_type(TYPE).subject("stream", subject);
    let history = [event("K"), event("L"), event("K")];
    for event in &history {
        site.one().publish(event).await.expect(201);
    }
    keyed(site.one(), TYPE, "domain", "required").await;
    let subscription = subscribe(site.one(), TYPE, "http://127.0.0.1:9/replayed").await;
    let since = json!({ "subscription_id": subscription, "since": "2020-01-01T00:00:00Z" });
    replay(site.one(), &since).await;
    let placed = async |event: &Envelope| explain_delivery(site.one(), event, &subscription).await;
    for event in &history {
        let placed = placed(event).await;
        assert_eq!(
            (&placed["carrier"], &placed["carrier_class"], &placed["pattern"]),
            (&json!("pg-v1"), &json!("STREAM"), &json!(TYPE)),
            "{placed}"
        );
        assert_eq!(placed["decision"]["result"]["selected"], "pg-v1");
    }

    // Of a key with a backlog everything stays together; the rest is placed anew.
    site.run(
        "UPDATE deliveries SET carrier = 'other-v1', placement_id = NULL;
         UPDATE deliveries SET status = 'dead', head = false WHERE ordering_key = 'stream:L'",
    )
    .await;
    let later = event("K");
    site.one().publish(&later).await.expect(201);
    let ids: Vec<_> = history.iter().chain([&later]).map(Envelope::id).collect();
    replay(
        site.one(),
        &json!({ "subscription_id": subscription, "event_ids": ids }),
    )
    .await;
    for (event, carrier) in history
        .iter()
        .chain([&later])
        .zip(["other-v1", "pg-v1", "other-v1", "other-v1"])
    {
        let placed = placed(event).await;
        assert_eq!(
            (&placed["carrier"], &placed["revision"]),
            (&json!(carrier), &json!(1)),
            "{placed}"
        );
    }
}

#[tokio::test]
async fn a_policy_that_is_removed_and_written_again_is_decided_for_anew() {
    const TYPE: &str = "live.again.here";
    const PATTERN: &str = "live.again.*";
    let site = Site::own(2, &[]).await;
    let subscription = subscribe(site.one(), TYPE, "http://127.0.0.1:9/again").await;
    let policy = |objective: &str| {
        json!({
            "class": "domain", "durability": "optional", "delivery_semantics": "at_least_once",
            "routing": { "objective": objective },
        })
    };
    for objective in ["balanced", "cheapest", "latency_first"] {
        put_policy(site.one(), PATTERN, &policy(objective)).await;
        let wanted = match objective {
            "latency_first" => "lowest-latency",
            other => other,
        };
        let explained = explain(site.one(), TYPE, None).await;
        assert_eq!(
            explained["last_decision"],
            Value::Null,
            "none for {objective} yet: its revision is that of the one before"
        );
        for client in [site.one(), site.two()] {
            let event = envelope("live").event_type(TYPE);
            client.publish(&event).await.expect(201);
            let explained = explain_delivery(site.one(), &event, &subscription).await;
            let decision = &explained["decision"]["result"];
            assert_eq!(decision["objective"], wanted, "{explained}");
        }
        let path = format!("/api/v1/delivery-policies/{PATTERN}");
        let removed = send(site.one(), "DELETE", &path, Some(&operator()), String::new()).await;
        assert_eq!(removed.status, 204, "{}", removed.text);
    }
}

#[tokio::test]
async fn what_was_used_this_month_counts_from_the_start() {
    const TYPE: &str = "live.used.before";
    let pair = Pair::start(&[]).await;
    let used = "INSERT INTO carrier_usage (provider, metric, period_start, used)
                VALUES ('postgres', 'delivery-operation',
                        (extract(epoch FROM date_trunc('month', now() AT TIME ZONE 'UTC')) * 1000)::bigint, 2000000000)
                ON CONFLICT (provider, metric, period_start) DO UPDATE SET used = excluded.used";
    sqlx::query(used).execute(pair.database.pool()).await.expect("usage");
    let young = pair.another(&[]).await;
    // A look at usage that has moved would come a minute after the start.
    eventually("the allowance is used up", SOON, async || {
        let explained = explain(young.client(), TYPE, None).await;
        let cost = candidate(&explained, "pg-v1").expect("the floor")["estimated_cost_usd"].clone();
        (cost.as_f64() > Some(0.000_000_4)).then_some(()).ok_or(cost)
    })
    .await;
}

#[tokio::test]
async fn a_key_that_no_database_holds_is_asked_about_as_it_would_be_kept() {
    let site = Site::shared().await;
    let explained = explain(site.one(), "live.nul.never", Some("a%00b")).await;
    let key = explained["ordering_key"].as_str().expect("a key");
    assert!(key.starts_with("ab~") && key.len() == 67, "{key}");
}

#[tokio::test]
async fn an_operator_switches_a_carrier_for_every_process_and_the_environment_wins() {
    let env = [
        ("NATS_URL", "nats://127.0.0.1:9"),
        ("EVENTS_CARRIERS_DISABLED", "nats-js-v1"),
    ];
    let site = Site::own(2, &env).await;
    const TYPE: &str = "live.switched.here";
    topic(site.one(), TYPE).await;
    let why = async || {
        let explained = explain(site.two(), TYPE, None).await;
        assert_eq!(explained["placement"]["selected"], "pg-v1");
        reason(&explained, "nats-v1")
    };
    assert_eq!(why().await, "not connected (nats-v1)");
    let switch = async |carrier: &str, disabled: bool| switch(site.one(), carrier, disabled).await;
    let switched = switch("nats-v1", true).await.expect(200);
    assert_eq!(
        (&switched["state"], &switched["disabled"]["by_operator"]),
        (&json!("disabled"), &json!(true))
    );
    eventually("the other process follows", Duration::from_secs(2), async || {
        let why = why().await;
        (why == "disabled by an operator").then_some(()).ok_or(why)
    })
    .await;
    switch("nats-v1", false).await.expect(200);
    let kept = switch("nats-js-v1", false).await.expect(200);
    assert_eq!(kept["reason"], "disabled by configuration");
    assert_problem(&switch("kafka-v1", true).await, 404, "events.not_found");
    assert_problem(&switch("valkey-v1", true).await, 404, "events.not_found");
    let more = json!({ "disabled": true, "until": "tomorrow" });
    let refused = site
        .one()
        .put("/api/v1/carriers/nats-v1", Some(&operator()), &more)
        .await;
    assert_problem(&refused, 400, "events.bad_request");

    let listed = carriers(site.one()).await;
    let ids: Vec<&str> = listed.iter().filter_map(|carrier| carrier["id"].as_str()).collect();
    assert_eq!(ids, ["pg-v1", "nats-v1", "nats-js-v1"]);
    assert_eq!(listed[0]["usage"]["provider"], "postgres");
    assert_eq!(
        listed[1]["disabled"]["by_operator"], false,
        "what is refused switches nothing"
    );
}

#[tokio::test]
async fn old_decisions_are_forgotten_except_the_last_of_what_is_in_force() {
    let env = [("EVENTS_PRUNE_INTERVAL_MS", "100"), ("EVENTS_RETENTION_DAYS", "30")];
    let site = Site::own(2, &env).await;
    for pattern in ["live.kept.*", "live.rewritten.*"] {
        keyed(site.one(), pattern, "domain", "required").await;
    }
    keyed(site.one(), "live.rewritten.*", "critical", "required").await;
    // Class, pattern, revision, key, carrier, and how many days old.
    site.run(
        "INSERT INTO delivery_placements
             (carrier_class, policy_pattern, policy_revision, ordering_key, carrier, result, decided_at)
         SELECT class, pattern, revision, key, carrier, '{}', now_ms() - days * 86400000::bigint
         FROM (VALUES
             ('QUEUE', NULL, 0, NULL, 'last-of-the-default', 50),
             ('QUEUE', NULL, 0, NULL, 'gone-default', 51),
             ('QUEUE', 'live.gone.*', 7, NULL, 'last-of-its-class', 40),
             ('QUEUE', 'live.gone.*', 7, NULL, 'gone-before', 41),
             ('STREAM', 'live.kept.*', 1, NULL, 'last-in-force', 60),
             ('STREAM', 'live.kept.*', 1, NULL, 'gone-in-force', 61),
             ('STREAM', 'live.kept.*', 1, NULL, 'old-and-in-use', 62),
             ('STREAM', 'live.kept.*', 1, NULL, 'gone-out-of-use', 63),
             ('STREAM', 'live.rewritten.*', 1, NULL, 'gone-rewritten', 59),
             ('STREAM', 'live.rewritten.*', 2, NULL, 'last-rewritten', 58),
             ('STREAM', NULL, 0, NULL, 'gone-since-the-default-is-no-stream', 62),
             ('STREAM', NULL, 0, 'K', 'last-of-its-key', 90),
             ('STREAM', NULL, 0, 'K', 'gone-of-its-key', 91),
             ('TOPIC', NULL, 0, NULL, 'young', 29),
             ('TOPIC', NULL, 0, NULL, 'last-of-topic', 28)
         ) AS rows(class, pattern, revision, key, carrier, days);
         UPDATE delivery_placements SET used_at = now_ms() - CASE carrier WHEN 'old-and-in-use' THEN 29 ELSE 31 END * 86400000::bigint
         WHERE carrier IN ('old-and-in-use', 'gone-out-of-use');
         INSERT INTO delivery_placements (carrier_class, carrier, result, decided_at)
         SELECT 'TOPIC', 'gone-in-the-second-batch', '{}', now_ms() - 100 * 86400000::bigint FROM generate_series(1, 1500)",
    )
    .await;
    let kept = [
        "last-in-force",
        "last-of-its-class",
        "last-of-its-key",
        "last-of-the-default",
        "last-of-topic",
        "last-rewritten",
        "old-and-in-use",
        "young",
    ];
    let names = async || {
        let names = sqlx::query_scalar("SELECT DISTINCT carrier FROM delivery_placements ORDER BY 1");
        let names: Vec<String> = names.fetch_all(&site.pool).await.expect("the rows");
        names
    };
    eventually("what is old is gone", SOON, async || {
        let names = names().await;
        (!names.iter().any(|name| name.starts_with("gone")))
            .then_some(())
            .ok_or(names.join(" "))
    })
    .await;
    assert_eq!(names().await, kept);
}
