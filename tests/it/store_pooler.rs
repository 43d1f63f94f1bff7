//! Behind a transaction pooler: statements have no names and each stands in a transaction.
//!
//! The pooler here is a small one of the test's own with one server connection: it hands that to one client per
//! transaction, as PgBouncer does in transaction mode, and notes everything that PgBouncer would only forgive by luck.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use futures_util::future::join_all;
use openvibe_events::{
    domain::{app::Holder, cursor::Cursor, topic::TopicPattern},
    store::{self, Addresses, DeliveryFilter, LoopKey, ReplaySelection, SharedStore, Store, Switch},
};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    store_fixture::{
        Door, FloorAlone, assert_counts, candidate, claim, dead, delivered, event, events_of, pull, put, request,
        settle_all, subscribe,
    },
    support::{
        database::Database,
        envelopes::envelope,
        wait::{SOON, eventually, within},
    },
};

const SSL_REQUEST: i32 = 80_877_103;
const GSS_REQUEST: i32 = 80_877_104;

/// One end of a connection, read message by message; giving up on a read loses nothing.
struct Wire {
    stream: TcpStream,
    buffer: BytesMut,
}

impl Wire {
    fn new(stream: TcpStream) -> Self {
        stream.set_nodelay(true).expect("a socket option");
        Self {
            stream,
            buffer: BytesMut::new(),
        }
    }

    /// The next message, whole; `head` is the number of bytes before its length (none in a start-up message).
    async fn next(&mut self, head: usize) -> io::Result<Bytes> {
        loop {
            if let Some(mut length) = self.buffer.get(head..head + 4) {
                let whole = head + usize::try_from(length.get_i32()).expect("a length");
                if self.buffer.len() >= whole {
                    return Ok(self.buffer.split_to(whole).freeze());
                }
            }
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    async fn send(&mut self, message: &[u8]) -> io::Result<()> {
        self.stream.write_all(message).await
    }
}

/// The one server connection, and what it said when it was ready.
struct Server {
    wire: Wire,
    greeting: Vec<u8>,
}

#[derive(Default)]
struct Notes {
    faults: Mutex<Vec<String>>,
    clients: AtomicU64,
    transactions: AtomicU64,
}

struct Pooler {
    address: SocketAddr,
    notes: Arc<Notes>,
    _task: AbortOnDropHandle<()>,
}

impl Pooler {
    async fn start(upstream: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free loopback port");
        let address = listener.local_addr().expect("a bound port");
        let notes = Arc::new(Notes::default());
        let server = Arc::new(tokio::sync::Mutex::new(None));
        let shared = Arc::clone(&notes);
        let task = tokio::spawn(async move {
            let mut clients = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                shared.clients.fetch_add(1, Relaxed);
                let (server, notes, upstream) = (Arc::clone(&server), Arc::clone(&shared), upstream.clone());
                clients.spawn(async move {
                    // A client that goes away ends its task.
                    let _ = serve(Wire::new(stream), &server, &notes, &upstream).await;
                });
            }
        });
        Self {
            address,
            notes,
            _task: AbortOnDropHandle::new(task),
        }
    }
}

async fn serve(
    mut client: Wire,
    server: &tokio::sync::Mutex<Option<Server>>,
    notes: &Notes,
    upstream: &str,
) -> io::Result<()> {
    let startup = loop {
        let message = client.next(0).await?;
        match (&message[4..]).get_i32() {
            SSL_REQUEST | GSS_REQUEST => client.send(b"N").await?,
            _ => break message,
        }
    };
    {
        let mut server = server.lock().await;
        match &*server {
            Some(known) => client.send(&known.greeting).await?,
            None => *server = Some(log_in(&mut client, &startup, upstream).await?),
        }
    }
    loop {
        let first = client.next(1).await?;
        if first[0] == b'X' {
            return Ok(());
        }
        let mut server = server.lock().await;
        let wire = &mut server.as_mut().expect("a client logged in").wire;
        notes.transactions.fetch_add(1, Relaxed);
        let (mut status, mut answers_due, mut unsynced) = (b'I', 0, false);
        let mut sent = Some(first);
        loop {
            if let Some(message) = sent.take() {
                note(&message, status, notes);
                answers_due += i32::from(matches!(message[0], b'S' | b'Q'));
                unsynced = !matches!(message[0], b'S' | b'Q');
                wire.send(&message).await?;
            }
            tokio::select! {
                message = client.next(1) => sent = Some(message?),
                message = wire.next(1) => {
                    let message = message?;
                    client.send(&message).await?;
                    if message[0] == b'Z' {
                        status = message[5];
                        answers_due -= 1;
                        if status == b'I' && answers_due == 0 && !unsynced {
                            break;
                        }
                    }
                }
            }
        }
    }
}

/// Lets the first client log in for all.
async fn log_in(client: &mut Wire, startup: &[u8], upstream: &str) -> io::Result<Server> {
    let mut wire = Wire::new(TcpStream::connect(upstream).await?);
    wire.send(startup).await?;
    let mut greeting = Vec::new();
    loop {
        let message = wire.next(1).await?;
        client.send(&message).await?;
        let authentication = (message[0] == b'R').then(|| (&message[5..]).get_i32());
        match authentication {
            Some(0) => greeting.extend_from_slice(&message),
            Some(12) => {}
            Some(_) => {
                let reply = client.next(1).await?;
                wire.send(&reply).await?;
            }
            None if !greeting.is_empty() => greeting.extend_from_slice(&message),
            None => {}
        }
        if message[0] == b'Z' {
            return Ok(Server { wire, greeting });
        }
    }
}

/// Notes what would meet another client's state: names, and statements outside a transaction.
fn note(message: &[u8], status: u8, notes: &Notes) {
    let texts: Vec<String> = message[5..]
        .split(|byte| *byte == 0)
        .map(|text| String::from_utf8_lossy(text).into_owned())
        .collect();
    let fault = match message[0] {
        b'P' if !texts[0].is_empty() => Some(format!("statement {} has a name: {}", texts[0], texts[1])),
        b'P' if status != b'T' => Some(format!("outside a transaction: {}", texts[1])),
        b'B' if !texts[1].is_empty() => Some(format!("a run of the named statement {}", texts[1])),
        // One without words only asks where the connection stands.
        b'Q' if status == b'I' && !texts[0].is_empty() && !texts[0].starts_with("BEGIN") => {
            Some(format!("outside a transaction: {}", texts[0]))
        }
        _ => None,
    };
    notes.faults.lock().extend(fault);
}

async fn behind(pooler: &Pooler, database: &Database) -> SharedStore {
    let addresses = Addresses::parse(&database.url_through(pooler.address), database.url()).expect("two URLs");
    assert!(addresses.behind_pooler);
    store::migrate(&addresses).await.expect("migrations past the pooler");
    Arc::new(Store::connect(addresses).await.expect("a store behind the pooler"))
}

/// Every function of the store once, in an order that gives each something to do.
async fn everything(store: &SharedStore, name: &str) {
    store.ping().await.expect("a ping");
    let id = subscribe(store, name, "live.*", 64).await;
    let holder = Holder::service(name);
    assert!(store.subscription_exists(&id).await.expect("a look"));
    assert_eq!(store.subscriptions(&holder).await.expect("a list").len(), 1);
    assert!(store.subscription(&holder, &id).await.expect("a look").is_some());
    for switch in [Switch::Off, Switch::On] {
        store
            .set_enabled(&holder, &id, switch, 0)
            .await
            .expect("a switch")
            .expect("a subscription");
    }
    store
        .rotate_secret(&holder, &id, "whsec_new", 1_000)
        .await
        .expect("a rotation")
        .expect("a subscription");

    let mut heartbeat = store.heartbeat().await.expect("a heartbeat");
    let version = heartbeat
        .renew(name)
        .await
        .expect("a renewal")
        .expect("an owner that lives");
    store.refresh_view(version).await.expect("a view");

    let events = events_of("live.a.b", 6);
    put(store, Some(&id), &events, Some(name)).await.expect("a group");
    let known = [events[0].event_id.as_str()];
    let mut group = store.open_group(&known).await.expect("a group");
    assert!(group.known.contains_key(known[0]));
    let key = LoopKey {
        trace_id: events[0].trace_id.clone(),
        source: "live".to_owned(),
        event_type: "live.a.b".to_owned(),
        subject_type: "thing".to_owned(),
        subject_id: "1".to_owned(),
        project: None,
    };
    assert!(group.loops(&[&key], 8).await.expect("loops")[&key].repeats > 0);
    drop(group);
    let door = Door::open(store);
    door.publish(request("live", envelope("live").json()))
        .await
        .expect("a publish");

    assert_eq!(
        store.due(&[candidate(&id)]).await.expect("what is due"),
        std::slice::from_ref(&id)
    );
    // The other process may hold the pooler's only connection, but never this subscription.
    let pass = claim(store, name, &[&id]).await;
    assert!(!pass.claimed.is_empty());
    settle_all(store, name, &pass, &dead()).await;
    store.release_lost(None).await.expect("a release");
    let selection = ReplaySelection::Events(vec![events[0].event_id.to_string()]);
    let replayed = store
        .replay(&id, &selection, &FloorAlone)
        .await
        .expect("a replay")
        .expect("a subscription");
    assert_eq!(replayed.queued, 1);
    settle_all(store, name, &claim(store, name, &[&id]).await, &delivered()).await;
    for (status, subscription_id) in [
        (None, None),
        (Some("dead"), None),
        (Some("pending"), Some(id.to_string())),
    ] {
        let filter = DeliveryFilter {
            status: status.map(str::to_owned),
            subscription_id,
            after: (0, String::new()),
            limit: 10,
        };
        store.deliveries(&filter).await.expect("a list");
    }
    store.fold_counts().await.expect("a fold");

    assert!(store.event(&events[0].event_id, None).await.expect("a look").is_some());
    assert!(pull(store, None, "live.*", 10).await.events.len() > 1);
    assert!(pull(store, None, "live.a.b", 10).await.events.len() > 1);
    assert!(store.positions().await.expect("the bounds").head > 0);
    let topic = TopicPattern::parse("live.*").expect("a pattern");
    let cursor = Cursor { epoch: 0, position: 1 };
    store
        .set_checkpoint(&holder, &topic, cursor, None)
        .await
        .expect("a checkpoint");
    let kept = store
        .checkpoint(&holder, &topic)
        .await
        .expect("a look")
        .expect("a checkpoint");
    assert_eq!(kept.cursor, cursor);
    heartbeat.end(name).await.expect("a goodbye");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_function_of_the_store_works_through_a_pooler_with_one_server_connection() {
    let database = Database::create().await;
    let pooler = Pooler::start(database.server()).await;
    let stores = [behind(&pooler, &database).await, behind(&pooler, &database).await];
    let names = ["chat", "network", "billing", "wiki"];
    let work = names
        .iter()
        .enumerate()
        .map(|(n, name)| everything(&stores[n % 2], name));
    within("the work of four clients", Duration::from_secs(60), join_all(work)).await;
    assert_counts(&stores[0], database.pool()).await;
    assert_eq!(*pooler.notes.faults.lock(), Vec::<String>::new());
    let (clients, transactions) = (
        pooler.notes.clients.load(Relaxed),
        pooler.notes.transactions.load(Relaxed),
    );
    assert!(
        clients > 2 && transactions > 100,
        "{clients} clients, {transactions} transactions"
    );
}

#[tokio::test]
async fn a_store_that_was_told_of_no_pooler_names_its_statements() {
    let database = Database::create().await;
    let pooler = Pooler::start(database.server()).await;
    let through = database.url_through(pooler.address);
    let addresses = Addresses::parse(&through, &through).expect("a URL");
    let store = Store::connect(addresses).await.expect("a store");
    eventually("the pooler notices a name", SOON, async || {
        // A second connection of the store meets the names of the first and fails, which is what the rule prevents.
        let _ = put(&store, None, &[event()], None).await;
        pooler
            .notes
            .faults
            .lock()
            .iter()
            .any(|fault| fault.contains("has a name"))
    })
    .await;
}
