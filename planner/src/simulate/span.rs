//! Spans of time as scenarios write them: `90s`, `15m`, `1h30m`, `30d`.

use std::time::Duration;

/// A span of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Span(pub(super) Duration);

/// Longest span that is read: a century, so that sums stay far from any limit.
const SECONDS_MAX: u64 = 100 * 366 * 86_400;

impl Span {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut rest = text;
        let mut total = Duration::ZERO;
        while !rest.is_empty() {
            let digits = rest.find(|own: char| !own.is_ascii_digit()).filter(|end| *end > 0)?;
            let count: u64 = rest[..digits].parse().ok()?;
            rest = &rest[digits..];
            let end = rest.find(|own: char| own.is_ascii_digit()).unwrap_or(rest.len());
            let unit_s = match &rest[..end] {
                "s" => 1,
                "m" => 60,
                "h" => 3_600,
                "d" => 86_400,
                _ => return None,
            };
            rest = &rest[end..];
            total += Duration::from_secs(count.checked_mul(unit_s).filter(|seconds| *seconds <= SECONDS_MAX)?);
        }
        (!text.is_empty() && total.as_secs() <= SECONDS_MAX).then_some(Self(total))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_numbers_with_units() {
        for (text, seconds) in [
            ("0s", 0),
            ("90s", 90),
            ("15m", 900),
            ("1h30m", 5400),
            ("30d", 2_592_000),
            ("1d1h1m1s", 90_061),
        ] {
            assert_eq!(Span::parse(text).map(|span| span.0.as_secs()), Some(seconds), "{text}");
        }
        for text in [
            "",
            "s",
            "5",
            "5 m",
            "-5m",
            "1.5h",
            "5w",
            "5ms",
            "m5",
            "99999999999d",
            "18446744073709551616s",
            "5é",
        ] {
            assert_eq!(Span::parse(text), None, "{text}");
        }
    }
}
