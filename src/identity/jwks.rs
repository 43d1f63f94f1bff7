//! A set of signing keys, read from a PEM or from a published key document.

use std::sync::Arc;

use aws_lc_rs::signature::{RSA_PKCS1_2048_8192_SHA256, RsaParameters, RsaPublicKeyComponents};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::{Algorithm, DecodingKey, crypto};
use serde_json::Value;

use super::Jws;

/// A token without a `kid` is tried with every key, so a document cannot make that arbitrarily slow.
const KEYS_MAX: usize = 64;

/// The keys in force at one moment; replaced whole, never changed.
#[derive(Debug, Clone)]
pub struct KeySet {
    keys: Arc<[SigningKey]>,
}

#[derive(Debug)]
struct SigningKey {
    kid: Option<String>,
    key: DecodingKey,
}

impl KeySet {
    /// One nameless key from a PEM (`PUBLIC KEY` or `RSA PUBLIC KEY`); `None` unless it is RSA of 2048 to 8192 bits.
    pub(super) fn from_pem(pem: &str) -> Option<Self> {
        let key = DecodingKey::from_rsa_pem(pem.as_bytes()).ok()?;
        let bits = RsaParameters::public_modulus_len(key.try_get_as_bytes().ok()?).ok()?;
        let accepted = RSA_PKCS1_2048_8192_SHA256.min_modulus_len()..=RSA_PKCS1_2048_8192_SHA256.max_modulus_len();
        accepted.contains(&bits).then(|| Self { keys: Arc::new([SigningKey { kid: None, key }]) })
    }

    /// The usable keys of a published document, or its older `public_key` PEM when there is none; `None` without either.
    pub(super) fn from_document(document: &Value) -> Option<Self> {
        let entries = document.get("keys").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let keys: Arc<[SigningKey]> = entries.iter().filter_map(SigningKey::from_jwk).take(KEYS_MAX).collect();
        if keys.is_empty() {
            return document.get("public_key").and_then(Value::as_str).and_then(Self::from_pem);
        }
        Some(Self { keys })
    }

    /// Whether a token naming `kid` may mean a key published after this set was read.
    pub(super) fn may_miss(&self, kid: &str) -> bool {
        let mut names = self.keys.iter().filter_map(|key| key.kid.as_deref()).peekable();
        names.peek().is_some() && names.all(|name| name != kid)
    }

    /// Whether one of the keys made the signature: those the token names, or every key when it names none of these.
    #[must_use]
    pub fn verifies(&self, token: &Jws<'_>) -> bool {
        let named = |key: &&SigningKey| token.kid().is_some() && key.kid.as_deref() == token.kid();
        let any_named = self.keys.iter().any(|key| named(&key));
        self.keys.iter().filter(|key| !any_named || named(key)).any(|key| key.verifies(token))
    }
}

impl SigningKey {
    fn from_jwk(jwk: &Value) -> Option<Self> {
        let is = |member: &str, wanted: &str| jwk.get(member).and_then(Value::as_str) == Some(wanted);
        let absent_or = |member: &str, wanted: &str| jwk.get(member).is_none() || is(member, wanted);
        if !(is("kty", "RSA") && absent_or("use", "sig") && absent_or("alg", "RS256")) {
            return None;
        }
        let number = |member: &str| URL_SAFE_NO_PAD.decode(jwk.get(member)?.as_str()?).ok();
        let (n, e) = (number("n")?, number("e")?);
        // Some writers pad the modulus with a zero byte; the key is the same number without it.
        let n = &n[n.iter().position(|byte| *byte != 0)?..];
        // Parsing is what refuses an impossible exponent or a modulus outside 2048..=8192 bits.
        RsaPublicKeyComponents { n, e: &e[..] }.to_parsed_public_key(&RSA_PKCS1_2048_8192_SHA256).ok()?;
        let kid = jwk.get("kid").and_then(Value::as_str).map(str::to_owned);
        Some(Self { kid, key: DecodingKey::from_rsa_raw_components(n, &e) })
    }

    fn verifies(&self, token: &Jws<'_>) -> bool {
        crypto::verify(token.signature(), token.signed(), &self.key, Algorithm::RS256).unwrap_or(false)
    }
}
