//! What the documents of the service say of it, joined from its configuration.

use crate::config::{AppQuotas, Config};
use crate::domain::app::{Quota, Quotas};
use crate::domain::time::{Millis, parse_rfc3339};
use crate::http::limits::{AppLimits, PublishedLimits};
use crate::http::release::{Release, release_name};
use crate::store;

/// Which release runs, as every document and metric names it.
pub(crate) fn release(config: &Config, booted_at: Millis) -> Release {
    let commit = config.release.commit.as_deref();
    let committed_at = || parse_rfc3339(env!("OPENVIBE_EVENTS_COMMITTED_AT"));
    Release {
        name: release_name(commit.unwrap_or(env!("OPENVIBE_EVENTS_COMMIT"))),
        released_at: config.release.released_at.or_else(committed_at).unwrap_or(booted_at),
        booted_at,
        min_client: config.release.min_client.clone(),
        schema_generation: store::schema_generation(),
    }
}

/// What the projects of apps may use.
pub(crate) fn quotas(config: &Config) -> Quotas {
    let number = |quota: Option<u64>| quota.map(|quota| i64::try_from(quota).unwrap_or(i64::MAX));
    let of = |quotas: AppQuotas| Quota {
        publish_per_minute: number(quotas.publish_per_minute),
        retained_bytes: number(quotas.retained_bytes),
        subscriptions: number(quotas.subscriptions),
    };
    Quotas {
        production: of(config.apps.production),
        sandbox: of(config.apps.sandbox),
    }
}

/// What is allowed here.
pub(crate) fn limits(config: &Config) -> PublishedLimits {
    const DAY_S: u64 = 86_400;
    let of = |quotas: AppQuotas, retention_days, replay_retention_days| AppLimits {
        publish_per_minute: quotas.publish_per_minute,
        retained_bytes: quotas.retained_bytes,
        retention_days,
        replay_retention_days,
        subscriptions: quotas.subscriptions,
    };
    let retention = &config.retention;
    let replay_days = retention.replay.map_or(0, |replay| replay.as_secs() / DAY_S);
    let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
    PublishedLimits {
        production: of(config.apps.production, retention.hot.as_secs() / DAY_S, replay_days),
        // A sandbox event is removed for good.
        sandbox: of(config.apps.sandbox, config.apps.sandbox_retention.as_secs() / DAY_S, 0),
        payload_bytes: count(config.publish.max_payload_bytes),
        realtime_topics: count(config.realtime.max_topics),
    }
}
