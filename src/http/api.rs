//! The resource routes, and which capability each one needs.

use std::sync::Arc;

use axum::Router;
use axum::routing::{get, post};

use crate::domain::endpoint::HostRules;
use crate::identity::Verifier;
use crate::problem::ApiError;
use crate::publish::{Publisher, Rules};
use crate::store::{SharedStore, StoreError};

use super::{checkpoints, deliveries, events, publish, subscriptions};

/// What the routes work with; the composition root builds it.
pub struct Api {
    /// Judges bearer tokens.
    pub verifier: Verifier,
    /// The record.
    pub store: SharedStore,
    /// The way in for events.
    pub publisher: Publisher,
    /// What may be published.
    pub rules: Rules,
    /// Where subscriptions may point.
    pub endpoint_hosts: HostRules,
    /// How many subscriptions a consumer may hold.
    pub subscriptions_max: i64,
    /// How many deliveries a subscription runs at a time.
    pub subscription_inflight: i32,
    /// Told that a subscription may have work.
    pub wake: crate::publish::Ring,
}

/// The routes under `/api/v1`. Each handler names its capability in its arguments (`Caller<…>`), so none can forget it.
pub fn routes(api: Arc<Api>) -> Router {
    Router::new()
        .route("/api/v1/events", get(events::pull).post(publish::publish))
        .route("/api/v1/events/{id}", get(events::by_id))
        .route("/api/v1/checkpoints", get(checkpoints::read).put(checkpoints::write))
        .route(
            "/api/v1/subscriptions",
            get(subscriptions::list).post(subscriptions::create),
        )
        .route("/api/v1/subscriptions/{id}", get(subscriptions::read))
        .route("/api/v1/subscriptions/{id}/enable", post(subscriptions::enable))
        .route("/api/v1/subscriptions/{id}/disable", post(subscriptions::disable))
        .route(
            "/api/v1/subscriptions/{id}/rotate-secret",
            post(subscriptions::rotate_secret),
        )
        .route("/api/v1/deliveries", get(deliveries::list))
        .route("/api/v1/deliveries/replay", post(deliveries::replay))
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
            StoreError::Foreign | StoreError::Migrate(_) | StoreError::Corrupt { .. } | StoreError::Database(_) => {
                Self::internal(error)
            }
        }
    }
}
