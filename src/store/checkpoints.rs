//! Positions that consumers keep here because they have nowhere better.

use crate::domain::cursor::Cursor;
use crate::domain::time::Millis;
use crate::domain::topic::TopicPattern;

use super::{Store, StoreError};

/// A consumer's position for a pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// Where it stands.
    pub cursor: Cursor,
    /// The carrier it was reading from, free text.
    pub carrier: Option<String>,
    /// When it was stored.
    pub updated_at: Millis,
}

impl Store {
    /// What a consumer stored for a pattern.
    pub async fn checkpoint(&self, consumer: &str, topic: &TopicPattern) -> Result<Option<Checkpoint>, StoreError> {
        let mut reader = self.reader().await?;
        let row = sqlx::query!(
            r#"
            SELECT cursor, epoch, carrier, updated_at FROM consumer_checkpoints
            WHERE consumer = $1 AND env = 'production' AND topic_pattern = $2
            "#,
            consumer,
            topic.as_str(),
        )
        .fetch_optional(self.run(&mut reader))
        .await?;
        Ok(row.map(|row| Checkpoint {
            cursor: Cursor {
                epoch: row.epoch,
                position: row.cursor,
            },
            carrier: row.carrier,
            updated_at: Millis(row.updated_at),
        }))
    }

    /// Stores a position; the last write wins and may go back.
    pub async fn set_checkpoint(
        &self,
        consumer: &str,
        topic: &TopicPattern,
        cursor: Cursor,
        carrier: Option<&str>,
    ) -> Result<Checkpoint, StoreError> {
        let mut transaction = self.begin().await?;
        let updated_at = sqlx::query_scalar!(
            r#"
            INSERT INTO consumer_checkpoints (consumer, topic_pattern, cursor, epoch, carrier, updated_at)
            VALUES ($1, $2, $3, $4, $5, now_ms())
            ON CONFLICT (consumer, env, topic_pattern) DO UPDATE
            SET cursor = excluded.cursor, epoch = excluded.epoch, carrier = excluded.carrier,
                updated_at = excluded.updated_at
            RETURNING updated_at
            "#,
            consumer,
            topic.as_str(),
            cursor.position,
            cursor.epoch,
            carrier,
        )
        .fetch_one(self.run(&mut transaction))
        .await?;
        transaction.commit().await?;
        Ok(Checkpoint {
            cursor,
            carrier: carrier.map(str::to_owned),
            updated_at: Millis(updated_at),
        })
    }
}
