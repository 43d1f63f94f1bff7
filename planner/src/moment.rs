//! Instants as milliseconds since 1970, and how answers and files spell them.

use time::OffsetDateTime;
use time::format_description::StaticFormatDescription;
use time::macros::format_description;

const ISO: StaticFormatDescription =
    format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:3]Z");

/// The instant in UTC; `None` outside of the calendar.
pub(crate) fn instant(ms: i64) -> Option<OffsetDateTime> {
    OffsetDateTime::from_unix_timestamp_nanos(i128::from(ms) * 1_000_000).ok()
}

/// Milliseconds since 1970 of an instant.
pub(crate) fn millis(instant: OffsetDateTime) -> i64 {
    i64::try_from(instant.unix_timestamp_nanos().div_euclid(1_000_000)).expect("the calendar ends long before")
}

/// The text of an instant in milliseconds since 1970, as answers spell it: `2026-10-21T12:00:00.000Z`. `None` outside of
/// the calendar.
pub fn iso(ms: i64) -> Option<String> {
    instant(ms)?.format(&ISO).ok()
}
