//! Which worker processes live: one row each, renewed every second past any pooler.

use std::collections::HashSet;

use sqlx::{Connection, PgConnection};

use super::{Store, StoreError};

/// How long a renewal says that its process lives, in milliseconds of the database clock.
const ALIVE_MS: i64 = 4_000;

/// The heartbeat of one owner, on a connection of its own.
pub struct Heartbeat {
    connection: PgConnection,
}

impl Store {
    /// Opens the connection that heartbeats use.
    pub async fn heartbeat(&self) -> Result<Heartbeat, StoreError> {
        Ok(Heartbeat {
            connection: self.direct().await?,
        })
    }

    /// The owners that live.
    pub async fn living_owners(&self) -> Result<HashSet<String>, StoreError> {
        let mut reader = self.own_reader().await?;
        let owners = sqlx::query_scalar!("SELECT owner FROM workers WHERE alive_until > now_ms()")
            .fetch_all(self.run(&mut reader))
            .await?;
        Ok(owners.into_iter().collect())
    }
}

impl Heartbeat {
    /// Says that `owner` lives for four more seconds, and answers the version of the store; nothing when the owner has
    /// been dead meanwhile. Who was dead once stays dead: a renewal that was held up in an outage must not make its
    /// owner a judge of others whose renewals are still on their way. Rows of processes that died a minute ago are
    /// removed on the way.
    pub async fn renew(&mut self, owner: &str) -> Result<Option<i64>, StoreError> {
        // Losing this row in a crash of the database costs a second; waiting for the disk would cost a sync per second.
        let version = sqlx::query_scalar!(
            r#"
            WITH relaxed AS (SELECT set_config('synchronous_commit', 'off', false)),
            gone AS (DELETE FROM workers WHERE alive_until < now_ms() - 60000 AND owner <> $1),
            renewed AS (
                INSERT INTO workers (owner, alive_until) SELECT $1, now_ms() + $2 FROM relaxed
                ON CONFLICT (owner) DO UPDATE SET alive_until = excluded.alive_until
                WHERE workers.alive_until > now_ms()
                RETURNING owner
            )
            SELECT version FROM store_counter WHERE name = 'events' AND EXISTS (SELECT FROM renewed)
            "#,
            owner,
            ALIVE_MS,
        )
        .fetch_optional(&mut self.connection)
        .await?;
        Ok(version)
    }

    /// Says that `owner` is gone, so that others need not wait for it.
    pub async fn end(mut self, owner: &str) -> Result<(), StoreError> {
        sqlx::query!("DELETE FROM workers WHERE owner = $1", owner)
            .execute(&mut self.connection)
            .await?;
        self.connection.close().await?;
        Ok(())
    }
}
