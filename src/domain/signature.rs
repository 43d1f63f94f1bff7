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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECRET: &str = "0123456789abcdef0123456789abcdef";
    const STAMP: i64 = 1_761_033_600;
    const BODY: &[u8] = br#"{"event":{}}"#;
    const HEX: &str = "45c000a8052ab1b1240ecb8ed34207dd76ecc9ec6d364659bf2f514c982bd136";

    fn verify(header: &str) -> bool {
        verify_v2(header, None, BODY, SECRET, STAMP, 300)
    }

    #[test]
    fn the_published_vector() {
        assert_eq!(sign_v2(SECRET, STAMP, BODY), HEX);
        assert_eq!(header_v2(STAMP, &[SECRET], BODY), format!("t={STAMP},v2={HEX}"));
    }

    #[test]
    fn both_secrets_verify_during_a_rotation() {
        let header = header_v2(STAMP, &["whsec_new", SECRET], BODY);
        assert!(verify(&header));
        assert!(verify_v2(&header, Some("1761033600"), BODY, "whsec_new", STAMP, 300));
        assert!(!verify_v2(&header, None, BODY, "whsec_other", STAMP, 300));
    }

    #[test]
    fn the_time_window_is_two_sided() {
        let header = header_v2(STAMP, &[SECRET], BODY);
        for (now, fresh) in [
            (STAMP - 301, false),
            (STAMP - 300, true),
            (STAMP + 300, true),
            (STAMP + 301, false),
            (i64::MIN, false),
            (i64::MAX, false),
        ] {
            assert_eq!(verify_v2(&header, None, BODY, SECRET, now, 300), fresh, "{now}");
        }
        assert!(!verify_v2(&header, None, BODY, SECRET, STAMP, -1));
    }

    #[test]
    fn the_separate_timestamp_must_agree() {
        let header = header_v2(STAMP, &[SECRET], BODY);
        assert!(verify_v2(&header, Some(&STAMP.to_string()), BODY, SECRET, STAMP, 300));
        for other in ["1761033601", "", "01761033600", "1761033600 "] {
            assert!(!verify_v2(&header, Some(other), BODY, SECRET, STAMP, 300), "{other:?}");
        }
    }

    #[test]
    fn parsing_is_strict() {
        assert!(verify(&format!("t={STAMP},v2={HEX},v3=ignored,x=")));
        assert!(verify(&format!("v2={},v2={HEX},t={STAMP}", "0".repeat(64))));
        let unsigned = |stamp: &str| {
            format!(
                "t={stamp},v2={}",
                hex::encode(mac(SECRET, stamp, BODY).finalize().into_bytes())
            )
        };
        assert!(verify(&unsigned("1761033600")));
        for bad in [
            String::new(),
            HEX.to_owned(),
            format!("v2={HEX}"),
            format!("t={STAMP}"),
            format!("t={STAMP},v2="),
            format!("t={STAMP},v2={}", &HEX[..62]),
            format!("t={STAMP},v2={HEX}00"),
            format!("t={STAMP},v2={}", HEX.to_uppercase()),
            format!("t={STAMP},v1={HEX}"),
            format!("t={STAMP},sha256={HEX}"),
            format!("t={STAMP},v2={HEX},"),
            format!("t={STAMP},v2={HEX},junk"),
            format!("t={STAMP},t={STAMP},v2={HEX}"),
            format!("t={STAMP}, v2={HEX}"),
            format!("t=+{STAMP},v2={HEX}"),
            format!("t= {STAMP},v2={HEX}"),
            unsigned("0001761033600"),
            unsigned("-1"),
            unsigned(""),
            unsigned("1761033600.0"),
        ] {
            assert!(!verify(&bad), "{bad:?}");
        }
    }

    #[test]
    fn new_secrets_have_the_published_form() {
        let secret = new_secret();
        assert!(
            secret.strip_prefix("whsec_").is_some_and(|rest| is_hex_of(64, rest)),
            "{secret}"
        );
        assert_ne!(secret, new_secret());
    }

    proptest! {
        #[test]
        fn what_is_signed_verifies_and_nothing_else(body: Vec<u8>, other: Vec<u8>, secret: String, stamp in 0..=999_999_999_999_i64) {
            let header = header_v2(stamp, &[&secret], &body);
            prop_assert!(verify_v2(&header, Some(&stamp.to_string()), &body, &secret, stamp, 0));
            prop_assert_eq!(verify_v2(&header, None, &other, &secret, stamp, 0), body == other);
        }

        #[test]
        fn no_header_panics(header in "[tv2=,0-9a-f é]{0,80}", now: i64, tolerance: i64) {
            let _ = verify_v2(&header, None, b"", "s", now, tolerance);
        }
    }
}
