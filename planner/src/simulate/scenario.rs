//! What a scenario is: carriers, prices, traffic, and what happens when.

mod members;
mod read;

use super::span::Span;
use crate::class::Class;
use crate::intent::Intent;
use crate::rate_card::RateCards;

pub use read::{PolicyJudge, SCENARIO_BYTES_MAX, ScenarioMistakes};

/// What is run.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Its heading.
    pub title: String,
    /// What it is about, for people.
    pub description: String,
    /// When it begins, in milliseconds since 1970.
    pub(in crate::simulate) start_ms: i64,
    /// How long it runs.
    pub(in crate::simulate) duration: Span,
    pub(in crate::simulate) seed: u64,
    /// Between two looks of a process that is woken by nobody, in milliseconds.
    pub(in crate::simulate) poll_ms: f64,
    pub(in crate::simulate) carriers: Vec<CarrierSetup>,
    /// What carries what.
    pub traffic: Vec<Traffic>,
    pub(in crate::simulate) cards: RateCards,
    pub(in crate::simulate) happenings: Vec<Happening>,
}

/// A stream of events with one policy, and at most one ordering key.
#[derive(Debug, Clone)]
pub struct Traffic {
    /// What the answer calls it.
    pub name: String,
    /// Its policy, `events.delivery-policy@1`, as the file has it.
    pub policy: String,
    /// What that asks of placement.
    pub intent: Intent,
    /// Its ordering key.
    pub key: Option<String>,
    /// Events a second, on average.
    pub(in crate::simulate) per_second: f64,
    /// How far it swings around that through a day, 0 to 1.
    pub(in crate::simulate) daily_swing: f64,
}

#[derive(Debug, Clone)]
pub(in crate::simulate) struct CarrierSetup {
    pub(in crate::simulate) id: String,
    pub(in crate::simulate) classes: Vec<Class>,
    pub(in crate::simulate) provider: String,
    pub(in crate::simulate) rate_card: String,
    pub(in crate::simulate) latency_ms: f64,
    /// Units used in this month before the scenario begins.
    pub(in crate::simulate) used: u64,
}

/// Something that happens, and until when.
#[derive(Debug, Clone)]
pub(in crate::simulate) struct Happening {
    pub(in crate::simulate) at: Span,
    /// For good, without an end.
    pub(in crate::simulate) until: Option<Span>,
    pub(in crate::simulate) what: What,
}

#[derive(Debug, Clone)]
pub(in crate::simulate) enum What {
    /// The broker is gone: connections break, calls fail at once.
    Outage { carrier: String },
    /// The broker takes calls and answers none.
    Stall { carrier: String },
    /// Signals take this long.
    Latency { carrier: String, latency_ms: f64 },
    /// An operator has switched it off.
    Disabled { carrier: String },
    /// The price changes.
    Price {
        rate_card: String,
        unit_price_usd: Option<f64>,
        free_allowance: Option<f64>,
    },
    /// The receiver of a key is down, so deliveries wait.
    Backlog { traffic: String },
    /// There is more or less traffic.
    Surge { traffic: String, factor: f64 },
}

impl What {
    /// To whom it happens, and what, for people.
    pub(in crate::simulate) fn told(&self) -> (&str, String) {
        match self {
            Self::Outage { carrier } => (carrier, "outage".to_owned()),
            Self::Stall { carrier } => (carrier, "stall".to_owned()),
            Self::Latency { carrier, latency_ms } => (carrier, format!("latency {latency_ms} ms")),
            Self::Disabled { carrier } => (carrier, "disabled".to_owned()),
            Self::Price {
                rate_card,
                unit_price_usd,
                free_allowance,
            } => {
                let price = unit_price_usd.map(|usd| format!("price {usd} USD"));
                let allowance = free_allowance.map(|units| format!("{units} free"));
                (
                    rate_card,
                    [price, allowance].into_iter().flatten().collect::<Vec<_>>().join(", "),
                )
            }
            Self::Backlog { traffic } => (traffic, "backlog".to_owned()),
            Self::Surge { traffic, factor } => (traffic, format!("{factor} × the traffic")),
        }
    }
}
