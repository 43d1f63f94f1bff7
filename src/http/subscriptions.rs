//! `/api/v1/subscriptions`: a consumer's own, and only its own. No answer of these routes is stored by a cache.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::CACHE_CONTROL;
use axum::http::{HeaderValue, StatusCode};
use axum::response::Response;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::domain::app::Holder;
use crate::domain::ids::SubscriptionId;
use crate::domain::json::Members;
use crate::domain::retry::RetryPolicy;
use crate::domain::seal::looks_sealed;
use crate::domain::signature::new_secret;
use crate::domain::time::Millis;
use crate::domain::topic::TopicPattern;
use crate::problem::ApiError;
use crate::store::{NewSubscription, Subscription, SubscriptionChange, Switch};

use super::answer::json;
use super::api::Api;
use super::body::{read_json, read_members};
use super::caller::{
    Caller, CreateSubscription, ListSubscriptions, ReadSubscription, RotateSecret, ToggleSubscription,
    UpdateSubscription,
};
use super::query::PathOf;

/// Bytes of a request to any of these routes.
const BODY_LIMIT: usize = 64 * 1024;
/// How long a former secret signs as well, in seconds, when a rotation does not say.
const OVERLAP_DEFAULT_S: f64 = 86_400.0;
/// Deliveries that one subscription may run at a time.
const INFLIGHT_MAX: i32 = 64;
/// The longest overlap, in seconds.
const OVERLAP_MAX_S: f64 = 604_800.0;

#[derive(Serialize)]
struct SubscriptionView {
    id: String,
    consumer: String,
    topic_pattern: String,
    endpoint: String,
    enabled: bool,
    retry_policy: Option<Box<RawValue>>,
    created_at: Millis,
    updated_at: Millis,
    /// Only of an app's.
    #[serde(skip_serializing_if = "Option::is_none")]
    project_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    env: Option<String>,
    /// Only where the subscription says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_inflight: Option<i32>,
    /// Only in the answer that made it.
    #[serde(skip_serializing_if = "Option::is_none")]
    secret: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    previous_secret_valid_until: Option<Millis>,
}

#[derive(Serialize)]
struct SubscriptionList {
    subscriptions: Vec<SubscriptionView>,
}

impl From<Subscription> for SubscriptionView {
    fn from(stored: Subscription) -> Self {
        Self {
            id: stored.id,
            consumer: stored.consumer,
            topic_pattern: stored.topic_pattern,
            endpoint: stored.endpoint,
            enabled: stored.enabled,
            retry_policy: stored.retry_policy.and_then(|text| RawValue::from_string(text).ok()),
            created_at: Millis(stored.created_at),
            updated_at: Millis(stored.updated_at),
            env: stored.project_id.is_some().then_some(stored.env),
            project_id: stored.project_id,
            max_inflight: stored.max_inflight,
            secret: None,
            previous_secret_valid_until: None,
        }
    }
}

/// Makes a subscription of the caller; its secret is shown this once.
pub(super) async fn create(
    State(api): State<Arc<Api>>,
    caller: Caller<CreateSubscription>,
    request: Request,
) -> Result<Response, ApiError> {
    let body = read_members(request, BODY_LIMIT, ApiError::Unprocessable).await?;
    let members = Members::parse(&body);
    let member = |name: &str| Some(members.as_ref()?.get(name)?.get());

    let pattern = member("topic_pattern")
        .or(member("topic"))
        .and_then(text)
        .and_then(|text| TopicPattern::parse(&text));
    let pattern = pattern.ok_or(ApiError::BadTopicBody(
        "topic_pattern must be [a-z0-9_] segments or *, joined by dots, at most 200 characters".into(),
    ))?;
    caller.subscribing()?;
    caller.naming(&pattern)?;
    let endpoint = member("endpoint").and_then(text).ok_or(ApiError::EndpointNotAllowed(
        "endpoint must be an http or https address".into(),
    ))?;
    let endpoint = match caller.app {
        None => api
            .endpoint_hosts
            .check(&endpoint)
            .map(String::from)
            .map_err(not_allowed)?,
        Some(_) => {
            let endpoint = api.guard.check_endpoint(&endpoint).await.map_err(not_allowed)?;
            endpoint.as_str().to_owned()
        }
    };
    let secret = match member("secret") {
        None => new_secret(),
        Some(given) => checked_secret(given)?,
    };
    let retry_policy = member("retry_policy").map(retry_policy).transpose()?.flatten();
    let max_inflight = member("max_inflight").map(max_inflight).transpose()?;
    let created = api
        .store
        .create_subscription(&NewSubscription {
            holder: caller.holder(),
            topic_pattern: pattern.as_str(),
            endpoint: &endpoint,
            secret: &secret,
            retry_policy: retry_policy.as_deref(),
            max_inflight,
            consumer_max: api.subscriptions_max,
            project_max: caller
                .app
                .as_ref()
                .and_then(|app| api.quotas.of(app.project.env).subscriptions),
            issued_at_s: caller.claims.issued_at_s,
        })
        .await?;
    let view = SubscriptionView {
        secret: Some(secret),
        ..SubscriptionView::from(created)
    };
    Ok(json(StatusCode::CREATED, &view))
}

fn not_allowed(fault: impl ToString) -> ApiError {
    ApiError::EndpointNotAllowed(fault.to_string().into())
}

/// The caller's subscriptions, oldest first.
pub(super) async fn list(State(api): State<Arc<Api>>, caller: Caller<ListSubscriptions>) -> Result<Response, ApiError> {
    let stored = api.store.subscriptions(&caller.holder()).await?;
    let subscriptions = stored.into_iter().map(SubscriptionView::from).collect();
    Ok(json(StatusCode::OK, &SubscriptionList { subscriptions }))
}

/// One of them.
pub(super) async fn read(
    State(api): State<Arc<Api>>,
    caller: Caller<ReadSubscription>,
    PathOf(id): PathOf<String>,
) -> Result<Response, ApiError> {
    let found = api.store.subscription(&caller.holder(), &known(&id)?).await?;
    Ok(json(
        StatusCode::OK,
        &SubscriptionView::from(found.ok_or_else(unknown)?),
    ))
}

/// Changes how it is delivered to. What it receives and where are what it is: for another pattern or endpoint another one
/// is made; switching and secrets have routes of their own.
pub(super) async fn update(
    State(api): State<Arc<Api>>,
    caller: Caller<UpdateSubscription>,
    PathOf(id): PathOf<String>,
    request: Request,
) -> Result<Response, ApiError> {
    let (id, body) = change_of_own(&api, &caller.holder(), &id, request).await?;
    let wrong = |detail: &'static str| ApiError::Unprocessable(detail.into());
    let members = Members::parse(&body).ok_or(wrong("the body must be an object of what is to change"))?;
    let mut policy = None;
    let mut inflight = None;
    for (name, value) in members.iter() {
        match name {
            "retry_policy" => policy = Some(retry_policy(value.get())?),
            "max_inflight" => inflight = Some(max_inflight_or_null(value.get())?),
            _ => {
                return Err(wrong(
                    "only max_inflight and retry_policy can be changed; other routes switch a subscription and rotate its secret",
                ));
            }
        }
    }
    let change = SubscriptionChange {
        retry_policy: policy.as_ref().map(Option::as_deref),
        max_inflight: inflight,
    };
    let updated = api.store.update_subscription(&caller.holder(), &id, &change).await?;
    let updated = updated.ok_or_else(unknown)?;
    (api.wake)(&[id]);
    Ok(json(StatusCode::OK, &SubscriptionView::from(updated)))
}

/// Resumes it: what is queued is due, and new events are queued again.
pub(super) async fn enable(
    State(api): State<Arc<Api>>,
    caller: Caller<ToggleSubscription>,
    PathOf(id): PathOf<String>,
    request: Request,
) -> Result<Response, ApiError> {
    caller.subscribing()?;
    let (id, switched) = switch(&api, &caller, &id, request, Switch::On).await?;
    (api.wake)(&[id]);
    Ok(switched)
}

/// Pauses it: nothing is sent, and events published meanwhile are not queued.
pub(super) async fn disable(
    State(api): State<Arc<Api>>,
    caller: Caller<ToggleSubscription>,
    PathOf(id): PathOf<String>,
    request: Request,
) -> Result<Response, ApiError> {
    let (_, switched) = switch(&api, &caller, &id, request, Switch::Off).await?;
    Ok(switched)
}

async fn switch(
    api: &Api,
    caller: &Caller<ToggleSubscription>,
    id: &str,
    request: Request,
    to: Switch,
) -> Result<(SubscriptionId, Response), ApiError> {
    read_json(request, BODY_LIMIT).await?;
    let id = known(id)?;
    let issued_at_s = caller.claims.issued_at_s;
    let switched = api.store.set_enabled(&caller.holder(), &id, to, issued_at_s).await?;
    let switched = switched.ok_or_else(unknown)?;
    Ok((id, json(StatusCode::OK, &SubscriptionView::from(switched))))
}

/// Puts a new secret in force; the former one signs beside it for the overlap.
pub(super) async fn rotate_secret(
    State(api): State<Arc<Api>>,
    caller: Caller<RotateSecret>,
    PathOf(id): PathOf<String>,
    request: Request,
) -> Result<Response, ApiError> {
    let (id, body) = change_of_own(&api, &caller.holder(), &id, request).await?;
    let members = Members::parse(&body);
    let member = |name: &str| Some(members.as_ref()?.get(name)?.get());
    let secret = match member("secret") {
        None => new_secret(),
        Some(given) => checked_secret(given)?,
    };
    let overlap_ms = overlap_ms(member("overlap_s"))?;
    let rotated = api
        .store
        .rotate_secret(&caller.holder(), &id, &secret, overlap_ms)
        .await?
        .ok_or_else(unknown)?;
    let view = SubscriptionView {
        secret: Some(secret),
        previous_secret_valid_until: Some(Millis(rotated.previous_secret_until)),
        ..SubscriptionView::from(rotated.subscription)
    };
    Ok(json(StatusCode::OK, &view))
}

/// The body that changes a subscription of the caller. Whose it is comes before what is wrong with the body.
async fn change_of_own(
    api: &Api,
    holder: &Holder<'_>,
    id: &str,
    request: Request,
) -> Result<(SubscriptionId, String), ApiError> {
    let body = read_members(request, BODY_LIMIT, ApiError::Unprocessable).await?;
    let id = known(id)?;
    api.store.subscription(holder, &id).await?.ok_or_else(unknown)?;
    Ok((id, body))
}

/// A JSON string's text.
fn text(raw: &str) -> Option<String> {
    serde_json::from_str(raw).ok()
}

fn checked_secret(raw: &str) -> Result<String, ApiError> {
    text(raw)
        .filter(|secret| {
            (32..=256).contains(&secret.chars().count()) && !secret.contains('\0') && !looks_sealed(secret)
        })
        .ok_or(ApiError::Unprocessable(
            "secret must be a string of 32..256 characters without NUL that does not begin with sealed:1:; leave it out for \
             a generated one"
                .into(),
        ))
}

/// A retry policy as it is stored; `None` follows the configuration.
fn retry_policy(raw: &str) -> Result<Option<String>, ApiError> {
    let policy = RetryPolicy::parse(raw).map_err(|detail| ApiError::Unprocessable(detail.into()))?;
    let stored = policy.map(|policy| serde_json::to_string(&policy)).transpose();
    stored.map_err(ApiError::internal)
}

fn max_inflight_or_null(raw: &str) -> Result<Option<i32>, ApiError> {
    match raw {
        "null" => Ok(None),
        given => max_inflight(given).map(Some),
    }
}

fn max_inflight(raw: &str) -> Result<i32, ApiError> {
    serde_json::from_str(raw)
        .ok()
        .filter(|count| (1..=INFLIGHT_MAX).contains(count))
        .ok_or(ApiError::Unprocessable(
            "max_inflight must be a whole number from 1 to 64; leave it out for the configured default".into(),
        ))
}

/// The overlap in milliseconds: a number of seconds, or one written as text, as callers of the service before send it.
fn overlap_ms(raw: Option<&str>) -> Result<i64, ApiError> {
    let seconds = match raw.map(serde_json::from_str::<Value>) {
        None => Some(OVERLAP_DEFAULT_S),
        Some(Ok(Value::Number(number))) => number.as_f64(),
        Some(Ok(Value::String(text))) => text.trim().parse().ok(),
        Some(_) => None,
    };
    #[expect(clippy::cast_possible_truncation, reason = "0..=604800 s in milliseconds is exact")]
    seconds
        .filter(|seconds| (0.0..=OVERLAP_MAX_S).contains(seconds))
        .map(|seconds| (seconds * 1000.0) as i64)
        .ok_or(ApiError::Unprocessable(
            "overlap_s must be a number of seconds from 0 to 604800".into(),
        ))
}

/// What does not look like an id cannot be stored.
fn known(id: &str) -> Result<SubscriptionId, ApiError> {
    SubscriptionId::parse(id).ok_or_else(unknown)
}

fn unknown() -> ApiError {
    ApiError::NotFound("no such subscription of this consumer".into())
}

/// Keeps an answer out of every cache.
pub(super) async fn uncached(mut response: Response) -> Response {
    let no_store = HeaderValue::from_static("no-store");
    response.headers_mut().insert(CACHE_CONTROL, no_store);
    response
}
