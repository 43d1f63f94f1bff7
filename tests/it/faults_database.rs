//! A database that fails under a running service: connections lost at every step, answers that never come, a process
//! frozen in the middle, sessions ended at random, callers that hang up, and a fail-over that lost commits.

use std::{
    ops::RangeInclusive,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use openvibe_events::store::{Addresses, Store, StoreError};
use reqwest::Method;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    api_world::{operator, text},
    store_fixture::{number, sql},
    support::{
        client::{Client, Response, assert_problem},
        cluster::Cluster,
        database::Database,
        dice::Dice,
        envelopes::{Envelope, batch, envelope, envelopes},
        ledger::{Ledger, Walk, position_of},
        network::Network,
        proxy::{COMMIT, Proxy},
        receiver::Receiver,
        service::{Service, start_many},
        wait::{SOON, eventually, within},
    },
};

/// How long others may have to wait for a process that froze while it held the counter row.
const FROZEN_MAX: Duration = Duration::from_secs(6);
/// How long any caller waits for a refusal: the deadline of every answer, and a second.
const REFUSAL_MAX: Duration = Duration::from_secs(21);

/// How a request is stored.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    /// By one statement, which is a transaction of its own.
    Statement,
    /// By the same statement between BEGIN and COMMIT, since a pooler may stand in between.
    Pooled,
    /// By several statements in a transaction, since one event of the request is known.
    Several,
}

impl Way {
    const ALL: [Self; 3] = [Self::Statement, Self::Pooled, Self::Several];

    /// How many pieces it takes at least, asked and answered, on a connection that has done it before.
    fn pieces(self) -> usize {
        match self {
            Self::Statement => 1,
            Self::Pooled => 3,
            Self::Several => 5,
        }
    }
}

/// Whoever publishes one way.
struct Producer<'a> {
    way: Way,
    client: &'a Client,
    known: Envelope,
}

impl<'a> Producer<'a> {
    /// One whose connections have done all of it before.
    async fn of(way: Way, client: &'a Client) -> Self {
        let known = envelope("live");
        client.publish(&known).await.expect(201);
        let producer = Self { way, client, known };
        producer.taken(&envelopes("live", 1)).await;
        producer
    }

    /// What the request with these events holds; the results of its answer are of these.
    fn sent(&self, events: &[Envelope]) -> Vec<Envelope> {
        let known = (self.way == Way::Several).then_some(&self.known);
        events.iter().chain(known).cloned().collect()
    }

    /// Publishes the events in one request.
    async fn publish(&self, events: &[Envelope]) -> Response {
        self.client.publish_as("live", &batch(&self.sent(events))).await
    }

    /// Publishes until it is taken, as [`taken`] does.
    async fn taken(&self, events: &[Envelope]) -> Response {
        eventually("the request is taken", SOON, async || {
            let answer = self.publish(events).await;
            if answer.status < 300 {
                return Ok(answer);
            }
            not_now(&answer);
            Err(answer.text)
        })
        .await
    }
}

/// A service that reaches its database through a proxy, and nothing else that would use the line.
async fn behind_proxy(way: Way) -> (Database, Network, Proxy, Service) {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let proxy = Proxy::start(&database.server()).await;
    let url = database.url_through(proxy.address());
    // A pooler is assumed where the two differ.
    let direct = if way == Way::Pooled { database.url() } else { &url };
    let env = [
        ("DATABASE_URL", url.as_str()),
        ("DATABASE_DIRECT_URL", direct),
        ("EVENTS_WORKER", "off"),
    ];
    let service = Service::start(&database, &network, &env).await;
    (database, network, proxy, service)
}

/// How many of the events are stored.
async fn stored(database: &Database, events: &[Envelope]) -> usize {
    let ids: Vec<&str> = events.iter().map(Envelope::id).collect();
    let count: i64 = sqlx::query_scalar("SELECT count(*) FROM events WHERE id = ANY($1)")
        .bind(ids)
        .fetch_one(database.pool())
        .await
        .expect("a count");
    usize::try_from(count).expect("a count")
}

/// Fails unless the answer to a retry tells the truth about what was stored before.
#[track_caller]
fn as_stored(again: &Response, stored: bool) {
    let duplicate = again.body["results"][0]["duplicate"].as_bool();
    assert_eq!(
        (again.status, duplicate),
        (if stored { 200 } else { 201 }, Some(stored)),
        "{}",
        again.text
    );
}

/// Fails unless the refusal says "not now" as the contract does.
#[track_caller]
fn not_now(answer: &Response) {
    assert_problem(answer, 503, "events.unavailable");
    let wait: u64 = answer
        .header("retry-after")
        .parse()
        .expect("Retry-After in whole seconds");
    assert!((1..=60).contains(&wait), "{wait}");
}

/// Publishes until it is taken; what is refused before is refused as "not now". How many refusals there were.
async fn taken(client: &Client, event: &Envelope) -> (Response, usize) {
    let mut refusals = 0;
    let answer = eventually("the event is taken", SOON, async || {
        let answer = client.publish(event).await;
        if answer.status < 300 {
            return Ok(answer);
        }
        not_now(&answer);
        refusals += 1;
        Err(answer.text)
    })
    .await;
    (answer, refusals)
}

#[tokio::test]
async fn a_database_that_closed_every_connection_costs_one_refusal_and_no_more() {
    let database = Database::create().await;
    let proxy = Proxy::start(&database.server()).await;
    let url = database.url_through(proxy.address());
    let store = Store::connect(Addresses::parse(&url, &url).expect("a URL"))
        .await
        .expect("a store");
    let statement = async || store.settle("nobody", &[]).await;
    // Four at once, so that as many connections are kept, all of them in use a moment ago.
    proxy.delay(Duration::from_millis(50));
    for answer in join_all((0..4).map(|_| statement())).await {
        answer.expect("a statement");
    }
    proxy.restore();
    proxy.drop_connections();
    let mut lost = 0;
    for _ in 0..4 {
        match statement().await {
            Ok(_) => {}
            Err(StoreError::Unavailable(_)) => lost += 1,
            Err(other) => panic!("{other:?}"),
        }
    }
    assert_eq!(lost, 1, "the first that is lost tells of the others");
}

/// How many sessions of the service are in a transaction and do nothing.
const LEFT_OPEN: &str = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                         AND application_name = 'openvibe-events' AND state LIKE 'idle in transaction%'";

async fn nothing_is_left_open(database: &Database, processes: i64) {
    eventually("no transaction is left open", SOON, async || {
        number(database.pool(), LEFT_OPEN).await == 0
    })
    .await;
    let sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                    AND application_name = 'openvibe-events'";
    assert!(
        number(database.pool(), sessions).await <= 21 * processes,
        "the pools of {processes} processes"
    );
}

#[tokio::test]
async fn a_connection_that_is_lost_at_any_step_of_a_publish_costs_a_refusal_and_nothing_else() {
    join_all(Way::ALL.map(lose_each_step)).await;
}

async fn lose_each_step(way: Way) {
    let (database, _network, proxy, service) = behind_proxy(way).await;
    let producer = Producer::of(way, service.client()).await;
    let ledger = Ledger::default();
    let limits: [fn(&Proxy, u64); 2] = [Proxy::cut_after_asking, Proxy::cut_after_answers];
    for (side, cut_after) in limits.into_iter().enumerate() {
        let mut lost = Vec::new();
        for pieces in 0..40 {
            // Nothing of the step before is left over, and there is a connection again that has done all this.
            producer.taken(&envelopes("live", 1)).await;
            let events = envelopes("live", 3);
            cut_after(&proxy, pieces);
            let answer = producer.publish(&events).await;
            proxy.restore();
            if answer.status == 201 {
                break;
            }
            not_now(&answer);
            let stored = stored(&database, &events).await;
            assert!(
                stored == 0 || stored == 3,
                "{stored} of 3 after {pieces} pieces, {way:?}"
            );
            lost.push(stored);
            let again = producer.taken(&events).await;
            as_stored(&again, stored == 3);
            ledger.note(&producer.sent(&events), &again);
        }
        assert!(lost.len() >= way.pieces(), "{way:?}, {side}: {lost:?}");
        // What did not arrive has not happened.
        assert!(side == 1 || !lost.contains(&3), "{way:?}: {lost:?}");
        // What was asked whole has, though its answer was lost. (A pool asks a connection that comes back how it is, so
        // that pieces of a transaction cannot be told exactly; the test below cuts its COMMIT.)
        // Nor do the pieces tell whose they are: what the service reads for its streams meanwhile counts as well.
        let is_whole = |lost: &[usize]| lost.iter().all(|stored| *stored == 3);
        assert!(side == 0 || way != Way::Statement || is_whole(&lost), "{lost:?}");
    }
    ledger.assert_stored_once(database.pool()).await;
    nothing_is_left_open(&database, 1).await;
}

#[tokio::test]
async fn a_commit_whose_answer_was_lost_is_a_duplicate_when_its_producer_tries_again() {
    join_all(Way::ALL.map(lose_the_answer)).await;
}

async fn lose_the_answer(way: Way) {
    let (database, _network, proxy, service) = behind_proxy(way).await;
    let producer = Producer::of(way, service.client()).await;
    let requests: Vec<Vec<Envelope>> = (0..8).map(|_| envelopes("live", 1)).collect();
    // What commits: the statement itself, which carries its publisher, or the COMMIT after it.
    proxy.cut_at(if way == Way::Statement { b"svc:live" } else { COMMIT });
    let answers = join_all(requests.iter().map(|events| producer.publish(events))).await;
    proxy.restore();
    answers.iter().for_each(not_now);
    assert!(proxy.left_unanswered() > 0);
    assert_eq!(
        stored(&database, &requests.concat()).await,
        8,
        "it has happened, {way:?}"
    );
    let ledger = Ledger::default();
    for events in &requests {
        let again = producer.taken(events).await;
        as_stored(&again, true);
        ledger.note(&producer.sent(events), &again);
    }
    ledger.assert_stored_once(database.pool()).await;
}

#[tokio::test]
async fn a_database_that_swallows_everything_is_told_as_not_now_and_forgotten_when_it_returns() {
    join_all(Way::ALL.map(swallow)).await;
}

async fn swallow(way: Way) {
    let (database, _network, proxy, service) = behind_proxy(way).await;
    let client = service.client();
    client.publish(&envelope("live")).await.expect(201);
    let token = client.service_token("live");
    let subscribe = json!({ "topic_pattern": "live.*", "endpoint": "http://127.0.0.1:9/x" });
    let read = async || client.get("/api/v1/events?topic=live.*", Some(&token)).await;
    // More of each than there are connections for it.
    let crowd = async || {
        let writes = (0..20).map(|_| async { client.publish(&envelope("live")).await });
        let changes = (0..12).map(|_| async { client.post("/api/v1/subscriptions", Some(&token), &subscribe).await });
        let reads = (0..12).map(|_| read());
        let (writes, changes, reads) = tokio::join!(join_all(writes), join_all(changes), join_all(reads));
        [writes, changes, reads].concat()
    };
    proxy.stall();
    let asked = Instant::now();
    crowd().await.iter().for_each(not_now);
    assert!(asked.elapsed() < REFUSAL_MAX, "{:?}", asked.elapsed());
    proxy.restore();
    taken(client, &envelope("live")).await;
    eventually("readers are served again, all of them at once", SOON, async || {
        join_all((0..12).map(|_| read()))
            .await
            .iter()
            .all(|answer| answer.status == 200)
    })
    .await;

    // What was asked happens this time, and nobody hears of it.
    let ledger = Ledger::default();
    let producer = Producer::of(way, client).await;
    let events = envelopes("live", 2);
    proxy.hold_answers();
    not_now(&producer.publish(&events).await);
    proxy.drop_connections();
    proxy.restore();
    // A statement that is a transaction of its own stands. A transaction that heard nothing asked for no commit.
    let stands = way == Way::Statement;
    let stored = stored(&database, &events).await;
    assert_eq!(stored, if stands { 2 } else { 0 }, "{way:?}");
    let again = producer.taken(&events).await;
    as_stored(&again, stands);
    ledger.note(&producer.sent(&events), &again);
    ledger.assert_stored_once(database.pool()).await;
    nothing_is_left_open(&database, 1).await;
}

#[tokio::test]
async fn while_every_connection_waits_for_a_lock_others_are_told_not_now_and_all_recover_when_it_is_let_go() {
    join_all(Way::ALL.map(use_up)).await;
}

async fn use_up(way: Way) {
    const READS: i64 = 6;
    const WRITES: i64 = 10;

    let (database, _network, _proxy, service) = behind_proxy(way).await;
    let client = service.client();
    let producer = Producer::of(way, client).await;
    let (token, operator) = (client.service_token("live"), operator());
    // A checkpoint waits for the table of deliveries as long as any statement may, which is longer than for a lock.
    sql(
        database.pool(),
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             PERFORM set_config('lock_timeout', '0', true);
             PERFORM FROM deliveries LIMIT 1;
             RETURN NULL;
         END $$;
         CREATE TRIGGER wait BEFORE INSERT ON consumer_checkpoints FOR EACH STATEMENT EXECUTE FUNCTION wait()",
    )
    .await;
    let checkpoint = json!({ "topic": "live.*", "cursor": "c1.0.MA" });
    // More of each than there are connections for it.
    let crowd = async || {
        let writes = (0..2 * WRITES).map(|_| client.put("/api/v1/checkpoints", Some(&token), &checkpoint));
        let reads = (0..2 * READS).map(|_| client.get("/api/v1/deliveries", Some(&operator)));
        let (writes, reads) = tokio::join!(join_all(writes), join_all(reads));
        [writes, reads].concat()
    };
    let mut holder = database.pool().begin().await.expect("a transaction");
    sqlx::raw_sql("LOCK TABLE deliveries IN ACCESS EXCLUSIVE MODE")
        .execute(&mut *holder)
        .await
        .expect("the table is locked");
    let events = envelopes("live", 1);
    let scene = async {
        let waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                       AND application_name = 'openvibe-events' AND wait_event_type = 'Lock'";
        eventually("every connection waits", SOON, async || {
            let count = number(database.pool(), waiting).await;
            (count >= READS + WRITES).then_some(()).ok_or(count)
        })
        .await;
        let asked = Instant::now();
        // Neither of them needs the table: a connection is all they lack.
        let read = client.get("/api/v1/events?topic=live.*", Some(&token));
        let (read, publish) = tokio::join!(read, producer.publish(&events));
        assert!(asked.elapsed() < REFUSAL_MAX, "{:?}", asked.elapsed());
        holder.rollback().await.expect("the table is free");
        (read, publish)
    };
    let (crowded, (read, publish)) = tokio::join!(crowd(), scene);
    not_now(&read);
    if way == Way::Statement {
        // It has connections of its own, so that no crowd stops an event.
        as_stored(&publish, false);
    } else {
        not_now(&publish);
        as_stored(&producer.taken(&events).await, false);
    }
    crowded.iter().filter(|answer| answer.status != 200).for_each(not_now);
    for answer in crowd().await {
        answer.expect(200);
    }
    nothing_is_left_open(&database, 1).await;
}

#[tokio::test]
async fn a_line_that_drips_changes_nothing() {
    join_all(Way::ALL.map(drip)).await;
}

async fn drip(way: Way) {
    let (database, _network, proxy, service) = behind_proxy(way).await;
    let client = service.client();
    let producer = Producer::of(way, client).await;
    let ledger = Ledger::default();
    proxy.drip();
    let events = envelopes("live", 20);
    ledger.note(&producer.sent(&events), &producer.publish(&events).await);
    assert_eq!(ledger.len(), producer.sent(&events).len(), "{way:?}");
    let mut walk = Walk::over("live.*");
    walk.rest(client).await;
    walk.assert_whole(database.pool()).await;
}

#[tokio::test]
async fn a_process_that_is_stopped_in_a_publish_of_one_statement_holds_up_nobody() {
    let (database, network, proxy, frozen) = behind_proxy(Way::Statement).await;
    let other = Service::start(&database, &network, &[("EVENTS_WORKER", "off")]).await;
    other.client().publish(&envelope("live")).await.expect(201);
    let producer = Producer::of(Way::Statement, frozen.client()).await;
    // The statement runs, and the process hears nothing of it before it is stopped.
    proxy.hold_answers();
    let held = envelopes("live", 1);
    let publish = producer.publish(&held);
    let scene = async {
        eventually("it is stored", SOON, async || stored(&database, &held).await == 1).await;
        frozen.freeze();
        let started = Instant::now();
        other.client().publish(&envelope("live")).await.expect(201);
        let waited = started.elapsed();
        proxy.restore();
        frozen.thaw();
        assert!(waited < Duration::from_secs(1), "others waited for {waited:?}");
    };
    let (answer, ()) = tokio::join!(publish, scene);
    as_stored(&answer, false);
    as_stored(&producer.taken(&held).await, true);
    nothing_is_left_open(&database, 2).await;
}

#[tokio::test]
async fn a_process_that_is_stopped_in_a_transaction_holds_up_others_for_seconds_and_recovers() {
    join_all([Way::Pooled, Way::Several].map(stop_in_a_transaction)).await;
}

async fn stop_in_a_transaction(way: Way) {
    let (database, network, proxy, frozen) = behind_proxy(way).await;
    let other = Service::start(&database, &network, &[("EVENTS_WORKER", "off")]).await;
    other.client().publish(&envelope("live")).await.expect(201);
    let producer = Producer::of(way, frozen.client()).await;
    // So slow that the process is caught between two statements of its transaction.
    proxy.delay(Duration::from_millis(300));
    let held = envelopes("live", 1);
    let publish = producer.publish(&held);
    let scene = async {
        let free = "SELECT count(*) FROM (SELECT FROM store_counter FOR UPDATE SKIP LOCKED) free";
        eventually("it holds the counter row", SOON, async || {
            number(database.pool(), free).await == 0 && number(database.pool(), LEFT_OPEN).await > 0
        })
        .await;
        frozen.freeze();
        let started = Instant::now();
        let (answer, refusals) = taken(other.client(), &envelope("live")).await;
        assert_eq!(answer.status, 201);
        let waited = started.elapsed();
        proxy.restore();
        frozen.thaw();
        assert!(waited > Duration::from_secs(1), "nobody was in the way, {way:?}");
        assert!(waited < FROZEN_MAX, "{refusals} refusals in {waited:?}, {way:?}");
    };
    let (answer, ()) = tokio::join!(publish, scene);
    not_now(&answer);
    assert_eq!(stored(&database, &held).await, 0, "its transaction was undone, {way:?}");
    as_stored(&producer.taken(&held).await, false);
    nothing_is_left_open(&database, 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_that_are_ended_at_random_cost_refusals_and_no_event() {
    let (database, network, receiver) = tokio::join!(Database::create(), Network::start(), Receiver::start());
    let services = start_many(&database, &network, 2, &[]).await;
    let clients = [services[0].client(), services[1].client()];
    let body = json!({ "topic_pattern": "live.*", "endpoint": receiver.url("/hook"), "max_inflight": 16 });
    let token = clients[0].service_token("chat");
    clients[0]
        .post("/api/v1/subscriptions", Some(&token), &body)
        .await
        .expect(201);
    let ledger = Ledger::default().route("/hook", |_| true);
    let publish = join_all((0..6).map(|publisher| {
        let (ledger, client) = (&ledger, clients[publisher % 2]);
        async move {
            for _ in 0..80 {
                let event = envelope("live");
                let (answer, _) = taken(client, &event).await;
                ledger.note([&event], &answer);
            }
        }
    }));
    let end = async {
        let mut dice = Dice::of(7);
        for round in 0..40 {
            eventually("progress", SOON, async || ledger.len() >= round * 12).await;
            // There may be none for a moment: sessions that died are made anew when they are needed.
            let one = eventually("a session", SOON, async || {
                let sessions: Vec<i32> = sqlx::query_scalar(
                    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() \
                     AND application_name = 'openvibe-events' ORDER BY pid",
                )
                .fetch_all(database.pool())
                .await
                .expect("the sessions");
                (!sessions.is_empty()).then(|| sessions[dice.below(sessions.len())])
            })
            .await;
            sql(database.pool(), &format!("SELECT pg_terminate_backend({one})")).await;
        }
    };
    tokio::join!(publish, end);
    assert_eq!(ledger.len(), 480);
    ledger.settle(&receiver, Duration::from_secs(30)).await;
    ledger.assert_stored_once(database.pool()).await;
    for service in services {
        assert_eq!(service.terminate().await.0.code, Some(0));
    }
}

#[tokio::test]
async fn callers_that_hang_up_at_any_byte_leave_nothing_half_done_and_nothing_behind() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let service = Service::start(&database, &network, &[("EVENTS_WORKER", "off")]).await;
    let address = service.base().trim_start_matches("http://").to_owned();
    let token = service.client().service_token("live");
    let mut dice = Dice::of(11);
    let mut types = Vec::new();
    for round in 0..300 {
        let events = envelopes("live", 3);
        let body = batch(&events).to_string();
        let request = format!(
            "POST /api/v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        // Half of them are sent whole and not listened to; some of those read a part of the answer.
        let whole = round % 2 == 0;
        let bytes = if whole {
            request.len()
        } else {
            dice.below(request.len())
        };
        let mut stream = TcpStream::connect(&address).await.expect("a connection");
        stream
            .write_all(&request.as_bytes()[..bytes])
            .await
            .expect("the bytes are sent");
        if whole && round % 3 == 0 {
            within("a first byte", SOON, stream.read_u8()).await.expect("an answer");
        }
        for _ in 0..dice.below(20) {
            tokio::task::yield_now().await;
        }
        drop(stream);
        types.push((events[0].type_name().to_owned(), whole && round % 3 == 0));
    }
    // What follows them waits for no one.
    let asked = Instant::now();
    service.client().publish(&envelope("live")).await.expect(201);
    assert!(asked.elapsed() < Duration::from_secs(5), "{:?}", asked.elapsed());
    for (event_type, answered) in types {
        let stored = number(
            database.pool(),
            &format!("SELECT count(*) FROM events WHERE event_type = '{event_type}'"),
        )
        .await;
        let allowed: RangeInclusive<i64> = if answered { 3..=3 } else { 0..=3 };
        assert!(
            allowed.contains(&stored) && stored % 3 == 0,
            "{stored} of 3 of {event_type}"
        );
    }
    nothing_is_left_open(&database, 2).await;
}

async fn position_after(client: &Client, event: &Envelope) -> i64 {
    let (answer, _) = taken(client, event).await;
    position_of(text(&answer.body, "cursor")).expect("a position")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fail_over_that_lost_commits_gives_no_position_again_and_the_service_goes_on() {
    let (cluster, network, receiver) = tokio::join!(Cluster::start(""), Network::start(), Receiver::start());
    let database = Database::create_on(&cluster.server()).await;
    let services = start_many(&database, &network, 2, &[]).await;
    let (one, two) = (services[0].client(), services[1].client());
    let subscribe = async |consumer: &str, path: &str| -> Value {
        let body = json!({ "topic_pattern": "live.*", "endpoint": receiver.url(path), "max_inflight": 8 });
        let token = one.service_token(consumer);
        eventually("a subscription is made", SOON, async || {
            let answer = one.post("/api/v1/subscriptions", Some(&token), &body).await;
            if answer.status == 201 {
                Ok(answer.body)
            } else {
                Err(answer.text)
            }
        })
        .await
    };
    subscribe("chat", "/kept").await;
    for event in envelopes("live", 10) {
        position_after(two, &event).await;
    }
    receiver.wait_calls_to("/kept", 10, SOON).await;

    cluster.set_aside().await;
    subscribe("billing", "/lost").await;
    let mut seen = 0;
    for event in envelopes("live", 10) {
        seen = position_after(two, &event).await;
    }
    receiver.wait_calls_to("/lost", 10, SOON).await;
    cluster.fail_over().await;

    let token = one.service_token("live");
    let after = crate::api_world::cursor(0, seen);
    let path = format!("/api/v1/events?topic=live.*&after={after}");
    let ahead = eventually("the log can be read", SOON, async || {
        let answer = one.try_send(one.request(Method::GET, &path, Some(&token))).await;
        answer.ok().filter(|answer| answer.status == 200)
    })
    .await;
    assert!(
        ahead.body["gap"].is_object(),
        "a reader that has seen more is told: {}",
        ahead.text
    );

    let mut events = envelopes("live", 10);
    for (n, event) in events.iter().enumerate() {
        let position = position_after([one, two][n % 2], event).await;
        assert!(position > seen, "{position} was given to a reader before ({seen})");
        seen = position;
    }
    let page = one.get(&path, Some(&token)).await.expect(200);
    let read: Vec<&str> = page["events"]
        .as_array()
        .expect("events")
        .iter()
        .map(|one| text(&one["event"], "event_id"))
        .collect();
    assert_eq!(
        read,
        events.iter().map(Envelope::id).collect::<Vec<_>>(),
        "the reader goes on"
    );

    // A change after the lost one is known everywhere, and so is that the lost one is lost.
    let before = receiver.calls_to("/lost").len();
    subscribe("wiki", "/new").await;
    events.push(envelope("live"));
    position_after(two, &events[10]).await;
    let kept = |path: &'static str| {
        let ids: Vec<String> = receiver
            .calls_to(path)
            .iter()
            .map(|call| call.event_id().to_owned())
            .collect();
        events
            .iter()
            .filter(|event| ids.contains(&event.id().to_owned()))
            .count()
    };
    receiver
        .wait_until("what was stored since is delivered", Duration::from_secs(30), |_| {
            kept("/kept") == 11 && kept("/new") == 1
        })
        .await;
    assert_eq!(
        receiver.calls_to("/lost").len(),
        before,
        "nobody delivers for a subscription that is gone"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_and_a_recorded_result_are_on_the_disk_when_the_database_is_killed() {
    // Nothing is written but what a commit waits for.
    let settings = "wal_writer_delay = 10s\nwal_writer_flush_after = 0\nautovacuum = off";
    let (cluster, network, receiver) = tokio::join!(Cluster::start(settings), Network::start(), Receiver::start());
    let database = Database::create_on(&cluster.server()).await;
    let service = Service::start(&database, &network, &[]).await;
    let client = service.client();
    let body = json!({ "topic_pattern": "live.sent.*", "endpoint": receiver.url("/hook") });
    let token = client.service_token("chat");
    client
        .post("/api/v1/subscriptions", Some(&token), &body)
        .await
        .expect(201);
    let ledger = Ledger::default().route_type("/hook", "live.sent.x");
    for round in 0..3 {
        let sent = envelope("live").event_type("live.sent.x");
        ledger.note([&sent], &client.publish(&sent).await);
        let open = "SELECT count(*) FROM deliveries WHERE status <> 'delivered'";
        eventually("the result is recorded", SOON, async || {
            number(database.pool(), open).await == 0
        })
        .await;
        if round == 1 {
            let kept = envelope("live").event_type("live.kept.x");
            ledger.note([&kept], &client.publish(&kept).await);
        }
        cluster.kill();
        cluster.start_again().await;
        ledger.assert_stored_once(database.pool()).await;
        assert_eq!(
            number(database.pool(), open).await,
            0,
            "what was recorded stays recorded"
        );
        taken(client, &envelope("live")).await;
    }
    assert_eq!(receiver.calls().len(), 3, "nothing was sent a second time");
}
