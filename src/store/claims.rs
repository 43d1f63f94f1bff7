//! Taking the right to send: two statements in one transaction, and giving up the claims of the dead.

use crate::domain::ids::SubscriptionId;
use crate::domain::seal::Unopened;
use crate::domain::time::Millis;

use super::{Secrets, Store, StoreError, StoredEvent};

/// What is on record of an attempt whose claim was lost.
const LOST_ERROR: &str = "no result: the process that was sending died, or held the claim for too long";
/// Lost claims released by one pass.
const RECOVER_ROWS_MAX: i64 = 500;

/// A subscription that a pass may claim for.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// Which one.
    pub id: SubscriptionId,
    /// Due times before these, by priority, hold nothing runnable: the claim starts its search there.
    pub frontier: [i64; 3],
    /// Rows of it wanted at most, whatever its own cap.
    pub room: i64,
    /// How many more deliveries of its consumer this process may run now.
    pub consumer_room: i64,
}

/// What a pass asks for.
#[derive(Debug)]
pub struct Claim<'a> {
    /// The worker that will own the claims.
    pub owner: &'a str,
    /// How long a claim holds if its owner lives, in milliseconds.
    pub lease_ms: i64,
    /// Rows wanted at most.
    pub room: i64,
    /// Rows in flight at a time for a subscription that says nothing.
    pub inflight_default: i32,
}

/// A delivery this process may send now.
#[derive(Debug, Clone)]
pub struct Claimed {
    /// The event's position.
    pub position: i64,
    /// Who receives it.
    pub subscription_id: SubscriptionId,
    /// The consumer that owns the subscription.
    pub consumer: String,
    /// Which attempt this is, from 1.
    pub attempt: i32,
    /// Names this claim; a settle must repeat it.
    pub claim_id: i64,
    /// 0 critical, 1 important, 2 low.
    pub priority: i32,
    /// When it became due.
    pub due_at: Millis,
    /// Where to send it.
    pub endpoint: String,
    /// What signs; without it nothing may be sent.
    pub secrets: Result<Secrets, Unopened>,
    /// The subscription's own retry rule, as stored.
    pub retry_policy: Option<String>,
    /// It may leave a process once only.
    pub at_most_once: bool,
    /// An operator ended it while an attempt ran that has left no result; there is to be no other.
    pub skipped: bool,
    /// What to send; `None` when the event is gone or cannot be read, so that it can only be given up.
    pub event: Option<StoredEvent>,
}

/// What a pass found.
#[derive(Debug, Default)]
pub struct Pass {
    /// Claimed deliveries, most urgent first.
    pub claimed: Vec<Claimed>,
    /// Subscriptions that were locked and counted, with the rows each could still take at that moment.
    pub counted: Vec<(SubscriptionId, i64)>,
    /// Some candidate was being claimed for elsewhere; it is worth another look within milliseconds.
    pub skipped: bool,
    /// The version of the store in the pass's snapshot.
    pub version: i64,
    /// The database clock, milliseconds.
    pub now_ms: i64,
}

impl Store {
    /// Which of these have a delivery that is due; a plain read, so that idle polls cost one statement.
    pub async fn due(&self, candidates: &[Candidate]) -> Result<Vec<SubscriptionId>, StoreError> {
        let columns = CandidateColumns::of(candidates);
        let mut reader = self.own_reader().await?;
        let due = sqlx::query_scalar!(
            r#"
            SELECT c.id AS "id!"
            FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[]) AS c(id, critical, important, low)
            WHERE EXISTS (
                SELECT FROM (VALUES (0, c.critical), (1, c.important), (2, c.low)) AS p(priority, frontier)
                CROSS JOIN LATERAL (
                    SELECT FROM deliveries d
                    WHERE d.subscription_id = c.id AND d.priority = p.priority
                      AND d.next_attempt_at >= p.frontier AND d.next_attempt_at <= now_ms()
                      AND d.head AND d.lease_until IS NULL AND d.status IN ('pending', 'failed')
                    LIMIT 1
                ) runnable
            )
            "#,
            &columns.id as &[&str],
            &columns.critical,
            &columns.important,
            &columns.low,
        )
        .fetch_all(self.run(&mut reader))
        .await?;
        Ok(due.iter().filter_map(|id| SubscriptionId::parse(id)).collect())
    }

    /// Claims what is due for these subscriptions, within their caps and the room of this process.
    ///
    /// The subscriptions are locked first; what they have in flight is counted in a later statement, whose snapshot
    /// sees every claim made before the lock.
    pub async fn claim(&self, claim: &Claim<'_>, candidates: &[Candidate]) -> Result<Pass, StoreError> {
        let columns = CandidateColumns::of(candidates);
        let mut transaction = self.begin_relaxed().await?;
        let look = sqlx::query!(
            r#"
            SELECT version, now_ms() AS "now_ms!",
                   (SELECT count(*) FROM subscriptions WHERE id = ANY($1) AND enabled = 1) AS "enabled!",
                   ARRAY(
                       SELECT id FROM subscriptions WHERE id = ANY($1) AND enabled = 1
                       ORDER BY id
                       FOR NO KEY UPDATE SKIP LOCKED
                   ) AS "locked!"
            FROM store_counter WHERE name = 'events'
            "#,
            &columns.id as &[&str],
        )
        .fetch_one(self.run(&mut transaction))
        .await?;
        let mut pass = Pass {
            skipped: i64::try_from(look.locked.len()).unwrap_or(i64::MAX) < look.enabled,
            version: look.version,
            now_ms: look.now_ms,
            ..Pass::default()
        };
        if look.locked.is_empty() {
            return Ok(pass);
        }
        let rows = sqlx::query!(
            r#"
            WITH locked AS (
                SELECT s.id, s.consumer, c.critical, c.important, c.low, c.consumer_room,
                       least(c.room, greatest(coalesce(s.max_inflight, $10) - (
                           SELECT count(*) FROM deliveries l WHERE l.subscription_id = s.id AND l.lease_until > now_ms()
                       ), 0)) AS free
                FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $11::bigint[])
                    AS c(id, critical, important, low, consumer_room, room)
                JOIN subscriptions s ON s.id = c.id
                WHERE s.id = ANY($6::text[])
            ), runnable AS (
                SELECT l.consumer, l.consumer_room, d.*
                FROM locked l
                CROSS JOIN LATERAL (
                    SELECT r.* FROM (VALUES (0, l.critical), (1, l.important), (2, l.low)) AS p(priority, frontier)
                    CROSS JOIN LATERAL (
                        SELECT d.subscription_id, d.seq, d.priority, d.next_attempt_at FROM deliveries d
                        WHERE d.subscription_id = l.id AND d.priority = p.priority
                          AND d.next_attempt_at >= p.frontier AND d.next_attempt_at <= now_ms()
                          AND d.head AND d.lease_until IS NULL AND d.status IN ('pending', 'failed')
                        ORDER BY d.next_attempt_at, d.seq
                        LIMIT l.free
                        FOR UPDATE SKIP LOCKED
                    ) r
                    ORDER BY r.priority, r.next_attempt_at, r.seq
                    LIMIT l.free
                ) d
            ), shared AS (
                SELECT r.*, row_number() OVER (PARTITION BY consumer ORDER BY priority, next_attempt_at, seq) AS turn
                FROM runnable r
            ), picked AS (
                SELECT subscription_id, seq, next_attempt_at FROM shared
                WHERE turn <= consumer_room
                ORDER BY priority, turn, next_attempt_at, seq
                LIMIT $7
            ), claimed AS (
                UPDATE deliveries d
                SET lease_owner = $8, lease_until = now_ms() + $9, claim_id = nextval('delivery_claims'),
                    claimed_generation = generation
                FROM picked p
                WHERE d.subscription_id = p.subscription_id AND d.seq = p.seq
                RETURNING d.subscription_id, d.seq, d.attempt + 1 AS attempt, d.at_most_once, d.skipped, d.claim_id, d.priority,
                          p.next_attempt_at
            )
            SELECT s.id AS "subscription_id!", l.free AS "free!", s.consumer, s.endpoint, s.secret,
                   CASE WHEN s.previous_secret_until > now_ms() THEN s.previous_secret END AS previous_secret,
                   s.retry_policy, c.seq AS "seq?", c.attempt AS "attempt?", c.at_most_once AS "at_most_once?", c.skipped AS "skipped?", c.claim_id AS "claim_id?",
                   c.priority AS "priority?", c.next_attempt_at AS "due_at?"
            FROM locked l
            JOIN subscriptions s ON s.id = l.id
            LEFT JOIN claimed c ON c.subscription_id = l.id
            ORDER BY c.priority, c.next_attempt_at, c.seq
            "#,
            &columns.id as &[&str],
            &columns.critical,
            &columns.important,
            &columns.low,
            &columns.consumer_room,
            &look.locked,
            claim.room,
            claim.owner,
            claim.lease_ms,
            claim.inflight_default,
            &columns.room,
        )
        .fetch_all(self.run(&mut transaction))
        .await?;
        let positions: Vec<i64> = rows.iter().filter_map(|row| row.seq).collect();
        if rows.iter().any(|row| row.at_most_once == Some(true)) {
            // Such a claim that a crash of the database undid could be made, and sent, a second time.
            sqlx::query!("SELECT set_config('synchronous_commit', 'on', true)")
                .fetch_one(self.run(&mut transaction))
                .await?;
        }
        // In the claiming transaction, after the claim: a redaction that was answered before it shows here.
        let events = self.events_at(&mut transaction, &positions).await?;
        transaction.commit().await?;

        for row in rows {
            let subscription_id = SubscriptionId::parse(&row.subscription_id).ok_or(StoreError::Corrupt {
                what: "subscription id",
            })?;
            if pass.counted.iter().all(|(id, _)| *id != subscription_id) {
                pass.counted.push((subscription_id.clone(), row.free));
            }
            let (Some(position), Some(attempt), Some(claim_id), Some(priority), Some(due_at)) =
                (row.seq, row.attempt, row.claim_id, row.priority, row.due_at)
            else {
                continue;
            };
            let event = events.binary_search_by_key(&position, |event| event.position).ok();
            pass.claimed.push(Claimed {
                position,
                subscription_id,
                consumer: row.consumer,
                attempt,
                claim_id,
                priority,
                due_at: Millis(due_at),
                endpoint: row.endpoint,
                secrets: self.open_secrets(&row.subscription_id, &row.secret, row.previous_secret.as_deref()),
                retry_policy: row.retry_policy,
                at_most_once: row.at_most_once.unwrap_or_default(),
                skipped: row.skipped.unwrap_or_default(),
                event: event.map(|index| events[index].clone()),
            });
        }
        Ok(pass)
    }

    /// Releases claims whose lease has ended, and, when there is a `judge`, an owner that lives now as well, claims whose
    /// owner no longer lives. A released row is due at once, and its attempt counts: it may have left the process. With a
    /// key it keeps the mark, for it is unfinished. Answers the subscriptions that have work again.
    pub async fn release_lost(&self, judge: Option<&str>) -> Result<Vec<SubscriptionId>, StoreError> {
        let mut transaction = self.begin_relaxed().await?;
        let rows = sqlx::query!(
            r#"
            WITH lost AS (
                SELECT d.subscription_id, d.seq FROM deliveries d
                WHERE d.lease_until IS NOT NULL
                  AND (d.lease_until <= now_ms() OR (
                      EXISTS (SELECT FROM workers j WHERE j.owner = $1 AND j.alive_until > now_ms())
                      AND NOT EXISTS (
                          SELECT FROM workers w WHERE w.owner = d.lease_owner AND w.alive_until > now_ms())))
                ORDER BY d.seq, d.subscription_id
                LIMIT $2
                FOR UPDATE SKIP LOCKED
            ), released AS (
                UPDATE deliveries d
                SET lease_owner = NULL, lease_until = NULL, claim_id = NULL, next_attempt_at = now_ms(),
                    updated_at = now_ms(),
                    attempt = CASE WHEN d.generation = d.claimed_generation THEN d.attempt + 1 ELSE 0 END,
                    status = CASE WHEN d.generation = d.claimed_generation THEN 'failed' ELSE 'pending' END,
                    last_status = NULL,
                    last_error = CASE WHEN d.generation = d.claimed_generation THEN $3 END
                FROM lost WHERE d.subscription_id = lost.subscription_id AND d.seq = lost.seq
                RETURNING d.subscription_id, d.status,
                          (SELECT b.status FROM deliveries b
                           WHERE b.subscription_id = d.subscription_id AND b.seq = d.seq) AS former
            )
            SELECT subscription_id AS "subscription_id!", status AS "status!", former AS "former!" FROM released
            "#,
            judge,
            RECOVER_ROWS_MAX,
            LOST_ERROR,
        )
        .fetch_all(self.run(&mut transaction))
        .await?;
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let mut change = super::DeliveryCounts::default();
        for row in &rows {
            change.add(&row.former, -1);
            change.add(&row.status, 1);
        }
        self.count(&mut transaction, super::counts::CountRole::Recover, change)
            .await?;
        transaction.commit().await?;
        let mut subscriptions: Vec<SubscriptionId> = rows
            .iter()
            .filter_map(|row| SubscriptionId::parse(&row.subscription_id))
            .collect();
        subscriptions.sort_unstable_by(|a, b| a.as_str().cmp(b.as_str()));
        subscriptions.dedup();
        Ok(subscriptions)
    }
}

/// The columns of candidates, one array each.
#[derive(Default)]
struct CandidateColumns<'a> {
    id: Vec<&'a str>,
    critical: Vec<i64>,
    important: Vec<i64>,
    low: Vec<i64>,
    consumer_room: Vec<i64>,
    room: Vec<i64>,
}

impl<'a> CandidateColumns<'a> {
    fn of(candidates: &'a [Candidate]) -> Self {
        let mut columns = Self::default();
        for candidate in candidates {
            columns.id.push(candidate.id.as_str());
            columns.critical.push(candidate.frontier[0]);
            columns.important.push(candidate.frontier[1]);
            columns.low.push(candidate.frontier[2]);
            columns.consumer_room.push(candidate.consumer_room);
            columns.room.push(candidate.room);
        }
        columns
    }
}
