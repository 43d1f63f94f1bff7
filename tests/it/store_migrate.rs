//! Migrations: any number of processes may start at once, and a database that is not ours is left alone.

use openvibe_events::store::{self, Addresses, Store, StoreError};
use sqlx::PgPool;

use crate::{
    store_fixture::{event, number, put, sql},
    support::database::Database,
};

fn addresses(database: &Database) -> Addresses {
    Addresses::parse(database.url(), database.url()).expect("the URL of a test database")
}

/// Every object of the database that is not the server's own, and what it looks like.
async fn schema(pool: &PgPool) -> Vec<String> {
    sqlx::query_scalar(
        "SELECT table_name || '.' || column_name || ' ' || data_type FROM information_schema.columns \
         WHERE table_schema = 'public' \
         UNION ALL SELECT indexdef FROM pg_indexes WHERE schemaname = 'public' \
         UNION ALL SELECT event_object_table || ' ' || trigger_name FROM information_schema.triggers \
         UNION ALL SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace ORDER BY 1",
    )
    .fetch_all(pool)
    .await
    .expect("the schema")
}

#[tokio::test]
async fn processes_that_start_at_once_on_an_empty_database_all_find_it_migrated() {
    let database = Database::empty().await;
    let addresses = addresses(&database);
    let starts = (0..4).map(|_| store::migrate(&addresses));
    for ended in futures_util::future::join_all(starts).await {
        ended.expect("a start");
    }
    let store = Store::connect(addresses).await.expect("a store");
    put(&store, None, &[event()], None).await.expect("a group");
}

#[tokio::test]
async fn migrating_again_changes_nothing() {
    let database = Database::create().await;
    let before = schema(database.pool()).await;
    let record = "SELECT sum(extract(epoch FROM installed_on) * 1000000)::bigint FROM _sqlx_migrations";
    let installed = number(database.pool(), record).await;
    for _ in 0..2 {
        store::migrate(&addresses(&database)).await.expect("a second start");
    }
    assert_eq!(schema(database.pool()).await, before);
    assert_eq!(number(database.pool(), record).await, installed);
}

#[tokio::test]
async fn a_database_of_the_service_before_this_one_is_refused_and_stays_as_it_was() {
    let old = [
        "CREATE TABLE ov_migrations (id text PRIMARY KEY)",
        "CREATE TABLE events (id text PRIMARY KEY, seq bigint, event_type text); INSERT INTO events VALUES ('evt_1', 1, 'live.a.b')",
        "CREATE TABLE ov_migrations (id text PRIMARY KEY); CREATE TABLE events (id text PRIMARY KEY)",
    ];
    for statements in old {
        let database = Database::empty().await;
        sql(database.pool(), statements).await;
        let before = schema(database.pool()).await;
        let refused = store::migrate(&addresses(&database)).await;
        assert!(matches!(refused, Err(StoreError::Foreign)), "{statements}: {refused:?}");
        assert_eq!(schema(database.pool()).await, before, "{statements}");
    }
}

#[tokio::test]
async fn a_schema_that_a_newer_release_has_moved_on_is_served() {
    let database = Database::create().await;
    sql(
        database.pool(),
        "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
         VALUES (99990101000000, 'of a newer release', true, '\\x00', 1); \
         ALTER TABLE events ADD COLUMN later text; ALTER TABLE deliveries ADD COLUMN later bigint NOT NULL DEFAULT 0; \
         ALTER TABLE subscriptions ADD COLUMN later text; CREATE TABLE later (id text)",
    )
    .await;
    let addresses = addresses(&database);
    store::migrate(&addresses).await.expect("a start of the older release");
    let store = Store::connect(addresses).await.expect("a store");
    put(&store, None, &[event()], None).await.expect("a group");
}

#[tokio::test]
async fn a_process_goes_on_while_a_newer_release_migrates_under_it() {
    let database = Database::create().await;
    let store = Store::connect(addresses(&database)).await.expect("a store");
    let id = crate::store_fixture::subscribe(&store, "chat", "*", 64).await;
    let work = async || {
        put(&store, Some(&id), &[event()], None).await.expect("a group");
        let pass = crate::store_fixture::claim(&store, "w", &[&id]).await;
        assert_eq!(pass.claimed.len(), 1);
        crate::store_fixture::settle_all(&store, "w", &pass, &crate::store_fixture::delivered()).await;
        let page = crate::store_fixture::pull(&store, None, "live.*", 100).await;
        assert!(!page.events.is_empty());
    };
    for _ in 0..8 {
        work().await;
    }
    sql(
        database.pool(),
        "ALTER TABLE events ADD COLUMN later text; ALTER TABLE deliveries ADD COLUMN later bigint NOT NULL DEFAULT 0; \
         ALTER TABLE subscriptions ADD COLUMN later text; ALTER TABLE store_counter ADD COLUMN later text",
    )
    .await;
    for _ in 0..8 {
        work().await;
    }
}
