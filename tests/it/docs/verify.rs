//! The example in Rust of `docs/delivery.md`.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

pub(super) fn verify(raw_body: &[u8], signature: &str, secret: &str, now_s: u64, tolerance_s: u64) -> bool {
    let parts: Vec<(&str, &str)> = signature.split(',').filter_map(|part| part.split_once('=')).collect();
    let stamps: Vec<&str> = parts
        .iter()
        .filter(|(name, _)| *name == "t")
        .map(|(_, value)| *value)
        .collect();
    let [stamp] = stamps[..] else { return false };
    if !(1..=12).contains(&stamp.len()) || !stamp.bytes().all(|byte| byte.is_ascii_digit()) {
        return false;
    }
    if stamp
        .parse::<u64>()
        .is_ok_and(|sent_s| now_s.abs_diff(sent_s) > tolerance_s)
    {
        return false;
    }
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).expect("a key of any length");
    mac.update(stamp.as_bytes());
    mac.update(b".");
    mac.update(raw_body);
    parts.iter().any(|(name, value)| {
        *name == "v2" && hex::decode(value).is_ok_and(|given| mac.clone().verify_slice(&given).is_ok())
    })
}
