//! A compact signed token taken apart: three parts, two JSON objects, RS256 and nothing else.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Map, Value};

/// A decoded token whose signature has not been looked at yet. It cannot be printed, so that no log can hold one.
pub struct Jws<'a> {
    signed: &'a str,
    signature: &'a str,
    kid: Option<String>,
    claims: Map<String, Value>,
}

impl<'a> Jws<'a> {
    /// Takes `token` apart.
    ///
    /// # Errors
    /// A fixed text naming what is wrong; it never repeats any of the token.
    pub fn parse(token: &'a str) -> Result<Self, &'static str> {
        let (signed, signature) = token.rsplit_once('.').ok_or("not a JWT")?;
        // A fourth part leaves a dot in the claims, which base64url does not know.
        let (header, claims) = signed.split_once('.').ok_or("not a JWT")?;
        let header = object(header).ok_or("undecodable")?;
        let claims = object(claims).ok_or("undecodable")?;
        if header.get("alg").and_then(Value::as_str) != Some("RS256") {
            return Err("alg not accepted");
        }
        // RFC 7515, 4.1.11: an extension marked critical must be understood, and none is.
        if header.contains_key("crit") {
            return Err("critical header not accepted");
        }
        let kid = header.get("kid").and_then(Value::as_str).map(str::to_owned);
        Ok(Self {
            signed,
            signature,
            kid,
            claims,
        })
    }

    /// The name of the signing key, where the header gives one.
    #[must_use]
    pub fn kid(&self) -> Option<&str> {
        self.kid.as_deref()
    }

    /// The bytes that the signature covers.
    #[must_use]
    pub fn signed(&self) -> &[u8] {
        self.signed.as_bytes()
    }

    /// The signature as it was sent, in base64url.
    #[must_use]
    pub fn signature(&self) -> &str {
        self.signature
    }

    /// The claims, to be believed only after the signature held.
    #[must_use]
    pub fn claims(&self) -> &Map<String, Value> {
        &self.claims
    }
}

fn object(part: &str) -> Option<Map<String, Value>> {
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(part).ok()?).ok()
}
