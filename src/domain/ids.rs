//! Identifiers and the small text grammars shared by envelopes, tokens and headers; every check is on ASCII bytes.

use std::fmt;

use serde::{Serialize, Serializer};

const ULID_LEN: usize = 26;

/// Declares an id type: a fixed prefix, an underscore and a ULID in upper case.
macro_rules! prefixed_id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(String);

        impl $name {
            /// Accepts exactly the prefix, an underscore and 26 characters of upper-case Crockford base32.
            pub fn parse(text: &str) -> Option<Self> {
                is_prefixed_id($prefix, text).then(|| Self(text.to_owned()))
            }

            /// Makes a new id: the current millisecond followed by 80 random bits.
            pub fn generate() -> Self {
                Self(format!(concat!($prefix, "_{}"), ulid::Ulid::generate()))
            }

            /// The id as it is written on the wire.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.0)
            }
        }
    };
}

prefixed_id!(
    /// The producer's id of an event, `evt_<ULID>`: idempotency key for publishers, de-duplication key for consumers.
    EventId,
    "evt"
);

prefixed_id!(
    /// The id of a subscription, `sub_<ULID>`.
    SubscriptionId,
    "sub"
);

/// Whether the text is 26 characters of upper-case Crockford base32. The first character is not limited to 0-7.
pub fn is_ulid(text: &str) -> bool {
    text.len() == ULID_LEN
        && text
            .bytes()
            .all(|b| b.is_ascii_digit() || (b.is_ascii_uppercase() && !matches!(b, b'I' | b'L' | b'O' | b'U')))
}

/// Whether the text is `<prefix>_<ULID>`, for example `usr_01K7DDE5FG6HJ7KM8NP9QR0STV` with the prefix `usr`.
pub fn is_prefixed_id(prefix: &str, text: &str) -> bool {
    text.strip_prefix(prefix)
        .and_then(|rest| rest.strip_prefix('_'))
        .is_some_and(is_ulid)
}

/// Whether the text names a service or a source: 2 to 40 characters, a lower-case letter first, then `[a-z0-9-]`.
pub fn is_slug(text: &str) -> bool {
    (2..=40).contains(&text.len())
        && text.as_bytes()[0].is_ascii_lowercase()
        && text
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

/// Whether one dot-separated segment of an event type or a pattern is well formed: one or more of `[a-z0-9_]`.
pub(crate) fn is_segment(text: &str) -> bool {
    !text.is_empty()
        && text
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
}

/// Whether the text is an event type: three or more segments, the first of which begins with a letter. The grammar
/// sets no length; the envelope does.
pub fn is_event_type(text: &str) -> bool {
    text.bytes().next().is_some_and(|b| b.is_ascii_lowercase())
        && text.split('.').all(is_segment)
        && text.split('.').nth(2).is_some()
}

fn is_lower_hex(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'a'..=b'f'))
}

/// Whether the text is exactly `length` lower-case hexadecimal digits.
pub(crate) fn is_hex_of(length: usize, text: &str) -> bool {
    text.len() == length && is_lower_hex(text)
}

/// Whether the text is a trace id: 32 lower-case hexadecimal digits.
pub fn is_trace_id(text: &str) -> bool {
    is_hex_of(32, text)
}

/// A new random trace id, 32 lower-case hexadecimal digits and never all zero.
pub fn new_trace_id() -> String {
    loop {
        let bytes: [u8; 16] = rand::random();
        if bytes != [0; 16] {
            return hex::encode(bytes);
        }
    }
}

/// A new random span id, 16 lower-case hexadecimal digits and never all zero.
pub fn new_span_id() -> String {
    loop {
        let bytes: [u8; 8] = rand::random();
        if bytes != [0; 8] {
            return hex::encode(bytes);
        }
    }
}

/// A new request id, `req_` and 24 lower-case hexadecimal digits.
pub fn new_request_id() -> String {
    format!("req_{}", hex::encode(rand::random::<[u8; 12]>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ULID: &str = "01K7AAB2CD3EF4GH5JK6MN7PQR";

    #[test]
    fn ids_are_strict_about_prefix_length_case_and_alphabet() {
        assert_eq!(
            EventId::parse(&format!("evt_{ULID}")).expect("valid").as_str(),
            format!("evt_{ULID}")
        );
        assert!(
            EventId::parse("evt_ZZZZZZZZZZZZZZZZZZZZZZZZZZ").is_some(),
            "the first character is not limited"
        );
        for bad in [
            "",
            "evt_",
            "nope",
            "evt_01JAB",
            &format!("sub_{ULID}"),
            &format!("evt-{ULID}"),
            &format!("evt_{}", ULID.to_lowercase()),
            &format!("evt_{ULID}0"),
            &format!("evt_{ULID}\n"),
            &format!(" evt_{ULID}"),
            "evt_01JAB2C3D4E5F6G7H8J9K0MNIL",
            "evt_01K7AAB2CD3EF4GH5JK6MN7PQU",
            "evt_01K7AAB2CD3EF4GH5JK6MN7Pé",
        ] {
            assert!(EventId::parse(bad).is_none(), "{bad:?}");
        }
        assert!(SubscriptionId::parse(&format!("sub_{ULID}")).is_some());
        assert!(SubscriptionId::parse(&format!("evt_{ULID}")).is_none());
    }

    #[test]
    fn generated_ids_are_valid_and_differ() {
        let (a, b) = (EventId::generate(), EventId::generate());
        assert_ne!(a, b);
        assert_eq!(EventId::parse(a.as_str()), Some(a));
        let sub = SubscriptionId::generate();
        assert_eq!(SubscriptionId::parse(sub.as_str()), Some(sub));
        assert!(is_trace_id(&new_trace_id()));
        assert!(is_hex_of(16, &new_span_id()));
        assert!(
            new_request_id()
                .strip_prefix("req_")
                .is_some_and(|rest| is_hex_of(24, rest))
        );
    }

    #[test]
    fn an_id_is_a_plain_string_on_the_wire() {
        let id = EventId::parse(&format!("evt_{ULID}")).expect("valid");
        assert_eq!(serde_json::to_string(&id).expect("json"), format!("\"evt_{ULID}\""));
        assert_eq!(id.to_string(), format!("evt_{ULID}"));
    }

    #[test]
    fn slugs() {
        for good in [
            "ai",
            "live",
            "media-hub",
            "a0",
            "a-",
            &"a".repeat(40),
            "app-01k7ccd4ef5gh6jk7mn8pq9rst",
        ] {
            assert!(is_slug(good), "{good}");
        }
        for bad in [
            "",
            "a",
            "1a",
            "-a",
            "Live",
            "a_b",
            "a.b",
            "live\n",
            "é1",
            &"a".repeat(41),
        ] {
            assert!(!is_slug(bad), "{bad:?}");
        }
    }

    #[test]
    fn event_types() {
        for good in [
            "a.b.c",
            "live.stream.started",
            "a.1.2",
            "x_.__.0",
            "app.p01k7bbc3de4fg5hj6km7np8qrs.invoice.paid",
        ] {
            assert!(is_event_type(good), "{good}");
        }
        for bad in [
            "",
            "live",
            "live.started",
            "live.Stream.started",
            "live..started",
            ".live.a.b",
            "live.a.b.",
            "live.my-stream.started",
            "live.stream.*",
            "live.stream.started\n",
            "1live.stream.started",
            "_live.stream.started",
            "live.stream.é",
        ] {
            assert!(!is_event_type(bad), "{bad:?}");
        }
    }

    #[test]
    fn trace_ids() {
        assert!(is_trace_id("4bf92f3577b34da6a3ce929d0e0e4736"));
        for bad in ["", "abc", &"AB".repeat(16), &"g".repeat(32), &"a".repeat(33)] {
            assert!(!is_trace_id(bad), "{bad}");
        }
    }
}
