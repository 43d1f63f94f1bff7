//! Which carriers a process may use: what starts refuse, what opens no connection, and what an operator switches while it
//! runs.

use std::time::Duration;

use serde_json::{Value, json};

use crate::{
    fabric_world::{
        BACK, Pair, TOLD, candidate, carrier, explain, keyed, number, put_policy, reason, speak, switch, topic, url,
    },
    support::{
        broker::Broker,
        envelopes::envelope,
        network::Network,
        process::signal,
        proxy::Proxy,
        service::Service,
        wait::{SOON, eventually, stays, within},
    },
};

const QUEUE: &str = "live.switch.queue";
const NEWS: &str = "live.switch.news";
const STREAM: &str = "live.switch.stream";

/// Every carrier's brokers, each behind a proxy that counts connections.
struct Lines {
    brokers: [Broker; 2],
    valkey: Proxy,
    nats: Proxy,
}

impl Lines {
    async fn start() -> Self {
        let (valkey, nats) = tokio::join!(Broker::valkey(), Broker::nats());
        Self {
            valkey: Proxy::start(&valkey.address()).await,
            nats: Proxy::start(&nats.address()).await,
            brokers: [valkey, nats],
        }
    }

    async fn pair(&self, env: &[(&str, &str)]) -> Pair {
        let urls = [url("redis", self.valkey.address()), url("nats", self.nats.address())];
        let named = ["VALKEY_URL", "NATS_URL"]
            .into_iter()
            .zip(urls.iter().map(String::as_str));
        let env: Vec<_> = named.chain(env.iter().copied()).collect();
        let pair = Pair::start(&env).await;
        keyed(pair.client(), QUEUE, "domain", "optional").await;
        keyed(pair.client(), STREAM, "domain", "required").await;
        topic(pair.client(), NEWS).await;
        for event_type in [QUEUE, NEWS, STREAM] {
            pair.subscribe(event_type, "/hook").await;
        }
        pair
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_carrier_that_the_environment_disables_opens_no_connection_and_says_why() {
    let lines = Lines::start().await;
    let pair = lines
        .pair(&[("EVENTS_CARRIERS_DISABLED", "valkey-v1,nats-v1,nats-js-v1")])
        .await;
    for (event_type, id) in [(QUEUE, "valkey-v1"), (NEWS, "nats-v1"), (STREAM, "nats-js-v1")] {
        let explained = explain(pair.client(), event_type, None).await;
        assert_eq!(reason(&explained, id), "disabled by configuration");
        assert_eq!(explained["placement"]["selected"], "pg-v1");
        // The operator's switch changes nothing about it.
        let switched = switch(pair.client(), id, false).await.expect(200);
        assert_eq!(switched["reason"], "disabled by configuration");
        pair.round(&envelope("live").event_type(event_type), SOON).await;
    }
    stays("nobody connects", Duration::from_secs(2), async || {
        lines.valkey.accepted() + lines.nats.accepted() == 0
    })
    .await;
    pair.all_sent_once(3, SOON).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_carrier_that_is_not_enabled_opens_no_connection_either() {
    let lines = Lines::start().await;
    let pair = lines.pair(&[("EVENTS_CARRIERS", "pg-v1,nats-v1")]).await;
    pair.selects(NEWS, "nats-v1", SOON).await;
    pair.round(&envelope("live").event_type(NEWS), SOON).await;
    let explained = explain(pair.client(), QUEUE, None).await;
    assert_eq!(reason(&explained, "valkey-v1"), "disabled by configuration");
    stays("nobody connects", Duration::from_secs(1), async || {
        lines.valkey.accepted() == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_ends_the_connections_of_every_process_and_opens_them_again_without_losing_an_event() {
    let lines = Lines::start().await;
    let pair = lines.pair(&[]).await;
    let ledger = crate::support::ledger::Ledger::default().route_type("/hook", QUEUE);
    let event = |_| envelope("live").event_type(QUEUE);
    pair.selects(QUEUE, "valkey-v1", SOON).await;
    eventually("the other process is connected", SOON, async || {
        carrier(pair.worker.client(), "valkey-v1").await["state"] == "up"
    })
    .await;
    let opened = lines.valkey.accepted();
    switch(pair.client(), "valkey-v1", true).await.expect(200);
    pair.publish_until(
        &ledger,
        event,
        Box::pin(async {
            eventually("both processes follow", TOLD, async || {
                let states = [
                    carrier(pair.client(), "valkey-v1").await,
                    carrier(pair.worker.client(), "valkey-v1").await,
                ];
                states.iter().all(|state| state["reason"] == "disabled by an operator")
            })
            .await;
            eventually("only this look is connected", TOLD, async || {
                let look = b"AUTH admin admin\r\nINFO clients\r\nECHO the-end\r\n";
                let said = speak(&lines.brokers[0], look, "the-end").await;
                said.contains("connected_clients:1\r").then_some(()).ok_or(said)
            })
            .await;
            stays("nobody connects", Duration::from_secs(1), async || {
                lines.valkey.accepted() == opened
            })
            .await;
        }),
    )
    .await;
    assert_eq!(
        explain(pair.client(), QUEUE, None).await["placement"]["selected"],
        "pg-v1"
    );
    ledger.settle(&pair.receiver, SOON).await;
    for (log, by) in [(pair.publisher.log(), "ops"), (pair.worker.log(), "an operator")] {
        let said = "valkey-v1 was switched off by ";
        assert_eq!(log.matches(said).count(), 1, "{log}");
        assert!(log.contains(&format!("{said}{by}")), "{log}");
    }
    switch(pair.worker.client(), "valkey-v1", false).await.expect(200);
    pair.publish_until(&ledger, event, pair.selects(QUEUE, "valkey-v1", BACK))
        .await;
    ledger.settle(&pair.receiver, SOON).await;
    pair.all_sent_once(ledger.len(), SOON).await;
}

/// Connections that wait for the doorbell.
async fn listening(pair: &Pair) -> i64 {
    let listening =
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query ILIKE 'listen %'";
    number(&pair.database, listening).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_floor_cannot_be_switched_off_and_delivers_while_it_shows_as_excluded() {
    let pair = Pair::start(&[
        ("EVENTS_CARRIERS_DISABLED", "pg-v1"),
        ("EVENTS_WORKER_INTERVAL_MS", "200"),
    ])
    .await;
    pair.subscribe(QUEUE, "/hook").await;
    let explained = explain(pair.client(), QUEUE, None).await;
    assert_eq!(reason(&explained, "pg-v1"), "disabled by configuration");
    pair.round(&envelope("live").event_type(QUEUE), SOON).await;
    // Its poll is no connection of its own; its doorbell would be one.
    assert_eq!(listening(&pair).await, 0);
    let other = pair.another(&[]).await;
    eventually("a process that may use it listens", SOON, async || {
        listening(&pair).await == 1
    })
    .await;
    assert!(other.is_alive());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_no_carrier_can_be_opened_with_stops_the_start_and_is_named_without_its_secrets() {
    let network = Network::start().await;
    for (name, value, words) in [
        ("EVENTS_CARRIERS", "pg-v1,kafka-v1", "kafka-v1"),
        ("EVENTS_CARRIERS_DISABLED", "kafka-v1", "kafka-v1"),
        ("NATS_URL", "http://u:hush@127.0.0.1", "NATS_URL"),
        ("VALKEY_URL", "http://u:hush@127.0.0.1", "VALKEY_URL"),
        ("CLOUD_QUEUE_URL", "ftp://u:hush@127.0.0.1", "CLOUD_QUEUE_URL"),
        ("NATS_SUBJECT_PREFIX", "ov events.", "NATS_SUBJECT_PREFIX"),
        ("NATS_STREAM", "a.b", "NATS_STREAM"),
    ] {
        let mut env = vec![("DATABASE_URL", "postgresql://nobody@127.0.0.1:9/none"), (name, value)];
        if name.starts_with("NATS_S") {
            env.push(("NATS_URL", "nats://127.0.0.1:9"));
        }
        let service = Service::spawn(&network, &env);
        let exit = service.wait_exit(SOON).await;
        assert_eq!(exit.code, Some(2), "{name}={value}: {}", service.log());
        assert!(service.log().contains(words), "{name}={value}: {}", service.log());
        assert!(!service.log().contains("hush"), "{name}: {}", service.log());
    }
}

/// The shipped rate cards with another price and allowance for Valkey.
fn cards(price_usd: f64, free_allowance: f64) -> String {
    let mut cards: Value = serde_json::from_str(include_str!("../../rate-cards/rate-cards.json")).expect("JSON");
    let cards_of = cards.as_array_mut().expect("a list");
    let valkey = cards_of.iter_mut().find(|card| card["id"] == "rc-valkey-v1");
    let valkey = valkey.expect("the card of Valkey");
    valkey["unit_price_usd"] = price_usd.into();
    valkey["free_allowance"] = free_allowance.into();
    cards.to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn prices_are_read_again_on_a_hangup_and_a_bad_file_changes_nothing() {
    let broker = Broker::valkey().await;
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cards-{}.json", ulid::Ulid::generate()));
    let put = |text: &str| std::fs::write(&file, text).expect("a file in the target folder");
    put(&cards(0.01, 0.0));
    let url = url("redis", broker.address());
    let path = file.to_str().expect("a plain path");
    let pair = Pair::start(&[("VALKEY_URL", &url), ("EVENTS_RATE_CARDS", path)]).await;
    let cheapest = json!({
        "class": "domain", "durability": "optional", "delivery_semantics": "at_least_once",
        "routing": { "objective": "cheapest" },
    });
    put_policy(pair.client(), QUEUE, &cheapest).await;
    eventually("Valkey is there", SOON, async || {
        carrier(pair.client(), "valkey-v1").await["state"] == "up"
    })
    .await;
    let explained = explain(pair.client(), QUEUE, None).await;
    assert_eq!(explained["placement"]["selected"], "pg-v1");
    let dear = candidate(&explained, "valkey-v1").expect("it is configured");
    assert_eq!(
        (&dear["eligible"], &dear["estimated_cost_usd"]),
        (&json!(true), &json!(0.01))
    );
    put(&cards(0.01, 1e9));
    signal("HUP", pair.publisher.pid());
    pair.selects(QUEUE, "valkey-v1", TOLD).await;
    for (bad, words) in [
        ("nonsense".to_owned(), path),
        (cards(-1.0, 0.0), "unit_price_usd"),
        (cards(0.01, 0.0).replace("\"metric\"", "\"metrics\""), "metric"),
        (
            cards(0.01, 0.0).replace("\"valkey\"", "\"Valkey Ltd\""),
            "provider: must be \"valkey\", which is what valkey-v1 is counted by, got \"Valkey Ltd\"",
        ),
    ] {
        let before = pair.publisher.log().len();
        put(&bad);
        signal("HUP", pair.publisher.pid());
        eventually("the log says what is wrong", SOON, async || {
            let said = pair.publisher.log()[before..].to_owned();
            (said.contains("the rate cards stay as they were") && said.contains(words))
                .then_some(())
                .ok_or(said)
        })
        .await;
        assert_eq!(
            explain(pair.client(), QUEUE, None).await["placement"]["selected"],
            "valkey-v1"
        );
    }
    // A card that a carrier in use does not find is no mistake, and is said all the same.
    let before = pair.publisher.log().len();
    put(&cards(0.01, 0.0).replace("rc-valkey-v1", "rc-valky-v1"));
    signal("HUP", pair.publisher.pid());
    eventually("the log says who cannot be chosen", SOON, async || {
        let said = pair.publisher.log()[before..].to_owned();
        (said.contains("there is no rate card rc-valkey-v1, so valkey-v1 is never chosen")
            && !said.contains("pg-v1 is"))
        .then_some(())
        .ok_or(said)
    })
    .await;
    // A bad file at a start stops it.
    put(&cards(0.01, 0.0).replace("\"metric\"", "\"metrics\""));
    let refused = pair.spawn(&[("EVENTS_RATE_CARDS", path)]);
    let exit = refused.wait_exit(SOON).await;
    assert_eq!(exit.code, Some(2));
    assert!(
        refused.log().contains("metric") && refused.log().contains(path),
        "{}",
        refused.log()
    );
    std::fs::remove_file(&file).expect("it is there");
}

#[tokio::test]
async fn a_hangup_during_the_start_ends_nothing() {
    // A database that takes the connection and never answers.
    let database = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a socket");
    let url = format!("postgresql://u@{}/none", database.local_addr().expect("bound"));
    let service = Service::spawn(&Network::start().await, &[("DATABASE_URL", &url)]);
    let _line = within("the start asks the database", SOON, database.accept())
        .await
        .expect("a connection");
    signal("HUP", service.pid());
    let (exit, _took) = service.terminate().await;
    assert_eq!((exit.code, exit.signal), (Some(0), None), "{}", service.log());
}
