//! What one claim costs with 1,000,000 deliveries waiting, 300,000 of them behind one blocked key, against the same with
//! 1,000. It makes two databases on the server it is given; `scripts/bench.sh` runs it.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use openvibe_events::domain::ids::SubscriptionId;
use openvibe_events::store::{Addresses, Candidate, Claim, Store, migrate};
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};

/// Subscriptions that a claim is made for, the blocked one among them.
const SUBSCRIPTIONS: i64 = 20;
/// Deliveries that one claim takes.
const ROOM: i64 = 50;
/// Claims that are not measured: caches fill, and dead rows reach a steady number.
const WARM_UP: usize = 20;

/// What one claim costs in front of a long backlog; one line of JSON, in milliseconds.
#[derive(Parser)]
#[command(name = "claim", version)]
struct Arguments {
    /// The server, without a database
    #[arg(long, value_name = "postgresql://USER@HOST:PORT")]
    server: String,
    /// Claims on each side, in turns
    #[arg(long, default_value_t = 200)]
    claims: usize,
}

type Failure = Box<dyn std::error::Error>;

/// One side of the comparison: a database with a backlog.
struct Side {
    pool: PgPool,
    store: Store,
    candidates: Vec<Candidate>,
    times_ms: Vec<f64>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let measured = runtime
        .map_err(Failure::from)
        .and_then(|runtime| runtime.block_on(measure(arguments.server.trim_end_matches('/'), arguments.claims)));
    match measured {
        Ok((small_ms, full_ms)) => {
            let line = format!(r#"{{"mode":"claim","small_ms":{small_ms:.4},"full_ms":{full_ms:.4}}}"#);
            match writeln!(std::io::stdout(), "{line}") {
                Ok(()) => ExitCode::SUCCESS,
                Err(_) => ExitCode::FAILURE,
            }
        }
        Err(failure) => {
            let _ = writeln!(std::io::stderr(), "claim: {failure}");
            ExitCode::FAILURE
        }
    }
}

/// Medians of the small and the full side, in milliseconds.
async fn measure(server: &str, claims: usize) -> Result<(f64, f64), Failure> {
    let mut sides = [
        Side::fill(server, "claim_small", 300, 1_000).await?,
        Side::fill(server, "claim_full", 300_000, 1_000_000).await?,
    ];
    for turn in 0..WARM_UP + claims {
        for side in &mut sides {
            let took_ms = side.claim().await?;
            if turn >= WARM_UP {
                side.times_ms.push(took_ms);
            }
        }
    }
    let [small, full] = &mut sides;
    Ok((median(&mut small.times_ms), median(&mut full.times_ms)))
}

impl Side {
    /// A database with `waiting` deliveries in all, `blocked` of them behind a head that somebody holds.
    async fn fill(server: &str, name: &str, blocked: i64, waiting: i64) -> Result<Self, Failure> {
        let mut admin = PgConnection::connect(&format!("{server}/postgres")).await?;
        sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {name}")))
            .execute(&mut admin)
            .await?;
        let url = format!("{server}/{name}");
        let addresses = Addresses::parse(&url, &url)?;
        migrate(&addresses).await?;
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .connect_with(url.parse::<PgConnectOptions>()?)
            .await?;
        let others = (waiting - blocked) / (SUBSCRIPTIONS - 1);
        let fill = format!(
            r#"
            INSERT INTO subscriptions (id, consumer, topic_pattern, endpoint, secret, created_at, updated_at, max_inflight)
            SELECT 'sub_' || lpad(s::text, 26, '0'), 'consumer-' || s, '*', 'http://127.0.0.1/hook', 'a secret', 1, 1, 16
            FROM generate_series(0, {SUBSCRIPTIONS} - 1) s;
            INSERT INTO events (id, seq, event_type, version, source, actor, subject_type, subject_id, trace_id, priority,
                                visibility, occurred_at, received_at, payload, publisher)
            SELECT 'evt_' || lpad(n::text, 26, '0'), n, 'live.load.happened', 1, 'live', '{{"type":"service","id":"live"}}',
                   'load', '1', 'trc_' || n, 'important', 'internal', '2026-01-01T00:00:00Z', 1,
                   '{{"filler":"' || repeat('x', 1000) || '"}}', 'svc:live'
            FROM generate_series(1, {events}) n;
            SELECT setval('event_positions', {events});
            INSERT INTO deliveries (event_id, subscription_id, seq, priority, next_attempt_at, created_at, updated_at,
                                    ordering_key, head, lease_owner, lease_until, claim_id, claimed_generation)
            SELECT 'evt_' || lpad(n::text, 26, '0'), 'sub_' || lpad('0', 26, '0'), n, 1, n, 1, 1, 'load:1', n = 1,
                   CASE WHEN n = 1 THEN 'somebody' END, CASE WHEN n = 1 THEN now_ms() + 86400000 END,
                   CASE WHEN n = 1 THEN 1 END, CASE WHEN n = 1 THEN 0 END
            FROM generate_series(1, {blocked}) n;
            INSERT INTO deliveries (event_id, subscription_id, seq, priority, next_attempt_at, created_at, updated_at, head)
            SELECT 'evt_' || lpad(n::text, 26, '0'), 'sub_' || lpad(s::text, 26, '0'), n, 1, n, 1, 1, true
            FROM generate_series(1, {others}) n, generate_series(1, {SUBSCRIPTIONS} - 1) s;
            "#,
            events = blocked.max(others),
        );
        sqlx::raw_sql(AssertSqlSafe(fill)).execute(&pool).await?;
        sqlx::raw_sql("VACUUM ANALYZE").execute(&pool).await?;
        let candidates = (0..SUBSCRIPTIONS).map(|number| {
            let id = SubscriptionId::parse(&format!("sub_{number:026}")).ok_or("the id of a subscription")?;
            Ok(Candidate {
                id,
                frontier: [0; 3],
                claims_from: 0,
                room: i64::MAX,
                consumer_room: ROOM,
            })
        });
        Ok(Self {
            pool,
            store: Store::connect(addresses).await?,
            candidates: candidates.collect::<Result<_, Failure>>()?,
            times_ms: Vec::new(),
        })
    }

    /// Claims once, and puts back what was claimed.
    async fn claim(&self) -> Result<f64, Failure> {
        let wanted = Claim {
            owner: "bench",
            lease_ms: 60_000,
            room: ROOM,
            inflight_default: 1,
        };
        let began = Instant::now();
        let pass = self.store.claim(&wanted, &self.candidates).await?;
        let took_ms = began.elapsed().as_secs_f64() * 1000.0;
        let readable = pass.claimed.iter().filter(|claimed| claimed.event.is_some()).count();
        if i64::try_from(readable)? != ROOM {
            return Err(format!("a claim took {readable} readable deliveries, and {ROOM} were there").into());
        }
        sqlx::raw_sql(
            "UPDATE deliveries SET lease_owner = NULL, lease_until = NULL, claim_id = NULL, claimed_generation = NULL
             WHERE lease_owner = 'bench' AND lease_until IS NOT NULL",
        )
        .execute(&self.pool)
        .await?;
        Ok(took_ms)
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}
