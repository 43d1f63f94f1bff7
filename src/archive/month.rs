//! Months in UTC, as operators name them.

use std::fmt;
use std::str::FromStr;

use time::{Date, Month as Name};

/// A month of a year, `YYYY-MM`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Month {
    year: i32,
    month: Name,
}

/// What is no month.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a month is YYYY-MM, such as 2026-01")]
pub struct MonthError;

impl FromStr for Month {
    type Err = MonthError;

    fn from_str(text: &str) -> Result<Self, MonthError> {
        let (year, month) = text.split_once('-').ok_or(MonthError)?;
        if year.len() != 4 || month.len() != 2 || !text.bytes().all(|b| b == b'-' || b.is_ascii_digit()) {
            return Err(MonthError);
        }
        let month: u8 = month.parse().map_err(|_| MonthError)?;
        Ok(Self {
            year: year.parse().map_err(|_| MonthError)?,
            month: Name::try_from(month).map_err(|_| MonthError)?,
        })
    }
}

impl fmt::Display for Month {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04}-{:02}", self.year, u8::from(self.month))
    }
}

impl Month {
    /// Its first millisecond.
    pub fn start_ms(self) -> i64 {
        let first = Date::from_calendar_date(self.year, self.month, 1).expect("every month has a first day");
        first.midnight().assume_utc().unix_timestamp() * 1000
    }

    /// The first millisecond after it.
    pub fn end_ms(self) -> i64 {
        let next = self.month.next();
        let year = self.year + i32::from(next == Name::January);
        Self { year, month: next }.start_ms()
    }

    /// The key of its object.
    pub fn object(self) -> String {
        format!("{:04}/events-{self}.ndjson.gz", self.year)
    }

    /// The key of its manifest.
    pub fn manifest(self) -> String {
        format!("{:04}/events-{self}.json", self.year)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_months_are_months() {
        for text in [
            "",
            "2026",
            "2026-13",
            "2026-00",
            "2026-1",
            "26-01",
            "2026-01-01",
            "../../x",
            "２０２６-01",
            "+026-01",
        ] {
            assert_eq!(text.parse::<Month>(), Err(MonthError), "{text}");
        }
        let december: Month = "2025-12".parse().unwrap();
        assert_eq!(december.to_string(), "2025-12");
        assert_eq!(
            (december.start_ms(), december.end_ms()),
            (1_764_547_200_000, 1_767_225_600_000)
        );
        assert_eq!(december.object(), "2025/events-2025-12.ndjson.gz");
        assert_eq!(december.manifest(), "2025/events-2025-12.json");
        assert!("9999-12".parse::<Month>().is_ok_and(|last| last.start_ms() > 0));
    }
}
