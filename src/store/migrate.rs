//! Brings the schema up to date; several processes may try at once.

use std::time::Duration;

use sqlx::migrate::Migrator;
use sqlx::{Connection, PgConnection};

use super::{Addresses, StoreError};

/// The advisory lock of whoever migrates: "OpenVibe" in ASCII.
const LOCK: i64 = 0x4f70_656e_5669_6265;
/// How often a process looks whether another has finished.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Applies what is missing, one process at a time (an advisory lock of the session). A database of the service before
/// this one is refused untouched; one that a newer release has migrated further is served as it is.
pub async fn migrate(addresses: &Addresses) -> Result<(), StoreError> {
    let mut connection = PgConnection::connect_with(&addresses.direct).await?;
    // The old service records its migrations in `ov_migrations`; a table of events without our own record is not ours.
    let foreign = sqlx::query_scalar!(
        r#"
        SELECT to_regclass('ov_migrations') IS NOT NULL
            OR (to_regclass('events') IS NOT NULL AND to_regclass('_sqlx_migrations') IS NULL) AS "foreign!"
        "#
    )
    .fetch_one(&mut connection)
    .await?;
    if foreign {
        return Err(StoreError::Foreign);
    }
    // A statement that waited for the lock would keep its snapshot, and an index that is built concurrently waits for
    // every snapshot to end: each would wait for the other.
    while !sqlx::query_scalar!(r#"SELECT pg_try_advisory_lock($1) AS "taken!""#, LOCK)
        .fetch_one(&mut connection)
        .await?
    {
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
    let mut migrations = migrations();
    migrations.set_ignore_missing(true);
    migrations.set_locking(false);
    migrations
        .run_direct(None, &mut connection, false)
        .await
        .map_err(StoreError::Migrate)?;
    connection.close().await?;
    Ok(())
}

fn migrations() -> Migrator {
    sqlx::migrate!()
}

/// The newest migration of this release.
pub fn schema_generation() -> i64 {
    let newest = migrations().iter().map(|migration| migration.version).max();
    newest.unwrap_or_default()
}
