//! When a failed delivery is tried again: a subscription's own policy, the defaults behind it and the arithmetic of waits.

use std::time::Duration;

use serde::Serialize;
use serde_json::value::RawValue;

use super::json::{self, Members};

/// Most attempts a policy may ask for, and most waits it may list.
pub const ATTEMPTS_MAX: u32 = 20;

/// Longest wait a policy may list, one day in milliseconds.
pub const BACKOFF_MAX_MS: u64 = 86_400_000;

/// The longest a receiver's `Retry-After` can make a wait.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(3600);

/// What a subscription says about retries; what it leaves out comes from the defaults. On the wire only the given
/// members appear.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RetryPolicy {
    /// Attempts in all, 1 to [`ATTEMPTS_MAX`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_attempts: Option<u32>,
    /// Milliseconds to wait after the first, second, … failure, the last one repeating; 1 to 20 waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backoff_ms: Option<Vec<u64>>,
}

impl RetryPolicy {
    /// Reads a policy from well-formed JSON. `null` and `{}` are no policy. The error names the member and the remedy.
    pub fn parse(raw: &str) -> Result<Option<Self>, String> {
        if raw.trim() == "null" {
            return Ok(None);
        }
        let members = Members::parse(raw).ok_or("retry_policy must be an object or null")?;
        let mut policy = Self {
            max_attempts: None,
            backoff_ms: None,
        };
        for (name, value) in members.iter() {
            match name {
                "max_attempts" if policy.max_attempts.is_none() => policy.max_attempts = Some(attempts(value)?),
                "backoff_ms" if policy.backoff_ms.is_none() => policy.backoff_ms = Some(backoff(value)?),
                "max_attempts" | "backoff_ms" => return Err(format!("retry_policy.{name} appears more than once")),
                _ => return Err("retry_policy may hold max_attempts and backoff_ms only".to_owned()),
            }
        }
        Ok((policy.max_attempts.is_some() || policy.backoff_ms.is_some()).then_some(policy))
    }
}

fn attempts(value: &RawValue) -> Result<u32, String> {
    json::integer(value)
        .and_then(|number| u32::try_from(number).ok())
        .filter(|number| (1..=ATTEMPTS_MAX).contains(number))
        .ok_or_else(|| format!("retry_policy.max_attempts must be a whole number from 1 to {ATTEMPTS_MAX}"))
}

fn backoff(value: &RawValue) -> Result<Vec<u64>, String> {
    let wrong = || {
        format!(
            "retry_policy.backoff_ms must be an array of 1 to {ATTEMPTS_MAX} whole numbers from 0 to {BACKOFF_MAX_MS}"
        )
    };
    let items: Vec<&RawValue> = serde_json::from_str(value.get()).map_err(|_| wrong())?;
    if items.is_empty() || items.len() > ATTEMPTS_MAX as usize {
        return Err(wrong());
    }
    let wait = |item: &&RawValue| {
        json::integer(item)
            .and_then(|number| u64::try_from(number).ok())
            .filter(|number| *number <= BACKOFF_MAX_MS)
    };
    items.iter().map(wait).collect::<Option<_>>().ok_or_else(wrong)
}

/// The waits in force for one subscription.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// Attempts in all, 1 or more.
    pub max_attempts: u32,
    /// Milliseconds to wait after each failure, the last one repeating; none means no wait.
    pub backoff_ms: Vec<u64>,
    /// How much later than the schedule a retry may be, as a fraction of the wait: 0 to 0.1.
    pub jitter: f64,
}

/// What happens after a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Try again once this much time has passed.
    RetryAfter(Duration),
    /// The attempts are used up.
    Exhausted,
}

impl Schedule {
    /// The defaults with whatever the policy sets in their place.
    pub fn of(policy: Option<&RetryPolicy>, defaults: &Self) -> Self {
        let mut schedule = defaults.clone();
        if let Some(policy) = policy {
            schedule.max_attempts = policy.max_attempts.unwrap_or(schedule.max_attempts);
            if let Some(backoff_ms) = &policy.backoff_ms {
                schedule.backoff_ms.clone_from(backoff_ms);
            }
        }
        schedule
    }

    /// Decides after attempt number `attempt` (1 for the first) has failed. `random01` spreads the retries of many
    /// deliveries: the wait is never shorter than the schedule and at most [`Schedule::jitter`] longer. `retry_after`, the
    /// receiver's wish, lengthens it at most to [`RETRY_AFTER_MAX`] and never shortens it.
    pub fn next(&self, attempt: u32, random01: f64, retry_after: Option<Duration>) -> Next {
        if attempt >= self.max_attempts {
            return Next::Exhausted;
        }
        let last = self.backoff_ms.len().saturating_sub(1);
        let index = usize::try_from(attempt.saturating_sub(1)).map_or(last, |index| index.min(last));
        let planned = Duration::from_millis(self.backoff_ms.get(index).copied().unwrap_or(0));
        let fraction = (self.jitter * random01).clamp(0.0, 0.1);
        let fraction = if fraction.is_nan() { 0.0 } else { fraction };
        let spread =
            |wait: Duration| wait.saturating_add(Duration::from_secs_f64(wait.as_secs_f64().min(1e9) * fraction));
        let wished = retry_after.map_or(Duration::ZERO, |wish| {
            spread(wish.min(RETRY_AFTER_MAX)).min(RETRY_AFTER_MAX)
        });
        Next::RetryAfter(spread(planned).max(wished))
    }
}
