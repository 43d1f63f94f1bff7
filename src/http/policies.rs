//! `/api/v1/delivery-policies`: how event types are carried, for operators.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::domain::policy::{DEFAULT_POLICY, Policy};
use crate::domain::time::Millis;
use crate::domain::topic::TopicPattern;
use crate::problem::ApiError;
use crate::store::{StoredPolicy, View};

use super::answer::json;
use super::api::Api;
use super::body::read_json;
use super::caller::{Caller, ListPolicies, ReadPolicy, WritePolicy};
use super::query::{PathOf, Query};

/// Bytes of a body.
const BODY_LIMIT: usize = 64 * 1024;
/// Characters of an event type in a query.
const EVENT_TYPE_CHARS_MAX: usize = 200;

#[derive(Serialize)]
struct PolicyView {
    pattern: String,
    policy: Box<RawValue>,
    revision: i32,
    updated_at: Millis,
    updated_by: Option<String>,
    carrier_class: &'static str,
    /// Members that this version keeps and does not act on; only in the answer to a write.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

#[derive(Serialize)]
struct PolicyList {
    policies: Vec<PolicyView>,
}

#[derive(Serialize)]
struct Resolved<'a> {
    event_type: &'a str,
    pattern: Option<String>,
    revision: i32,
    policy: Box<RawValue>,
    carrier_class: &'static str,
}

/// Every policy, by pattern.
pub(super) async fn list(State(api): State<Arc<Api>>, _caller: Caller<ListPolicies>) -> Result<Response, ApiError> {
    let stored = api.store.policies().await?;
    let policies = stored
        .into_iter()
        .map(|policy| view(policy, Vec::new()))
        .collect::<Result<_, _>>()?;
    Ok(json(StatusCode::OK, &PolicyList { policies }))
}

/// What is in force for an event type.
pub(super) async fn resolve(
    State(api): State<Arc<Api>>,
    _caller: Caller<ReadPolicy>,
    query: Query,
) -> Result<Response, ApiError> {
    let (event_type, current) = asked(&api, &query).await?;
    let rule = current.policies.rule(event_type);
    let policy = current.policies.policy(event_type);
    let resolved = Resolved {
        event_type,
        pattern: rule.map(|rule| rule.pattern.as_str().to_owned()),
        revision: rule.map_or(0, |rule| rule.key.revision()),
        policy: raw(rule.map_or(DEFAULT_POLICY, |_| policy.document()))?,
        carrier_class: policy.carrier_class().label(),
    };
    Ok(json(StatusCode::OK, &resolved))
}

/// The event type that a query asks about, and what is in force now.
pub(super) async fn asked<'q>(api: &Api, query: &'q Query) -> Result<(&'q str, Arc<View>), ApiError> {
    let event_type = query
        .non_empty("event_type")?
        .filter(|event_type| event_type.chars().count() <= EVENT_TYPE_CHARS_MAX)
        .ok_or(ApiError::BadRequest(
            "event_type must be given, with at most 200 characters".into(),
        ))?;
    let version = api.store.version().await?;
    api.store.refresh_view(version).await?;
    Ok((event_type, api.store.view()))
}

/// Writes the policy of a pattern; in force for the next publish of every process.
pub(super) async fn put(
    State(api): State<Arc<Api>>,
    caller: Caller<WritePolicy>,
    PathOf(pattern): PathOf<String>,
    request: Request,
) -> Result<Response, ApiError> {
    let body = read_json(request, BODY_LIMIT).await?;
    let pattern = known(&pattern)?;
    let policy = Policy::parse(&body).map_err(|errors| {
        let faults: Vec<&str> = errors.iter().map(|error| error.message.as_str()).collect();
        ApiError::BadRequest(format!("the policy is not valid: {}", faults.join("; ")).into())
    })?;
    let warnings = policy
        .without_effect()
        .iter()
        .map(|member| format!("{member} is kept and has no effect in this version"))
        .collect();
    let written = api.store.put_policy(&pattern, &policy, &caller.consumer).await?;
    Ok(json(StatusCode::OK, &view(written, warnings)?))
}

/// Removes the policy of a pattern.
pub(super) async fn delete(
    State(api): State<Arc<Api>>,
    _caller: Caller<WritePolicy>,
    PathOf(pattern): PathOf<String>,
    request: Request,
) -> Result<Response, ApiError> {
    // What it says changes nothing; a body that cannot be read is a request that was not meant.
    read_json(request, BODY_LIMIT).await?;
    if api.store.delete_policy(&known(&pattern)?).await? {
        Ok(StatusCode::NO_CONTENT.into_response())
    } else {
        Err(ApiError::NotFound("no policy of this pattern".into()))
    }
}

fn known(pattern: &str) -> Result<TopicPattern, ApiError> {
    TopicPattern::parse(pattern).ok_or(ApiError::BadTopicBody(
        "the pattern must be [a-z0-9_] segments or *, joined by dots, at most 200 characters".into(),
    ))
}

fn view(stored: StoredPolicy, warnings: Vec<String>) -> Result<PolicyView, ApiError> {
    Ok(PolicyView {
        pattern: stored.pattern.as_str().to_owned(),
        policy: raw(stored.policy.document())?,
        revision: stored.revision,
        updated_at: stored.updated_at,
        updated_by: stored.updated_by,
        carrier_class: stored.policy.carrier_class().label(),
        warnings,
    })
}

fn raw(document: &str) -> Result<Box<RawValue>, ApiError> {
    RawValue::from_string(document.to_owned()).map_err(ApiError::internal)
}
