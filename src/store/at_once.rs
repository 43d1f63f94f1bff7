//! Statements that are transactions of their own: one round trip, on connections kept apart for them.

use std::ops::{Deref, DerefMut, RangeInclusive};
use std::time::Duration;

use parking_lot::Mutex;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{Connection, Postgres, Transaction};
use tokio::time::{Instant, timeout};

use super::{ACQUIRE_TIMEOUT, RESTED, STATEMENT_TIMEOUT, Store, StoreError};

/// What bounds each statement of such a session; [`super::BEGIN`] says why.
const BOUNDS: [(&str, &str); 8] = [
    ("lock_timeout", "2s"),
    ("statement_timeout", STATEMENT_TIMEOUT),
    ("idle_in_transaction_session_timeout", "2s"),
    ("tcp_user_timeout", "4s"),
    ("synchronous_commit", "on"),
    // A client that vanished between the parts of its message would hold its locks until somebody noticed.
    ("tcp_keepalives_idle", "2"),
    ("tcp_keepalives_interval", "1"),
    ("tcp_keepalives_count", "2"),
];
/// Connections kept between statements: publishing, claiming and recording each use one at a time.
const KEPT_MAX: usize = 4;
/// How long the first plans of a session are used, and the longest that any are. A plan that was made while a table was
/// small may read all of it when it has grown; the server itself notices within a minute or so.
const PLANS_AGE: RangeInclusive<Duration> = Duration::from_millis(500)..=Duration::from_secs(8);

const NOT_GIVEN_BACK: &str = "a lane is given back once, at its end";

/// Connections that wait for their next statement.
pub(super) struct Lanes {
    options: PgConnectOptions,
    kept: Mutex<Vec<Kept>>,
}

/// A connection and what is known of it.
struct Kept {
    connection: PgConnection,
    /// When it was last known to live; `None` when that is in doubt.
    alive_at: Option<Instant>,
    planned_at: Instant,
    plans_age: Duration,
}

/// A connection of [`Lanes`] that runs a statement.
pub(super) struct Lane<'s> {
    lanes: &'s Lanes,
    /// There until it is given back.
    kept: Option<Kept>,
}

/// A connection on which one statement runs as a transaction of its own. Dropping it before [`AtOnce::end`] closes the
/// connection, whose state is then not known; what the statement did may stand all the same.
pub(super) enum AtOnce<'s> {
    /// The statement commits by itself.
    Statement(Lane<'s>),
    /// A pooler needs the transaction to be spelt out.
    Transaction(Transaction<'static, Postgres>),
}

impl Lanes {
    pub(super) fn new(options: PgConnectOptions) -> Self {
        Self {
            options: options.options(BOUNDS),
            kept: Mutex::default(),
        }
    }

    /// The most recently used connection that lives, or a new one.
    async fn take(&self) -> Result<Kept, StoreError> {
        let last = self.kept.lock().pop();
        if let Some(mut kept) = last {
            if matches!(timeout(ACQUIRE_TIMEOUT, kept.make_ready()).await, Ok(Ok(()))) {
                return Ok(kept);
            }
            // The others rested longer. To ask each of them would take longer than anybody waits.
            self.kept.lock().clear();
        }
        match timeout(ACQUIRE_TIMEOUT, PgConnection::connect_with(&self.options)).await {
            Ok(connected) => Ok(Kept {
                connection: connected?,
                alive_at: Some(Instant::now()),
                planned_at: Instant::now(),
                plans_age: *PLANS_AGE.start(),
            }),
            Err(_elapsed) => Err(StoreError::Unavailable(sqlx::Error::PoolTimedOut)),
        }
    }

    /// Closes the connections that wait.
    pub(super) async fn close(&self) {
        let kept = std::mem::take(&mut *self.kept.lock());
        for waiting in kept {
            // A server that does not listen any more closes its end by itself.
            let _ = waiting.connection.close().await;
        }
    }
}

impl Store {
    /// Where one statement may run at once.
    pub(super) async fn at_once(&self) -> Result<AtOnce<'_>, StoreError> {
        if !self.named {
            return Ok(AtOnce::Transaction(self.begin().await?));
        }
        Ok(AtOnce::Statement(Lane {
            lanes: &self.lanes,
            kept: Some(self.lanes.take().await?),
        }))
    }
}

impl AtOnce<'_> {
    /// Commits where that is still to be done, and keeps the connection for the next statement.
    pub(super) async fn end(self) -> Result<(), StoreError> {
        match self {
            Self::Statement(lane) => lane.keep(),
            Self::Transaction(transaction) => transaction.commit().await?,
        }
        Ok(())
    }
}

impl Lane<'_> {
    fn keep(mut self) {
        let mut kept = self.lanes.kept.lock();
        if let Some(mut used) = self.kept.take()
            && kept.len() < KEPT_MAX
        {
            used.alive_at = Some(Instant::now());
            kept.push(used);
        }
    }
}

impl Kept {
    /// Fails where the connection is of no use any more.
    async fn make_ready(&mut self) -> Result<(), sqlx::Error> {
        if self.planned_at.elapsed() > self.plans_age {
            sqlx::raw_sql("DISCARD PLANS").execute(&mut self.connection).await?;
            self.planned_at = Instant::now();
            self.plans_age = (self.plans_age * 2).min(*PLANS_AGE.end());
        } else if self.alive_at.is_none_or(|at| at.elapsed() > RESTED) {
            // One that rested may have lost its server meanwhile.
            self.connection.ping().await?;
        }
        Ok(())
    }
}

impl Drop for Lane<'_> {
    /// A connection that was not given back may have lost its server, and then the others have lost theirs.
    fn drop(&mut self) {
        if self.kept.is_some() {
            self.lanes.kept.lock().iter_mut().for_each(|kept| kept.alive_at = None);
        }
    }
}

impl Deref for AtOnce<'_> {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        match self {
            Self::Statement(lane) => &lane.kept.as_ref().expect(NOT_GIVEN_BACK).connection,
            Self::Transaction(transaction) => transaction,
        }
    }
}

impl DerefMut for AtOnce<'_> {
    fn deref_mut(&mut self) -> &mut PgConnection {
        match self {
            Self::Statement(lane) => &mut lane.kept.as_mut().expect(NOT_GIVEN_BACK).connection,
            Self::Transaction(transaction) => transaction,
        }
    }
}
