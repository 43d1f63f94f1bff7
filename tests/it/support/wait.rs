//! Waiting for a condition with a deadline: the one place of the tests that pauses.

use std::{
    fmt::{Debug, Display},
    panic::Location,
    time::{Duration, Instant},
};

/// Long enough for anything that should happen soon, on a busy machine. Nothing waits this long unless it fails.
pub(crate) const SOON: Duration = Duration::from_secs(15);

/// The pause between two looks at a condition.
const PAUSE: Duration = Duration::from_millis(15);

/// What a condition may answer: `true`, `Some(value)` or `Ok(value)` end the wait; the others say "not yet".
pub(crate) trait Condition {
    /// What the wait yields.
    type Value;

    /// The value, or what was seen instead of it.
    fn reached(self) -> Result<Self::Value, String>;
}

impl Condition for bool {
    type Value = ();

    fn reached(self) -> Result<(), String> {
        self.then_some(()).ok_or_else(|| "false".to_owned())
    }
}

impl<T> Condition for Option<T> {
    type Value = T;

    fn reached(self) -> Result<T, String> {
        self.ok_or_else(|| "none".to_owned())
    }
}

impl<T, E: Display> Condition for Result<T, E> {
    type Value = T;

    fn reached(self) -> Result<T, String> {
        self.map_err(|seen| seen.to_string())
    }
}

/// Looks at `condition` until it holds and yields its value. Fails at `deadline`, naming `what` and what was last seen.
///
/// One look that hangs is cut by the deadline too.
#[track_caller]
pub(crate) fn eventually<C: Condition>(
    what: &str,
    deadline: Duration,
    mut condition: impl AsyncFnMut() -> C,
) -> impl Future<Output = C::Value> {
    let caller = Location::caller();
    async move {
        let started = Instant::now();
        let mut last = "nothing: the first look did not end".to_owned();
        loop {
            let left = deadline.saturating_sub(started.elapsed());
            match tokio::time::timeout(left, condition()).await.map(C::reached) {
                Ok(Ok(value)) => return value,
                Ok(Err(seen)) => last = seen,
                Err(_) => {}
            }
            // A look that ends at once beats any time-out, so the clock is asked as well.
            let left = deadline.saturating_sub(started.elapsed());
            assert!(
                !left.is_zero(),
                "{caller}: {what}: not within {deadline:?}; last seen: {last}"
            );
            tokio::time::sleep(PAUSE.min(left)).await;
        }
    }
}

/// The pause between two looks, for a task that tries until whoever waits for its result gives up.
pub(crate) async fn pause() {
    tokio::time::sleep(PAUSE).await;
}

/// Looks at `condition` for the whole of `span` and fails as soon as it does not hold: for what must not happen.
#[track_caller]
pub(crate) fn stays(what: &str, span: Duration, mut condition: impl AsyncFnMut() -> bool) -> impl Future<Output = ()> {
    let caller = Location::caller();
    async move {
        let started = Instant::now();
        loop {
            assert!(
                condition().await,
                "{caller}: {what}: no longer true after {:?}",
                started.elapsed()
            );
            let left = span.saturating_sub(started.elapsed());
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(PAUSE.min(left)).await;
        }
    }
}

/// Awaits `future`, failing with `what` when it has not ended by `deadline`.
#[track_caller]
pub(crate) fn within<T>(what: &str, deadline: Duration, future: impl Future<Output = T>) -> impl Future<Output = T> {
    let caller = Location::caller();
    async move {
        let ended = tokio::time::timeout(deadline, future).await;
        ended.unwrap_or_else(|_| panic!("{caller}: {what}: not within {deadline:?}"))
    }
}

/// The error of `result`, failing with `what` when there is none.
#[track_caller]
pub(crate) fn refused<T: Debug, E>(what: &str, result: Result<T, E>) -> E {
    match result {
        Ok(value) => panic!("{what}: expected a refusal, got {value:?}"),
        Err(error) => error,
    }
}
