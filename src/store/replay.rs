//! Sending again: an operator puts deliveries back into the queue, or makes them for events from before.

use std::collections::HashMap;

use sqlx::PgConnection;

use crate::domain::ids::SubscriptionId;
use crate::domain::json::SAFE_INTEGER_MAX;
use crate::domain::policy::Semantics;
use crate::domain::time::Millis;
use crate::domain::topic::TopicPattern;

use super::counts::CountRole;
use super::settle::{Key, ROUNDS_MAX};
use super::{DeliveryCounts, Store, StoreError, View};

/// Events that one replay examines, whatever matches.
const SCAN_ROWS_MAX: i64 = 100_000;
/// Deliveries that one replay queues.
const QUEUED_MAX: i64 = 10_000;
/// Deliveries queued by one transaction: publishing waits while it runs.
const CHUNK: usize = 500;

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

/// What a replay did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replayed {
    /// Deliveries that are due again.
    pub queued: i64,
    /// The position to continue from, where a bound cut the selection.
    pub next: Option<i64>,
}

/// The rows that a replay makes, one array a column.
#[derive(Default)]
struct NewRows {
    position: Vec<i64>,
    key: Vec<Option<String>>,
    at_most_once: Vec<bool>,
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
    /// overwrite the reset row. A failure half way leaves whole chunks queued, which a second try queues once more.
    pub async fn replay(
        &self,
        subscription_id: &SubscriptionId,
        selection: &ReplaySelection,
    ) -> Result<Option<Replayed>, StoreError> {
        let id = subscription_id.as_str();
        let mut reader = self.reader().await?;
        let pattern = sqlx::query_scalar!(
            "SELECT topic_pattern FROM subscriptions WHERE id = $1 AND project_id IS NULL",
            id
        )
        .fetch_optional(self.run(&mut reader))
        .await?;
        let Some(pattern) = pattern else { return Ok(None) };
        let pattern = TopicPattern::parse(&pattern).ok_or(StoreError::Corrupt { what: "topic pattern" })?;
        let (positions, next) = match selection {
            ReplaySelection::Events(ids) => (self.matching_ids(&mut reader, &pattern, ids).await?, None),
            ReplaySelection::FromPosition(from) => self.matching_from(&mut reader, &pattern, *from).await?,
            ReplaySelection::Since(since) => {
                let from = self.first_received(&mut reader, *since).await?;
                self.matching_from(&mut reader, &pattern, from).await?
            }
        };
        drop(reader);
        let mut queued = 0;
        // One transaction a chunk, so that no publish waits for a whole replay.
        for chunk in positions.chunks(CHUNK) {
            queued += self.requeue_chunk(id, chunk).await?;
        }
        Ok(Some(Replayed { queued, next }))
    }

    async fn matching_ids(
        &self,
        reader: &mut PgConnection,
        pattern: &TopicPattern,
        ids: &[String],
    ) -> Result<Vec<i64>, StoreError> {
        let rows = sqlx::query!(
            r#"
            SELECT seq, event_type FROM events
            WHERE id = ANY($1) AND env = 'production' AND project_id IS NULL
            ORDER BY seq
            "#,
            ids,
        )
        .fetch_all(self.run(reader))
        .await?;
        let matching = rows.into_iter().filter(|row| pattern.matches(&row.event_type));
        Ok(matching.map(|row| row.seq).collect())
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
        pattern: &TopicPattern,
        from: i64,
    ) -> Result<(Vec<i64>, Option<i64>), StoreError> {
        let found = sqlx::query!(
            r#"
            WITH page AS MATERIALIZED (
                SELECT seq, event_type, env, project_id FROM events WHERE seq >= $1 ORDER BY seq LIMIT $3
            ), hits AS MATERIALIZED (
                SELECT seq FROM page
                WHERE event_type LIKE $2 AND env = 'production' AND project_id IS NULL
                ORDER BY seq
                LIMIT $4::bigint + 1
            )
            SELECT (SELECT array_agg(seq ORDER BY seq) FROM hits) AS hits,
                   CASE WHEN (SELECT count(*) FROM hits) <= $4 AND (SELECT count(*) FROM page) = $3
                        THEN (SELECT max(seq) + 1 FROM page) END AS scan_next
            "#,
            from,
            pattern.like().unwrap_or_else(|| "%".to_owned()),
            SCAN_ROWS_MAX,
            QUEUED_MAX,
        )
        .fetch_one(self.run(reader))
        .await?;
        let mut positions = found.hits.unwrap_or_default();
        let kept = usize::try_from(QUEUED_MAX).unwrap_or(usize::MAX);
        let next = positions.get(kept).copied().or(found.scan_next);
        positions.truncate(kept);
        Ok((positions, next))
    }

    async fn requeue_chunk(&self, subscription_id: &str, positions: &[i64]) -> Result<i64, StoreError> {
        for _ in 0..ROUNDS_MAX {
            let mut transaction = self.begin().await?;
            let version = sqlx::query_scalar!("SELECT version FROM store_counter WHERE name = 'events' FOR UPDATE")
                .fetch_one(self.run(&mut transaction))
                .await?;
            let mut view = self.view();
            if version != view.version {
                view = self.reload_view_on(&mut transaction).await?;
            }
            let new = self
                .new_rows(&mut transaction, &view, subscription_id, positions)
                .await?;
            if self
                .lock_keys(&mut transaction, subscription_id, positions, &new)
                .await?
            {
                let queued = self.requeue(&mut transaction, subscription_id, positions, &new).await?;
                transaction.commit().await?;
                return Ok(queued);
            }
        }
        Err(StoreError::marks_keep_moving())
    }

    /// How the rows that are not there yet are to be carried, by the policies in force; a row that exists keeps what it
    /// was made with.
    async fn new_rows(
        &self,
        transaction: &mut PgConnection,
        view: &View,
        subscription_id: &str,
        positions: &[i64],
    ) -> Result<NewRows, StoreError> {
        let missing = sqlx::query!(
            r#"
            SELECT e.seq, e.event_type FROM events e
            WHERE e.seq = ANY($2)
              AND NOT EXISTS (SELECT FROM deliveries d WHERE d.subscription_id = $1 AND d.seq = e.seq)
            ORDER BY e.seq
            "#,
            subscription_id,
            positions,
        )
        .fetch_all(self.run(transaction))
        .await?;
        let policy = |event_type: &str| view.policies.policy(event_type);
        let ordered: Vec<i64> = missing
            .iter()
            .filter(|row| policy(&row.event_type).is_ordered())
            .map(|row| row.seq)
            .collect();
        let events = self.events_at(transaction, &ordered).await?;
        let mut new = NewRows::default();
        for row in missing {
            let policy = policy(&row.event_type);
            let event = events.binary_search_by_key(&row.seq, |event| event.position).ok();
            new.position.push(row.seq);
            new.key
                .push(event.and_then(|index| policy.ordering_key(&events[index].envelope)));
            new.at_most_once.push(policy.semantics() == Semantics::AtMostOnce);
        }
        Ok(new)
    }

    /// Takes the right to make these rows and to move the marks of their keys; `false` when it has to be tried anew.
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
    ) -> Result<bool, StoreError> {
        let locked = sqlx::query_scalar!(
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
            SELECT (SELECT count(*) FROM marked) AS "marks!", (SELECT count(*) FROM locked) AS "locked!"
            "#,
            subscription_id,
            positions,
            &locked,
            &new.key as &[Option<String>],
        )
        .fetch_one(self.run(transaction))
        .await?;
        Ok(moved.marks == moved.locked)
    }

    /// Resets or makes the deliveries of these positions and moves the marks of their keys.
    async fn requeue(
        &self,
        transaction: &mut PgConnection,
        subscription_id: &str,
        positions: &[i64],
        new: &NewRows,
    ) -> Result<i64, StoreError> {
        // The rows, and the rows that carry the marks of their keys.
        let locked = sqlx::query!(
            r#"
            WITH mine AS (
                SELECT seq, ordering_key FROM deliveries WHERE subscription_id = $1 AND seq = ANY($2)
            ), heads AS (
                SELECT first.seq
                FROM (
                    SELECT ordering_key FROM mine WHERE ordering_key IS NOT NULL
                    UNION SELECT n.key FROM unnest($3::text[]) AS n(key) WHERE n.key IS NOT NULL
                ) k
                LEFT JOIN LATERAL (
                    SELECT least(r.open_from, r.seq) AS start FROM deliveries r
                    WHERE r.subscription_id = $1 AND r.ordering_key = k.ordering_key
                      AND r.head AND r.status IN ('delivered', 'dead')
                    ORDER BY r.seq DESC LIMIT 1
                ) rest ON true
                CROSS JOIN LATERAL (
                    SELECT f.seq FROM deliveries f
                    WHERE f.subscription_id = $1 AND f.ordering_key = k.ordering_key AND f.seq >= coalesce(rest.start, 0)
                      AND f.status IN ('pending', 'failed') AND f.head
                    ORDER BY f.seq LIMIT 1
                ) first
            )
            SELECT d.seq AS "seq!", d.ordering_key, d.status AS "status!", d.head AS "head!",
                   d.lease_until IS NOT NULL AS "claimed!", d.seq = ANY($2) AS "replayed!",
                   least(d.open_from, d.seq) AS "start!"
            FROM deliveries d
            WHERE d.subscription_id = $1 AND d.seq IN (SELECT seq FROM mine UNION SELECT seq FROM heads)
            ORDER BY d.seq
            FOR UPDATE OF d
            "#,
            subscription_id,
            positions,
            &new.key as &[Option<String>],
        )
        .fetch_all(self.run(transaction))
        .await?;
        let queued = sqlx::query!(
            r#"
            INSERT INTO deliveries AS d (
                event_id, subscription_id, seq, priority, next_attempt_at, created_at, updated_at, ordering_key,
                at_most_once, head
            )
            SELECT e.id, $1, e.seq, CASE e.priority WHEN 'critical' THEN 0 WHEN 'important' THEN 1 ELSE 2 END,
                   now_ms(), now_ms(), now_ms(), n.key, coalesce(n.at_most_once, false), n.key IS NULL
            FROM events e
            LEFT JOIN unnest($3::bigint[], $4::text[], $5::boolean[]) AS n(seq, key, at_most_once) ON n.seq = e.seq
            WHERE e.seq = ANY($2)
            ON CONFLICT (subscription_id, seq) DO UPDATE
            SET generation = d.generation + 1, updated_at = now_ms(), skipped = false,
                status = CASE WHEN d.lease_until IS NULL THEN 'pending' ELSE d.status END,
                attempt = CASE WHEN d.lease_until IS NULL THEN 0 ELSE d.attempt END,
                next_attempt_at = CASE WHEN d.lease_until IS NULL THEN now_ms() ELSE d.next_attempt_at END,
                last_error = CASE WHEN d.lease_until IS NULL THEN NULL ELSE d.last_error END,
                last_status = CASE WHEN d.lease_until IS NULL THEN NULL ELSE d.last_status END,
                delivered_at = CASE WHEN d.lease_until IS NULL THEN NULL ELSE d.delivered_at END,
                head = CASE WHEN d.lease_until IS NOT NULL THEN d.head
                            ELSE d.ordering_key IS NULL OR (d.head AND d.status IN ('pending', 'failed')) END
            "#,
            subscription_id,
            positions,
            &new.position,
            &new.key as &[Option<String>],
            &new.at_most_once,
        )
        .execute(self.run(transaction))
        .await?
        .rows_affected();
        let queued = i64::try_from(queued).unwrap_or(i64::MAX);

        let mut change = DeliveryCounts::default();
        let mut replayed_rows = 0;
        let mut keys: HashMap<&str, Replaying> = HashMap::new();
        for (key, &position) in new.key.iter().zip(&new.position) {
            if let Some(key) = key {
                keys.entry(key).or_default().reopen(position);
            }
        }
        for row in &locked {
            let unfinished = matches!(row.status.as_str(), "pending" | "failed");
            if row.replayed {
                replayed_rows += 1;
                if !row.claimed {
                    change.add(&row.status, -1);
                    change.add("pending", 1);
                }
            }
            if let Some(key) = row.ordering_key.as_deref() {
                let key = keys.entry(key).or_default();
                key.reopen(row.seq);
                if row.head && unfinished {
                    key.reopen(row.start);
                    key.head = row.seq;
                    key.running = row.claimed.then_some(row.seq);
                }
            }
        }
        change.pending += queued - replayed_rows;
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
        Ok(queued)
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
