//! A set of signing keys, read from a PEM or from a published key document.

use std::ops::RangeInclusive;

use aws_lc_rs::encoding::AsDer as _;
use aws_lc_rs::rsa::PublicKey;
use aws_lc_rs::signature::RsaPublicKeyComponents;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hashlink::LruCache;
use jsonwebtoken::{Algorithm, DecodingKey, crypto};
use parking_lot::Mutex;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::Jws;

const MODULUS_BITS: RangeInclusive<usize> = 2048..=8192;
/// A token without a `kid` is tried with every key, so a document cannot make that arbitrarily slow.
const KEYS_MAX: usize = 64;
/// Tokens remembered; the least recently used one is forgotten first.
const HELD_MAX: usize = 4_096;

/// The keys in force at one moment; replaced whole, never changed.
#[derive(Debug)]
pub struct KeySet {
    keys: Box<[SigningKey]>,
    /// Digests of tokens whose signature held. They are forgotten with the set, so a withdrawn key takes them along.
    held: Mutex<LruCache<[u8; 32], ()>>,
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
        let key = SigningKey::new(None, key.try_get_as_bytes().ok()?)?;
        Some(Self::new(Box::new([key])))
    }

    /// The usable keys of a published document, or its older `public_key` PEM when there is none; `None` without either.
    pub(super) fn from_document(document: &Value) -> Option<Self> {
        let entries = document
            .get("keys")
            .and_then(Value::as_array)
            .map_or(&[][..], Vec::as_slice);
        let keys: Box<[SigningKey]> = entries.iter().filter_map(SigningKey::from_jwk).take(KEYS_MAX).collect();
        if keys.is_empty() {
            return document
                .get("public_key")
                .and_then(Value::as_str)
                .and_then(Self::from_pem);
        }
        Some(Self::new(keys))
    }

    fn new(keys: Box<[SigningKey]>) -> Self {
        Self {
            keys,
            held: Mutex::new(LruCache::new(HELD_MAX)),
        }
    }

    /// Whether a token naming `kid` may mean a key published after this set was read.
    pub(super) fn may_miss(&self, kid: &str) -> bool {
        let mut names = self.keys.iter().filter_map(|key| key.kid.as_deref()).peekable();
        names.peek().is_some() && names.all(|name| name != kid)
    }

    /// Whether one of the keys made the signature: those the token names, or every key when it names none of these.
    #[must_use]
    pub fn verifies(&self, token: &Jws<'_>) -> bool {
        // To check one signature costs as much as all else that a small request does; callers send a token many times.
        let digest: [u8; 32] = Sha256::new()
            .chain_update(token.signed())
            .chain_update([b'.'])
            .chain_update(token.signature())
            .finalize()
            .into();
        if self.held.lock().get(&digest).is_some() {
            return true;
        }
        let holds = self.signed_by_one(token);
        if holds {
            self.held.lock().insert(digest, ());
        }
        holds
    }

    fn signed_by_one(&self, token: &Jws<'_>) -> bool {
        let named = |key: &&SigningKey| token.kid().is_some() && key.kid.as_deref() == token.kid();
        let any_named = self.keys.iter().any(|key| named(&key));
        self.keys
            .iter()
            .filter(|key| !any_named || named(key))
            .any(|key| key.verifies(token))
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
        let der = RsaPublicKeyComponents { n, e: &e[..] }.as_der().ok()?;
        Self::new(jwk.get("kid").and_then(Value::as_str).map(str::to_owned), der.as_ref())
    }

    /// Parsing refuses numbers that are no RSA key, such as an even exponent; the size is checked here.
    fn new(kid: Option<String>, der: &[u8]) -> Option<Self> {
        let public = PublicKey::from_der(der).ok()?;
        let modulus = public.modulus();
        let modulus = modulus.big_endian_without_leading_zero();
        let bits = 8 * modulus.len() - modulus.first()?.leading_zeros() as usize;
        MODULUS_BITS.contains(&bits).then(|| Self {
            kid,
            key: DecodingKey::from_rsa_der(public.as_ref()),
        })
    }

    fn verifies(&self, token: &Jws<'_>) -> bool {
        crypto::verify(token.signature(), token.signed(), &self.key, Algorithm::RS256).unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::identity::testing::{key, with};

    fn holds(set: &KeySet, token: &str) -> bool {
        set.verifies(&Jws::parse(token).expect("well-formed"))
    }

    fn document(keys: &[Value]) -> Option<KeySet> {
        KeySet::from_document(&json!({"keys": keys, "algorithm": "RS256"}))
    }

    #[test]
    fn only_a_usable_key_is_taken() {
        let good = key("k1").jwk();
        let number = |bytes: &[u8]| Value::from(URL_SAFE_NO_PAD.encode(bytes));
        let mut just_short = [0xff; 256];
        just_short[0] = 0x7f;
        let unusable = [
            with(good.clone(), json!({"kty": "EC"})),
            with(good.clone(), json!({"kty": null})),
            with(good.clone(), json!({"use": "enc"})),
            with(good.clone(), json!({"alg": "RS512"})),
            with(good.clone(), json!({"n": null})),
            with(good.clone(), json!({"n": "not base64url!"})),
            with(good.clone(), json!({"n": ""})),
            with(good.clone(), json!({"e": ""})),
            with(good.clone(), json!({"e": "AQ"})),
            with(good.clone(), json!({"e": "Ag"})),
            with(good.clone(), json!({"n": number(&[0xff; 128])})),
            with(good.clone(), json!({"n": number(&just_short)})),
            with(good.clone(), json!({"n": number(&[0xff; 1025])})),
            json!(null),
            json!("k1"),
        ];
        for entry in &unusable {
            assert!(document(std::slice::from_ref(entry)).is_none(), "{entry}");
        }
        let token = key("k1").token(&json!({}));
        let mut all = unusable.to_vec();
        all.push(good.clone());
        assert!(
            holds(&document(&all).expect("the good one stays"), &token),
            "a bad entry spoils no other"
        );
        for over in [json!({"use": null}), json!({"alg": null}), json!({"kid": null})] {
            assert!(
                holds(&document(&[with(good.clone(), over.clone())]).expect("usable"), &token),
                "{over}"
            );
        }
        let padded = URL_SAFE_NO_PAD
            .decode(good["n"].as_str().expect("text"))
            .expect("base64url");
        let padded = [&[0][..], &padded].concat();
        assert!(holds(
            &document(&[with(good, json!({"n": number(&padded)}))]).expect("usable"),
            &token
        ));
    }

    #[test]
    fn the_older_document_counts_only_when_no_key_is_usable() {
        let token = key("k1").token(&json!({}));
        let older = KeySet::from_document(&json!({"public_key": key("k1").pem(), "algorithm": "RS256"}));
        assert!(holds(&older.expect("usable"), &token));
        let both = KeySet::from_document(&json!({"public_key": key("k1").pem(), "keys": [key("k2").jwk()]}));
        assert!(!holds(&both.expect("usable"), &token), "keys win");
        for nothing in [
            json!({"algorithm": "HS256"}),
            json!({"public_key": "x"}),
            json!({"public_key": 1}),
            json!([]),
        ] {
            assert!(KeySet::from_document(&nothing).is_none(), "{nothing}");
        }
    }

    #[test]
    fn a_named_key_is_the_only_one_tried_and_an_unknown_name_tries_them_all() {
        let set = document(&[key("k1").jwk(), key("k2").jwk()]).expect("usable");
        assert!(holds(&set, &key("k2").token_naming("k2", &json!({}))));
        assert!(
            !holds(&set, &key("k2").token_naming("k1", &json!({}))),
            "the name binds"
        );
        assert!(holds(&set, &key("k2").token_naming("k9", &json!({}))));
        assert!(holds(&set, &key("k2").token(&json!({}))));
        assert!(!holds(&set, &key("rogue").token(&json!({}))));
    }

    #[test]
    fn a_document_cannot_make_a_token_cost_thousands_of_signatures() {
        let many = vec![key("k1").jwk(); 1000];
        assert_eq!(document(&many).expect("usable").keys.len(), KEYS_MAX);
    }
}
