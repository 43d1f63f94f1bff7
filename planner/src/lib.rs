//! Chooses the carrier that wakes a waiting delivery or stream. Everything here is a pure function of its arguments: no
//! clock, no input or output, no randomness of its own.
//!
//! [`plan`] chooses among offers. [`decide`] makes of it a decision of the fabric, in a [`Market`] of carriers, prices and
//! usage. [`Memory`] answers from what was decided before. [`health`] has the breaker and the latency that offers are
//! made of.
//!
//! ```
//! use std::sync::Arc;
//!
//! use openvibe_events_planner::{
//!     Ask, Carrier, Class, Decided, Health, Intent, Market, Memory, Offer, PolicyKey, RateCards, SHIPPED_RATE_CARDS,
//!     capabilities, latency_op,
//! };
//!
//! let now_ms = 1_792_584_000_000;
//! let carrier = |id, provider, card, ms| {
//!     let mut offer = Offer::of(id, provider, card);
//!     offer.capabilities = capabilities(Class::Queue).iter().map(|name| (*name).into()).collect();
//!     offer.latency_ms = vec![(latency_op(Class::Queue).into(), ms)];
//!     Carrier { classes: vec![Class::Queue], offer, health: Health::Up }
//! };
//! let mut carriers =
//!     vec![carrier("pg-v1", "postgres", "rc-pg-v1", 250.0), carrier("valkey-v1", "valkey", "rc-valkey-v1", 2.0)];
//! let cards = Arc::new(RateCards::parse("rate-cards.json", SHIPPED_RATE_CARDS.as_bytes(), now_ms)?);
//! let market = Market::new(carriers.clone(), Arc::clone(&cards), Arc::default(), now_ms);
//!
//! // A publish asks. What is new is written down in its transaction, and remembered once that has committed.
//! let mut memory = Memory::new();
//! let policy = PolicyKey::new(Some("live.*"), 1);
//! let ask = Ask { policy: &policy, intent: &Intent::DEFAULT, key: None };
//! let Decided::Proposed(proposal) = memory.decide(ask, &market, now_ms) else { panic!("nothing is remembered yet") };
//! assert_eq!(proposal.decision().carrier, "valkey-v1");
//! assert!(proposal.record().is_some());
//! proposal.committed(&mut memory);
//! assert!(matches!(memory.decide(ask, &market, now_ms), Decided::Remembered(_)));
//!
//! // Each second the offers are made anew; another epoch begins only when something has moved.
//! carriers[1].health = Health::breaker_open("valkey-v1");
//! let market = market.next(carriers, cards, Arc::default(), now_ms + 1000).expect("a breaker has opened");
//! assert_eq!(memory.decide(ask, &market, now_ms + 1000).decision().carrier, "pg-v1");
//! # Ok::<(), openvibe_events_planner::CardMistakes>(())
//! ```

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
pub use rate_card::{
    CARDS_BYTES_MAX, CardMistake, CardMistakes, Charged, RateCard, RateCards, ResetPeriod, SHIPPED_RATE_CARDS,
};
pub use requirements::{LatencyClass, Objective, Requirements, Resources};
pub use usage::{Month, ProviderState, ProviderStates, Usage};

/// A name: fixed where the code knows it, owned where a file or a record gave it.
pub type Text = std::borrow::Cow<'static, str>;
