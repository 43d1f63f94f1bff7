//! Judging a service or app token: every check, in the one order that callers rely on.

use serde_json::Value;

use super::claims::{self, Claims, Env};
use super::{Jws, Keys, Unavailable};

const TOKEN_BYTES_MAX: usize = 16 * 1024;
/// How far the network's clock and ours may disagree.
const LEEWAY_S: f64 = 30.0;

/// Why a token is refused. The text is safe to show: it repeats nothing of the token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// There is no key to judge by; the token may be fine.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// Not an RS256 token that can be taken apart.
    #[error("{0}")]
    Malformed(&'static str),
    /// No key in force made the signature.
    #[error("signature does not verify")]
    BadSignature,
    /// Outside the time it is good for.
    #[error("{0}")]
    Expired(&'static str),
    /// Issued by someone else.
    #[error("issuer not accepted")]
    WrongIssuer,
    /// Meant for another service.
    #[error("not for {0}")]
    WrongAudience(String),
    /// A claim breaks its rule; names each.
    #[error("{0}")]
    InvalidClaims(String),
    /// A sandbox token where only production is served.
    #[error("sandbox tokens are not accepted here")]
    SandboxRefused,
}

impl TokenError {
    /// The stable code of the refusal.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Unavailable(_) => "token.unavailable",
            Self::Malformed(_) => "token.malformed",
            Self::BadSignature => "token.bad_signature",
            Self::Expired(_) => "token.expired",
            Self::WrongIssuer => "token.wrong_issuer",
            Self::WrongAudience(_) => "token.wrong_audience",
            Self::InvalidClaims(_) => "token.invalid_claims",
            Self::SandboxRefused => "token.sandbox_refused",
        }
    }
}

/// Whether a route serves sandbox tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sandbox {
    /// It does.
    Accepted,
    /// It does not.
    Refused,
}

/// Judges tokens for one issuer and one audience.
#[derive(Debug, Clone)]
pub struct Verifier {
    /// The keys that may have signed.
    pub keys: Keys,
    /// The only issuer believed, compared byte for byte.
    pub issuer: String,
    /// The audience a token must name.
    pub audience: String,
}

impl Verifier {
    /// The claims of `token`, if it holds at `now_s` (seconds since 1970).
    ///
    /// # Errors
    /// The first check that fails, in the order of [`TokenError`]'s variants but for one: a token too long to look at is
    /// malformed whether or not there is a key.
    pub async fn verify(&self, token: &str, sandbox: Sandbox, now_s: i64) -> Result<Claims, TokenError> {
        if token.len() > TOKEN_BYTES_MAX {
            return Err(TokenError::Malformed("too long"));
        }
        let token = match Jws::parse(token) {
            Ok(token) => token,
            Err(reason) => {
                // Without a key nothing is judged, not even this; and a token this broken is no reason to refetch.
                self.keys.keys_for(None).await?;
                return Err(TokenError::Malformed(reason));
            }
        };
        if !self.keys.verify(&token).await? {
            return Err(TokenError::BadSignature);
        }
        let claims = token.claims();
        in_time(claims.get("exp"), claims.get("iat"), now_s)?;
        if claims.get("iss").and_then(Value::as_str) != Some(self.issuer.as_str()) {
            return Err(TokenError::WrongIssuer);
        }
        if !names(claims.get("aud"), &self.audience) {
            return Err(TokenError::WrongAudience(self.audience.clone()));
        }
        let claims = claims::read(claims).map_err(TokenError::InvalidClaims)?;
        if claims.env == Env::Sandbox && sandbox == Sandbox::Refused {
            return Err(TokenError::SandboxRefused);
        }
        Ok(claims)
    }
}

/// Both bounds are inclusive, and any number counts here: that it must be whole is a rule of the claims, checked later.
fn in_time(exp: Option<&Value>, iat: Option<&Value>, now_s: i64) -> Result<(), TokenError> {
    let now_s = now_s as f64;
    if !exp.and_then(Value::as_f64).is_some_and(|exp| exp + LEEWAY_S >= now_s) {
        return Err(TokenError::Expired("expired"));
    }
    if iat.and_then(Value::as_f64).is_some_and(|iat| iat - LEEWAY_S > now_s) {
        return Err(TokenError::Expired("issued in the future"));
    }
    Ok(())
}

/// A bare string passes here and fails as a claim, so that its refusal names the right fault.
fn names(aud: Option<&Value>, audience: &str) -> bool {
    match aud {
        Some(Value::String(one)) => one == audience,
        Some(Value::Array(many)) => many.iter().any(|one| one.as_str() == Some(audience)),
        _ => false,
    }
}
