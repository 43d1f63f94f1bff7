//! Ending deliveries by hand: an operator frees a key from a delivery that will never be taken.

use std::collections::{BTreeMap, HashMap, HashSet};

use sqlx::{Postgres, Transaction};

use crate::domain::ids::SubscriptionId;

use super::counts::CountRole;
use super::settle::{Key, ROUNDS_MAX};
use super::{DeliveryCounts, Store, StoreError};

/// Deliveries ended by one transaction: publishes to their keys wait while it runs.
const CHUNK: usize = 500;

/// Why a delivery has no further attempt, as it is put on record.
pub const SKIPPED_ERROR: &str = "skipped by an operator";

/// What a skip found, and left, of one event's delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Skip {
    /// It waited; it is dead now.
    Skipped,
    /// An attempt is running. If that one fails the delivery is dead; there is no further one.
    InFlight,
    /// It had been delivered.
    Delivered,
    /// It was dead before.
    Dead,
}

impl Store {
    /// Ends the waiting deliveries of these events to a subscription; answers what became of each that has one.
    ///
    /// It is a settle without a claim and keeps to its rules: the rows, and those that may carry the marks of their keys
    /// next, are locked in position order; marks move in a later statement; marks that moved during the wait begin it anew.
    /// A claimed row keeps its claim, its key and its place in the caps until its attempt ends, so that no two events of a
    /// key are on the wire. A replay that it still owes is taken back: its attempt is the last one and its result stands.
    /// A failure half way leaves whole chunks ended.
    pub async fn skip(
        &self,
        subscription_id: &SubscriptionId,
        event_ids: &[&str],
    ) -> Result<HashMap<String, Skip>, StoreError> {
        let mut reader = self.reader().await?;
        let rows = sqlx::query!(
            r#"SELECT seq, id FROM events WHERE id = ANY($1) ORDER BY seq"#,
            event_ids as &[&str]
        )
        .fetch_all(self.run(&mut reader))
        .await?;
        drop(reader);
        let events: BTreeMap<i64, String> = rows.into_iter().map(|row| (row.seq, row.id)).collect();
        let positions: Vec<i64> = events.keys().copied().collect();
        let mut found = HashMap::new();
        for chunk in positions.chunks(CHUNK) {
            for (position, skip) in self
                .end_deliveries(subscription_id.as_str(), chunk, SKIPPED_ERROR)
                .await?
            {
                if let Some(id) = events.get(&position) {
                    found.insert(id.clone(), skip);
                }
            }
        }
        Ok(found)
    }

    /// Ends deliveries that wait, saying `why`. At most some hundreds at a time: publishes to their keys wait meanwhile.
    pub(super) async fn end_deliveries(
        &self,
        subscription_id: &str,
        positions: &[i64],
        why: &str,
    ) -> Result<Vec<(i64, Skip)>, StoreError> {
        for _ in 0..ROUNDS_MAX {
            let transaction = self.begin().await?;
            if let Some(skipped) = self.skip_in(transaction, subscription_id, positions, why).await? {
                return Ok(skipped);
            }
        }
        Err(StoreError::marks_keep_moving())
    }

    /// One try; `None` when the marks moved meanwhile.
    async fn skip_in(
        &self,
        mut transaction: Transaction<'static, Postgres>,
        subscription_id: &str,
        positions: &[i64],
        why: &str,
    ) -> Result<Option<Vec<(i64, Skip)>>, StoreError> {
        // Only where the marked row of a key ends does its mark move, to the first row behind it that is not ended as well,
        // or to one that a replay put back in front of it.
        let locked = sqlx::query!(
            r#"
            WITH mine AS (
                SELECT seq, ordering_key, head AND lease_until IS NULL AND status IN ('pending', 'failed') AS ending,
                       least(open_from, seq) AS start
                FROM deliveries WHERE subscription_id = $1 AND seq = ANY($2)
            ), wanted AS (
                SELECT seq FROM mine
                UNION
                SELECT next.seq FROM mine m
                CROSS JOIN LATERAL (
                    SELECT n.seq FROM deliveries n
                    WHERE n.subscription_id = $1 AND n.ordering_key = m.ordering_key AND n.seq >= m.start
                      AND n.status IN ('pending', 'failed') AND n.seq <> ALL($2)
                    ORDER BY n.seq LIMIT 1
                ) next
                WHERE m.ending
            )
            SELECT d.seq AS "seq!", d.ordering_key, d.status AS "status!", d.lease_until IS NOT NULL AS "claimed!",
                   d.head AS "head!", least(d.open_from, d.seq) AS "start!"
            FROM deliveries d
            JOIN wanted w ON w.seq = d.seq
            WHERE d.subscription_id = $1
            ORDER BY d.seq
            FOR UPDATE OF d
            "#,
            subscription_id,
            positions,
        )
        .fetch_all(self.run(&mut transaction))
        .await?;
        let chosen: HashSet<i64> = positions.iter().copied().collect();
        // As they are now: one may have been given the mark during the wait.
        let keys: Vec<Key<'_>> = locked
            .iter()
            .filter(|row| chosen.contains(&row.seq) && row.head && !row.claimed)
            .filter(|row| matches!(row.status.as_str(), "pending" | "failed"))
            .filter_map(|row| {
                Some(Key {
                    subscription_id,
                    key: row.ordering_key.as_deref()?,
                    position: row.seq,
                    from: row.start,
                })
            })
            .collect();
        let mut going_on: Vec<i64> = Vec::new();
        if !keys.is_empty() {
            let next = sqlx::query!(
                r#"
                SELECT k.position AS "position!", next.seq AS "next!"
                FROM unnest($3::text[], $4::bigint[], $5::bigint[]) AS k(name, position, start)
                CROSS JOIN LATERAL (
                    SELECT n.seq FROM deliveries n
                    WHERE n.subscription_id = $1 AND n.ordering_key = k.name AND n.seq >= k.start
                      AND n.status IN ('pending', 'failed') AND n.seq <> ALL($2)
                    ORDER BY n.seq LIMIT 1
                ) next
                "#,
                subscription_id,
                positions,
                &keys.iter().map(|key| key.key).collect::<Vec<_>>() as &[&str],
                &keys.iter().map(|key| key.position).collect::<Vec<_>>(),
                &keys.iter().map(|key| key.from).collect::<Vec<_>>(),
            )
            .fetch_all(self.run(&mut transaction))
            .await?;
            let held: HashSet<i64> = locked.iter().map(|row| row.seq).collect();
            if next.iter().any(|row| !held.contains(&row.next)) {
                return Ok(None);
            }
            going_on = next.iter().map(|row| row.position).collect();
        }
        sqlx::query!(
            r#"
            UPDATE deliveries
            SET status = CASE WHEN lease_until IS NULL THEN 'dead' ELSE status END,
                skipped = lease_until IS NOT NULL,
                generation = CASE WHEN lease_until IS NULL THEN generation ELSE claimed_generation END,
                next_attempt_at = CASE WHEN lease_until IS NULL THEN NULL ELSE next_attempt_at END,
                last_error = CASE WHEN lease_until IS NULL
                                  THEN left(concat_ws('; before that: ', $3::text, last_error), 500) ELSE last_error END,
                head = head AND seq <> ALL($4),
                open_from = CASE WHEN lease_until IS NOT NULL THEN open_from END,
                updated_at = now_ms()
            WHERE subscription_id = $1 AND seq = ANY($2) AND status IN ('pending', 'failed')
            "#,
            subscription_id,
            positions,
            why,
            &going_on,
        )
        .execute(self.run(&mut transaction))
        .await?;

        let mut change = DeliveryCounts::default();
        let mut skips = Vec::new();
        for row in locked.iter().filter(|row| chosen.contains(&row.seq)) {
            let skip = match row.status.as_str() {
                "delivered" => Skip::Delivered,
                "dead" => Skip::Dead,
                _ if row.claimed => Skip::InFlight,
                unfinished => {
                    change.add(unfinished, -1);
                    change.add("dead", 1);
                    Skip::Skipped
                }
            };
            skips.push((row.seq, skip));
        }
        self.move_heads(&mut transaction, &keys).await?;
        self.count(&mut transaction, CountRole::Operate, change).await?;
        transaction.commit().await?;
        Ok(Some(skips))
    }
}
