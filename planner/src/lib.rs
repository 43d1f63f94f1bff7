//! Chooses the carrier that wakes a waiting delivery or stream. Everything here is a pure function of its arguments: no
//! clock, no input or output, no randomness of its own.
//!
//! [`plan`] chooses among offers. [`decide`] makes of it a decision of the fabric, in a [`Market`] of carriers, prices and
//! usage. [`Memory`] answers from what was decided before. [`health`] has the breaker and the latency that offers are
//! made of.

mod class;
mod cost;
mod decision;
mod eligibility;
pub mod health;
mod intent;
mod json;
mod market;
mod memory;
mod moment;
mod number;
mod offer;
mod placement;
mod plan;
mod rate_card;
mod requirements;
pub mod simulate;
mod usage;

pub use class::Class;
pub use decision::{Decision, FLOOR, decide};
pub use intent::{Intent, PolicyClass, capabilities, latency_op};
pub use market::{Carrier, Health, Market};
pub use memory::{Ask, Decided, KEYS_MAX, Key, Memory, POLICIES_MAX, PolicyKey, Proposal, Record};
pub use moment::iso;
pub use offer::{Capacity, Offer, Pricing, Status, Trust};
pub use placement::{Candidate, Estimate, Placement, Verdict};
pub use plan::{MIN_GAIN, Options, OwnedLoad, Weights, plan};
pub use rate_card::{CARDS_BYTES_MAX, CardMistake, CardMistakes, RateCard, RateCards, ResetPeriod, SHIPPED_RATE_CARDS};
pub use requirements::{LatencyClass, Objective, Requirements, Resources};
pub use usage::{Month, ProviderState, ProviderStates, Usage};

/// A name: fixed where the code knows it, owned where a file or a record gave it.
pub type Text = std::borrow::Cow<'static, str>;
