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

    /// Decides after attempt number `attempt` (1 for the first) has failed. `random01`, from 0 to 1, spreads the retries of many
    /// deliveries: the wait is never shorter than the schedule and at most [`Schedule::jitter`] longer. `retry_after`, the
    /// receiver's wish, lengthens it at most to [`RETRY_AFTER_MAX`] and never shortens it.
    pub fn next(&self, attempt: u32, random01: f64, retry_after: Option<Duration>) -> Next {
        if attempt >= self.max_attempts {
            return Next::Exhausted;
        }
        let last = self.backoff_ms.len().saturating_sub(1);
        let index = usize::try_from(attempt.saturating_sub(1)).map_or(last, |index| index.min(last));
        let planned = Duration::from_millis(self.backoff_ms.get(index).copied().unwrap_or(0));
        let fraction = self.jitter * random01;
        let spread =
            |wait: Duration| wait.saturating_add(Duration::from_secs_f64(wait.as_secs_f64().min(1e9) * fraction));
        let wished = retry_after.map_or(Duration::ZERO, |wish| spread(wish).min(RETRY_AFTER_MAX));
        Next::RetryAfter(spread(planned).max(wished))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn defaults() -> Schedule {
        Schedule {
            max_attempts: 8,
            backoff_ms: vec![1000, 5000, 30_000, 120_000, 600_000, 3_600_000],
            jitter: 0.1,
        }
    }

    fn wait_ms(schedule: &Schedule, attempt: u32, random01: f64, retry_after: Option<u64>) -> u128 {
        match schedule.next(attempt, random01, retry_after.map(Duration::from_secs)) {
            Next::RetryAfter(wait) => wait.as_millis(),
            Next::Exhausted => panic!("attempt {attempt} is not the last"),
        }
    }

    #[test]
    fn policies_that_are_none() {
        for none in ["null", " null ", "{}", "{ }"] {
            assert_eq!(RetryPolicy::parse(none), Ok(None), "{none}");
        }
    }

    #[test]
    fn policies_keep_what_was_given() {
        for (text, wire) in [
            (
                r#"{"max_attempts":8,"backoff_ms":[1000,5000]}"#,
                r#"{"max_attempts":8,"backoff_ms":[1000,5000]}"#,
            ),
            (r#"{"backoff_ms":[0, 8.64e7]}"#, r#"{"backoff_ms":[0,86400000]}"#),
            (r#"{"max_attempts":20.0}"#, r#"{"max_attempts":20}"#),
        ] {
            let policy = RetryPolicy::parse(text).expect("valid").expect("a policy");
            assert_eq!(serde_json::to_string(&policy).expect("json"), wire);
            assert_eq!(RetryPolicy::parse(wire), Ok(Some(policy)), "what was stored reads back");
        }
    }

    #[test]
    fn bad_policies_name_the_member() {
        let many = format!("{{\"backoff_ms\":[{}]}}", vec!["1"; 21].join(","));
        for (bad, named) in [
            ("[]", "retry_policy"),
            ("\"fast\"", "retry_policy"),
            ("5", "retry_policy"),
            (r#"{"max_attempts":0}"#, "max_attempts"),
            (r#"{"max_attempts":21}"#, "max_attempts"),
            (r#"{"max_attempts":1.5}"#, "max_attempts"),
            (r#"{"max_attempts":"3"}"#, "max_attempts"),
            (r#"{"max_attempts":null}"#, "max_attempts"),
            (r#"{"max_attempts":-1}"#, "max_attempts"),
            (r#"{"max_attempts":3,"max_attempts":4}"#, "max_attempts"),
            (r#"{"backoff_ms":[]}"#, "backoff_ms"),
            (r#"{"backoff_ms":[-1]}"#, "backoff_ms"),
            (r#"{"backoff_ms":[86400001]}"#, "backoff_ms"),
            (r#"{"backoff_ms":[1.5]}"#, "backoff_ms"),
            (r#"{"backoff_ms":5}"#, "backoff_ms"),
            (r#"{"backoff_ms":[[1]]}"#, "backoff_ms"),
            (r#"{"backoff_ms":null}"#, "backoff_ms"),
            (many.as_str(), "backoff_ms"),
            (r#"{"max_attempts":3,"jitter":true}"#, "retry_policy"),
        ] {
            let message = RetryPolicy::parse(bad).expect_err(bad);
            assert!(message.contains(named), "{bad}: {message}");
        }
    }

    #[test]
    fn a_policy_replaces_only_what_it_names() {
        let policy = |text: &str| RetryPolicy::parse(text).expect("valid");
        assert_eq!(Schedule::of(None, &defaults()), defaults());
        let short = Schedule::of(policy(r#"{"max_attempts":3}"#).as_ref(), &defaults());
        assert_eq!((short.max_attempts, &short.backoff_ms), (3, &defaults().backoff_ms));
        let quick = Schedule::of(policy(r#"{"backoff_ms":[50]}"#).as_ref(), &defaults());
        assert_eq!((quick.max_attempts, quick.backoff_ms, quick.jitter), (8, vec![50], 0.1));
    }

    #[test]
    fn waits_follow_the_schedule_and_its_last_one_repeats() {
        let schedule = defaults();
        let waits: Vec<u128> = (1..8).map(|attempt| wait_ms(&schedule, attempt, 0.0, None)).collect();
        assert_eq!(waits, [1000, 5000, 30_000, 120_000, 600_000, 3_600_000, 3_600_000]);
        for attempt in [8, 9, u32::MAX] {
            assert_eq!(
                schedule.next(attempt, 0.5, Some(Duration::from_secs(5))),
                Next::Exhausted
            );
        }
        let none = Schedule {
            backoff_ms: Vec::new(),
            ..defaults()
        };
        assert_eq!(wait_ms(&none, 1, 1.0, None), 0);
    }

    #[test]
    fn a_receiver_can_lengthen_a_wait_to_an_hour_and_never_shorten_it() {
        let schedule = defaults();
        assert_eq!(wait_ms(&schedule, 1, 0.0, Some(20)), 20_000);
        assert_eq!(wait_ms(&schedule, 3, 0.0, Some(1)), 30_000);
        assert_eq!(wait_ms(&schedule, 1, 1.0, Some(u64::MAX)), 3_600_000);
        let slow = Schedule {
            backoff_ms: vec![86_400_000],
            ..defaults()
        };
        assert_eq!(wait_ms(&slow, 1, 0.0, Some(u64::MAX)), 86_400_000);
    }

    proptest! {
        #[test]
        fn never_early_and_hardly_late(
            attempt in any::<u32>(),
            random01 in 0.0..=1.0_f64,
            jitter in 0.0..=0.1_f64,
            backoff_ms in prop::collection::vec(0..=BACKOFF_MAX_MS, 0..5),
            wish_s in prop::option::of(any::<u64>()),
        ) {
            let schedule = Schedule { max_attempts: u32::MAX, backoff_ms: backoff_ms.clone(), jitter };
            if let Next::RetryAfter(wait) = schedule.next(attempt, random01, wish_s.map(Duration::from_secs)) {
                let index = (attempt.saturating_sub(1) as usize).min(backoff_ms.len().saturating_sub(1));
                let planned = Duration::from_millis(backoff_ms.get(index).copied().unwrap_or(0));
                let wish = Duration::from_secs(wish_s.unwrap_or(0)).min(RETRY_AFTER_MAX);
                prop_assert!(wait >= planned && wait >= wish);
                let latest = planned.mul_f64(1.1).max(wish.mul_f64(1.1).min(RETRY_AFTER_MAX));
                prop_assert!(wait <= latest + Duration::from_micros(1), "{:?} after {:?}", wait, latest);
            } else {
                prop_assert_eq!(attempt, u32::MAX);
            }
        }
    }
}
