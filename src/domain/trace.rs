//! W3C trace context and request ids as they travel in headers.

use std::fmt;

use super::ids::{is_hex_of, is_trace_id, new_span_id, new_trace_id};

const SAMPLED: &str = "01";

/// A `traceparent` header, version 00.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Traceparent {
    trace_id: String,
    span_id: String,
    flags: String,
}

impl Traceparent {
    /// Reads a header value, ignoring case and white space around it. Another version, a wrong length or an id of zeros
    /// only is no trace context.
    pub fn parse(header: &str) -> Option<Self> {
        let header = header.trim().to_ascii_lowercase();
        let mut parts = header.split('-');
        let (version, trace_id, span_id, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let zero = |id: &str| id.bytes().all(|b| b == b'0');
        let valid = parts.next().is_none()
            && version == "00"
            && is_trace_id(trace_id)
            && is_hex_of(16, span_id)
            && is_hex_of(2, flags)
            && !zero(trace_id)
            && !zero(span_id);
        valid.then(|| Self {
            trace_id: trace_id.to_owned(),
            span_id: span_id.to_owned(),
            flags: flags.to_owned(),
        })
    }

    /// Begins a new random trace, sampled.
    pub fn start() -> Self {
        Self::of_trace(&new_trace_id())
    }

    /// A new span, sampled, of a trace known by its 32 hexadecimal digits.
    pub fn of_trace(trace_id: &str) -> Self {
        Self {
            trace_id: trace_id.to_owned(),
            span_id: new_span_id(),
            flags: SAMPLED.to_owned(),
        }
    }

    /// A new span of the same trace with the same flags.
    pub fn next_span(&self) -> Self {
        Self {
            span_id: new_span_id(),
            ..self.clone()
        }
    }

    /// The trace id, 32 lower-case hexadecimal digits.
    pub fn trace_id(&self) -> &str {
        &self.trace_id
    }
}

impl fmt::Display for Traceparent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{}-{}-{}", self.trace_id, self.span_id, self.flags)
    }
}

/// Whether a caller's request id is taken over: 8 to 128 characters of `[A-Za-z0-9._-]`.
pub fn is_request_id(text: &str) -> bool {
    (8..=128).contains(&text.len())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";

    #[test]
    fn a_callers_trace_goes_on_with_its_flags() {
        let parent = Traceparent::parse(&format!(" {} ", HEADER.to_uppercase())).expect("valid");
        assert_eq!(parent.to_string(), HEADER);
        let next = parent.next_span();
        assert_eq!(next.trace_id(), "0af7651916cd43dd8448eb211c80319c");
        assert!(next.to_string().ends_with("-00") && next != parent);
        assert_eq!(Traceparent::parse(&next.to_string()), Some(next));
    }

    #[test]
    fn new_traces_are_valid_and_sampled() {
        let fresh = Traceparent::start();
        assert!(fresh.to_string().ends_with("-01"));
        assert_eq!(Traceparent::parse(&fresh.to_string()), Some(fresh.clone()));
        assert_eq!(Traceparent::of_trace(fresh.trace_id()).trace_id(), fresh.trace_id());
    }

    #[test]
    fn anything_else_is_no_trace_context() {
        for bad in [
            "",
            "00",
            "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0af7651916cd43dd8448eb211c80319-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x",
            "00-0af7651916cd43dd8448eb211c80319g-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-1",
            "00_0af7651916cd43dd8448eb211c80319c_b7ad6b7169203331_01",
        ] {
            assert_eq!(Traceparent::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn request_ids() {
        for good in ["12345678", "req_0af7651916cd43dd8448eb21", "A.b-c_d9", &"x".repeat(128)] {
            assert!(is_request_id(good), "{good}");
        }
        for bad in [
            "",
            "1234567",
            "bad id with spaces",
            "12345678\n",
            "12345678é",
            &"x".repeat(129),
        ] {
            assert!(!is_request_id(bad), "{bad:?}");
        }
    }
}
