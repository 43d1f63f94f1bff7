//! The wall clock of the development tools: token times, and the age of signatures.

use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since 1970.
pub(super) fn unix_s() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}
