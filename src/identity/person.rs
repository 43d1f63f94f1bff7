//! A person's session token, as browsers send it. It opens streams and nothing else.

use serde_json::{Map, Value};

use super::{Jws, Keys, Unavailable};
use crate::domain::ids::is_prefixed_id;

const TOKEN_BYTES_MAX: usize = 16 * 1024;
/// How far the network's clock and ours may disagree.
const LEEWAY_S: f64 = 30.0;
/// Whom a session is for unless the configuration says otherwise.
const USUAL_AUDIENCES: [&str; 2] = ["openvibe.events", "openvibe.network"];
/// How the `sub` of a principal begins. A principal is nobody's session.
const PRINCIPALS: [&str; 5] = ["svc:", "app:", "mod:", "node:", "agent:"];

/// A person, as a session token or a ticket names them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Person {
    /// `usr_` and a ULID. Old sessions have none; they see what everybody sees.
    pub subject: Option<String>,
    /// When the token was issued, in milliseconds since 1970. A token that does not say is older than any withdrawal.
    pub issued_at_ms: i64,
    /// When the session ends, in milliseconds since 1970; `None` where the token limits the opening only.
    pub ends_at_ms: Option<i64>,
}

/// Whose session tokens are believed.
#[derive(Debug, Clone)]
pub struct Sessions {
    /// The keys that may have signed.
    pub keys: Keys,
    /// The only issuer believed.
    pub issuer: String,
    /// Audiences of which a token must name one. `None`: one that names any must name us or the network.
    pub audiences: Option<Vec<String>>,
}

impl Sessions {
    /// The person whose session `token` is; `None` where it is no session that holds at `now_s` (seconds since 1970).
    ///
    /// # Errors
    /// [`Unavailable`] when there is no key to judge by.
    pub async fn person(&self, token: &str, now_s: i64) -> Result<Option<Person>, Unavailable> {
        let parsed = (token.len() <= TOKEN_BYTES_MAX)
            .then(|| Jws::parse(token).ok())
            .flatten();
        let Some(token) = parsed else {
            // Without a key nothing is judged, not even this.
            self.keys.keys_for(None).await?;
            return Ok(None);
        };
        if !self.keys.verify(&token).await? {
            return Ok(None);
        }
        Ok(self.read(token.claims(), now_s as f64))
    }

    fn read(&self, claims: &Map<String, Value>, now_s: f64) -> Option<Person> {
        let text = |name: &str| claims.get(name).and_then(Value::as_str);
        let seconds = |name: &str| claims.get(name).filter(|value| !value.is_null()).map(Value::as_f64);
        let ends_s = seconds("exp")??;
        let begun = |at: Option<Option<f64>>| at.is_none_or(|at| at.is_some_and(|at| at - LEEWAY_S <= now_s));
        let in_time = ends_s + LEEWAY_S >= now_s && begun(seconds("nbf")) && begun(seconds("iat"));
        let issued = text("iss") == Some(self.issuer.as_str());
        let meant_for_us = match (&self.audiences, claims.get("aud").filter(|aud| !aud.is_null())) {
            (Some(wanted), aud) => names_one(aud, wanted),
            (None, Some(aud)) => names_one(Some(aud), &USUAL_AUDIENCES),
            (None, None) => true,
        };
        let principal = matches!(text("actor_type"), Some("service" | "app" | "mod" | "node" | "agent"))
            || text("sub").is_some_and(|sub| PRINCIPALS.iter().any(|kind| sub.starts_with(kind)));
        // A ticket, an assertion: signed by the same key, and meant for one purpose only.
        let special = ["typ", "purpose"]
            .iter()
            .any(|name| claims.get(*name).is_some_and(|value| !value.is_null()));
        (in_time && issued && meant_for_us && !principal && !special).then(|| Person {
            subject: text("subject_id")
                .filter(|id| is_prefixed_id("usr", id))
                .map(str::to_owned),
            issued_at_ms: seconds("iat").flatten().map_or(0, |at| (at * 1000.0) as i64),
            ends_at_ms: Some((ends_s * 1000.0) as i64),
        })
    }
}

fn names_one(aud: Option<&Value>, wanted: &[impl AsRef<str>]) -> bool {
    let is_wanted = |value: &Value| {
        value
            .as_str()
            .is_some_and(|one| wanted.iter().any(|name| name.as_ref() == one))
    };
    match aud {
        Some(Value::Array(many)) => many.iter().any(is_wanted),
        Some(one) => is_wanted(one),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::identity::testing::{ISSUER, NOW_S, ULID, key, service_claims, verifier, with};

    fn sessions(audiences: Option<&[&str]>) -> Sessions {
        Sessions {
            keys: verifier().keys,
            issuer: ISSUER.to_owned(),
            audiences: audiences.map(|all| all.iter().map(ToString::to_string).collect()),
        }
    }

    fn claims() -> Value {
        json!({"iss": ISSUER, "sub": "57", "subject_id": format!("usr_{ULID}"), "iat": NOW_S - 60, "exp": NOW_S + 600,
            "aud": ["openvibe.network"], "role": "user"})
    }

    async fn person_with(over: Value) -> Option<Person> {
        let token = key("k1").token(&with(claims(), over));
        sessions(None).person(&token, NOW_S).await.expect("a key")
    }

    #[tokio::test]
    async fn a_session_names_its_person_and_its_end() {
        let expected = Person {
            subject: Some(format!("usr_{ULID}")),
            issued_at_ms: (NOW_S - 60) * 1000,
            ends_at_ms: Some((NOW_S + 600) * 1000),
        };
        assert_eq!(person_with(json!({})).await, Some(expected));
        for odd in [json!(null), json!("57"), json!("usr_x"), json!(57)] {
            let person = person_with(json!({"subject_id": odd})).await.expect("a session");
            assert_eq!(person.subject, None, "{odd}");
        }
        assert_eq!(
            person_with(json!({"iat": null})).await.expect("a session").issued_at_ms,
            0
        );
    }

    #[tokio::test]
    async fn what_is_no_session_is_nobody() {
        for over in [
            json!({"exp": null}),
            json!({"exp": NOW_S - 31}),
            json!({"exp": "soon"}),
            json!({"iat": NOW_S + 31}),
            json!({"iat": "now"}),
            json!({"nbf": NOW_S + 31}),
            json!({"iss": "https://evil.example"}),
            json!({"iss": format!("{ISSUER}/realtime")}),
            json!({"typ": "realtime"}),
            json!({"purpose": "assertion"}),
            json!({"actor_type": "service"}),
            json!({"actor_type": "agent"}),
            json!({"sub": "svc:live"}),
            json!({"sub": format!("app:app_{ULID}")}),
            json!({"sub": format!("node:nod_{ULID}")}),
        ] {
            assert_eq!(person_with(over.clone()).await, None, "{over}");
        }
        for over in [
            json!({"exp": NOW_S - 30}),
            json!({"iat": NOW_S + 30}),
            json!({"nbf": NOW_S + 30}),
        ] {
            assert!(person_with(over.clone()).await.is_some(), "{over}");
        }
        let service = key("k1").token(&service_claims());
        let stranger = key("rogue").token(&claims());
        for token in ["", "x", "a.b.c", &service, &stranger, &"x".repeat(20_000)] {
            assert_eq!(sessions(None).person(token, NOW_S).await, Ok(None), "{token}");
        }
    }

    #[tokio::test]
    async fn a_session_for_somebody_else_is_none_here() {
        let token = |aud: Value| key("k1").token(&with(claims(), json!({"aud": aud})));
        for (aud, holds) in [
            (json!(null), true),
            (json!(["openvibe.live", "openvibe.network"]), true),
            (json!("openvibe.events"), true),
            (json!(["openvibe.live"]), false),
            (json!([]), false),
        ] {
            let judged = sessions(None).person(&token(aud.clone()), NOW_S).await.expect("a key");
            assert_eq!(judged.is_some(), holds, "{aud}");
        }
        let strict = sessions(Some(&["openvibe.live", "openvibe.events"]));
        for (aud, holds) in [
            (json!(["openvibe.x", "openvibe.live"]), true),
            (json!("openvibe.events"), true),
            (json!(["openvibe.network"]), false),
            (json!([]), false),
            (json!(null), false),
        ] {
            let judged = strict.person(&token(aud.clone()), NOW_S).await.expect("a key");
            assert_eq!(judged.is_some(), holds, "{aud}");
        }
    }
}
