//! What wakes a stream that looks at another process's events: the doorbell, brokers, and nothing at all. Signals carry
//! no event, so one that is lost, forged or repeated changes when a stream looks and never what it is given.

use std::time::{Duration, Instant};

use crate::{
    fabric_world::{BACK, median, selects, speak, switch, topic, url},
    store_fixture::sql,
    support::{
        broker::{Broker, PASSWORD},
        client::Client,
        database::Database,
        envelopes::{Envelope, envelope, id},
        network::{Network, TokenSpec},
        proxy::Proxy,
        service::Service,
        sse::{Frame, Sse, after, ask},
        wait::{SOON, within},
    },
};

const TYPE: &str = "live.woken.up";
const TOPICS: &str = "topics=live.woken.*";
/// How often the log is looked at whatever rings, and what a busy machine adds.
const FLOOR: Duration = Duration::from_millis(1000 + 700);
/// Well before the floor.
const RUNG: Duration = Duration::from_millis(150);

/// Two processes: one that publishes, and one whose streams are looked at.
struct Two {
    from: Service,
    to: Service,
    _network: Network,
    database: Database,
}

impl Two {
    async fn start(from: &[(&str, &str)], to: &[(&str, &str)]) -> Self {
        let (database, network) = tokio::join!(Database::create(), Network::start());
        let (from, to) = tokio::join!(
            Service::start(&database, &network, from),
            Service::start(&database, &network, to)
        );
        topic(from.client(), TYPE).await;
        Self {
            from,
            to,
            _network: network,
            database,
        }
    }

    /// Both with the same variables.
    async fn alike(env: &[(&str, &str)]) -> Self {
        Self::start(env, env).await
    }

    fn client(&self) -> &Client {
        self.from.client()
    }

    async fn stream(&self) -> Sse {
        Sse::of(self.to.client(), TOPICS, None).await
    }

    /// How long an event takes from its acknowledgement to the stream of the other process.
    async fn crossing(&self, stream: &mut Sse) -> Duration {
        let event = public();
        self.client().publish(&event).await.expect(201);
        let began = Instant::now();
        assert_eq!(stream.event_id().await, event.id());
        began.elapsed()
    }

    async fn crossings(&self, stream: &mut Sse, count: usize) -> Vec<Duration> {
        let mut took = Vec::new();
        for _ in 0..count {
            took.push(self.crossing(stream).await);
        }
        took
    }
}

fn public() -> Envelope {
    envelope("live").event_type(TYPE).visibility("public")
}

#[tokio::test(flavor = "multi_thread")]
async fn without_any_signal_events_of_another_process_come_within_a_second() {
    let broker = Broker::nats().await;
    let broker_url = url("nats", broker.address());
    // What the one says the other does not hear: it knows no broker, and the doorbell is not rung.
    let two = Two::start(&[("NATS_URL", &broker_url)], &[]).await;
    selects(two.client(), TYPE, "nats-v1", SOON).await;
    let mut stream = two.stream().await;
    let took = two.crossings(&mut stream, 5).await;
    println!("without a signal: {took:?}");
    assert!(took.iter().all(|took| *took < FLOOR), "{took:?}");
    assert!(median(took) > RUNG, "something rang");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doorbell_and_every_broker_bring_them_well_before() {
    let (nats, valkey) = tokio::join!(Broker::nats(), Broker::valkey());
    let (nats_url, valkey_url) = (url("nats", nats.address()), url("redis", valkey.address()));
    for (carrier, env) in [
        ("pg-v1", vec![]),
        ("nats-v1", vec![("NATS_URL", nats_url.as_str())]),
        ("valkey-v1", vec![("VALKEY_URL", valkey_url.as_str())]),
    ] {
        let two = Two::alike(&env).await;
        selects(two.client(), TYPE, carrier, SOON).await;
        selects(two.to.client(), TYPE, carrier, SOON).await;
        let mut stream = two.stream().await;
        let median = median(two.crossings(&mut stream, 20).await);
        println!("{carrier}: median from the answer to the other process's stream: {median:?}");
        assert!(median < RUNG, "{carrier}: {median:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_crosses_is_seen_by_those_who_may() {
    let two = Two::alike(&[]).await;
    let (alice, bob) = (id("usr"), id("usr"));
    let token = |person: &str| TokenSpec::person(person).sign();
    let on = two.to.client();
    let mut service = Sse::of(on, TOPICS, Some(&TokenSpec::service("reader").sign())).await;
    let mut hers = Sse::of(on, TOPICS, Some(&token(&alice))).await;
    let mut his = Sse::of(on, "topics=*", Some(&token(&bob))).await;
    let mut anyones = Sse::of(on, "topics=*", None).await;
    let internal = envelope("live").event_type(TYPE);
    let about_her = internal
        .clone()
        .with_id(&id("evt"))
        .visibility("subject")
        .subject("user", &alice);
    let last = public();
    for event in [&internal, &about_her, &last] {
        two.client().publish(event).await.expect(201);
    }
    for (stream, expected) in [
        (&mut service, vec![&internal, &about_her, &last]),
        (&mut hers, vec![&about_her, &last]),
        (&mut his, vec![&last]),
        (&mut anyones, vec![&last]),
    ] {
        for event in expected {
            assert_eq!(stream.event_id().await, event.id(), "{}", stream.viewer);
        }
    }
    // It is stored before it is seen.
    let path = format!("/api/v1/events/{}", last.id());
    on.get(&path, Some(&TokenSpec::service("reader").sign()))
        .await
        .expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn forged_and_repeated_signals_bring_nothing_twice_and_nothing_that_is_not_stored() {
    let broker = Broker::nats().await;
    let broker_url = url("nats", broker.address());
    let two = Two::alike(&[("NATS_URL", &broker_url)]).await;
    for service in [&two.from, &two.to] {
        selects(service.client(), TYPE, "nats-v1", SOON).await;
    }
    let mut stream = two.stream().await;
    two.crossing(&mut stream).await;
    let stored = public();
    two.client().publish(&stored).await.expect(201);
    assert_eq!(stream.event_id().await, stored.id());

    let announced = |id: &str| format!(r#"{{"from":"x","ids":["{id}"]}}"#);
    let whole = format!(r#"{{"event":{},"seq":999999}}"#, public().json());
    let mut forged = vec![
        announced(stored.id()),
        announced(&id("evt")),
        announced("x"),
        whole,
        "{".to_owned(),
    ];
    forged.extend(std::iter::repeat_n(announced(stored.id()), 500));
    let mut bytes =
        format!("CONNECT {{\"user\":\"events\",\"pass\":\"{PASSWORD}\",\"verbose\":false,\"pedantic\":false}}\r\n");
    for message in &forged {
        bytes += &format!("PUB ov.events.fabric.topic {}\r\n{message}\r\n", message.len());
    }
    bytes += "PING\r\n";
    speak(&broker, bytes.as_bytes(), "PONG").await;
    for _ in 0..5 {
        // The very next thing that comes is the next event.
        two.crossing(&mut stream).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_is_cut_off_from_its_broker_misses_nothing() {
    let broker = Broker::nats().await;
    let line = Proxy::start(&broker.address()).await;
    let (own, other) = (url("nats", line.address()), url("nats", broker.address()));
    let two = Two::start(&[("NATS_URL", &own)], &[("NATS_URL", &other)]).await;
    selects(two.client(), TYPE, "nats-v1", SOON).await;
    let mut far = two.stream().await;
    let mut near = Sse::of(two.client(), TOPICS, None).await;
    line.cut();
    selects(two.client(), TYPE, "pg-v1", SOON).await;
    let took = two.crossing(&mut far).await;
    near.event().await;
    assert!(took < FLOOR, "{took:?}");
    line.restore();
    selects(two.client(), TYPE, "nats-v1", BACK).await;
    two.crossing(&mut far).await;
    near.event().await;

    // Switched off in both, by one of them, it carries nothing; streams do not mind.
    switch(two.client(), "nats-v1", true).await.expect(200);
    selects(two.to.client(), TYPE, "pg-v1", SOON).await;
    two.crossing(&mut far).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_swallows_signals_costs_a_second_at_most() {
    let broker = Broker::nats().await;
    let line = Proxy::start(&broker.address()).await;
    let (own, other) = (url("nats", broker.address()), url("nats", line.address()));
    let two = Two::start(&[("NATS_URL", &own)], &[("NATS_URL", &other)]).await;
    for service in [&two.from, &two.to] {
        selects(service.client(), TYPE, "nats-v1", SOON).await;
    }
    let mut stream = two.stream().await;
    two.crossing(&mut stream).await;
    line.stall();
    let (lost, again) = (public(), public());
    for event in [&lost, &again] {
        two.client().publish(event).await.expect(201);
    }
    let began = Instant::now();
    let first = within("what was not announced", FLOOR, stream.word()).await;
    let Some(Frame::Event(cursor, envelope)) = first else {
        panic!("{first:?}");
    };
    assert_eq!(envelope["event_id"], lost.id());
    assert_eq!(stream.event_id().await, again.id());
    println!("swallowed signals: {:?}", began.elapsed());
    // A resume from there has the rest, too.
    let resumed = after(ask(two.to.client(), TOPICS, None), Some(&cursor));
    let mut resumed = Sse::open(resumed).await.expect("a stream");
    assert_eq!(resumed.event_id().await, again.id());
    line.restore();
}

#[tokio::test(flavor = "multi_thread")]
async fn who_comes_first_after_a_busy_time_need_not_wait_for_it_to_be_read() {
    let two = Two::alike(&[]).await;
    two.client().publish(&public()).await.expect(201);
    // A long log, and word of more all the time, while nobody looks.
    let copies = "INSERT INTO events SELECT (copy).* FROM (
                      SELECT jsonb_populate_record(e, jsonb_build_object('id', 'evt_' || lpad(n::text, 26, '0'),
                                                                         'seq', e.seq + n)) AS copy
                      FROM events e, generate_series(1, 40000) n) copies";
    let pool = two.database.pool();
    sql(
        pool,
        &format!("{copies}; SELECT setval('event_positions', (SELECT max(seq) FROM events))"),
    )
    .await;
    let busy = Instant::now();
    let mut took = Duration::ZERO;
    let mut tick = tokio::time::interval(Duration::from_millis(100));
    while busy.elapsed() < Duration::from_secs(3) {
        tick.tick().await;
        two.client().publish(&public()).await.expect(201);
    }
    for on in [&two.from, &two.to] {
        let mut stream = Sse::of(on.client(), TOPICS, None).await;
        took = took.max(two.crossing(&mut stream).await);
    }
    println!("the first event after a busy time: {took:?}");
    assert!(took < Duration::from_millis(1000), "{took:?}");
}
