//! Signature version 2 of webhook deliveries: signing the exact bytes sent, and verifying as a receiver must.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::ids::is_hex_of;

/// The signature of a body at a time: lower-case hex of HMAC-SHA256, keyed with the whole secret string, over the decimal
/// seconds, a dot and the raw body.
pub fn sign_v2(secret: &str, unix_s: i64, body: &[u8]) -> String {
    hex::encode(mac(secret, &unix_s.to_string(), body).finalize().into_bytes())
}

/// The value of `X-OpenVibe-Signature-V2`: `t=<seconds>` and one `v2=<hex>` for each secret in force.
pub fn header_v2(unix_s: i64, secrets: &[&str], body: &[u8]) -> String {
    let mut header = format!("t={unix_s}");
    for secret in secrets {
        header.push_str(",v2=");
        header.push_str(&sign_v2(secret, unix_s, body));
    }
    header
}

/// Whether a delivery is genuine and fresh. The header must have exactly one `t` of 1 to 12 digits and at least one `v2`,
/// every part must have a `=`, and parts of other names are ignored. `timestamp_header`, when there is one, must equal
/// `t`, and `t` may lie at most `tolerance_s` seconds on either side of `now_s`. Signatures are compared in constant time.
pub fn verify_v2(
    header: &str,
    timestamp_header: Option<&str>,
    body: &[u8],
    secret: &str,
    now_s: i64,
    tolerance_s: i64,
) -> bool {
    let Some((stamp, signatures)) = parts(header) else {
        return false;
    };
    if timestamp_header.is_some_and(|own| own != stamp) {
        return false;
    }
    let Ok(stamp_s) = stamp.parse::<i64>() else {
        return false;
    };
    if u64::try_from(tolerance_s).map_or(true, |tolerance| now_s.abs_diff(stamp_s) > tolerance) {
        return false;
    }
    let expected = mac(secret, stamp, body);
    signatures.iter().any(|signature| {
        hex::decode(signature).is_ok_and(|signature| expected.clone().verify_slice(&signature).is_ok())
    })
}

/// A new signing secret: `whsec_` and 64 lower-case hexadecimal digits.
pub fn new_secret() -> String {
    format!("whsec_{}", hex::encode(rand::random::<[u8; 32]>()))
}

fn mac(secret: &str, stamp: &str, body: &[u8]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).expect("HMAC takes a key of any length");
    mac.update(stamp.as_bytes());
    mac.update(b".");
    mac.update(body);
    mac
}

/// The one timestamp and the well-formed signatures of a header.
fn parts(header: &str) -> Option<(&str, Vec<&str>)> {
    let mut stamp = None;
    let mut signatures = Vec::new();
    for part in header.split(',') {
        match part.split_once('=')? {
            ("t", text) if stamp.is_none() => stamp = Some(text),
            ("t", _) => return None,
            ("v2", text) => signatures.push(text),
            _ => {}
        }
    }
    let stamp = stamp.filter(|text| (1..=12).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit()))?;
    signatures.retain(|text| is_hex_of(64, text));
    (!signatures.is_empty()).then_some((stamp, signatures))
}
