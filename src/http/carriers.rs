//! `/api/v1/carriers`: how each carrier stands in the process that answers, and the switch that holds for all of them;
//! for operators.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use planner::{Status, Text, Trust};
use serde::Serialize;
use serde_json::Value;

use crate::domain::time::Millis;
use crate::fabric::CarrierState;
use crate::problem::ApiError;

use super::answer::json;
use super::api::Api;
use super::body::read_members;
use super::caller::{Caller, ListCarriers, SwitchCarrier};
use super::query::PathOf;

/// Bytes of a body.
const BODY_LIMIT: usize = 64 * 1024;

#[derive(Serialize)]
struct CarrierView {
    id: &'static str,
    classes: Vec<&'static str>,
    state: &'static str,
    reason: Option<String>,
    disabled: Disabled,
    breaker: Breaker,
    /// What it offers, in milliseconds, by class.
    latency_ms: BTreeMap<&'static str, f64>,
    queue_depth: usize,
    usage: Usage,
    offer: OfferView,
}

/// `platform.resource-offer@1`.
#[derive(Serialize)]
struct OfferView {
    offer_id: Text,
    kind: &'static str,
    adapter: &'static str,
    provider: Text,
    region: Text,
    trust: &'static str,
    capabilities: Vec<Text>,
    latency_ms: BTreeMap<Text, f64>,
    health: OfferHealth,
    pricing: OfferPricing,
    updated_at: Millis,
}

#[derive(Serialize)]
struct OfferHealth {
    status: &'static str,
    checked_at: Millis,
}

#[derive(Serialize)]
struct OfferPricing {
    model: &'static str,
    unit: &'static str,
    rate_card: &'static str,
}

#[derive(Serialize)]
struct Disabled {
    by_configuration: bool,
    by_operator: bool,
}

#[derive(Serialize)]
struct Breaker {
    state: &'static str,
    trial_in_ms: Option<u64>,
}

#[derive(Serialize)]
struct Usage {
    provider: &'static str,
    metric: &'static str,
    /// Operations this month, by every process, as far as they are counted.
    used: f64,
    rate_card: &'static str,
    /// Without its card a carrier is never chosen.
    priced: bool,
}

#[derive(Serialize)]
struct CarrierList {
    carriers: Vec<CarrierView>,
}

/// Every carrier that is configured in this process.
pub(super) async fn list(State(api): State<Arc<Api>>, _caller: Caller<ListCarriers>) -> Result<Response, ApiError> {
    let carriers = api.fabric.carriers().into_iter().map(view).collect();
    Ok(json(StatusCode::OK, &CarrierList { carriers }))
}

/// Switches a carrier off or on, in every process. The environment still wins.
pub(super) async fn switch(
    State(api): State<Arc<Api>>,
    caller: Caller<SwitchCarrier>,
    PathOf(id): PathOf<String>,
    request: Request,
) -> Result<Response, ApiError> {
    let body: Value = serde_json::from_str(&read_members(request, BODY_LIMIT, ApiError::BadRequest).await?)
        .map_err(|error| ApiError::BadJson(format!("the body cannot be read: {error}").into()))?;
    let disabled = body
        .as_object()
        .filter(|members| members.len() == 1)
        .and_then(|members| members.get("disabled")?.as_bool());
    let disabled = disabled.ok_or(ApiError::BadRequest(
        r#"disabled must be true or false, and nothing else may be given, as in {"disabled": true}"#.into(),
    ))?;
    let known: Vec<&str> = api.fabric.carriers().into_iter().map(|carrier| carrier.id).collect();
    let unknown = || {
        let known = known.join(", ");
        ApiError::NotFound(format!("no such carrier is configured here; there are {known}").into())
    };
    let id = known.iter().copied().find(|own| *own == id).ok_or_else(unknown)?;
    api.store.switch_carrier(id, disabled, &caller.consumer).await?;
    let version = api.store.version().await?;
    api.store.refresh_view(version).await?;
    api.fabric.switched(id, disabled, &caller.consumer);
    api.fabric.follow_switches();
    let switched = api.fabric.carriers().into_iter().find(|carrier| carrier.id == id);
    let switched = switched.ok_or_else(unknown)?;
    Ok(json(StatusCode::OK, &view(switched)))
}

fn view(carrier: CarrierState) -> CarrierView {
    let offer = carrier.offer;
    let offer = OfferView {
        offer_id: offer.id,
        kind: "provider",
        adapter: carrier.id,
        provider: offer.provider,
        region: offer.region,
        trust: offer.trust.unwrap_or(Trust::External).as_str(),
        capabilities: offer.capabilities,
        latency_ms: offer.latency_ms.into_iter().collect(),
        health: OfferHealth {
            status: offer.status.unwrap_or(Status::Down).as_str(),
            checked_at: carrier.checked_at,
        },
        pricing: OfferPricing {
            model: "per-operation",
            unit: carrier.metric,
            rate_card: carrier.rate_card,
        },
        updated_at: carrier.checked_at,
    };
    CarrierView {
        offer,
        id: carrier.id,
        classes: carrier.classes.iter().map(|class| class.label()).collect(),
        state: carrier.state,
        reason: carrier.reason,
        disabled: Disabled {
            by_configuration: carrier.by_configuration,
            by_operator: carrier.by_operator,
        },
        breaker: Breaker {
            state: carrier.breaker,
            trial_in_ms: carrier.trial_in_ms,
        },
        latency_ms: carrier
            .latency_ms
            .into_iter()
            .map(|(class, ms)| (class.label(), ms))
            .collect(),
        queue_depth: carrier.queue_depth,
        usage: Usage {
            provider: carrier.provider,
            metric: carrier.metric,
            used: carrier.used,
            rate_card: carrier.rate_card,
            priced: carrier.priced,
        },
    }
}
