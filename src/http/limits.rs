//! `GET /limits.json`: what this service allows, as it is configured.

use axum::Router;
use serde::Serialize;

use super::document;
use super::health::SERVICE;
use crate::domain::batch::BATCH_MAX;
use crate::identity::limits::{Limit, Limits};

/// Limits of developer apps in one environment; `None` means no limit.
#[derive(Debug, Clone, Copy)]
pub struct AppLimits {
    /// Events a minute of a project.
    pub publish_per_minute: Option<u64>,
    /// Bytes that a project keeps.
    pub retained_bytes: Option<u64>,
    /// Days until an event is removed.
    pub retention_days: u64,
    /// Days for which it can be read after that.
    pub replay_retention_days: u64,
    /// Subscriptions of a project.
    pub subscriptions: Option<u64>,
}

/// What the document says.
#[derive(Debug, Clone, Copy)]
pub struct PublishedLimits {
    /// For production projects.
    pub production: AppLimits,
    /// For sandbox projects.
    pub sandbox: AppLimits,
    /// Largest payload in bytes.
    pub payload_bytes: u64,
    /// Topics that one stream may name.
    pub realtime_topics: u64,
}

/// The document, members in the order of the wire.
#[derive(Serialize)]
struct Document {
    service: &'static str,
    scope: &'static str,
    limits: [AppLimit; 8],
    rate_limits: Vec<RateLimit>,
}

#[derive(Serialize)]
struct AppLimit {
    id: &'static str,
    label: &'static str,
    capability: Option<&'static str>,
    unit: &'static str,
    production: Option<u64>,
    sandbox: Option<u64>,
    exceeded: &'static str,
}

#[derive(Serialize)]
struct RateLimit {
    id: &'static str,
    minute: u32,
    hour: u32,
    per: &'static str,
    exceeded: &'static str,
}

/// The route. `callers` are the limits in force for requests, `None` when callers are not limited.
pub fn routes(published: &PublishedLimits, callers: Option<&Limits>) -> Router {
    document::route("/limits.json", "public, max-age=300", &document_of(published, callers))
}

fn document_of(published: &PublishedLimits, callers: Option<&Limits>) -> Document {
    const PUBLISH: Option<&str> = Some("events.app.publish");
    const READ: Option<&str> = Some("events.app.read");
    let PublishedLimits {
        production, sandbox, ..
    } = published;
    let both = |value: u64| (Some(value), Some(value));
    let limit = |id, label, capability, unit, (production, sandbox), exceeded| AppLimit {
        id,
        label,
        capability,
        unit,
        production,
        sandbox,
        exceeded,
    };
    let rate_limits = callers.map_or_else(Vec::new, |callers| {
        let rate = |limit: Limit| {
            let allowed = callers.allowance(limit);
            RateLimit {
                id: limit.id(),
                minute: allowed.minute,
                hour: allowed.hour,
                per: "principal",
                exceeded: "429 rate_limited",
            }
        };
        Limit::ALL.into_iter().map(rate).collect()
    });
    Document {
        service: SERVICE,
        scope: "project and environment",
        limits: [
            limit(
                "publish_per_minute",
                "Events published a minute",
                PUBLISH,
                "per_minute",
                (production.publish_per_minute, sandbox.publish_per_minute),
                "429 events.quota_exceeded",
            ),
            limit(
                "retained_bytes",
                "Bytes of events kept",
                PUBLISH,
                "bytes",
                (production.retained_bytes, sandbox.retained_bytes),
                "429 events.quota_exceeded",
            ),
            limit(
                "retention_days",
                "Days an event is kept for delivery and reading",
                READ,
                "days",
                (Some(production.retention_days), Some(sandbox.retention_days)),
                "pruned",
            ),
            limit(
                "replay_retention_days",
                "Days an event can be read in all",
                READ,
                "days",
                (
                    Some(production.replay_retention_days),
                    Some(sandbox.replay_retention_days),
                ),
                "gap",
            ),
            limit(
                "subscriptions",
                "Subscriptions",
                Some("events.app.subscribe"),
                "count",
                (production.subscriptions, sandbox.subscriptions),
                "429 events.quota_exceeded",
            ),
            limit(
                "payload_bytes",
                "Bytes of one payload",
                PUBLISH,
                "bytes",
                both(published.payload_bytes),
                "413 events.payload_too_large",
            ),
            limit(
                "batch",
                "Events in one request",
                PUBLISH,
                "count",
                both(u64::try_from(BATCH_MAX).unwrap_or(u64::MAX)),
                "413 events.batch_too_large",
            ),
            limit(
                "realtime_topics",
                "Topics of one stream",
                None,
                "count",
                both(published.realtime_topics),
                "400 realtime.too_many_topics",
            ),
        ],
        rate_limits,
    }
}
