//! Every environment variable of the service: read once, typed, all mistakes reported together.
//!
//! This is the only module that touches the process environment. It reads two files, those of `SSL_CERT_FILE` and
//! `EVENTS_RATE_CARDS`, and opens no connection.

mod fields;
mod page;
mod reader;
mod report;
mod values;
pub mod variables;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

pub use fields::{
    AppQuotas, Apps, Archive, ArchiveS3, Billing, Carriers, Config, Credentials, Database, Delivery, Http, Identity,
    Limits, Publish, Realtime, Release, Retention, Usage,
};
pub use page::configuration_page;
pub use reader::{ConfigErrors, Mistake, Origin, Setting};
pub use report::{Report, env_example};
pub use values::{Environment, Secret, SecretKey};

use carriers::Takes;

use crate::cards;
use crate::clock;
use crate::domain::endpoint::HostRules;
use crate::domain::sources::{self, SourceMap};
use reader::Reader;
use values::{Refusal, must};
use variables::Table;

/// The largest payload that can be allowed, in bytes: a request body holds no more.
const PAYLOAD_BYTES_MAX: u64 = 2 * 1024 * 1024;

const MINUTE_MS: u64 = 60_000;
const HOUR_MS: u64 = 60 * MINUTE_MS;
const DAY_MS: u64 = 24 * HOUR_MS;

impl Config {
    /// Reads the configuration through `get`, which answers what a variable holds. Empty counts as unset.
    ///
    /// # Errors
    ///
    /// All mistakes together.
    pub fn read(get: &dyn Fn(&str) -> Option<String>) -> Result<Self, ConfigErrors> {
        Self::read_with(variables::table(), get)
    }

    /// The same by another table.
    fn read_with(table: Table, get: &dyn Fn(&str) -> Option<String>) -> Result<Self, ConfigErrors> {
        let (config, _, mistakes) = Self::read_all(table, get);
        if mistakes.is_empty() {
            Ok(config)
        } else {
            Err(ConfigErrors(mistakes))
        }
    }

    /// Reads the configuration from the environment of this process.
    ///
    /// # Errors
    ///
    /// All mistakes together.
    pub fn from_env() -> Result<Self, ConfigErrors> {
        Self::read(&process_variable)
    }

    /// The configuration is of use only when there are no mistakes.
    fn read_all(table: Table, get: &dyn Fn(&str) -> Option<String>) -> (Self, Vec<Setting>, Vec<Mistake>) {
        let mut env = Reader::new(table, get);
        let listen = listen(&mut env);
        let environment = environment(&mut env);
        let (base_url, site_url) = public_urls(&mut env, environment, listen.port());
        let log_filter = env.value("EVENTS_LOG", values::log_filter);
        let log_format = env.value("EVENTS_LOG_FORMAT", values::log_format);
        let authorities = env.optional("SSL_CERT_FILE", values::authorities).unwrap_or_default();
        let database = database(&mut env, environment);
        let identity = identity(&mut env);
        let publish = publish(&mut env);
        let delivery = delivery(&mut env);
        let limits = Limits {
            enabled: env.value("EVENTS_LIMITS", values::switch),
            per_minute: env.number("EVENTS_LIMITS_MINUTE", 1, u32::MAX.into()),
            per_hour: env.number("EVENTS_LIMITS_HOUR", 1, u32::MAX.into()),
        };
        let config = Self {
            environment,
            log_filter,
            log_format,
            authorities,
            http: Http {
                listen,
                base_url,
                site_url,
            },
            database,
            identity,
            publish,
            limits,
            retention: retention(&mut env),
            archive: archive(&mut env),
            apps: apps(&mut env, delivery.max_inflight),
            delivery,
            realtime: realtime(&mut env),
            carriers: carriers(&mut env),
            usage: Usage {
                enabled: env.value("EVENTS_USAGE", values::switch),
                flush_interval: env.millis("EVENTS_USAGE_FLUSH_MS", 1000, DAY_MS),
            },
            billing: billing(&mut env),
            release: Release {
                commit: env.optional("RELEASE_COMMIT", values::commit),
                released_at: env.optional("RELEASE_AT", values::moment),
                min_client: env.optional("MIN_CLIENT_RELEASE", values::commit),
            },
        };
        let (settings, mistakes) = env.finish();
        (config, settings, mistakes)
    }
}

/// What a variable of this process holds.
#[expect(
    clippy::disallowed_methods,
    reason = "the one place that may look at the process environment"
)]
pub fn process_variable(name: &str) -> Option<String> {
    // What is not Unicode is passed on damaged, so that it is refused by name instead of counting as unset.
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// The names of all variables of this process.
#[expect(
    clippy::disallowed_methods,
    reason = "the one place that may look at the process environment"
)]
pub fn process_variable_names() -> Vec<String> {
    std::env::vars_os()
        .map(|(name, _)| name.to_string_lossy().into_owned())
        .collect()
}

fn listen(env: &mut Reader) -> SocketAddr {
    let port = env.number("PORT", 0, u16::MAX.into());
    let host = env.value("HOST", |text| match text {
        "localhost" => Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        _ => text
            .parse()
            .map_err(|_| must("be an IP address to listen on, or localhost")),
    });
    SocketAddr::new(host, port)
}

fn environment(env: &mut Reader) -> Environment {
    let node = env.value("NODE_ENV", values::text);
    let own = env.optional("EVENTS_ENV", |text| {
        values::one_of(text, &["production", "development", "test"])
    });
    env.computed("EVENTS_ENV", &node);
    match own.unwrap_or(node).as_str() {
        "production" => Environment::Production,
        _ => Environment::Development,
    }
}

fn public_urls(env: &mut Reader, environment: Environment, port: u16) -> (String, String) {
    let (base, site) = (
        env.optional("BASE_URL", values::http_base),
        env.optional("EVENTS_SITE_URL", values::http_base),
    );
    let public = "https://openvibe.events".to_owned();
    let (base, site) = match environment {
        Environment::Production => (base.unwrap_or_else(|| public.clone()), site.unwrap_or(public)),
        Environment::Development => {
            let base = base.unwrap_or_else(|| format!("http://localhost:{port}"));
            (base.clone(), site.unwrap_or(base))
        }
    };
    env.computed("BASE_URL", &base);
    env.computed("EVENTS_SITE_URL", &site);
    (base, site)
}

fn database(env: &mut Reader, environment: Environment) -> Option<Database> {
    let url = env.optional("DATABASE_URL", values::database_url);
    let direct = env.optional("DATABASE_DIRECT_URL", values::database_url);
    let Some(url) = url else {
        if env.is_set("DATABASE_URL") {
            return None; // Set and wrong, which has been said.
        }
        if environment == Environment::Production {
            env.mistake("DATABASE_URL", "must be set in production");
        } else if env.is_set("DATABASE_DIRECT_URL") {
            env.mistake("DATABASE_URL", "must be set where DATABASE_DIRECT_URL is");
        }
        return None;
    };
    env.computed("DATABASE_DIRECT_URL", "(set)");
    Some(Database {
        direct_url: direct.unwrap_or_else(|| url.clone()),
        url,
    })
}

fn identity(env: &mut Reader) -> Identity {
    let network_url = env.value("OV_NETWORK_URL", values::http_base);
    let network_internal_url = env.value("OV_NETWORK_INTERNAL_URL", values::http_base);
    let issuer = env
        .optional("OV_NETWORK_ISSUER", values::text)
        .unwrap_or_else(|| network_url.clone());
    env.computed("OV_NETWORK_ISSUER", &issuer);
    Identity {
        network_url,
        network_internal_url,
        issuer,
        public_key_pem: env.optional("OV_NETWORK_PUBLIC_KEY", values::public_key),
        user_audiences: env.optional("EVENTS_USER_AUDIENCES", values::list),
    }
}

fn publish(env: &mut Reader) -> Publish {
    Publish {
        max_payload_bytes: env.number("EVENTS_MAX_PAYLOAD_BYTES", 1, PAYLOAD_BYTES_MAX),
        max_hops: env.number("EVENTS_MAX_HOPS", 1, 1000),
        sources: sources(env),
    }
}

fn sources(env: &mut Reader) -> SourceMap {
    let owned = env.judged("EVENTS_SOURCE_PREFIXES", |text| {
        text.map_or_else(|| Ok(SourceMap::default()), SourceMap::from_json)
    });
    // Next to a map that is wrong, a shared prefix is judged by its form alone.
    let beside = owned
        .clone()
        .or_else(|| SourceMap::from_json("{}").ok())
        .unwrap_or_default();
    let shared = env.judged("EVENTS_SHARED_PREFIXES", |text| {
        sources::parse_shared(text.unwrap_or_default(), &beside)
    });
    owned.unwrap_or_default().with_shared(shared.unwrap_or_default())
}

fn host_rules(env: &mut Reader, name: &'static str) -> HostRules {
    let rules = |text: Option<&str>| {
        let entries =
            values::list(text.unwrap_or_default()).map_err(|refusal| vec![format!("it must {}", refusal.allowed)])?;
        HostRules::parse(&entries).map_err(|fault| vec![fault])
    };
    let nowhere = || HostRules::parse(&[]).expect("no entry, no mistake");
    env.judged(name, rules).unwrap_or_else(nowhere)
}

fn delivery(env: &mut Reader) -> Delivery {
    let delay = |text: &str| values::whole(text, 0, DAY_MS).map(Duration::from_millis);
    Delivery {
        worker: env.value("EVENTS_WORKER", values::switch),
        poll_interval: env.millis("EVENTS_WORKER_INTERVAL_MS", 10, HOUR_MS),
        max_inflight: env.number("EVENTS_MAX_INFLIGHT", 1, 10_000),
        default_max_inflight: env.number("EVENTS_DEFAULT_MAX_INFLIGHT", 1, 64),
        timeout: env.millis("EVENTS_DELIVERY_TIMEOUT_MS", 10, 5 * MINUTE_MS),
        max_attempts: env.number("EVENTS_MAX_ATTEMPTS", 1, 100),
        backoff: env.value("EVENTS_BACKOFF_MS", |text| {
            let delays = values::list_of(text, delay)?;
            if delays.len() > 20 {
                Err(must("list 1 to 20 waits"))
            } else {
                Ok(delays)
            }
        }),
        backoff_jitter: env.value("EVENTS_BACKOFF_JITTER", values::jitter),
        dlq_degraded_at: env.number("EVENTS_DLQ_DEGRADED_AT", 0, i64::MAX.unsigned_abs()),
        max_subscriptions: env.number("EVENTS_MAX_SUBSCRIPTIONS", 1, 1_000_000),
        endpoint_hosts: host_rules(env, "EVENTS_ENDPOINT_HOSTS"),
        dns_servers: env
            .optional("EVENTS_DNS_SERVERS", values::name_servers)
            .unwrap_or_default(),
        secret_keys: env
            .optional("EVENTS_SECRET_KEY", values::secret_keys)
            .unwrap_or_default(),
    }
}

fn retention(env: &mut Reader) -> Retention {
    let hot = env.days("EVENTS_RETENTION_DAYS", 1, 3650);
    let replay = env.days("EVENTS_REPLAY_RETENTION_DAYS", 0, 36_500);
    let receipts = env.days("EVENTS_RECEIPT_RETENTION_DAYS", 0, 36_500);
    // A receipt that ends before its event would let a repeat of that event be stored as new.
    let longest = receipts.max(hot).max(replay);
    if longest > receipts {
        let days = longest.as_secs() / 86_400;
        env.note(
            "EVENTS_RECEIPT_RETENTION_DAYS",
            format!("{days} in force: as long as the longest tier keeps events"),
        );
    }
    Retention {
        hot,
        replay: (!replay.is_zero()).then_some(replay),
        receipts: longest,
        prune_interval: env.millis("EVENTS_PRUNE_INTERVAL_MS", 10, DAY_MS),
    }
}

fn archive(env: &mut Reader) -> Archive {
    let dir = env.value("EVENTS_ARCHIVE_DIR", values::text).into();
    let bucket = env.optional("EVENTS_ARCHIVE_S3_BUCKET", values::text);
    let endpoint = env.optional("EVENTS_ARCHIVE_S3_ENDPOINT", values::http_base);
    let region = env.value("EVENTS_ARCHIVE_S3_REGION", values::text);
    let credentials = credentials(
        env,
        "EVENTS_ARCHIVE_S3_ACCESS_KEY_ID",
        "EVENTS_ARCHIVE_S3_SECRET_ACCESS_KEY",
    );
    let prefix = env.value("EVENTS_ARCHIVE_S3_PREFIX", values::text);
    Archive {
        dir,
        scratch: std::env::temp_dir(),
        s3: bucket.map(|bucket| ArchiveS3 {
            bucket,
            endpoint,
            region,
            credentials,
            prefix,
        }),
    }
}

fn credentials(env: &mut Reader, access: &'static str, secret: &'static str) -> Option<Credentials> {
    match (
        env.optional(access, values::text),
        env.optional(secret, |text| Ok(Secret::new(text))),
    ) {
        (Some(access_key), Some(secret_key)) => Some(Credentials { access_key, secret_key }),
        (Some(_), None) => {
            env.mistake(secret, format_args!("must be set where {access} is"));
            None
        }
        (None, Some(_)) => {
            env.mistake(access, format_args!("must be set where {secret} is"));
            None
        }
        (None, None) => None,
    }
}

fn apps(env: &mut Reader, process_max: u16) -> Apps {
    let enabled = env.value("EVENTS_APPS", values::switch);
    let given = env.optional("EVENTS_APP_MAX_INFLIGHT", |text| {
        values::whole(text, 0, u16::MAX.into())
    });
    let max_inflight = given
        .map_or(process_max / 2, |given| u16::try_from(given).unwrap_or(u16::MAX))
        .clamp(1, process_max);
    env.computed("EVENTS_APP_MAX_INFLIGHT", &max_inflight.to_string());
    if given.is_some_and(|given| given != u64::from(max_inflight)) {
        env.note(
            "EVENTS_APP_MAX_INFLIGHT",
            format!("{max_inflight} in force: between 1 and EVENTS_MAX_INFLIGHT"),
        );
    }
    let mut quota = |name| {
        let quota: u64 = env.number(name, 0, i64::MAX.unsigned_abs());
        (quota > 0).then_some(quota)
    };
    Apps {
        enabled,
        max_inflight,
        production: AppQuotas {
            publish_per_minute: quota("EVENTS_APP_PUBLISH_PER_MINUTE"),
            retained_bytes: quota("EVENTS_APP_RETAINED_BYTES"),
            subscriptions: quota("EVENTS_APP_MAX_SUBSCRIPTIONS"),
        },
        sandbox: AppQuotas {
            publish_per_minute: quota("EVENTS_APP_SANDBOX_PUBLISH_PER_MINUTE"),
            retained_bytes: quota("EVENTS_APP_SANDBOX_RETAINED_BYTES"),
            subscriptions: quota("EVENTS_APP_SANDBOX_MAX_SUBSCRIPTIONS"),
        },
        sandbox_retention: env.days("EVENTS_APP_SANDBOX_RETENTION_DAYS", 1, 3650),
    }
}

fn realtime(env: &mut Reader) -> Realtime {
    Realtime {
        max_connections: env.number("REALTIME_MAX_CONNECTIONS", 0, 1_000_000),
        max_topics: env.number("REALTIME_MAX_TOPICS", 1, 1000),
        heartbeat: env.millis("REALTIME_HEARTBEAT_MS", 10, HOUR_MS),
        replay_max: env.number("REALTIME_REPLAY_MAX", 0, 10_000),
        public_replay: env.seconds("REALTIME_PUBLIC_REPLAY_SECONDS", 0, 365 * 86_400),
        allow_anonymous: env.value("REALTIME_ALLOW_ANONYMOUS", values::truth),
        origin_hosts: host_rules(env, "REALTIME_ORIGIN_HOSTS"),
        cors_origins: env
            .optional("REALTIME_CORS_ORIGINS", |text| values::list_of(text, values::origin))
            .unwrap_or_default(),
    }
}

fn carriers(env: &mut Reader) -> Carriers {
    let known: Vec<&str> = env.table().carriers.iter().map(|carrier| carrier.id).collect();
    let ids = |text: &str| {
        let named = values::list_of(text, |id| values::one_of(id, &known))?;
        Ok(named.into_iter().collect::<BTreeSet<_>>())
    };
    Carriers {
        enabled: env.value("EVENTS_CARRIERS", ids),
        disabled: env.optional("EVENTS_CARRIERS_DISABLED", ids).unwrap_or_default(),
        rate_cards: rate_cards(env),
        variables: carrier_variables(env),
    }
}

/// What carriers are opened with: what they declare, judged here so that every mistake is told at once.
fn carrier_variables(env: &mut Reader) -> BTreeMap<&'static str, Secret> {
    let declared: Vec<&carriers::Variable> = env.table().of_carriers().collect();
    let mut held = BTreeMap::new();
    for variable in &declared {
        let parse = |text: &str| carrier_value(variable, text);
        let value = match variable.default {
            Some(_) => Some(env.value(variable.name, parse)),
            None => env.optional(variable.name, parse),
        };
        held.extend(value.map(|value| (variable.name, value)));
    }
    for variable in declared {
        if let Some(other) = variable.with
            && env.is_set(variable.name)
            && !env.is_set(other)
        {
            env.mistake(other, format_args!("must be set where {} is", variable.name));
        }
    }
    held
}

/// A value as the carrier takes it.
fn carrier_value(variable: &carriers::Variable, text: &str) -> Result<Secret, Refusal> {
    match variable.takes {
        Takes::Text => Ok(Secret::new(text)),
        Takes::Switch => values::switch(text).map(|on| Secret::new(if on { "on" } else { "off" })),
        Takes::Address(schemes) => values::service_url(text, schemes),
        Takes::Checked { fits, .. } if fits(text) => Ok(Secret::new(text)),
        Takes::Checked { allowed, .. } => Err(must(allowed)),
    }
}

/// The cards themselves are read again by whoever decides with them; here they are only judged.
fn rate_cards(env: &mut Reader) -> Option<PathBuf> {
    const NAME: &str = "EVENTS_RATE_CARDS";
    let path = env.optional(NAME, values::text).map(PathBuf::from)?;
    let name = env.shown(NAME);
    for mistake in cards::read(Some((&path, &name)), clock::now())
        .err()
        .unwrap_or_default()
    {
        env.mistake(NAME, format_args!("is wrong: {mistake}"));
    }
    Some(path)
}

fn billing(env: &mut Reader) -> Billing {
    let interval = env.millis("EVENTS_BILLING_INTERVAL_MS", 0, DAY_MS);
    Billing {
        interval: (!interval.is_zero()).then_some(interval),
        url: env.optional("OV_BILLING_INTERNAL_URL", values::http_base),
        audience: env.value("OV_BILLING_AUDIENCE", values::text),
        timeout: env.millis("OV_BILLING_TIMEOUT_MS", 1000, 5 * MINUTE_MS),
        client_id: env.value("OV_OAUTH_CLIENT_ID", values::text),
        client_secret: env.optional("OV_OAUTH_CLIENT_SECRET", |text| Ok(Secret::new(text))),
    }
}
