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
        let header = header.trim().to_lowercase();
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
