//! Judging a service or app token: every check, in the one order that callers rely on.

use serde_json::Value;

use super::claims::{self, Claims};
use super::{Env, Jws, Keys, Unavailable};

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

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::identity::testing::{
        self, ISSUER, KeyServer, NOW_S, ULID, app_claims, key, service_claims, verifier, with,
    };
    use crate::identity::{AppPrincipal, Principal};

    async fn judge(token: &str) -> Result<Claims, TokenError> {
        verifier().verify(token, Sandbox::Accepted, NOW_S).await
    }

    async fn code(token: &str) -> &'static str {
        judge(token).await.map_or_else(|error| error.code(), |_| "accepted")
    }

    async fn code_with(over: Value) -> &'static str {
        code(&key("k1").token(&with(service_claims(), over))).await
    }

    #[tokio::test]
    async fn a_service_and_an_app_are_read_as_they_are() {
        let service = judge(&key("k1").token(&service_claims())).await.expect("holds");
        assert_eq!(
            service.principal,
            Principal::Service {
                slug: "media".to_owned()
            }
        );
        assert_eq!(service.subject, "svc:media");
        assert_eq!(service.capabilities, ["events.event.publish"]);
        assert_eq!((service.issued_at_s, service.expires_at_s), (NOW_S - 30, NOW_S + 270));
        assert_eq!(service.env, Env::Production, "what no env means");

        let app = judge(&key("k1").token(&app_claims())).await.expect("holds");
        let expected = AppPrincipal {
            app_id: format!("app_{ULID}"),
            project_id: format!("prj_{ULID}"),
            env: Env::Sandbox,
            on_behalf_of: Some(format!("usr_{ULID}")),
            namespaces: vec![format!("prj_{ULID}"), format!("app.prj_{ULID}.*")],
        };
        assert_eq!(app.principal, Principal::App(expected));
    }

    #[tokio::test]
    async fn times_are_inclusive_to_the_second() {
        for (over, expected) in [
            (json!({"exp": NOW_S - 30}), "accepted"),
            (json!({"exp": NOW_S - 31}), "token.expired"),
            (json!({"iat": NOW_S + 30}), "accepted"),
            (json!({"iat": NOW_S + 31}), "token.expired"),
            (json!({"exp": null}), "token.expired"),
            (json!({"exp": "1761034000"}), "token.expired"),
            (json!({"exp": NOW_S as f64 + 60.0}), "accepted"),
            (json!({"exp": NOW_S as f64 + 60.5}), "token.invalid_claims"),
            (json!({"iat": null}), "token.invalid_claims"),
            (json!({"iat": "now"}), "token.invalid_claims"),
            (json!({"nbf": NOW_S + 900}), "accepted"),
        ] {
            assert_eq!(code_with(over.clone()).await, expected, "{over}");
        }
    }

    #[tokio::test]
    async fn anything_but_three_decodable_parts_signed_rs256_is_malformed() {
        let k1 = key("k1");
        let body = service_claims();
        let good = k1.token(&body);
        let (signed, signature) = good.rsplit_once('.').expect("three parts");
        let tokens = [
            String::new(),
            "garbage".to_owned(),
            "a.b".to_owned(),
            "a.b.c".to_owned(),
            "....".to_owned(),
            format!("{good}.x"),
            format!(".{good}"),
            good.replacen('.', "=.", 1),
            k1.sign_raw("[]", &body.to_string()),
            k1.sign_raw("not json", &body.to_string()),
            k1.sign_raw(r#"{"alg":"RS256"}"#, "7"),
            k1.sign_raw(r#"{"alg":"RS256"} x"#, &body.to_string()),
            k1.sign(&json!({"typ": "JWT"}), &body),
            k1.sign(&json!({"alg": "none"}), &body),
            k1.sign(&json!({"alg": "rs256"}), &body),
            k1.sign(&json!({"alg": ["RS256"]}), &body),
            k1.sign(&json!({"alg": "HS256"}), &body),
            k1.sign(&json!({"alg": "RS512"}), &body),
            k1.sign(&json!({"alg": "PS256"}), &body),
            k1.sign(&json!({"alg": "RS256", "crit": ["b64"], "b64": true}), &body),
        ];
        for token in tokens {
            assert_eq!(code(&token).await, "token.malformed", "{token}");
        }
        for signature in [
            "",
            "!",
            &signature[1..],
            &format!("{signature}AA"),
            &format!("{signature}="),
        ] {
            assert_eq!(
                code(&format!("{signed}.{signature}")).await,
                "token.bad_signature",
                "{signature}"
            );
        }
    }

    #[tokio::test]
    async fn a_changed_claim_or_a_stranger_s_key_does_not_verify() {
        let good = key("k1").token(&service_claims());
        let parts: Vec<_> = good.split('.').collect();
        let forged = URL_SAFE_NO_PAD.encode(with(service_claims(), json!({"cap": ["events.*"]})).to_string());
        assert_eq!(
            code(&[parts[0], &forged, parts[2]].join(".")).await,
            "token.bad_signature"
        );
        assert_eq!(
            code(&key("rogue").token(&service_claims())).await,
            "token.bad_signature"
        );
        assert_eq!(
            code(&key("rogue").token_naming("k1", &service_claims())).await,
            "token.bad_signature"
        );
    }

    #[tokio::test]
    async fn a_long_token_is_not_looked_at() {
        let padded = |length: usize| with(service_claims(), json!({"note": "x".repeat(length)}));
        assert_eq!(code(&key("k1").token(&padded(11_000))).await, "accepted");
        assert_eq!(
            judge(&key("k1").token(&padded(12_000))).await,
            Err(TokenError::Malformed("too long"))
        );
    }

    #[tokio::test]
    async fn the_issuer_and_the_audience_are_exact() {
        for (over, expected) in [
            (json!({"iss": format!("{ISSUER}/")}), "token.wrong_issuer"),
            (json!({"iss": format!("{ISSUER}/realtime")}), "token.wrong_issuer"),
            (json!({"iss": [ISSUER]}), "token.wrong_issuer"),
            (json!({"iss": null}), "token.wrong_issuer"),
            (json!({"aud": null}), "token.wrong_audience"),
            (json!({"aud": []}), "token.wrong_audience"),
            (json!({"aud": ["openvibe.media"]}), "token.wrong_audience"),
            (json!({"aud": ["openvibe.events.internal"]}), "token.wrong_audience"),
            (json!({"aud": {"openvibe.events": true}}), "token.wrong_audience"),
            (json!({"aud": "openvibe.events"}), "token.invalid_claims"),
            (json!({"aud": ["openvibe.events", "Openvibe"]}), "token.invalid_claims"),
            (json!({"aud": ["openvibe.events", 7]}), "token.invalid_claims"),
            (json!({"aud": ["openvibe.media", "openvibe.events"]}), "accepted"),
        ] {
            assert_eq!(code_with(over.clone()).await, expected, "{over}");
        }
    }

    #[tokio::test]
    async fn the_first_failing_check_is_the_one_reported() {
        // Each step mends the fault reported before it.
        let mut claims = with(app_claims(), json!({"exp": 1, "iss": "x", "aud": "x", "jti": null}));
        let judge = async |token: String| {
            let judged = verifier().verify(&token, Sandbox::Refused, NOW_S).await;
            judged.map_or_else(|error| error.code(), |_| "accepted")
        };
        assert_eq!(
            judge(key("rogue").sign(&json!({"alg": "none"}), &claims)).await,
            "token.malformed"
        );
        assert_eq!(judge(key("rogue").token(&claims)).await, "token.bad_signature");
        for (over, expected) in [
            (json!({}), "token.expired"),
            (json!({"exp": NOW_S}), "token.wrong_issuer"),
            (json!({"iss": ISSUER}), "token.wrong_audience"),
            (json!({"aud": ["openvibe.events"]}), "token.invalid_claims"),
            (json!({"jti": "jti-00000002"}), "token.sandbox_refused"),
            (json!({"env": "production"}), "accepted"),
        ] {
            claims = with(claims, over);
            assert_eq!(judge(key("k1").token(&claims)).await, expected);
        }
    }

    #[tokio::test]
    async fn every_claim_has_its_rule() {
        let id = |prefix: &str| format!("{prefix}{ULID}");
        for over in [
            json!({"sub": null}),
            json!({"sub": "live"}),
            json!({"sub": "svc:"}),
            json!({"sub": "svc:a"}),
            json!({"sub": "svc:UPPER"}),
            json!({"sub": "svc:1media"}),
            json!({"sub": "svc:media\n"}),
            json!({"sub": format!("svc:{}", "a".repeat(41))}),
            json!({"sub": format!("usr_{ULID}")}),
            json!({"actor_type": null}),
            json!({"actor_type": "user"}),
            json!({"actor_type": "app"}),
            json!({"actor_type": "node"}),
            json!({"sub": id("agent:agt_")}),
            json!({"sub": id("mod:mod_")}),
            json!({"sub": id("app:app_"), "project_id": id("prj_"), "env": "production"}),
            json!({"cap": null}),
            json!({"cap": "events.event.publish"}),
            json!({"cap": ["*"]}),
            json!({"cap": ["events"]}),
            json!({"cap": ["events."]}),
            json!({"cap": ["Events.event.publish"]}),
            json!({"cap": ["events.event.publish", 1]}),
            json!({"jti": null}),
            json!({"jti": "1234567"}),
            json!({"jti": 12_345_678}),
            json!({"ns": "x"}),
            json!({"ns": [1]}),
            json!({"project_id": "prj_bad"}),
            json!({"project_id": format!("prj_{}", &ULID[1..])}),
            json!({"project_id": format!("prj_{ULID}0")}),
            json!({"project_id": format!("prj_{}U", &ULID[1..])}),
            json!({"project_id": format!("prj_{}", ULID.to_lowercase())}),
            json!({"project_id": id("app_")}),
            json!({"env": "staging"}),
            json!({"env": 1}),
            json!({"on_behalf_of": "usr_x"}),
            json!({"cap_confirm": ["x"]}),
            json!({"cap_confirm": ["events.*"]}),
            json!({"act": {}}),
            json!({"act": {"sub": id("mod:mod_")}}),
            json!({"act": {"sub": "svc:media", "more": 1}}),
        ] {
            assert_eq!(code_with(over.clone()).await, "token.invalid_claims", "{over}");
        }
        for over in [
            json!({"sub": "svc:ab"}),
            json!({"sub": format!("svc:{}", "a".repeat(40))}),
            json!({"cap": []}),
            json!({"cap": ["events.*", "a_1.b*.c"]}),
            json!({"jti": "\u{e9}".repeat(8)}),
            json!({"ns": []}),
            json!({"project_id": format!("prj_{}", "Z".repeat(26))}),
            json!({"env": "production"}),
            json!({"on_behalf_of": id("usr_")}),
            json!({"cap_confirm": ["events.event"]}),
            json!({"act": {"sub": "svc:media"}}),
            json!({"purpose": "export", "typ": "x", "anything": {"else": 1}}),
        ] {
            assert_eq!(code_with(over.clone()).await, "accepted", "{over}");
        }
    }

    #[tokio::test]
    async fn an_app_and_an_agent_name_their_project_and_environment() {
        let agent = with(
            app_claims(),
            json!({"sub": format!("agent:agt_{ULID}"), "actor_type": "agent"}),
        );
        for claims in [app_claims(), agent.clone()] {
            assert_eq!(code(&key("k1").token(&claims)).await, "accepted");
            for over in [
                json!({"project_id": null}),
                json!({"env": null}),
                json!({"actor_type": "service"}),
            ] {
                let claims = with(claims.clone(), over.clone());
                assert_eq!(code(&key("k1").token(&claims)).await, "token.invalid_claims", "{over}");
            }
        }
        let alone = json!({"on_behalf_of": null});
        assert_eq!(
            code(&key("k1").token(&with(agent, alone.clone()))).await,
            "token.invalid_claims"
        );
        assert_eq!(code(&key("k1").token(&with(app_claims(), alone))).await, "accepted");
    }

    #[tokio::test]
    async fn a_sandbox_token_holds_only_where_it_is_served() {
        for claims in [app_claims(), with(service_claims(), json!({"env": "sandbox"}))] {
            let token = key("k1").token(&claims);
            assert!(verifier().verify(&token, Sandbox::Accepted, NOW_S).await.is_ok());
            let refused = verifier().verify(&token, Sandbox::Refused, NOW_S).await;
            assert_eq!(refused, Err(TokenError::SandboxRefused));
        }
    }

    #[tokio::test]
    async fn with_several_keys_any_may_have_signed() {
        let server = KeyServer::start().await;
        server.publish(&["k1", "k2"]);
        let verifier = Verifier {
            keys: Keys::fetching(server.url.clone(), testing::trust()),
            ..verifier()
        };
        for kid in ["k1", "k2"] {
            let token = key(kid).token(&service_claims());
            assert!(verifier.verify(&token, Sandbox::Refused, NOW_S).await.is_ok(), "{kid}");
            let expired = key(kid).token(&with(service_claims(), json!({"exp": 1})));
            let judged = verifier.verify(&expired, Sandbox::Refused, NOW_S).await;
            assert_eq!(judged.expect_err("refused").code(), "token.expired", "{kid}");
        }
        assert_eq!(
            server.hits(),
            1,
            "a verdict other than a bad signature asks for no newer key"
        );
    }

    #[tokio::test]
    async fn without_a_key_no_token_is_blamed() {
        let server = KeyServer::start().await;
        server.answer("503 Service Unavailable", "", "");
        let verifier = Verifier {
            keys: Keys::fetching(server.url.clone(), testing::trust()),
            ..verifier()
        };
        for token in [
            key("k1").token(&service_claims()),
            key("rogue").token(&service_claims()),
            "x".to_owned(),
        ] {
            let refused = verifier
                .verify(&token, Sandbox::Refused, NOW_S)
                .await
                .expect_err("refused");
            assert_eq!(
                (refused.code(), refused.to_string().as_str()),
                ("token.unavailable", "signing key not loaded yet")
            );
        }
    }

    #[tokio::test]
    async fn a_refusal_repeats_nothing_of_the_token() {
        let secret = "sentinel-value";
        for over in [
            json!({"iss": secret}),
            json!({"aud": secret}),
            json!({"sub": secret}),
            json!({"cap": [secret]}),
            json!({"env": secret, "act": secret, "jti": ""}),
        ] {
            let refused = judge(&key("k1").token(&with(service_claims(), over)))
                .await
                .expect_err("refused");
            assert!(!refused.to_string().contains(secret), "{refused}");
        }
        let refused = judge(&key("k1").sign(&json!({"alg": secret}), &service_claims()))
            .await
            .expect_err("refused");
        assert!(!refused.to_string().contains(secret), "{refused}");
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".{0,40}".prop_map(Value::from),
            "(svc|app|mod|node|agent):(app_|mod_)?[a-z0-9A-Z-]{0,30}".prop_map(Value::from),
        ];
        leaf.prop_recursive(2, 12, 4, |inner| {
            prop::collection::vec(inner, 0..4).prop_map(Value::from)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_text_is_a_token_by_chance(token in "[A-Za-z0-9_.=-]{0,200}|.{0,200}") {
            prop_assert!(futures_util::FutureExt::now_or_never(judge(&token)).expect("nothing to wait for").is_err());
        }

        #[test]
        fn whatever_a_claim_holds_it_is_judged_without_a_panic(
            name in prop::sample::select(vec!["sub", "actor_type", "aud", "cap", "iat", "exp", "jti", "ns", "env", "act"]),
            value in any_json(),
        ) {
            let mut claims = app_claims();
            claims[name] = value;
            let judged = claims::read(claims.as_object().expect("an object"));
            if let Ok(read) = judged {
                prop_assert!(matches!(read.principal, Principal::App(_)), "one claim cannot make an app something else");
            }
        }
    }
}
