//! Positions that consumers keep here because they have nowhere better.

use crate::domain::app::Holder;
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
    pub async fn checkpoint(
        &self,
        holder: &Holder<'_>,
        topic: &TopicPattern,
    ) -> Result<Option<Checkpoint>, StoreError> {
        let mut reader = self.reader().await?;
        let row = sqlx::query!(
            r#"
            SELECT cursor, epoch, carrier, updated_at FROM consumer_checkpoints
            WHERE consumer = $1 AND env = $3 AND topic_pattern = $2
            "#,
            holder.consumer,
            topic.as_str(),
            holder.env(),
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
        holder: &Holder<'_>,
        topic: &TopicPattern,
        cursor: Cursor,
        carrier: Option<&str>,
    ) -> Result<Checkpoint, StoreError> {
        let mut transaction = self.begin().await?;
        let updated_at = sqlx::query_scalar!(
            r#"
            INSERT INTO consumer_checkpoints (consumer, topic_pattern, cursor, epoch, carrier, updated_at, env)
            VALUES ($1, $2, $3, $4, $5, now_ms(), $6)
            ON CONFLICT (consumer, env, topic_pattern) DO UPDATE
            SET cursor = excluded.cursor, epoch = excluded.epoch, carrier = excluded.carrier,
                updated_at = excluded.updated_at
            RETURNING updated_at
            "#,
            holder.consumer,
            topic.as_str(),
            cursor.position,
            cursor.epoch,
            carrier,
            holder.env(),
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
