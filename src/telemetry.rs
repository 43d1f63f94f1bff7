//! Logging set-up and every metric name. No other file calls the metrics macros or writes an exposition line.
//!
//! Label values come from closed sets: enums, route templates, names of limits. So the number of series is bounded by
//! the code, whatever callers send.

#![expect(clippy::disallowed_macros, reason = "the one home of the metrics macros")]

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use axum::extract::MatchedPath;
use axum::http::Method;
use metrics::{
    Counter, Histogram, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use planner::health::BreakerState;
use planner::{Class, Health};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

use crate::domain::deliveries::DeliveryCounts;
use crate::problem::LimitWindow;
use crate::realtime::End;

/// Counter: requests, by method, route template and class of status.
pub const HTTP_REQUESTS: &str = "http_requests_total";
/// Histogram, seconds: from the head of a request to the head of its answer, by method and route template.
pub const HTTP_DURATION: &str = "http_request_duration_seconds";
/// Gauge: requests being handled.
pub const HTTP_IN_FLIGHT: &str = "http_requests_in_flight";
/// Gauge: deliveries, by status.
pub const DELIVERIES: &str = "events_deliveries";
/// Gauge: dead deliveries.
pub const DLQ_DEPTH: &str = "events_dlq_depth";
/// Gauge: position of the newest event.
pub const LATEST_SEQ: &str = "events_latest_seq";
/// Gauge: open streams of this process.
pub const REALTIME_CONNECTIONS: &str = "events_realtime_connections";
/// Counter: events handed to open streams, each stream counted.
pub const REALTIME_EVENTS: &str = "events_realtime_events_total";
/// Counter: streams that ended, by reason; `client` where the other side left.
pub const REALTIME_ENDED: &str = "events_realtime_streams_ended_total";
/// Histogram, seconds: from receipt of an event to its delivery, by priority.
pub const DELIVERY_LATENCY: &str = "events_delivery_latency_seconds";
/// Counter: webhook attempts, by outcome.
pub const DELIVERY_ATTEMPTS: &str = "events_delivery_attempts_total";
/// Counter: results that came after their claim had moved on, and changed nothing.
pub const LATE_RESULTS: &str = "events_late_result_total";
/// Counter: claims that ended without a result, because their lease ran out or their process died.
pub const LEASES_EXPIRED: &str = "events_lease_expired_total";
/// Counter: deliveries claimed, and looks that claimed nothing, by what caused the look and by outcome.
pub const CLAIMS: &str = "events_claims_total";
/// Histogram, seconds: from the word that a subscription may have work to the claim, by what brought the word.
pub const CLAIM: &str = "events_claim_seconds";
/// Histogram, seconds: from when a delivery could first be claimed to its claim, by the carrier and class it was placed
/// on.
pub const COMMIT_TO_CLAIM: &str = "events_commit_to_claim_seconds";
/// Gauge, seconds: how long the delivery that waits longest could have been claimed.
pub const OLDEST_DUE: &str = "events_oldest_due_seconds";
/// Gauge, seconds: the age of the oldest delivery that has failed and is still tried, which may hold up its key.
pub const OLDEST_HEAD: &str = "events_oldest_head_seconds";
/// Counter: requests refused by a per-actor limit, by limit and window.
pub const RATE_LIMITED: &str = "events_rate_limited_total";
/// Gauge: 1 while a carrier may be chosen, by carrier.
pub const CARRIER_UP: &str = "events_carrier_up";
/// Gauge: 0 closed, 1 half-open, 2 open, by carrier.
pub const CARRIER_BREAKER: &str = "events_carrier_breaker_state";
/// Gauge: signals that wait to be sent, by carrier.
pub const CARRIER_QUEUE_DEPTH: &str = "events_carrier_queue_depth";
/// Gauge, seconds: the latency that a carrier offers, by carrier and class.
pub const CARRIER_LATENCY: &str = "events_carrier_latency_seconds";
/// Histogram, seconds: one round trip to a carrier, by carrier and class.
pub const CARRIER_SIGNAL: &str = "events_carrier_signal_seconds";
/// Counter: signals handed to a carrier, by carrier, class and outcome.
pub const CARRIER_SIGNALS: &str = "events_carrier_signals_total";
/// Counter: signals that went nowhere, by carrier and reason.
pub const CARRIER_DROPPED: &str = "events_carrier_dropped_total";
/// Counter: subscriptions that got work, once a group, by class and the carrier that their deliveries were placed on.
pub const PLACEMENT_DECISIONS: &str = "events_placement_decisions_total";
/// Counter: decisions that moved from one carrier to another, by class, from and to.
pub const PLACEMENT_CHANGES: &str = "events_placement_changes_total";
/// Gauge: indexes of this release that are still to be built.
pub const INDEXES_MISSING: &str = "events_indexes_missing";
/// Gauge, always 1: the service and its release.
pub const RELEASE_INFO: &str = "release_info";
/// Gauge, bytes: resident memory of this process.
pub const PROCESS_MEMORY: &str = "process_resident_memory_bytes";
/// Gauge, seconds: processor time used by this process.
pub const PROCESS_CPU: &str = "process_cpu_seconds_total";
/// Gauge, seconds: age of this process.
pub const PROCESS_UPTIME: &str = "process_uptime_seconds";
/// Gauge, Unix seconds: start of this process.
pub const PROCESS_START: &str = "process_start_time_seconds";

const SIGNAL_BUCKETS: [f64; 11] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.25, 3.0,
];
const CLAIM_BUCKETS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 10.0, 60.0];
const HTTP_BUCKETS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
const LATENCY_BUCKETS: [f64; 14] = [
    0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0, 21600.0,
];

/// How log lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For a terminal.
    Human,
    /// One JSON object a line.
    Json,
}

/// Starts logging to standard error. `filter` is written like `info,openvibe_events=debug`.
///
/// Fails when the filter does not parse or logging has already been started; the text says which.
pub fn log_to_stderr(filter: &str, format: LogFormat) -> Result<(), String> {
    let filter = EnvFilter::try_new(filter).map_err(|error| format!("the log filter {filter:?}: {error}"))?;
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(io::stderr().is_terminal())
        .with_writer(io::stderr);
    match format {
        LogFormat::Human => subscriber.try_init(),
        LogFormat::Json => subscriber.json().flatten_event(true).try_init(),
    }
    .map_err(|error| format!("logging could not be started: {error}"))
}

/// The recorder of this process.
#[derive(Clone)]
pub struct Metrics {
    handle: PrometheusHandle,
}

/// What is read from the store or from memory when metrics are asked for. `None` leaves the metric out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Readings {
    /// Deliveries by status.
    pub deliveries: Option<DeliveryCounts>,
    /// Position of the newest event.
    pub latest_seq: Option<i64>,
    /// How long, in milliseconds, the delivery that waits longest could have been claimed; 0 where none waits.
    pub oldest_due_ms: Option<i64>,
    /// The age, in milliseconds, of the oldest delivery that has failed and is still tried; 0 where there is none.
    pub oldest_head_ms: Option<i64>,
    /// Open streams of this process.
    pub realtime_connections: Option<u64>,
}

impl Metrics {
    /// Installs the recorder once per process and returns it; later calls return the same one.
    pub fn install() -> Self {
        static RECORDER: OnceLock<Metrics> = OnceLock::new();
        RECORDER
            .get_or_init(|| {
                let recorder = PrometheusBuilder::new()
                    .set_buckets_for_metric(Matcher::Full(HTTP_DURATION.to_owned()), &HTTP_BUCKETS)
                    .and_then(|b| {
                        b.set_buckets_for_metric(Matcher::Full(DELIVERY_LATENCY.to_owned()), &LATENCY_BUCKETS)
                    })
                    .and_then(|b| b.set_buckets_for_metric(Matcher::Full(CARRIER_SIGNAL.to_owned()), &SIGNAL_BUCKETS))
                    .and_then(|b| b.set_buckets_for_metric(Matcher::Full(CLAIM.to_owned()), &CLAIM_BUCKETS))
                    .and_then(|b| b.set_buckets_for_metric(Matcher::Full(COMMIT_TO_CLAIM.to_owned()), &CLAIM_BUCKETS))
                    .expect("the bucket lists are not empty")
                    .build_recorder();
                let handle = recorder.handle();
                metrics::set_global_recorder(recorder).expect("only this function installs a recorder");
                describe();
                Self { handle }
            })
            .clone()
    }

    /// The Prometheus text of everything, with `readings` taken just now.
    pub fn render(&self, readings: &Readings) -> String {
        process();
        let mut text = self.handle.render();
        if let Some(counts) = readings.deliveries {
            head(&mut text, DELIVERIES, "Deliveries, by status.");
            let DeliveryCounts {
                pending,
                delivered,
                failed,
                dead,
            } = counts;
            for (status, count) in [
                ("pending", pending),
                ("delivered", delivered),
                ("failed", failed),
                ("dead", dead),
            ] {
                line(&mut text, format_args!("{DELIVERIES}{{status=\"{status}\"}} {count}"));
            }
            head(&mut text, DLQ_DEPTH, "Dead deliveries.");
            line(&mut text, format_args!("{DLQ_DEPTH} {dead}"));
        }
        if let Some(seq) = readings.latest_seq {
            head(&mut text, LATEST_SEQ, "Position of the newest event.");
            line(&mut text, format_args!("{LATEST_SEQ} {seq}"));
        }
        for (name, help, age_ms) in [
            (OLDEST_DUE, OLDEST_DUE_HELP, readings.oldest_due_ms),
            (OLDEST_HEAD, OLDEST_HEAD_HELP, readings.oldest_head_ms),
        ] {
            if let Some(age_ms) = age_ms {
                head(&mut text, name, help);
                let (seconds, rest_ms) = (age_ms.max(0) / 1000, age_ms.max(0) % 1000);
                line(&mut text, format_args!("{name} {seconds}.{rest_ms:03}"));
            }
        }
        if let Some(connections) = readings.realtime_connections {
            head(&mut text, REALTIME_CONNECTIONS, "Open streams of this process.");
            line(&mut text, format_args!("{REALTIME_CONNECTIONS} {connections}"));
        }
        text
    }

    /// Folds collected samples together until `stop`, so that memory stays bounded when nobody reads the metrics.
    pub async fn keep(&self, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(Duration::from_secs(5));
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            self.handle.run_upkeep();
        }
    }
}

const OLDEST_DUE_HELP: &str = "How long the delivery that waits longest could have been claimed.";
const OLDEST_HEAD_HELP: &str = "Age of the oldest delivery that has failed and is still tried.";

fn head(text: &mut String, name: &str, help: &str) {
    line(text, format_args!("# HELP {name} {help}\n# TYPE {name} gauge"));
}

fn line(text: &mut String, line: std::fmt::Arguments<'_>) {
    writeln!(text, "{line}").expect("a String takes every write");
}

fn describe() {
    describe_counter!(
        HTTP_REQUESTS,
        Unit::Count,
        "Requests, by method, route template and class of status."
    );
    describe_histogram!(
        HTTP_DURATION,
        Unit::Seconds,
        "Time to the head of the answer, by method and route template."
    );
    describe_gauge!(HTTP_IN_FLIGHT, Unit::Count, "Requests being handled.");
    describe_histogram!(
        DELIVERY_LATENCY,
        Unit::Seconds,
        "Time from receipt to delivery, by priority."
    );
    describe_counter!(DELIVERY_ATTEMPTS, Unit::Count, "Webhook attempts, by outcome.");
    describe_counter!(
        LATE_RESULTS,
        Unit::Count,
        "Results that came after their claim had moved on."
    );
    describe_counter!(LEASES_EXPIRED, Unit::Count, "Claims that ended without a result.");
    describe_counter!(
        CLAIMS,
        Unit::Count,
        "Deliveries claimed (won), and looks that claimed nothing, by what caused the look."
    );
    describe_histogram!(
        CLAIM,
        Unit::Seconds,
        "From the word that there is work to the claim, by what brought the word."
    );
    describe_histogram!(
        COMMIT_TO_CLAIM,
        Unit::Seconds,
        "From when a delivery could first be claimed to its claim."
    );
    describe_counter!(
        REALTIME_EVENTS,
        Unit::Count,
        "Events handed to open streams, each stream counted."
    );
    describe_counter!(REALTIME_ENDED, Unit::Count, "Streams that ended, by reason.");
    describe_counter!(RATE_LIMITED, Unit::Count, "Requests refused by a per-actor limit.");
    describe_gauge!(CARRIER_UP, Unit::Count, "1 while the carrier may be chosen.");
    describe_gauge!(CARRIER_BREAKER, Unit::Count, "0 closed, 1 half-open, 2 open.");
    describe_gauge!(CARRIER_QUEUE_DEPTH, Unit::Count, "Signals that wait to be sent.");
    describe_gauge!(CARRIER_LATENCY, Unit::Seconds, "The latency that a carrier offers.");
    describe_histogram!(CARRIER_SIGNAL, Unit::Seconds, "One round trip to a carrier.");
    describe_counter!(CARRIER_SIGNALS, Unit::Count, "Signals handed to a carrier, by outcome.");
    describe_counter!(CARRIER_DROPPED, Unit::Count, "Signals that went nowhere, by reason.");
    describe_counter!(
        PLACEMENT_DECISIONS,
        Unit::Count,
        "Subscriptions that got work, by the carrier it was placed on."
    );
    describe_counter!(
        PLACEMENT_CHANGES,
        Unit::Count,
        "Decisions that moved to another carrier."
    );
    describe_gauge!(
        INDEXES_MISSING,
        Unit::Count,
        "Indexes of this release that are still to be built."
    );
    describe_gauge!(RELEASE_INFO, Unit::Count, "The service and its release; always 1.");
    describe_gauge!(PROCESS_MEMORY, Unit::Bytes, "Resident memory of this process.");
    describe_gauge!(PROCESS_CPU, Unit::Seconds, "Processor time used by this process.");
    describe_gauge!(PROCESS_UPTIME, Unit::Seconds, "Age of this process.");
    describe_gauge!(PROCESS_START, Unit::Seconds, "Start of this process, in Unix time.");
}

/// One request being handled.
pub struct HttpRequest {
    method: &'static str,
    route: String,
    since: Instant,
}

impl HttpRequest {
    /// Counts a request in. `route` is the template it matched; `None` is counted as `unmatched`.
    pub fn start(method: &Method, route: Option<&MatchedPath>) -> Self {
        gauge!(HTTP_IN_FLIGHT).increment(1);
        let route = route.map_or("unmatched", MatchedPath::as_str).to_owned();
        Self {
            method: method_label(method),
            route,
            since: Instant::now(),
        }
    }

    /// Counts it out as if it had never come.
    pub fn leave_out(&mut self) {
        gauge!(HTTP_IN_FLIGHT).decrement(1);
    }

    /// Counts it out: by the class of `status`, or as `aborted` when the caller went away before there was one.
    pub fn end(&mut self, status: Option<u16>) {
        gauge!(HTTP_IN_FLIGHT).decrement(1);
        let class = match status {
            None => "aborted",
            Some(..200) => "1xx",
            Some(200..300) => "2xx",
            Some(300..400) => "3xx",
            Some(400..500) => "4xx",
            Some(500..) => "5xx",
        };
        let route = std::mem::take(&mut self.route);
        histogram!(HTTP_DURATION, "method" => self.method, "route" => route.clone()).record(self.since.elapsed());
        counter!(HTTP_REQUESTS, "method" => self.method, "route" => route, "status_class" => class).increment(1);
    }
}

fn method_label(method: &Method) -> &'static str {
    match method.as_str() {
        "GET" => "GET",
        "HEAD" => "HEAD",
        "POST" => "POST",
        "PUT" => "PUT",
        "PATCH" => "PATCH",
        "DELETE" => "DELETE",
        "OPTIONS" => "OPTIONS",
        _ => "OTHER",
    }
}

/// Why a signal went nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dropped {
    /// Too many wait to be sent.
    QueueFull,
    /// The carrier may not be used now.
    NotUsable,
    /// More was heard than could be looked at.
    Flooded,
    /// What was heard was no signal.
    Strange,
}

/// Signals of a carrier went nowhere.
pub fn carrier_dropped(carrier: &'static str, why: Dropped, signals: u64) {
    if signals == 0 {
        return;
    }
    let why = match why {
        Dropped::QueueFull => "queue_full",
        Dropped::NotUsable => "not_usable",
        Dropped::Flooded => "flooded",
        Dropped::Strange => "strange",
    };
    counter!(CARRIER_DROPPED, "carrier" => carrier, "why" => why).increment(signals);
}

/// One round trip of so many signals to a carrier ended.
pub fn carrier_signals(carrier: &'static str, class: Class, taken: bool, signals: u64, took: Duration) {
    let kind = class.label();
    let outcome = if taken { "sent" } else { "failed" };
    histogram!(CARRIER_SIGNAL, "carrier" => carrier, "kind" => kind).record(took);
    counter!(CARRIER_SIGNALS, "carrier" => carrier, "kind" => kind, "outcome" => outcome).increment(signals);
}

/// How a carrier stands, and what latency it offers for each class, in milliseconds.
pub fn carrier_state(
    carrier: &'static str,
    health: &Health,
    breaker: BreakerState,
    waiting: usize,
    latency_ms: &[(Class, f64)],
) {
    let up = matches!(health, Health::Up | Health::Degraded(_));
    gauge!(CARRIER_UP, "carrier" => carrier).set(if up { 1.0 } else { 0.0 });
    gauge!(CARRIER_BREAKER, "carrier" => carrier).set(match breaker {
        BreakerState::Closed => 0.0,
        BreakerState::HalfOpen => 1.0,
        BreakerState::Open { .. } => 2.0,
    });
    #[expect(clippy::cast_precision_loss, reason = "the queue is bounded")]
    gauge!(CARRIER_QUEUE_DEPTH, "carrier" => carrier).set(waiting as f64);
    for (class, ms) in latency_ms {
        gauge!(CARRIER_LATENCY, "carrier" => carrier, "class" => class.label()).set(ms / 1000.0);
    }
}

/// Subscriptions got work that was placed on a carrier.
pub fn placed(class: Class, carrier: &'static str, subscriptions: u64) {
    counter!(PLACEMENT_DECISIONS, "class" => class.label(), "carrier" => carrier).increment(subscriptions);
}

/// A decision moved.
pub fn placement_changed(class: Class, from: &str, to: &str) {
    counter!(PLACEMENT_CHANGES, "class" => class.label(), "from" => from.to_owned(), "to" => to.to_owned())
        .increment(1);
}

/// What became of a webhook attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptOutcome {
    /// The receiver accepted it.
    Delivered,
    /// It failed and will be tried again.
    Retry,
    /// It failed for the last time.
    Dead,
}

/// Counts a webhook attempt.
pub fn delivery_attempt(outcome: AttemptOutcome) {
    let label = match outcome {
        AttemptOutcome::Delivered => "delivered",
        AttemptOutcome::Retry => "retry",
        AttemptOutcome::Dead => "dead",
    };
    counter!(DELIVERY_ATTEMPTS, "outcome" => label).increment(1);
}

/// Counts claims that ended without a result.
pub fn leases_expired(claims: usize) {
    counter!(LEASES_EXPIRED).increment(claims as u64);
}

/// Why a look at a subscription claimed nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InVain {
    /// Nothing of it is due, free and the first of its key: another look, or another process, has it, or it is too early.
    Nothing,
    /// It runs as many as it may.
    Cap,
    /// The slots of this process, or of its consumer in it, went to others.
    NoSlot,
    /// Another process was claiming for it.
    Locked,
    /// It is no longer there, or no longer enabled.
    Gone,
}

impl InVain {
    const ALL: [Self; 5] = [Self::Nothing, Self::Cap, Self::NoSlot, Self::Locked, Self::Gone];

    fn label(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Cap => "cap",
            Self::NoSlot => "no_slot",
            Self::Locked => "locked",
            Self::Gone => "gone",
        }
    }
}

/// The meters of whoever claims, looked up once and then at hand: there are thousands of claims a second.
#[derive(Default)]
pub struct ClaimMeters {
    paths: Vec<(&'static str, PathMeters)>,
    waits: Vec<((&'static str, Option<Class>), Histogram)>,
}

struct PathMeters {
    won: Counter,
    in_vain: [Counter; InVain::ALL.len()],
    seconds: Histogram,
}

impl PathMeters {
    fn of(path: &'static str) -> Self {
        let counted = |outcome| counter!(CLAIMS, "path" => path, "outcome" => outcome);
        Self {
            won: counted("won"),
            in_vain: InVain::ALL.map(|why| counted(why.label())),
            seconds: histogram!(CLAIM, "path" => path),
        }
    }
}

impl ClaimMeters {
    /// So many deliveries of a subscription were claimed, so long after the word.
    pub fn won(&mut self, path: &'static str, deliveries: usize, after: Duration) {
        let meters = self.path(path);
        meters.won.increment(deliveries as u64);
        meters.seconds.record(after);
    }

    /// A look at a subscription claimed nothing.
    pub fn in_vain(&mut self, path: &'static str, why: InVain) {
        self.path(path).in_vain[why as usize].increment(1);
    }

    /// A delivery was claimed for the first time, so long after it could have been. The carrier is as recorded with it.
    pub fn waited(&mut self, carrier: Option<&str>, class: Option<Class>, waited: Duration) {
        let carrier = match carrier {
            None => "none",
            // A record may name what is no carrier of this release.
            Some(id) => carriers::descriptor(id).map_or("other", |known| known.id),
        };
        let found = self.waits.iter().position(|(labels, _)| *labels == (carrier, class));
        let index = found.unwrap_or_else(|| {
            let label = class.map_or("none", Class::label);
            let meter = histogram!(COMMIT_TO_CLAIM, "carrier" => carrier, "class" => label);
            self.waits.push(((carrier, class), meter));
            self.waits.len() - 1
        });
        self.waits[index].1.record(waited);
    }

    fn path(&mut self, path: &'static str) -> &PathMeters {
        let found = self.paths.iter().position(|(name, _)| *name == path);
        let index = found.unwrap_or_else(|| {
            self.paths.push((path, PathMeters::of(path)));
            self.paths.len() - 1
        });
        &self.paths[index].1
    }
}

/// Counts a result that changed nothing.
pub fn late_result() {
    counter!(LATE_RESULTS).increment(1);
}

/// The priority of a delivered event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PriorityLabel {
    /// Sent before all others.
    Critical,
    /// The default.
    Important,
    /// Sent after all others.
    Low,
}

/// Records the time from receipt of an event to its delivery.
pub fn delivery_latency(priority: PriorityLabel, latency: Duration) {
    let label = match priority {
        PriorityLabel::Critical => "critical",
        PriorityLabel::Important => "important",
        PriorityLabel::Low => "low",
    };
    histogram!(DELIVERY_LATENCY, "priority" => label).record(latency);
}

/// Counts a request that a per-actor limit refused. `limit` is one of the names in the code, never a caller's text.
pub fn rate_limited(limit: &'static str, window: LimitWindow) {
    counter!(RATE_LIMITED, "limit" => limit, "window" => window.label()).increment(1);
}

/// Counts an event that went to so many streams.
pub fn stream_events(streams: u64) {
    counter!(REALTIME_EVENTS).increment(streams);
}

/// Counts a stream that ended; `None` where its client left.
pub fn stream_ended(why: Option<End>) {
    counter!(REALTIME_ENDED, "reason" => why.map_or("client", End::label)).increment(1);
}

/// Says how many indexes are still to be built.
pub fn indexes_missing(count: usize) {
    // A release has a handful of them, which a float tells exactly.
    gauge!(INDEXES_MISSING).set(count as f64);
}

/// Says which release runs; called once at the start.
pub fn release(service: &'static str, release: &str) {
    gauge!(RELEASE_INFO, "service" => service, "release" => release.to_owned()).set(1.0);
}

/// Reads this process's figures from `/proc`. Where there is none, they are left out.
fn process() {
    // The kernel reports times to programs in hundredths of a second on every architecture this is built for.
    const TICKS_PER_SECOND: f64 = 100.0;
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let number = |text: &str| text.parse::<f64>().ok();

    if let Some(kib) = read("/proc/self/status").and_then(|status| {
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        number(line.split_whitespace().next()?)
    }) {
        gauge!(PROCESS_MEMORY).set(kib * 1024.0);
    }
    // The second field is the program's name and may hold spaces; the third follows its closing bracket.
    let stat = read("/proc/self/stat");
    let fields: Vec<&str> = stat
        .as_deref()
        .and_then(|stat| stat.rsplit_once(')'))
        .map(|(_, rest)| rest.split_whitespace().collect())
        .unwrap_or_default();
    let field = |nth: usize| fields.get(nth - 3).and_then(|text| number(text));
    if let (Some(user), Some(system)) = (field(14), field(15)) {
        gauge!(PROCESS_CPU).set((user + system) / TICKS_PER_SECOND);
    }
    let Some(started) = field(22).map(|ticks| ticks / TICKS_PER_SECOND) else {
        return;
    };
    if let Some(up) = read("/proc/uptime").and_then(|text| number(text.split_whitespace().next()?)) {
        gauge!(PROCESS_UPTIME).set((up - started).max(0.0));
    }
    if let Some(booted) =
        read("/proc/stat").and_then(|text| number(text.lines().find_map(|line| line.strip_prefix("btime "))?))
    {
        gauge!(PROCESS_START).set(booted + started);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_holds_every_metric_with_its_documented_labels_and_buckets() {
        let metrics = Metrics::install();
        HttpRequest::start(&Method::from_bytes(b"BREW").unwrap(), None).end(None);
        delivery_attempt(AttemptOutcome::Dead);
        delivery_latency(PriorityLabel::Important, Duration::from_secs(20));
        rate_limited("events.event.publish", LimitWindow::Hour);
        release("events", "abc");
        let readings = Readings {
            deliveries: Some(DeliveryCounts {
                pending: 1,
                delivered: 2,
                failed: 3,
                dead: 4,
            }),
            latest_seq: Some(9),
            oldest_due_ms: Some(1_042),
            oldest_head_ms: Some(0),
            realtime_connections: Some(0),
        };
        let text = metrics.render(&readings);
        for line in [
            r#"events_delivery_attempts_total{outcome="dead"} 1"#,
            r#"events_delivery_latency_seconds_bucket{priority="important",le="10"} 0"#,
            r#"events_delivery_latency_seconds_bucket{priority="important",le="30"} 1"#,
            r#"events_delivery_latency_seconds_bucket{priority="important",le="21600"} 1"#,
            r#"events_rate_limited_total{limit="events.event.publish",window="hour"} 1"#,
            r#"release_info{service="events",release="abc"} 1"#,
            r#"events_deliveries{status="failed"} 3"#,
            "events_dlq_depth 4",
            "events_latest_seq 9",
            "events_oldest_due_seconds 1.042",
            "events_oldest_head_seconds 0.000",
            "events_realtime_connections 0",
            "# TYPE events_latest_seq gauge",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
        // The recorder is the process's: other tests count requests too.
        for series in [
            r#"http_requests_total{method="OTHER",route="unmatched",status_class="aborted"}"#,
            r#"http_request_duration_seconds_count{method="OTHER",route="unmatched"}"#,
            PROCESS_MEMORY,
            PROCESS_CPU,
            PROCESS_UPTIME,
            PROCESS_START,
        ] {
            assert!(
                text.lines().any(|line| line.starts_with(&format!("{series} "))),
                "{series} is missing in\n{text}"
            );
        }
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let (_, value) = line.rsplit_once(' ').expect("a name and a value");
            value.parse::<f64>().expect("a number");
        }
    }

    #[test]
    fn a_figure_that_could_not_be_read_is_left_out() {
        let text = Metrics::install().render(&Readings::default());
        for name in [
            DELIVERIES,
            DLQ_DEPTH,
            LATEST_SEQ,
            OLDEST_DUE,
            OLDEST_HEAD,
            REALTIME_CONNECTIONS,
        ] {
            assert!(!text.contains(name), "{name}");
        }
    }

    #[test]
    fn a_filter_that_does_not_parse_is_named() {
        let error = log_to_stderr("info,=[", LogFormat::Human).unwrap_err();
        assert!(error.contains("info,=["), "{error}");
    }
}
