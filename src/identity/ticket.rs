//! A realtime ticket: opens one stream as one person, once (`identity.realtime-ticket-claims@1`).

use serde_json::{Map, Value};

use super::{Jws, Keys, Unavailable};
use crate::domain::ids::{is_hex_of, is_prefixed_id};

const TICKET_CHARS_MAX: usize = 4096;
const LIFETIME_S_MAX: i64 = 300;
/// How far the network's clock may run ahead of ours.
const LEEWAY_S: i64 = 30;
/// Every claim there is; a ticket has exactly these.
const CLAIMS: [&str; 8] = ["iss", "sub", "aud", "typ", "purpose", "iat", "exp", "jti"];

/// A ticket that holds, and has perhaps been used before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ticket {
    /// `rtk_` and 24 hex digits; one opens one stream.
    pub id: String,
    /// Whose it is: `usr_` and a ULID.
    pub subject: String,
    /// When it was issued, in seconds since 1970.
    pub issued_at_s: i64,
    /// When it ends, in seconds since 1970.
    pub expires_at_s: i64,
}

/// Why a ticket opens nothing. Nothing here repeats any of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TicketError {
    /// There is no key to judge by; the ticket may be fine.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// It is no ticket of the network for this service.
    #[error("not a ticket")]
    Invalid,
    /// Its time is over.
    #[error("expired")]
    Expired,
}

/// Whose tickets are believed.
#[derive(Debug, Clone)]
pub struct Tickets {
    /// The keys that may have signed.
    pub keys: Keys,
    /// The only issuer believed: that of sessions, and `/realtime`.
    pub issuer: String,
    /// The one audience.
    pub audience: String,
}

impl Tickets {
    /// What `ticket` says, if it holds at `now_s` (seconds since 1970). Whether it was used before is not known here.
    ///
    /// # Errors
    /// [`TicketError`], the first that applies in the order of its variants.
    pub async fn read(&self, ticket: &str, now_s: i64) -> Result<Ticket, TicketError> {
        let parsed = (ticket.len() <= TICKET_CHARS_MAX)
            .then(|| Jws::parse(ticket).ok())
            .flatten();
        let Some(token) = parsed else {
            self.keys.keys_for(None).await?;
            return Err(TicketError::Invalid);
        };
        if !self.keys.verify(&token).await? {
            return Err(TicketError::Invalid);
        }
        let ticket = self.claims(token.claims()).ok_or(TicketError::Invalid)?;
        let lifetime_s = ticket.expires_at_s.saturating_sub(ticket.issued_at_s);
        if !(1..=LIFETIME_S_MAX).contains(&lifetime_s) || ticket.issued_at_s > now_s + LEEWAY_S {
            return Err(TicketError::Invalid);
        }
        if ticket.expires_at_s <= now_s {
            return Err(TicketError::Expired);
        }
        Ok(ticket)
    }

    fn claims(&self, claims: &Map<String, Value>) -> Option<Ticket> {
        let text = |name: &str| claims.get(name).and_then(Value::as_str);
        let seconds = |name: &str| claims.get(name).and_then(Value::as_i64).filter(|at| *at >= 0);
        let one_of_ours = claims.keys().all(|name| CLAIMS.contains(&name.as_str()))
            && text("iss").and_then(|iss| iss.strip_suffix("/realtime")) == Some(self.issuer.as_str())
            && text("typ") == Some("realtime")
            && text("purpose") == Some("realtime")
            && matches!(claims.get("aud"), Some(Value::Array(all)) if *all == [self.audience.as_str()]);
        let id = text("jti").filter(|id| id.strip_prefix("rtk_").is_some_and(|hex| is_hex_of(24, hex)))?;
        let subject = text("sub").filter(|sub| is_prefixed_id("usr", sub))?;
        one_of_ours.then_some(Ticket {
            id: id.to_owned(),
            subject: subject.to_owned(),
            issued_at_s: seconds("iat")?,
            expires_at_s: seconds("exp")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::identity::testing::{ISSUER, NOW_S, ULID, key, verifier, with};

    const AUDIENCE: &str = "openvibe.events";

    fn claims() -> Value {
        json!({"iss": format!("{ISSUER}/realtime"), "sub": format!("usr_{ULID}"), "aud": [AUDIENCE], "typ": "realtime",
            "purpose": "realtime", "iat": NOW_S, "exp": NOW_S + 120, "jti": "rtk_0123456789abcdef01234567"})
    }

    async fn read(token: &str) -> Result<Ticket, TicketError> {
        let tickets = Tickets {
            keys: verifier().keys,
            issuer: ISSUER.to_owned(),
            audience: AUDIENCE.to_owned(),
        };
        tickets.read(token, NOW_S).await
    }

    async fn read_with(over: Value) -> Result<Ticket, TicketError> {
        read(&key("k1").token(&with(claims(), over))).await
    }

    #[tokio::test]
    async fn a_ticket_is_read_as_it_is() {
        let ticket = read_with(json!({})).await.expect("holds");
        assert_eq!(
            (ticket.id.as_str(), ticket.subject),
            ("rtk_0123456789abcdef01234567", format!("usr_{ULID}"))
        );
        assert_eq!((ticket.issued_at_s, ticket.expires_at_s), (NOW_S, NOW_S + 120));
    }

    #[tokio::test]
    async fn every_claim_is_exact_and_none_may_be_added() {
        for over in [
            json!({"iss": ISSUER}),
            json!({"iss": format!("{ISSUER}/realtime/")}),
            json!({"sub": "57"}),
            json!({"sub": format!("user:usr_{ULID}")}),
            json!({"aud": AUDIENCE}),
            json!({"aud": [AUDIENCE, "openvibe.chat"]}),
            json!({"aud": []}),
            json!({"typ": "fedcm"}),
            json!({"purpose": null}),
            json!({"jti": "rtk_0123456789ABCDEF01234567"}),
            json!({"jti": "rtk_0123456789abcdef0123456"}),
            json!({"jti": format!("rtk_{ULID}")}),
            json!({"iat": "now"}),
            json!({"iat": NOW_S as f64 + 0.5}),
            json!({"iat": -1}),
            json!({"exp": null}),
            json!({"role": "admin"}),
        ] {
            assert_eq!(read_with(over.clone()).await, Err(TicketError::Invalid), "{over}");
        }
        for token in ["", "x", "a.b.c", &key("rogue").token(&claims()), &"x".repeat(5000)] {
            assert_eq!(read(token).await, Err(TicketError::Invalid), "{token}");
        }
    }

    #[tokio::test]
    async fn it_lives_for_three_hundred_seconds_at_most_and_not_a_second_longer_than_it_says() {
        for (iat, exp, expected) in [
            (0, 300, None),
            (0, 301, Some(TicketError::Invalid)),
            (0, 0, Some(TicketError::Invalid)),
            (0, -10, Some(TicketError::Invalid)),
            (-299, 1, None),
            (-300, 0, Some(TicketError::Expired)),
            (-120, -1, Some(TicketError::Expired)),
            (30, 60, None),
            (31, 60, Some(TicketError::Invalid)),
        ] {
            let read = read_with(json!({"iat": NOW_S + iat, "exp": NOW_S + exp})).await;
            assert_eq!(read.err(), expected, "{iat} to {exp}");
        }
    }
}
