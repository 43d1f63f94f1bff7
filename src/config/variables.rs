//! The one table of environment variables: it drives reading, the example file and the report, so they cannot drift.
//!
//! Nothing is read here. A variable that is not in this table cannot be read at all. What a carrier reads it declares itself.

use std::collections::HashSet;
use std::sync::LazyLock;

use carriers::{Descriptor, REGISTRY};

/// One environment variable of the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variable {
    /// Its name in the environment.
    pub name: &'static str,
    /// What holds when it is unset or empty.
    pub default: Fallback,
    /// Whether its value must never be shown. URLs that may carry a password count.
    pub secret: bool,
    /// Whether this version acts on it. The others are checked all the same.
    pub active: bool,
    /// What it does, its unit and what is allowed.
    pub help: &'static str,
}

/// What holds when a variable is unset or empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fallback {
    /// This text, read exactly as if it had been given.
    Text(&'static str),
    /// Nothing: what the variable names is absent.
    Unset,
    /// A value that depends on something else; the words say on what.
    Computed(&'static str),
}

/// Variables that belong together, in the order in which they are shown.
#[derive(Debug)]
pub struct Section {
    /// The heading in the example file and the report.
    pub title: &'static str,
    /// Its variables.
    pub variables: &'static [Variable],
}

const fn var(name: &'static str, default: &'static str, help: &'static str) -> Variable {
    Variable {
        name,
        default: Fallback::Text(default),
        secret: false,
        active: true,
        help,
    }
}

const fn unset(name: &'static str, help: &'static str) -> Variable {
    Variable {
        name,
        default: Fallback::Unset,
        secret: false,
        active: true,
        help,
    }
}

const fn computed(name: &'static str, from: &'static str, help: &'static str) -> Variable {
    Variable {
        name,
        default: Fallback::Computed(from),
        secret: false,
        active: true,
        help,
    }
}

impl Variable {
    const fn secret(mut self) -> Self {
        self.secret = true;
        self
    }

    /// Checked at start, but nothing acts on it yet.
    const fn later(mut self) -> Self {
        self.active = false;
        self
    }
}

/// The section that holds what carriers declare themselves.
const CARRIERS: &str = "Carriers";
/// The variable whose default names every carrier.
const IDS: &str = "EVENTS_CARRIERS";

/// What the service itself reads, by section.
const OWN: &[Section] = &[
    Section {
        title: "Process and HTTP",
        variables: &[
            var("PORT", "4300", "Port to listen on, 0 to 65535. 0 takes a free one."),
            var("HOST", "127.0.0.1", "IP address to listen on; localhost means 127.0.0.1."),
            var(
                "NODE_ENV",
                "development",
                "production makes DATABASE_URL mandatory; every other word counts as development. EVENTS_ENV wins.",
            ),
            computed(
                "EVENTS_ENV",
                "what NODE_ENV says",
                "production, development or test. Wins over NODE_ENV.",
            ),
            computed(
                "BASE_URL",
                "https://openvibe.events in production, else http://localhost:<PORT>",
                "Public origin of the API, as written in texts.",
            )
            .later(),
            computed(
                "EVENTS_SITE_URL",
                "https://openvibe.events in production, else BASE_URL",
                "Canonical origin of the home page.",
            )
            .later(),
            var("EVENTS_LOG", "info,sqlx=warn,async_nats=off", "What is logged: error, warn, info, debug, trace, or a filter such as info,sqlx=warn. Whether NATS is reached is told by its carriers."),
            var("EVENTS_LOG_FORMAT", "human", "human, or json: one object a line."),
            unset("SSL_CERT_FILE", "PEM file of certificate authorities trusted for outbound TLS besides the system's."),
        ],
    },
    Section {
        title: "Database",
        variables: &[
            unset(
                "DATABASE_URL",
                "PostgreSQL for serving, postgres://user:password@host:port/database. May go through a transaction pooler. \
                 Mandatory in production.",
            )
            .secret(),
            computed(
                "DATABASE_DIRECT_URL",
                "DATABASE_URL",
                "The same database without a pooler, for migrations, heartbeats and LISTEN.",
            )
            .secret(),
        ],
    },
    Section {
        title: "Identity",
        variables: &[
            var("OV_NETWORK_URL", "https://openvibe.network", "Public address of the identity issuer."),
            var(
                "OV_NETWORK_INTERNAL_URL",
                "http://127.0.0.1:4000",
                "Where signing keys and service tokens are fetched from.",
            ),
            computed("OV_NETWORK_ISSUER", "OV_NETWORK_URL", "The iss claim that tokens must carry, exactly."),
            unset(
                "OV_NETWORK_PUBLIC_KEY",
                "A public key in PEM (\\n may stand for line ends). Pins that key; none are fetched then.",
            )
            .secret(),
            unset(
                "EVENTS_USER_AUDIENCES",
                "Audiences of which a person's token must name one, comma separated. Without it a token that names any must name \
                 openvibe.events or openvibe.network.",
            ),
        ],
    },
    Section {
        title: "Publishing",
        variables: &[
            var("EVENTS_MAX_PAYLOAD_BYTES", "65536", "Largest payload of one event in bytes, 1 to 2097152."),
            var("EVENTS_MAX_HOPS", "8", "Longest chain of events under one trace, 1 to 1000; longer ones are loops."),
            computed(
                "EVENTS_SOURCE_PREFIXES",
                "every service of the network, each owning its own namespace",
                "Who may publish what, as JSON {\"source\": [\"prefix.\"]}. Replaces the built-in map.",
            ),
            var(
                "EVENTS_SHARED_PREFIXES",
                "provider.",
                "Namespaces in which every listed source may publish, comma separated, each ending in a dot.",
            ),
        ],
    },
    Section {
        title: "Delivery",
        variables: &[
            var("EVENTS_WORKER", "on", "on or off. off: this process stores events and delivers none."),
            var("EVENTS_WORKER_INTERVAL_MS", "500", "Longest wait between two looks for due work, 10 to 3600000."),
            var("EVENTS_MAX_INFLIGHT", "256", "Attempts under way at once in this process, 1 to 10000."),
            var(
                "EVENTS_DEFAULT_MAX_INFLIGHT",
                "1",
                "Attempts under way at once for a subscription that does not say, 1 to 64.",
            ),
            var("EVENTS_DELIVERY_TIMEOUT_MS", "10000", "Time one whole attempt may take, 10 to 300000."),
            var("EVENTS_MAX_ATTEMPTS", "8", "Attempts before a delivery is dead, 1 to 100."),
            var(
                "EVENTS_BACKOFF_MS",
                "1000,5000,30000,120000,600000,3600000",
                "Waits after each failed attempt, 1 to 20 of them, each 0 to 86400000; the last one repeats.",
            ),
            var(
                "EVENTS_BACKOFF_JITTER",
                "0.1",
                "How much later than its wait a retry may run, as a share of the wait, 0 to 0.1. Never earlier; 0 turns it off.",
            ),
            var("EVENTS_DLQ_DEGRADED_AT", "100", "Dead deliveries above which readiness reports degraded."),
            var("EVENTS_MAX_SUBSCRIPTIONS", "100", "Subscriptions one consumer may have, 1 to 1000000."),
            var(
                "EVENTS_ENDPOINT_HOSTS",
                "127.0.0.1,*.openvibe.*",
                "Hosts that services may be delivered to, comma separated: exact, *.name, or *.openvibe.*.",
            ),
            unset(
                "EVENTS_DNS_SERVERS",
                "Name servers that look up the hosts of developer apps' endpoints: IP addresses, with :port where that is not \
                 53, comma separated. Unset: those of the system (/etc/resolv.conf, and /etc/hosts).",
            ),
            unset(
                "EVENTS_SECRET_KEY",
                "Keys that seal webhook secrets at rest: 32 bytes in base64 each, comma separated, newest first. All open, the \
                 first one seals. To rotate: add the new key behind the old one everywhere, then put it in front, then drop \
                 the old one. Unset: secrets are stored as they are given.",
            )
            .secret(),
        ],
    },
    Section {
        title: "Limits of callers",
        variables: &[
            var("EVENTS_LIMITS", "on", "on or off. off: callers are not limited."),
            var("EVENTS_LIMITS_MINUTE", "120", "Requests a minute where a route sets no other limit, at least 1."),
            var("EVENTS_LIMITS_HOUR", "3000", "Requests an hour where a route sets no other limit, at least 1."),
        ],
    },
    Section {
        title: "Retention and archive",
        variables: &[
            var(
                "EVENTS_RETENTION_DAYS",
                "30",
                "Days an event stays in the hot tier, with its deliveries, and an old placement on record, 1 to 3650.",
            ),
            var("EVENTS_REPLAY_RETENTION_DAYS", "365", "Days an event stays readable in all, 0 to 36500. 0: no replay tier.")
                ,
            var(
                "EVENTS_RECEIPT_RETENTION_DAYS",
                "90",
                "Days a publish receipt is kept, 0 to 36500; never shorter than the longest tier keeps events.",
            )
            ,
            var("EVENTS_PRUNE_INTERVAL_MS", "3600000", "Wait between two prunes, 10 to 86400000."),
            var("EVENTS_ARCHIVE_DIR", "data/archive", "Directory of the archive command when no bucket is set."),
            unset("EVENTS_ARCHIVE_S3_BUCKET", "Bucket of the archive command; unset: the directory is used."),
            unset("EVENTS_ARCHIVE_S3_ENDPOINT", "Address of an S3-compatible store; unset: the region's own."),
            var("EVENTS_ARCHIVE_S3_REGION", "us-east-1", "Region of the bucket."),
            unset("EVENTS_ARCHIVE_S3_ACCESS_KEY_ID", "Access key id for the bucket."),
            unset("EVENTS_ARCHIVE_S3_SECRET_ACCESS_KEY", "Secret of the access key.").secret(),
            var("EVENTS_ARCHIVE_S3_PREFIX", "events/", "Prefix of the objects in the bucket."),
        ],
    },
    Section {
        title: "Developer apps",
        variables: &[
            var("EVENTS_APPS", "on", "on or off. off: tokens of developer apps are refused."),
            computed(
                "EVENTS_APP_MAX_INFLIGHT",
                "half of EVENTS_MAX_INFLIGHT",
                "Attempts to apps under way at once; kept between 1 and EVENTS_MAX_INFLIGHT.",
            )
            .later(),
            var("EVENTS_APP_PUBLISH_PER_MINUTE", "120", "Events a minute of a production project; 0: no quota."),
            var("EVENTS_APP_SANDBOX_PUBLISH_PER_MINUTE", "30", "Events a minute of a sandbox project; 0: no quota."),
            var("EVENTS_APP_RETAINED_BYTES", "52428800", "Bytes a production project may keep; 0: no quota."),
            var("EVENTS_APP_SANDBOX_RETAINED_BYTES", "5242880", "Bytes a sandbox project may keep; 0: no quota."),
            var("EVENTS_APP_MAX_SUBSCRIPTIONS", "20", "Subscriptions of a production project; 0: no quota."),
            var("EVENTS_APP_SANDBOX_MAX_SUBSCRIPTIONS", "5", "Subscriptions of a sandbox project; 0: no quota."),
            var("EVENTS_APP_SANDBOX_RETENTION_DAYS", "7", "Days a sandbox event is kept, 1 to 3650."),
        ],
    },
    Section {
        title: "Realtime streams",
        variables: &[
            var("REALTIME_MAX_CONNECTIONS", "2000", "Open streams in this process, 0 to 1000000. 0 refuses all."),
            var("REALTIME_MAX_TOPICS", "20", "Topics one stream may name, 1 to 1000."),
            var("REALTIME_HEARTBEAT_MS", "25000", "Wait between two heartbeats, 10 to 3600000."),
            var("REALTIME_REPLAY_MAX", "1000", "Events a resuming stream gets at most, 0 to 10000."),
            var(
                "REALTIME_PUBLIC_REPLAY_SECONDS",
                "300",
                "How far back browsers get public events again, 0 to 31536000 seconds. What is theirs is kept longer.",
            ),
            var("REALTIME_ALLOW_ANONYMOUS", "true", "true or false. false: every stream needs a token."),
            var(
                "REALTIME_ORIGIN_HOSTS",
                "*.openvibe.*",
                "Hosts whose https pages may open streams with credentials, comma separated: a host, *.<name> or *.openvibe.*.",
            ),
            unset("REALTIME_CORS_ORIGINS", "Further origins that may open streams, exact, comma separated."),
        ],
    },
    Section {
        title: CARRIERS,
        variables: &[
            computed(
                IDS,
                "every carrier",
                "Carriers this process may use, comma separated. pg-v1 always delivers.",
            ),
            unset("EVENTS_CARRIERS_DISABLED", "Carriers that are never chosen, comma separated."),
            unset("EVENTS_RATE_CARDS", "File of rate cards; unset: the ones that come with the service."),
        ],
    },
    Section {
        title: "Usage and billing",
        variables: &[
            var("EVENTS_USAGE", "on", "on or off. off: use by developer apps is not counted.").later(),
            var("EVENTS_USAGE_FLUSH_MS", "300000", "Wait between two usage reports, 1000 to 86400000.").later(),
            var("EVENTS_BILLING_INTERVAL_MS", "0", "Wait between two billing runs, 0 to 86400000. 0: none.").later(),
            unset("OV_BILLING_INTERNAL_URL", "Address of the billing service.").later(),
            var("OV_BILLING_AUDIENCE", "openvibe.billing", "Audience of the tokens it is called with.").later(),
            var("OV_BILLING_TIMEOUT_MS", "10000", "Time one call to it may take, 1000 to 300000.").later(),
            var("OV_OAUTH_CLIENT_ID", "events", "Client id for tokens of this service.").later(),
            unset("OV_OAUTH_CLIENT_SECRET", "Client secret for tokens of this service.").secret().later(),
        ],
    },
    Section {
        title: "Release",
        variables: &[
            computed("RELEASE_COMMIT", "the commit this binary was built from", "Commit whose first twelve digits name the release, 7 to 40 hex digits."),
            computed("RELEASE_AT", "when the binary's commit was made", "When that release was made, an RFC 3339 date and time with a zone."),
            unset("MIN_CLIENT_RELEASE", "Oldest client release still served, 7 to 40 hex digits."),
        ],
    },
];

/// Every variable there is, and the carriers that were asked for theirs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Table {
    pub(super) carriers: &'static [Descriptor],
    pub(super) sections: &'static [Section],
}

impl Table {
    /// The variables of the service and those of these carriers. It is made once and kept as long as the process.
    pub(super) fn of(carriers: &'static [Descriptor]) -> Self {
        let sections = OWN.iter().map(|own| Section {
            title: own.title,
            variables: if own.title == CARRIERS {
                let ids: Vec<&str> = carriers.iter().map(|carrier| carrier.id).collect();
                with_carriers(own.variables, carriers, ids.join(",").leak())
            } else {
                own.variables
            },
        });
        Self {
            carriers,
            sections: sections.collect::<Vec<_>>().leak(),
        }
    }

    /// What the carriers declare, each variable once.
    pub(super) fn of_carriers(self) -> impl Iterator<Item = &'static carriers::Variable> {
        let declared = self.carriers.iter().flat_map(|carrier| carrier.variables);
        let mut seen = HashSet::new();
        declared.filter(move |variable| seen.insert(variable.name))
    }

    /// Every variable, in the order of the sections.
    pub(super) fn all(self) -> impl Iterator<Item = &'static Variable> {
        self.sections.iter().flat_map(|section| section.variables)
    }

    /// The variable of that name.
    pub(super) fn find(self, name: &str) -> Option<&'static Variable> {
        self.all().find(|variable| variable.name == name)
    }
}

fn with_carriers(own: &'static [Variable], carriers: &'static [Descriptor], ids: &'static str) -> &'static [Variable] {
    let named = own.iter().map(|variable| match variable.name {
        IDS => Variable {
            default: Fallback::Text(ids),
            ..*variable
        },
        _ => *variable,
    });
    let table = Table {
        carriers,
        sections: &[],
    };
    let declared = table.of_carriers().map(|variable| Variable {
        name: variable.name,
        default: variable.default.map_or(Fallback::Unset, Fallback::Text),
        secret: variable.secret,
        active: true,
        help: variable.help,
    });
    named.chain(declared).collect::<Vec<_>>().leak()
}

/// The table of this service.
pub(super) fn table() -> Table {
    static TABLE: LazyLock<Table> = LazyLock::new(|| Table::of(REGISTRY));
    *TABLE
}

/// Every variable the service knows, by section.
pub fn sections() -> &'static [Section] {
    table().sections
}

/// Every variable, in the order of the sections.
pub fn all() -> impl Iterator<Item = &'static Variable> {
    table().all()
}

/// The variable of that name.
pub fn find(name: &str) -> Option<&'static Variable> {
    table().find(name)
}
