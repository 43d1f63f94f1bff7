//! Reading the replay tier. Rows are chosen by their columns; only what is handed out is unpacked.

use sqlx::PgConnection;

use crate::domain::app::Project;
use crate::domain::cursor::Cursor;
use crate::domain::ids::EventId;
use crate::domain::packed::{Body, PackedEvent};

use super::events::EventRow;
use super::{Store, StoreError, StoredEvent};

/// A row of the replay tier.
pub(super) struct ArchivedRow {
    pub(super) id: String,
    pub(super) seq: i64,
    pub(super) epoch: i64,
    pub(super) event_type: String,
    pub(super) source: String,
    pub(super) subject_type: String,
    pub(super) subject_id: String,
    pub(super) visibility: String,
    pub(super) project_id: Option<String>,
    pub(super) env: String,
    pub(super) received_at: i64,
    pub(super) redacted_at: Option<i64>,
    pub(super) redacts: i32,
    pub(super) body: Vec<u8>,
    pub(super) archived_at: i64,
}

impl Store {
    /// The events of the replay tier at these positions of the current history, in any order. What is gone is left out, and so
    /// is what cannot be read.
    pub(super) async fn archived_at(
        &self,
        connection: &mut PgConnection,
        positions: &[i64],
    ) -> Result<Vec<StoredEvent>, StoreError> {
        let rows = sqlx::query_as!(
            ArchivedRow,
            r#"
            SELECT id, seq, epoch, event_type, source, subject_type, subject_id, visibility, project_id, env,
                   received_at, redacted_at, redacts, body, archived_at
            FROM events_archive
            WHERE epoch = (SELECT value FROM store_epoch WHERE name = 'events') AND seq = ANY($1)
            "#,
            positions,
        )
        .fetch_all(self.run(connection))
        .await?;
        Ok(rows.into_iter().filter_map(ArchivedRow::read).collect())
    }

    /// An event of the replay tier that a first-party service may see, of whatever history; without the event itself where
    /// it cannot be read.
    pub(super) async fn archived_event(
        &self,
        connection: &mut PgConnection,
        id: &EventId,
        project: Option<&Project>,
    ) -> Result<Option<(Cursor, Option<StoredEvent>)>, StoreError> {
        let row = sqlx::query_as!(
            ArchivedRow,
            r#"
            SELECT id, seq, epoch, event_type, source, subject_type, subject_id, visibility, project_id, env,
                   received_at, redacted_at, redacts, body, archived_at
            FROM events_archive
            WHERE id = $1
              AND CASE WHEN $2::text IS NULL THEN env = 'production'
                       WHEN project_id IS NULL THEN env = 'production' AND visibility = 'public'
                       ELSE project_id = $2 AND env = $3 END
            "#,
            id.as_str(),
            project.map(|project| &*project.id),
            project.map(|project| project.env.as_str()),
        )
        .fetch_optional(self.run(connection))
        .await?;
        Ok(row.map(|row| {
            let cursor = Cursor {
                epoch: row.epoch,
                position: row.seq,
            };
            (cursor, row.read())
        }))
    }
}

impl ArchivedRow {
    /// The row with its body unpacked, unless that is damaged.
    pub(super) fn unpack(self) -> Option<PackedEvent> {
        let body = Body::unpack(&self.body)?;
        Some(PackedEvent {
            id: self.id,
            seq: self.seq,
            event_type: self.event_type,
            source: self.source,
            subject_type: self.subject_type,
            subject_id: self.subject_id,
            visibility: self.visibility,
            project_id: self.project_id,
            env: self.env,
            received_at: self.received_at,
            redacted_at: self.redacted_at,
            redacts: self.redacts,
            body,
            epoch: self.epoch,
            archived_at: self.archived_at,
        })
    }

    /// The event, unless it cannot be read.
    fn read(self) -> Option<StoredEvent> {
        let position = self.seq;
        let Some(event) = self.unpack() else {
            tracing::error!(position, "the event at {position} cannot be read: its body");
            return None;
        };
        let body = event.body;
        let row = EventRow {
            id: event.id,
            seq: event.seq,
            event_type: event.event_type,
            version: body.version,
            source: event.source,
            actor: body.actor,
            on_behalf_of: body.on_behalf_of,
            subject_type: event.subject_type,
            subject_id: event.subject_id,
            subject_revision: body.subject_revision,
            trace_id: body.trace_id,
            priority: body.priority,
            visibility: event.visibility,
            occurred_at: body.occurred_at,
            received_at: event.received_at,
            payload: body.payload,
            hops: body.hops,
        };
        row.read()
    }
}
