//! One group of publishes: a transaction under the counter row, with a fixed number of round trips.
//!
//! The group is opened, asked, filled and committed by one function (`publish::group`); dropping it anywhere before its
//! commit leaves nothing behind.

use std::collections::HashMap;
use std::sync::Arc;

use sqlx::{Postgres, Transaction};

use crate::domain::envelope::Envelope;
use crate::domain::ids::{EventId, SubscriptionId};

use super::counts::{CountRole, PERIOD_MS};
use super::{Store, StoreError, View};

/// How far positions jump when the database's timeline changed: a fail-over may have lost the newest commits, and the
/// positions of those must never be given to other events.
const TIMELINE_JUMP: i64 = 1 << 32;

/// An open group. It holds the counter row, so it is the only one anywhere.
pub struct Group<'a> {
    store: &'a Store,
    transaction: Transaction<'static, Postgres>,
    /// The database clock when the counter was taken, milliseconds: `received_at` of everything stored.
    pub now_ms: i64,
    /// What is in force while the counter row is held. The store's own view may become older again meanwhile, by a reader
    /// that was slow.
    pub view: Arc<View>,
    /// What is known of the ids that the group was opened with; an id that is new has no entry.
    pub known: HashMap<String, KnownEvent>,
}

/// What is known of an event id.
#[derive(Debug, Clone)]
pub enum KnownEvent {
    /// It is stored.
    Stored {
        /// Where.
        position: i64,
        /// Who published it.
        source: String,
        /// What it is.
        event_type: String,
        /// Whose project, for a developer app's event.
        project_id: Option<String>,
        /// Sandbox or production.
        env: String,
    },
    /// It was stored once; only its receipt is left.
    ReceiptOnly,
}

/// What the loop guard counts by.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LoopKey {
    /// The trace.
    pub trace_id: String,
    /// The publishing source.
    pub source: String,
    /// The event type.
    pub event_type: String,
    /// The subject's type.
    pub subject_type: String,
    /// The subject's id.
    pub subject_id: String,
}

/// What is stored of a trace, for the loop guard.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoopState {
    /// The deepest event of another source in the trace.
    pub deepest_other: i32,
    /// Publish requests that carried this source, type and subject in the trace.
    pub repeats: i32,
}

/// An event that was accepted.
#[derive(Debug, Clone, Copy)]
pub struct NewEvent<'a> {
    /// What to store.
    pub envelope: &'a Envelope,
    /// Its depth in the trace.
    pub hops: i32,
    /// The principal that published it.
    pub publisher: &'a str,
    /// The server's id of the publish request.
    pub request_id: &'a str,
}

/// A delivery of an accepted event.
#[derive(Debug, Clone, Copy)]
pub struct NewDelivery<'a> {
    /// The event, one of the same call.
    pub event_id: &'a EventId,
    /// Who receives it.
    pub subscription_id: &'a SubscriptionId,
    /// The key whose order it keeps, where there is one.
    pub ordering_key: Option<&'a str>,
    /// It may leave a process once only.
    pub at_most_once: bool,
}

impl Store {
    /// Opens a group for events of these ids (at least one): takes the counter row, brings the view up to date, moves
    /// positions past a change of timeline, and reads what is known of the ids.
    pub async fn open_group(&self, ids: &[&str]) -> Result<Group<'_>, StoreError> {
        let mut transaction = self.begin().await?;
        let counter = sqlx::query!(
            r#"
            SELECT version AS "version!", timeline AS "timeline!",
                   left(pg_walfile_name(pg_current_wal_lsn()), 8) AS "current_timeline!"
            FROM store_counter WHERE name = 'events' FOR UPDATE
            "#
        )
        .fetch_one(self.run(&mut transaction))
        .await?;
        let mut view = self.view();
        if counter.version != view.version {
            view = self.reload_view_on(&mut transaction).await?;
        }
        if counter.timeline != counter.current_timeline {
            self.adopt_timeline(&mut transaction, &counter.timeline, &counter.current_timeline)
                .await?;
        }
        // After the wait for the row, in a statement of its own: it must see what was committed meanwhile.
        let rows = sqlx::query!(
            r#"
            SELECT i.id AS "id!", e.seq AS "seq?", e.source AS "source?", e.event_type AS "event_type?", e.project_id,
                   e.env AS "env?", r.event_id IS NOT NULL AS "receipt!", now_ms() AS "now_ms!"
            FROM unnest($1::text[]) AS i(id)
            LEFT JOIN events e ON e.id = i.id
            LEFT JOIN idempotency_receipts r ON r.consumer = 'events:publish' AND r.event_id = i.id
            "#,
            ids as &[&str],
        )
        .fetch_all(self.run(&mut transaction))
        .await?;
        let mut group = Group {
            store: self,
            transaction,
            now_ms: 0,
            view,
            known: HashMap::with_capacity(rows.len()),
        };
        for row in rows {
            group.now_ms = row.now_ms;
            match (row.seq, row.source, row.event_type, row.env) {
                (Some(position), Some(source), Some(event_type), Some(env)) => {
                    let stored = KnownEvent::Stored {
                        position,
                        source,
                        event_type,
                        project_id: row.project_id,
                        env,
                    };
                    group.known.insert(row.id, stored);
                }
                _ if row.receipt => {
                    group.known.insert(row.id, KnownEvent::ReceiptOnly);
                }
                _ => {}
            }
        }
        Ok(group)
    }

    async fn adopt_timeline(
        &self,
        transaction: &mut Transaction<'static, Postgres>,
        former: &str,
        current: &str,
    ) -> Result<(), StoreError> {
        if !former.is_empty() {
            tracing::warn!(
                former,
                current,
                "the database changed its timeline: positions jump by 2^32"
            );
            sqlx::query!(
                r#"
                SELECT setval('event_positions', $1 + greatest(
                    (SELECT last_value FROM event_positions), (SELECT max(seq) FROM events))) AS "position!"
                "#,
                TIMELINE_JUMP,
            )
            .fetch_one(self.run(transaction))
            .await?;
        }
        sqlx::query!("UPDATE store_counter SET timeline = $1 WHERE name = 'events'", current)
            .execute(self.run(transaction))
            .await?;
        Ok(())
    }
}

impl Group<'_> {
    /// What is stored of these traces. Each probe is bounded: sources of a trace are skipped through by index, and
    /// repeats are looked for among the deepest rows only, where a loop's own rows are.
    pub async fn loops(&mut self, keys: &[&LoopKey], hops_max: i32) -> Result<HashMap<LoopKey, LoopState>, StoreError> {
        if keys.is_empty() {
            return Ok(HashMap::new());
        }
        let column = |part: fn(&LoopKey) -> &str| keys.iter().map(|key| part(key)).collect::<Vec<&str>>();
        let rows = sqlx::query!(
            r#"
            WITH RECURSIVE keys AS (
                SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[])
                    WITH ORDINALITY AS k(trace_id, source, event_type, subject_type, subject_id, ordinal)
            ), sources AS (
                SELECT t.trace_id, first.source, first.hops
                FROM (SELECT DISTINCT trace_id FROM keys) t
                CROSS JOIN LATERAL (
                    SELECT e.source, e.hops FROM events e
                    WHERE e.trace_id = t.trace_id AND e.project_id IS NULL
                    ORDER BY e.source DESC, e.hops DESC LIMIT 1
                ) first
                UNION ALL
                SELECT s.trace_id, next.source, next.hops
                FROM sources s
                CROSS JOIN LATERAL (
                    SELECT e.source, e.hops FROM events e
                    WHERE e.trace_id = s.trace_id AND e.source < s.source AND e.project_id IS NULL
                    ORDER BY e.source DESC, e.hops DESC LIMIT 1
                ) next
            )
            SELECT k.ordinal AS "ordinal!",
                   coalesce((SELECT max(s.hops) FROM sources s
                             WHERE s.trace_id = k.trace_id AND s.source <> k.source), 0) AS "deepest_other!",
                   (SELECT count(DISTINCT coalesce(d.request_id, d.id)) FROM (
                        SELECT e.id, e.request_id, e.event_type, e.subject_type, e.subject_id FROM events e
                        WHERE e.trace_id = k.trace_id AND e.source = k.source AND e.project_id IS NULL
                        ORDER BY e.hops DESC LIMIT $6
                    ) d
                    WHERE d.event_type = k.event_type AND d.subject_type = k.subject_type
                      AND d.subject_id = k.subject_id)::integer AS "repeats!"
            FROM keys k
            "#,
            &column(|key| &key.trace_id) as &[&str],
            &column(|key| &key.source) as &[&str],
            &column(|key| &key.event_type) as &[&str],
            &column(|key| &key.subject_type) as &[&str],
            &column(|key| &key.subject_id) as &[&str],
            i64::from(hops_max) * 128,
        )
        .fetch_all(self.store.run(&mut self.transaction))
        .await?;
        let states = rows.into_iter().filter_map(|row| {
            let key = keys.get(usize::try_from(row.ordinal - 1).ok()?)?;
            Some((
                (*key).clone(),
                LoopState {
                    deepest_other: row.deepest_other,
                    repeats: row.repeats,
                },
            ))
        });
        Ok(states.collect())
    }

    /// Stores accepted events with their receipts and deliveries, in the order given; answers the position of each.
    ///
    /// The last unfinished row of each key that is extended is locked first, in position order, and heads are computed
    /// in a later statement: in one statement, a publish and a settle would miss each other's work.
    pub async fn store(
        &mut self,
        events: &[NewEvent<'_>],
        deliveries: &[NewDelivery<'_>],
    ) -> Result<HashMap<String, i64>, StoreError> {
        if events.is_empty() {
            return Ok(HashMap::new());
        }
        self.lock_key_tails(deliveries).await?;
        let e = EventColumns::of(events);
        let d = DeliveryColumns::of(deliveries);
        let rows = sqlx::query!(
            r#"
            WITH incoming AS (
                SELECT * FROM unnest(
                    $1::text[], $2::text[], $3::bigint[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[],
                    $9::bigint[], $10::text[], $11::text[], $12::text[], $13::text[], $14::text[], $15::integer[],
                    $16::text[], $17::text[], $18::bigint[]
                ) WITH ORDINALITY AS t(
                    id, event_type, version, source, actor, on_behalf_of, subject_type, subject_id, subject_revision,
                    trace_id, priority, visibility, occurred_at, payload, hops, publisher, request_id, size_bytes,
                    ordinal
                )
            ), stored AS (
                INSERT INTO events (
                    seq, id, event_type, version, source, actor, on_behalf_of, subject_type, subject_id,
                    subject_revision, trace_id, priority, visibility, occurred_at, received_at, payload, hops,
                    publisher, request_id, size_bytes
                )
                SELECT nextval('event_positions'), id, event_type, version, source, actor, on_behalf_of, subject_type,
                       subject_id, subject_revision, trace_id, priority, visibility, occurred_at, $19, payload, hops,
                       publisher, request_id, size_bytes
                FROM (SELECT * FROM incoming ORDER BY ordinal) ordered
                RETURNING id, seq, priority
            ), receipts AS (
                INSERT INTO idempotency_receipts (consumer, event_id, processed_at)
                SELECT 'events:publish', id, $19 FROM stored
                ON CONFLICT DO NOTHING
            ), queued AS (
                INSERT INTO deliveries (
                    event_id, subscription_id, seq, priority, next_attempt_at, created_at, updated_at, ordering_key,
                    at_most_once, head
                )
                SELECT s.id, d.subscription_id, s.seq,
                       CASE s.priority WHEN 'critical' THEN 0 WHEN 'important' THEN 1 ELSE 2 END,
                       $19, $19, $19, d.ordering_key, d.at_most_once,
                       d.ordering_key IS NULL OR (d.first_of_key AND NOT EXISTS (
                           SELECT FROM deliveries earlier
                           WHERE earlier.subscription_id = d.subscription_id AND earlier.ordering_key = d.ordering_key
                             AND earlier.status IN ('pending', 'failed')
                       ))
                FROM unnest($20::text[], $21::text[], $22::text[], $23::boolean[], $27::boolean[])
                    AS d(event_id, subscription_id, ordering_key, first_of_key, at_most_once)
                JOIN stored s ON s.id = d.event_id
                RETURNING 1
            ), counted AS (
                INSERT INTO delivery_counts AS c (owner, role, period, pending)
                SELECT $24, $25, $19 / $26, count(*) FROM queued HAVING count(*) > 0
                ON CONFLICT (owner, role, period) DO UPDATE SET pending = c.pending + excluded.pending
            )
            SELECT id AS "id!", seq AS "seq!" FROM stored
            "#,
            &e.id as &[&str],
            &e.event_type as &[&str],
            &e.version,
            &e.source as &[&str],
            &e.actor,
            &e.on_behalf_of as &[Option<String>],
            &e.subject_type as &[&str],
            &e.subject_id as &[&str],
            &e.subject_revision as &[Option<i64>],
            &e.trace_id as &[&str],
            &e.priority as &[&str],
            &e.visibility as &[&str],
            &e.occurred_at as &[&str],
            &e.payload as &[&str],
            &e.hops,
            &e.publisher as &[&str],
            &e.request_id as &[&str],
            &e.size_bytes,
            self.now_ms,
            &d.event_id as &[&str],
            &d.subscription_id as &[&str],
            &d.ordering_key as &[Option<&str>],
            &d.first_of_key,
            self.store.counts_owner,
            CountRole::Publish.name(),
            PERIOD_MS,
            &d.at_most_once,
        )
        .fetch_all(self.store.run(&mut self.transaction))
        .await?;
        Ok(rows.into_iter().map(|row| (row.id, row.seq)).collect())
    }

    async fn lock_key_tails(&mut self, deliveries: &[NewDelivery<'_>]) -> Result<(), StoreError> {
        let (subscriptions, keys): (Vec<&str>, Vec<&str>) = deliveries
            .iter()
            .filter_map(|delivery| Some((delivery.subscription_id.as_str(), delivery.ordering_key?)))
            .unzip();
        if keys.is_empty() {
            return Ok(());
        }
        sqlx::query!(
            r#"
            SELECT d.seq
            FROM deliveries d
            JOIN (
                SELECT DISTINCT tail.subscription_id, tail.seq
                FROM unnest($1::text[], $2::text[]) AS k(subscription_id, ordering_key)
                CROSS JOIN LATERAL (
                    SELECT t.subscription_id, t.seq FROM deliveries t
                    WHERE t.subscription_id = k.subscription_id AND t.ordering_key = k.ordering_key
                      AND t.status IN ('pending', 'failed')
                    ORDER BY t.seq DESC LIMIT 1
                ) tail
            ) last ON last.subscription_id = d.subscription_id AND last.seq = d.seq
            WHERE d.status IN ('pending', 'failed')
            ORDER BY d.seq, d.subscription_id
            FOR UPDATE OF d
            "#,
            &subscriptions as &[&str],
            &keys as &[&str],
        )
        .fetch_all(self.store.run(&mut self.transaction))
        .await?;
        Ok(())
    }

    /// Makes the group durable. An error after this began leaves the outcome unknown; the event ids tell a retry.
    pub async fn commit(self) -> Result<(), StoreError> {
        Ok(self.transaction.commit().await?)
    }
}

/// The columns of new events, one array each.
#[derive(Default)]
struct EventColumns<'a> {
    id: Vec<&'a str>,
    event_type: Vec<&'a str>,
    version: Vec<i64>,
    source: Vec<&'a str>,
    actor: Vec<String>,
    on_behalf_of: Vec<Option<String>>,
    subject_type: Vec<&'a str>,
    subject_id: Vec<&'a str>,
    subject_revision: Vec<Option<i64>>,
    trace_id: Vec<&'a str>,
    priority: Vec<&'a str>,
    visibility: Vec<&'a str>,
    occurred_at: Vec<&'a str>,
    payload: Vec<&'a str>,
    hops: Vec<i32>,
    publisher: Vec<&'a str>,
    request_id: Vec<&'a str>,
    size_bytes: Vec<i64>,
}

impl<'a> EventColumns<'a> {
    fn of(events: &[NewEvent<'a>]) -> Self {
        let mut columns = Self::default();
        for event in events {
            let envelope = event.envelope;
            columns.id.push(envelope.event_id.as_str());
            columns.event_type.push(&envelope.event_type);
            columns.version.push(envelope.version);
            columns.source.push(&envelope.source);
            columns.actor.push(envelope.actor.to_json());
            columns
                .on_behalf_of
                .push(envelope.on_behalf_of.as_ref().map(|owner| owner.to_json()));
            columns.subject_type.push(&envelope.subject.kind);
            columns.subject_id.push(&envelope.subject.id);
            columns.subject_revision.push(envelope.subject.revision);
            columns.trace_id.push(&envelope.trace_id);
            columns.priority.push(envelope.priority.as_str());
            columns.visibility.push(envelope.visibility.as_str());
            columns.occurred_at.push(&envelope.timestamp);
            columns.payload.push(&envelope.payload);
            columns.hops.push(event.hops);
            columns.publisher.push(event.publisher);
            columns.request_id.push(event.request_id);
            columns.size_bytes.push(envelope.size_bytes());
        }
        columns
    }
}

/// The columns of new deliveries, one array each.
#[derive(Default)]
struct DeliveryColumns<'a> {
    event_id: Vec<&'a str>,
    subscription_id: Vec<&'a str>,
    ordering_key: Vec<Option<&'a str>>,
    /// No delivery before it in this group has its subscription and key.
    first_of_key: Vec<bool>,
    at_most_once: Vec<bool>,
}

impl<'a> DeliveryColumns<'a> {
    fn of(deliveries: &[NewDelivery<'a>]) -> Self {
        let mut columns = Self::default();
        let mut seen = std::collections::HashSet::new();
        for delivery in deliveries {
            columns.event_id.push(delivery.event_id.as_str());
            columns.subscription_id.push(delivery.subscription_id.as_str());
            columns.ordering_key.push(delivery.ordering_key);
            columns.at_most_once.push(delivery.at_most_once);
            columns.first_of_key.push(
                delivery
                    .ordering_key
                    .is_none_or(|key| seen.insert((delivery.subscription_id.as_str(), key))),
            );
        }
        columns
    }
}
