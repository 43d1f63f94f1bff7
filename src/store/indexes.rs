//! Indexes that are built beside the running service: at the start, a long build would hold up the readiness that a
//! deployment waits for, and a short one would still wait for every snapshot that anybody holds.
//!
//! Nothing may depend on them but speed. They are built concurrently, one after the other, by one process at a time.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use super::{Store, StoreError};
use crate::telemetry;

/// The advisory lock of whoever builds: not the one of migrations, which no start may wait for because of a build.
const LOCK: i64 = 0x4f70_656e_5669_6249;
/// How soon it is looked again whether another process has finished.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// How soon a build that failed is tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// The indexes of this release that are built after the start. One is added here and never changed: another definition
/// is another index.
pub const LATER_INDEXES: [LaterIndex; 0] = [];

/// An index that a release adds to a table that may be large.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaterIndex {
    /// Its name, which tells whether it is there.
    pub name: &'static str,
    /// The one statement that builds it: `CREATE INDEX CONCURRENTLY …`.
    pub create: &'static str,
}

/// What became of an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexBuild {
    /// It is there and whole.
    Done,
    /// Another process is building.
    Elsewhere,
}

/// What this process knows of the indexes of its release. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct IndexBuilds(Arc<Mutex<IndexState>>);

/// A look at [`IndexBuilds`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IndexState {
    /// Those that are not known to be whole, in the order of building.
    pub missing: Vec<&'static str>,
    /// The one that failed last, and why; nothing once it is built.
    pub error: Option<(&'static str, String)>,
}

impl IndexBuilds {
    /// Nothing is known of these yet.
    pub fn of(indexes: &[LaterIndex]) -> Self {
        Self(Arc::new(Mutex::new(IndexState {
            missing: indexes.iter().map(|index| index.name).collect(),
            error: None,
        })))
    }

    /// What is known now.
    pub fn read(&self) -> IndexState {
        self.0.lock().clone()
    }

    fn done(&self, name: &'static str) {
        let mut state = self.0.lock();
        state.missing.retain(|missing| *missing != name);
        state.error = state.error.take().filter(|(failed, _)| *failed != name);
        telemetry::indexes_missing(state.missing.len());
    }

    fn failed(&self, name: &'static str, error: &StoreError) {
        self.0.lock().error = Some((name, error.to_string()));
    }
}

impl Store {
    /// Builds what is missing, and returns when all are there. It may be dropped at any await: a build that has begun goes
    /// on in the database, and whoever comes next waits for it.
    pub async fn build_indexes(&self, indexes: &[LaterIndex], builds: &IndexBuilds) {
        telemetry::indexes_missing(indexes.len());
        let mut missing = indexes.to_vec();
        while !missing.is_empty() {
            let (mut left, mut pause) = (Vec::new(), LOOK_INTERVAL);
            for index in missing {
                match self.build_index(&index).await {
                    Ok(IndexBuild::Done) => builds.done(index.name),
                    Ok(IndexBuild::Elsewhere) => left.push(index),
                    Err(error) => {
                        let name = index.name;
                        tracing::error!(error = %error, "the index {name} is not built yet: {error}");
                        builds.failed(index.name, &error);
                        left.push(index);
                        pause = RETRY_INTERVAL;
                    }
                }
            }
            missing = left;
            if !missing.is_empty() {
                tokio::time::sleep(pause).await;
            }
        }
    }

    /// Sees to it that an index is there. One that a build left behind when it was cut is removed and built again.
    pub async fn build_index(&self, index: &LaterIndex) -> Result<IndexBuild, StoreError> {
        let name = index.name;
        let mut connection = self.direct().await?;
        if is_whole(&mut connection, name).await? == Some(true) {
            return Ok(IndexBuild::Done);
        }
        // Nobody waits for this lock in the database: a statement that waits keeps its snapshot, and a concurrent build
        // waits for every snapshot to end.
        let taken = sqlx::query_scalar!(r#"SELECT pg_try_advisory_lock($1) AS "taken!""#, LOCK)
            .fetch_one(&mut connection)
            .await?;
        if !taken {
            return Ok(IndexBuild::Elsewhere);
        }
        // A role may have limits that are meant for short statements.
        run(
            &mut connection,
            "SET statement_timeout = 0; SET lock_timeout = 0; SET idle_session_timeout = 0",
        )
        .await?;
        // Under the lock: its former holder may have ended in any of the three ways.
        match is_whole(&mut connection, name).await? {
            Some(true) => return Ok(IndexBuild::Done),
            Some(false) => {
                tracing::warn!("the index {name} was left incomplete and is built anew");
                run(&mut connection, &format!("DROP INDEX CONCURRENTLY IF EXISTS {name}")).await?;
            }
            None => {}
        }
        tracing::info!("the index {name} is being built");
        run(&mut connection, index.create).await?;
        if is_whole(&mut connection, name).await? != Some(true) {
            return Err(StoreError::Corrupt { what: "index" });
        }
        tracing::info!("the index {name} is built");
        // The lock ends with the connection, however that ends.
        let _ = connection.close().await;
        Ok(IndexBuild::Done)
    }
}

/// Whether an index can be used; `None` where there is none.
async fn is_whole(connection: &mut PgConnection, name: &str) -> Result<Option<bool>, StoreError> {
    let whole = sqlx::query_scalar!(
        "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass($1)",
        name
    )
    .fetch_optional(connection)
    .await?;
    Ok(whole)
}

async fn run(connection: &mut PgConnection, statements: &str) -> Result<(), StoreError> {
    // Every statement here is our own text.
    sqlx::raw_sql(AssertSqlSafe(statements)).execute(connection).await?;
    Ok(())
}
