//! Placement of very many keys, and of a publish that is refused: what is recorded, and what it costs.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::{
    api_world::text,
    fabric_world::{Brokers, Pair, explain, keyed, number, selects, subscribe},
    support::{
        client::{Client, assert_problem},
        database::Database,
        envelopes::{Envelope, batch, envelope},
        network::Network,
        process::setting,
        service::Service,
        wait::SOON,
    },
};

const ID: &str = "nats-js-v1";
/// Events of one request.
const BATCH: usize = 100;
/// Requests under way at a time.
const PUBLISHERS: usize = 2;

/// Everything that a publish may leave behind.
async fn stored(database: &Database) -> [i64; 3] {
    let mut counts = [0; 3];
    for (count, table) in counts.iter_mut().zip(["events", "deliveries", "delivery_placements"]) {
        *count = number(database, &format!("SELECT count(*) FROM {table}")).await;
    }
    counts
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_batch_leaves_nothing_and_the_next_publish_of_its_key_records_the_decision() {
    const TYPE: &str = "live.refused.ordered";
    const KEY: &str = "thing:K";
    let brokers = Brokers::start().await;
    let pair = Pair::start(&brokers.env()).await;
    let client = pair.client();
    let taken = envelope("live").event_type("live.refused.other");
    client.publish(&taken).await.expect(201);
    pair.subscribe(TYPE, "/hook").await;
    keyed(client, TYPE, "domain", "required").await;
    pair.selects(TYPE, ID, SOON).await;
    let event = || envelope("live").event_type(TYPE).subject("thing", "K");
    let before = stored(&pair.database).await;
    let conflict = event().with_id(taken.id());
    let malformed = event().without("subject");
    for (last, status, code) in [
        (conflict, 409, "events.id_conflict"),
        (malformed, 422, "events.invalid_envelope"),
    ] {
        let refused = client.publish_as("live", &batch(&[event(), event(), last])).await;
        assert_problem(&refused, status, code);
        assert_eq!(stored(&pair.database).await, before, "{status}");
        assert_eq!(explain(client, TYPE, Some(KEY)).await["last_decision"], Value::Null);
    }
    pair.round(&event(), SOON).await;
    assert_eq!(stored(&pair.database).await, before.map(|count| count + 1));
    let explained = explain(client, TYPE, Some(KEY)).await;
    assert_eq!(explained["last_decision"]["carrier"], ID);
    pair.all_sent_once(1, SOON).await;
}

/// Publishes these keys, one event of each; answers how long each request took, in the order in which they ended.
async fn publish(client: &Client, event_type: &str, keys: std::ops::Range<usize>) -> Vec<Duration> {
    let starts: Vec<usize> = keys.step_by(BATCH).collect();
    let shares = (0..PUBLISHERS).map(|publisher| {
        let own: Vec<usize> = starts.iter().copied().skip(publisher).step_by(PUBLISHERS).collect();
        async move {
            let mut took = Vec::new();
            for first in own {
                let event = |key: usize| {
                    envelope("live")
                        .event_type(event_type)
                        .subject("thing", &format!("k{key}"))
                        .payload(json!({}))
                };
                let events: Vec<Envelope> = (first..first + BATCH).map(event).collect();
                let began = Instant::now();
                let answer = client.publish_as("live", &batch(&events)).await;
                took.push((began, began.elapsed()));
                assert_eq!(answer.status, 201, "{}", answer.text);
            }
            took
        }
    });
    let mut took: Vec<_> = join_all(shares).await.into_iter().flatten().collect();
    took.sort();
    took.into_iter().map(|(_, took)| took).collect()
}

/// Kilobytes that a process holds in memory.
fn resident_kb(service: &Service) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", service.pid())).expect("a running process");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .expect("its memory");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

fn median(took: &[Duration]) -> Duration {
    crate::fabric_world::median(took.to_vec())
}

/// The suite runs a short form; `OV_KEYS=100000` is the long one.
#[tokio::test(flavor = "multi_thread")]
async fn very_many_keys_and_three_restarts_leave_few_decisions_and_a_process_that_is_as_quick_and_small_as_before() {
    const TYPE: &str = "live.keys.ordered";
    let keys: usize = setting("OV_KEYS").unwrap_or(10_000);
    let brokers = Brokers::start().await;
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let env: Vec<_> = [("EVENTS_WORKER", "off")].into_iter().chain(brokers.env()).collect();
    let (mut first, mut last, mut grown) = (Duration::ZERO, Duration::ZERO, 0);
    // Half of the keys come in the first life, and the rest in the lives after three restarts.
    let lives = [
        0..keys / 2,
        keys / 2..keys * 2 / 3,
        keys * 2 / 3..keys * 5 / 6,
        keys * 5 / 6..keys,
    ];
    for (life, own) in lives.into_iter().enumerate() {
        let service = Service::start(&database, &network, &env).await;
        let client = service.client();
        if life == 0 {
            keyed(client, TYPE, "domain", "required").await;
            subscribe(client, TYPE, "http://127.0.0.1:9/hook").await;
        }
        selects(client, TYPE, ID, SOON).await;
        let own = own.start / BATCH * BATCH..own.end / BATCH * BATCH;
        // A tenth warms it up.
        let warm = own.start + own.len() / 10 / BATCH * BATCH;
        let mut took = publish(client, TYPE, own.start..warm).await;
        let small = resident_kb(&service);
        took.extend(publish(client, TYPE, warm..own.end).await);
        grown = grown.max(resident_kb(&service).saturating_sub(small));
        if life == 0 {
            // Of a table that nothing is known of yet.
            first = median(&took[..took.len() / 2]);
        }
        last = median(&took[took.len() / 2..]);
        for key in [own.start, warm, own.end - 1] {
            let key = format!("thing:k{key}");
            let explained = explain(client, TYPE, Some(&key)).await;
            assert_eq!(text(&explained, "ordering_key"), key);
            // Nothing but the last decision is what an event of the key would join.
            let newest: String = sqlx::query_scalar("SELECT carrier FROM delivery_placements ORDER BY id DESC LIMIT 1")
                .fetch_one(database.pool())
                .await
                .expect("a decision");
            assert_eq!(text(&explained["last_decision"], "carrier"), newest);
        }
        selects(client, TYPE, ID, SOON).await;
        service.terminate().await;
    }
    let decisions = number(&database, "SELECT count(*) FROM delivery_placements").await;
    let placed = number(
        &database,
        "SELECT count(DISTINCT d.ordering_key) FROM deliveries d
         JOIN delivery_placements p ON p.id = d.placement_id AND p.carrier = d.carrier AND p.carrier_class = 'STREAM'",
    )
    .await;
    println!(
        "{keys} keys: {decisions} decisions, {grown} kB grown, a request took {first:?} at first and {last:?} at last"
    );
    assert!(decisions <= 40, "{decisions} decisions are on record");
    let keys = i64::try_from(keys / BATCH * BATCH).expect("few");
    assert_eq!(placed, keys, "every key is under a decision that is on record");
    assert!(grown < 24 * 1024, "it has grown by {grown} kB");
    let near = |a: Duration, b: Duration| a < b * 3 + Duration::from_millis(50);
    assert!(
        near(first, last) && near(last, first),
        "{first:?} at first and {last:?} at last"
    );
}
