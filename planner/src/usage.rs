//! What a provider was used for in its period, and what that makes of the rest of it. This is how a free allowance comes
//! to an end and price begins to decide.

use std::collections::BTreeMap;

use time::{Date, Duration, OffsetDateTime, Time};

use crate::moment::{instant, millis};

/// The usage of one provider, `platform.provider-state@1`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ProviderState {
    /// When its period began, in milliseconds since 1970.
    pub period_start_ms: i64,
    /// When its period ends.
    pub period_end_ms: i64,
    /// Units used so far, by metric.
    pub usage: BTreeMap<String, f64>,
    /// Units expected by the end of the period, by metric; without one, usage goes on as it went.
    pub forecast: BTreeMap<String, f64>,
    /// Share of an allowance that is kept for urgent work, 0 to 1, by metric.
    pub reserve: BTreeMap<String, f64>,
}

impl ProviderState {
    /// Units of a metric that are expected by the end of the period.
    pub fn expected(&self, metric: &str, now_ms: i64) -> f64 {
        if let Some(forecast) = self.forecast.get(metric) {
            return *forecast;
        }
        let used = self.usage.get(metric).copied().unwrap_or(0.0);
        let elapsed = now_ms.saturating_sub(self.period_start_ms).max(1);
        let total = self.period_end_ms.saturating_sub(self.period_start_ms).max(elapsed);
        used * (float(total) / float(elapsed))
    }
}

#[expect(clippy::cast_precision_loss, reason = "spans of time are far below 2^53 ms")]
fn float(ms: i64) -> f64 {
    ms as f64
}

/// The usage of every provider, by name.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ProviderStates {
    by_provider: BTreeMap<String, ProviderState>,
}

impl ProviderStates {
    /// Nothing was used.
    pub const fn none() -> Self {
        Self {
            by_provider: BTreeMap::new(),
        }
    }

    /// The usage of one provider.
    pub fn get(&self, provider: &str) -> Option<&ProviderState> {
        self.by_provider.get(provider)
    }
}

impl FromIterator<(String, ProviderState)> for ProviderStates {
    fn from_iter<I: IntoIterator<Item = (String, ProviderState)>>(states: I) -> Self {
        Self {
            by_provider: states.into_iter().collect(),
        }
    }
}

/// A calendar month in UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Month {
    /// Midnight of its first day, in milliseconds since 1970.
    pub start_ms: i64,
    /// Midnight of the next one's first day.
    pub end_ms: i64,
}

impl Month {
    /// The month of an instant.
    pub fn of(now_ms: i64) -> Self {
        let day = instant(now_ms).unwrap_or(OffsetDateTime::UNIX_EPOCH).date();
        let first = |date: Date| date.replace_day(1).expect("every month has a first day");
        let start = first(day);
        let end = start.checked_add(Duration::days(31)).map_or(Date::MAX, first);
        let midnight = |date| millis(OffsetDateTime::new_utc(date, Time::MIDNIGHT));
        Self {
            start_ms: midnight(start),
            end_ms: midnight(end),
        }
    }
}

/// At the beginning of a month a few units would forecast a flood; until this much of it has passed, it counts as passed.
const SETTLED_AFTER_MS: i64 = 24 * 60 * 60 * 1000;

/// What was counted in one month, by provider and metric. The count is kept in the database; this is the copy that
/// placement reads.
#[derive(Debug, Clone, PartialEq)]
pub struct Usage {
    month: Month,
    counts: BTreeMap<String, BTreeMap<String, f64>>,
}

impl Usage {
    /// Nothing counted yet in the month of `now_ms`.
    pub fn new(now_ms: i64) -> Self {
        Self {
            month: Month::of(now_ms),
            counts: BTreeMap::new(),
        }
    }

    /// The month that is counted.
    pub fn month(&self) -> Month {
        self.month
    }

    /// Adds units at an instant. The first in another month forgets what was counted before.
    pub fn add(&mut self, provider: &str, metric: &str, units: u64, now_ms: i64) {
        self.roll(now_ms);
        #[expect(clippy::cast_precision_loss, reason = "a month of counting stays below 2^53")]
        let units = units as f64;
        *self.count(provider, metric) += units;
    }

    /// Takes over what the database has counted in this month, for all processes.
    pub fn set(&mut self, provider: &str, metric: &str, units: u64, now_ms: i64) {
        self.roll(now_ms);
        #[expect(clippy::cast_precision_loss, reason = "a month of counting stays below 2^53")]
        let units = units as f64;
        *self.count(provider, metric) = units;
    }

    /// Units of a provider and metric that were counted in the month of `now_ms`.
    pub fn used(&self, provider: &str, metric: &str, now_ms: i64) -> f64 {
        if Month::of(now_ms) != self.month {
            return 0.0;
        }
        self.counts
            .get(provider)
            .and_then(|metrics| metrics.get(metric))
            .copied()
            .unwrap_or(0.0)
    }

    /// The usage as placement wants it, with the forecast for the month.
    pub fn states(&self, now_ms: i64) -> ProviderStates {
        let month = Month::of(now_ms);
        let none = BTreeMap::new();
        let counts = if month == self.month { &self.counts } else { &none };
        let elapsed = now_ms.saturating_sub(month.start_ms).max(SETTLED_AFTER_MS);
        let total = month.end_ms.saturating_sub(month.start_ms).max(elapsed);
        let growth = float(total) / float(elapsed);
        let state = |usage: &BTreeMap<String, f64>| ProviderState {
            period_start_ms: month.start_ms,
            period_end_ms: month.end_ms,
            usage: usage.clone(),
            forecast: usage
                .iter()
                .map(|(metric, used)| (metric.clone(), used * growth))
                .collect(),
            reserve: BTreeMap::new(),
        };
        counts
            .iter()
            .map(|(provider, usage)| (provider.clone(), state(usage)))
            .collect()
    }

    fn roll(&mut self, now_ms: i64) {
        let month = Month::of(now_ms);
        if month != self.month {
            *self = Self {
                month,
                counts: BTreeMap::new(),
            };
        }
    }

    fn count(&mut self, provider: &str, metric: &str) -> &mut f64 {
        if !self.counts.contains_key(provider) {
            self.counts.insert(provider.to_owned(), BTreeMap::new());
        }
        let metrics = self.counts.get_mut(provider).expect("it was just put there");
        if !metrics.contains_key(metric) {
            metrics.insert(metric.to_owned(), 0.0);
        }
        metrics.get_mut(metric).expect("it was just put there")
    }
}
