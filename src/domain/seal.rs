//! Signing secrets as they are stored: sealed with keys that the database does not hold, so that a copy of it signs nothing.
//!
//! A sealed secret is `sealed:1:<key>:<base64url>`: the id of its key, then nonce, ciphertext and tag of AES-256-GCM. The
//! subscription is part of what the tag covers, so that a row's secret opens in no other row. Whatever does not begin like
//! that is a secret stored as it was given.

use std::fmt;

use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};
use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

/// How every sealed secret begins; no secret may be given that begins so.
const SEALED: &str = "sealed:1:";
/// Bytes of the digest that name a key.
const KEY_ID_BYTES: usize = 4;

/// A signing secret that `Debug` never shows.
#[derive(Clone, PartialEq, Eq)]
pub struct SigningSecret(String);

impl SigningSecret {
    /// The secret itself, for the one call that signs.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for SigningSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

/// Why a stored secret cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unopened {
    /// Its key is not among those configured.
    #[error("EVENTS_SECRET_KEY holds no key that opens the signing secret: it was sealed with key {0}")]
    NoKey(String),
    /// The key is there and the text is not what it sealed for this subscription.
    #[error("the stored signing secret is damaged, or belongs to another subscription")]
    Damaged,
}

/// The keys that seal, newest first; the default has none and stores secrets as they are given.
#[derive(Default)]
pub struct Sealer {
    keys: Vec<Key>,
}

struct Key {
    id: String,
    aead: RandomizedNonceKey,
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ids: Vec<&str> = self.keys.iter().map(|key| key.id.as_str()).collect();
        f.debug_struct("Sealer").field("keys", &ids).finish()
    }
}

impl Sealer {
    /// Seals with the first of these keys and opens with any of them.
    pub fn new<'a>(keys: impl IntoIterator<Item = &'a [u8; 32]>) -> Self {
        let key = |bytes: &[u8; 32]| Key {
            id: key_id(bytes),
            aead: RandomizedNonceKey::new(&AES_256_GCM, bytes).expect("32 bytes are a key of AES-256"),
        };
        Self {
            keys: keys.into_iter().map(key).collect(),
        }
    }

    /// The secret as it is to be stored for a subscription.
    pub fn seal(&self, secret: &str, subscription_id: &str) -> String {
        let Some(key) = self.keys.first() else {
            return secret.to_owned();
        };
        let mut sealed = secret.as_bytes().to_vec();
        let nonce = key
            .aead
            .seal_in_place_append_tag(Aad::from(subscription_id), &mut sealed)
            .expect("a short text can be sealed");
        let mut bytes = nonce.as_ref().to_vec();
        bytes.append(&mut sealed);
        format!("{SEALED}{}:{}", key.id, URL_SAFE_NO_PAD.encode(bytes))
    }

    /// The secret that was stored for a subscription.
    pub fn open(&self, stored: &str, subscription_id: &str) -> Result<SigningSecret, Unopened> {
        let Some(sealed) = stored.strip_prefix(SEALED) else {
            return Ok(SigningSecret(stored.to_owned()));
        };
        let (id, text) = sealed.split_once(':').ok_or(Unopened::Damaged)?;
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| Unopened::Damaged)?;
        let mut known = false;
        // Two keys can share an id; the tag tells them apart.
        for key in self.keys.iter().filter(|key| key.id == id) {
            known = true;
            let (nonce, body) = bytes.split_at_checked(NONCE_LEN).ok_or(Unopened::Damaged)?;
            let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| Unopened::Damaged)?;
            let mut body = body.to_vec();
            if let Ok(opened) = key.aead.open_in_place(nonce, Aad::from(subscription_id), &mut body) {
                return String::from_utf8(opened.to_vec())
                    .map(SigningSecret)
                    .map_err(|_| Unopened::Damaged);
            }
        }
        // An id comes out of the database; what is shown of it is bounded.
        let shown = || {
            id.chars()
                .filter(char::is_ascii_hexdigit)
                .take(2 * KEY_ID_BYTES)
                .collect()
        };
        Err(if known {
            Unopened::Damaged
        } else {
            Unopened::NoKey(shown())
        })
    }

    /// Whether a key with this id is there, as [`sealed_by`] tells it; what was stored as it was given needs none.
    pub fn has_key(&self, id: Option<&str>) -> bool {
        id.is_none_or(|id| self.keys.iter().any(|key| key.id == id))
    }

    /// How what is sealed with the newest key begins; `None` where nothing is sealed.
    pub fn newest_prefix(&self) -> Option<String> {
        self.keys.first().map(|key| format!("{SEALED}{}:", key.id))
    }
}

/// Whether a given secret could be taken for a sealed one.
pub fn looks_sealed(secret: &str) -> bool {
    secret.starts_with(SEALED)
}

/// The id of the key that sealed a stored secret, of which the start is enough; `None` where it was stored as it was given.
pub fn sealed_by(stored: &str) -> Option<&str> {
    stored.strip_prefix(SEALED)?.split(':').next()
}

/// Names a key without telling anything about it.
fn key_id(bytes: &[u8; 32]) -> String {
    let mut named = b"openvibe-events key id ".to_vec();
    named.extend_from_slice(bytes);
    hex::encode(&digest(&SHA256, &named).as_ref()[..KEY_ID_BYTES])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SUB: &str = "sub_01K7AAB2CD3EF4GH5JK6MN7PQR";
    const SECRET: &str = "whsec_0123456789abcdef0123456789abcdef";

    fn opened(sealer: &Sealer, stored: &str) -> Result<String, Unopened> {
        sealer.open(stored, SUB).map(|secret| secret.expose().to_owned())
    }

    #[test]
    fn what_is_sealed_opens_with_its_key_in_its_row_and_never_reads_the_same() {
        let sealer = Sealer::new([&[7; 32]]);
        let stored = sealer.seal(SECRET, SUB);
        assert!(looks_sealed(&stored) && !stored.contains("whsec"), "{stored}");
        assert!(stored.starts_with(&sealer.newest_prefix().expect("a key")));
        assert_eq!(opened(&sealer, &stored), Ok(SECRET.to_owned()));
        assert_ne!(sealer.seal(SECRET, SUB), stored, "a nonce of its own");
        let elsewhere = sealer.open(&stored, "sub_01K7AAB2CD3EF4GH5JK6MN7PQS");
        assert_eq!(elsewhere, Err(Unopened::Damaged));
    }

    #[test]
    fn keys_are_rotated_by_putting_a_new_one_in_front() {
        let (old, new) = ([1; 32], [2; 32]);
        let stored = Sealer::new([&old]).seal(SECRET, SUB);
        let both = Sealer::new([&new, &old]);
        assert_eq!(opened(&both, &stored), Ok(SECRET.to_owned()));
        let again = both.seal(SECRET, SUB);
        assert_eq!(opened(&Sealer::new([&new]), &again), Ok(SECRET.to_owned()));
        let id = stored.split(':').nth(2).expect("the id of its key").to_owned();
        assert_eq!(opened(&Sealer::new([&new]), &stored), Err(Unopened::NoKey(id)));
        assert!(matches!(opened(&Sealer::default(), &stored), Err(Unopened::NoKey(_))));
    }

    #[test]
    fn without_keys_and_from_before_them_secrets_are_as_given() {
        assert_eq!(Sealer::default().seal(SECRET, SUB), SECRET);
        assert_eq!(Sealer::default().newest_prefix(), None);
        assert_eq!(opened(&Sealer::new([&[7; 32]]), SECRET), Ok(SECRET.to_owned()));
    }

    #[test]
    fn nothing_that_is_printed_holds_a_secret_or_a_key() {
        let sealer = Sealer::new([&[7; 32]]);
        let secret = sealer.open(SECRET, SUB);
        let printed = format!("{sealer:?} {secret:?}");
        assert!(!printed.contains(SECRET) && !printed.contains("7, 7"), "{printed}");
    }

    proptest! {
        #[test]
        fn no_stored_text_panics_and_no_changed_one_opens(text in ".{0,80}", at in any::<prop::sample::Index>(), to in any::<u8>()) {
            let sealer = Sealer::new([&[7; 32]]);
            let _ = sealer.open(&text, SUB);
            let _ = sealer.open(&format!("{SEALED}{text}"), SUB);
            let prefix = sealer.newest_prefix().expect("a key");
            let made_up = format!("{prefix}{text}");
            prop_assert!(sealer.open(&made_up, SUB).is_err());
            let stored = sealer.seal(&text, SUB);
            prop_assert_eq!(opened(&sealer, &stored), Ok(text));
            let mut bytes = URL_SAFE_NO_PAD.decode(&stored[prefix.len()..]).expect("base64");
            let at = at.index(bytes.len());
            if bytes[at] != to {
                bytes[at] = to;
                let changed = format!("{prefix}{}", URL_SAFE_NO_PAD.encode(bytes));
                prop_assert_eq!(opened(&sealer, &changed), Err(Unopened::Damaged));
            }
        }
    }
}
