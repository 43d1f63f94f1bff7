//! Epoch milliseconds and one strict RFC 3339 reader; it reads no clock and never panics on any text.

use std::fmt;

use serde::{Serialize, Serializer};

const DAY_MS: i64 = 86_400_000;

/// Milliseconds since the Unix epoch, UTC. On the wire it is an ISO 8601 string such as `2026-09-23T12:00:00.000Z`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Millis(pub i64);

impl Millis {
    /// The instant as ISO 8601 in UTC with milliseconds. Years outside 0000-9999 get a sign and at least six digits.
    pub fn to_iso(self) -> String {
        self.to_string()
    }
}

impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (year, month, day) = civil_from_days(self.0.div_euclid(DAY_MS));
        let ms = self.0.rem_euclid(DAY_MS);
        let (hour, minute, second, milli) = (ms / 3_600_000, ms / 60_000 % 60, ms / 1000 % 60, ms % 1000);
        if (0..=9999).contains(&year) {
            write!(f, "{year:04}")?;
        } else {
            write!(f, "{year:+07}")?;
        }
        write!(f, "-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milli:03}Z")
    }
}

impl Serialize for Millis {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Whether the text is an RFC 3339 date and time with a zone.
pub fn is_rfc3339(text: &str) -> bool {
    parse_rfc3339(text).is_some()
}

/// Reads an RFC 3339 date and time. The zone is mandatory, the day must exist, `T` and `Z` may be in lower case, and a
/// second 60 is accepted only where it falls on 23:59:60 UTC. Digits past the millisecond are dropped.
pub fn parse_rfc3339(text: &str) -> Option<Millis> {
    let mut rest = text.as_bytes();
    let year = digits(&mut rest, 4)?;
    literal(&mut rest, b"-")?;
    let month = digits(&mut rest, 2)?;
    literal(&mut rest, b"-")?;
    let day = digits(&mut rest, 2)?;
    literal(&mut rest, b"Tt")?;
    let hour = digits(&mut rest, 2)?;
    literal(&mut rest, b":")?;
    let minute = digits(&mut rest, 2)?;
    literal(&mut rest, b":")?;
    let second = digits(&mut rest, 2)?;
    let milli = fraction_ms(&mut rest)?;
    let offset_minutes = zone_minutes(&mut rest)?;
    if !rest.is_empty() || !(1..=12).contains(&month) || !(1..=days_in_month(year, month)).contains(&day) {
        return None;
    }
    if hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    let utc_minutes = (days_from_civil(year, month, day) * 24 + hour) * 60 + minute - offset_minutes;
    if second == 60 && utc_minutes.rem_euclid(1440) != 1439 {
        return None;
    }
    Some(Millis((utc_minutes * 60 + second) * 1000 + milli))
}

fn digits(rest: &mut &[u8], count: usize) -> Option<i64> {
    let (head, tail) = rest.split_at_checked(count)?;
    if !head.iter().all(u8::is_ascii_digit) {
        return None;
    }
    *rest = tail;
    Some(head.iter().fold(0, |value, b| value * 10 + i64::from(b - b'0')))
}

fn literal(rest: &mut &[u8], any_of: &[u8]) -> Option<u8> {
    let (first, tail) = rest.split_first()?;
    *rest = tail;
    any_of.contains(first).then_some(*first)
}

fn fraction_ms(rest: &mut &[u8]) -> Option<i64> {
    let Some(tail) = rest.strip_prefix(b".") else {
        return Some(0);
    };
    let count = tail.iter().take_while(|b| b.is_ascii_digit()).count();
    let (fraction, tail) = tail.split_at(count);
    *rest = tail;
    (count > 0).then(|| (0..3).fold(0, |ms, i| ms * 10 + fraction.get(i).map_or(0, |b| i64::from(b - b'0'))))
}

fn zone_minutes(rest: &mut &[u8]) -> Option<i64> {
    let sign = match literal(rest, b"Zz+-")? {
        b'+' => 1,
        b'-' => -1,
        _ => return Some(0),
    };
    let hours = digits(rest, 2)?;
    literal(rest, b":")?;
    let minutes = digits(rest, 2)?;
    (hours <= 23 && minutes <= 59).then_some(sign * (hours * 60 + minutes))
}

fn is_leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

fn days_in_month(year: i64, month: i64) -> i64 {
    match month {
        2 if is_leap(year) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Days since 1970-01-01 in the proleptic Gregorian calendar, counted in 400-year eras that begin on 1 March.
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

/// The inverse of [`days_from_civil`].
fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 {
        shifted_month + 3
    } else {
        shifted_month - 9
    };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn accepts_what_rfc_3339_allows() {
        for (text, iso) in [
            ("1970-01-01T00:00:00Z", "1970-01-01T00:00:00.000Z"),
            ("2026-10-21T08:15:30.250Z", "2026-10-21T08:15:30.250Z"),
            ("2026-10-21T10:15:30+02:00", "2026-10-21T08:15:30.000Z"),
            ("2026-10-21t08:15:30.25z", "2026-10-21T08:15:30.250Z"),
            ("2026-10-21T08:15:30.123999999999999999999Z", "2026-10-21T08:15:30.123Z"),
            ("2024-02-29T00:00:00Z", "2024-02-29T00:00:00.000Z"),
            ("2000-02-29T00:00:00Z", "2000-02-29T00:00:00.000Z"),
            ("2026-01-01T00:00:00-00:00", "2026-01-01T00:00:00.000Z"),
            ("2026-01-01T00:00:00+23:59", "2025-12-31T00:01:00.000Z"),
            ("2016-12-31T23:59:60Z", "2017-01-01T00:00:00.000Z"),
            ("2017-01-01T00:59:60.5+01:00", "2017-01-01T00:00:00.500Z"),
            ("0000-01-01T00:00:00Z", "0000-01-01T00:00:00.000Z"),
            ("0000-01-01T00:00:00+00:01", "-000001-12-31T23:59:00.000Z"),
            ("9999-12-31T23:59:59.999Z", "9999-12-31T23:59:59.999Z"),
            ("9999-12-31T23:59:60Z", "+010000-01-01T00:00:00.000Z"),
        ] {
            assert_eq!(parse_rfc3339(text).map(Millis::to_iso).as_deref(), Some(iso), "{text}");
        }
    }

    #[test]
    fn refuses_what_it_does_not() {
        for text in [
            "",
            "yesterday",
            "2026-09-23",
            "2026-10-21T08:15:30",
            "2026-10-21 08:15:30Z",
            "2026-10-21T08:15Z",
            "2026-10-21T08:15:30.Z",
            "2026-10-21T08:15:30,5Z",
            "2026-10-21T08:15:30+0200",
            "2026-10-21T08:15:30+02",
            "2026-10-21T08:15:30+24:00",
            "2026-10-21T08:15:30+02:60",
            "2026-10-21T24:00:00Z",
            "2026-10-21T08:60:00Z",
            "2026-10-21T08:15:61Z",
            "2026-10-21T08:15:60Z",
            "2016-12-31T22:59:60Z",
            "2016-12-31T23:59:60+01:00",
            "2026-13-01T00:00:00Z",
            "2026-00-01T00:00:00Z",
            "2026-01-00T00:00:00Z",
            "2026-02-29T00:00:00Z",
            "1900-02-29T00:00:00Z",
            "2026-04-31T00:00:00Z",
            "20260-01-01T00:00:00Z",
            "+2026-01-01T00:00:00Z",
            "-001-01-01T00:00:00Z",
            "2026-10-21T08:15:30Z ",
            " 2026-10-21T08:15:30Z",
            "2026-10-21T08:15:30Z\n",
            "2026-10-21T08:15:30ZZ",
            "２026-10-21T08:15:30Z",
            "2026-10-21T08:15:30é",
        ] {
            assert_eq!(parse_rfc3339(text), None, "{text:?}");
        }
    }

    #[test]
    fn goes_on_the_wire_as_a_string() {
        assert_eq!(
            serde_json::to_string(&Millis(1_790_164_800_000)).expect("json"),
            "\"2026-09-23T12:00:00.000Z\""
        );
        assert_eq!(Millis(-1).to_iso(), "1969-12-31T23:59:59.999Z");
    }

    proptest! {
        #[test]
        fn what_is_written_reads_back(ms in -62_167_219_200_000_i64..=253_402_300_799_999) {
            prop_assert_eq!(parse_rfc3339(&Millis(ms).to_iso()), Some(Millis(ms)));
        }

        #[test]
        fn agrees_with_the_time_crate(ms in -62_167_219_200_000_i64..=253_402_300_799_999) {
            let there = time::OffsetDateTime::from_unix_timestamp_nanos(i128::from(ms) * 1_000_000).expect("in range");
            let (y, mo, d) = there.to_calendar_date();
            let (h, mi, s, milli) = there.to_hms_milli();
            let month = u8::from(mo);
            prop_assert_eq!(Millis(ms).to_iso(), format!("{y:04}-{month:02}-{d:02}T{h:02}:{mi:02}:{s:02}.{milli:03}Z"));
        }

        #[test]
        fn no_number_panics(ms in any::<i64>()) {
            prop_assert!(Millis(ms).to_iso().ends_with('Z'));
        }

        #[test]
        fn no_text_panics(text in "[0-9TtZz:+.é -]{0,40}") {
            let _ = parse_rfc3339(&text);
        }
    }
}
