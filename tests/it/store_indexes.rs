//! Indexes that are built beside the running service: by one process at a time, and whole in the end whatever cuts a build.

use openvibe_events::store::{self, Addresses, IndexBuild, IndexBuilds, LaterIndex, SharedStore};
use sqlx::{Connection, PgConnection};
use tokio::task::JoinHandle;

use crate::{
    store_fixture::{Fixture, event, put},
    support::wait::{SOON, eventually, within},
};

const INDEX: LaterIndex = LaterIndex {
    name: "deliveries_later",
    create: "CREATE INDEX CONCURRENTLY deliveries_later ON deliveries (updated_at) WHERE status = 'dead'",
};
const OTHER: LaterIndex = LaterIndex {
    name: "events_later",
    create: "CREATE INDEX CONCURRENTLY events_later ON events (received_at)",
};

/// A connection that holds a snapshot, as a backup does: a concurrent build waits for it.
async fn backup(fixture: &Fixture) -> PgConnection {
    let mut connection = PgConnection::connect(fixture.url()).await.expect("a connection");
    sqlx::raw_sql(
        "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM events; SELECT count(*) FROM deliveries",
    )
    .execute(&mut connection)
    .await
    .expect("a snapshot");
    connection
}

fn building(store: &SharedStore) -> JoinHandle<Result<IndexBuild, store::StoreError>> {
    let store = SharedStore::clone(store);
    tokio::spawn(async move { store.build_index(&INDEX).await })
}

/// Whether an index is whole; `None` where there is none.
async fn whole(fixture: &Fixture, index: &LaterIndex) -> Option<bool> {
    sqlx::query_scalar("SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass($1)")
        .bind(index.name)
        .fetch_optional(fixture.pool())
        .await
        .expect("the catalogue")
}

/// The server process that builds, once it waits for the snapshot.
async fn builder(fixture: &Fixture) -> i32 {
    eventually("a build waits for the snapshot", SOON, async || {
        let waiting = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND state = 'active' \
                       AND query LIKE 'CREATE INDEX CONCURRENTLY%' AND wait_event_type = 'Lock'";
        let found: Option<i32> = sqlx::query_scalar(waiting)
            .fetch_optional(fixture.pool())
            .await
            .expect("the activity");
        found.ok_or("nobody builds")
    })
    .await
}

#[tokio::test]
async fn what_is_missing_is_built_once_and_what_is_there_is_left() {
    let fixture = Fixture::new().await;
    let builds = IndexBuilds::of(&[INDEX, OTHER]);
    assert_eq!(builds.read().missing, [INDEX.name, OTHER.name]);
    within(
        "both are built",
        SOON,
        fixture.store.build_indexes(&[INDEX, OTHER], &builds),
    )
    .await;
    assert_eq!((builds.read().missing.len(), builds.read().error), (0, None));
    for index in [INDEX, OTHER] {
        assert_eq!(whole(&fixture, &index).await, Some(true), "{}", index.name);
    }
    let made = "SELECT to_regclass('deliveries_later')::oid::bigint";
    let before = fixture.number(made).await;
    let again = fixture.another().await.build_index(&INDEX).await;
    assert_eq!(again.expect("nothing to do"), IndexBuild::Done);
    assert_eq!(fixture.number(made).await, before, "the same index");
}

#[tokio::test]
async fn a_build_that_was_cut_leaves_an_index_that_the_next_one_builds_anew() {
    let fixture = Fixture::new().await;
    let backup = backup(&fixture).await;
    let cut = building(&fixture.store);
    let pid = builder(&fixture).await;
    fixture.sql(&format!("SELECT pg_terminate_backend({pid})")).await;
    let ended = within("the build ends", SOON, cut).await.expect("no panic");
    assert!(ended.is_err(), "{ended:?}");
    assert_eq!(whole(&fixture, &INDEX).await, Some(false), "what a cut leaves behind");
    drop(backup);
    let again = within("the next build", SOON, fixture.store.build_index(&INDEX)).await;
    assert_eq!(again.expect("a build"), IndexBuild::Done);
    assert_eq!(whole(&fixture, &INDEX).await, Some(true));
}

#[tokio::test]
async fn while_one_process_builds_others_start_publish_and_wait_their_turn() {
    let fixture = Fixture::new().await;
    let id = fixture.subscription(1).await;
    let backup = backup(&fixture).await;
    let first = building(&fixture.store);
    builder(&fixture).await;
    let other = fixture.another().await;
    let refused = within("an answer", SOON, other.build_index(&OTHER))
        .await
        .expect("an answer");
    assert_eq!(refused, IndexBuild::Elsewhere, "one build at a time, whatever index");
    let addresses = Addresses::parse(fixture.url(), fixture.url()).expect("the URL of a test database");
    within("a start migrates", SOON, store::migrate(&addresses))
        .await
        .expect("nothing to migrate");
    let event = event();
    let stored = put(&other, Some(&id), std::slice::from_ref(&event), None);
    within("an event is stored", SOON, stored).await.expect("a position");

    let builds = IndexBuilds::of(&[INDEX, OTHER]);
    let waiting = tokio::spawn({
        let builds = builds.clone();
        async move { other.build_indexes(&[INDEX, OTHER], &builds).await }
    });
    // A process that stops leaves its build to the database.
    first.abort();
    assert!(within("the process lets go", SOON, first).await.is_err());
    assert_eq!(builds.read().missing.len(), 2);
    drop(backup);
    within("the other process sees to both", SOON, waiting)
        .await
        .expect("no panic");
    assert!(builds.read().missing.is_empty());
    for index in [INDEX, OTHER] {
        assert_eq!(whole(&fixture, &index).await, Some(true), "{}", index.name);
    }
}

#[tokio::test]
async fn a_build_that_fails_is_told_and_does_not_end_the_others() {
    const BROKEN: LaterIndex = LaterIndex {
        name: "broken_later",
        create: "CREATE INDEX CONCURRENTLY broken_later ON events (no_such_column)",
    };
    let fixture = Fixture::new().await;
    let builds = IndexBuilds::of(&[INDEX, BROKEN, OTHER]);
    let store = SharedStore::clone(&fixture.store);
    let running = tokio::spawn({
        let builds = builds.clone();
        async move { store.build_indexes(&[INDEX, BROKEN, OTHER], &builds).await }
    });
    eventually("the failure is told", SOON, async || {
        let state = builds.read();
        let told = state.error.is_some() && state.missing == [BROKEN.name];
        told.then_some(()).ok_or(format!("{state:?}"))
    })
    .await;
    assert!(!running.is_finished(), "it is tried again");
    running.abort();
}
