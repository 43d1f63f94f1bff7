//! Sending again: an operator puts deliveries back into the queue, or makes them for events from before.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use planner::{Intent, PolicyKey};
use sqlx::PgConnection;
use tokio::time::Instant;

use crate::domain::app;
use crate::domain::ids::SubscriptionId;
use crate::domain::json::SAFE_INTEGER_MAX;
use crate::domain::policy::Semantics;
use crate::domain::time::Millis;
use crate::domain::topic::TopicPattern;

use super::counts::CountRole;
use super::settle::{Key, ROUNDS_MAX};
use super::{DeliveryCounts, Group, NewPlacement, Store, StoreError};

/// Events that one replay examines, whatever matches.
const SCAN_ROWS_MAX: i64 = 100_000;
/// Deliveries that one replay queues.
const QUEUED_MAX: i64 = 10_000;
/// Deliveries queued by one transaction: publishing waits while it runs.
const CHUNK: usize = 500;
/// A replay begins no further transaction after this time; its caller goes on with another call.
const TIME_MAX: Duration = Duration::from_secs(10);

/// How far the database's clock may have been set back without a replay by time missing anything, in milliseconds.
const CLOCK_BACK_MS: i64 = 10_000;
/// Events looked at one by one to find the first of a time, once the search has come near.
const NEAR_ROWS_MAX: i64 = 200_000;

/// Which events to send again.
#[derive(Debug, Clone)]
pub enum ReplaySelection {
    /// These events.
    Events(Vec<String>),
    /// Everything from this position on that the subscription's pattern matches.
    FromPosition(i64),
    /// Everything from the first event on that was received at or after this time, by the database's clock.
    ///
    /// Receive times grow with positions unless that clock is set back. Where it was, by no more than
    /// [`CLOCK_BACK_MS`], nothing received at or after the time is left out; some that the clock then called earlier follow.
    Since(Millis),
}

/// What a replay did with a delivery, or found instead of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replay {
    /// There was none; it was made and is due.
    Created,
    /// It is due again, from its first attempt.
    Again,
    /// An attempt of it is running; it is due again when that has ended.
    InFlight,
    /// The subscription does not receive the event: it is there and is not delivered.
    Unmatched,
}

/// What a replay did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Deliveries that are due again or will be: made, reset, or due when their attempt ends.
    pub queued: i64,
    /// Those of them that there were none of before.
    pub created: i64,
    /// Those of them whose attempt was running.
    pub in_flight: i64,
    /// Whether the subscription is enabled; the deliveries of one that is not wait until it is.
    pub enabled: bool,
    /// The position to continue from, where a bound, the time or a failure cut the selection.
    pub next: Option<i64>,
    /// What became of each event, where they were named; one that is absent is not stored.
    pub events: HashMap<String, Replay>,
}

impl Replayed {
    fn add(&mut self, replay: Replay) {
        self.queued += 1;
        self.created += i64::from(replay == Replay::Created);
        self.in_flight += i64::from(replay == Replay::InFlight);
    }
}

/// Decides how the deliveries that a replay queues are woken.
pub trait Placer: Sync {
    /// What one transaction decides. Dropping it forgets what is new in it.
    type Decisions: Placements + Send;

    /// Nothing is decided yet.
    fn begin(&self) -> Self::Decisions;

    /// Decides for a policy, and answers the decision's place; the same one again for the same policy.
    fn decide(&self, decisions: &mut Self::Decisions, policy: &PolicyKey, intent: &Intent) -> usize;

    /// Remembers what was decided, now that it has been committed.
    fn committed(&self, decisions: Self::Decisions);
}

/// The decisions of one transaction.
pub trait Placements {
    /// Those that must be put on record.
    fn unrecorded(&self) -> Vec<NewPlacement<'_>>;

    /// They are on record under these ids, in the order of [`Placements::unrecorded`].
    fn recorded(&mut self, ids: &[i64]);

    /// The carrier that was decided on, and the id of the decision on record.
    fn placement(&self, place: usize) -> (&str, Option<i64>);
}

/// What a subscription receives: the rule of the fan-out.
struct Receives {
    pattern: TopicPattern,
    /// An app's project; a service has none.
    project_id: Option<String>,
    env: String,
}

/// A stored event that was named.
struct Named {
    id: String,
    position: i64,
    matches: bool,
}

/// The rows that a replay makes, one array a column.
#[derive(Default)]
struct NewRows {
    position: Vec<i64>,
    key: Vec<Option<String>>,
    at_most_once: Vec<bool>,
}

/// How every row of a replay is woken, made or not, one array a column.
#[derive(Default)]
struct Woken {
    position: Vec<i64>,
    key: Vec<Option<String>>,
    carrier: Vec<String>,
    placement_id: Vec<Option<i64>>,
}

/// A key of which a replay puts rows back.
struct Replaying {
    /// The marked row before the replay; 0 where nothing was unfinished.
    head: i64,
    /// The same, where it runs: it keeps its mark until it settles.
    running: Option<i64>,
    /// No row of the key before this position is unfinished.
    from: i64,
}

impl Default for Replaying {
    fn default() -> Self {
        Self {
            head: 0,
            running: None,
            from: i64::MAX,
        }
    }
}

impl Replaying {
    /// A row may be unfinished at this position.
    fn reopen(&mut self, position: i64) {
        self.from = self.from.min(position);
    }
}

impl Store {
    /// Queues deliveries of a subscription again; `None` when there is no such subscription.
    ///
    /// A claimed row only gets a new generation: the claim that runs releases it at its end, so no result of it can
    /// overwrite the reset row. Named events are queued all or none. A longer selection is queued chunk by chunk, and what
    /// was committed is told, also where the next chunk failed: that one may be queued once more by whoever goes on.
    ///
    /// Each delivery is placed anew by the policy in force, and joins the backlog of its key where there is one.
    pub async fn replay(
        &self,
        subscription_id: &SubscriptionId,
        selection: &ReplaySelection,
        placer: &impl Placer,
    ) -> Result<Option<Replayed>, StoreError> {
        let began = Instant::now();
        let id = subscription_id.as_str();
        let mut reader = self.reader().await?;
        let subscription = sqlx::query!(
            r#"
            SELECT topic_pattern, enabled = 1 AS "enabled!", project_id, env FROM subscriptions WHERE id = $1
            "#,
            id
        )
        .fetch_optional(self.run(&mut reader))
        .await?;
        let Some(subscription) = subscription else {
            return Ok(None);
        };
        let pattern = TopicPattern::parse(&subscription.topic_pattern);
        let pattern = pattern.ok_or(StoreError::Corrupt { what: "topic pattern" })?;
        let receives = Receives {
            pattern,
            project_id: subscription.project_id,
            env: subscription.env,
        };
        let mut replayed = Replayed {
            enabled: subscription.enabled,
            ..Replayed::default()
        };
        let from = match selection {
            ReplaySelection::Events(ids) => {
                let named = self.named(&mut reader, &receives, ids).await?;
                drop(reader);
                self.replay_named(id, named, placer, &mut replayed).await?;
                return Ok(Some(replayed));
            }
            ReplaySelection::FromPosition(from) => *from,
            ReplaySelection::Since(since) => self.first_received(&mut reader, *since).await?,
        };
        let (positions, next) = self.matching_from(&mut reader, &receives, from).await?;
        drop(reader);
        replayed.next = next;
        // One transaction a chunk, so that no publish waits for a whole replay.
        for (done, chunk) in positions.chunks(CHUNK).enumerate() {
            let requeued = match done {
                0 => self.requeue_chunk(id, chunk, placer).await?,
                _ if began.elapsed() >= TIME_MAX => {
                    replayed.next = chunk.first().copied();
                    break;
                }
                _ => match self.requeue_chunk(id, chunk, placer).await {
                    Ok(requeued) => requeued,
                    Err(error) => {
                        tracing::warn!(error = %error, subscription_id = id, "a replay was cut short: {error}");
                        replayed.next = chunk.first().copied();
                        break;
                    }
                },
            };
            requeued.into_values().for_each(|replay| replayed.add(replay));
        }
        Ok(Some(replayed))
    }

    /// Those of the named events that are stored.
    async fn named(
        &self,
        reader: &mut PgConnection,
        receives: &Receives,
        ids: &[String],
    ) -> Result<Vec<Named>, StoreError> {
        let rows = sqlx::query!(
            r#"
            SELECT id, seq, event_type,
                   CASE WHEN $2::text IS NOT NULL AND project_id IS NOT NULL THEN project_id = $2 AND env = $3
                        WHEN project_id IS NOT NULL THEN env = 'production' AND $4::boolean
                        ELSE env = 'production' AND ($2 IS NULL OR visibility = 'public') END AS "visible!"
            FROM events
            WHERE id = ANY($1)
            ORDER BY seq
            "#,
            ids,
            receives.project_id,
            receives.env,
            app::is_of_apps(&receives.pattern),
        )
        .fetch_all(self.run(reader))
        .await?;
        let named = rows.into_iter().map(|row| Named {
            id: row.id,
            position: row.seq,
            matches: row.visible && receives.pattern.matches(&row.event_type),
        });
        Ok(named.collect())
    }

    async fn replay_named(
        &self,
        id: &str,
        named: Vec<Named>,
        placer: &impl Placer,
        replayed: &mut Replayed,
    ) -> Result<(), StoreError> {
        let matching = named.iter().filter(|event| event.matches);
        let positions: Vec<i64> = matching.map(|event| event.position).collect();
        if !positions.is_empty() {
            let requeued = self.requeue_chunk(id, &positions, placer).await?;
            for event in named.iter().filter(|event| event.matches) {
                // Without a row the event was removed meanwhile.
                let Some(&replay) = requeued.get(&event.position) else {
                    continue;
                };
                replayed.add(replay);
                replayed.events.insert(event.id.clone(), replay);
            }
        }
        let unmatched = named.into_iter().filter(|event| !event.matches);
        replayed
            .events
            .extend(unmatched.map(|event| (event.id, Replay::Unmatched)));
        Ok(())
    }

    /// The position to begin with for what was received from `since` on. It halves the log, so its cost does not grow with
    /// it, looking for a time somewhat earlier; from there it goes on row by row, within a bound. Where that is met, what
    /// follows was received earlier and is sent all the same: better than to leave something out.
    async fn first_received(&self, reader: &mut PgConnection, since: Millis) -> Result<i64, StoreError> {
        let near = sqlx::query_scalar!(
            r#"
            WITH RECURSIVE search AS (
                SELECT 0::bigint AS lo, coalesce((SELECT max(seq) FROM events), 0) + 1 AS hi
                UNION ALL
                SELECT CASE WHEN probe.received_at < $1 THEN probe.seq ELSE s.lo END,
                       CASE WHEN probe.received_at < $1 THEN s.hi ELSE (s.lo + s.hi) / 2 END
                FROM search s
                LEFT JOIN LATERAL (
                    SELECT e.seq, e.received_at FROM events e
                    WHERE e.seq >= (s.lo + s.hi) / 2 AND e.seq < s.hi
                    ORDER BY e.seq LIMIT 1
                ) probe ON true
                WHERE s.hi - s.lo > 1
            )
            SELECT min(hi) AS "near!" FROM search
            "#,
            since.0.saturating_sub(CLOCK_BACK_MS),
        )
        .fetch_one(self.run(reader))
        .await?;
        let first = sqlx::query_scalar!(
            r#"
            SELECT seq FROM (
                SELECT seq, received_at, row_number() OVER (ORDER BY seq) AS row FROM events
                WHERE seq >= $1 ORDER BY seq LIMIT $3
            ) near
            WHERE received_at >= $2 OR row = $3
            ORDER BY seq LIMIT 1
            "#,
            near,
            since.0,
            NEAR_ROWS_MAX,
        )
        .fetch_optional(self.run(reader))
        .await?;
        // Nothing is that young: the scan from the end of the log finds nothing either.
        Ok(first.unwrap_or(SAFE_INTEGER_MAX))
    }

    /// Positions from `from` on, and where to continue when there are more or the scan met its bound.
    async fn matching_from(
        &self,
        reader: &mut PgConnection,
        receives: &Receives,
        from: i64,
    ) -> Result<(Vec<i64>, Option<i64>), StoreError> {
        let found = sqlx::query!(
            r#"
            WITH page AS MATERIALIZED (
                SELECT seq, event_type, env, project_id, visibility FROM events WHERE seq >= $1 ORDER BY seq LIMIT $3
            ), hits AS MATERIALIZED (
                SELECT seq FROM page
                WHERE event_type LIKE $2
                  AND CASE WHEN $5::text IS NOT NULL AND project_id IS NOT NULL THEN project_id = $5 AND env = $6
                           WHEN project_id IS NOT NULL THEN env = 'production' AND $7::boolean
                           ELSE env = 'production' AND ($5 IS NULL OR visibility = 'public') END
                ORDER BY seq
                LIMIT $4::bigint + 1
            )
            SELECT (SELECT array_agg(seq ORDER BY seq) FROM hits) AS hits,
                   CASE WHEN (SELECT count(*) FROM hits) <= $4 AND (SELECT count(*) FROM page) = $3
                        THEN (SELECT max(seq) + 1 FROM page) END AS scan_next
            "#,
            from,
            receives.pattern.like().unwrap_or_else(|| "%".to_owned()),
            SCAN_ROWS_MAX,
            QUEUED_MAX,
            receives.project_id,
            receives.env,
            app::is_of_apps(&receives.pattern),
        )
        .fetch_one(self.run(reader))
        .await?;
        let mut positions = found.hits.unwrap_or_default();
        let kept = usize::try_from(QUEUED_MAX).unwrap_or(usize::MAX);
        let next = positions.get(kept).copied().or(found.scan_next);
        positions.truncate(kept);
        Ok((positions, next))
    }

    /// Queues these again in one transaction, and says what became of each; an event that is gone is left out.
    async fn requeue_chunk(
        &self,
        subscription_id: &str,
        positions: &[i64],
        placer: &impl Placer,
    ) -> Result<HashMap<i64, Replay>, StoreError> {
        for _ in 0..ROUNDS_MAX {
            let mut transaction = self.begin().await?;
            let version = sqlx::query_scalar!("SELECT version FROM store_counter WHERE name = 'events' FOR UPDATE")
                .fetch_one(self.run(&mut transaction))
                .await?;
            let mut view = self.view();
            if version != view.version {
                view = self.reload_view_on(&mut transaction).await?;
            }
            // It holds the counter row as a publish does, so that decisions are put on record alike.
            let mut group = Group {
                store: self,
                transaction,
                now_ms: 0,
                view,
                known: HashMap::new(),
                is_view_new: false,
            };
            let mut decisions = placer.begin();
            let (new, woken) = self
                .rows(&mut group, subscription_id, positions, placer, &mut decisions)
                .await?;
            let held = self
                .lock_keys(&mut group.transaction, subscription_id, positions, &new)
                .await?;
            if let Some(held) = held {
                let requeued = self
                    .requeue(&mut group.transaction, subscription_id, positions, &new, &woken, &held)
                    .await?;
                group.commit().await?;
                placer.committed(decisions);
                return Ok(requeued);
            }
        }
        Err(StoreError::marks_keep_moving())
    }

    /// How the rows that are not there yet are to be carried, by the policies in force, and how all of them are woken; a
    /// row that exists keeps the key and the semantics that it was made with.
    async fn rows<P: Placer>(
        &self,
        group: &mut Group<'_>,
        subscription_id: &str,
        positions: &[i64],
        placer: &P,
        decisions: &mut P::Decisions,
    ) -> Result<(NewRows, Woken), StoreError> {
        let rows = sqlx::query!(
            r#"
            SELECT e.seq, e.event_type, d.seq IS NULL AS "missing!", d.ordering_key AS "ordering_key?",
                   now_ms() AS "now_ms!"
            FROM events e
            LEFT JOIN deliveries d ON d.subscription_id = $1 AND d.seq = e.seq
            WHERE e.seq = ANY($2)
            ORDER BY e.seq
            "#,
            subscription_id,
            positions,
        )
        .fetch_all(self.run(&mut group.transaction))
        .await?;
        group.now_ms = rows.first().map_or(0, |row| row.now_ms);
        let policies = Arc::clone(&group.view);
        let policies = &policies.policies;
        let ordered: Vec<i64> = rows
            .iter()
            .filter(|row| row.missing && policies.policy(&row.event_type).is_ordered())
            .map(|row| row.seq)
            .collect();
        let events = self.events_at(&mut group.transaction, &ordered).await?;
        let (mut new, mut woken) = (NewRows::default(), Woken::default());
        let mut places = Vec::with_capacity(rows.len());
        for row in rows {
            let (policy_key, policy) = policies.in_force(&row.event_type);
            places.push(placer.decide(decisions, policy_key, policy.intent()));
            let mut key = row.ordering_key;
            if row.missing {
                let event = events.binary_search_by_key(&row.seq, |event| event.position).ok();
                key = event.and_then(|index| policy.ordering_key(&events[index].envelope));
                new.position.push(row.seq);
                new.key.push(key.clone());
                new.at_most_once.push(policy.semantics() == Semantics::AtMostOnce);
            }
            woken.position.push(row.seq);
            woken.key.push(key);
        }
        let ids = group.record_placements(&decisions.unrecorded()).await?;
        decisions.recorded(&ids);
        let backlogs = self
            .backlogs(&mut group.transaction, subscription_id, &woken.key)
            .await?;
        // What is queued first is the backlog of what follows.
        let mut joined: HashMap<&str, String> = HashMap::new();
        for (place, key) in places.into_iter().zip(&woken.key) {
            let (carrier, placement_id) = decisions.placement(place);
            let carrier = match key.as_deref() {
                None => carrier.to_owned(),
                Some(key) => joined
                    .entry(key)
                    .or_insert_with(|| backlogs.get(key).map_or(carrier, String::as_str).to_owned())
                    .clone(),
            };
            woken.carrier.push(carrier);
            woken.placement_id.push(placement_id);
        }
        Ok((new, woken))
    }

    /// The carrier that the backlog of each of these keys is on, as a publish finds it: that of its newest row.
    async fn backlogs(
        &self,
        transaction: &mut PgConnection,
        subscription_id: &str,
        keys: &[Option<String>],
    ) -> Result<HashMap<String, String>, StoreError> {
        let keys: BTreeSet<&str> = keys.iter().filter_map(Option::as_deref).collect();
        if keys.is_empty() {
            return Ok(HashMap::new());
        }
        let keys: Vec<&str> = keys.into_iter().collect();
        let found = sqlx::query!(
            r#"
            SELECT k.key AS "key!", tail.carrier AS "carrier!"
            FROM unnest($2::text[]) AS k(key)
            LEFT JOIN LATERAL (
                SELECT least(r.open_from, r.seq) AS start FROM deliveries r
                WHERE r.subscription_id = $1 AND r.ordering_key = k.key AND r.head AND r.status IN ('delivered', 'dead')
                ORDER BY r.seq DESC LIMIT 1
            ) rest ON true
            CROSS JOIN LATERAL (
                SELECT t.carrier FROM deliveries t
                WHERE t.subscription_id = $1 AND t.ordering_key = k.key AND t.seq >= coalesce(rest.start, 0)
                  AND t.status IN ('pending', 'failed')
                ORDER BY t.seq DESC LIMIT 1
            ) tail
            WHERE tail.carrier IS NOT NULL
            "#,
            subscription_id,
            &keys as &[&str],
        )
        .fetch_all(self.run(transaction))
        .await?;
        Ok(found.into_iter().map(|row| (row.key, row.carrier)).collect())
    }

    /// Takes the right to make these rows and to move the marks of their keys: the rows that are held then; `None` when it
    /// has to be tried anew.
    ///
    /// The caller holds the counter row: no publish and no other replay makes rows at the same time, so what is counted
    /// as new is new, and no key without an unfinished row gets a mark from two sides. Whoever moves a mark holds the
    /// marked row; the rows and the marks are locked in position order, as a settle locks its rows. A mark that moved while
    /// this waited is locked without waiting: its holder may be waiting for a row that is held here. With the marks goes the
    /// row of each key where it was last at rest.
    async fn lock_keys(
        &self,
        transaction: &mut PgConnection,
        subscription_id: &str,
        positions: &[i64],
        new: &NewRows,
    ) -> Result<Option<Vec<i64>>, StoreError> {
        let mut held = sqlx::query_scalar!(
            r#"
            WITH mine AS (
                SELECT seq, ordering_key FROM deliveries WHERE subscription_id = $1 AND seq = ANY($2)
            ), wanted AS (
                SELECT seq FROM mine
                UNION
                SELECT marked.seq
                FROM (
                    SELECT ordering_key FROM mine WHERE ordering_key IS NOT NULL
                    UNION SELECT n.key FROM unnest($3::text[]) AS n(key) WHERE n.key IS NOT NULL
                ) k
                LEFT JOIN LATERAL (
                    SELECT r.seq, least(r.open_from, r.seq) AS start FROM deliveries r
                    WHERE r.subscription_id = $1 AND r.ordering_key = k.ordering_key
                      AND r.head AND r.status IN ('delivered', 'dead')
                    ORDER BY r.seq DESC LIMIT 1
                ) rest ON true
                LEFT JOIN LATERAL (
                    SELECT m.seq FROM deliveries m
                    WHERE m.subscription_id = $1 AND m.ordering_key = k.ordering_key AND m.seq >= coalesce(rest.start, 0)
                      AND m.status IN ('pending', 'failed') AND m.head
                    ORDER BY m.seq LIMIT 1
                ) open ON true
                CROSS JOIN LATERAL (VALUES (rest.seq), (open.seq)) marked(seq)
            )
            SELECT d.seq
            FROM deliveries d
            JOIN wanted w ON w.seq = d.seq
            WHERE d.subscription_id = $1
            ORDER BY d.seq
            FOR UPDATE OF d
            "#,
            subscription_id,
            positions,
            &new.key as &[Option<String>],
        )
        .fetch_all(self.run(transaction))
        .await?;
        let moved = sqlx::query!(
            r#"
            WITH marked AS MATERIALIZED (
                SELECT marked.seq, marked.open
                FROM (
                    SELECT ordering_key FROM deliveries
                    WHERE subscription_id = $1 AND seq = ANY($2) AND ordering_key IS NOT NULL
                    UNION SELECT n.key FROM unnest($4::text[]) AS n(key) WHERE n.key IS NOT NULL
                ) k
                LEFT JOIN LATERAL (
                    SELECT r.seq, least(r.open_from, r.seq) AS start FROM deliveries r
                    WHERE r.subscription_id = $1 AND r.ordering_key = k.ordering_key
                      AND r.head AND r.status IN ('delivered', 'dead')
                    ORDER BY r.seq DESC LIMIT 1
                ) rest ON true
                LEFT JOIN LATERAL (
                    SELECT m.seq FROM deliveries m
                    WHERE m.subscription_id = $1 AND m.ordering_key = k.ordering_key AND m.seq >= coalesce(rest.start, 0)
                      AND m.status IN ('pending', 'failed') AND m.head
                    ORDER BY m.seq LIMIT 1
                ) open ON true
                CROSS JOIN LATERAL (VALUES (rest.seq, false), (open.seq, true)) marked(seq, open)
                WHERE marked.seq IS NOT NULL AND marked.seq <> ALL($3)
            ), locked AS MATERIALIZED (
                SELECT d.seq
                FROM deliveries d
                JOIN marked m ON m.seq = d.seq
                WHERE d.subscription_id = $1 AND d.head AND (d.status IN ('pending', 'failed')) = m.open
                FOR UPDATE OF d SKIP LOCKED
            )
            SELECT (SELECT count(*) FROM marked) AS "marks!", ARRAY(SELECT seq FROM locked) AS "locked!"
            "#,
            subscription_id,
            positions,
            &held,
            &new.key as &[Option<String>],
        )
        .fetch_one(self.run(transaction))
        .await?;
        let marks = usize::try_from(moved.marks).unwrap_or(usize::MAX);
        let all = marks == moved.locked.len();
        held.extend(moved.locked);
        Ok(all.then_some(held))
    }

    /// Resets or makes the deliveries of these positions and moves the marks of their keys. `held` are the rows that are
    /// locked: those that exist, and those that carry the marks.
    async fn requeue(
        &self,
        transaction: &mut PgConnection,
        subscription_id: &str,
        positions: &[i64],
        new: &NewRows,
        woken: &Woken,
        held: &[i64],
    ) -> Result<HashMap<i64, Replay>, StoreError> {
        let before = sqlx::query!(
            r#"
            SELECT seq AS "seq!", ordering_key, status AS "status!", head AS "head!",
                   lease_until IS NOT NULL AS "claimed!", seq = ANY($3) AS "replayed!", least(open_from, seq) AS "start!"
            FROM deliveries
            WHERE subscription_id = $1 AND seq = ANY($2)
            ORDER BY seq
            "#,
            subscription_id,
            held,
            positions,
        )
        .fetch_all(self.run(transaction))
        .await?;
        let written = sqlx::query_scalar!(
            r#"
            INSERT INTO deliveries AS d (
                event_id, subscription_id, seq, priority, next_attempt_at, created_at, updated_at, ordering_key,
                at_most_once, head, carrier, placement_id
            )
            SELECT e.id, $1, e.seq, CASE e.priority WHEN 'critical' THEN 0 WHEN 'important' THEN 1 ELSE 2 END,
                   now_ms(), now_ms(), now_ms(), n.key, coalesce(n.at_most_once, false), n.key IS NULL,
                   w.carrier, w.placement_id
            FROM events e
            JOIN unnest($6::bigint[], $7::text[], $8::bigint[]) AS w(seq, carrier, placement_id) ON w.seq = e.seq
            LEFT JOIN unnest($3::bigint[], $4::text[], $5::boolean[]) AS n(seq, key, at_most_once) ON n.seq = e.seq
            WHERE e.seq = ANY($2)
            -- An event that leaves the hot store takes its deliveries along; none may be made for it meanwhile.
            FOR KEY SHARE OF e
            ON CONFLICT (subscription_id, seq) DO UPDATE
            SET generation = d.generation + 1, updated_at = now_ms(), skipped = false,
                carrier = excluded.carrier, placement_id = excluded.placement_id,
                status = CASE WHEN d.lease_until IS NULL THEN 'pending' ELSE d.status END,
                attempt = CASE WHEN d.lease_until IS NULL THEN 0 ELSE d.attempt END,
                next_attempt_at = CASE WHEN d.lease_until IS NULL THEN now_ms() ELSE d.next_attempt_at END,
                last_error = CASE WHEN d.lease_until IS NULL THEN NULL ELSE d.last_error END,
                last_status = CASE WHEN d.lease_until IS NULL THEN NULL ELSE d.last_status END,
                delivered_at = CASE WHEN d.lease_until IS NULL THEN NULL ELSE d.delivered_at END,
                head = CASE WHEN d.lease_until IS NOT NULL THEN d.head
                            ELSE d.ordering_key IS NULL OR (d.head AND d.status IN ('pending', 'failed')) END
            RETURNING seq
            "#,
            subscription_id,
            positions,
            &new.position,
            &new.key as &[Option<String>],
            &new.at_most_once,
            &woken.position,
            &woken.carrier,
            &woken.placement_id as &[Option<i64>],
        )
        .fetch_all(self.run(transaction))
        .await?;

        let mut requeued: HashMap<i64, Replay> = written.into_iter().map(|seq| (seq, Replay::Created)).collect();
        let mut change = DeliveryCounts::default();
        let mut keys: HashMap<&str, Replaying> = HashMap::new();
        for (key, &position) in new.key.iter().zip(&new.position) {
            if let Some(key) = key {
                keys.entry(key).or_default().reopen(position);
            }
        }
        for row in &before {
            let unfinished = matches!(row.status.as_str(), "pending" | "failed");
            if row.replayed
                && let Some(replay) = requeued.get_mut(&row.seq)
            {
                *replay = if row.claimed { Replay::InFlight } else { Replay::Again };
                if !row.claimed {
                    change.add(&row.status, -1);
                    change.add("pending", 1);
                }
            }
            // The row where a key was last at rest is held as well, and stays as it is.
            let marked = row.head && unfinished;
            if let Some(key) = row.ordering_key.as_deref().filter(|_| row.replayed || marked) {
                let key = keys.entry(key).or_default();
                key.reopen(row.seq);
                if marked {
                    key.reopen(row.start);
                    key.head = row.seq;
                    key.running = row.claimed.then_some(row.seq);
                }
            }
        }
        let created = requeued.values().filter(|replay| **replay == Replay::Created).count();
        change.pending += i64::try_from(created).unwrap_or(i64::MAX);
        self.reopen(transaction, subscription_id, &keys).await?;
        let keys: Vec<Key<'_>> = keys
            .iter()
            .filter(|(_, state)| state.running.is_none())
            .map(|(&key, state)| Key {
                subscription_id,
                key,
                position: state.head,
                from: state.from,
            })
            .collect();
        self.move_heads(transaction, &keys).await?;
        self.count(transaction, CountRole::Operate, change).await?;
        Ok(requeued)
    }

    /// Says on the rows that tell where unfinished rows of these keys begin that they begin earlier now: the running head,
    /// which keeps its mark until it settles, and the row where the key was last at rest.
    async fn reopen(
        &self,
        transaction: &mut PgConnection,
        subscription_id: &str,
        keys: &HashMap<&str, Replaying>,
    ) -> Result<(), StoreError> {
        if keys.is_empty() {
            return Ok(());
        }
        sqlx::query!(
            r#"
            WITH keys AS MATERIALIZED (
                SELECT * FROM unnest($2::text[], $3::bigint[], $4::bigint[]) AS k(name, start, running)
            ), marks AS MATERIALIZED (
                SELECT k.running AS seq, k.start FROM keys k
                UNION
                SELECT rest.seq, k.start FROM keys k
                CROSS JOIN LATERAL (
                    SELECT r.seq FROM deliveries r
                    WHERE r.subscription_id = $1 AND r.ordering_key = k.name
                      AND r.head AND r.status IN ('delivered', 'dead')
                    ORDER BY r.seq DESC LIMIT 1
                ) rest
            )
            UPDATE deliveries d SET open_from = least(d.open_from, m.start)
            FROM marks m
            WHERE d.subscription_id = $1 AND d.seq = m.seq AND d.seq > m.start
            "#,
            subscription_id,
            &keys.keys().copied().collect::<Vec<&str>>() as &[&str],
            &keys.values().map(|key| key.from).collect::<Vec<i64>>(),
            &keys.values().map(|key| key.running).collect::<Vec<_>>() as &[Option<i64>],
        )
        .execute(self.run(transaction))
        .await?;
        Ok(())
    }
}
