//! What a route asks of its caller: a bearer, a token that holds, a kind of caller it serves, the capability; in this order.

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;

use crate::domain::app::{App, Env, Holder, Project};

use super::{AppPrincipal, Capability, Claims, Principal, Sandbox, TokenError, Verifier, granted};

/// A caller a guard has let through.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// The whole `sub` claim, such as `svc:media`.
    pub subject: String,
    /// As whom it holds subscriptions and checkpoints: a service's name, or the whole `sub` of an app.
    pub consumer: String,
    /// The app that calls; `None` for a first-party service.
    pub app: Option<App>,
    /// Everything its token says.
    pub claims: Claims,
}

impl Caller {
    /// Who holds what it makes.
    #[must_use]
    pub fn holder(&self) -> Holder<'_> {
        Holder {
            consumer: &self.consumer,
            project: self.app.as_ref().map(|app| &app.project),
        }
    }
}

/// A caller whose token holds, before its capability is judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Authenticated(Caller);

impl Authenticated {
    /// The app that calls; `None` for a first-party service.
    #[must_use]
    pub fn app(&self) -> Option<&App> {
        self.0.app.as_ref()
    }

    /// The caller, if it holds what the route asks of its kind. An app is never judged on what is asked of services.
    ///
    /// # Errors
    /// [`Refusal::Denied`].
    pub fn holding(self, service: Capability, app: Option<Capability>) -> Result<Caller, Refusal> {
        let asked = match self.app() {
            None => Some(service),
            Some(_) => app,
        };
        match asked {
            Some(capability) if granted(&self.0.claims.capabilities, capability.id()) => Ok(self.0),
            _ => Err(Refusal::Denied {
                capability: asked.unwrap_or(service).id(),
            }),
        }
    }
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

/// Finds out who calls a route that serves apps of both environments as well as first-party services; `capability` is named
/// to callers of any other kind.
///
/// # Errors
/// The first rule that fails: a bearer, the token itself, a kind of caller that is served.
pub async fn authenticate(
    verifier: &Verifier,
    headers: &HeaderMap,
    capability: Capability,
    now_s: i64,
) -> Result<Authenticated, Refusal> {
    let token = bearer(headers).ok_or(Refusal::MissingToken)?;
    let claims = verifier.verify(token, Sandbox::Accepted, now_s).await?;
    if let Principal::App(principal) = &claims.principal {
        let app = app_of(principal, claims.issued_at_s)?;
        return Ok(Authenticated(Caller {
            subject: claims.subject.clone(),
            consumer: claims.subject.clone(),
            app: Some(app),
            claims,
        }));
    }
    if claims.env == Env::Sandbox {
        return Err(TokenError::SandboxRefused.into());
    }
    service_of(claims, capability).map(Authenticated)
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
    Authenticated(service_of(claims, capability)?).holding(capability, None)
}

/// An app is never judged on a first-party capability, whatever it holds; nor is a mod, a node or an agent.
fn service_of(claims: Claims, capability: Capability) -> Result<Caller, Refusal> {
    let Principal::Service { slug } = &claims.principal else {
        return Err(Refusal::Denied {
            capability: capability.id(),
        });
    };
    Ok(Caller {
        subject: claims.subject.clone(),
        consumer: slug.clone(),
        app: None,
        claims,
    })
}

/// A token that names namespaces must name its project among them.
fn app_of(principal: &AppPrincipal, issued_at_s: i64) -> Result<App, TokenError> {
    let names_it = principal.namespaces.is_empty() || principal.namespaces.contains(&principal.project_id);
    if !names_it {
        return Err(TokenError::InvalidClaims("ns must contain project_id".to_owned()));
    }
    let project = Project {
        id: principal.project_id.as_str().into(),
        env: principal.env,
    };
    let person = principal.on_behalf_of.as_deref();
    Ok(App::new(&principal.app_id, project, person, issued_at_s))
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
        assert_eq!(
            (caller.subject.as_str(), caller.consumer.as_str()),
            ("svc:media", "media")
        );
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
    async fn a_route_for_apps_judges_each_kind_by_its_own_capability() {
        let judged = async |claims: Value, app: Option<Capability>| {
            let sent = headers(&format!("Bearer {}", key("k1").token(&claims)));
            let known = authenticate(&verifier(), &sent, Capability::EventRead, NOW_S).await?;
            known.holding(Capability::EventRead, app)
        };
        let read = Some(Capability::AppRead);
        for env in ["sandbox", "production"] {
            let claims = |cap: &str| testing::with(app_claims(), json!({"cap": [cap], "env": env}));
            let caller = judged(claims("events.app.read"), read).await.expect("let through");
            assert_eq!(caller.consumer, caller.subject);
            assert_eq!(caller.holder().env(), env);
            assert!(
                judged(claims("events.*"), read).await.is_ok(),
                "a family that covers it"
            );
            for (cap, app) in [
                ("events.event.read", read),
                ("events.app.publish", read),
                ("events.app.read", None),
            ] {
                let refused = judged(claims(cap), app).await.expect_err("refused");
                assert_eq!(refused.code(), "capability.denied", "{cap} in {env}");
            }
        }
        let service = testing::with(service_claims(), json!({"cap": ["events.event.read"]}));
        assert_eq!(judged(service.clone(), read).await.expect("a service").app, None);
        let service = testing::with(service, json!({"cap": ["events.app.read"]}));
        assert_eq!(
            judged(service.clone(), read).await.expect_err("refused").code(),
            "capability.denied"
        );
        let service = testing::with(service, json!({"env": "sandbox"}));
        assert_eq!(
            judged(service, read).await.expect_err("refused").code(),
            "token.sandbox_refused"
        );
    }

    #[tokio::test]
    async fn a_token_whose_namespaces_lack_its_project_describes_no_app() {
        for (ns, code) in [
            (json!([]), None),
            (json!([format!("prj_{}", testing::ULID)]), None),
            (json!(["prj_01K7BBC3DE4FG5HJ6KM7NP8QRS"]), Some("token.invalid_claims")),
        ] {
            let sent = headers(&format!(
                "Bearer {}",
                key("k1").token(&testing::with(app_claims(), json!({"ns": ns})))
            ));
            let known = authenticate(&verifier(), &sent, Capability::EventRead, NOW_S).await;
            assert_eq!(known.err().map(|refusal| refusal.code()), code, "{ns}");
        }
    }

    #[tokio::test]
    async fn a_fault_of_the_token_is_reported_before_a_missing_capability() {
        let claims = testing::with(service_claims(), json!({"cap": [], "iss": "https://elsewhere.example"}));
        assert_eq!(judged(&claims).await.expect_err("refused").code(), "token.wrong_issuer");
    }
}
