//! Statements that are transactions of their own: one round trip, on connections kept apart for them.

use std::ops::{Deref, DerefMut, RangeInclusive};
use std::time::Duration;

use parking_lot::Mutex;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{Connection, Postgres, Transaction};
use tokio::time::{Instant, timeout};

use super::{ACQUIRE_TIMEOUT, RESTED, STATEMENT_TIMEOUT, Store, StoreError};

/// What bounds each statement of such a session; [`super::BEGIN`] says why.
const BOUNDS: [(&str, &str); 4] = [
    ("lock_timeout", "2s"),
    ("statement_timeout", STATEMENT_TIMEOUT),
    ("idle_in_transaction_session_timeout", "2s"),
    ("tcp_user_timeout", "4s"),
];
/// Connections kept between statements: publishing, claiming and recording each use one at a time.
const KEPT_MAX: usize = 4;
/// How long the first plans of a session are used, and the longest that any are. A plan that was made while a table was
/// small may read all of it when it has grown; the server itself notices within a minute or so.
const PLANS_AGE: RangeInclusive<Duration> = Duration::from_millis(500)..=Duration::from_secs(60);

/// Connections that wait for their next statement.
pub(super) struct Lanes {
    options: PgConnectOptions,
    kept: Mutex<Vec<Lane>>,
}

/// A connection and what is known of it.
pub(super) struct Lane {
    connection: PgConnection,
    used_at: Instant,
    planned_at: Instant,
    plans_age: Duration,
}

/// A connection on which one statement runs as a transaction of its own. Dropping it before [`AtOnce::end`] closes the
/// connection, whose state is then not known; what the statement did may stand all the same.
pub(super) enum AtOnce<'s> {
    /// The statement commits by itself.
    Statement {
        /// Where the connection goes afterwards.
        lanes: &'s Lanes,
        /// What runs it.
        lane: Lane,
    },
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
    async fn take(&self) -> Result<Lane, StoreError> {
        loop {
            let Some(mut lane) = self.kept.lock().pop() else { break };
            if matches!(timeout(ACQUIRE_TIMEOUT, lane.make_ready()).await, Ok(Ok(()))) {
                return Ok(lane);
            }
        }
        match timeout(ACQUIRE_TIMEOUT, PgConnection::connect_with(&self.options)).await {
            Ok(connected) => Ok(Lane {
                connection: connected?,
                used_at: Instant::now(),
                planned_at: Instant::now(),
                plans_age: *PLANS_AGE.start(),
            }),
            Err(_elapsed) => Err(StoreError::Unavailable(sqlx::Error::PoolTimedOut)),
        }
    }

    /// Closes the connections that wait.
    pub(super) async fn close(&self) {
        let kept = std::mem::take(&mut *self.kept.lock());
        for lane in kept {
            // A server that does not listen any more closes its end by itself.
            let _ = lane.connection.close().await;
        }
    }
}

impl Lane {
    /// Fails where the connection is of no use any more.
    async fn make_ready(&mut self) -> Result<(), sqlx::Error> {
        if self.planned_at.elapsed() > self.plans_age {
            sqlx::raw_sql("DISCARD PLANS").execute(&mut self.connection).await?;
            self.planned_at = Instant::now();
            self.plans_age = (self.plans_age * 2).min(*PLANS_AGE.end());
        } else if self.used_at.elapsed() > RESTED {
            // One that rested may have lost its server meanwhile.
            self.connection.ping().await?;
        }
        Ok(())
    }
}

impl Store {
    /// Where one statement may run at once.
    pub(super) async fn at_once(&self) -> Result<AtOnce<'_>, StoreError> {
        if !self.named {
            return Ok(AtOnce::Transaction(self.begin().await?));
        }
        Ok(AtOnce::Statement {
            lanes: &self.lanes,
            lane: self.lanes.take().await?,
        })
    }
}

impl AtOnce<'_> {
    /// Commits where that is still to be done, and keeps the connection for the next statement.
    pub(super) async fn end(self) -> Result<(), StoreError> {
        match self {
            Self::Statement { lanes, mut lane } => {
                lane.used_at = Instant::now();
                let mut kept = lanes.kept.lock();
                if kept.len() < KEPT_MAX {
                    kept.push(lane);
                }
            }
            Self::Transaction(transaction) => transaction.commit().await?,
        }
        Ok(())
    }
}

impl Deref for AtOnce<'_> {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        match self {
            Self::Statement { lane, .. } => &lane.connection,
            Self::Transaction(transaction) => transaction,
        }
    }
}

impl DerefMut for AtOnce<'_> {
    fn deref_mut(&mut self) -> &mut PgConnection {
        match self {
            Self::Statement { lane, .. } => &mut lane.connection,
            Self::Transaction(transaction) => transaction,
        }
    }
}
