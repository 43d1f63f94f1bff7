//! What a route asks of its caller: a bearer, a token that holds, a first-party service, the capability; in this order.

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;

use super::{Capability, Claims, Principal, Sandbox, TokenError, Verifier, granted};

/// A caller a guard has let through.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// The whole `sub` claim, such as `svc:media`.
    pub subject: String,
    /// The service's name.
    pub slug: String,
    /// Everything its token says.
    pub claims: Claims,
}

/// Why a guard turned a caller away.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No bearer at all.
    #[error("no bearer token")]
    MissingToken,
    /// The token does not hold.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The token holds and does not permit this.
    #[error("{capability} not granted")]
    Denied {
        /// The id the route asks for.
        capability: &'static str,
    },
}

impl Refusal {
    /// The stable code of the refusal.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::MissingToken => "token.missing",
            Self::Token(error) => error.code(),
            Self::Denied { .. } => "capability.denied",
        }
    }
}

/// The token of an `Authorization` header that starts with exactly `Bearer `; `None` where there is none.
#[must_use]
pub fn bearer(headers: &HeaderMap) -> Option<&str> {
    let token = headers.get(AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ")?.trim();
    (!token.is_empty()).then_some(token)
}

/// Lets a first-party service through that holds `capability`.
///
/// # Errors
/// The first rule that fails: a bearer, the token itself (sandbox refused), a service's `sub`, the capability.
pub async fn first_party(
    verifier: &Verifier,
    headers: &HeaderMap,
    capability: Capability,
    now_s: i64,
) -> Result<Caller, Refusal> {
    let token = bearer(headers).ok_or(Refusal::MissingToken)?;
    let claims = verifier.verify(token, Sandbox::Refused, now_s).await?;
    let capability = capability.id();
    // An app is never judged on a first-party capability, whatever it holds; nor is a mod, a node or an agent.
    let Principal::Service { slug } = &claims.principal else {
        return Err(Refusal::Denied { capability });
    };
    if !granted(&claims.capabilities, capability) {
        return Err(Refusal::Denied { capability });
    }
    Ok(Caller { subject: claims.subject.clone(), slug: slug.clone(), claims })
}
