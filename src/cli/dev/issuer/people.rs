//! People of the development issuer: anybody gets the session of anybody, and a session gets tickets for live streams.

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use axum::routing::post;
use serde_json::{Value, json};
use ulid::Ulid;

use super::{AUDIENCE, BAD_LIFETIME, Form, IssuerError, LIFETIME_S_MAX, Signer, answer};
use crate::clock;
use crate::domain::ids::is_prefixed_id;
use crate::domain::time::Millis;
use crate::http::stream::session_cookie;
use crate::identity::{Jws, Keys, Person, Sessions, bearer};

/// Whom the real issuer makes sessions for: this service is not among them.
const SESSION_AUDIENCES: [&str; 5] = [
    "openvibe.live",
    "openvibe.tools",
    "openvibe.games",
    "openvibe.media",
    "openvibe.network",
];

/// How long a ticket can be used, as the real issuer gives it, in seconds.
const TICKET_LIFETIME_S: i64 = 120;

/// What a page follows that asks for a ticket.
const TICKET_TOPICS: [&str; 1] = ["network.notification.*"];

/// The subject of a session from before people had canonical ids.
const NO_SUBJECT: &str = "none";

/// Why there is no ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NoTicket {
    /// Nobody asks.
    NoSession,
    /// The session does not hold.
    BadSession,
    /// A guest asks.
    Guest,
    /// The session does not say whose it is.
    NoSubject,
}

impl NoTicket {
    fn answer(self) -> Response {
        let (status, code, error) = match self {
            Self::NoSession => (StatusCode::UNAUTHORIZED, "token.missing", "no session"),
            Self::BadSession => (StatusCode::UNAUTHORIZED, "token.invalid", "not a session that holds"),
            Self::Guest => (StatusCode::FORBIDDEN, "realtime.guest", "guests get no tickets"),
            Self::NoSubject => (
                StatusCode::SERVICE_UNAVAILABLE,
                "realtime.no_subject",
                "the session has no canonical subject",
            ),
        };
        answer(status, &json!({ "code": code, "error": error }))
    }
}

pub(super) fn routes() -> Router<Arc<Signer>> {
    Router::new()
        .route("/person/token", post(session))
        .route("/api/v1/realtime/ticket", post(ticket))
}

/// The session of `subject` (`usr_…`, `gst_…`, `none`), or of somebody new.
async fn session(State(signer): State<Arc<Signer>>, body: Bytes) -> Response {
    let refuse = |description: &str| {
        let body = json!({ "error": "invalid_request", "error_description": description });
        answer(StatusCode::BAD_REQUEST, &body)
    };
    let form = Form::read(&body);
    let subject = form
        .member("subject")
        .map_or_else(|| format!("usr_{}", Ulid::generate()), str::to_owned);
    let is_known = subject == NO_SUBJECT || ["usr", "gst"].iter().any(|kind| is_prefixed_id(kind, &subject));
    if !is_known {
        return refuse("subject must be usr_ or gst_ and a ULID, or none");
    }
    let Some(lifetime_s) = form.lifetime_s(LIFETIME_S_MAX) else {
        return refuse(BAD_LIFETIME);
    };
    let token = signer.session(&subject, lifetime_s);
    answer(
        StatusCode::OK,
        &json!({ "access_token": token, "token_type": "Bearer", "expires_in": lifetime_s, "subject": subject }),
    )
}

async fn ticket(State(signer): State<Arc<Signer>>, headers: HeaderMap) -> Response {
    match signer.ticket(&headers).await {
        Ok(Ok(result)) => answer(StatusCode::OK, &result),
        Ok(Err(refusal)) => refusal.answer(),
        Err(error) => answer(
            StatusCode::INTERNAL_SERVER_ERROR,
            &json!({ "code": "internal", "error": error.to_string() }),
        ),
    }
}

impl Signer {
    fn session(&self, subject: &str, lifetime_s: i64) -> String {
        let now_s = clock::now().0 / 1000;
        let account = rand::random_range(1..100_000).to_string();
        let mut claims = json!({
            "iss": self.issuer,
            "sub": account,
            "id": account,
            "username": "dev",
            "display_name": "Dev",
            "role": "user",
            "aud": SESSION_AUDIENCES,
            "iat": now_s,
            "exp": now_s + lifetime_s,
        });
        if subject != NO_SUBJECT {
            claims["subject_id"] = subject.into();
        }
        self.sign(&claims)
    }

    /// A ticket for whoever's session the request carries.
    async fn ticket(&self, headers: &HeaderMap) -> Result<Result<Value, NoTicket>, IssuerError> {
        let session = bearer(headers).map(str::to_owned).or_else(|| session_cookie(headers));
        let Some(session) = session else {
            return Ok(Err(NoTicket::NoSession));
        };
        let now_s = clock::now().0 / 1000;
        let sessions = Sessions {
            keys: Keys::pinned(&self.pem()?).map_err(|_| IssuerError::Generate)?,
            issuer: self.issuer.clone(),
            audiences: None,
        };
        let subject = match sessions.person(&session, now_s).await {
            Ok(Some(Person { subject, .. })) => subject,
            _ => return Ok(Err(NoTicket::BadSession)),
        };
        let Some(subject) = subject else {
            return Ok(Err(without_person(&session)));
        };
        let ends_s = now_s + TICKET_LIFETIME_S;
        let ticket = self.sign(&json!({
            "iss": format!("{}/realtime", self.issuer),
            "sub": subject,
            "aud": [AUDIENCE],
            "typ": "realtime",
            "purpose": "realtime",
            "iat": now_s,
            "exp": ends_s,
            "jti": format!("rtk_{}", hex::encode(rand::random::<[u8; 12]>())),
        }));
        Ok(Ok(json!({
            "ticket": ticket,
            "expires_at": Millis(ends_s * 1000).to_iso(),
            "expires_in": TICKET_LIFETIME_S,
            "stream_url": self.stream_url,
            "topics": TICKET_TOPICS,
            "subject": subject,
        })))
    }
}

/// Why a session that holds names no person.
fn without_person(session: &str) -> NoTicket {
    let parsed = Jws::parse(session).ok();
    let subject = parsed
        .as_ref()
        .and_then(|session| session.claims().get("subject_id")?.as_str());
    match subject.is_some_and(|subject| is_prefixed_id("gst", subject)) {
        true => NoTicket::Guest,
        false => NoTicket::NoSubject,
    }
}
