//! What the tests of the store's protocol share: a database with several processes' stores on it, short ways to fill
//! it, and the invariants that hold in every snapshot.

use std::{collections::BTreeSet, path::Path, sync::Arc, time::Duration};

use openvibe_events::{
    delivery::Wake,
    domain::{
        app::{Holder, Quotas},
        cursor::Cursor,
        envelope::Envelope,
        ids::{EventId, SubscriptionId},
        sources::SourceMap,
        time::Millis,
        topic::TopicPattern,
    },
    fabric::{Fabric, FabricSettings},
    publish::{Bells, Bounds, PublishError, PublishRequest, Published, Publisher, RequestTrace, Rules},
    realtime::Bell,
    store::{
        Addresses, Candidate, Claim, Claimed, DeliveryCounts, NewDelivery, NewEvent, NewPlacement, NewSubscription,
        Outcome, Page, PageRequest, Pass, Placements, Placer, Settlement, SharedStore, Store, StoreError,
    },
    tls::{Authorities, Trust},
};
use planner::{Intent, PolicyKey};
use serde_json::Value;
use sqlx::{AssertSqlSafe, PgPool};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::support::{
    database::Database,
    envelopes,
    wait::{SOON, eventually},
};

/// How long claims of these tests hold.
pub(crate) const LEASE_MS: i64 = 60_000;
/// The depth at which these tests' publishers refuse.
pub(crate) const HOPS_MAX: i32 = 4;
/// Every due time lies after it.
pub(crate) const NO_FRONTIER: [i64; 3] = [0; 3];

/// A database and one process's store on it.
pub(crate) struct Fixture {
    pub(crate) database: Database,
    pub(crate) store: SharedStore,
}

impl Fixture {
    pub(crate) async fn new() -> Self {
        Self::on(Database::create().await).await
    }

    /// A store on this database.
    pub(crate) async fn on(database: Database) -> Self {
        let store = connect(&database).await;
        Self { database, store }
    }

    /// The store of another process.
    pub(crate) async fn another(&self) -> SharedStore {
        connect(&self.database).await
    }

    pub(crate) fn database(&self) -> &Database {
        &self.database
    }

    pub(crate) fn url(&self) -> &str {
        self.database.url()
    }

    pub(crate) fn pool(&self) -> &PgPool {
        self.database.pool()
    }

    /// Runs statements as an operator would.
    pub(crate) async fn sql(&self, statements: &str) {
        sql(self.pool(), statements).await;
    }

    /// One number that a query answers.
    pub(crate) async fn number(&self, query: &str) -> i64 {
        number(self.pool(), query).await
    }

    /// A subscription for everything.
    pub(crate) async fn subscription(&self, max_inflight: i32) -> SubscriptionId {
        subscribe(&self.store, "chat", "*", max_inflight).await
    }
}

/// Places everything on the floor and puts nothing on record.
pub(crate) struct FloorAlone;

impl Placer for FloorAlone {
    type Decisions = Self;

    fn begin(&self) -> Self {
        Self
    }

    fn decide(&self, _: &mut Self, _: &PolicyKey, _: &Intent) -> usize {
        0
    }

    fn committed(&self, _: Self) {}
}

impl Placements for FloorAlone {
    fn unrecorded(&self) -> Vec<NewPlacement<'_>> {
        Vec::new()
    }

    fn recorded(&mut self, _: &[i64]) {}

    fn placement(&self, _: usize) -> (&str, Option<i64>) {
        ("pg-v1", None)
    }
}

async fn connect(database: &Database) -> SharedStore {
    let addresses = Addresses::parse(database.url(), database.url()).expect("the URL of a test database");
    Arc::new(Store::connect(addresses).await.expect("a store on a migrated database"))
}

/// Runs statements on a pool.
pub(crate) async fn sql(pool: &PgPool, statements: &str) {
    sqlx::raw_sql(AssertSqlSafe(statements))
        .execute(pool)
        .await
        .unwrap_or_else(|error| panic!("{statements}: {error}"));
}

/// One number that a query answers.
pub(crate) async fn number(pool: &PgPool, query: &str) -> i64 {
    sqlx::query_scalar(AssertSqlSafe(query))
        .fetch_one(pool)
        .await
        .unwrap_or_else(|error| panic!("{query}: {error}"))
}

/// A new subscription with an endpoint of its own.
pub(crate) async fn subscribe(store: &Store, consumer: &str, pattern: &str, max_inflight: i32) -> SubscriptionId {
    let endpoint = format!("https://{}.example/hook", envelopes::unique_segment());
    let new = NewSubscription {
        holder: Holder::service(consumer),
        topic_pattern: pattern,
        endpoint: &endpoint,
        secret: "whsec_test",
        retry_policy: None,
        max_inflight: Some(max_inflight),
        consumer_max: 1_000,
        project_max: None,
        issued_at_s: 0,
    };
    let made = store.create_subscription(&new).await.expect("a new subscription");
    SubscriptionId::parse(&made.id).expect("a subscription id")
}

/// A valid event of `live`.
pub(crate) fn event() -> Envelope {
    event_from(&envelopes::envelope("live"))
}

/// A valid event of this type.
pub(crate) fn event_of(event_type: &str) -> Envelope {
    event_from(&envelopes::envelope("live").event_type(event_type))
}

/// `count` events of a type.
pub(crate) fn events_of(event_type: &str, count: usize) -> Vec<Envelope> {
    (0..count).map(|_| event_of(event_type)).collect()
}

/// A wire envelope as the store takes it.
pub(crate) fn event_from(wire: &envelopes::Envelope) -> Envelope {
    let (envelope, _) = Envelope::parse(&wire.json().to_string(), "trc_fixture_1").expect("a valid envelope");
    envelope
}

/// How an accepted event is stored.
pub(crate) fn new_event(envelope: &Envelope) -> NewEvent<'_> {
    NewEvent {
        envelope,
        hops: 1,
        publisher: "svc:live",
        request_id: "req_1",
        project: None,
    }
}

/// Stores events in one group with a delivery each for `subscription`, under the key given; answers their positions.
pub(crate) async fn put(
    store: &Store,
    subscription: Option<&SubscriptionId>,
    events: &[Envelope],
    key: Option<&str>,
) -> Result<Vec<i64>, StoreError> {
    let keyed: Vec<(&Envelope, Option<&str>)> = events.iter().map(|event| (event, key)).collect();
    put_keyed(store, subscription, &keyed).await
}

/// As [`put`], with a key for each event.
pub(crate) async fn put_keyed(
    store: &Store,
    subscription: Option<&SubscriptionId>,
    events: &[(&Envelope, Option<&str>)],
) -> Result<Vec<i64>, StoreError> {
    let ids: Vec<&str> = events.iter().map(|(event, _)| event.event_id.as_str()).collect();
    let rows: Vec<NewEvent<'_>> = events.iter().map(|(event, _)| new_event(event)).collect();
    let deliveries: Vec<NewDelivery<'_>> = events
        .iter()
        .enumerate()
        .filter_map(|(event, (_, ordering_key))| {
            Some(NewDelivery {
                event,
                subscription_id: subscription?,
                ordering_key: *ordering_key,
                at_most_once: false,
                carrier: "pg-v1",
                placement_id: None,
            })
        })
        .collect();
    let mut group = store.open_group(&ids).await?;
    let first = group.store(&rows, &deliveries).await?.first;
    group.commit().await?;
    Ok((first..).take(events.len()).collect())
}

/// A candidate without bounds.
pub(crate) fn candidate(id: &SubscriptionId) -> Candidate {
    Candidate {
        id: id.clone(),
        frontier: NO_FRONTIER,
        claims_from: 0,
        room: 1_000,
        consumer_room: 1_000,
    }
}

/// Claims as `owner` for these subscriptions.
pub(crate) async fn claim(store: &Store, owner: &str, ids: &[&SubscriptionId]) -> Pass {
    let candidates: Vec<Candidate> = ids.iter().map(|id| candidate(id)).collect();
    claim_with(store, owner, LEASE_MS, &candidates).await
}

/// Claims for these candidates under a lease of this length.
pub(crate) async fn claim_with(store: &Store, owner: &str, lease_ms: i64, candidates: &[Candidate]) -> Pass {
    let wanted = Claim {
        owner,
        lease_ms,
        room: 1_000,
        inflight_default: 1,
    };
    store.claim(&wanted, candidates).await.expect("a claim")
}

/// The positions that a pass claimed, in its order.
pub(crate) fn positions(pass: &Pass) -> Vec<i64> {
    pass.claimed.iter().map(|claimed| claimed.position).collect()
}

/// The end of a claim.
pub(crate) fn ending(claimed: &Claimed, outcome: Outcome) -> Settlement {
    Settlement {
        subscription_id: claimed.subscription_id.clone(),
        position: claimed.position,
        claim_id: claimed.claim_id,
        outcome,
    }
}

/// Ends every claim of a pass in the same way; all of them must still be held.
pub(crate) async fn settle_all(store: &Store, owner: &str, pass: &Pass, outcome: &Outcome) {
    let endings: Vec<Settlement> = pass.claimed.iter().map(|one| ending(one, outcome.clone())).collect();
    let lost = store.settle(owner, &endings).await.expect("a settle");
    assert!(lost.is_empty(), "claims {lost:?} were lost");
}

pub(crate) fn delivered() -> Outcome {
    Outcome::Delivered { status: 204 }
}

pub(crate) fn retry(wait_ms: i64) -> Outcome {
    Outcome::Retry {
        status: Some(500),
        error: "HTTP 500".to_owned(),
        wait_ms,
    }
}

pub(crate) fn dead() -> Outcome {
    Outcome::Dead {
        status: Some(410),
        error: "HTTP 410".to_owned(),
    }
}

/// Positions of a subscription's unfinished rows that carry the mark.
pub(crate) async fn heads(pool: &PgPool, id: &SubscriptionId) -> Vec<i64> {
    sqlx::query_scalar(
        "SELECT seq FROM deliveries WHERE subscription_id = $1 AND head AND status IN ('pending', 'failed') ORDER BY seq",
    )
    .bind(id.as_str())
    .fetch_all(pool)
    .await
    .expect("the marked rows")
}

/// Keys that have unfinished rows and not exactly one mark among them: none, in any snapshot.
pub(crate) async fn broken_keys(pool: &PgPool) -> Vec<(String, String, i64, i64)> {
    sqlx::query_as(
        "SELECT subscription_id, ordering_key, count(*), count(*) FILTER (WHERE head) FROM deliveries \
         WHERE ordering_key IS NOT NULL AND status IN ('pending', 'failed') \
         GROUP BY 1, 2 HAVING count(*) FILTER (WHERE head) <> 1",
    )
    .fetch_all(pool)
    .await
    .expect("a look at the marks")
}

/// Fails unless the kept counts are what counting the rows gives.
pub(crate) async fn assert_counts(store: &Store, pool: &PgPool) {
    let rows: Vec<(String, i64)> = sqlx::query_as("SELECT status, count(*) FROM deliveries GROUP BY status")
        .fetch_all(pool)
        .await
        .expect("the statuses");
    let mut counted = DeliveryCounts::default();
    for (status, count) in rows {
        counted.add(&status, count);
    }
    assert_eq!(store.delivery_counts().await.expect("the counts"), counted);
}

/// The floor alone, which never connects.
fn fabric(store: &SharedStore) -> Fabric {
    let trust = Trust::load(&Authorities::default());
    let settings = FabricSettings {
        enabled: [planner::FLOOR.to_owned()].into(),
        disabled: BTreeSet::new(),
        rate_cards: None,
        poll_interval: Duration::from_millis(500),
        env: carriers::Env {
            variables: &|name| (name == "DATABASE_URL").then(|| "postgresql://127.0.0.1:1/none".to_owned()),
            instance: "test",
            consumes: false,
            tls: trust.client_config(),
            clock: || std::time::SystemTime::UNIX_EPOCH,
        },
        clock: || Millis(0),
    };
    Fabric::open(&settings, Arc::clone(store)).expect("the floor")
}

/// A publisher of its own process on a store.
pub(crate) struct Door {
    publisher: Publisher,
    _stop: DropGuard,
}

impl Door {
    pub(crate) fn open(store: &SharedStore) -> Self {
        let stop = CancellationToken::new();
        let fabric = Arc::new(fabric(store));
        let bells = Bells {
            deliveries: Wake::nobody(),
            streams: Bell::default(),
        };
        let bounds = Bounds {
            max_hops: HOPS_MAX,
            quotas: Quotas::default(),
        };
        let (publisher, _task) = Publisher::start(Arc::clone(store), bounds, fabric, bells, stop.clone());
        Self {
            publisher,
            _stop: stop.drop_guard(),
        }
    }

    pub(crate) async fn publish(&self, request: PublishRequest) -> Result<Vec<Published>, PublishError> {
        self.publisher.publish(request).await
    }

    /// Publishes these requests in one group and in this order: while the counter row is held, one request of another
    /// kind waits for it and the others gather behind that one. Needs a runtime of one thread.
    pub(crate) async fn publish_as_group(
        &self,
        fixture: &Fixture,
        requests: impl IntoIterator<Item = PublishRequest>,
    ) -> Vec<Result<Vec<Published>, PublishError>> {
        let before = fixture.number("SELECT coalesce(max(seq), 0) FROM events").await;
        let mut holder = fixture.pool().begin().await.expect("a transaction");
        sqlx::query("SELECT FROM store_counter FOR UPDATE")
            .execute(&mut *holder)
            .await
            .expect("the row");
        let start = |request| {
            let publisher = self.publisher.clone();
            tokio::spawn(async move { publisher.publish(request).await })
        };
        let plug = start(request(
            "live",
            envelopes::envelope("live").event_type("live.plug.x").json(),
        ));
        let waits = "SELECT count(*) FROM pg_stat_activity \
                     WHERE datname = current_database() AND wait_event_type = 'Lock'";
        eventually("the first request waits", SOON, async || {
            fixture.number(waits).await == 1
        })
        .await;
        let gathered: Vec<_> = requests.into_iter().map(start).collect();
        holder.rollback().await.expect("an end");
        plug.await.expect("a task").expect("the first request is stored");
        let mut answers = Vec::new();
        for one in gathered {
            answers.push(one.await.expect("a task"));
        }
        let groups = format!(
            "SELECT count(DISTINCT xmin::text) FROM events WHERE seq > {before} AND event_type <> 'live.plug.x'"
        );
        assert!(
            fixture.number(&groups).await <= 1,
            "the requests were stored by one transaction"
        );
        sql(fixture.pool(), "DELETE FROM events WHERE event_type = 'live.plug.x'").await;
        answers
    }
}

/// A request of a service that named no trace.
pub(crate) fn request(source: &str, body: &Value) -> PublishRequest {
    read_request(source, body, "trc_made_by_the_server", false)
}

/// A request of a service in a trace that it named.
pub(crate) fn request_in(trace: &str, source: &str, body: &Value) -> PublishRequest {
    read_request(source, body, trace, true)
}

fn read_request(source: &str, body: &Value, trace: &str, given: bool) -> PublishRequest {
    let rules = Rules {
        sources: SourceMap::default(),
        max_payload_bytes: 1024 * 1024,
    };
    let trace = RequestTrace { id: trace, given };
    PublishRequest::of_service(&body.to_string(), source, trace, &rules).expect("a valid request")
}

/// Stored bytes of a page, as the service asks for them.
pub(crate) const PAGE_BYTES: i64 = 4 * 1024 * 1024;

/// A page after a cursor.
pub(crate) async fn pull(store: &Store, after: Option<Cursor>, topic: &str, limit: i64) -> Page {
    let request = PageRequest {
        after,
        topics: TopicPattern::parse_list(topic).expect("topic patterns"),
        project: None,
        limit,
        bytes: PAGE_BYTES,
    };
    store.pull(&request).await.expect("a page")
}

/// The ids on a page, in order.
pub(crate) fn ids(page: &Page) -> Vec<&EventId> {
    page.events.iter().map(|event| &event.envelope.event_id).collect()
}

/// The store's statement that contains `fragment`, as it was recorded for the build: what runs, to the letter.
pub(crate) fn statement(fragment: &str) -> String {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join(".sqlx");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).expect("recorded statements") {
        let text = std::fs::read_to_string(entry.expect("an entry").path()).expect("a readable statement");
        let record: Value = serde_json::from_str(&text).expect("a recorded statement is JSON");
        let query = record["query"].as_str().expect("a query");
        if query.contains(fragment) {
            found.push(query.to_owned());
        }
    }
    assert_eq!(found.len(), 1, "one statement contains {fragment:?}");
    found.remove(0)
}

/// What running a statement cost.
#[derive(Debug)]
pub(crate) struct Cost {
    /// Pages looked at.
    pub(crate) buffers: i64,
    /// Rows that were read from tables, kept or not.
    pub(crate) rows: i64,
    /// Indexes used.
    pub(crate) indexes: Vec<String>,
    /// Tables read from end to end.
    pub(crate) scanned: Vec<String>,
}

/// The statement that claims.
pub(crate) const CLAIM: &str = "FROM settle_and_claim(";

/// What [`CLAIM`] takes to claim for these subscriptions from a due time on, with nothing to record.
pub(crate) fn claim_literals(ids: &[&SubscriptionId], frontier: i64) -> String {
    let each = |value: String| format!("ARRAY[{}]", vec![value; ids.len()].join(", "));
    let names: Vec<String> = ids.iter().map(|id| format!("'{id}'")).collect();
    let (frontier, room) = (each(format!("{frontier}::bigint")), each("100::bigint".to_owned()));
    let claims_from = each("0::bigint".to_owned());
    format!(
        "'w', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '', NULL, 'w', 'settle', 10000, ARRAY[{}], {frontier}, \
         {frontier}, {frontier}, {claims_from}, {room}, {room}, 100, 1000, 1",
        names.join(", ")
    )
}

/// Runs a recorded statement with these literals, once with a plan for them and once with the plan that a kept
/// statement gets, and answers what each cost. Nothing of it stays. Functions are planned for the tables as they are: so
/// the store sees to it for its own (`Lanes`).
pub(crate) async fn costs(pool: &PgPool, fragment: &str, literals: &str) -> [Cost; 2] {
    let mut connection = pool.acquire().await.expect("a connection");
    let mut costs = Vec::new();
    for mode in ["force_custom_plan", "force_generic_plan"] {
        let script = format!(
            "DISCARD PLANS; BEGIN; SET LOCAL plan_cache_mode = {mode}; DEALLOCATE ALL; PREPARE recorded AS {}",
            statement(fragment)
        );
        sqlx::raw_sql(AssertSqlSafe(script))
            .execute(&mut *connection)
            .await
            .expect("a statement that prepares");
        let explain = format!("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE recorded({literals})");
        // Once before it counts: the first run of a function in a session reads the catalogue.
        let warm = format!("SAVEPOINT cold; {explain}; ROLLBACK TO cold");
        sqlx::raw_sql(AssertSqlSafe(warm))
            .execute(&mut *connection)
            .await
            .unwrap_or_else(|error| panic!("{explain}: {error}"));
        let row = sqlx::raw_sql(AssertSqlSafe(explain.clone()))
            .fetch_one(&mut *connection)
            .await
            .unwrap_or_else(|error| panic!("{explain}: {error}"));
        let plan: String = sqlx::Row::get_unchecked(&row, 0);
        sqlx::raw_sql("ROLLBACK; DEALLOCATE ALL")
            .execute(&mut *connection)
            .await
            .expect("an end");
        let plan: Value = serde_json::from_str(&plan).expect("a plan");
        let root = &plan[0]["Plan"];
        let blocks = |name: &str| root[name].as_i64().expect("a number of blocks");
        let mut cost = Cost {
            buffers: blocks("Shared Hit Blocks") + blocks("Shared Read Blocks"),
            rows: 0,
            indexes: Vec::new(),
            scanned: Vec::new(),
        };
        walk(root, &mut cost);
        costs.push(cost);
    }
    costs.try_into().expect("two costs")
}

fn walk(node: &Value, cost: &mut Cost) {
    if let Some(index) = node["Index Name"].as_str() {
        cost.indexes.push(index.to_owned());
    }
    if node["Node Type"] == "Seq Scan" && node["Actual Loops"].as_f64() != Some(0.0) {
        cost.scanned
            .push(node["Relation Name"].as_str().unwrap_or_default().to_owned());
    }
    if node["Relation Name"].is_string() && node["Node Type"] != "ModifyTable" {
        let rows =
            ["Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck"].map(|name| node[name].as_f64());
        let rows: f64 = rows.into_iter().flatten().sum();
        cost.rows += (rows * node["Actual Loops"].as_f64().unwrap_or(0.0)).round() as i64;
    }
    for child in node["Plans"].as_array().into_iter().flatten() {
        walk(child, cost);
    }
}
