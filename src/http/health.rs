//! `GET /api/health` (is the process alive) and `GET /api/ready` (can it do its work, check by check).

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CACHE_CONTROL;
use axum::response::Response;
use axum::routing::get;
use futures_util::future::{BoxFuture, FutureExt, Shared, WeakShared, join, join_all};
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::Value;
use tokio::time::Instant;

use crate::domain::deliveries::{DeliveryCounts, Waiting, WorkerState};
use crate::domain::time::Millis;
use crate::problem::Cause;

use super::answer::json;

/// The name of this service in health, readiness and release documents.
pub const SERVICE: &str = "events";

/// Time for one check.
const CHECK_DEADLINE: Duration = Duration::from_secs(2);

/// The longest error text shown.
const REASON_CHARS: usize = 200;

/// One thing that readiness looks at.
#[derive(Clone)]
pub struct ReadyCheck {
    /// `db`, `network_jwks`, `delivery_worker`, `dlq`, …
    pub name: &'static str,
    /// Whether its failure makes the service not ready, instead of degraded.
    pub required: bool,
    /// Runs it. It gets 2 s and may be dropped at any await.
    pub run: Arc<dyn Fn() -> BoxFuture<'static, Verdict> + Send + Sync>,
}

impl ReadyCheck {
    /// A check from an async closure.
    pub fn new<F, Fut>(name: &'static str, required: bool, run: F) -> Self
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Verdict> + Send + 'static,
    {
        Self {
            name,
            required,
            run: Arc::new(move || run().boxed()),
        }
    }
}

/// The wall clock, which only dates what a report says.
pub type Now = fn() -> Millis;

/// What a check found.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// It passed; the detail is shown when there is one.
    Ok(Option<Value>),
    /// It failed. The text is made one safe line before it is shown.
    Failed {
        /// Why.
        error: String,
        /// Shown beside the error when there is one.
        detail: Option<Value>,
    },
    /// It does not apply here, and why.
    Skipped(&'static str),
    /// It passed and is listed only where it fails.
    Unlisted,
}

impl Verdict {
    /// A failure without detail.
    pub fn failed(error: impl ToString) -> Self {
        Self::Failed {
            error: error.to_string(),
            detail: None,
        }
    }
}

/// Figures that readiness and metrics show; the composition root provides them.
pub trait Vitals: Send + Sync + 'static {
    /// Reads the figures of the database.
    fn stored(&self) -> BoxFuture<'static, Result<StoredVitals, Cause>>;
    /// Reads from the database how long deliveries have waited. It may take a while where very many wait.
    fn waiting(&self) -> BoxFuture<'static, Result<Waiting, Cause>>;
    /// The delivery worker of this process, from memory.
    fn worker(&self) -> WorkerState;
    /// Open streams of this process, from memory.
    fn realtime_connections(&self) -> u64;
}

/// Figures of the database.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoredVitals {
    /// Position of the newest event, 0 before the first.
    pub latest_seq: i64,
    /// Deliveries by status.
    pub deliveries: DeliveryCounts,
}

/// The readiness of a process: its checks, run together, at most once at a time.
pub struct Readiness {
    release: String,
    checks: Vec<ReadyCheck>,
    vitals: Arc<dyn Vitals>,
    now: Now,
    running: Mutex<Option<WeakShared<BoxFuture<'static, Arc<Report>>>>>,
}

impl Readiness {
    /// `release` is the commit that runs. Lists of failed checks follow the order of `checks`.
    pub fn new(release: impl Into<String>, checks: Vec<ReadyCheck>, vitals: Arc<dyn Vitals>, now: Now) -> Self {
        Self {
            release: release.into(),
            checks,
            vitals,
            now,
            running: Mutex::new(None),
        }
    }

    /// Runs every check, or joins the run that is under way.
    pub async fn report(&self) -> Arc<Report> {
        let run = {
            let mut running = self.running.lock();
            match running
                .as_ref()
                .and_then(WeakShared::upgrade)
                .filter(|run| run.peek().is_none())
            {
                Some(run) => run,
                None => {
                    let run: Shared<_> =
                        examine(self.release.clone(), self.checks.clone(), self.vitals.clone(), self.now)
                            .boxed()
                            .shared();
                    *running = run.downgrade();
                    run
                }
            }
        };
        run.await
    }
}

/// The body of `/api/ready`, members in the order of the wire.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Whether every required check passed.
    pub ready: bool,
    status: &'static str,
    service: &'static str,
    release: String,
    checked_at: String,
    failed: Vec<&'static str>,
    degraded: Vec<&'static str>,
    skipped: Vec<&'static str>,
    checks: BTreeMap<&'static str, Outcome>,
    latest_seq: Option<i64>,
    deliveries: Option<DeliveryCounts>,
    worker: WorkerState,
    realtime_connections: u64,
}

#[derive(Debug, Serialize)]
struct Outcome {
    status: &'static str,
    required: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<Value>,
    latency_ms: f64,
    checked_at: String,
}

async fn examine(release: String, checks: Vec<ReadyCheck>, vitals: Arc<dyn Vitals>, now: Now) -> Arc<Report> {
    let outcomes = join_all(checks.iter().map(|check| outcome(check, now)));
    let (outcomes, stored) = join(outcomes, tokio::time::timeout(CHECK_DEADLINE, vitals.stored())).await;
    let mut report = Report {
        ready: true,
        status: "ready",
        service: SERVICE,
        release,
        checked_at: now().to_iso(),
        failed: Vec::new(),
        degraded: Vec::new(),
        skipped: Vec::new(),
        checks: BTreeMap::new(),
        latest_seq: None,
        deliveries: None,
        worker: vitals.worker(),
        realtime_connections: vitals.realtime_connections(),
    };
    let listed = checks
        .iter()
        .zip(outcomes)
        .filter_map(|(check, outcome)| Some((check, outcome?)));
    for (check, outcome) in listed {
        match (outcome.status, check.required) {
            ("fail", true) => report.failed.push(check.name),
            ("fail", false) => report.degraded.push(check.name),
            ("skipped", required) => {
                report.skipped.push(check.name);
                if required {
                    report.degraded.push(check.name);
                }
            }
            _ => {}
        }
        report.checks.insert(check.name, outcome);
    }
    let passed = report.checks.values().any(|outcome| outcome.status == "ok");
    report.ready = report.failed.is_empty();
    report.status = match (report.ready, report.degraded.is_empty() && passed) {
        (false, _) => "not_ready",
        (true, false) => "degraded",
        (true, true) => "ready",
    };
    if report.checks.get("db").is_none_or(|db| db.status == "ok")
        && let Ok(Ok(stored)) = stored
    {
        report.latest_seq = Some(stored.latest_seq);
        report.deliveries = Some(stored.deliveries);
    }
    Arc::new(report)
}

/// What one check came to; nothing where there is nothing to list.
async fn outcome(check: &ReadyCheck, now: Now) -> Option<Outcome> {
    let since = Instant::now();
    // The closure itself is called inside the guard: it may panic before it returns a future.
    let run = AssertUnwindSafe(async { (check.run)().await }).catch_unwind();
    let verdict = match tokio::time::timeout(CHECK_DEADLINE, run).await {
        Ok(Ok(verdict)) => verdict,
        Ok(Err(_)) => Verdict::failed("the check panicked"),
        Err(_) => Verdict::failed("timeout"),
    };
    let (status, error, reason, detail) = match verdict {
        Verdict::Ok(detail) => ("ok", None, None, detail),
        Verdict::Failed { error, detail } => ("fail", Some(one_safe_line(&error)), None, detail),
        Verdict::Skipped(reason) => ("skipped", None, Some(reason), None),
        Verdict::Unlisted => return None,
    };
    Some(Outcome {
        status,
        required: check.required,
        error,
        reason,
        detail,
        latency_ms: (since.elapsed().as_secs_f64() * 10_000.0).round() / 10.0,
        checked_at: now().to_iso(),
    })
}

/// One line of at most 200 characters without credentials, query strings or named secrets.
pub fn one_safe_line(text: &str) -> String {
    let words = text.split_whitespace().map(safe_word);
    let line = words.collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(REASON_CHARS) {
        Some((end, _)) => line[..end].to_owned(),
        None => line,
    }
}

fn safe_word(word: &str) -> String {
    const SECRETS: [&str; 5] = ["key=", "token=", "secret=", "password=", "signature="];
    let mut word = word.to_owned();
    if let Some(scheme) = word.find("://") {
        let host = scheme + "://".len();
        let authority = word[host..].find(['/', '?', '#']).map_or(word.len(), |end| host + end);
        // A password may itself hold the characters that end an authority, so the last `@` of the word counts.
        let at = word[host..authority].rfind('@').or_else(|| word[host..].rfind('@'));
        if let Some(at) = at {
            word.replace_range(host..=host + at, "");
        }
        if let Some(query) = word.find('?') {
            word.truncate(query);
        }
    }
    let lower = word.to_ascii_lowercase();
    if let Some(value) = SECRETS
        .iter()
        .filter_map(|name| lower.find(name).map(|at| at + name.len()))
        .min()
    {
        word.truncate(value);
    }
    word
}

/// Both routes.
pub fn routes(version: &'static str, readiness: Arc<Readiness>) -> Router {
    Router::new()
        .route("/api/health", get(move || async move { health(version) }))
        .route("/api/ready", get(ready).with_state(readiness))
}

fn health(version: &'static str) -> Response {
    #[derive(Serialize)]
    struct Health {
        status: &'static str,
        service: &'static str,
        version: &'static str,
    }
    json(
        StatusCode::OK,
        &Health {
            status: "ok",
            service: "openvibe-events",
            version,
        },
    )
}

async fn ready(State(readiness): State<Arc<Readiness>>) -> Response {
    let report = readiness.report().await;
    let status = if report.ready {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    let mut response = json(status, &*report);
    response
        .headers_mut()
        .insert(CACHE_CONTROL, axum::http::HeaderValue::from_static("no-store"));
    response
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    struct Figures;

    impl Vitals for Figures {
        fn stored(&self) -> BoxFuture<'static, Result<StoredVitals, Cause>> {
            async {
                Ok(StoredVitals {
                    latest_seq: 7,
                    deliveries: DeliveryCounts::default(),
                })
            }
            .boxed()
        }
        fn waiting(&self) -> BoxFuture<'static, Result<Waiting, Cause>> {
            async { Ok(Waiting::default()) }.boxed()
        }
        fn worker(&self) -> WorkerState {
            WorkerState::default()
        }
        fn realtime_connections(&self) -> u64 {
            3
        }
    }

    fn readiness(checks: Vec<ReadyCheck>) -> Readiness {
        Readiness::new("abc", checks, Arc::new(Figures), || Millis(0))
    }

    async fn body(checks: Vec<ReadyCheck>) -> Value {
        serde_json::to_value(&*readiness(checks).report().await).unwrap()
    }

    fn passing(name: &'static str) -> ReadyCheck {
        ReadyCheck::new(name, true, || async { Verdict::Ok(None) })
    }

    #[tokio::test(start_paused = true)]
    async fn a_required_check_that_hangs_fails_in_two_seconds_and_hides_the_figures_of_the_database() {
        let since = Instant::now();
        let hang = || ReadyCheck::new("db", true, std::future::pending);
        let report = body(vec![
            hang(),
            passing("network_jwks"),
            ReadyCheck::new("dlq", false, std::future::pending),
        ])
        .await;
        assert_eq!(since.elapsed(), CHECK_DEADLINE, "the checks run together");
        assert_eq!(
            (&report["ready"], &report["status"]),
            (&false.into(), &"not_ready".into())
        );
        assert_eq!(report["failed"], serde_json::json!(["db"]));
        assert_eq!(report["degraded"], serde_json::json!(["dlq"]));
        assert_eq!(report["checks"]["db"]["error"], "timeout");
        assert_eq!(
            (&report["latest_seq"], &report["deliveries"]),
            (&Value::Null, &Value::Null)
        );
        assert_eq!(report["realtime_connections"], 3);
    }

    #[tokio::test]
    async fn an_optional_failure_degrades_and_a_panic_is_a_failure() {
        let detail = serde_json::json!({"depth": 2, "threshold": 1});
        let shown = detail.clone();
        let dlq = ReadyCheck::new("dlq", false, move || {
            let detail = Some(detail.clone());
            async move {
                Verdict::Failed {
                    error: "too many".into(),
                    detail,
                }
            }
        });
        let report = body(vec![passing("db"), dlq.clone()]).await;
        assert_eq!(
            (&report["ready"], &report["status"]),
            (&true.into(), &"degraded".into())
        );
        assert_eq!(report["checks"]["dlq"]["detail"], shown);
        assert_eq!(report["latest_seq"], 7);

        let panics = ReadyCheck::new("network_jwks", true, || async { panic!("no") });
        assert_eq!(
            body(vec![passing("db"), panics]).await["failed"],
            serde_json::json!(["network_jwks"])
        );
    }

    #[tokio::test]
    async fn a_skipped_check_is_listed_and_nothing_passing_is_no_readiness_to_boast_of() {
        let skipped = ReadyCheck::new("valkey", false, || async { Verdict::Skipped("VALKEY_URL is not set") });
        let report = body(vec![skipped]).await;
        assert_eq!(report["skipped"], serde_json::json!(["valkey"]));
        assert_eq!(report["checks"]["valkey"]["reason"], "VALKEY_URL is not set");
        assert_eq!(
            (&report["ready"], &report["status"]),
            (&true.into(), &"degraded".into())
        );
    }

    #[tokio::test]
    async fn callers_at_the_same_time_share_one_run_and_later_ones_get_a_new_one() {
        let runs = Arc::new(AtomicUsize::new(0));
        let counted = runs.clone();
        let check = ReadyCheck::new("db", true, move || {
            let runs = counted.clone();
            async move {
                runs.fetch_add(1, Ordering::SeqCst);
                tokio::task::yield_now().await;
                Verdict::Ok(None)
            }
        });
        let readiness = readiness(vec![check]);
        join(readiness.report(), readiness.report()).await;
        assert_eq!(runs.load(Ordering::SeqCst), 1);
        readiness.report().await;
        assert_eq!(runs.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn an_error_text_is_one_short_line_without_secrets() {
        let cases = [
            (
                "cannot reach\npostgres://app:hunter2@db:5432/events?sslmode=off now",
                "cannot reach postgres://db:5432/events now",
            ),
            ("postgres://app:p/a@db/x failed", "postgres://db/x failed"),
            (
                "GET https://network/jwks?access_token=abc: 500",
                "GET https://network/jwks 500",
            ),
            ("api_key=abc Password=def tail", "api_key= Password= tail"),
        ];
        for (text, line) in cases {
            assert_eq!(one_safe_line(text), line);
        }
        assert_eq!(one_safe_line(&"é".repeat(300)).chars().count(), REASON_CHARS);
    }
}
