//! The development identity issuer: it gives any client a token, so it exists only beside a service that `dev` started.
//!
//! It listens on loopback and signs with a key of its own; no service trusts that key unless it is told to by name.

use std::fs;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aws_lc_rs::encoding::{AsDer, Pkcs8V1Der, PublicKeyX509Der};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::{KeyPair, KeySize, PublicKeyComponents};
use aws_lc_rs::signature::{KeyPair as _, RSA_PKCS1_SHA256};
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::from_fn;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::task::AbortOnDropHandle;
use url::form_urlencoded;

use crate::clock;
use crate::domain::ids::is_slug;
use crate::http::stream;

use super::cluster::private_file;
use super::server::serve;

mod cors;
mod people;

/// The audience of a token that names none.
const AUDIENCE: &str = "openvibe.events";

/// What a token may do that names no scope.
const CAPABILITIES: [&str; 4] = [
    "events.event.publish",
    "events.event.read",
    "events.subscription.manage",
    "events.delivery.admin",
];

/// How long a token holds, as the real issuer gives it, in seconds.
const LIFETIME_S: i64 = 300;

/// The longest lifetime that `lifetime_s` can ask for, in seconds.
const LIFETIME_S_MAX: i64 = 43_200;

const BAD_LIFETIME: &str = "lifetime_s must be 1 to 43200 seconds";

const KEY_ID: &str = "ov-network-1";

/// Why there is no issuer.
#[derive(Debug, thiserror::Error)]
pub enum IssuerError {
    /// The key file cannot be used.
    #[error("cannot use the signing key {}: {source}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The key file holds no key.
    #[error("{} holds no RSA key; delete it and a new one is made", .0.display())]
    NotAKey(PathBuf),
    /// The key cannot be made or written down.
    #[error("an RSA key cannot be made")]
    Generate,
    /// Its listener has no address.
    #[error("the issuer cannot listen: {0}")]
    Listen(#[source] io::Error),
}

/// A running issuer; it ends when it is dropped.
#[derive(Debug)]
pub(super) struct Issuer {
    signer: Arc<Signer>,
    _serving: AbortOnDropHandle<()>,
}

/// The key and the name it signs under.
#[derive(Debug)]
struct Signer {
    key: KeyPair,
    issuer: String,
    /// Where the tickets it signs are good.
    stream_url: String,
}

/// What a token says.
#[derive(Debug, PartialEq, Eq)]
struct Grant {
    client: String,
    audience: String,
    capabilities: Vec<String>,
    lifetime_s: i64,
}

/// A refusal of the token endpoint.
#[derive(Debug, PartialEq, Eq)]
struct Refusal {
    status: StatusCode,
    error: &'static str,
    description: String,
}

impl Issuer {
    /// Serves on `listener` with the key in `key_file`, made there when it is missing. Its tickets are for the service at
    /// the origin `service`.
    ///
    /// # Errors
    ///
    /// The key cannot be read, made or kept.
    pub(super) fn start(listener: TcpListener, key_file: &Path, service: &str) -> Result<Self, IssuerError> {
        let address = listener.local_addr().map_err(IssuerError::Listen)?;
        let signer = Arc::new(Signer {
            key: key(key_file)?,
            issuer: format!("http://{}", SocketAddr::from((Ipv4Addr::LOCALHOST, address.port()))),
            stream_url: format!("{service}{}", stream::PATH),
        });
        let routes = Router::new()
            .route("/", get(about))
            .route("/api/.well-known/jwks", get(jwks))
            .route("/oauth/token", post(token))
            .merge(people::routes())
            .layer(from_fn(cors::local_pages))
            .with_state(Arc::clone(&signer));
        Ok(Self {
            signer,
            _serving: serve(listener, routes),
        })
    }

    /// Its origin, which is also the `iss` of its tokens.
    pub(super) fn url(&self) -> &str {
        &self.signer.issuer
    }

    /// A token of the service `client` with the ordinary capabilities, valid as long as a token can be.
    pub(super) fn long_token(&self, client: &str) -> String {
        self.signer.token(&Grant {
            client: client.to_owned(),
            audience: AUDIENCE.to_owned(),
            capabilities: CAPABILITIES.map(str::to_owned).to_vec(),
            lifetime_s: LIFETIME_S_MAX,
        })
    }
}

impl Signer {
    /// The token of a service.
    fn token(&self, grant: &Grant) -> String {
        let now_s = clock::now().0 / 1000;
        self.sign(&json!({
            "iss": self.issuer,
            "sub": format!("svc:{}", grant.client),
            "actor_type": "service",
            "aud": [grant.audience],
            "cap": grant.capabilities,
            "ns": [],
            "iat": now_s,
            "exp": now_s + grant.lifetime_s,
            "jti": format!("tok_{}", hex::encode(rand::random::<[u8; 12]>())),
        }))
    }

    /// A signed token. Like the real issuer's it has no `kid` header, so a verifier must try every key.
    fn sign(&self, claims: &Value) -> String {
        let header = URL_SAFE_NO_PAD.encode(r#"{"alg":"RS256","typ":"JWT"}"#);
        let signed = format!("{header}.{}", URL_SAFE_NO_PAD.encode(claims.to_string()));
        let mut signature = vec![0; self.key.public_modulus_len()];
        self.key
            .sign(
                &RSA_PKCS1_SHA256,
                &SystemRandom::new(),
                signed.as_bytes(),
                &mut signature,
            )
            .expect("a buffer as long as the modulus holds the signature");
        format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
    }

    /// The public key in PEM.
    fn pem(&self) -> Result<String, IssuerError> {
        let der: PublicKeyX509Der = self.key.public_key().as_der().map_err(|_| IssuerError::Generate)?;
        let body = STANDARD.encode(der.as_ref());
        let lines: Vec<&str> = body
            .as_bytes()
            .chunks(64)
            .map(|line| std::str::from_utf8(line).expect("base64 is ASCII"))
            .collect();
        Ok(format!(
            "-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----\n",
            lines.join("\n")
        ))
    }

    fn key_set(&self) -> Result<Value, IssuerError> {
        let parts = PublicKeyComponents::<Vec<u8>>::from(self.key.public_key());
        Ok(json!({
            "public_key": self.pem()?,
            "algorithm": "RS256",
            "keys": [{
                "kty": "RSA",
                "n": URL_SAFE_NO_PAD.encode(parts.n),
                "e": URL_SAFE_NO_PAD.encode(parts.e),
                "use": "sig",
                "alg": "RS256",
                "kid": KEY_ID,
            }],
        }))
    }
}

/// The key of the file, or a new one that is kept there.
fn key(path: &Path) -> Result<KeyPair, IssuerError> {
    let failed = |source| IssuerError::File {
        path: path.to_owned(),
        source,
    };
    match fs::read(path) {
        Ok(der) => return KeyPair::from_pkcs8(&der).map_err(|_| IssuerError::NotAKey(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    let key = KeyPair::generate(KeySize::Rsa2048).map_err(|_| IssuerError::Generate)?;
    let der: Pkcs8V1Der = key.as_der().map_err(|_| IssuerError::Generate)?;
    // Written beside its place first: a run that is cut short must not leave half a key.
    let part = path.with_extension("part");
    private_file(&part)
        .and_then(|mut out| out.write_all(der.as_ref()))
        .and_then(|()| fs::rename(&part, path))
        .map_err(failed)?;
    Ok(key)
}

async fn about(State(signer): State<Arc<Signer>>) -> String {
    format!(
        "Development identity issuer of OpenVibe Events.\n\
         Any client id gets a token: POST {0}/oauth/token\n\
         Anybody gets the session of a person: POST {0}/person/token\n\
         A session gets tickets for live streams: POST {0}/api/v1/realtime/ticket\n",
        signer.issuer
    )
}

async fn jwks(State(signer): State<Arc<Signer>>) -> Response {
    match signer.key_set() {
        Ok(keys) => answer(StatusCode::OK, &keys),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn token(State(signer): State<Arc<Signer>>, headers: HeaderMap, body: Bytes) -> Response {
    match grant(&headers, &body) {
        Ok(grant) => answer(
            StatusCode::OK,
            &json!({
                "access_token": signer.token(&grant),
                "token_type": "Bearer",
                "expires_in": grant.lifetime_s,
                "scope": grant.capabilities.join(" "),
            }),
        ),
        Err(refusal) => answer(
            refusal.status,
            &json!({ "error": refusal.error, "error_description": refusal.description }),
        ),
    }
}

fn answer(status: StatusCode, body: &Value) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "application/json"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    (status, headers, body.to_string()).into_response()
}

/// Reads a token request. Beyond the real issuer's members it takes `lifetime_s`, so that lines pasted from the terminal
/// work for longer than five minutes; `client_secret` is not looked at.
fn grant(headers: &HeaderMap, body: &[u8]) -> Result<Grant, Refusal> {
    let refuse = |error, description: &str| Refusal {
        status: StatusCode::BAD_REQUEST,
        error,
        description: description.to_owned(),
    };
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    if !content_type.is_some_and(|value| value.starts_with("application/x-www-form-urlencoded")) {
        return Err(refuse(
            "invalid_request",
            "the body must be application/x-www-form-urlencoded",
        ));
    }
    let form = Form::read(body);
    let member = |name| form.member(name);
    if member("grant_type") != Some("client_credentials") {
        return Err(refuse(
            "unsupported_grant_type",
            "grant_type must be client_credentials",
        ));
    }
    let client = member("client_id").unwrap_or_default();
    if !is_slug(client) {
        return Err(Refusal {
            status: StatusCode::UNAUTHORIZED,
            ..refuse(
                "invalid_client",
                "client_id must be 2 to 40 characters: a lower-case letter, then a-z, 0-9 and hyphens",
            )
        });
    }
    let audience = member("audience").unwrap_or(AUDIENCE);
    if !audience
        .bytes()
        .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'-'))
    {
        return Err(refuse(
            "invalid_target",
            "audience must consist of a-z, 0-9, dots and hyphens",
        ));
    }
    let capabilities: Vec<String> = match member("scope") {
        Some(scope) => scope.split_ascii_whitespace().map(str::to_owned).collect(),
        None => CAPABILITIES.map(str::to_owned).to_vec(),
    };
    if capabilities.is_empty() || !capabilities.iter().all(|capability| is_capability(capability)) {
        return Err(refuse(
            "invalid_scope",
            "scope must be capability ids separated by spaces",
        ));
    }
    let lifetime_s = form
        .lifetime_s(LIFETIME_S)
        .ok_or_else(|| refuse("invalid_request", BAD_LIFETIME))?;
    Ok(Grant {
        client: client.to_owned(),
        audience: audience.to_owned(),
        capabilities,
        lifetime_s,
    })
}

/// What a request was sent with.
struct Form(Vec<(String, String)>);

impl Form {
    fn read(body: &[u8]) -> Self {
        Self(form_urlencoded::parse(body).into_owned().collect())
    }

    /// A member, where it says anything.
    fn member(&self, name: &str) -> Option<&str> {
        let found = self.0.iter().find(|(key, value)| key == name && !value.is_empty());
        found.map(|(_, value)| value.as_str())
    }

    /// For how long a token is to hold; `None` where it says something else than that.
    fn lifetime_s(&self, usual: i64) -> Option<i64> {
        match self.member("lifetime_s").map(str::parse::<i64>) {
            None => Some(usual),
            Some(Ok(seconds)) if (1..=LIFETIME_S_MAX).contains(&seconds) => Some(seconds),
            Some(_) => None,
        }
    }
}

/// Whether the text could be a capability id, or a family of them such as `events.*`.
fn is_capability(text: &str) -> bool {
    let mut segments = text.split('.');
    let first = segments.next().unwrap_or_default();
    let is_word = |segment: &str, also: &[u8]| {
        !segment.is_empty()
            && segment
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || also.contains(&b))
    };
    text.contains('.')
        && first.starts_with(|c: char| c.is_ascii_lowercase())
        && is_word(first, b"_")
        && segments.all(|segment| is_word(segment, b"_*"))
}

#[cfg(test)]
mod tests;
