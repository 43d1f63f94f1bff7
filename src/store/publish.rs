//! One group of publishes: a transaction under the counter row, with a fixed number of round trips.
//!
//! The group is opened, asked, filled and committed by one function (`publish::group`); dropping it anywhere before its
//! commit leaves nothing behind.

use std::collections::HashMap;
use std::sync::Arc;

use sqlx::{Postgres, Transaction};

use crate::domain::app::{Env, Project, Quotas, Withdrawal};
use crate::domain::envelope::Envelope;
use crate::domain::ids::SubscriptionId;

use super::counts::{CountRole, PERIOD_MS};
use super::{Store, StoreError, View};

/// How far positions jump when the database's timeline changed: a fail-over may have lost the newest commits, and the
/// positions of those must never be given to other events.
const TIMELINE_JUMP: i64 = 1 << 32;

/// An open group. It holds the counter row, so it is the only one anywhere.
pub struct Group<'a> {
    pub(super) store: &'a Store,
    pub(super) transaction: Transaction<'static, Postgres>,
    /// The database clock when the counter was taken, milliseconds: `received_at` of everything stored.
    pub now_ms: i64,
    /// What is in force while the counter row is held. The store's own view may become older again meanwhile, by a reader
    /// that was slow.
    pub view: Arc<View>,
    /// What is known of the ids that the group was opened with; an id that is new has no entry.
    pub known: HashMap<String, KnownEvent>,
    /// The view was read within the group, and is in force once it is committed.
    pub(super) is_view_new: bool,
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
    ReceiptOnly {
        /// Whose it was and of which type, where a developer app published it; see [`receipt_owner`].
        owner: Option<String>,
    },
}

/// What the receipt of a developer app's event says of it.
pub fn receipt_owner(project: &Project, source: &str, event_type: &str) -> String {
    format!("{}/{}/{source}/{event_type}", project.id, project.env.as_str())
}

/// What a project holds, as its quotas count it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Held {
    /// Events received in the last 60 s.
    pub recent: i64,
    /// Bytes of its events.
    pub bytes: i64,
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
    /// Whose project, for a developer app's event.
    pub project: Option<Project>,
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
    /// Whose project, for a developer app's event.
    pub project: Option<&'a Project>,
}

/// A delivery of an accepted event.
#[derive(Debug, Clone, Copy)]
pub struct NewDelivery<'a> {
    /// The event, as its place among those of the same call.
    pub event: usize,
    /// Who receives it.
    pub subscription_id: &'a SubscriptionId,
    /// The key whose order it keeps, where there is one.
    pub ordering_key: Option<&'a str>,
    /// It may leave a process once only.
    pub at_most_once: bool,
    /// Who is to wake it, unless its key's backlog is on another carrier.
    pub carrier: &'a str,
    /// The decision on record that said so.
    pub placement_id: Option<i64>,
}

/// What was stored.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// The position of the first event, which the others follow without a hole.
    pub first: i64,
    /// By delivery; none where no key has a backlog on another carrier.
    pinned: Option<Vec<Option<String>>>,
}

impl Stored {
    /// The carrier that a delivery was put on, where its key's backlog is on another one than was planned.
    pub fn pinned(&self, delivery: usize) -> Option<&str> {
        self.pinned.as_ref()?.get(delivery)?.as_deref()
    }
}

impl Store {
    /// Stores a group in one round trip, where nothing is to be decided: the view of this version is in force, every id is
    /// new, no trace is deeper than `hops_max`, and no project exceeds its quotas. Answers the position of the first event, which the others follow
    /// without a hole; otherwise nothing is stored, and [`Store::open_group`] tells why.
    ///
    /// No id may stand in it twice, and the loop guard must have no need to see one of its events before another:
    /// `guarded` names the events it looks at. The depths in `events` are not used.
    pub async fn publish_at_once(
        &self,
        version: i64,
        hops_max: i32,
        guarded: &[bool],
        quotas: &Quotas,
        events: &[NewEvent<'_>],
        deliveries: &[NewDelivery<'_>],
    ) -> Result<Option<Stored>, StoreError> {
        let e = EventColumns::of(events);
        let q = QuotaColumns::of(quotas);
        let d = DeliveryColumns::of(deliveries);
        let guarded: Vec<Option<&str>> = guarded
            .iter()
            .zip(&e.trace_id)
            .map(|(guarded, trace_id)| guarded.then_some(*trace_id))
            .collect();
        let mut at_once = self.at_once().await?;
        let stored = sqlx::query!(
            r#"
            SELECT first_position AS "first!", pinned AS "pinned: Vec<Option<String>>" FROM publish_group(
                $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23,
                $24, $25, $26, $27, $28, $29, $30, $31, $32, $33, $34, $35
            )
            "#,
            version,
            hops_max,
            &guarded as &[Option<&str>],
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
            &e.publisher as &[&str],
            &e.request_id as &[&str],
            &e.size_bytes,
            &e.project_id as &[Option<&str>],
            &e.env as &[Option<&str>],
            &q.env as &[&str],
            &q.rate as &[Option<i64>],
            &q.bytes as &[Option<i64>],
            &d.event,
            &d.subscription_id as &[&str],
            &d.ordering_key as &[Option<&str>],
            &d.first_of_key,
            &d.at_most_once,
            &d.carrier as &[&str],
            &d.placement_id as &[Option<i64>],
            self.counts_owner,
            CountRole::Publish.name(),
            PERIOD_MS,
        )
        .fetch_optional(self.run(&mut at_once))
        .await;
        match stored {
            Ok(stored) => {
                at_once.end().await?;
                Ok(stored.map(|stored| Stored {
                    first: stored.first,
                    pinned: stored.pinned,
                }))
            }
            // An id that is stored without a receipt: whoever opens a group sees the event itself.
            Err(sqlx::Error::Database(error)) if error.is_unique_violation() => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens a group for events of these ids (at least one): takes the counter row, brings the view up to date, moves
    /// positions past a change of timeline, and reads what is known of the ids.
    pub async fn open_group(&self, ids: &[&str]) -> Result<Group<'_>, StoreError> {
        let mut transaction = self.begin_group().await?;
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
            SELECT i.id AS "id!", coalesce(e.seq, a.seq) AS seq, coalesce(e.source, a.source) AS source,
                   coalesce(e.event_type, a.event_type) AS event_type,
                   coalesce(e.project_id, a.project_id) AS project_id, coalesce(e.env, a.env) AS env,
                   r.event_id IS NOT NULL AS "receipt!", r.owner, now_ms() AS "now_ms!"
            FROM unnest($1::text[]) AS i(id)
            LEFT JOIN events e ON e.id = i.id
            LEFT JOIN events_archive a ON a.id = i.id
                AND a.epoch = (SELECT value FROM store_epoch WHERE name = 'events')
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
            is_view_new: false,
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
                    group.known.insert(row.id, KnownEvent::ReceiptOnly { owner: row.owner });
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
                    (SELECT last_value FROM event_positions), (SELECT head FROM log_bounds))) AS "position!"
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
        let of_apps = keys.iter().any(|key| key.project.is_some());
        let column = |part: fn(&LoopKey) -> &str| keys.iter().map(|key| part(key)).collect::<Vec<&str>>();
        let rows = sqlx::query!(
            r#"
            SELECT ordinal AS "ordinal!", deepest_other AS "deepest_other!", repeats AS "repeats!"
            FROM trace_depths($1, $2, $3, $4, $5, $6)
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
        let mut states = of_rows(
            rows.into_iter()
                .map(|row| (row.ordinal, row.deepest_other, row.repeats)),
            keys,
        );
        if of_apps {
            let project = |part: fn(&Project) -> &str| -> Vec<Option<&str>> {
                keys.iter().map(|key| key.project.as_ref().map(part)).collect()
            };
            let rows = sqlx::query!(
                r#"
                SELECT ordinal AS "ordinal!", deepest_other AS "deepest_other!", repeats AS "repeats!"
                FROM app_trace_depths($1, $2, $3, $4, $5, $6, $7, $8)
                "#,
                &column(|key| &key.trace_id) as &[&str],
                &column(|key| &key.source) as &[&str],
                &column(|key| &key.event_type) as &[&str],
                &column(|key| &key.subject_type) as &[&str],
                &column(|key| &key.subject_id) as &[&str],
                &project(|project| &project.id) as &[Option<&str>],
                &project(|project| project.env.as_str()) as &[Option<&str>],
                i64::from(hops_max) * 128,
            )
            .fetch_all(self.store.run(&mut self.transaction))
            .await?;
            states.extend(of_rows(
                rows.into_iter()
                    .map(|row| (row.ordinal, row.deepest_other, row.repeats)),
                keys,
            ));
        }
        Ok(states)
    }

    /// What these projects hold while the counter row is held: others can only take away from it meanwhile. `brought` is
    /// how many events each may be given. Where the seconds of the last minute leave no room for those, its newest events
    /// themselves tell how many came within 60 s, as many of them as the quota allows.
    pub async fn held(
        &mut self,
        brought: &HashMap<&Project, i64>,
        quotas: &Quotas,
    ) -> Result<HashMap<Project, Held>, StoreError> {
        if brought.is_empty() {
            return Ok(HashMap::new());
        }
        let (projects, events): (Vec<&Project>, Vec<i64>) =
            brought.iter().map(|(project, events)| (*project, *events)).unzip();
        let rows = sqlx::query!(
            r#"
            SELECT p.place AS "place!", coalesce(t.retained_bytes, 0) AS "bytes!",
                   CASE WHEN coalesce(t.recent, 0) + p.events > p.rate THEN (
                       SELECT count(*) FROM (
                           SELECT e.received_at FROM events e WHERE e.project_id = p.project_id AND e.env = p.env
                           ORDER BY e.seq DESC LIMIT p.rate
                       ) newest WHERE newest.received_at > $1::bigint - 60000
                   ) ELSE coalesce(t.recent, 0) END AS "recent!"
            FROM unnest($2::text[], $3::text[], $4::bigint[], $5::bigint[])
                WITH ORDINALITY AS p(project_id, env, events, rate, place)
            LEFT JOIN LATERAL (
                SELECT t.retained_bytes, recent_events(t.recent_second, t.recent_events, $1) AS recent
                FROM app_totals t WHERE t.project_id = p.project_id AND t.env = p.env
                LIMIT 1
            ) t ON true
            "#,
            self.now_ms,
            &projects.iter().map(|project| &*project.id).collect::<Vec<_>>() as &[&str],
            &projects.iter().map(|project| project.env.as_str()).collect::<Vec<_>>() as &[&str],
            &events,
            &projects
                .iter()
                .map(|project| quotas.of(project.env).publish_per_minute)
                .collect::<Vec<_>>() as &[Option<i64>],
        )
        .fetch_all(self.store.run(&mut self.transaction))
        .await?;
        let held = rows.into_iter().filter_map(|row| {
            let project = projects.get(usize::try_from(row.place - 1).ok()?)?;
            let held = Held {
                recent: row.recent,
                bytes: row.bytes,
            };
            Some(((*project).clone(), held))
        });
        Ok(held.collect())
    }

    /// Puts withdrawals in force with the commit of the group: what was withdrawn later stays so, and every subscription of
    /// the apps is disabled. What this group itself stores is no longer queued for them.
    pub async fn withdraw(&mut self, withdrawals: &[Withdrawal]) -> Result<(), StoreError> {
        if withdrawals.is_empty() {
            return Ok(());
        }
        let consumers: Vec<&str> = withdrawals.iter().map(|one| one.consumer.as_str()).collect();
        sqlx::query!(
            r#"
            INSERT INTO app_revocations AS r (consumer, scope, revoked_at)
            SELECT w.consumer, w.scope, max(coalesce(w.at_ms, $4))
            FROM unnest($1::text[], $2::text[], $3::bigint[]) AS w(consumer, scope, at_ms)
            GROUP BY w.consumer, w.scope
            ON CONFLICT (consumer, scope) DO UPDATE SET revoked_at = greatest(r.revoked_at, excluded.revoked_at)
            "#,
            &consumers as &[&str],
            &withdrawals.iter().map(|one| one.scope.as_str()).collect::<Vec<_>>() as &[&str],
            &withdrawals.iter().map(|one| one.at_ms).collect::<Vec<_>>() as &[Option<i64>],
            self.now_ms,
        )
        .execute(self.store.run(&mut self.transaction))
        .await?;
        sqlx::query!(
            r#"
            WITH locked AS MATERIALIZED (
                SELECT id FROM subscriptions WHERE consumer = ANY($1) AND enabled = 1
                ORDER BY id
                FOR UPDATE
            )
            UPDATE subscriptions s SET enabled = 0, updated_at = $2
            FROM locked l WHERE s.id = l.id
            "#,
            &consumers as &[&str],
            self.now_ms,
        )
        .execute(self.store.run(&mut self.transaction))
        .await?;
        self.view = Arc::new(self.store.read_view_on(&mut self.transaction).await?);
        self.is_view_new = true;
        Ok(())
    }

    /// Stores accepted events with their receipts and deliveries, in the order given; answers the position of the first,
    /// which the others follow without a hole.
    pub async fn store(
        &mut self,
        events: &[NewEvent<'_>],
        deliveries: &[NewDelivery<'_>],
    ) -> Result<Stored, StoreError> {
        if events.is_empty() {
            return Ok(Stored::default());
        }
        let e = EventColumns::of(events);
        let d = DeliveryColumns::of(deliveries);
        let hops: Vec<i32> = events.iter().map(|event| event.hops).collect();
        let stored = sqlx::query!(
            r#"
            SELECT first_position AS "first!", pinned AS "pinned: Vec<Option<String>>" FROM store_events(
                $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23,
                $24, $25, $26, $27, $28, $29, $30, $31
            )
            "#,
            self.now_ms,
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
            &hops,
            &e.publisher as &[&str],
            &e.request_id as &[&str],
            &e.size_bytes,
            &e.project_id as &[Option<&str>],
            &e.env as &[Option<&str>],
            &d.event,
            &d.subscription_id as &[&str],
            &d.ordering_key as &[Option<&str>],
            &d.first_of_key,
            &d.at_most_once,
            &d.carrier as &[&str],
            &d.placement_id as &[Option<i64>],
            self.store.counts_owner,
            CountRole::Publish.name(),
            PERIOD_MS,
        )
        .fetch_one(self.store.run(&mut self.transaction))
        .await?;
        Ok(Stored {
            first: stored.first,
            pinned: stored.pinned,
        })
    }

    /// Makes the group durable. An error after this began leaves the outcome unknown; the event ids tell a retry.
    pub async fn commit(self) -> Result<(), StoreError> {
        self.transaction.commit().await?;
        if self.is_view_new {
            self.store.show_view(self.view);
        }
        Ok(())
    }
}

fn of_rows(rows: impl Iterator<Item = (i64, i32, i32)>, keys: &[&LoopKey]) -> HashMap<LoopKey, LoopState> {
    let states = rows.filter_map(|(ordinal, deepest_other, repeats)| {
        let key = keys.get(usize::try_from(ordinal - 1).ok()?)?;
        let state = LoopState { deepest_other, repeats };
        Some(((*key).clone(), state))
    });
    states.collect()
}

/// The quotas that a publish is held to, one array each.
struct QuotaColumns {
    env: [&'static str; 2],
    rate: [Option<i64>; 2],
    bytes: [Option<i64>; 2],
}

impl QuotaColumns {
    fn of(quotas: &Quotas) -> Self {
        let both = [Env::Production, Env::Sandbox];
        Self {
            env: both.map(Env::as_str),
            rate: both.map(|env| quotas.of(env).publish_per_minute),
            bytes: both.map(|env| quotas.of(env).retained_bytes),
        }
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
    publisher: Vec<&'a str>,
    request_id: Vec<&'a str>,
    size_bytes: Vec<i64>,
    /// Empty where no event is an app's, so that those of services cost nothing more; likewise `env`.
    project_id: Vec<Option<&'a str>>,
    env: Vec<Option<&'a str>>,
}

impl<'a> EventColumns<'a> {
    fn of(events: &[NewEvent<'a>]) -> Self {
        let mut columns = Self::default();
        let of_apps = events.iter().any(|event| event.project.is_some());
        for event in events {
            let envelope = event.envelope;
            if of_apps {
                columns.project_id.push(event.project.map(|project| &*project.id));
                columns.env.push(event.project.map(|project| project.env.as_str()));
            }
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
    /// From 1, as the database counts.
    event: Vec<i32>,
    subscription_id: Vec<&'a str>,
    ordering_key: Vec<Option<&'a str>>,
    /// No delivery before it in this group has its subscription and key.
    first_of_key: Vec<bool>,
    at_most_once: Vec<bool>,
    carrier: Vec<&'a str>,
    placement_id: Vec<Option<i64>>,
}

impl<'a> DeliveryColumns<'a> {
    fn of(deliveries: &[NewDelivery<'a>]) -> Self {
        let mut columns = Self::default();
        let mut seen = std::collections::HashSet::new();
        for delivery in deliveries {
            columns
                .event
                .push(i32::try_from(delivery.event + 1).expect("a group is small"));
            columns.subscription_id.push(delivery.subscription_id.as_str());
            columns.ordering_key.push(delivery.ordering_key);
            columns.at_most_once.push(delivery.at_most_once);
            columns.carrier.push(delivery.carrier);
            columns.placement_id.push(delivery.placement_id);
            columns.first_of_key.push(
                delivery
                    .ordering_key
                    .is_none_or(|key| seen.insert((delivery.subscription_id.as_str(), key))),
            );
        }
        columns
    }
}
