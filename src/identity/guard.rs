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
    let token = std::str::from_utf8(headers.get(AUTHORIZATION)?.as_bytes())
        .ok()?
        .strip_prefix("Bearer ")?
        .trim();
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
    Ok(Caller {
        subject: claims.subject.clone(),
        slug: slug.clone(),
        claims,
    })
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;
    use serde_json::{Value, json};

    use super::*;
    use crate::identity::testing::{self, NOW_S, app_claims, key, service_claims, verifier};

    fn headers(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(
            AUTHORIZATION,
            HeaderValue::from_bytes(value.as_bytes()).expect("a header value"),
        )])
    }

    async fn judged(claims: &Value) -> Result<Caller, Refusal> {
        let sent = headers(&format!("Bearer {}", key("k1").token(claims)));
        first_party(&verifier(), &sent, Capability::EventPublish, NOW_S).await
    }

    #[test]
    fn a_bearer_is_spelt_exactly() {
        for (value, token) in [
            ("Bearer abc", Some("abc")),
            ("Bearer   abc \t", Some("abc")),
            ("bearer abc", None),
            ("BEARER abc", None),
            ("Bearer\tabc", None),
            (" Bearer abc", None),
            ("Bearer", None),
            ("Bearer ", None),
            ("Basic abc", None),
            ("Bearer \u{e9}", Some("\u{e9}")),
        ] {
            assert_eq!(bearer(&headers(value)), token, "{value:?}");
        }
        assert_eq!(bearer(&HeaderMap::new()), None);
    }

    #[tokio::test]
    async fn a_service_with_the_capability_passes() {
        let caller = judged(&service_claims()).await.expect("let through");
        assert_eq!((caller.subject.as_str(), caller.slug.as_str()), ("svc:media", "media"));
    }

    #[tokio::test]
    async fn no_bearer_is_told_apart_from_a_bad_one() {
        let none = first_party(&verifier(), &HeaderMap::new(), Capability::EventRead, NOW_S).await;
        assert_eq!(none.expect_err("refused").code(), "token.missing");
        let bad = first_party(&verifier(), &headers("Bearer x"), Capability::EventRead, NOW_S).await;
        assert_eq!(bad.expect_err("refused").code(), "token.malformed");
    }

    #[tokio::test]
    async fn a_service_without_the_capability_is_denied() {
        let claims = testing::with(
            service_claims(),
            json!({"cap": ["events.event.read", "events.event.pub*"]}),
        );
        assert_eq!(
            judged(&claims).await,
            Err(Refusal::Denied {
                capability: "events.event.publish"
            })
        );
    }

    #[tokio::test]
    async fn an_app_is_never_judged_on_a_first_party_capability() {
        let claims = testing::with(app_claims(), json!({"cap": ["events.*"], "env": "production"}));
        assert_eq!(
            judged(&claims).await,
            Err(Refusal::Denied {
                capability: "events.event.publish"
            })
        );
        let claims = testing::with(claims, json!({"env": "sandbox"}));
        assert_eq!(judged(&claims).await, Err(Refusal::Token(TokenError::SandboxRefused)));
    }

    #[tokio::test]
    async fn mods_nodes_and_agents_are_denied_whatever_they_hold() {
        for (actor, sub) in [("mod", "mod:mod_"), ("node", "node:nod_"), ("agent", "agent:agt_")] {
            let sub = format!("{sub}{}", testing::ULID);
            let claims = testing::with(
                app_claims(),
                json!({"sub": sub, "actor_type": actor, "env": "production"}),
            );
            let claims = testing::with(claims, json!({"cap": ["events.event.publish"]}));
            assert_eq!(
                judged(&claims).await,
                Err(Refusal::Denied {
                    capability: "events.event.publish"
                }),
                "{actor}"
            );
        }
    }

    #[tokio::test]
    async fn a_fault_of_the_token_is_reported_before_a_missing_capability() {
        let claims = testing::with(service_claims(), json!({"cap": [], "iss": "https://elsewhere.example"}));
        assert_eq!(judged(&claims).await.expect_err("refused").code(), "token.wrong_issuer");
    }
}
