//! The wall clock: the one place that reads it. Durations are measured on the monotonic clock, shared deadlines on the
//! database's.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::domain::time::Millis;

/// Now, in milliseconds since the Unix epoch; 0 on a machine whose clock stands before it.
pub(crate) fn now() -> Millis {
    let since = system().duration_since(UNIX_EPOCH).unwrap_or_default();
    Millis(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}

/// Now, for libraries that want it in the form of the standard library.
#[expect(clippy::disallowed_methods, reason = "the one place that reads the wall clock")]
pub(crate) fn system() -> SystemTime {
    SystemTime::now()
}
