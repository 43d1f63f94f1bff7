//! Every refusal this service can answer with, and its RFC 9457 document. Nothing else chooses a status or a code.
//!
//! A handler returns `Result<_, ApiError>`. The error travels to the outermost layer inside the response, because only
//! that layer knows the ids of the request; it calls [`ApiError::document`] there.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::sync::Arc;

use axum::body::Body;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderValue, Response, StatusCode};
use axum::response::IntoResponse;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

pub use crate::domain::app::QuotaFault;
pub use crate::domain::envelope::FieldError;
pub use crate::identity::limits::Window as LimitWindow;

/// Human text. It may change between releases; programs read the code.
pub type Detail = Cow<'static, str>;

/// The cause of a 5xx: logged once where the document is written, never shown.
pub type Cause = Box<dyn StdError + Send + Sync>;

/// Why a bearer token was not accepted (401).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenFault {
    /// No bearer on a guarded route.
    Missing,
    /// Not three base64url parts of JSON.
    Malformed,
    /// No loaded key verifies it.
    BadSignature,
    /// `exp` has passed.
    Expired,
    /// `iss` is not the configured issuer.
    WrongIssuer,
    /// `aud` does not name this service.
    WrongAudience,
    /// A claim is absent, contradictory or of the wrong shape.
    InvalidClaims,
    /// A sandbox token where only production ones are accepted.
    SandboxRefused,
    /// The app was revoked after the token was issued.
    Revoked,
}

impl TokenFault {
    /// The stable code.
    pub fn code(self) -> &'static str {
        self.code_and_detail().0
    }

    fn code_and_detail(self) -> (&'static str, &'static str) {
        match self {
            Self::Missing => (
                "token.missing",
                "this route needs the header Authorization: Bearer <token>",
            ),
            Self::Malformed => (
                "token.malformed",
                "the bearer token is not a signed JWT; send it as it was issued",
            ),
            Self::BadSignature => (
                "token.bad_signature",
                "no key of the issuer verifies the token; ask for a new one",
            ),
            Self::Expired => ("token.expired", "the token has expired; ask for a new one"),
            Self::WrongIssuer => (
                "token.wrong_issuer",
                "the token comes from another issuer than this service trusts",
            ),
            Self::WrongAudience => (
                "token.wrong_audience",
                "the token's aud does not name this service; ask for one that is meant for it",
            ),
            Self::InvalidClaims => (
                "token.invalid_claims",
                "the token's claims do not describe a service or app this service accepts",
            ),
            Self::SandboxRefused => ("token.sandbox_refused", "a sandbox token is not accepted here"),
            Self::Revoked => ("token.revoked", "the app was revoked after this token was issued"),
        }
    }
}

/// How long a project waits whose quota of events a minute is used up, in seconds: until the whole window has passed.
const RATE_RETRY_AFTER_S: u64 = 60;

/// Why a realtime ticket was not accepted (401).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TicketFault {
    /// It is no ticket of the network for this service.
    Invalid,
    /// Its time is over.
    Expired,
    /// It has opened a stream.
    Used,
}

impl TicketFault {
    fn code_and_detail(self) -> (&'static str, &'static str) {
        match self {
            Self::Invalid => (
                "ticket.invalid",
                "the ticket is none that the network issued for this service; ask the network for a new one",
            ),
            Self::Expired => (
                "ticket.expired",
                "the ticket has expired; ask the network for a new one",
            ),
            Self::Used => (
                "ticket.used",
                "the ticket has opened a stream before; ask the network for a new one",
            ),
        }
    }
}

/// Every refusal of the routes for publishing, reading, checkpoints, subscriptions and deliveries, and of HTTP itself.
///
/// Codes and statuses are contract; the text is the `detail` of the document.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// 401 `token.*`.
    #[error("{}", .0.code_and_detail().1)]
    Token(TokenFault),
    /// 503 `token.unavailable`: no signing key has loaded yet.
    #[error("no signing key of the issuer has loaded yet; try again in {retry_after_s} s")]
    KeysUnavailable {
        /// Seconds to wait.
        retry_after_s: u64,
    },
    /// 403 `capability.denied`; the text names the capability or the kind of caller needed.
    #[error("{0}")]
    CapabilityDenied(Detail),
    /// 429 `rate_limited`, with a body of its own.
    #[error("{limit}: at most {max} per {} for each caller", .window.label())]
    RateLimited {
        /// Name of the limit, such as `events.event.publish`.
        limit: &'static str,
        /// Requests allowed in the window.
        max: u64,
        /// The exhausted window with the longest wait.
        window: LimitWindow,
        /// Whole seconds to its end, at least 1.
        retry_after_s: u64,
    },

    /// 400 `events.bad_json`: not a JSON object or array, not whole, or not in time.
    #[error("{0}")]
    BadJson(Detail),
    /// 400 `events.bad_request`: a query parameter or a member of a body; the text names it.
    #[error("{0}")]
    BadRequest(Detail),
    /// 431 `events.bad_request`: what comes before the body.
    #[error("a request has at most {headers} headers, and {bytes} bytes before its body")]
    HeadTooLarge {
        /// Bytes allowed, request line included.
        bytes: usize,
        /// Headers allowed.
        headers: usize,
    },
    /// 422 `events.bad_request`: a member of a subscription body; the text names it.
    #[error("{0}")]
    Unprocessable(Detail),
    /// 415 `events.unsupported_media_type`; the text says what is accepted.
    #[error("{0}")]
    UnsupportedMediaType(Detail),
    /// 413 `events.batch_too_large`: the body, before or after decompression.
    #[error("the request body is over {limit} bytes, the most that this route reads")]
    BodyTooLarge {
        /// Bytes allowed.
        limit: usize,
    },
    /// 404 `events.not_found`: unknown, or not the caller's to see.
    #[error("{0}")]
    NotFound(Detail),
    /// 501 `events.not_built`: a capability this release lacks.
    #[error("{0} is not available in this release")]
    NotBuilt(&'static str),
    /// 503 `events.unavailable`: the database or its pool is not available.
    #[error("the service cannot do this right now; try again in {retry_after_s} s")]
    Unavailable {
        /// Seconds to wait.
        retry_after_s: u64,
        /// What failed, for the log.
        #[source]
        cause: Cause,
    },
    /// 500 `events.internal`.
    #[error("the service failed to handle this request; its request_id finds the cause in the log")]
    Internal(#[source] Cause),

    /// 400 `events.bad_topic`: a pattern in a query.
    #[error("{0}")]
    BadTopic(Detail),
    /// 422 `events.bad_topic`: a pattern in a subscription or delivery policy.
    #[error("{0}")]
    BadTopicBody(Detail),

    /// 403 `events.topic_not_allowed`: a pattern outside an app's scope.
    #[error("an app's pattern begins with a literal segment; in the namespace of apps it begins with {own}")]
    TopicNotAllowed {
        /// What patterns for the project's own events begin with.
        own: String,
    },

    /// 413 `events.batch_too_large`: too many events.
    #[error("a batch holds at most {limit} events")]
    BatchTooLarge {
        /// Events allowed.
        limit: usize,
    },
    /// 422 `events.invalid_envelope`; one entry per fault, all of them.
    #[error("{}", summary("the event is not a valid envelope", .errors))]
    InvalidEnvelope {
        /// What is wrong, by JSON pointer.
        errors: Vec<FieldError>,
    },
    /// 413 `events.payload_too_large`.
    #[error("payload is {size} bytes; at most {limit} are allowed")]
    PayloadTooLarge {
        /// Bytes of this payload.
        size: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// 403 `events.source_mismatch`.
    #[error("source must be {expected}, the caller's own")]
    SourceMismatch {
        /// The only source this caller may name.
        expected: String,
    },
    /// 403 `events.unknown_source`.
    #[error("source {0} is not configured here; EVENTS_SOURCE_PREFIXES lists the sources")]
    UnknownSource(String),
    /// 403 `events.type_not_allowed`.
    #[error("event_type must start with one of: {}", .allowed.join(", "))]
    TypeNotAllowed {
        /// The prefixes this source may use.
        allowed: Vec<String>,
    },
    /// 403 `events.actor_mismatch`.
    #[error("actor must be the app itself, or the person that its token acts for")]
    ActorMismatch,
    /// 429 `events.quota_exceeded`.
    #[error("{0}")]
    QuotaExceeded(QuotaFault),
    /// 409 `events.id_conflict`; tells nothing about the stored event.
    #[error("event_id {event_id} is already taken; make a new one")]
    IdConflict {
        /// The id as sent.
        event_id: String,
    },
    /// 409 `events.loop_detected`.
    #[error("the trace has already made {hops} hops; at most {max_hops} are allowed")]
    LoopDetected {
        /// The refused event.
        event_id: String,
        /// Hops made before this one.
        hops: u32,
        /// Hops allowed.
        max_hops: u32,
    },

    /// 422 `events.endpoint_not_allowed`; the text says which rule.
    #[error("{0}")]
    EndpointNotAllowed(Detail),
    /// 409 `events.subscription_exists`.
    #[error("a subscription with this topic_pattern and endpoint exists; use it, or change one of the two")]
    SubscriptionExists {
        /// The one that exists.
        subscription_id: String,
    },
    /// 409 `events.subscription_limit`.
    #[error("a consumer may hold at most {limit} subscriptions")]
    SubscriptionLimit {
        /// Subscriptions allowed, `EVENTS_MAX_SUBSCRIPTIONS`.
        limit: u64,
    },

    /// 401 `token.invalid`: a bearer that is neither a service's token nor a person's session.
    #[error("the bearer token is neither a service token nor a session that holds; ask for a new one")]
    InvalidSession,
    /// 401 `ticket.*`.
    #[error("{}", .0.code_and_detail().1)]
    Ticket(TicketFault),
    /// 400 `realtime.bad_request`: a parameter of a stream; the text names it.
    #[error("{0}")]
    BadStream(Detail),
    /// 400 `realtime.too_many_topics`.
    #[error("topics may name at most {limit} patterns")]
    TooManyTopics {
        /// Patterns allowed, `REALTIME_MAX_TOPICS`.
        limit: usize,
    },
    /// 400 `realtime.bad_topic`.
    #[error("{0}")]
    BadStreamTopic(Detail),
    /// 503 `realtime.over_capacity`.
    #[error("as many streams are open as this process serves; try again in {retry_after_s} s")]
    StreamsFull {
        /// Seconds to wait.
        retry_after_s: u64,
    },

    /// The refusal of one event of a batch; the document carries its `index`.
    #[error("{error}")]
    Item {
        /// 0-based place in `events`.
        index: usize,
        /// What is wrong with it.
        error: Box<ApiError>,
    },
}

impl ApiError {
    /// An unexpected failure.
    pub fn internal(cause: impl Into<Cause>) -> Self {
        Self::Internal(cause.into())
    }

    /// "Not now": the database or its pool. Callers are asked to come back in 2 s.
    pub fn unavailable(cause: impl Into<Cause>) -> Self {
        Self::Unavailable {
            retry_after_s: 2,
            cause: cause.into(),
        }
    }

    /// Says which event of a batch the refusal is about.
    pub fn at(self, index: usize) -> Self {
        Self::Item {
            index,
            error: Box::new(self),
        }
    }

    /// The status and the stable code. A new variant has to choose both here.
    pub fn status_and_code(&self) -> (StatusCode, &'static str) {
        match self {
            Self::Token(fault) => (StatusCode::UNAUTHORIZED, fault.code()),
            Self::KeysUnavailable { .. } => (StatusCode::SERVICE_UNAVAILABLE, "token.unavailable"),
            Self::CapabilityDenied(_) => (StatusCode::FORBIDDEN, "capability.denied"),
            Self::RateLimited { .. } => (StatusCode::TOO_MANY_REQUESTS, "rate_limited"),
            Self::BadJson(_) => (StatusCode::BAD_REQUEST, "events.bad_json"),
            Self::BadRequest(_) => (StatusCode::BAD_REQUEST, "events.bad_request"),
            Self::HeadTooLarge { .. } => (StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "events.bad_request"),
            Self::Unprocessable(_) => (StatusCode::UNPROCESSABLE_ENTITY, "events.bad_request"),
            Self::UnsupportedMediaType(_) => (StatusCode::UNSUPPORTED_MEDIA_TYPE, "events.unsupported_media_type"),
            Self::BodyTooLarge { .. } | Self::BatchTooLarge { .. } => {
                (StatusCode::PAYLOAD_TOO_LARGE, "events.batch_too_large")
            }
            Self::NotFound(_) => (StatusCode::NOT_FOUND, "events.not_found"),
            Self::NotBuilt(_) => (StatusCode::NOT_IMPLEMENTED, "events.not_built"),
            Self::Unavailable { .. } => (StatusCode::SERVICE_UNAVAILABLE, "events.unavailable"),
            Self::Internal(_) => (StatusCode::INTERNAL_SERVER_ERROR, "events.internal"),
            Self::BadTopic(_) => (StatusCode::BAD_REQUEST, "events.bad_topic"),
            Self::BadTopicBody(_) => (StatusCode::UNPROCESSABLE_ENTITY, "events.bad_topic"),
            Self::TopicNotAllowed { .. } => (StatusCode::FORBIDDEN, "events.topic_not_allowed"),
            Self::ActorMismatch => (StatusCode::FORBIDDEN, "events.actor_mismatch"),
            Self::QuotaExceeded(_) => (StatusCode::TOO_MANY_REQUESTS, "events.quota_exceeded"),
            Self::InvalidEnvelope { .. } => (StatusCode::UNPROCESSABLE_ENTITY, "events.invalid_envelope"),
            Self::PayloadTooLarge { .. } => (StatusCode::PAYLOAD_TOO_LARGE, "events.payload_too_large"),
            Self::SourceMismatch { .. } => (StatusCode::FORBIDDEN, "events.source_mismatch"),
            Self::UnknownSource(_) => (StatusCode::FORBIDDEN, "events.unknown_source"),
            Self::TypeNotAllowed { .. } => (StatusCode::FORBIDDEN, "events.type_not_allowed"),
            Self::IdConflict { .. } => (StatusCode::CONFLICT, "events.id_conflict"),
            Self::LoopDetected { .. } => (StatusCode::CONFLICT, "events.loop_detected"),
            Self::EndpointNotAllowed(_) => (StatusCode::UNPROCESSABLE_ENTITY, "events.endpoint_not_allowed"),
            Self::SubscriptionExists { .. } => (StatusCode::CONFLICT, "events.subscription_exists"),
            Self::SubscriptionLimit { .. } => (StatusCode::CONFLICT, "events.subscription_limit"),
            Self::InvalidSession => (StatusCode::UNAUTHORIZED, "token.invalid"),
            Self::Ticket(fault) => (StatusCode::UNAUTHORIZED, fault.code_and_detail().0),
            Self::BadStream(_) => (StatusCode::BAD_REQUEST, "realtime.bad_request"),
            Self::TooManyTopics { .. } => (StatusCode::BAD_REQUEST, "realtime.too_many_topics"),
            Self::BadStreamTopic(_) => (StatusCode::BAD_REQUEST, "realtime.bad_topic"),
            Self::StreamsFull { .. } => (StatusCode::SERVICE_UNAVAILABLE, "realtime.over_capacity"),
            Self::Item { error, .. } => error.status_and_code(),
        }
    }

    /// The response for a request with these ids. A 5xx is logged here, with its cause, and nowhere else.
    pub fn document(&self, request_id: &str, trace_id: &str) -> Response<Body> {
        let (status, code) = self.status_and_code();
        if status.is_server_error() {
            self.log(request_id, trace_id, code);
        }
        let body = serde_json::to_vec(&Document {
            error: self,
            request_id,
            trace_id,
        })
        .expect("strings and numbers always serialise");
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(seconds) = self.retry_after_s() {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if matches!(self, Self::RateLimited { .. }) {
            headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        }
        response
    }

    fn retry_after_s(&self) -> Option<u64> {
        match self {
            Self::KeysUnavailable { retry_after_s }
            | Self::RateLimited { retry_after_s, .. }
            | Self::StreamsFull { retry_after_s }
            | Self::Unavailable { retry_after_s, .. } => Some(*retry_after_s),
            Self::QuotaExceeded(QuotaFault::PublishRate { .. }) => Some(RATE_RETRY_AFTER_S),
            Self::Item { error, .. } => error.retry_after_s(),
            _ => None,
        }
    }

    fn errors(&self) -> &[FieldError] {
        match self {
            Self::InvalidEnvelope { errors } => errors,
            Self::Item { error, .. } => error.errors(),
            _ => &[],
        }
    }

    fn log(&self, request_id: &str, trace_id: &str, code: &str) {
        let mut causes = String::new();
        let mut next = match self {
            Self::Item { error, .. } => error.source(),
            other => other.source(),
        };
        while let Some(cause) = next {
            if !causes.is_empty() {
                causes.push_str(": ");
            }
            causes.push_str(&cause.to_string());
            next = cause.source();
        }
        if causes.is_empty() {
            tracing::warn!(request_id, trace_id, code, "answered {code}: {self}");
        } else {
            tracing::error!(request_id, trace_id, code, "answered {code}: {causes}");
        }
    }

    /// Members after the common ones.
    fn extras<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        match self {
            Self::Item { index, error } => {
                error.extras(map)?;
                map.serialize_entry("index", index)
            }
            Self::BodyTooLarge { limit } | Self::BatchTooLarge { limit } | Self::PayloadTooLarge { limit, .. } => {
                map.serialize_entry("limit", limit)
            }
            Self::LoopDetected {
                event_id,
                hops,
                max_hops,
            } => {
                map.serialize_entry("event_id", event_id)?;
                map.serialize_entry("hops", hops)?;
                map.serialize_entry("max_hops", max_hops)
            }
            Self::SubscriptionExists { subscription_id } => map.serialize_entry("subscription_id", subscription_id),
            Self::SubscriptionLimit { limit } => map.serialize_entry("limit", limit),
            Self::QuotaExceeded(fault) => {
                map.serialize_entry("quota", fault.quota())?;
                map.serialize_entry("limit", &fault.limit())?;
                match fault {
                    QuotaFault::PublishRate { .. } => {
                        map.serialize_entry("window", "minute")?;
                        map.serialize_entry("retry_after", &RATE_RETRY_AFTER_S)
                    }
                    QuotaFault::RetainedBytes { used, .. } => map.serialize_entry("used", used),
                    QuotaFault::Subscriptions { .. } => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }
}

/// The first fault, so that a reader of `detail` alone learns what to change.
fn summary(what: &str, errors: &[FieldError]) -> String {
    match errors {
        [] => what.to_owned(),
        [only] => format!("{what}: {} {}", only.path, only.message),
        [first, rest @ ..] => format!("{what}: {} {} (and {} more)", first.path, first.message, rest.len()),
    }
}

/// The title of a status, as the contract words it.
fn title(status: StatusCode) -> &'static str {
    match status.as_u16() {
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        409 => "Conflict",
        413 => "Payload Too Large",
        422 => "Unprocessable Content",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        _ => "Error",
    }
}

struct Document<'a> {
    error: &'a ApiError,
    request_id: &'a str,
    trace_id: &'a str,
}

impl Serialize for Document<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (status, code) = self.error.status_and_code();
        let detail = self.error.to_string();
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("type", &format_args!("https://openvibe.network/problems/{code}"))?;
        if let ApiError::RateLimited { retry_after_s, .. } = self.error {
            map.serialize_entry("title", "Too many requests")?;
            map.serialize_entry("status", &status.as_u16())?;
            map.serialize_entry("code", code)?;
            map.serialize_entry("error", code)?;
            map.serialize_entry("detail", &detail)?;
            map.serialize_entry("retry_after_seconds", retry_after_s)?;
            return map.end();
        }
        map.serialize_entry("title", title(status))?;
        map.serialize_entry("status", &status.as_u16())?;
        map.serialize_entry("code", code)?;
        map.serialize_entry("detail", &detail)?;
        if !self.error.errors().is_empty() {
            map.serialize_entry("errors", self.error.errors())?;
        }
        map.serialize_entry("request_id", self.request_id)?;
        map.serialize_entry("trace_id", self.trace_id)?;
        map.serialize_entry("error", &detail)?;
        self.error.extras(&mut map)?;
        map.end()
    }
}

/// The error inside a response, until the outermost layer writes its document.
#[derive(Debug, Clone)]
pub struct Rejection(pub Arc<ApiError>);

impl IntoResponse for ApiError {
    fn into_response(self) -> Response<Body> {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = self.status_and_code().0;
        response.extensions_mut().insert(Rejection(Arc::new(self)));
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;

    async fn document(error: ApiError) -> (Response<()>, String) {
        let (parts, body) = error.document("req_1", "4bf92f3577b34da6a3ce929d0e0e4736").into_parts();
        let bytes = body.collect().await.expect("a body in memory").to_bytes();
        (
            Response::from_parts(parts, ()),
            String::from_utf8(bytes.to_vec()).expect("JSON is UTF-8"),
        )
    }

    #[tokio::test]
    async fn members_come_in_the_order_of_the_contract_and_extras_last() {
        let error = ApiError::InvalidEnvelope {
            errors: vec![FieldError::new("/", "must have source")],
        }
        .at(3);
        let (response, body) = document(error).await;
        assert_eq!(response.status(), 422);
        assert_eq!(response.headers()[CONTENT_TYPE], "application/problem+json");
        let detail = "the event is not a valid envelope: / must have source";
        let expected = format!(
            concat!(
                r#"{{"type":"https://openvibe.network/problems/events.invalid_envelope","title":"Unprocessable Content","#,
                r#""status":422,"code":"events.invalid_envelope","detail":"{0}","#,
                r#""errors":[{{"path":"/","message":"must have source"}}],"request_id":"req_1","#,
                r#""trace_id":"4bf92f3577b34da6a3ce929d0e0e4736","error":"{0}","index":3}}"#
            ),
            detail
        );
        assert_eq!(body, expected);
    }

    #[tokio::test]
    async fn the_per_actor_refusal_has_its_own_exact_body() {
        let error = ApiError::RateLimited {
            limit: "events.event.publish",
            max: 600,
            window: LimitWindow::Minute,
            retry_after_s: 7,
        };
        let (response, body) = document(error).await;
        assert_eq!(response.headers()[RETRY_AFTER], "7");
        assert_eq!(response.headers()[CACHE_CONTROL], "no-store");
        assert_eq!(
            body,
            concat!(
                r#"{"type":"https://openvibe.network/problems/rate_limited","title":"Too many requests","status":429,"#,
                r#""code":"rate_limited","error":"rate_limited","#,
                r#""detail":"events.event.publish: at most 600 per minute for each caller","retry_after_seconds":7}"#
            )
        );
    }

    #[tokio::test]
    async fn a_server_side_failure_tells_nothing_of_its_cause() {
        for error in [
            ApiError::internal("password=hunter2 at 10.0.0.1"),
            ApiError::unavailable("password=hunter2 at 10.0.0.1"),
        ] {
            let (response, body) = document(error).await;
            assert!(response.status().is_server_error());
            assert!(!body.contains("hunter2") && !body.contains("10.0.0.1"), "{body}");
        }
        let (response, _) = document(ApiError::unavailable("x")).await;
        assert_eq!(response.headers()[RETRY_AFTER], "2");
    }

    #[tokio::test]
    async fn what_a_refusal_carries_stands_at_the_top_level() {
        let cases = [
            (
                ApiError::SubscriptionExists {
                    subscription_id: "sub_1".into(),
                },
                r#""subscription_id":"sub_1"}"#,
            ),
            (
                ApiError::LoopDetected {
                    event_id: "evt_1".into(),
                    hops: 8,
                    max_hops: 8,
                }
                .at(0),
                r#""event_id":"evt_1","hops":8,"max_hops":8,"index":0}"#,
            ),
        ];
        for (error, end) in cases {
            let (_, body) = document(error).await;
            assert!(body.ends_with(end), "{body}");
        }
    }
}
