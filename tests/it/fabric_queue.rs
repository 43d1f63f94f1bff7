//! `cloud-v1` under the service as it is run, on a real queue and with a price: chosen, refused with a wrong key, consumed
//! only where that is switched on, and cut off or silent while events flow.

use std::{path::PathBuf, time::Duration};

use serde_json::Value;

use crate::{
    fabric_world::{BACK, Pair, TOLD, carrier, explain, keyed, reason},
    support::{
        envelopes::{Envelope, envelope},
        ledger::{Ledger, assert_in_order},
        proxy::Proxy,
        sqs::Queue,
        wait::{SOON, eventually, stays},
    },
};

const ID: &str = "cloud-v1";
const TYPE: &str = "live.queue.sent";

fn event(subject: usize) -> Envelope {
    envelope("live").event_type(TYPE).subject("thing", &subject.to_string())
}

/// A queue of the test's own behind a line that can be cut, and a file of rate cards that prices it.
struct Priced {
    queue: Queue,
    line: Proxy,
    cards: PathBuf,
}

impl Priced {
    async fn new() -> Self {
        let own = ulid::Ulid::generate();
        let queue = Queue::new(&format!("it-{own}")).await;
        let authority = (queue.url.host_str(), queue.url.port_or_known_default());
        let (Some(host), Some(port)) = authority else {
            panic!("{} names no server", queue.url)
        };
        let line = Proxy::start(&format!("{host}:{port}")).await;
        let mut cards: Value = serde_json::from_str(include_str!("../../rate-cards/rate-cards.json")).expect("JSON");
        let list = cards.as_array_mut().expect("a list");
        let mut card = list[0].clone();
        for (member, value) in [
            ("id", "rc-cloud-queue-v1"),
            ("provider", "cloud"),
            ("adapter", ID),
            ("metric", "queue-operation"),
            ("region", "cloud"),
        ] {
            card[member] = value.into();
        }
        list.push(card);
        let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("cards-{own}.json"));
        std::fs::write(&file, cards.to_string()).expect("a file in the target folder");
        Self {
            queue,
            line,
            cards: file,
        }
    }

    /// What a process is told of the queue, and whether it consumes.
    fn env(&self, consume: &'static str, secret: &str) -> Vec<(&'static str, String)> {
        let mut url = self.queue.url.clone();
        url.set_host(Some("127.0.0.1")).expect("a host");
        url.set_port(Some(self.line.address().port())).expect("a port");
        vec![
            ("CLOUD_QUEUE_URL", url.to_string()),
            ("CLOUD_QUEUE_ACCESS_KEY", self.queue.access_key.clone()),
            ("CLOUD_QUEUE_SECRET_KEY", secret.to_owned()),
            ("CLOUD_QUEUE_CONSUME", consume.to_owned()),
            ("EVENTS_RATE_CARDS", self.cards.display().to_string()),
        ]
    }

    /// Two processes that know of it, of which one consumes, and a subscription.
    async fn pair(&self, secret: &str) -> Pair {
        let env = self.env("on", secret);
        let env: Vec<_> = env.iter().map(|(name, value)| (*name, value.as_str())).collect();
        subscribed(Pair::start(&env).await).await
    }

    /// Waits until nothing is in the queue, not even received.
    async fn emptied(&self) {
        eventually("the queue is empty", SOON, async || {
            let counts = self.queue.counts().await;
            (counts == (0, 0)).then_some(()).ok_or(format!("{counts:?}"))
        })
        .await;
    }
}

impl Drop for Priced {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.cards);
    }
}

async fn subscribed(pair: Pair) -> Pair {
    keyed(pair.client(), TYPE, "domain", "optional").await;
    pair.subscribe(TYPE, "/hook").await;
    pair
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_price_it_is_chosen_and_what_is_consumed_wakes_the_other_process() {
    let priced = Priced::new().await;
    let pair = priced.pair(&priced.queue.secret_key).await;
    pair.selects(TYPE, ID, SOON).await;
    for n in 0..10 {
        pair.round(&event(n % 3), SOON).await;
    }
    pair.all_sent_once(10, SOON).await;
    assert_eq!(pair.placed_on(ID).await, 10);
    priced.emptied().await;
    eventually("what was sent is counted", SOON, async || {
        let usage = carrier(pair.worker.client(), ID).await["usage"].clone();
        (usage["priced"] == true && usage["used"].as_f64() >= Some(10.0))
            .then_some(())
            .ok_or(usage)
    })
    .await;
    for service in [&pair.publisher, &pair.worker] {
        assert!(!service.log().contains(&priced.queue.secret_key));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_switch_nothing_is_consumed_and_the_poll_delivers() {
    let priced = Priced::new().await;
    let env = priced.env("off", &priced.queue.secret_key);
    let env: Vec<_> = env.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let polling: Vec<_> = env
        .iter()
        .copied()
        .chain([("EVENTS_WORKER_INTERVAL_MS", "200")])
        .collect();
    let pair = subscribed(Pair::start_with(&env, &polling).await).await;
    pair.selects(TYPE, ID, SOON).await;
    for n in 0..3 {
        pair.round(&event(n), SOON).await;
    }
    pair.all_sent_once(3, SOON).await;
    assert_eq!(pair.placed_on(ID).await, 3);
    eventually("every signal is in the queue", SOON, async || {
        let counts = priced.queue.counts().await;
        (counts == (3, 0)).then_some(()).ok_or(format!("{counts:?}"))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn switched_off_by_the_environment_it_opens_no_connection() {
    let priced = Priced::new().await;
    let mut env = priced.env("on", &priced.queue.secret_key);
    env.push(("EVENTS_CARRIERS_DISABLED", ID.to_owned()));
    let env: Vec<_> = env.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let pair = subscribed(Pair::start(&env).await).await;
    let explained = explain(pair.client(), TYPE, None).await;
    assert_eq!(reason(&explained, ID), "disabled by configuration");
    assert_eq!(explained["placement"]["selected"], "pg-v1");
    pair.round(&event(1), SOON).await;
    stays("nobody connects", Duration::from_secs(1), async || {
        priced.line.accepted() == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_key_is_refused_and_named_and_costs_no_delivery() {
    const WRONG: &str = "never-a-key-of-this-queue";
    let priced = Priced::new().await;
    let pair = priced.pair(WRONG).await;
    let ledger = Ledger::default().route_type("/hook", TYPE);
    pair.publish_until(&ledger, event, pair.excludes(TYPE, ID, "breaker open (cloud-v1)", TOLD))
        .await;
    ledger.settle(&pair.receiver, SOON).await;
    pair.all_sent_once(ledger.len(), SOON).await;
    assert_eq!(priced.queue.counts().await, (0, 0), "nothing got in");
    eventually("both logs say what is wrong", SOON, async || {
        let logs = [pair.publisher.log(), pair.worker.log()];
        logs.iter()
            .all(|log| log.contains("permission denied"))
            .then_some(())
            .ok_or(logs.concat())
    })
    .await;
    for service in [&pair.publisher, &pair.worker] {
        assert!(!service.log().contains(WRONG));
    }
}

/// What becomes of the events while the queue cannot be reached, and once it can be.
async fn outage(begin: impl Fn(&Proxy)) {
    let priced = Priced::new().await;
    let pair = priced.pair(&priced.queue.secret_key).await;
    pair.selects(TYPE, ID, SOON).await;
    let ledger = Ledger::default().route_type("/hook", TYPE);
    pair.publish_until(&ledger, event, async {
        pair.receiver.wait_calls(5, SOON).await;
        begin(&priced.line);
        eventually("it is not chosen, and an operator is told why", TOLD, async || {
            let explained = explain(pair.client(), TYPE, None).await;
            let (selected, why) = (explained["placement"]["selected"].clone(), reason(&explained, ID));
            (selected == "pg-v1" && why.ends_with("(cloud-v1)"))
                .then_some(())
                .ok_or(format!("{selected} {why}"))
        })
        .await;
    })
    .await;
    ledger.settle(&pair.receiver, SOON).await;
    priced.line.restore();
    pair.publish_until(&ledger, event, pair.selects(TYPE, ID, BACK)).await;
    ledger.settle(&pair.receiver, SOON).await;
    let before = pair.placed_on(ID).await;
    pair.round(&event(1), SOON).await;
    assert_eq!(pair.placed_on(ID).await, before + 1, "it is used again");
    pair.all_sent_once(ledger.len() + 1, SOON).await;
    assert_in_order(
        &pair.receiver,
        "/hook",
        pair.database.pool(),
        crate::fabric_world::subject_of,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_is_cut_off_costs_no_event_and_is_used_again_by_itself() {
    outage(Proxy::cut).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_falls_silent_costs_no_event_and_is_used_again_by_itself() {
    outage(Proxy::stall).await;
}
