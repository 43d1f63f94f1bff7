//! The resource routes, and which capability each one needs.

use std::sync::Arc;

use axum::Router;
use axum::middleware::map_response;
use axum::routing::{MethodRouter, delete, get, patch, post, put};

use crate::domain::app::Quotas;
use crate::domain::endpoint::HostRules;
use crate::domain::ids::SubscriptionId;
use crate::egress::Guard;
use crate::fabric::Fabric;
use crate::identity::Verifier;
use crate::identity::limits::Limits;
use crate::problem::{ApiError, TokenFault};
use crate::publish::{Publisher, Rules};
use crate::store::{SharedStore, StoreError};

use super::caller::subscribing_withdrawn;
use super::room::Rooms;
use super::{carriers, checkpoints, deliveries, events, placement, policies, publish, subscriptions};

/// Told that subscriptions may have work. Must not block.
pub type Ring = Arc<dyn Fn(&[SubscriptionId]) + Send + Sync>;

/// What the routes work with; the composition root builds it.
pub struct Api {
    /// Judges bearer tokens.
    pub verifier: Verifier,
    /// The record.
    pub store: SharedStore,
    /// The way in for events.
    pub publisher: Publisher,
    /// How many requests a caller may send; `None` when nobody is limited.
    pub limits: Option<Limits>,
    /// What may be published.
    pub rules: Rules,
    /// Where subscriptions may point.
    pub endpoint_hosts: HostRules,
    /// Where deliveries of apps may go.
    pub guard: Guard,
    /// What pages of the log may take of the memory.
    pub rooms: Rooms,
    /// How many subscriptions a consumer may hold.
    pub subscriptions_max: i64,
    /// Whether developer apps are served.
    pub apps: bool,
    /// What their projects may use.
    pub quotas: Quotas,
    /// Told that a subscription may have work.
    pub wake: Ring,
    /// How deliveries are woken.
    pub fabric: Arc<Fabric>,
}

/// One route of the API.
#[derive(Debug, Clone, Copy)]
pub struct Route {
    /// The method it answers.
    pub method: &'static str,
    /// Its path; a parameter stands in braces.
    pub path: &'static str,
    handler: fn() -> MethodRouter<Arc<Api>>,
}

/// Every route under `/api/v1`, in one place so that a test can walk them all. Each handler names its capability in its
/// arguments (`Caller<…>`), so none can forget it.
pub const ROUTES: [Route; 23] = [
    route("GET", "/api/v1/events", || get(events::pull)),
    route("POST", "/api/v1/events", || post(publish::publish)),
    route("GET", "/api/v1/events/{id}", || get(events::by_id)),
    route("GET", "/api/v1/checkpoints", || get(checkpoints::read)),
    route("PUT", "/api/v1/checkpoints", || put(checkpoints::write)),
    route("GET", "/api/v1/subscriptions", || get(subscriptions::list)),
    route("POST", "/api/v1/subscriptions", || post(subscriptions::create)),
    route("GET", "/api/v1/subscriptions/{id}", || get(subscriptions::read)),
    route("PATCH", "/api/v1/subscriptions/{id}", || patch(subscriptions::update)),
    route("POST", "/api/v1/subscriptions/{id}/enable", || {
        post(subscriptions::enable)
    }),
    route("POST", "/api/v1/subscriptions/{id}/disable", || {
        post(subscriptions::disable)
    }),
    route("POST", "/api/v1/subscriptions/{id}/rotate-secret", || {
        post(subscriptions::rotate_secret)
    }),
    route("GET", "/api/v1/deliveries", || get(deliveries::list)),
    route("POST", "/api/v1/deliveries/replay", || post(deliveries::replay)),
    route("POST", "/api/v1/deliveries/skip", || post(deliveries::skip)),
    route("GET", "/api/v1/delivery-policies", || get(policies::list)),
    route("GET", "/api/v1/delivery-policies/resolve", || get(policies::resolve)),
    route("PUT", "/api/v1/delivery-policies/{pattern}", || put(policies::put)),
    route("DELETE", "/api/v1/delivery-policies/{pattern}", || {
        delete(policies::delete)
    }),
    route("GET", "/api/v1/placement", || get(placement::explain)),
    route(
        "GET",
        "/api/v1/placement/deliveries/{event_id}/{subscription_id}",
        || get(placement::of_delivery),
    ),
    route("GET", "/api/v1/carriers", || get(carriers::list)),
    route("PUT", "/api/v1/carriers/{id}", || put(carriers::switch)),
];

const fn route(method: &'static str, path: &'static str, handler: fn() -> MethodRouter<Arc<Api>>) -> Route {
    Route { method, path, handler }
}

/// The router of [`ROUTES`].
pub fn routes(api: Arc<Api>) -> Router {
    ROUTES
        .iter()
        .fold(Router::new(), |router, route| {
            let handler = (route.handler)();
            // Refusals of these routes are no more for a cache than their secrets.
            let handler = match route.path.starts_with("/api/v1/subscriptions") {
                true => handler.layer(map_response(subscriptions::uncached)),
                false => handler,
            };
            router.route(route.path, handler)
        })
        .with_state(api)
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Unavailable(_) => Self::unavailable(error),
            StoreError::SubscriptionExists(id) => Self::SubscriptionExists {
                subscription_id: id.to_string(),
            },
            StoreError::SubscriptionLimit(limit) => Self::SubscriptionLimit {
                limit: limit.unsigned_abs(),
            },
            StoreError::Quota(fault) => Self::QuotaExceeded(fault),
            StoreError::AppRevoked => Self::Token(TokenFault::Revoked),
            StoreError::SubscribingWithdrawn => subscribing_withdrawn(),
            StoreError::Foreign
            | StoreError::NotMigrated
            | StoreError::Migrate(_)
            | StoreError::Corrupt { .. }
            | StoreError::Database(_) => Self::internal(error),
        }
    }
}
