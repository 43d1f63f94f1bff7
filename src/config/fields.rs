//! The typed configuration, one part per room, each field with its variable and default; nothing is decided here.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::domain::endpoint::HostRules;
use crate::domain::sources::SourceMap;
use crate::domain::time::Millis;
use crate::telemetry::LogFormat;
use crate::tls::Authorities;

use super::values::{Environment, Secret, SecretKey};

/// The whole configuration; each room takes its own part.
#[derive(Debug, Clone)]
pub struct Config {
    /// Whether this is production. `EVENTS_ENV`, else `NODE_ENV`; default development.
    pub environment: Environment,
    /// What is logged. `EVENTS_LOG`; default `info,sqlx=warn,async_nats=off`.
    pub log_filter: String,
    /// How it is logged. `EVENTS_LOG_FORMAT`; default human.
    pub log_format: LogFormat,
    /// Certificate authorities for outbound TLS besides the system's, read from a PEM file. `SSL_CERT_FILE`; default none.
    pub authorities: Authorities,
    /// Listening and public addresses.
    pub http: Http,
    /// PostgreSQL; `None` only outside production.
    pub database: Option<Database>,
    /// Who signs tokens.
    pub identity: Identity,
    /// What may be published.
    pub publish: Publish,
    /// Subscriptions, attempts and retries.
    pub delivery: Delivery,
    /// How many requests a caller may send.
    pub limits: Limits,
    /// How long events are kept.
    pub retention: Retention,
    /// Where old events are exported to.
    pub archive: Archive,
    /// Developer apps and their quotas.
    pub apps: Apps,
    /// Live streams.
    pub realtime: Realtime,
    /// Brokers that carry wake-ups.
    pub carriers: Carriers,
    /// Counting of what apps use.
    pub usage: Usage,
    /// Readings for the billing service.
    pub billing: Billing,
    /// What the release manifest says.
    pub release: Release,
}

/// Listening and public addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Http {
    /// Where to listen. `HOST`, `PORT`; default 127.0.0.1:4300. Port 0 takes a free one.
    pub listen: SocketAddr,
    /// Origin of the API in texts, no trailing slash. `BASE_URL`; default `https://openvibe.events` in production, else
    /// `http://localhost:<port>`.
    pub base_url: String,
    /// Origin of the home page, no trailing slash. `EVENTS_SITE_URL`; default `https://openvibe.events` in production,
    /// else the base URL.
    pub site_url: String,
}

/// PostgreSQL, twice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Database {
    /// For serving; a transaction pooler may stand between. `DATABASE_URL`.
    pub url: Secret,
    /// For what needs a session. `DATABASE_DIRECT_URL`; default the same as `url`.
    pub direct_url: Secret,
}

/// Who signs tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Public address of the issuer, no trailing slash. `OV_NETWORK_URL`; default `https://openvibe.network`.
    pub network_url: String,
    /// Where keys and tokens are fetched, no trailing slash. `OV_NETWORK_INTERNAL_URL`; default `http://127.0.0.1:4000`.
    pub network_internal_url: String,
    /// The `iss` claim expected, compared exactly. `OV_NETWORK_ISSUER`; default `OV_NETWORK_URL`.
    pub issuer: String,
    /// One pinned public key in PEM instead of fetched ones. `OV_NETWORK_PUBLIC_KEY`; default none.
    pub public_key_pem: Option<String>,
    /// Audiences of which a person's token must name one. `None`: one that names any must name us or the network.
    /// `EVENTS_USER_AUDIENCES`.
    pub user_audiences: Option<Vec<String>>,
}

/// What may be published.
#[derive(Debug, Clone)]
pub struct Publish {
    /// Largest payload in bytes. `EVENTS_MAX_PAYLOAD_BYTES`; default 65536.
    pub max_payload_bytes: usize,
    /// Longest chain under one trace. `EVENTS_MAX_HOPS`; default 8.
    pub max_hops: u32,
    /// Which source owns which prefixes, and which are shared. `EVENTS_SOURCE_PREFIXES`, default the built-in map;
    /// `EVENTS_SHARED_PREFIXES`, default `provider.`.
    pub sources: SourceMap,
}

/// Subscriptions, attempts and retries.
#[derive(Debug, Clone)]
pub struct Delivery {
    /// Whether this process delivers. `EVENTS_WORKER`; default on.
    pub worker: bool,
    /// Longest wait between two looks for due work. `EVENTS_WORKER_INTERVAL_MS`; default 500 ms.
    pub poll_interval: Duration,
    /// Attempts under way at once in this process. `EVENTS_MAX_INFLIGHT`; default 256.
    pub max_inflight: u16,
    /// The same for one subscription that does not say. `EVENTS_DEFAULT_MAX_INFLIGHT`; default 1.
    pub default_max_inflight: u16,
    /// Time one whole attempt may take. `EVENTS_DELIVERY_TIMEOUT_MS`; default 10 s.
    pub timeout: Duration,
    /// Attempts before a delivery is dead. `EVENTS_MAX_ATTEMPTS`; default 8.
    pub max_attempts: u32,
    /// Waits after failed attempts, never empty; the last one repeats. `EVENTS_BACKOFF_MS`; default 1 s, 5 s, 30 s,
    /// 2 min, 10 min, 1 h.
    pub backoff: Vec<Duration>,
    /// How much later a retry may run, as a share of its wait, 0 to 0.1. `EVENTS_BACKOFF_JITTER`; default 0.1.
    pub backoff_jitter: f64,
    /// Dead deliveries above which readiness is degraded. `EVENTS_DLQ_DEGRADED_AT`; default 100.
    pub dlq_degraded_at: u64,
    /// Subscriptions one consumer may have. `EVENTS_MAX_SUBSCRIPTIONS`; default 100.
    pub max_subscriptions: u32,
    /// Hosts services may be delivered to. `EVENTS_ENDPOINT_HOSTS`; default `127.0.0.1,*.openvibe.*`.
    pub endpoint_hosts: HostRules,
    /// Name servers for the hosts of apps' endpoints; none means the system's. `EVENTS_DNS_SERVERS`.
    pub dns_servers: Vec<SocketAddr>,
    /// Keys that seal webhook secrets, newest first; none stores them as they are given. `EVENTS_SECRET_KEY`.
    pub secret_keys: Vec<SecretKey>,
}

/// How many requests a caller may send where its route does not say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Whether callers are limited at all. `EVENTS_LIMITS`; default on.
    pub enabled: bool,
    /// Requests a minute. `EVENTS_LIMITS_MINUTE`; default 120.
    pub per_minute: u32,
    /// Requests an hour. `EVENTS_LIMITS_HOUR`; default 3000.
    pub per_hour: u32,
}

/// How long events are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Retention {
    /// Age at which an event leaves the hot tier. `EVENTS_RETENTION_DAYS`; default 30 days.
    pub hot: Duration,
    /// Age at which it leaves the replay tier; `None` means no such tier. `EVENTS_REPLAY_RETENTION_DAYS`; default 365 days.
    pub replay: Option<Duration>,
    /// Age at which a receipt is forgotten, already raised to the longest tier. `EVENTS_RECEIPT_RETENTION_DAYS`; default
    /// 90 days.
    pub receipts: Duration,
    /// Wait between two prunes. `EVENTS_PRUNE_INTERVAL_MS`; default 1 h.
    pub prune_interval: Duration,
}

/// Where old events are exported to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Archive {
    /// The directory, when there is no bucket. `EVENTS_ARCHIVE_DIR`; default `data/archive`.
    pub dir: PathBuf,
    /// Where files lie on the way to a bucket and from it: the system's directory for such.
    pub scratch: PathBuf,
    /// The bucket. Present when `EVENTS_ARCHIVE_S3_BUCKET` is set.
    pub s3: Option<ArchiveS3>,
}

/// An S3-compatible bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArchiveS3 {
    /// Its name. `EVENTS_ARCHIVE_S3_BUCKET`.
    pub bucket: String,
    /// Address of the store; `None` means the region's own. `EVENTS_ARCHIVE_S3_ENDPOINT`.
    pub endpoint: Option<String>,
    /// `EVENTS_ARCHIVE_S3_REGION`; default `us-east-1`.
    pub region: String,
    /// `EVENTS_ARCHIVE_S3_ACCESS_KEY_ID` and `EVENTS_ARCHIVE_S3_SECRET_ACCESS_KEY`; default none.
    pub credentials: Option<Credentials>,
    /// Prefix of the objects. `EVENTS_ARCHIVE_S3_PREFIX`; default `events/`.
    pub prefix: String,
}

/// An access key with its secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The public half.
    pub access_key: String,
    /// The secret half.
    pub secret_key: Secret,
}

/// Developer apps and their quotas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Apps {
    /// Whether apps are served. `EVENTS_APPS`; default on.
    pub enabled: bool,
    /// Attempts to apps under way at once, within 1 and the process's own. `EVENTS_APP_MAX_INFLIGHT`; default half of it.
    pub max_inflight: u16,
    /// Quotas of a production project.
    pub production: AppQuotas,
    /// Quotas of a sandbox project.
    pub sandbox: AppQuotas,
    /// Age at which a sandbox event is removed. `EVENTS_APP_SANDBOX_RETENTION_DAYS`; default 7 days.
    pub sandbox_retention: Duration,
}

/// Quotas of one project in one environment; `None` means no quota, written 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AppQuotas {
    /// Events a minute. `EVENTS_APP_PUBLISH_PER_MINUTE`, default 120; `EVENTS_APP_SANDBOX_…`, default 30.
    pub publish_per_minute: Option<u64>,
    /// Bytes kept. `EVENTS_APP_RETAINED_BYTES`, default 52428800; `EVENTS_APP_SANDBOX_…`, default 5242880.
    pub retained_bytes: Option<u64>,
    /// Subscriptions. `EVENTS_APP_MAX_SUBSCRIPTIONS`, default 20; `EVENTS_APP_SANDBOX_…`, default 5.
    pub subscriptions: Option<u64>,
}

/// Live streams.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Realtime {
    /// Open streams in this process; 0 refuses all. `REALTIME_MAX_CONNECTIONS`; default 2000.
    pub max_connections: usize,
    /// Topics one stream may name. `REALTIME_MAX_TOPICS`; default 20.
    pub max_topics: usize,
    /// Wait between two heartbeats. `REALTIME_HEARTBEAT_MS`; default 25 s.
    pub heartbeat: Duration,
    /// Events a resuming stream gets at most. `REALTIME_REPLAY_MAX`; default 1000.
    pub replay_max: u32,
    /// How far back browsers get public events again. `REALTIME_PUBLIC_REPLAY_SECONDS`; default 300 s.
    pub public_replay: Duration,
    /// Whether streams without a token are served. `REALTIME_ALLOW_ANONYMOUS`; default true.
    pub allow_anonymous: bool,
    /// Hosts whose pages may open streams with credentials. `REALTIME_ORIGIN_HOSTS`; default `*.openvibe.*`.
    pub origin_hosts: HostRules,
    /// Further origins, exact. `REALTIME_CORS_ORIGINS`; default none.
    pub cors_origins: Vec<String>,
}

/// Brokers that carry wake-ups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Carriers {
    /// Carriers this process may use. `EVENTS_CARRIERS`; default every carrier there is.
    pub enabled: BTreeSet<String>,
    /// Carriers that are never chosen. `EVENTS_CARRIERS_DISABLED`; default none.
    pub disabled: BTreeSet<String>,
    /// File of rate cards instead of our own. `EVENTS_RATE_CARDS`; default none.
    pub rate_cards: Option<PathBuf>,
    /// What carriers are opened with: each variable that one of them declares, where it holds something. Any of them may
    /// hold a password.
    pub variables: BTreeMap<&'static str, Secret>,
}

impl Config {
    /// What a carrier reads from its surroundings, by the name of the variable: carriers are opened with what was read
    /// and judged here.
    pub fn carrier_variable(&self, name: &str) -> Option<String> {
        let value = self.carriers.variables.get(name)?;
        Some(value.expose().to_owned())
    }
}

/// Counting of what apps use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Usage {
    /// `EVENTS_USAGE`; default on.
    pub enabled: bool,
    /// Wait between two reports. `EVENTS_USAGE_FLUSH_MS`; default 300 s.
    pub flush_interval: Duration,
}

/// Readings for the billing service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Billing {
    /// Wait between two runs; `None` means that none happen. `EVENTS_BILLING_INTERVAL_MS`; default 0, none.
    pub interval: Option<Duration>,
    /// Address of the billing service, no trailing slash. `OV_BILLING_INTERNAL_URL`; default none.
    pub url: Option<String>,
    /// Audience of the tokens it is called with. `OV_BILLING_AUDIENCE`; default `openvibe.billing`.
    pub audience: String,
    /// Time one call may take. `OV_BILLING_TIMEOUT_MS`; default 10 s.
    pub timeout: Duration,
    /// `OV_OAUTH_CLIENT_ID`; default `events`.
    pub client_id: String,
    /// `OV_OAUTH_CLIENT_SECRET`; default none.
    pub client_secret: Option<Secret>,
}

/// What the release manifest says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Release {
    /// The commit to name; `None` means the one the binary was built from. `RELEASE_COMMIT`.
    pub commit: Option<String>,
    /// When it was released; `None` means when that commit was made. `RELEASE_AT`.
    pub released_at: Option<Millis>,
    /// Oldest client release still served. `MIN_CLIENT_RELEASE`; default none.
    pub min_client: Option<String>,
}
