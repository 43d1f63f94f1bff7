//! Statements that are transactions of their own: one round trip, on a connection that one task keeps for them.

use std::ops::{Deref, DerefMut};

use sqlx::postgres::PgConnection;
use sqlx::{Connection, Postgres, Transaction};
use tokio::time::{Instant, timeout};

use super::{ACQUIRE_TIMEOUT, RESTED, Store, StoreError};

/// A connection that one task keeps between its statements. One whose state is not known, because its statement failed or
/// was given up, is closed and opened anew.
#[derive(Default)]
pub struct Lane {
    kept: Option<(PgConnection, Instant)>,
}

/// A connection on which one statement runs as a transaction of its own. Dropping it before [`AtOnce::end`] closes the
/// connection; what the statement did may stand all the same.
pub(super) enum AtOnce<'l> {
    /// The statement commits by itself; the session bounds how long it waits and runs.
    Statement {
        /// Where the connection goes afterwards.
        lane: &'l mut Lane,
        /// Taken out, so that a statement that is given up takes it along.
        connection: PgConnection,
    },
    /// A pooler needs the transaction to be spelt out.
    Transaction(Transaction<'static, Postgres>),
}

impl Store {
    /// Where one statement may run at once.
    pub(super) async fn at_once<'l>(&self, lane: &'l mut Lane) -> Result<AtOnce<'l>, StoreError> {
        if !self.named {
            return Ok(AtOnce::Transaction(self.begin().await?));
        }
        if let Some((mut connection, since)) = lane.kept.take() {
            // One that rested may have lost its server meanwhile.
            let living = since.elapsed() <= RESTED
                || matches!(timeout(ACQUIRE_TIMEOUT, connection.ping()).await, Ok(Ok(())));
            if living {
                return Ok(AtOnce::Statement { lane, connection });
            }
        }
        let connecting = PgConnection::connect_with(&self.at_once);
        let connection = match timeout(ACQUIRE_TIMEOUT, connecting).await {
            Ok(connected) => connected?,
            Err(_elapsed) => return Err(StoreError::Unavailable(sqlx::Error::PoolTimedOut)),
        };
        Ok(AtOnce::Statement { lane, connection })
    }
}

impl AtOnce<'_> {
    /// Commits where that is still to be done, and keeps the connection for the next statement.
    pub(super) async fn end(self) -> Result<(), StoreError> {
        match self {
            Self::Statement { lane, connection } => lane.kept = Some((connection, Instant::now())),
            Self::Transaction(transaction) => transaction.commit().await?,
        }
        Ok(())
    }
}

impl Deref for AtOnce<'_> {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        match self {
            Self::Statement { connection, .. } => connection,
            Self::Transaction(transaction) => transaction,
        }
    }
}

impl DerefMut for AtOnce<'_> {
    fn deref_mut(&mut self) -> &mut PgConnection {
        match self {
            Self::Statement { connection, .. } => connection,
            Self::Transaction(transaction) => transaction,
        }
    }
}
