//! What each statement costs with a long backlog: the plans of the real statements, as the service runs them.
//!
//! A private server with `auto_explain` writes down every plan with the rows it visited, while a service publishes,
//! delivers, lists, pulls and replays beside hundreds of thousands of waiting rows. `OV_PLANS_ROWS=1000000` fills a million.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde_json::{Value, json};

use crate::{
    api_world::{cursor, operator, text},
    store_fixture::{number, sql},
    support::{
        client::Client,
        cluster::Cluster,
        database::Database,
        envelopes::{batch, envelope, event_id},
        network::Network,
        process::setting,
        receiver::Receiver,
        service::Service,
        wait::eventually,
    },
};

/// Rows that a statement may visit for what it was asked, whatever waits. A pull and a replay have bounds of their own;
/// nothing here asks for as much.
const VISITED_MAX: i64 = 1_200;
/// A pull, a list and a walk over receipts look at so many rows at most, whether they match or not.
const SCANNED_MAX: i64 = 10_100;
/// Pages that a statement may touch. A turn records and claims up to 256 deliveries each, and a changed row costs some
/// fifteen pages of tables and indexes; all of that together takes a few milliseconds.
const BUFFERS_MAX: i64 = 9_000;
/// The tables that grow.
const GROWING: [&str; 4] = ["events", "deliveries", "idempotency_receipts", "events_archive"];

/// Subscriptions that rows wait for.
const WAITING: i64 = 20;
/// A trace that a tenth of all events name.
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

/// What somebody asks for now and then. Of tables that grew and were not analysed since, PostgreSQL believes too little for
/// these; autovacuum sees to it within a minute. What runs all the time must not depend on that.
const ASKED: [&str; 2] = [
    "(event_type, seq) > (",
    "SELECT seq, event_type, env, project_id, visibility FROM events WHERE seq >= $1",
];

/// Statements that must have been seen, each by words that only it has.
const EXPECTED: [(&str, &str); 22] = [
    (
        "the counter row",
        "FROM store_counter WHERE name = 'events' AND version = in_store_version",
    ),
    ("what is known of ids", "AS i(id)"),
    ("the loop guard", "WITH RECURSIVE keys"),
    ("the tails of keys", "ORDER BY t.seq DESC LIMIT 1"),
    ("a publish", "INSERT INTO events"),
    ("where keys were at rest", "ORDER BY r.seq DESC LIMIT 1"),
    ("a group that is looked at closely", "AS \"current_timeline!\""),
    ("what such a group stores", "FROM store_events( $1,"),
    ("what is due", "FROM (VALUES (0, c.critical)"),
    ("a claim", "claimed_generation = d.generation"),
    ("the claims of the dead", "WITH lost AS ("),
    ("a settle", "f.outcome = 'unsent'"),
    ("the marks of keys", "WITH firsts AS"),
    ("a pull by patterns", "event_type LIKE ANY"),
    ("a pull of a type", "(event_type, seq) > ("),
    ("events by position", "WHERE seq = ANY($1)"),
    (
        "a replay by position",
        "SELECT seq, event_type, env, project_id, visibility FROM events WHERE seq >= $1",
    ),
    ("what a replay queues", "SET generation = d.generation + 1"),
    ("a skip", "AS ending"),
    ("what follows a skip", "SELECT k.position AS"),
    ("few that wait, for a list", "LIMIT in_looked_at + 1"),
    ("a list of deliveries", "LIMIT in_looked_at"),
];

/// A statement that was run, and what that cost.
#[derive(Debug, Default, Clone)]
struct Run {
    visited: i64,
    buffers: i64,
    scanned: BTreeSet<String>,
}

impl Run {
    fn of(plan: &Value) -> Self {
        let blocks = |name: &str| plan[name].as_i64().unwrap_or(0);
        let mut run = Self {
            buffers: blocks("Shared Hit Blocks") + blocks("Shared Read Blocks"),
            ..Self::default()
        };
        run.add(plan);
        run
    }

    fn add(&mut self, node: &Value) {
        let loops = node["Actual Loops"].as_f64().unwrap_or(0.0);
        let table = node["Relation Name"].as_str().unwrap_or_default();
        if GROWING.contains(&table) && node["Node Type"] != "ModifyTable" {
            let counts = ["Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck"];
            let rows: f64 = counts.iter().filter_map(|name| node[*name].as_f64()).sum();
            self.visited += (rows * loops).round() as i64;
            if node["Node Type"] == "Seq Scan" && loops > 0.0 {
                self.scanned.insert(table.to_owned());
            }
        }
        for child in node["Plans"].as_array().into_iter().flatten() {
            self.add(child);
        }
    }
}

/// The plans in a server's log from a byte on: the worst run of each statement.
fn plans(log: &str) -> BTreeMap<String, Run> {
    let mut worst: BTreeMap<String, Run> = BTreeMap::new();
    for entry in log.split(MARK).filter(|entry| !entry.contains(OWN)) {
        let Some((_, plan)) = entry.split_once("plan:\n") else {
            continue;
        };
        let Ok(plan) = serde_json::from_str::<Value>(plan) else {
            continue; // the last one may still be on its way
        };
        let query = plan["Query Text"].as_str().unwrap_or_default();
        let words: Vec<&str> = query.split_whitespace().collect();
        let run = Run::of(&plan["Plan"]);
        let known = worst.entry(words.join(" ")).or_default();
        known.visited = known.visited.max(run.visited);
        known.buffers = known.buffers.max(run.buffers);
        known.scanned.extend(run.scanned);
    }
    worst
}

/// When a plan was made.
const UNKNOWN: &str = "before the tables were analysed";
const KNOWN: &str = "after the tables were analysed";

/// What opens each entry of the server's log.
const MARK: &str = "@entry@";

/// What opens the test's own statements.
const OWN: &str = "/* the test's */";

/// Fills the log and the queues: rows for every subscription, and a third of them behind one head that is due tomorrow.
async fn fill(database: &Database, rows: i64, ids: &[String], blocked: &str, disabled: &str) {
    let third = rows / 3;
    let list = ids.iter().map(|id| format!("'{id}'")).collect::<Vec<_>>().join(", ");
    sql(
        database.pool(),
        &format!(
            "SET synchronous_commit = off;
             CREATE FUNCTION pg_temp.id(n bigint) RETURNS text LANGUAGE sql IMMUTABLE
                 RETURN 'evt_01' || lpad(upper(to_hex(n)), 24, '0');
             INSERT INTO events (seq, id, event_type, version, source, actor, subject_type, subject_id, trace_id, priority,
                                 visibility, occurred_at, received_at, payload, publisher, request_id, size_bytes)
             SELECT n, pg_temp.id(n), CASE WHEN n = 7 THEN 'live.rare.x' ELSE 'live.wait.x' END, 1, 'live',
                    '{{\"type\":\"service\",\"id\":\"live\"}}', 'thing', n::text,
                    CASE WHEN n % 10 = 0 THEN '{TRACE}' ELSE md5(n::text) END, 'important', 'internal',
                    '2026-10-21T08:15:30Z', now_ms(), '{{}}', 'svc:live', 'req_' || n, 300
             FROM generate_series(1, {rows}) n;
             INSERT INTO idempotency_receipts SELECT 'events:publish', pg_temp.id(n), now_ms() FROM generate_series(1, {rows}) n;
             INSERT INTO events_archive (id, seq, epoch, event_type, source, subject_type, subject_id, visibility, received_at,
                                         body, archived_at)
             SELECT 'evt_00' || n, -n, 0, 'live.wait.x', 'live', 'thing', n::text, 'internal', now_ms(), '', 1
             FROM generate_series(1, {third}) n;
             SELECT setval('event_positions', {rows});
             INSERT INTO deliveries (event_id, subscription_id, seq, priority, next_attempt_at, created_at, updated_at, head)
             SELECT pg_temp.id(n), (ARRAY[{list}])[1 + n % {WAITING}], n, 1, n, 1, 1, true
             FROM generate_series(1, {rows}) n;
             INSERT INTO deliveries (event_id, subscription_id, seq, priority, next_attempt_at, created_at, updated_at, head)
             SELECT pg_temp.id(n), '{disabled}', n, 1, n, 1, 1, true FROM generate_series(1, {third}) n;
             INSERT INTO deliveries (event_id, subscription_id, seq, priority, next_attempt_at, created_at, updated_at,
                                     ordering_key, status, attempt, head)
             SELECT pg_temp.id(n), '{blocked}', n, 1, CASE WHEN n = 1 THEN now_ms() + 86400000 ELSE 1 END, 1, 1,
                    'subject/thing/blocked', CASE WHEN n = 1 THEN 'failed' ELSE 'pending' END, 1, n = 1
             FROM generate_series(1, {third}) n;
             INSERT INTO deliveries (event_id, subscription_id, seq, priority, next_attempt_at, created_at, updated_at,
                                     ordering_key, head)
             SELECT pg_temp.id(n), '{disabled}', n, 1, n, 1, 1, 'parked', n = {third} + 1
             FROM generate_series({third} + 1, {third} + 1000) n;
             INSERT INTO delivery_counts (owner, role, period, pending) VALUES ('', 'folded', 0, {rows} + 2 * {third} + 1000)"
        ),
    )
    .await;
}

/// The event at a position of the filling.
fn parked_id(position: i64) -> String {
    format!("evt_01{position:024X}")
}

/// Everything that a caller or a process does, a little of each.
async fn traffic(client: &Client, database: &Database, rows: i64, ids: &[String], keyed: &str, disabled: &str) {
    let token = client.service_token("live");
    let event = |kind: &str| envelope("live").event_type(&format!("live.{kind}.x"));
    for n in 0..10 {
        client.publish(&event("wait")).await.expect(201);
        // In a trace that many events name, and under a key.
        let traced = event("keyed")
            .set("trace_id", TRACE)
            .subject("thing", &format!("{}", n % 3));
        client.publish(&traced).await.expect(201);
        client.publish(&traced).await.expect(200);
    }
    let events: Vec<_> = (0..100)
        .map(|n| event("keyed").subject("thing", &(n % 3).to_string()))
        .collect();
    client.publish_as("live", &batch(&events)).await.expect(201);
    // One that is known already sends the whole group the long way.
    let mut mixed = events[..1].to_vec();
    mixed.extend((0..20).map(|n| event("keyed").subject("thing", &(n % 3).to_string())));
    client.publish_as("live", &batch(&mixed)).await.expect(201);

    let middle = cursor(0, rows / 2);
    for topic in [
        "live.*",
        "*",
        "live.rare.x",
        "live.wait.x",
        "none.*",
        "live.rare.*,chat.*",
    ] {
        for after in [String::new(), format!("&after={middle}")] {
            let path = format!("/api/v1/events?topic={topic}&limit=100{after}");
            client.get(&path, Some(&token)).await.expect(200);
        }
    }
    client
        .get(&format!("/api/v1/events/{}", event_id()), Some(&token))
        .await
        .expect(404);
    client
        .get(&format!("/api/v1/events/{}", events[0].id()), Some(&token))
        .await
        .expect(200);

    let operator = operator();
    let statuses = ["", "pending", "failed", "delivered", "dead"];
    let subscriptions = ["", &ids[0], keyed];
    for filter in statuses
        .iter()
        .flat_map(|status| subscriptions.map(|subscription| format!("status={status}&subscription_id={subscription}")))
    {
        let path = format!("/api/v1/deliveries?limit=100&{filter}");
        let page = client.get(&path, Some(&operator)).await.expect(200);
        if let Some(next) = page["next"].as_str() {
            client
                .get(&format!("{path}&after={next}"), Some(&operator))
                .await
                .expect(200);
        }
    }
    for selection in [
        json!({ "subscription_id": keyed, "event_ids": events.iter().take(20).map(|event| event.id()).collect::<Vec<_>>() }),
        json!({ "subscription_id": keyed, "from_seq": rows + 100 }),
        json!({ "subscription_id": ids[0], "from_seq": rows + 100 }),
    ] {
        client
            .post("/api/v1/deliveries/replay", Some(&operator), &selection)
            .await
            .expect(200);
    }
    // The first of a key that waits, and one behind it.
    let parked = number(
        database.pool(),
        &format!("{OWN} SELECT min(seq) FROM deliveries WHERE ordering_key = 'parked' AND status = 'pending'"),
    )
    .await;
    for position in [parked + 3, parked] {
        let skip = json!({ "subscription_id": disabled, "event_ids": [parked_id(position)] });
        let skipped = client
            .post("/api/v1/deliveries/skip", Some(&operator), &skip)
            .await
            .expect(200);
        assert_eq!(skipped["skipped"], json!(1));
    }
    let manager = client.service_token("chat");
    for verb in ["disable", "enable", "rotate-secret"] {
        let path = format!("/api/v1/subscriptions/{}/{verb}", ids[1]);
        client.post(&path, Some(&manager), &json!({})).await.expect(200);
    }
    client.get("/api/v1/subscriptions", Some(&manager)).await.expect(200);
    for path in ["/api/health", "/api/ready", "/metrics"] {
        client.get(path, None).await.expect(200);
    }
}

async fn subscribe(client: &Client, pattern: &str, endpoint: &str, max_inflight: i64) -> String {
    let body = json!({ "topic_pattern": pattern, "endpoint": endpoint, "max_inflight": max_inflight });
    let token = client.service_token("chat");
    let made = client
        .post("/api/v1/subscriptions", Some(&token), &body)
        .await
        .expect(201);
    text(&made, "id").to_owned()
}

/// Every statement that costs more than a constant, and every one that was expected and not seen.
fn judge(phase: &str, log: &str) -> Vec<String> {
    let plans = plans(log);
    let mut faults = Vec::new();
    for (what, words) in EXPECTED {
        if !plans.keys().any(|query| query.contains(words)) {
            faults.push(format!("{phase}: {what} ({words}) was not seen"));
        }
    }
    for (query, run) in &plans {
        if phase == UNKNOWN && ASKED.iter().any(|words| query.contains(words)) {
            continue;
        }
        let bounded = ["event_type LIKE ANY", "LIMIT in_looked_at", "ctid >= format("];
        let visited_max = if bounded.iter().any(|words| query.contains(words)) {
            SCANNED_MAX
        } else {
            VISITED_MAX
        };
        if !run.scanned.is_empty() || run.visited > visited_max || run.buffers > BUFFERS_MAX {
            faults.push(format!("{phase}: {run:?}: {query}"));
        }
    }
    faults
}

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_reads_more_because_more_is_waiting() {
    let rows: i64 = setting("OV_PLANS_ROWS").unwrap_or(300_000);
    let settings = format!("log_line_prefix = '{MARK}'\nfsync = off\nautovacuum = off\nmax_wal_size = 4GB\n");
    let (cluster, network, receiver) = tokio::join!(Cluster::start(&settings), Network::start(), Receiver::start());
    let database = Database::create_on(&cluster.server()).await;
    let first = Service::start(&database, &network, &[("EVENTS_WORKER", "off")]).await;
    let client = first.client();
    let mut policy = json!({ "class": "domain", "durability": "required", "delivery_semantics": "at_least_once" });
    policy["ordering"] = json!({ "scope": "key", "key": "subject" });
    client
        .put("/api/v1/delivery-policies/live.keyed.x", Some(&operator()), &policy)
        .await
        .expect(200);
    let mut ids = Vec::new();
    for n in 0..WAITING {
        ids.push(subscribe(client, "live.wait.*", &receiver.url(&format!("/{n}")), 4).await);
    }
    let keyed = subscribe(client, "live.keyed.*", &receiver.url("/keyed"), 8).await;
    let blocked = subscribe(client, "live.blocked.*", &receiver.url("/blocked"), 8).await;
    let disabled = subscribe(client, "live.disabled.*", &receiver.url("/disabled"), 8).await;
    let token = client.service_token("chat");
    let path = format!("/api/v1/subscriptions/{disabled}/disable");
    client.post(&path, Some(&token), &json!({})).await.expect(200);
    first.terminate().await;
    fill(&database, rows, &ids, &blocked, &disabled).await;
    let explain = [
        ("session_preload_libraries", "auto_explain"),
        ("auto_explain.log_min_duration", "0"),
        ("auto_explain.log_analyze", "on"),
        ("auto_explain.log_buffers", "on"),
        ("auto_explain.log_timing", "off"),
        ("auto_explain.log_nested_statements", "on"),
        ("auto_explain.log_format", "json"),
    ];
    for (name, value) in explain {
        let statement = format!(
            "LOAD 'auto_explain'; ALTER DATABASE {} SET {name} = '{value}'",
            database.name()
        );
        sql(database.pool(), &statement).await;
    }

    let (mut faults, mut dearest) = (Vec::new(), Vec::new());
    // Plans are made for tables that nobody has looked at since they grew, then for tables that are known.
    for phase in [UNKNOWN, KNOWN] {
        let from = cluster.log().len();
        let service = Service::start(&database, &network, &[("EVENTS_WORKER_INTERVAL_MS", "200")]).await;
        // What a dead process held is released on the way.
        sql(
            database.pool(),
            &format!(
                "{OWN} UPDATE deliveries SET lease_owner = 'gone', lease_until = 1, claim_id = 1, claimed_generation = 0 \
                 WHERE subscription_id = '{}' AND seq < 100",
                ids[0]
            ),
        )
        .await;
        let arrived = receiver.calls().len();
        traffic(service.client(), &database, rows, &ids, &keyed, &disabled).await;
        receiver.wait_calls(arrived + 400, Duration::from_secs(60)).await;
        let open = format!(
            "{OWN} SELECT count(*) FROM deliveries WHERE subscription_id = '{keyed}' AND status IN ('pending', 'failed')"
        );
        eventually(
            "what has a key is delivered",
            Duration::from_secs(60),
            async || match number(database.pool(), &open).await {
                0 => Ok(()),
                left => Err(format!("{left} left")),
            },
        )
        .await;
        assert_eq!(receiver.calls_to("/blocked").len(), 0);
        assert_eq!(receiver.calls_to("/disabled").len(), 0);
        service.terminate().await;
        let log = &cluster.log()[from..];
        faults.extend(judge(phase, log));
        let mut seen: Vec<_> = plans(log).into_iter().collect();
        seen.sort_by_key(|(_, run)| std::cmp::Reverse(run.buffers));
        dearest.extend(seen.into_iter().take(8));
        // What autovacuum does where thousands of rows were finished: the first claims of a process pass over the rest.
        sql(database.pool(), "VACUUM (ANALYZE, INDEX_CLEANUP ON)").await;
    }
    for (query, run) in dearest {
        println!("{} pages, {} rows: {query:.100}", run.buffers, run.visited);
    }
    assert!(faults.is_empty(), "with {rows} rows:\n{}", faults.join("\n"));
}
