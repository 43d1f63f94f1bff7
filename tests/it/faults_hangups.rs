//! Callers that give up while a transaction of theirs is being opened: nobody else may find it still open.

use std::{sync::Arc, time::Duration};

use futures_util::future::{BoxFuture, join_all};
use openvibe_events::{
    domain::{app::Holder, cursor::Cursor, ids::SubscriptionId, topic::TopicPattern},
    store::{Addresses, SharedStore, Store},
};

use crate::{
    store_fixture::number,
    support::{
        database::Database,
        proxy::Proxy,
        wait::{SOON, eventually},
    },
};

/// How long a transaction that nobody wants may stay open. The server itself ends one after two seconds at the earliest.
const FREE_AGAIN: Duration = Duration::from_millis(1_500);
const OPEN: &str = "FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'";

/// What opens a transaction.
type Work = fn(SharedStore) -> BoxFuture<'static, ()>;

/// Some of each kind that opens one in any case.
const ALWAYS: [(&str, Work); 3] = [
    ("a group", |store| {
        Box::pin(async move { drop(store.open_group(&[]).await) })
    }),
    ("a recovery", |store| {
        Box::pin(async move { drop(store.release_lost(None).await) })
    }),
    ("a checkpoint", |store| {
        Box::pin(async move {
            let topic = TopicPattern::parse("live.*").expect("a pattern");
            let cursor = Cursor { epoch: 0, position: 1 };
            drop(
                store
                    .set_checkpoint(&Holder::service("chat"), &topic, cursor, None)
                    .await,
            );
        })
    }),
];
/// Some of each kind that opens one behind a pooler.
const POOLED: [(&str, Work); 4] = [
    ("a ping", |store| Box::pin(async move { drop(store.ping().await) })),
    ("a look", |store| Box::pin(async move { drop(store.due(&[]).await) })),
    ("a list", |store| {
        Box::pin(async move { drop(store.subscriptions(&Holder::service("chat")).await) })
    }),
    ("a search", |store| {
        Box::pin(async move { drop(store.subscription_exists(&SubscriptionId::generate()).await) })
    }),
];

async fn nothing_open(database: &Database, of: &str, deadline: Duration) {
    eventually(&format!("nothing of {of} is open"), deadline, async || {
        number(database.pool(), &format!("SELECT count(*) {OPEN}")).await == 0
    })
    .await;
}

async fn give_up(pooled: bool, work: &[(&str, Work)]) {
    let database = Database::create().await;
    let proxy = Proxy::start(&database.server()).await;
    let through = database.url_through(proxy.address());
    let direct = if pooled { database.url() } else { &through };
    let addresses = Addresses::parse(&through, direct).expect("two URLs");
    assert_eq!(addresses.behind_pooler, pooled);
    let store = Arc::new(Store::connect(addresses).await.expect("a store"));
    for (what, work) in work {
        // So many at once that a connection waits for the one that is given up.
        join_all((0..4).map(|_| work(Arc::clone(&store)))).await;
        nothing_open(&database, "what went before", SOON).await;
        let mut tries = 0..10;
        let (caller, session) = loop {
            assert!(tries.next().is_some(), "{what} never opened a transaction");
            proxy.hold_answers();
            let caller = tokio::spawn(work(Arc::clone(&store)));
            // A connection that has rested is asked first whether it lives; without an answer it is given up.
            let session = eventually("it is open and nobody knows, or given up", SOON, async || {
                let session = number(database.pool(), &format!("SELECT coalesce(max(pid), 0)::bigint {OPEN}")).await;
                (session > 0 || caller.is_finished()).then_some(session)
            })
            .await;
            if session > 0 {
                break (caller, session);
            }
            proxy.restore();
        };
        caller.abort();
        assert!(
            caller.await.is_err_and(|error| error.is_cancelled()),
            "{what} was still waiting"
        );
        proxy.restore();
        nothing_open(&database, what, FREE_AGAIN).await;
        let lives = format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {session}");
        assert_eq!(number(database.pool(), &lives).await, 1, "{what} cost its connection");
    }
}

#[tokio::test]
async fn a_transaction_whose_opening_was_given_up_is_ended_at_once_behind_a_pooler() {
    give_up(true, &[&ALWAYS[..], &POOLED].concat()).await;
}

#[tokio::test]
async fn a_transaction_whose_opening_was_given_up_is_ended_at_once_without_a_pooler() {
    give_up(false, &ALWAYS).await;
}
