//! Taking the right to send, in one round trip, and giving up the claims of the dead.

use std::collections::HashSet;

use planner::Class;

use crate::domain::ids::SubscriptionId;
use crate::domain::seal::Unopened;
use crate::domain::time::Millis;

use super::counts::{CountRole, PERIOD_MS};
use super::events::EventRow;
use super::settle::{BRIEF_LOCK_TIMEOUT, Outcome, ResultColumns, Settlement};
use super::skip::SKIPPED_ERROR;
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
    /// No claim before this one is in flight: the count of those that are starts there. 0 where nothing is known.
    pub claims_from: i64,
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

/// Due times of one priority of a subscription, among which nothing runnable is expected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stretch {
    /// Which subscription.
    pub id: SubscriptionId,
    /// 0 critical, 1 important, 2 low.
    pub priority: i32,
    /// The first due time, epoch milliseconds.
    pub from_ms: i64,
    /// The end; it is not part of it.
    pub until_ms: i64,
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
    /// The subscription belongs to a developer app's project.
    pub of_app: bool,
    /// What signs; without it nothing may be sent.
    pub secrets: Result<Secrets, Unopened>,
    /// The subscription's own retry rule, as stored.
    pub retry_policy: Option<String>,
    /// It may leave a process once only.
    pub at_most_once: bool,
    /// An operator ended it while an attempt ran that has left no result; there is to be no other.
    pub skipped: bool,
    /// The carrier it was placed on, as recorded with it.
    pub carrier: Option<String>,
    /// What it was woken as, where its placement is on record.
    pub class: Option<Class>,
    /// What to send; `None` when the event is gone or cannot be read, so that it can only be given up.
    pub event: Option<StoredEvent>,
}

/// A subscription that was locked and counted.
#[derive(Debug)]
pub struct Counted {
    /// Which one.
    pub id: SubscriptionId,
    /// Rows that it could take when it was counted.
    pub free: i64,
    /// The oldest claim in flight at that moment, or the last one of all: where the next count may start.
    pub claims_from: i64,
}

/// What a pass found.
#[derive(Debug, Default)]
pub struct Pass {
    /// Claimed deliveries, most urgent first.
    pub claimed: Vec<Claimed>,
    /// Subscriptions that were locked and counted.
    pub counted: Vec<Counted>,
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

    /// The first due time of a runnable delivery in each of these stretches. Unlike a claim, a plain read sees rows that
    /// somebody holds locked.
    pub async fn overlooked(&self, stretches: &[Stretch]) -> Result<Vec<Option<i64>>, StoreError> {
        let mut reader = self.own_reader().await?;
        Ok(sqlx::query_scalar!(
            r#"
            SELECT (SELECT d.next_attempt_at FROM deliveries d
                    WHERE d.subscription_id = s.id AND d.priority = s.priority
                      AND d.next_attempt_at >= s.from_ms AND d.next_attempt_at < s.until_ms
                      AND d.head AND d.lease_until IS NULL AND d.status IN ('pending', 'failed')
                    ORDER BY d.next_attempt_at LIMIT 1) AS first
            FROM unnest($1::text[], $2::integer[], $3::bigint[], $4::bigint[])
                WITH ORDINALITY AS s(id, priority, from_ms, until_ms, place)
            ORDER BY s.place
            "#,
            &stretches.iter().map(|one| one.id.as_str()).collect::<Vec<_>>() as &[&str],
            &stretches.iter().map(|one| one.priority).collect::<Vec<_>>(),
            &stretches.iter().map(|one| one.from_ms).collect::<Vec<_>>(),
            &stretches.iter().map(|one| one.until_ms).collect::<Vec<_>>(),
        )
        .fetch_all(self.run(&mut reader))
        .await?)
    }

    /// The claims that the store holds for an owner beside the ones it knows of, as results that never left.
    pub async fn unheard(&self, owner: &str, known: &[i64]) -> Result<Vec<Settlement>, StoreError> {
        let mut reader = self.own_reader().await?;
        let rows = sqlx::query!(
            r#"
            SELECT subscription_id, seq, claim_id AS "claim_id!" FROM deliveries
            WHERE claim_id BETWEEN 0 AND 9223372036854775807 AND lease_until IS NOT NULL
              AND lease_owner = $1 AND claim_id <> ALL($2)
            ORDER BY claim_id
            LIMIT $3
            "#,
            owner,
            known,
            RECOVER_ROWS_MAX,
        )
        .fetch_all(self.run(&mut reader))
        .await?;
        Ok(rows
            .into_iter()
            .filter_map(|row| {
                Some(Settlement {
                    subscription_id: SubscriptionId::parse(&row.subscription_id)?,
                    position: row.seq,
                    claim_id: row.claim_id,
                    outcome: Outcome::Unsent,
                })
            })
            .collect())
    }

    /// Claims what is due for these subscriptions, within their caps and the room of this process.
    pub async fn claim(&self, claim: &Claim<'_>, candidates: &[Candidate]) -> Result<Pass, StoreError> {
        let turn = self.settle_and_claim(&[], claim, candidates).await?;
        turn.map(|(_, pass)| pass).ok_or_else(StoreError::marks_keep_moving)
    }

    /// Records results of claims of the same owner, durably, and claims what may run then. Answers the claims that were
    /// lost meanwhile, and what was claimed; `None` where nothing was recorded and nothing claimed, because the marks of
    /// keys moved meanwhile. Rows that others hold are waited for only a moment.
    pub async fn settle_and_claim(
        &self,
        settlements: &[Settlement],
        claim: &Claim<'_>,
        candidates: &[Candidate],
    ) -> Result<Option<(HashSet<i64>, Pass)>, StoreError> {
        let results = ResultColumns::of(settlements);
        let columns = CandidateColumns::of(candidates);
        let mut at_once = self.at_once().await?;
        let rows = sqlx::query!(
            r#"
            SELECT lost AS "lost!", version AS "version!", now_ms AS "now_ms!", skipped AS "skipped!", subscription_id,
                   free, claims_from, consumer, endpoint, of_app, secret, previous_secret, retry_policy, seq, attempt, at_most_once,
                   skipped_by_operator, claim_id, priority, due_at, event_id, event_type, event_version, source, actor,
                   on_behalf_of, subject_type, subject_id, subject_revision, trace_id, event_priority, visibility,
                   occurred_at, received_at, payload, hops, carrier, carrier_class
            FROM settle_and_claim(
                $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22,
                $23
            )
            "#,
            claim.owner,
            &results.subscription_id as &[&str],
            &results.position,
            &results.claim_id,
            &results.outcome as &[&str],
            &results.http_status as &[Option<i32>],
            &results.error as &[Option<String>],
            &results.wait_ms,
            SKIPPED_ERROR,
            BRIEF_LOCK_TIMEOUT,
            self.counts_owner,
            CountRole::Settle.name(),
            PERIOD_MS,
            &columns.id as &[&str],
            &columns.critical,
            &columns.important,
            &columns.low,
            &columns.claims_from,
            &columns.room,
            &columns.consumer_room,
            claim.room,
            claim.lease_ms,
            claim.inflight_default,
        )
        .fetch_all(self.run(&mut at_once))
        .await?;
        at_once.end().await?;
        let Some(first) = rows.first() else { return Ok(None) };
        let lost: HashSet<i64> = first.lost.iter().copied().collect();

        let mut pass = Pass::default();
        let mut counted: HashSet<SubscriptionId> = HashSet::new();
        for row in rows {
            (pass.version, pass.now_ms, pass.skipped) = (row.version, row.now_ms, row.skipped);
            let (Some(id), Some(free), Some(claims_from), Some(consumer), Some(endpoint), Some(of_app), Some(secret)) = (
                row.subscription_id,
                row.free,
                row.claims_from,
                row.consumer,
                row.endpoint,
                row.of_app,
                row.secret,
            ) else {
                continue;
            };
            let subscription_id = SubscriptionId::parse(&id).ok_or(StoreError::Corrupt {
                what: "subscription id",
            })?;
            if counted.insert(subscription_id.clone()) {
                pass.counted.push(Counted {
                    id: subscription_id.clone(),
                    free,
                    claims_from,
                });
            }
            let (Some(position), Some(attempt), Some(claim_id), Some(priority), Some(due_at)) =
                (row.seq, row.attempt, row.claim_id, row.priority, row.due_at)
            else {
                continue;
            };
            let event = (|| {
                Some(EventRow {
                    id: row.event_id?,
                    seq: position,
                    event_type: row.event_type?,
                    version: row.event_version?,
                    source: row.source?,
                    actor: row.actor?,
                    on_behalf_of: row.on_behalf_of,
                    subject_type: row.subject_type?,
                    subject_id: row.subject_id?,
                    subject_revision: row.subject_revision,
                    trace_id: row.trace_id?,
                    priority: row.event_priority?,
                    visibility: row.visibility?,
                    occurred_at: row.occurred_at?,
                    received_at: row.received_at?,
                    payload: row.payload?,
                    hops: row.hops?,
                })
            })();
            pass.claimed.push(Claimed {
                position,
                consumer,
                attempt,
                claim_id,
                priority,
                due_at: Millis(due_at),
                endpoint,
                of_app,
                secrets: self.open_secrets(&id, &secret, row.previous_secret.as_deref()),
                retry_policy: row.retry_policy,
                at_most_once: row.at_most_once.unwrap_or_default(),
                skipped: row.skipped_by_operator.unwrap_or_default(),
                carrier: row.carrier,
                class: row.carrier_class.as_deref().and_then(Class::of_label),
                event: event.and_then(EventRow::read),
                subscription_id,
            });
        }
        Ok(Some((lost, pass)))
    }

    /// Releases claims whose lease has ended, and, when there is a `judge`, an owner that lives now as well, claims whose
    /// owner no longer lives. A released row is due at once, and its attempt counts: it may have left the process. With a
    /// key it keeps the mark, for it is unfinished.
    pub async fn release_lost(&self, judge: Option<&str>) -> Result<Released, StoreError> {
        let mut transaction = self.begin_relaxed().await?;
        // The range stands for "is not null": of a table that was not analysed since it grew, that alone is taken for
        // nearly every row, and the whole table would be read in position order. It passes over every claim that ended since
        // the oldest snapshot that is held.
        let rows = sqlx::query!(
            r#"
            WITH lost AS (
                SELECT d.subscription_id, d.seq FROM deliveries d
                WHERE d.claim_id BETWEEN 0 AND 9223372036854775807 AND d.lease_until IS NOT NULL
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
            return Ok(Released::default());
        }
        let mut change = super::DeliveryCounts::default();
        for row in &rows {
            change.add(&row.former, -1);
            change.add(&row.status, 1);
        }
        self.count(&mut transaction, CountRole::Recover, change).await?;
        transaction.commit().await?;
        let mut subscriptions: Vec<SubscriptionId> = rows
            .iter()
            .filter_map(|row| SubscriptionId::parse(&row.subscription_id))
            .collect();
        subscriptions.sort_unstable_by(|a, b| a.as_str().cmp(b.as_str()));
        subscriptions.dedup();
        Ok(Released {
            claims: rows.len(),
            subscriptions,
        })
    }
}

/// Claims that ended without a result.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Released {
    /// How many.
    pub claims: usize,
    /// Whose they were; these have work again.
    pub subscriptions: Vec<SubscriptionId>,
}

/// The columns of candidates, one array each.
#[derive(Default)]
struct CandidateColumns<'a> {
    id: Vec<&'a str>,
    critical: Vec<i64>,
    important: Vec<i64>,
    low: Vec<i64>,
    claims_from: Vec<i64>,
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
            columns.claims_from.push(candidate.claims_from);
            columns.consumer_room.push(candidate.consumer_room);
            columns.room.push(candidate.room);
        }
        columns
    }
}
