//! One test per promise of the configuration.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use carriers::{Descriptor, REGISTRY};

use super::variables::{Fallback, all};
use super::*;

const PASSWORD: &str = "hunter-2-secret";

fn value_of(env: &[(&str, &str)], name: &str) -> Option<String> {
    let found = env.iter().find(|(known, _)| *known == name);
    found.map(|(_, value)| (*value).to_owned())
}

fn read(env: &[(&str, &str)]) -> Result<Config, ConfigErrors> {
    Config::read(&|name| value_of(env, name))
}

fn good(env: &[(&str, &str)]) -> Config {
    read(env).unwrap_or_else(|errors| panic!("{env:?}: {errors}"))
}

/// The one message of an environment with one mistake.
fn refused(env: &[(&str, &str)]) -> String {
    let errors = read(env).expect_err(&format!("{env:?} is a mistake"));
    assert_eq!(errors.0.len(), 1, "{errors}");
    errors.0[0].message.clone()
}

#[test]
fn what_is_read_is_what_the_table_lists() {
    let asked = RefCell::new(BTreeSet::new());
    let get = |name: &str| {
        asked.borrow_mut().insert(name.to_owned());
        None
    };
    Config::read(&get).expect("nothing set is a valid environment");
    let listed: BTreeSet<String> = all().map(|variable| variable.name.to_owned()).collect();
    assert_eq!(asked.into_inner(), listed);
    assert_eq!(listed.len(), all().count(), "a name stands in the table once");
}

#[test]
fn the_example_file_is_made_from_the_table() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/");
    let committed = std::fs::read_to_string(format!("{root}.env.example")).unwrap_or_default();
    if committed != env_example() {
        std::fs::write(format!("{root}target/env.example"), env_example()).expect("the target folder can be written");
        panic!(".env.example differs from the table of variables: cp target/env.example .env.example");
    }
}

/// The documented defaults, written out once more by hand: a slip in the table must not pass.
#[test]
fn defaults_are_the_documented_ones() {
    let documented = [
        ("PORT", "4300"),
        ("HOST", "127.0.0.1"),
        ("NODE_ENV", "development"),
        ("OV_NETWORK_URL", "https://openvibe.network"),
        ("OV_NETWORK_INTERNAL_URL", "http://127.0.0.1:4000"),
        ("VALKEY_PREFIX", "ov:events:"),
        ("NATS_SUBJECT_PREFIX", "ov.events."),
        ("NATS_JETSTREAM", "on"),
        ("NATS_STREAM", "OV_EVENTS_STREAM"),
        ("CLOUD_QUEUE_REGION", "us-east-1"),
        ("CLOUD_QUEUE_CONSUME", "off"),
        ("EVENTS_CARRIERS", "pg-v1,valkey-v1,nats-v1,nats-js-v1,cloud-v1"),
        ("EVENTS_RETENTION_DAYS", "30"),
        ("EVENTS_REPLAY_RETENTION_DAYS", "365"),
        ("EVENTS_RECEIPT_RETENTION_DAYS", "90"),
        ("EVENTS_PRUNE_INTERVAL_MS", "3600000"),
        ("EVENTS_ARCHIVE_DIR", "data/archive"),
        ("EVENTS_ARCHIVE_S3_REGION", "us-east-1"),
        ("EVENTS_ARCHIVE_S3_PREFIX", "events/"),
        ("EVENTS_MAX_PAYLOAD_BYTES", "65536"),
        ("EVENTS_MAX_HOPS", "8"),
        ("EVENTS_SHARED_PREFIXES", "provider."),
        ("EVENTS_WORKER", "on"),
        ("EVENTS_WORKER_INTERVAL_MS", "500"),
        ("EVENTS_MAX_INFLIGHT", "256"),
        ("EVENTS_DEFAULT_MAX_INFLIGHT", "1"),
        ("EVENTS_DELIVERY_TIMEOUT_MS", "10000"),
        ("EVENTS_MAX_ATTEMPTS", "8"),
        ("EVENTS_BACKOFF_MS", "1000,5000,30000,120000,600000,3600000"),
        ("EVENTS_BACKOFF_JITTER", "0.1"),
        ("EVENTS_DLQ_DEGRADED_AT", "100"),
        ("EVENTS_MAX_SUBSCRIPTIONS", "100"),
        ("EVENTS_ENDPOINT_HOSTS", "127.0.0.1,*.openvibe.*"),
        ("EVENTS_APPS", "on"),
        ("EVENTS_APP_PUBLISH_PER_MINUTE", "120"),
        ("EVENTS_APP_SANDBOX_PUBLISH_PER_MINUTE", "30"),
        ("EVENTS_APP_RETAINED_BYTES", "52428800"),
        ("EVENTS_APP_SANDBOX_RETAINED_BYTES", "5242880"),
        ("EVENTS_APP_MAX_SUBSCRIPTIONS", "20"),
        ("EVENTS_APP_SANDBOX_MAX_SUBSCRIPTIONS", "5"),
        ("EVENTS_APP_SANDBOX_RETENTION_DAYS", "7"),
        ("EVENTS_LOG", "info,sqlx=warn,async_nats=off"),
        ("EVENTS_LOG_FORMAT", "human"),
        ("EVENTS_LIMITS", "on"),
        ("EVENTS_LIMITS_MINUTE", "120"),
        ("EVENTS_LIMITS_HOUR", "3000"),
        ("EVENTS_USAGE", "on"),
        ("EVENTS_USAGE_FLUSH_MS", "300000"),
        ("EVENTS_BILLING_INTERVAL_MS", "0"),
        ("OV_BILLING_AUDIENCE", "openvibe.billing"),
        ("OV_BILLING_TIMEOUT_MS", "10000"),
        ("OV_OAUTH_CLIENT_ID", "events"),
        ("REALTIME_MAX_CONNECTIONS", "2000"),
        ("REALTIME_MAX_TOPICS", "20"),
        ("REALTIME_HEARTBEAT_MS", "25000"),
        ("REALTIME_REPLAY_MAX", "1000"),
        ("REALTIME_PUBLIC_REPLAY_SECONDS", "300"),
        ("REALTIME_ALLOW_ANONYMOUS", "true"),
        ("REALTIME_ORIGIN_HOSTS", "*.openvibe.*"),
    ];
    let in_table: BTreeSet<_> = all()
        .filter_map(|variable| match variable.default {
            Fallback::Text(text) => Some((variable.name, text)),
            Fallback::Unset | Fallback::Computed(_) => None,
        })
        .collect();
    assert_eq!(in_table, BTreeSet::from(documented));
    let without: BTreeSet<_> = all()
        .filter(|v| !matches!(v.default, Fallback::Text(_)))
        .map(|v| v.name)
        .collect();
    let documented_without = [
        "EVENTS_ENV",
        "BASE_URL",
        "EVENTS_SITE_URL",
        "SSL_CERT_FILE",
        "OV_NETWORK_ISSUER",
        "OV_NETWORK_PUBLIC_KEY",
        "EVENTS_USER_AUDIENCES",
        "DATABASE_URL",
        "DATABASE_DIRECT_URL",
        "VALKEY_URL",
        "NATS_URL",
        "CLOUD_QUEUE_URL",
        "CLOUD_QUEUE_PREFIX",
        "CLOUD_QUEUE_ACCESS_KEY",
        "CLOUD_QUEUE_SECRET_KEY",
        "EVENTS_CARRIERS_DISABLED",
        "EVENTS_DNS_SERVERS",
        "EVENTS_ARCHIVE_S3_BUCKET",
        "EVENTS_ARCHIVE_S3_ENDPOINT",
        "EVENTS_ARCHIVE_S3_ACCESS_KEY_ID",
        "EVENTS_ARCHIVE_S3_SECRET_ACCESS_KEY",
        "EVENTS_SOURCE_PREFIXES",
        "EVENTS_APP_MAX_INFLIGHT",
        "OV_BILLING_INTERNAL_URL",
        "OV_OAUTH_CLIENT_SECRET",
        "REALTIME_CORS_ORIGINS",
        "RELEASE_COMMIT",
        "RELEASE_AT",
        "MIN_CLIENT_RELEASE",
        "EVENTS_SECRET_KEY",
        "EVENTS_RATE_CARDS",
    ];
    assert_eq!(without, BTreeSet::from(documented_without));
}

#[test]
fn defaults_arrive_typed() {
    let config = good(&[]);
    assert_eq!(config.environment, Environment::Development);
    assert_eq!(config.http.listen.to_string(), "127.0.0.1:4300");
    assert_eq!(config.http.base_url, "http://localhost:4300");
    assert_eq!(config.http.site_url, "http://localhost:4300");
    assert_eq!(config.database, None);
    assert_eq!(config.identity.issuer, "https://openvibe.network");
    assert_eq!(config.identity.user_audiences, None);
    let seconds: Vec<u64> = config.delivery.backoff.iter().map(Duration::as_secs).collect();
    assert_eq!(seconds, [1, 5, 30, 120, 600, 3600]);
    assert_eq!(config.delivery.poll_interval, Duration::from_millis(500));
    assert!(config.delivery.worker && config.delivery.secret_keys.is_empty());
    assert_eq!(config.apps.max_inflight, 128);
    assert_eq!(config.apps.sandbox.retained_bytes, Some(5 << 20));
    assert_eq!(config.retention.hot, Duration::from_secs(30 * 86_400));
    let ids = REGISTRY.iter().map(|carrier| carrier.id.to_owned());
    assert_eq!(config.carriers.enabled, ids.collect());
    let held = |name| config.carrier_variable(name);
    assert_eq!(held("NATS_STREAM").as_deref(), Some("OV_EVENTS_STREAM"));
    assert_eq!((held("VALKEY_URL"), held("CLOUD_QUEUE_PREFIX")), (None, None));
    assert_eq!((config.billing.interval, config.archive.s3), (None, None));
}

#[test]
fn empty_counts_as_unset_and_blanks_around_a_value_do_not_count() {
    let config = good(&[
        ("PORT", ""),
        ("DATABASE_URL", "  "),
        ("EVENTS_MAX_HOPS", " 3 "),
        ("EVENTS_SECRET_KEY", ""),
    ]);
    assert_eq!(config.http.listen.port(), 4300);
    assert_eq!(config.database, None);
    assert_eq!(config.publish.max_hops, 3);
}

#[test]
fn production_needs_a_database_and_has_its_own_origin() {
    let missing = "DATABASE_URL must be set in production";
    assert_eq!(refused(&[("NODE_ENV", "production")]), missing);
    assert_eq!(refused(&[("EVENTS_ENV", "production")]), missing);
    assert_eq!(refused(&[("EVENTS_ENV", "production"), ("NODE_ENV", "test")]), missing);
    assert_eq!(
        good(&[("EVENTS_ENV", "development"), ("NODE_ENV", "production")]).environment,
        Environment::Development
    );

    let database = ("DATABASE_URL", "postgresql://ov@db/ov");
    let config = good(&[("NODE_ENV", "production"), database]);
    assert_eq!(config.environment, Environment::Production);
    assert_eq!(
        (config.http.base_url.as_str(), config.http.site_url.as_str()),
        ("https://openvibe.events", "https://openvibe.events")
    );
    let config = good(&[
        ("NODE_ENV", "production"),
        database,
        ("BASE_URL", "https://events.example.org/"),
    ]);
    assert_eq!(
        config.http.base_url, "https://events.example.org",
        "the trailing slash goes"
    );
}

#[test]
fn the_direct_database_is_the_same_one_unless_named() {
    let database = good(&[("DATABASE_URL", "postgres://a@pooler/ov")])
        .database
        .expect("set");
    assert_eq!(
        (database.url.expose(), database.direct_url.expose()),
        ("postgres://a@pooler/ov", "postgres://a@pooler/ov")
    );
    let both = good(&[
        ("DATABASE_URL", "postgres://a@pooler/ov"),
        ("DATABASE_DIRECT_URL", "postgres://o@db/ov"),
    ]);
    assert_eq!(both.database.expect("set").direct_url.expose(), "postgres://o@db/ov");
    let message = refused(&[("DATABASE_DIRECT_URL", "postgres://o@db/ov")]);
    assert_eq!(message, "DATABASE_URL must be set where DATABASE_DIRECT_URL is");
}

#[test]
fn a_database_behind_a_socket_directory_is_understood() {
    let database = good(&[("DATABASE_URL", "postgresql://postgres@/ov?host=/var/run/postgresql")])
        .database
        .expect("set");
    assert_eq!(
        database.url.expose(),
        "postgresql://postgres@localhost/ov?host=/var/run/postgresql"
    );
}

#[test]
fn each_kind_of_mistake_names_the_variable_what_is_allowed_and_what_was_given() {
    let cases = [
        (
            "EVENTS_RETENTION_DAYS",
            "soon",
            "must be a whole number from 1 to 3650, got \"soon\"",
        ),
        (
            "EVENTS_RETENTION_DAYS",
            "30d",
            "must be a whole number from 1 to 3650, got \"30d\"",
        ),
        (
            "EVENTS_RETENTION_DAYS",
            "0",
            "must be a whole number from 1 to 3650, got \"0\"",
        ),
        (
            "EVENTS_MAX_HOPS",
            "-1",
            "must be a whole number from 1 to 1000, got \"-1\"",
        ),
        (
            "EVENTS_MAX_HOPS",
            "+5",
            "must be a whole number from 1 to 1000, got \"+5\"",
        ),
        ("PORT", "65536", "must be a whole number from 0 to 65535, got \"65536\""),
        (
            "PORT",
            "99999999999999999999999",
            "must be a whole number from 0 to 65535, got \"99999999999999999999999\"",
        ),
        (
            "EVENTS_DEFAULT_MAX_INFLIGHT",
            "65",
            "must be a whole number from 1 to 64, got \"65\"",
        ),
        (
            "EVENTS_USAGE_FLUSH_MS",
            "999",
            "must be a whole number from 1000 to 86400000, got \"999\"",
        ),
        (
            "HOST",
            "example.org",
            "must be an IP address to listen on, or localhost, got \"example.org\"",
        ),
        (
            "EVENTS_ENV",
            "prod",
            "must name nothing but production, development, test, got \"prod\"",
        ),
        ("EVENTS_WORKER", "false", "must be on or off, got \"false\""),
        (
            "SSL_CERT_FILE",
            "/nowhere/ca.pem",
            "must name a PEM file of at least one certificate (it cannot be read: \
             I/O error: No such file or directory (os error 2)), got \"/nowhere/ca.pem\"",
        ),
        (
            "SSL_CERT_FILE",
            concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"),
            concat!(
                "must name a PEM file of at least one certificate (it holds no certificate), got \"",
                env!("CARGO_MANIFEST_DIR"),
                "/Cargo.toml\""
            ),
        ),
        ("REALTIME_ALLOW_ANONYMOUS", "off", "must be true or false, got \"off\""),
        (
            "EVENTS_BACKOFF_MS",
            "1000,soon",
            "must be a whole number from 0 to 86400000, got \"soon\"",
        ),
        (
            "EVENTS_BACKOFF_MS",
            "1000,86400001",
            "must be a whole number from 0 to 86400000, got \"86400001\"",
        ),
        ("EVENTS_BACKOFF_MS", ",", "must name at least one value, got \",\""),
        (
            "EVENTS_BACKOFF_JITTER",
            "0.11",
            "must be a number from 0 to 0.1, got \"0.11\"",
        ),
        (
            "EVENTS_BACKOFF_JITTER",
            "NaN",
            "must be a number from 0 to 0.1, got \"NaN\"",
        ),
        (
            "EVENTS_BACKOFF_JITTER",
            "-0.01",
            "must be a number from 0 to 0.1, got \"-0.01\"",
        ),
        (
            "BASE_URL",
            "events.example.org",
            "must be an http or https URL without credentials, query or fragment, got \"events.example.org\"",
        ),
        (
            "OV_NETWORK_URL",
            "ftp://x",
            "must be an http or https URL without credentials, query or fragment, got \"ftp://x\"",
        ),
        (
            "REALTIME_CORS_ORIGINS",
            "http://localhost:3000,http://localhost:3000/app",
            "must list origins as browsers send them, such as http://localhost:3000, got \"http://localhost:3000/app\"",
        ),
        (
            "NATS_STREAM",
            "a.b",
            "must be 1 to 64 letters, digits, - and _, got \"a.b\"",
        ),
        (
            "NATS_SUBJECT_PREFIX",
            "ov.>.",
            "must be tokens of letters, digits, - and _, each ending in a dot, such as ov.events., got \"ov.>.\"",
        ),
        ("RELEASE_COMMIT", "latest", "must be 7 to 40 hex digits, got \"latest\""),
        (
            "RELEASE_AT",
            "2026-10-21",
            "must be an RFC 3339 date and time with a zone, such as 2026-10-21T08:15:30Z, got \"2026-10-21\"",
        ),
        (
            "EVENTS_CARRIERS",
            "pg-v1,kafka-v1",
            "must name nothing but pg-v1, valkey-v1, nats-v1, nats-js-v1, cloud-v1, got \"kafka-v1\"",
        ),
        (
            "EVENTS_CARRIERS_DISABLED",
            "pigeon",
            "must name nothing but pg-v1, valkey-v1, nats-v1, nats-js-v1, cloud-v1, got \"pigeon\"",
        ),
        (
            "CLOUD_QUEUE_ACCESS_KEY",
            "AKID",
            "must be set where CLOUD_QUEUE_ACCESS_KEY is",
        ),
        (
            "EVENTS_ARCHIVE_S3_ACCESS_KEY_ID",
            "AKID",
            "must be set where EVENTS_ARCHIVE_S3_ACCESS_KEY_ID is",
        ),
    ];
    for (name, value, says) in cases {
        let message = refused(&[(name, value)]);
        assert!(message.ends_with(says), "{name}={value}: {message}");
        assert!(message.contains(name), "{message}");
    }
}

#[test]
fn lists_durations_and_switches_are_typed() {
    let config = good(&[
        ("EVENTS_BACKOFF_MS", "0, 250,,86400000"),
        ("EVENTS_BACKOFF_JITTER", "0"),
        ("EVENTS_WORKER", "off"),
        ("EVENTS_LIMITS", "off"),
        ("EVENTS_CARRIERS", "pg-v1"),
        ("EVENTS_CARRIERS_DISABLED", "nats-v1, pg-v1"),
        ("EVENTS_USER_AUDIENCES", "openvibe.live"),
        ("REALTIME_CORS_ORIGINS", "http://localhost:3000"),
        ("REALTIME_MAX_CONNECTIONS", "0"),
        ("EVENTS_APP_PUBLISH_PER_MINUTE", "0"),
        ("EVENTS_REPLAY_RETENTION_DAYS", "0"),
        ("NATS_URL", "nats://127.0.0.1:9"),
        ("NATS_JETSTREAM", "off"),
        ("HOST", "localhost"),
    ]);
    assert_eq!(config.delivery.backoff, [0, 250, 86_400_000].map(Duration::from_millis));
    assert!(config.delivery.backoff_jitter == 0.0 && !config.delivery.worker && !config.limits.enabled);
    assert_eq!(config.carriers.enabled, BTreeSet::from(["pg-v1".to_owned()]));
    assert_eq!(
        config.carriers.disabled,
        BTreeSet::from(["nats-v1".to_owned(), "pg-v1".to_owned()])
    );
    assert_eq!(config.identity.user_audiences, Some(vec!["openvibe.live".to_owned()]));
    assert_eq!(config.realtime.cors_origins, ["http://localhost:3000"]);
    assert_eq!(config.realtime.max_connections, 0);
    assert_eq!(
        (config.apps.production.publish_per_minute, config.retention.replay),
        (None, None)
    );
    assert_eq!(config.carrier_variable("NATS_JETSTREAM").as_deref(), Some("off"));
    assert!(config.http.listen.ip().is_loopback());
    let twenty_one = ["1"; 21].join(",");
    assert!(refused(&[("EVENTS_BACKOFF_MS", &twenty_one)]).contains("must list 1 to 20 waits"));
}

#[test]
fn a_map_that_would_leak_a_namespace_is_refused() {
    let sources = [
        r#"{"live": ["media."]}"#,
        r#"{"app": ["app."]}"#,
        r#"{"app-x1": ["appx1."]}"#,
        r#"{"Live": ["live."]}"#,
        r#"{"live": []}"#,
        "{nope",
        r#"{"live": ["mediahub."]}"#,
    ];
    for value in sources {
        assert!(
            refused(&[("EVENTS_SOURCE_PREFIXES", value)]).starts_with("EVENTS_SOURCE_PREFIXES is wrong: "),
            "{value}"
        );
    }
    for value in ["provider", "media.", "app."] {
        assert!(
            refused(&[("EVENTS_SHARED_PREFIXES", value)]).starts_with("EVENTS_SHARED_PREFIXES is wrong: "),
            "{value}"
        );
    }
    let errors =
        read(&[("EVENTS_SOURCE_PREFIXES", r#"{"Live": ["live."], "app": ["app."]}"#)]).expect_err("two mistakes");
    assert_eq!(errors.0.len(), 2, "{errors}");
    let message = refused(&[("EVENTS_SOURCE_PREFIXES", "{nope")]);
    assert!(message.contains("is wrong: it is not valid JSON"), "{message}");
    // Only the map decides whether a shared prefix clashes; while the map is wrong, nothing is said about that.
    assert!(
        refused(&[
            ("EVENTS_SOURCE_PREFIXES", "{nope"),
            ("EVENTS_SHARED_PREFIXES", "media.")
        ])
        .contains("SOURCE")
    );
}

#[test]
fn a_map_replaces_the_built_in_one_and_keeps_what_is_shared() {
    let sources = good(&[]).publish.sources;
    assert!(sources.may_publish("live", "live.stream.started").is_ok());
    assert!(sources.may_publish("live", "provider.status.changed").is_ok());
    let own = ("EVENTS_SOURCE_PREFIXES", r#"{"media-hub": ["mediahub."]}"#);
    let sources = good(&[own, ("EVENTS_SHARED_PREFIXES", "storage.")]).publish.sources;
    assert!(sources.may_publish("media-hub", "mediahub.vod.ready").is_ok());
    assert!(sources.may_publish("media-hub", "storage.object.stored").is_ok());
    assert!(sources.may_publish("media-hub", "provider.status.changed").is_err());
    assert!(sources.may_publish("live", "live.stream.started").is_err());
}

#[test]
fn a_misspelt_level_is_no_filter() {
    for filter in ["info", "WARN", "off", "info,sqlx=warn", "openvibe_events=debug"] {
        assert_eq!(good(&[("EVENTS_LOG", filter)]).log_filter, filter);
    }
    for filter in ["inof", "inof,sqlx", "sqlx=warm"] {
        assert!(
            refused(&[("EVENTS_LOG", filter)]).contains("error, warn, info, debug, trace"),
            "{filter}"
        );
    }
}

#[test]
fn endpoint_hosts_are_rules_and_a_wrong_one_is_named() {
    let default = good(&[]).delivery.endpoint_hosts;
    assert!(default.check("http://127.0.0.1:9000/hook").is_ok());
    assert!(default.check("https://live.openvibe.network/hook").is_ok());
    assert!(default.check("https://hooks.example.test/hook").is_err());
    let narrowed = good(&[("EVENTS_ENDPOINT_HOSTS", "hooks.example.test")])
        .delivery
        .endpoint_hosts;
    assert!(narrowed.check("https://hooks.example.test/hook").is_ok());
    assert!(narrowed.check("https://live.openvibe.network/hook").is_err());
    let message = refused(&[("EVENTS_ENDPOINT_HOSTS", "ok.example.org, http://x")]);
    assert!(
        message.starts_with("EVENTS_ENDPOINT_HOSTS is wrong: \"http://x\" is not a host"),
        "{message}"
    );
    assert!(refused(&[("EVENTS_ENDPOINT_HOSTS", ",")]).contains("must name at least one value"));
}

#[test]
fn name_servers_are_addresses_with_a_port_or_without() {
    let servers = |text| good(&[("EVENTS_DNS_SERVERS", text)]).delivery.dns_servers;
    assert!(good(&[]).delivery.dns_servers.is_empty(), "the system's");
    let read: Vec<String> = servers("10.0.0.2, 127.0.0.1:5353,::1,[::1]:5353")
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(read, ["10.0.0.2:53", "127.0.0.1:5353", "[::1]:53", "[::1]:5353"]);
    let message = refused(&[("EVENTS_DNS_SERVERS", "10.0.0.2,ns.example.org")]);
    assert!(
        message.contains("EVENTS_DNS_SERVERS must list IP addresses"),
        "{message}"
    );
}

#[test]
fn a_receipt_is_never_forgotten_before_its_event() {
    let days = |env: &[(&str, &str)]| good(env).retention.receipts.as_secs() / 86_400;
    assert_eq!(days(&[]), 365, "the replay tier keeps events for a year");
    assert_eq!(days(&[("EVENTS_REPLAY_RETENTION_DAYS", "0")]), 90);
    let long = [("EVENTS_REPLAY_RETENTION_DAYS", "0"), ("EVENTS_RETENTION_DAYS", "400")];
    assert_eq!(days(&long), 400);
}

#[test]
fn the_share_of_apps_stays_within_the_process() {
    let share = |process, apps| {
        good(&[("EVENTS_MAX_INFLIGHT", process), ("EVENTS_APP_MAX_INFLIGHT", apps)])
            .apps
            .max_inflight
    };
    assert_eq!(share("20", ""), 10);
    assert_eq!(share("1", ""), 1);
    assert_eq!(share("20", "0"), 1);
    assert_eq!(share("20", "500"), 20);
    assert_eq!(share("20", "7"), 7);
}

#[test]
fn keys_that_seal_secrets_are_32_bytes_each() {
    use base64::Engine as _;
    let encode = |byte: u8, count: usize| base64::engine::general_purpose::STANDARD.encode(vec![byte; count]);
    let (newest, older) = (encode(7, 32), encode(8, 32));
    let unpadded = older.trim_end_matches('=');
    let keys = good(&[("EVENTS_SECRET_KEY", &format!("{newest}, {unpadded}"))])
        .delivery
        .secret_keys;
    assert_eq!(
        keys.iter().map(SecretKey::expose).collect::<Vec<_>>(),
        [&[7; 32], &[8; 32]]
    );
    let short = encode(9, 31);
    let message = refused(&[("EVENTS_SECRET_KEY", &format!("{newest},{short}"))]);
    assert_eq!(
        message,
        "EVENTS_SECRET_KEY must hold 32 bytes in base64 per key; key 2 of 2 does not"
    );
}

#[test]
fn a_pinned_key_may_be_written_on_one_line_and_is_public() {
    let pem = "-----BEGIN PUBLIC KEY-----\\nMIIB\\n-----END PUBLIC KEY-----\\n";
    let read = good(&[("OV_NETWORK_PUBLIC_KEY", pem)]).identity.public_key_pem;
    assert_eq!(
        read.as_deref(),
        Some("-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----\n")
    );
    let private = format!("-----BEGIN PRIVATE KEY-----\\n{PASSWORD}\\n-----END PRIVATE KEY-----");
    let message = refused(&[("OV_NETWORK_PUBLIC_KEY", &private)]);
    assert_eq!(
        message,
        "OV_NETWORK_PUBLIC_KEY must hold a public key; it holds a private one"
    );
}

#[test]
fn all_mistakes_are_reported_together() {
    let errors = read(&[
        ("EVENTS_RETENTION_DAYS", "soon"),
        ("NODE_ENV", "production"),
        ("EVENTS_CARRIERS", "pigeon"),
    ])
    .expect_err("three mistakes");
    assert_eq!(
        errors.to_string(),
        "DATABASE_URL must be set in production; \
         EVENTS_RETENTION_DAYS must be a whole number from 1 to 3650, got \"soon\"; \
         EVENTS_CARRIERS must name nothing but pg-v1, valkey-v1, nats-v1, nats-js-v1, cloud-v1, got \"pigeon\""
    );
}

/// Every variable in turn holds a password, alone and inside a URL, right or wrong: no output may repeat it.
#[test]
fn no_password_is_ever_shown() {
    let urls = ["postgres://", "redis://", "nats://", "https://", "bogus://", ""]
        .map(|scheme| format!("{scheme}user:{PASSWORD}@host/name"));
    for variable in all() {
        for value in urls
            .iter()
            .map(String::as_str)
            .chain(variable.secret.then_some(PASSWORD))
        {
            let get = |name: &str| (name == variable.name).then(|| value.to_owned());
            let report = Report::of(&get, &[]);
            // What a plain variable accepts is part of the configuration; what a secret one accepts is not shown there.
            let text = match Config::read(&get) {
                Ok(config) if variable.secret => format!("{config:?} {report:?}"),
                Ok(_) => format!("{report:?}"),
                Err(errors) => format!("{errors} {errors:?} {report:?}"),
            };
            assert!(!text.contains(PASSWORD), "{}={value}", variable.name);
        }
    }
}

#[test]
fn a_likely_typo_is_a_warning_and_no_mistake() {
    let names = [
        "EVENTS_WORKR",
        "EVENTS_MAX_HOP",
        "EVENTS_WORKSHOP",
        "WORKER",
        "EVENTS_WORKER",
        "PROT",
    ]
    .map(str::to_owned);
    let report = Report::of(&|_| None, &names);
    assert_eq!(
        report.warnings,
        [
            "EVENTS_WORKR is not a variable of this service; EVENTS_WORKER was perhaps meant",
            "EVENTS_MAX_HOP is not a variable of this service; EVENTS_MAX_HOPS was perhaps meant",
        ]
    );
    assert!(report.mistakes.is_empty());
}

#[test]
fn secrets_are_stored_as_given_without_a_key_and_no_key_is_shown() {
    let key = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    let report = Report::of(&|name| (name == "EVENTS_SECRET_KEY").then(|| key.to_owned()), &[]);
    assert_eq!(report.warnings, [""; 0]);
    assert!(!format!("{report:?}").contains(key), "{report:?}");
    assert_eq!(good(&[("EVENTS_SECRET_KEY", key)]).delivery.secrets_warning(), None);
    let warning = good(&[]).delivery.secrets_warning().expect("a warning");
    assert!(warning.starts_with("EVENTS_SECRET_KEY is not set"), "{warning}");
}

#[test]
fn a_misspelt_production_is_a_warning() {
    let get = |name: &str| (name == "NODE_ENV").then(|| "prodution".to_owned());
    let report = Report::of(&get, &[]);
    assert_eq!(report.warnings.len(), 1, "{report:?}");
    assert!(
        report.warnings[0].contains("\"prodution\", which counts as development"),
        "{report:?}"
    );
}

#[test]
fn rate_cards_are_read_and_all_their_mistakes_told_beside_the_others() {
    let file = std::env::temp_dir().join(format!("ov-config-cards-{}.json", ulid::Ulid::generate()));
    let path = file.to_str().expect("text");
    let mut cards: serde_json::Value = serde_json::from_str(planner::SHIPPED_RATE_CARDS).expect("JSON");
    std::fs::write(&file, cards.to_string()).expect("a file");
    let config = good(&[("EVENTS_RATE_CARDS", path)]);
    assert_eq!(config.carriers.rate_cards.as_deref(), Some(file.as_path()));

    let id = cards[1]["id"].as_str().expect("an id").to_owned();
    cards[0]["unit_price_usd"] = serde_json::json!(-1);
    cards[1].as_object_mut().expect("a card").remove("metric");
    cards[2]["effective_until"] = serde_json::json!("2001-01-01");
    cards[2]["effective_from"] = serde_json::json!("2000-01-01");
    cards[3]["id"] = serde_json::json!(id);
    std::fs::write(&file, cards.to_string()).expect("a file");
    let errors = read(&[("EVENTS_RATE_CARDS", path), ("PORT", "http")]).expect_err("mistakes");
    let messages: Vec<&str> = errors.0.iter().map(|mistake| mistake.message.as_str()).collect();
    assert!(messages[0].starts_with("PORT must"), "{errors}");
    for (message, words) in messages[1..].iter().zip([
        "unit_price_usd: must be a number of 0 or more, got -1",
        "metric: is missing: give a text",
        "effective_until: the price expired on 2001-01-01: verify it",
        "id: \"",
    ]) {
        assert!(
            message.starts_with(&format!("EVENTS_RATE_CARDS is wrong: {path}: ")) && message.contains(words),
            "{words} is missing from {message}"
        );
    }
    assert_eq!(messages.len(), 5, "{errors}");

    std::fs::write(&file, "[{]").expect("a file");
    assert!(refused(&[("EVENTS_RATE_CARDS", path)]).contains(": is not JSON ("));
    std::fs::remove_file(&file).expect("it is there");
    let gone = refused(&[("EVENTS_RATE_CARDS", path)]);
    assert!(
        gone.contains(": cannot be read (No such file") && gone.contains("or unset EVENTS_RATE_CARDS"),
        "{gone}"
    );
    let endless = refused(&[("EVENTS_RATE_CARDS", "/dev/zero")]);
    assert!(endless.contains("cannot be read (it is no regular file)"), "{endless}");
}

/// The carrier that docs/adding-a-carrier.md adds, in a service that has it.
#[path = "../../carriers/tests/contract/page/uds_v1.rs"]
mod sixth;

#[test]
fn the_carrier_of_the_page_is_opened_by_what_it_declares() {
    let registry: &'static [Descriptor] = [REGISTRY, &[sixth::DESCRIPTOR]].concat().leak();
    let table = Table::of(registry);
    let read = |env: &[(&str, &str)]| Config::read_with(table, &|name| value_of(env, name));
    let given = [
        ("EVENTS_CARRIERS", "pg-v1,uds-v1"),
        ("UDS_PATH", "/run/one"),
        ("UDS_PEER", "/run/two"),
    ];
    let config = read(&given).expect("a good configuration");
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider's versions")
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let opened = |config: &Config| {
        (sixth::DESCRIPTOR.open)(&carriers::Env {
            variables: &|name| config.carrier_variable(name),
            instance: "one",
            consumes: true,
            tls: &tls,
            clock: crate::clock::system,
        })
    };
    assert!(opened(&config).expect("good variables").is_some(), "it is configured");
    assert!(opened(&read(&[]).expect("defaults")).expect("no variables").is_none());
    assert!(read(&[]).expect("defaults").carriers.enabled.contains("uds-v1"));
    let alone = read(&given[..2]).expect_err("half of it").to_string();
    assert_eq!(alone, "UDS_PEER must be set where UDS_PATH is");
    let shown = table.find("UDS_PEER").expect("it is declared");
    assert!(!shown.help.is_empty() && shown.active);
}
