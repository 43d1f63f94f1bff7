//! Whether a carrier can be used and how fast it is, as pure state: the one who drives it hands in the time.

mod breaker;
mod latency;

pub use breaker::{Breaker, BreakerState, Change, OPENS_AFTER, PAUSE_MAX, PAUSE_MIN, Permit, TRIAL_MAX};
pub use latency::{AGES_OUT_AFTER, LatencyWindow, MOVE_MIN, floor_latency_ms, has_moved};
