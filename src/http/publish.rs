//! `POST /api/v1/events`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Serialize;

use crate::domain::batch::{BATCH_MAX, BatchFault};
use crate::problem::{ApiError, FieldError, TokenFault};
use crate::publish::{ItemFault, PublishError, PublishRequest, Published, RequestFault, RequestTrace};

use super::answer::json;
use super::api::Api;
use super::body::read_json;
use super::caller::{Caller, Publish};
use super::context::RequestContext;

/// Bytes of a request: a batch of large payloads.
const BODY_LIMIT: usize = 2 * 1024 * 1024;

#[derive(Serialize)]
struct PublishedEvent {
    event_id: String,
    duplicate: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    cursor: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pruned: Option<bool>,
}

#[derive(Serialize)]
struct Results {
    results: Vec<PublishedEvent>,
}

/// Stores one envelope or a batch: 201 when anything was new, 200 when every event was known.
pub(super) async fn publish(
    State(api): State<Arc<Api>>,
    caller: Caller<Publish>,
    Extension(context): Extension<RequestContext>,
    request: Request,
) -> Result<Response, ApiError> {
    let body = read_json(request, BODY_LIMIT).await?;
    let trace = RequestTrace {
        id: context.trace_id(),
        given: context.given,
    };
    let request = match &caller.app {
        None => PublishRequest::of_service(&body, &caller.consumer, trace, &api.rules)?,
        Some(app) => PublishRequest::of_app(&body, app.clone(), trace, &api.rules)?,
    };
    drop(body);
    let batch = request.batch;
    let published = api.publisher.publish(request).await?;
    let stored = published.iter().any(|event| !event.duplicate);
    let status = if stored { StatusCode::CREATED } else { StatusCode::OK };
    let mut results: Vec<PublishedEvent> = published.into_iter().map(PublishedEvent::from).collect();
    match results.pop() {
        Some(only) if !batch => Ok(json(status, &only)),
        last => {
            results.extend(last);
            Ok(json(status, &Results { results }))
        }
    }
}

impl From<Published> for PublishedEvent {
    fn from(published: Published) -> Self {
        Self {
            event_id: published.event_id.to_string(),
            duplicate: published.duplicate,
            pruned: published.cursor.is_none().then_some(true),
            cursor: published.cursor.map(|cursor| cursor.to_string()),
        }
    }
}

impl From<RequestFault> for ApiError {
    fn from(fault: RequestFault) -> Self {
        match fault {
            RequestFault::Batch(fault) => match fault {
                BatchFault::Empty => Self::BadRequest(fault.to_string().into()),
                BatchFault::TooMany { .. } => Self::BatchTooLarge { limit: BATCH_MAX },
                BatchFault::Repeated => Self::InvalidEnvelope {
                    errors: vec![FieldError::new("/events", fault.to_string())],
                },
            },
            RequestFault::Item { index, fault } => {
                let error = Self::from(fault);
                match index {
                    Some(index) => error.at(index),
                    None => error,
                }
            }
        }
    }
}

impl From<ItemFault> for ApiError {
    fn from(fault: ItemFault) -> Self {
        match fault {
            ItemFault::Envelope(errors) => Self::InvalidEnvelope { errors },
            ItemFault::Repeated(_) => Self::InvalidEnvelope {
                errors: vec![FieldError::new("/event_id", fault.to_string())],
            },
            ItemFault::PayloadTooLarge { bytes, limit } => Self::PayloadTooLarge { size: bytes, limit },
            ItemFault::Redaction => Self::NotBuilt("redaction (payload.redacts)"),
            ItemFault::SourceMismatch { own, .. } => Self::SourceMismatch { expected: own },
            ItemFault::UnknownSource(source) => Self::UnknownSource(source),
            ItemFault::TypeNotAllowed { allowed, .. } => Self::TypeNotAllowed { allowed },
            ItemFault::ActorMismatch => Self::ActorMismatch,
        }
    }
}

impl From<PublishError> for ApiError {
    fn from(error: PublishError) -> Self {
        match error {
            PublishError::IdConflict { event_id } => Self::IdConflict {
                event_id: event_id.to_string(),
            },
            PublishError::Loop {
                event_id,
                hops,
                max_hops,
            } => Self::LoopDetected {
                event_id: event_id.to_string(),
                hops,
                max_hops,
            },
            PublishError::Revoked => Self::Token(TokenFault::Revoked),
            PublishError::Quota(fault) => Self::QuotaExceeded(fault),
            PublishError::Unavailable => Self::unavailable(error),
            PublishError::Internal => Self::internal(error),
        }
    }
}
