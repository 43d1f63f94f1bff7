//! What only Valkey can do to its carrier: flush, restart, forbid, and hold strange entries.

use carriers::{Class, Health, Heard, Signal};
use redis::aio::MultiplexedConnection;
use redis::{Value, cmd};

use super::support::broker::NOTICED;
use super::support::process::{Process, unique};
use super::support::wait::{SOON, eventually};
use super::support::world::World;

const STREAM: &str = "ov:events:q:fabric.queue";
const CHANNEL: &str = "ov:events:ps:fabric.topic";

async fn world() -> (World, MultiplexedConnection) {
    let world = World::of("valkey-v1").await;
    let admin = admin(&world).await;
    (world, admin)
}

async fn admin(world: &World) -> MultiplexedConnection {
    let url = format!("redis://admin:admin@{}", world.broker().expect("its own").address());
    let client = redis::Client::open(url).expect("an address");
    client
        .get_multiplexed_async_connection()
        .await
        .expect("the broker answers")
}

async fn ask(connection: &mut MultiplexedConnection, words: &[&str]) -> Value {
    let mut command = cmd(words[0]);
    for word in &words[1..] {
        command.arg(*word);
    }
    command
        .query_async(connection)
        .await
        .unwrap_or_else(|error| panic!("{words:?}: {error}"))
}

async fn number(connection: &mut MultiplexedConnection, words: &[&str]) -> i64 {
    match ask(connection, words).await {
        Value::Int(number) => number,
        // XPENDING begins with its total.
        Value::Array(parts) => match parts.first() {
            Some(Value::Int(number)) => *number,
            first => panic!("{words:?}: {first:?}"),
        },
        other => panic!("{words:?}: {other:?}"),
    }
}

/// Nothing is left in the stream, and nothing in the name of anybody.
async fn emptied(admin: &mut MultiplexedConnection) {
    let mut admin = admin.clone();
    eventually("the stream is empty", SOON, async || {
        let left = number(&mut admin, &["XLEN", STREAM]).await;
        let pending = number(&mut admin, &["XPENDING", STREAM, "workers"]).await;
        if (left, pending) == (0, 0) {
            Ok(())
        } else {
            Err(format!("{left} entries, {pending} pending"))
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_have_the_documented_form_and_are_gone_once_handed_over() {
    let (world, mut admin) = world().await;
    let mut deaf = Process::open(world.descriptor, &world.variables);
    // Nobody takes what arrives, so nothing is acknowledged yet.
    let mut arrivals = deaf.run_unheard(8);
    world.connected(&deaf).await;
    let signal = unique(Class::Queue);
    deaf.send(Class::Queue, std::slice::from_ref(&signal))
        .await
        .expect("it is taken");
    let arrival = loop {
        let arrival = arrivals.next().await.expect("an arrival");
        if arrival.heard != Heard::Everything {
            break arrival;
        }
    };
    assert_eq!(arrival.heard, Heard::Signals(vec![signal.clone()]));
    assert_eq!(
        number(&mut admin, &["XPENDING", STREAM, "workers"]).await,
        1,
        "acknowledged before it was handled"
    );
    let entry = format!("{:?}", ask(&mut admin, &["XRANGE", STREAM, "-", "+"]).await);
    let subscription_id = signal.subscription_id.as_deref().expect("a delivery");
    for part in ["\"d\"", "\"a\"", "\"m\"", &signal.event_id, subscription_id] {
        let bytes = format!("{:?}", part.trim_matches('"'));
        assert!(entry.contains(bytes.trim_matches('"')), "{part} is missing in {entry}");
    }
    drop(arrival);
    emptied(&mut admin).await;
    deaf.stop().await;
    let members = ask(&mut admin, &["XINFO", "CONSUMERS", STREAM, "workers"]).await;
    assert_eq!(members, Value::Array(vec![]), "a process that stops leaves the group");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strange_entries_are_acknowledged_and_ignored_and_what_is_behind_them_arrives() {
    let (world, mut admin) = world().await;
    let one = world.process();
    world.connected(&one).await;
    let long = "x".repeat(10_000_000);
    let nested = format!("{{\"event_id\":{}", "[".repeat(10_000));
    let strange: &[&[&str]] = &[
        &["d", ""],
        &["d", "nonsense"],
        &["d", &long],
        &["d", &nested],
        &["x", "y"],
        &[&long, "y"],
        &["d", r#"{"event_id":7,"subscription_id":"s"}"#],
        &["d", r#"{"event_id":"a b","subscription_id":"s"}"#],
    ];
    for fields in strange {
        ask(&mut admin, &[&["XADD", STREAM, "*"], *fields].concat()).await;
    }
    let foreign = cmd("XADD")
        .arg(STREAM)
        .arg("*")
        .arg(b"\xff\xfe\x00".as_slice())
        .arg(b"\xc3\x28".as_slice())
        .to_owned();
    foreign
        .query_async::<()>(&mut admin)
        .await
        .expect("Valkey takes any bytes");
    // Ids that exist nowhere are plausible: only the database knows, so they are handed over.
    ask(
        &mut admin,
        &[
            "XADD",
            STREAM,
            "*",
            "d",
            r#"{"event_id":"evt_nowhere","subscription_id":"sub_nowhere"}"#,
        ],
    )
    .await;
    for message in [
        "",
        "nonsense",
        r#"{"from":"x","ids":"evt"}"#,
        r#"{"rows":[{"id":"evt_forged"}]}"#,
        &long,
    ] {
        ask(&mut admin, &["PUBLISH", CHANNEL, message]).await;
    }
    ask(
        &mut admin,
        &["PUBLISH", CHANNEL, r#"{"from":"x","ids":[1,"evt_only"]}"#],
    )
    .await;
    let real = unique(Class::Queue);
    one.send(Class::Queue, std::slice::from_ref(&real))
        .await
        .expect("it is taken");
    emptied(&mut admin).await;
    let signal = |event_id: &str, subscription_id: Option<&str>| Signal {
        event_id: event_id.into(),
        subscription_id: subscription_id.map(Into::into),
    };
    let mut wanted = vec![
        real,
        signal("evt_nowhere", Some("sub_nowhere")),
        signal("evt_only", None),
    ];
    wanted.sort();
    eventually("the real ones arrive", SOON, async || {
        let mut heard = one.signals();
        heard.sort();
        if heard == wanted {
            Ok(())
        } else {
            Err(format!("{heard:?}"))
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flushed_or_deleted_stream_is_made_again() {
    let (world, mut admin) = world().await;
    let (one, two) = world.pair().await;
    for removal in [
        &["FLUSHALL"][..],
        &["DEL", STREAM],
        &["XGROUP", "DESTROY", STREAM, "workers"],
    ] {
        ask(&mut admin, removal).await;
        one.reaches_any(&[&one, &two], Class::Queue).await;
        assert_eq!(one.carrier.health(), Health::Up, "after {removal:?}");
    }
    emptied(&mut admin).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_of_another_kind_is_survived() {
    let (world, mut admin) = world().await;
    let one = world.process();
    world.connected(&one).await;
    ask(&mut admin, &["DEL", STREAM]).await;
    ask(&mut admin, &["SET", STREAM, "no stream"]).await;
    eventually("signals fail", SOON, async || {
        one.send(Class::Queue, &[unique(Class::Queue)]).await.is_err()
    })
    .await;
    ask(&mut admin, &["DEL", STREAM]).await;
    world.connected(&one).await;
    one.reaches_any(&[&one], Class::Queue).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_and_a_stalled_server_are_named_and_come_back() {
    let (world, _) = world().await;
    let broker = world.broker().expect("its own");
    let (one, two) = world.pair().await;
    broker.kill();
    one.stands(Health::not_connected("valkey-v1"), NOTICED).await;
    broker.revive().await;
    world.connected(&one).await;
    one.reaches_any(&[&one, &two], Class::Queue).await;
    broker.stall();
    one.stands(Health::not_connected("valkey-v1"), NOTICED).await;
    broker.resume();
    world.connected(&one).await;
    one.reaches_any(&[&one, &two], Class::Queue).await;
    world.connected(&two).await;
    one.reaches_any(&[&two], Class::Topic).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_forbidden_is_named_and_used_again_when_it_is_allowed() {
    let (world, mut admin) = world().await;
    let one = world.process();
    world.connected(&one).await;
    let denied = Health::permission_denied("valkey-v1");
    for (right, class) in [("xadd", Class::Queue), ("publish", Class::Topic)] {
        ask(&mut admin, &["ACL", "SETUSER", "events", &format!("-{right}")]).await;
        let refused = one.send(class, &[unique(class)]).await;
        assert_eq!(refused, Err(carriers::SignalError::Denied), "without {right}");
        assert_eq!(one.carrier.health(), denied, "at once, without {right}");
        // One that starts now is told so too.
        let two = world.process();
        two.stands(denied.clone(), NOTICED).await;
        ask(&mut admin, &["ACL", "SETUSER", "events", &format!("+{right}")]).await;
        world.connected(&one).await;
        world.connected(&two).await;
    }
    for right in ["xreadgroup", "subscribe", "xack"] {
        ask(&mut admin, &["ACL", "SETUSER", "events", &format!("-{right}")]).await;
        let two = world.process();
        if right == "xack" {
            two.send(Class::Queue, &[unique(Class::Queue)]).await.ok();
            eventually("it reads", SOON, async || {
                two.send(Class::Queue, &[unique(Class::Queue)]).await.ok();
                two.carrier.health() == denied
            })
            .await;
        }
        two.stands(denied.clone(), NOTICED).await;
        ask(&mut admin, &["ACL", "SETUSER", "events", &format!("+{right}")]).await;
        two.stands(Health::Up, SOON).await;
    }
    ask(&mut admin, &["ACL", "SETUSER", "events", "off"]).await;
    world.process().stands(denied, NOTICED).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_dead_process_took_is_reclaimed() {
    let (world, mut admin) = world().await;
    ask(&mut admin, &["XGROUP", "CREATE", STREAM, "workers", "0", "MKSTREAM"]).await;
    let mut left = Vec::new();
    for n in 0..250 {
        let signal = unique(Class::Queue);
        let message = serde_json::to_string(&signal).expect("JSON");
        let id = ask(&mut admin, &["XADD", STREAM, "*", "d", &message]).await;
        let Value::BulkString(id) = id else { panic!("an id") };
        let id = String::from_utf8(id).expect("text");
        ask(
            &mut admin,
            &[
                "XREADGROUP",
                "GROUP",
                "workers",
                "ghost",
                "COUNT",
                "1",
                "STREAMS",
                STREAM,
                ">",
            ],
        )
        .await;
        // The last one was taken just now and is still the ghost's.
        if n < 249 {
            ask(
                &mut admin,
                &["XCLAIM", STREAM, "workers", "ghost", "0", &id, "IDLE", "120000"],
            )
            .await;
            left.push(signal);
        }
    }
    let one = world.process();
    world.connected(&one).await;
    eventually("what was left arrives", SOON, async || {
        one.signals().len() >= left.len()
    })
    .await;
    let mut heard = one.signals();
    heard.sort();
    left.sort();
    assert_eq!(heard, left, "all that was idle, and nothing that was not");
    assert_eq!(number(&mut admin, &["XPENDING", STREAM, "workers"]).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_nobody_reads_stays_bounded() {
    let (world, mut admin) = world().await;
    let mut one = Process::publisher(world.descriptor, &world.variables);
    world.connected(&one).await;
    let more = 130_000;
    let mut sent = 0;
    while sent < more {
        let batch: Vec<_> = (0..5000).map(|_| unique(Class::Queue)).collect();
        one.send(Class::Queue, &batch).await.expect("Valkey takes it");
        sent += batch.len();
    }
    let length = number(&mut admin, &["XLEN", STREAM]).await;
    assert!(
        (100_000..102_000).contains(&length),
        "{length} of {more} entries are kept"
    );
    one.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_asked_of_the_server_but_what_its_user_may() {
    let (world, mut admin) = world().await;
    let (mut one, two) = world.pair().await;
    one.reaches_any(&[&one, &two], Class::Queue).await;
    one.reaches_any(&[&two], Class::Topic).await;
    one.carrier.probe().await.expect("an answer");
    one.stop().await;
    let refused = ask(&mut admin, &["ACL", "LOG"]).await;
    assert_eq!(refused, Value::Array(vec![]), "commands that were refused");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_shipped_rights_are_enough_for_another_database() {
    let mut world = World::of("valkey-v1").await;
    let url = world.variables.get_mut("VALKEY_URL").expect("its address");
    *url = format!("{}/1", url.trim_end_matches('/'));
    let (mut one, mut two) = world.pair().await;
    let signal = unique(Class::Queue);
    one.send(Class::Queue, std::slice::from_ref(&signal))
        .await
        .expect("it is taken");
    eventually("it arrives", SOON, async || {
        one.signals().contains(&signal) || two.signals().contains(&signal)
    })
    .await;
    one.stop().await;
    two.stop().await;
}
