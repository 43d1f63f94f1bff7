//! Crashes at random moments: of processes, of PostgreSQL and of the receiver, while two processes take events.
//!
//! The suite runs a short form. `OV_STORM_EVENTS=20000 OV_STORM_SEEDS=1,2,3,4,5` runs the long one.

use std::time::{Duration, Instant, SystemTime};

use futures_util::future::join_all;
use openvibe_events::store::{Addresses, Store};
use parking_lot::Mutex;
use serde_json::json;
use sqlx::PgPool;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use tokio::sync::watch;

use crate::{
    api_world::operator,
    store_fixture::{assert_counts, broken_keys, number},
    support::{
        client::Client,
        cluster::Cluster,
        database::Database,
        dice::Dice,
        envelopes::{Envelope, batch, envelope},
        ledger::{Ledger, Walk, assert_in_order},
        network::Network,
        process::{setting, wall_clock},
        receiver::{Answer, Receiver},
        service::Service,
        wait::{SOON, eventually, within},
    },
};

/// Tasks that publish.
const PUBLISHERS: usize = 8;
/// Ordering keys.
const KEYS: usize = 20;
/// How soon the work of a killed process must go on.
const MOVES_ON: Duration = Duration::from_secs(5);
/// How long everything may take to arrive once the crashes are over.
const CALM: Duration = Duration::from_secs(90);

/// The kinds of events: what they are called and where they go.
const KEYED: (&str, &str) = ("live.storm.keyed", "/keyed");
const FREE: (&str, &str) = ("live.storm.free", "/free");
const ONCE: (&str, &str) = ("live.storm.once", "/once");

#[derive(Debug, Clone, Copy)]
enum Crash {
    Process(usize),
    Database,
    Receiver,
}

/// A process that is replaced when it is killed.
struct Slot {
    client: Mutex<Client>,
    service: tokio::sync::Mutex<Service>,
}

struct Storm {
    cluster: Cluster,
    database: Database,
    network: Network,
    receiver: Receiver,
    slots: Vec<Slot>,
    ledger: Ledger,
    /// Events acknowledged so far.
    progress: watch::Sender<usize>,
    slowest: Mutex<Duration>,
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_acknowledged_outlives_crashes_of_everything_at_any_moment() {
    let events = setting("OV_STORM_EVENTS").unwrap_or(2_000);
    let seeds: String = setting("OV_STORM_SEEDS").unwrap_or_else(|| "1".to_owned());
    for seed in seeds.split(',') {
        let seed = seed.trim().parse().expect("OV_STORM_SEEDS is a list of numbers");
        Storm::start().await.run(seed, events).await;
    }
}

impl Storm {
    async fn start() -> Self {
        let (cluster, network, receiver) = tokio::join!(Cluster::start(""), Network::start(), Receiver::start());
        let database = Database::create_on(&cluster.server()).await;
        let mut slots = Vec::new();
        for _ in 0..2 {
            let service = Service::start(&database, &network, &[]).await;
            slots.push(Slot {
                client: Mutex::new(service.client().clone()),
                service: tokio::sync::Mutex::new(service),
            });
        }
        let ledger = [KEYED, FREE]
            .iter()
            .fold(Ledger::default(), |ledger, (name, path)| ledger.route_type(path, name));
        Self {
            cluster,
            database,
            network,
            receiver,
            slots,
            ledger,
            progress: watch::Sender::new(0),
            slowest: Mutex::default(),
        }
    }

    fn client(&self, slot: usize) -> Client {
        self.slots[slot % self.slots.len()].client.lock().clone()
    }

    fn pool(&self) -> &PgPool {
        self.database.pool()
    }

    async fn run(&self, seed: u64, count: usize) {
        let started = Instant::now();
        let mut dice = Dice::of(seed);
        self.prepare().await;
        let plan = plan(&mut dice, count);
        let requests = requests(&mut dice, count);
        let publish = join_all((0..PUBLISHERS).map(|publisher| self.publish(publisher, &requests)));
        let (_, (), mut walk) = tokio::join!(publish, self.crash(&plan, count), self.read(count));
        assert_eq!(self.ledger.len(), count, "every event was taken in the end");

        self.ledger.settle(&self.receiver, CALM).await;
        self.ledger.assert_stored_once(self.pool()).await;
        walk.rest(&self.client(0)).await;
        walk.assert_whole(self.pool()).await;
        self.judge_deliveries().await;
        eprintln!(
            "seed {seed}: {count} events, {} arrivals, {plan:?}, work of the killed moved on within {:?}, {:?} in all",
            self.receiver.calls().len(),
            self.slowest.lock(),
            started.elapsed()
        );
    }

    /// Policies, subscriptions, and a receiver that is not always quick and not always well.
    async fn prepare(&self) {
        let client = self.client(0);
        let policy =
            |semantics: &str| json!({ "class": "domain", "durability": "required", "delivery_semantics": semantics });
        let mut keyed = policy("at_least_once");
        keyed["ordering"] = json!({ "scope": "key", "key": "subject" });
        for (name, policy) in [(KEYED.0, keyed), (ONCE.0, policy("at_most_once"))] {
            client
                .put(&format!("/api/v1/delivery-policies/{name}"), Some(&operator()), &policy)
                .await
                .expect(200);
        }
        let token = client.service_token("chat");
        for (name, path) in [KEYED, FREE, ONCE] {
            self.receiver.answer_with(path, |call| match call.number % 40 {
                0 => Answer::status(500),
                n => Answer::status(204).after(Duration::from_millis(n as u64 % 4)),
            });
            let body = json!({
                "topic_pattern": name, "endpoint": self.receiver.url(path), "max_inflight": 16,
                "retry_policy": { "max_attempts": 20, "backoff_ms": [100, 300] },
            });
            client
                .post("/api/v1/subscriptions", Some(&token), &body)
                .await
                .expect(201);
        }
    }

    /// Publishes every eighth request, each until somebody says yes, as a producer with an outbox does.
    async fn publish(&self, publisher: usize, requests: &[Vec<Envelope>]) {
        for (turn, request) in requests.iter().skip(publisher).step_by(PUBLISHERS).enumerate() {
            let mut tries = publisher + turn;
            let answer = eventually("somebody takes an event", CALM, async || {
                tries += 1;
                let client = self.client(tries);
                let answer = match request.as_slice() {
                    [one] => client.try_publish(one).await,
                    several => client.try_publish_as("live", &batch(several)).await,
                };
                let answer = answer.map_err(|error| format!("{error:?}"))?;
                assert!(
                    matches!(answer.status, 200 | 201 | 503),
                    "a crash is told as 503 or as nothing: {} {}",
                    answer.status,
                    answer.text
                );
                if answer.status == 503 {
                    Err(answer.text)
                } else {
                    Ok(answer)
                }
            })
            .await;
            self.ledger.note(request, &answer);
            self.progress.send_modify(|count| *count += request.len());
        }
    }

    /// Follows the log by its cursors while it grows.
    async fn read(&self, count: usize) -> Walk {
        let mut walk = Walk::over("live.*");
        let mut turn = 0;
        while *self.progress.borrow() < count {
            turn += 1;
            let mut progress = self.progress.subscribe();
            if walk.step(&self.client(turn)).await == 0 {
                // Nothing new, or nobody there: worth another look when something was taken.
                within("progress", CALM, progress.changed())
                    .await
                    .expect("the sender lives");
            }
        }
        walk
    }

    async fn until(&self, count: usize) {
        let mut progress = self.progress.subscribe();
        let reached = progress.wait_for(|now| *now >= count);
        drop(
            within(&format!("{count} events are taken"), CALM * 2, reached)
                .await
                .expect("the sender lives"),
        );
    }

    async fn crash(&self, plan: &[(usize, Crash)], count: usize) {
        for (at, crash) in plan {
            self.until(*at).await;
            match crash {
                Crash::Process(slot) => self.kill_process(*slot).await,
                Crash::Database => {
                    self.cluster.kill();
                    self.cluster.start_again().await;
                }
                Crash::Receiver => {
                    self.receiver.crash();
                    self.until((at + 60).min(count)).await;
                    self.receiver.start_again().await;
                }
            }
        }
    }

    /// Kills a process, starts another in its place, and sees that what it held moves on.
    async fn kill_process(&self, slot: usize) {
        let mut service = self.slots[slot].service.lock().await;
        let pid = service.pid();
        service.kill().await;
        let killed = wall_clock();
        let held: Vec<i64> =
            sqlx::query_scalar("SELECT claim_id FROM deliveries WHERE split_part(lease_owner, ':', 2) = $1")
                .bind(pid.to_string())
                .fetch_all(self.pool())
                .await
                .expect("what it held");
        *service = Service::start(&self.database, &self.network, &[]).await;
        *self.slots[slot].client.lock() = service.client().clone();
        eventually("what a killed process held is free again", SOON, async || {
            let left: i64 = sqlx::query_scalar("SELECT count(*) FROM deliveries WHERE claim_id = ANY($1)")
                .bind(&held)
                .fetch_one(self.pool())
                .await
                .expect("what is left");
            if left == 0 {
                Ok(())
            } else {
                Err(format!("{left} of {}", held.len()))
            }
        })
        .await;
        // Nobody takes over before having lived for four seconds itself: after an outage everybody begins anew.
        let survivor = self.slots[1 - slot].service.lock().await;
        let began = last_life(&survivor.log());
        let took = wall_clock().duration_since(killed.max(began)).expect("time goes on");
        if !held.is_empty() {
            assert!(
                took < MOVES_ON,
                "the work of a killed process went on after {took:?}\n{}",
                survivor.log()
            );
            let mut slowest = self.slowest.lock();
            *slowest = took.max(*slowest);
        }
    }

    async fn judge_deliveries(&self) {
        let pool = self.pool();
        let open = "SELECT count(*) FROM deliveries WHERE status IN ('pending', 'failed')";
        eventually("every delivery has ended", CALM, async || {
            match number(pool, open).await {
                0 => Ok(()),
                left => Err(format!("{left} left")),
            }
        })
        .await;
        let dead = format!(
            "SELECT count(*) FROM deliveries d JOIN events e USING (seq) WHERE d.status = 'dead' AND e.event_type <> '{}'",
            ONCE.0
        );
        assert_eq!(
            number(pool, &dead).await,
            0,
            "nothing was given up that may be tried again"
        );
        assert_eq!(broken_keys(pool).await, []);
        let store = Store::connect(Addresses::parse(self.database.url(), self.database.url()).expect("a URL")).await;
        assert_counts(&store.expect("a store"), pool).await;
        let key = |call: &crate::support::receiver::Call| {
            call.json()["event"]["subject"]["id"]
                .as_str()
                .expect("a subject")
                .to_owned()
        };
        assert_in_order(&self.receiver, KEYED.1, pool, key).await;
        let mut sent: Vec<String> = self
            .receiver
            .calls_to(ONCE.1)
            .iter()
            .map(|call| call.event_id().to_owned())
            .collect();
        let all = sent.len();
        sent.sort_unstable();
        sent.dedup();
        assert_eq!(sent.len(), all, "what may leave once left once");
        assert!(all > 0);
    }
}

/// When the worker of a process last began a life, as its log says.
fn last_life(log: &str) -> SystemTime {
    let line = log
        .lines()
        .rfind(|line| line.contains("the delivery worker") && line.contains("begins"));
    let stamp = line.and_then(|line| line.split_whitespace().next());
    let time = stamp.and_then(|stamp| OffsetDateTime::parse(stamp, &Rfc3339).ok());
    time.expect("a worker that has begun").into()
}

/// Which crash comes after how many events: each kind, in an order and at moments of their own.
fn plan(dice: &mut Dice, count: usize) -> Vec<(usize, Crash)> {
    let rounds = (count / 4_000).max(1);
    let mut crashes = Vec::new();
    for _ in 0..rounds {
        crashes.extend([
            Crash::Process(0),
            Crash::Process(1),
            Crash::Database,
            Crash::Database,
            Crash::Receiver,
        ]);
    }
    dice.shuffle(&mut crashes);
    let mut moments: Vec<usize> = crashes
        .iter()
        .map(|_| count / 20 + dice.below(count * 8 / 10))
        .collect();
    moments.sort_unstable();
    moments.into_iter().zip(crashes).collect()
}

/// The events, alone and in batches.
fn requests(dice: &mut Dice, count: usize) -> Vec<Vec<Envelope>> {
    let mut left = count;
    let mut requests = Vec::new();
    while left > 0 {
        let size = if dice.below(4) == 0 { 2 + dice.below(9) } else { 1 }.min(left);
        left -= size;
        let event = |_| {
            let (name, _) = [KEYED, KEYED, FREE, ONCE][dice.below(4)];
            envelope("live")
                .event_type(name)
                .subject("thing", &dice.below(KEYS).to_string())
        };
        requests.push((0..size).map(event).collect());
    }
    requests
}
