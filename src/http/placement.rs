//! `/api/v1/placement`: which carrier wakes an event type's deliveries, or one delivery, and why; for operators.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use planner::Placement;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::domain::ids::{EventId, SubscriptionId};
use crate::domain::policy::{DEFAULT_POLICY, KEY_CHARS_MAX, bounded_key};
use crate::domain::time::Millis;
use crate::problem::ApiError;
use crate::store::StoredPlacement;

use super::answer::json;
use super::api::Api;
use super::caller::{Caller, ReadPlacement};
use super::policies::asked;
use super::query::{PathOf, Query};

#[derive(Serialize)]
struct Explanation<'a> {
    event_type: &'a str,
    policy: Box<RawValue>,
    pattern: Option<&'a str>,
    carrier_class: &'static str,
    /// The key that was asked about; without one this is what holds for every key of the policy.
    ordering_key: Option<&'a str>,
    placement: Placement,
    last_decision: Option<LastDecision>,
}

#[derive(Serialize)]
struct LastDecision {
    carrier: String,
    decided_at: Millis,
}

#[derive(Serialize)]
struct DeliveryExplanation {
    carrier: Option<String>,
    carrier_class: Option<String>,
    pattern: Option<String>,
    revision: Option<i32>,
    decision: Option<DecisionView>,
}

#[derive(Serialize)]
struct DecisionView {
    carrier: String,
    decided_at: Millis,
    result: Box<RawValue>,
}

/// What would be decided now, in this process.
pub(super) async fn explain(
    State(api): State<Arc<Api>>,
    _caller: Caller<ReadPlacement>,
    query: Query,
) -> Result<Response, ApiError> {
    let (event_type, view) = asked(&api, &query).await?;
    // One that could be kept as it is may be meant so, digest and all.
    let key = query.non_empty("key")?.map(|key| match key.chars().count() {
        ..=KEY_CHARS_MAX if !key.contains('\0') => key.to_owned(),
        _ => bounded_key(key),
    });
    let rule = view.policies.rule(event_type);
    let (policy_key, policy) = view.policies.in_force(event_type);
    let backlog = match &key {
        Some(key) => api.store.carrier_of_backlog(key).await?,
        None => None,
    };
    let asked = key.as_deref().map(|key| (key, backlog.as_deref()));
    let explained = api.fabric.explain(policy_key, policy.intent(), asked);
    let last = api
        .store
        .last_placement(
            explained.class.label(),
            policy_key.pattern(),
            policy_key.revision(),
            key.as_deref(),
        )
        .await?;
    let document = rule.map_or(DEFAULT_POLICY, |_| policy.document());
    let explanation = Explanation {
        event_type,
        policy: RawValue::from_string(document.to_owned()).map_err(ApiError::internal)?,
        pattern: policy_key.pattern(),
        carrier_class: explained.class.label(),
        ordering_key: key.as_deref(),
        placement: explained.placement,
        last_decision: last.map(|stored| LastDecision {
            carrier: stored.carrier,
            decided_at: stored.decided_at,
        }),
    };
    Ok(json(StatusCode::OK, &explanation))
}

/// How one delivery is woken, and the decision that it was made under.
pub(super) async fn of_delivery(
    State(api): State<Arc<Api>>,
    _caller: Caller<ReadPlacement>,
    PathOf((event_id, subscription_id)): PathOf<(String, String)>,
) -> Result<Response, ApiError> {
    // What does not look like an id cannot be stored.
    let found = match (EventId::parse(&event_id), SubscriptionId::parse(&subscription_id)) {
        (Some(event_id), Some(subscription_id)) => api.store.delivery_placement(&event_id, &subscription_id).await?,
        _ => None,
    };
    let found = found.ok_or(ApiError::NotFound("no such delivery".into()))?;
    let decision = found.decision.as_ref();
    let explanation = DeliveryExplanation {
        carrier_class: decision.map(|decision| decision.class.clone()),
        pattern: decision.and_then(|decision| decision.pattern.clone()),
        revision: decision.map(|decision| decision.revision),
        carrier: found.carrier,
        decision: found.decision.map(decision_view).transpose()?,
    };
    Ok(json(StatusCode::OK, &explanation))
}

fn decision_view(stored: StoredPlacement) -> Result<DecisionView, ApiError> {
    Ok(DecisionView {
        carrier: stored.carrier,
        decided_at: stored.decided_at,
        result: RawValue::from_string(stored.result).map_err(ApiError::internal)?,
    })
}
