//! What an attempt means for its delivery: delivered, tried again, or dead. No clock, no I/O.

use std::time::Duration;

use time::format_description::StaticFormatDescription;
use time::macros::format_description;
use time::{OffsetDateTime, PrimitiveDateTime};

use crate::domain::retry::{Next, Schedule};
use crate::domain::time::Millis;
use crate::store::Outcome;

/// The one form of HTTP dates that may be sent today.
const HTTP_DATE: StaticFormatDescription =
    format_description!("[weekday repr:short], [day] [month repr:short] [year] [hour]:[minute]:[second] GMT");
/// A form that is still to be read (RFC 9110, 5.6.7), as is [`OLDER_DATE`]: that of `asctime`.
const C_DATE: StaticFormatDescription =
    format_description!("[weekday repr:short] [month repr:short] [day padding:space] [hour]:[minute]:[second] [year]");
/// That of RFC 850, with the century that is not told.
const OLDER_DATE: StaticFormatDescription =
    format_description!("[weekday], [day]-[month repr:short]-[year] [hour]:[minute]:[second] GMT");

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ended {
    /// The receiver answered with this status.
    Answered {
        /// The HTTP status.
        status: u16,
        /// How long it wants to be left alone.
        retry_after: Option<Duration>,
    },
    /// There was no answer, for a reason that may pass.
    Failed(String),
    /// Nothing may be sent there.
    Refused(String),
    /// The process stopped meanwhile.
    Interrupted,
}

/// Decides after attempt number `attempt`, 1 for the first.
pub(super) fn judge(ended: Ended, attempt: u32, schedule: &Schedule, random01: f64) -> Outcome {
    let (status, error, retry_after) = match ended {
        Ended::Answered { status, .. } if (200..300).contains(&status) => return Outcome::Delivered { status },
        Ended::Answered { status, retry_after } => {
            let wish = retry_after.filter(|_| matches!(status, 429 | 503));
            (Some(status), format!("HTTP {status}"), wish)
        }
        Ended::Failed(error) => (None, error, None),
        Ended::Refused(error) => return Outcome::Dead { status: None, error },
        // A stop is ours, so it costs the delivery none of its attempts, although this one may have left the process. A
        // crash is not told apart from a receiver that brings the process down; that attempt counts, when its claim is lost.
        Ended::Interrupted => {
            return Outcome::Held {
                error: "the sender stopped before the answer came".to_owned(),
                wait_ms: 0,
            };
        }
    };
    match schedule.next(attempt, random01, retry_after) {
        Next::RetryAfter(wait) => Outcome::Retry {
            status,
            error,
            wait_ms: i64::try_from(wait.as_millis()).unwrap_or(i64::MAX),
        },
        Next::Exhausted => Outcome::Dead { status, error },
    }
}

/// Reads a `Retry-After` header: seconds, or a date compared with `now`. Anything else says nothing.
pub(super) fn retry_after(value: &str, now: Millis) -> Option<Duration> {
    let value = value.trim();
    if !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit()) {
        // More digits than fit mean "very long"; whoever uses the wish bounds it.
        return Some(Duration::from_secs(value.parse::<u32>().unwrap_or(u32::MAX).into()));
    }
    let date = PrimitiveDateTime::parse(value, HTTP_DATE)
        .or_else(|_| PrimitiveDateTime::parse(value, C_DATE))
        .ok()
        .or_else(|| older_date(value, now))?
        .assume_utc();
    let wait_ms = date.unix_timestamp().checked_mul(1000)?.saturating_sub(now.0);
    Some(Duration::from_millis(u64::try_from(wait_ms).unwrap_or(0)))
}

/// A date with a year of two digits: the latest such year that is not more than fifty years ahead.
fn older_date(value: &str, now: Millis) -> Option<PrimitiveDateTime> {
    let (day_month, rest) = value.rsplit_once('-')?;
    let (year, time) = rest.split_once(' ')?;
    if year.len() != 2 || !year.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let latest = OffsetDateTime::from_unix_timestamp(now.0.div_euclid(1000)).ok()?.year() + 50;
    let year = latest - (latest - year.parse::<i32>().ok()?).rem_euclid(100);
    PrimitiveDateTime::parse(&format!("{day_month}-{year} {time}"), OLDER_DATE).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn schedule() -> Schedule {
        Schedule {
            max_attempts: 3,
            backoff_ms: vec![1000, 5000],
            jitter: 0.0,
        }
    }

    fn answered(status: u16, retry_after_s: Option<u64>) -> Ended {
        Ended::Answered {
            status,
            retry_after: retry_after_s.map(Duration::from_secs),
        }
    }

    fn retry(status: Option<u16>, error: &str, wait_ms: i64) -> Outcome {
        Outcome::Retry {
            status,
            error: error.to_owned(),
            wait_ms,
        }
    }

    #[test]
    fn any_2xx_is_delivered_and_nothing_else_is() {
        for status in 100..=599 {
            let delivered = matches!(
                judge(answered(status, None), 1, &schedule(), 0.0),
                Outcome::Delivered { .. }
            );
            assert_eq!(delivered, status / 100 == 2, "{status}");
        }
    }

    #[test]
    fn failures_follow_the_schedule_until_they_are_dead() {
        let at = |attempt| judge(answered(500, None), attempt, &schedule(), 0.0);
        assert_eq!(at(1), retry(Some(500), "HTTP 500", 1000));
        assert_eq!(at(2), retry(Some(500), "HTTP 500", 5000));
        let dead = |status, error: &str| Outcome::Dead {
            status,
            error: error.to_owned(),
        };
        assert_eq!(at(3), dead(Some(500), "HTTP 500"));
        let timeout = |attempt| judge(Ended::Failed("timeout".into()), attempt, &schedule(), 0.0);
        assert_eq!(
            (timeout(1), timeout(3)),
            (retry(None, "timeout", 1000), dead(None, "timeout"))
        );
        assert_eq!(
            judge(Ended::Refused("not allowed".into()), 1, &schedule(), 0.0),
            dead(None, "not allowed"),
            "a refusal does not pass by waiting"
        );
    }

    #[test]
    fn a_stop_costs_no_attempt() {
        let outcome = judge(Ended::Interrupted, 3, &schedule(), 0.0);
        assert!(matches!(outcome, Outcome::Held { wait_ms: 0, .. }));
    }

    #[test]
    fn a_wish_counts_on_429_and_503_and_only_lengthens() {
        let wait = |status, wish| match judge(answered(status, Some(wish)), 1, &schedule(), 0.0) {
            Outcome::Retry { wait_ms, .. } => wait_ms,
            other => panic!("{other:?}"),
        };
        assert_eq!((wait(429, 7), wait(503, 7), wait(500, 7)), (7000, 7000, 1000));
        assert_eq!(wait(503, 0), 1000);
        assert_eq!(wait(503, 999_999_999), 3_600_000, "an hour at most");
    }

    #[test]
    fn a_wish_is_seconds_or_a_date() {
        let now = Millis(784_111_777_000); // Sun, 06 Nov 1994 08:49:37 GMT
        let secs = |s| Some(Duration::from_secs(s));
        assert_eq!(retry_after("120", now), secs(120));
        assert_eq!(retry_after(" 0 ", now), secs(0));
        assert_eq!(retry_after("99999999999999999999", now), secs(u32::MAX.into()));
        assert_eq!(retry_after("Sun, 06 Nov 1994 08:50:37 GMT", now), secs(60));
        assert_eq!(retry_after("Sun, 06 Nov 1994 08:49:00 GMT", now), secs(0), "past");
        assert_eq!(retry_after("Sunday, 06-Nov-94 08:50:37 GMT", now), secs(60));
        assert_eq!(retry_after("Sun Nov  6 08:50:37 1994", now), secs(60));
        assert_eq!(retry_after("Tuesday, 16-Nov-94 08:49:37 GMT", now), secs(864_000));
        assert_eq!(
            retry_after("Friday, 06-Nov-70 08:49:37 GMT", now),
            secs(0),
            "1970, not 2070"
        );
        assert!(
            retry_after("Thursday, 06-Nov-25 08:49:37 GMT", now) > secs(900_000_000),
            "2025"
        );
        for nothing in [
            "",
            "-1",
            "1.5",
            "soon",
            "+5",
            "Sun, 99 Nov 1994 08:49:37 GMT",
            "06 Nov 1994",
            "Sunday, 06-Nov-1994 08:50:37 GMT",
            "Sunday, 06-Nov-+4 08:50:37 GMT",
            "Sun Nov 6 08:50:37",
        ] {
            assert_eq!(retry_after(nothing, now), None, "{nothing:?}");
        }
    }

    proptest! {
        #[test]
        fn no_header_panics_or_escapes_the_bounds(value in ".{0,40}", status in 300_u16..600, attempt in 1_u32..3) {
            let wish = retry_after(&value, Millis(0));
            let outcome = judge(Ended::Answered { status, retry_after: wish }, attempt, &schedule(), 1.0);
            let Outcome::Retry { wait_ms, .. } = outcome else { panic!("{outcome:?}") };
            prop_assert!((1000..=3_600_000).contains(&wait_ms));
        }
    }
}
