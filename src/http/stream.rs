//! `GET /realtime/stream`: who asks, for what, from where; in the order in which refusals are promised.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{CACHE_CONTROL, CONNECTION, CONTENT_TYPE, COOKIE};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::middleware::from_fn_with_state;
use axum::response::Response;
use axum::routing::get;

use crate::clock;
use crate::domain::cursor::Cursor;
use crate::domain::time::Millis;
use crate::domain::topic::TopicPattern;
use crate::identity::{
    self, Capability, Person, Principal, Sandbox, Sessions, Ticket, TicketError, Tickets, TokenError, Unavailable,
    Verifier, granted,
};
use crate::problem::{ApiError, TicketFault, TokenFault};
use crate::realtime::{self, Realtime, Viewer};
use crate::store::{SharedStore, answered};

use super::cors::{self, Origins};
use super::fallback;
use super::query::{Query, percent_decoded};
use super::server::Follows;

/// Where streams are opened.
pub const PATH: &str = "/realtime/stream";

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
/// The cookie that carries a person's session.
const SESSION_COOKIE: &str = "ov_token";
/// What a browser is asked to wait when all streams are taken.
const FULL_RETRY_S: u64 = 10;
/// What anybody is asked to wait for the network's keys.
const KEYS_RETRY_S: u64 = 5;

/// What streams are opened with; the composition root builds it.
pub struct Streams {
    /// The streams.
    pub realtime: Realtime,
    /// Where tickets are used up.
    pub store: SharedStore,
    /// Judges the tokens of services.
    pub verifier: Verifier,
    /// Judges the sessions of people.
    pub sessions: Sessions,
    /// Judges tickets.
    pub tickets: Tickets,
    /// Topics one stream may name.
    pub topics_max: usize,
    /// Whether nobody in particular may open one.
    pub allow_anonymous: bool,
}

/// The route, open to the pages of `origins`.
pub fn routes(streams: Arc<Streams>, origins: Origins) -> Router {
    // A request for the head alone would use up a ticket for nothing.
    let route = get(open)
        .head(fallback::not_found)
        .options(async || StatusCode::NO_CONTENT)
        // Named here, so that refusals of other methods are told to pages as well.
        .fallback(fallback::not_found);
    Router::new()
        .route(PATH, route)
        .with_state(streams)
        .layer(from_fn_with_state(Arc::new(origins), cors::shared))
}

async fn open(State(streams): State<Arc<Streams>>, request: Request) -> Result<Response, ApiError> {
    let (parts, _body) = request.into_parts();
    let query = Query::parse(parts.uri.query().unwrap_or_default()).map_err(of_a_stream)?;
    let topics = streams.topics(&query)?;
    let position = position(&parts.headers, &query)?;
    let (viewer, ticket) = streams.viewer(&parts.headers, &query).await?;
    if viewer == Viewer::Anonymous && !streams.allow_anonymous {
        return Err(ApiError::Token(TokenFault::Missing));
    }
    let slot = streams.realtime.reserve().ok_or(ApiError::StreamsFull {
        retry_after_s: FULL_RETRY_S,
    })?;
    let request = realtime::Request {
        viewer,
        topics,
        position,
    };
    let opening = streams.realtime.begin(slot, request).await?;
    // Last: whatever was refused before leaves the ticket good for another try.
    if let Some(ticket) = ticket
        && !answered(
            streams
                .store
                .spend_ticket(&ticket.id, Millis(ticket.expires_at_s * 1000)),
        )
        .await?
    {
        return Err(ApiError::Ticket(TicketFault::Used));
    }
    let mut response = Response::new(Body::empty());
    response.extensions_mut().insert(Follows::new(opening.open()));
    let headers = response.headers_mut();
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache, no-transform"));
    headers.insert(CONNECTION, HeaderValue::from_static("keep-alive"));
    headers.insert(
        HeaderName::from_static("x-accel-buffering"),
        HeaderValue::from_static("no"),
    );
    Ok(response)
}

impl Streams {
    fn topics(&self, query: &Query) -> Result<Vec<TopicPattern>, ApiError> {
        let list = query.one("topics").map_err(of_a_stream)?.unwrap_or_default();
        let mut names: Vec<&str> = Vec::new();
        for name in list.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            if !names.contains(&name) {
                names.push(name);
            }
            if names.len() > self.topics_max {
                return Err(ApiError::TooManyTopics { limit: self.topics_max });
            }
        }
        if names.is_empty() {
            return Err(ApiError::BadStream(
                "topics must name what to follow: ?topics=<pattern>[,<pattern>…]".into(),
            ));
        }
        let topics: Option<Vec<TopicPattern>> = names.into_iter().map(TopicPattern::parse).collect();
        topics.ok_or(ApiError::BadStreamTopic(
            "topics must be comma-separated patterns of [a-z0-9_] segments or *, at most 200 characters each".into(),
        ))
    }

    /// Who asks, and the ticket that says so where it was one. Where there is a ticket nothing else counts, and where
    /// there is a bearer the cookie does not.
    async fn viewer(&self, headers: &HeaderMap, query: &Query) -> Result<(Viewer, Option<Ticket>), ApiError> {
        let now_s = clock::now().0.div_euclid(1000);
        if query.has("ticket") {
            let invalid = || ApiError::Ticket(TicketFault::Invalid);
            let text = query.one("ticket").map_err(|_twice| invalid())?.unwrap_or_default();
            let ticket = self.tickets.read(text, now_s).await?;
            let viewer = Viewer::Person(Person {
                subject: Some(ticket.subject.clone()),
                issued_at_ms: ticket.issued_at_s * 1000,
                ends_at_ms: None,
            });
            if self.realtime.is_withdrawn(&viewer).await? {
                return Err(invalid());
            }
            return Ok((viewer, Some(ticket)));
        }
        if let Some(token) = identity::bearer(headers) {
            return Ok((self.bearer(token, now_s).await?, None));
        }
        if let Some(token) = session_cookie(headers)
            && let Some(person) = self.sessions.person(&token, now_s).await?
        {
            let viewer = Viewer::Person(person);
            if !self.realtime.is_withdrawn(&viewer).await? {
                return Ok((viewer, None));
            }
        }
        Ok((Viewer::Anonymous, None))
    }

    async fn bearer(&self, token: &str, now_s: i64) -> Result<Viewer, ApiError> {
        let capability = Capability::EventRead.id();
        match self.verifier.verify(token, Sandbox::Refused, now_s).await {
            Ok(claims) => match claims.principal {
                Principal::Service { .. } if granted(&claims.capabilities, capability) => Ok(Viewer::Service),
                _ => Err(identity::Refusal::Denied { capability }.into()),
            },
            Err(TokenError::Unavailable(unavailable)) => Err(unavailable.into()),
            Err(_no_service) => {
                let viewer = self.sessions.person(token, now_s).await?.map(Viewer::Person);
                let viewer = viewer.ok_or(ApiError::InvalidSession)?;
                if self.realtime.is_withdrawn(&viewer).await? {
                    return Err(ApiError::InvalidSession);
                }
                Ok(viewer)
            }
        }
    }
}

/// The last event that the client has had. What is no cursor is no position: the stream begins at the head.
fn position(headers: &HeaderMap, query: &Query) -> Result<Option<Cursor>, ApiError> {
    let given = query.one("last_event_id").map_err(of_a_stream)?.unwrap_or_default();
    let mut named = headers.get_all(LAST_EVENT_ID).into_iter();
    let header = named.next().filter(|value| !value.is_empty());
    if named.next().is_some() {
        return Err(ApiError::BadStream("Last-Event-ID must be sent once".into()));
    }
    let text = header.map_or(given, |value| value.to_str().unwrap_or_default());
    Ok(text.trim().parse().ok())
}

/// The session that a browser sent along.
pub(crate) fn session_cookie(headers: &HeaderMap) -> Option<String> {
    let pairs = headers
        .get_all(COOKIE)
        .into_iter()
        .filter_map(|header| header.to_str().ok());
    let mut pairs = pairs
        .flat_map(|header| header.split(';'))
        .filter_map(|pair| pair.trim().split_once('='));
    let (_, value) = pairs.find(|(name, _)| *name == SESSION_COOKIE)?;
    percent_decoded(value)
}

/// A bad parameter of a stream has a code of its own.
fn of_a_stream(error: ApiError) -> ApiError {
    match error {
        ApiError::BadRequest(detail) => ApiError::BadStream(detail),
        other => other,
    }
}

impl From<TicketError> for ApiError {
    fn from(error: TicketError) -> Self {
        match error {
            TicketError::Unavailable(unavailable) => unavailable.into(),
            TicketError::Invalid => Self::Ticket(TicketFault::Invalid),
            TicketError::Expired => Self::Ticket(TicketFault::Expired),
        }
    }
}

impl From<Unavailable> for ApiError {
    fn from(Unavailable: Unavailable) -> Self {
        Self::KeysUnavailable {
            retry_after_s: KEYS_RETRY_S,
        }
    }
}
