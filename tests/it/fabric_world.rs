//! What the tests of the fabric share: asking what placement says, and two processes that nothing but a carrier joins.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use sqlx::AssertSqlSafe;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    api_world::{operator, text},
    support::{
        broker::{Broker, PASSWORD},
        client::{Client, Response},
        contracts::assert_valid,
        database::Database,
        envelopes::Envelope,
        ledger::Ledger,
        network::Network,
        receiver::{Call, Receiver},
        service::Service,
        wait::{SOON, eventually, within},
    },
};

/// Longer than any test: what arrives was not found by a poll.
pub(crate) const NO_POLL: (&str, &str) = ("EVENTS_WORKER_INTERVAL_MS", "3600000");

/// How soon an operator must be told that a carrier is not usable any more, while it is in use.
pub(crate) const TOLD: Duration = Duration::from_secs(2);

/// How soon an event crosses between processes, at the median and on a busy machine: a small part of the 500 ms of the
/// poll. How much sooner it is, benchmarks tell.
pub(crate) const QUICK: Duration = Duration::from_millis(25);

/// How long a publish may take, whatever a broker does.
const PUBLISH_MAX: Duration = Duration::from_millis(300);

/// How soon a carrier that works again is used again: it waits between trials.
pub(crate) const BACK: Duration = Duration::from_secs(30);

/// The URL of a broker with the shipped configuration, at an address that may be a proxy's.
pub(crate) fn url(scheme: &str, address: impl std::fmt::Display) -> String {
    format!("{scheme}://events:{PASSWORD}@{address}")
}

/// Sends bytes to a broker as an outsider does; answers what it says, up to these words.
pub(crate) async fn speak(broker: &Broker, bytes: &[u8], until: &str) -> String {
    let mut line = TcpStream::connect(broker.address()).await.expect("the broker answers");
    let (mut reader, mut writer) = line.split();
    let mut heard = Vec::new();
    let talk = async {
        let send = async { writer.write_all(bytes).await.expect("sent") };
        let hear = async {
            while !String::from_utf8_lossy(&heard).contains(until) {
                let mut more = [0; 4096];
                let length = reader.read(&mut more).await.expect("an answer");
                assert!(length > 0, "{}", String::from_utf8_lossy(&heard));
                heard.extend_from_slice(&more[..length]);
            }
        };
        tokio::join!(send, hear);
    };
    within("the broker answers", SOON, talk).await;
    String::from_utf8_lossy(&heard).into_owned()
}

/// Every broker that carriers of the cell use, with the shipped configurations.
pub(crate) struct Brokers {
    pub(crate) valkey: Broker,
    pub(crate) nats: Broker,
    env: [(&'static str, String); 2],
}

impl Brokers {
    /// Starts them.
    pub(crate) async fn start() -> Self {
        let (valkey, nats) = tokio::join!(Broker::valkey(), Broker::nats());
        let env = [
            ("VALKEY_URL", url("redis", valkey.address())),
            ("NATS_URL", url("nats", nats.address())),
        ];
        Self { valkey, nats, env }
    }

    /// What a process is told of them.
    pub(crate) fn env(&self) -> [(&'static str, &str); 2] {
        self.env.each_ref().map(|(name, value)| (*name, value.as_str()))
    }
}

/// Two processes on one database: the first sends nothing, so that whatever is delivered crossed to the second.
pub(crate) struct Pair {
    pub(crate) publisher: Service,
    pub(crate) worker: Service,
    pub(crate) receiver: Receiver,
    pub(crate) database: Database,
    network: Network,
}

impl Pair {
    /// Both with these variables, and with a poll that never comes.
    pub(crate) async fn start(env: &[(&str, &str)]) -> Self {
        Self::start_with(env, env).await
    }

    /// Each with variables of its own.
    pub(crate) async fn start_with(publisher: &[(&str, &str)], worker: &[(&str, &str)]) -> Self {
        Self::start_on(Database::create().await, publisher, worker).await
    }

    /// Each with variables of its own, on this database.
    pub(crate) async fn start_on(database: Database, publisher: &[(&str, &str)], worker: &[(&str, &str)]) -> Self {
        let (network, receiver) = tokio::join!(Network::start(), Receiver::start());
        let quiet: Vec<_> = [("EVENTS_WORKER", "off"), NO_POLL]
            .into_iter()
            .chain(publisher.iter().copied())
            .collect();
        let busy: Vec<_> = [NO_POLL].into_iter().chain(worker.iter().copied()).collect();
        let (publisher, worker) = tokio::join!(
            Service::start(&database, &network, &quiet),
            Service::start(&database, &network, &busy)
        );
        Self {
            publisher,
            worker,
            receiver,
            database,
            network,
        }
    }

    /// One more process.
    pub(crate) async fn another(&self, env: &[(&str, &str)]) -> Service {
        let env: Vec<_> = [NO_POLL].into_iter().chain(env.iter().copied()).collect();
        Service::start(&self.database, &self.network, &env).await
    }

    /// One more process, which may not be able to start.
    pub(crate) fn spawn(&self, env: &[(&str, &str)]) -> Service {
        let mut all = vec![("DATABASE_URL", self.database.url())];
        all.extend(env);
        Service::spawn(&self.network, &all)
    }

    /// A client of the process that sends nothing.
    pub(crate) fn client(&self) -> &Client {
        self.publisher.client()
    }

    /// A subscription to a type, delivered to the receiver's path.
    pub(crate) async fn subscribe(&self, event_type: &str, path: &str) -> String {
        subscribe(self.client(), event_type, &self.receiver.url(path)).await
    }

    /// Waits until an operator of the publishing process is told that this carrier is chosen for a type.
    pub(crate) async fn selects(&self, event_type: &str, carrier: &str, deadline: Duration) {
        selects(self.client(), event_type, carrier, deadline).await;
    }

    /// Waits until an operator of the publishing process is told why this carrier is not chosen, and that the floor is.
    pub(crate) async fn excludes(&self, event_type: &str, carrier: &str, because: &str, deadline: Duration) {
        eventually("explain names the reason", deadline, async || {
            let explained = explain(self.client(), event_type, None).await;
            let reason = reason(&explained, carrier);
            let selected = text(&explained["placement"], "selected").to_owned();
            (reason == because && selected == "pg-v1")
                .then_some(())
                .ok_or(format!("{selected}; {reason:?}"))
        })
        .await;
    }

    /// Publishes and waits for the arrival; answers how long after the publish began.
    pub(crate) async fn round(&self, event: &Envelope, deadline: Duration) -> Duration {
        let before = self.receiver.calls().len();
        let began = Instant::now();
        self.client().publish(event).await.expect(201);
        let calls = self.receiver.wait_calls(before + 1, deadline).await;
        let call = calls
            .iter()
            .find(|call| call.event_id() == event.id())
            .expect("what was published");
        call.arrived - began
    }

    /// Publishes event after event until told to stop, and notes what was acknowledged. Whatever brokers do, each answer
    /// must come in time.
    pub(crate) async fn publish_until(
        &self,
        ledger: &Ledger,
        mut event: impl FnMut(usize) -> Envelope,
        until: impl Future<Output = ()>,
    ) {
        // A pace that a busy machine keeps.
        let mut pace = tokio::time::interval(Duration::from_millis(20));
        tokio::pin!(until);
        for n in 0.. {
            tokio::select! {
                () = &mut until => return,
                _now = pace.tick() => {}
            }
            // Never given up half-way: what is stored must be noted.
            let event = event(n % 7);
            let began = Instant::now();
            let answer = self.client().publish(&event).await;
            let took = began.elapsed();
            assert_eq!(answer.status, 201, "{}", answer.text);
            assert!(took < PUBLISH_MAX, "a publish took {took:?}");
            ledger.note([&event], &answer);
        }
    }

    /// How many deliveries are recorded with this carrier.
    pub(crate) async fn placed_on(&self, carrier: &str) -> i64 {
        number(
            &self.database,
            &format!("SELECT count(*) FROM deliveries WHERE carrier = '{carrier}'"),
        )
        .await
    }

    /// Waits until every delivery is recorded as delivered, and fails where one was sent more than once.
    ///
    /// One exception is the promise of at least once: a process that could not renew its lease for three seconds, on a
    /// starved machine or because it was stopped, ends what it was sending, and that is sent again as the next attempt.
    pub(crate) async fn all_sent_once(&self, count: usize, deadline: Duration) {
        eventually("everything is recorded", deadline, async || {
            let open = "SELECT count(*) FROM deliveries WHERE status <> 'delivered'";
            let open = number(&self.database, open).await;
            let calls = self.receiver.calls().len();
            (open == 0 && calls >= count)
                .then_some(())
                .ok_or(format!("{open} open, {calls} calls"))
        })
        .await;
        let calls = self.receiver.calls();
        let mut sent: BTreeMap<(&str, &str), Vec<u32>> = BTreeMap::new();
        for call in &calls {
            let path = (
                call.event_id(),
                call.header("x-openvibe-subscription-id").unwrap_or_default(),
            );
            sent.entry(path).or_default().push(call.attempt());
        }
        assert_eq!(sent.len(), count, "each is sent: {sent:#?}");
        sent.retain(|_, attempts| attempts.len() > 1);
        if sent.is_empty() {
            return;
        }
        // Whoever lost its lease is on record for a minute.
        let lost = "SELECT count(*) FROM workers WHERE alive_until <= now_ms()";
        assert!(number(&self.database, lost).await > 0, "each is sent once: {sent:#?}");
        let counted = |attempts: &Vec<u32>| attempts.iter().copied().eq(1..=attempts.len() as u32);
        assert!(sent.values().all(counted), "no attempt is made twice: {sent:#?}");
        eprintln!("under way when a lease was lost, and sent again: {sent:?}");
    }
}

/// One number out of a database.
pub(crate) async fn number(database: &Database, sql: &str) -> i64 {
    sqlx::query_scalar(AssertSqlSafe(sql.to_owned()))
        .fetch_one(database.pool())
        .await
        .unwrap_or_else(|error| panic!("{sql}: {error}"))
}

/// Waits until every carrier of a process is up, and what is decided next knows of it.
pub(crate) async fn all_up(client: &Client) {
    eventually("every carrier is up", SOON, async || {
        let carriers = carriers(client).await;
        let all = carriers.iter().all(|carrier| carrier["state"] == "up");
        all.then_some(()).ok_or(format!("{carriers:?}"))
    })
    .await;
    explain(client, "live.any.thing", None).await;
}

/// Waits until an operator is told that this carrier is chosen for a type.
pub(crate) async fn selects(client: &Client, event_type: &str, carrier: &str, deadline: Duration) {
    eventually("explain names the carrier", deadline, async || {
        let explained = explain(client, event_type, None).await;
        let selected = text(&explained["placement"], "selected").to_owned();
        (selected == carrier)
            .then_some(())
            .ok_or(explained["placement"].to_string())
    })
    .await;
}

/// What an operator is told about a type.
pub(crate) async fn explain(client: &Client, event_type: &str, key: Option<&str>) -> Value {
    let key = key.map(|key| format!("&key={key}")).unwrap_or_default();
    let path = format!("/api/v1/placement?event_type={event_type}{key}");
    let explained = client.get(&path, Some(&operator())).await.expect(200);
    assert_valid("events.placement-explanation@1", &explained);
    explained
}

/// What an operator is told about a delivery.
pub(crate) async fn explain_delivery(client: &Client, event: &Envelope, subscription: &str) -> Value {
    let path = format!("/api/v1/placement/deliveries/{}/{subscription}", event.id());
    let explained = client.get(&path, Some(&operator())).await.expect(200);
    assert_valid("events.delivery-placement@1", &explained);
    explained
}

/// Every carrier of a process.
pub(crate) async fn carriers(client: &Client) -> Vec<Value> {
    let listed = client.get("/api/v1/carriers", Some(&operator())).await.expect(200);
    assert_valid("events.carrier-result@1", &listed);
    listed["carriers"].as_array().expect("carriers").clone()
}

/// One carrier of a process.
pub(crate) async fn carrier(client: &Client, id: &str) -> Value {
    let all = carriers(client).await;
    all.into_iter()
        .find(|carrier| carrier["id"] == id)
        .expect("it is configured")
}

/// Switches a carrier.
pub(crate) async fn switch(client: &Client, id: &str, disabled: bool) -> Response {
    let body = json!({ "disabled": disabled });
    assert_valid("events.carrier-switch-request@1", &body);
    let switched = client
        .put(&format!("/api/v1/carriers/{id}"), Some(&operator()), &body)
        .await;
    if switched.status == 200 {
        assert_valid("events.carrier-result@1", &switched.body);
    }
    switched
}

/// A subscription to a type.
pub(crate) async fn subscribe(client: &Client, event_type: &str, endpoint: &str) -> String {
    subscribe_with(client, &json!({ "topic_pattern": event_type, "endpoint": endpoint })).await
}

/// A subscription as it is asked for.
pub(crate) async fn subscribe_with(client: &Client, body: &Value) -> String {
    let created = client
        .post("/api/v1/subscriptions", Some(&client.service_token("chat")), body)
        .await
        .expect(201);
    text(&created, "id").to_owned()
}

/// A policy with the subject as its key.
pub(crate) async fn keyed(client: &Client, pattern: &str, class: &str, durability: &str) {
    let policy = json!({
        "class": class, "durability": durability, "delivery_semantics": "at_least_once",
        "ordering": { "scope": "key", "key": "subject" },
    });
    put_policy(client, pattern, &policy).await;
}

/// The policy of news that nobody keeps: TOPIC.
pub(crate) async fn topic(client: &Client, pattern: &str) {
    let policy = json!({ "class": "realtime_ephemeral", "durability": "none", "delivery_semantics": "at_least_once" });
    put_policy(client, pattern, &policy).await;
}

/// A policy as it is given.
pub(crate) async fn put_policy(client: &Client, pattern: &str, policy: &Value) {
    let path = format!("/api/v1/delivery-policies/{pattern}");
    client.put(&path, Some(&operator()), policy).await.expect(200);
}

/// What was found of one candidate.
pub(crate) fn candidate<'a>(explained: &'a Value, carrier: &str) -> Option<&'a Value> {
    let candidates = explained["placement"]["candidates"].as_array().expect("candidates");
    candidates.iter().find(|candidate| candidate["id"] == carrier)
}

/// Why a candidate is not chosen; empty where it may be.
pub(crate) fn reason(explained: &Value, carrier: &str) -> String {
    let candidate = candidate(explained, carrier).expect("it is configured");
    candidate["excluded_because"].as_str().unwrap_or_default().to_owned()
}

/// The subject of a delivered event.
pub(crate) fn subject_of(call: &Call) -> String {
    call.json()["event"]["subject"]["id"]
        .as_str()
        .expect("a subject")
        .to_owned()
}

/// The middle one.
pub(crate) fn median(mut all: Vec<Duration>) -> Duration {
    all.sort();
    all[all.len() / 2]
}

/// The sum of a process's metric lines that begin like this.
pub(crate) async fn metric(client: &Client, beginning: &str) -> f64 {
    let text = client.get("/metrics", None).await.text;
    let values = text.lines().filter(|line| line.starts_with(beginning)).map(|line| {
        let value = line.rsplit_once(' ').expect("a value").1;
        value.parse::<f64>().expect("a number")
    });
    values.sum()
}
