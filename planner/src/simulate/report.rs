//! What a run came to: placements over time, moves, cost, and time without a carrier. Serialises as the answer of the
//! command.

use std::time::Duration;

use serde::{Serialize, Serializer};

use super::scenario::Traffic;
use crate::class::Class;

/// What a run came to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The heading of the scenario.
    pub title: String,
    /// What it is about.
    pub description: String,
    /// When it began, in milliseconds since 1970.
    #[serde(rename = "start", serialize_with = "iso")]
    pub start_ms: i64,
    /// When it ended.
    #[serde(rename = "end", serialize_with = "iso")]
    pub end_ms: i64,
    /// The carrier that always delivers.
    pub floor: &'static str,
    /// Moves from one carrier to another.
    pub moves_total: u64,
    /// Decisions that a process would have written down.
    pub recorded: u64,
    /// What the wake-ups cost in all, in USD.
    pub cost_usd: f64,
    /// Each class that had traffic.
    pub classes: Vec<ClassReport>,
    /// Each stream of events, by class.
    pub lanes: Vec<Lane>,
    /// Each carrier.
    pub carriers: Vec<CarrierReport>,
    /// What happened, as the scenario tells it.
    pub happened: Vec<Happened>,
    /// The first placement of each stream, and every move, with its reasons.
    pub moves: Vec<Move>,
    /// The cost as it grew.
    pub cost: Vec<CostPoint>,
}

/// What a class came to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClassReport {
    /// The class.
    #[serde(serialize_with = "label")]
    pub class: Class,
    /// Events.
    pub events: u64,
    /// Events whose signal was lost: the poll found them.
    pub left_to_poll: u64,
    /// Seconds in which no carrier was eligible for a stream of it, and the floor stood in.
    pub without_carrier_s: f64,
    /// Seconds in which the chosen carrier of a stream of it did not wake.
    pub failing_s: f64,
    #[serde(skip)]
    fallback: bool,
    #[serde(skip)]
    failing: bool,
}

impl ClassReport {
    pub(super) fn new(class: Class) -> Self {
        Self {
            class,
            events: 0,
            left_to_poll: 0,
            without_carrier_s: 0.0,
            failing_s: 0.0,
            fallback: false,
            failing: false,
        }
    }

    pub(super) fn begin(&mut self) {
        (self.fallback, self.failing) = (false, false);
    }

    pub(super) fn doubt(&mut self, fallback: bool, failing: bool) {
        self.fallback |= fallback;
        self.failing |= failing;
    }

    pub(super) fn end(&mut self, step: Duration) {
        let seconds = |doubtful: bool| if doubtful { step.as_secs_f64() } else { 0.0 };
        self.without_carrier_s += seconds(self.fallback);
        self.failing_s += seconds(self.failing);
    }
}

/// A stream of events and where it was.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Lane {
    /// Its name in the scenario.
    pub traffic: String,
    /// Its class.
    #[serde(serialize_with = "label")]
    pub class: Class,
    /// Its key.
    pub key: Option<String>,
    /// Events.
    pub events: u64,
    /// Events whose signal was lost.
    pub left_to_poll: u64,
    /// From commit to wake-up, on average, in milliseconds.
    pub mean_wake_ms: f64,
    /// Where it was, one span after the other.
    pub segments: Vec<Segment>,
}

impl Lane {
    pub(super) fn new(traffic: &Traffic) -> Self {
        Self {
            traffic: traffic.name.clone(),
            class: traffic.intent.class,
            key: traffic.key.clone(),
            events: 0,
            left_to_poll: 0,
            mean_wake_ms: 0.0,
            segments: Vec::new(),
        }
    }
}

/// A span of time on one carrier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Segment {
    /// Since when.
    #[serde(rename = "from", serialize_with = "iso")]
    pub from_ms: i64,
    /// Until when.
    #[serde(rename = "until", serialize_with = "iso")]
    pub until_ms: i64,
    /// The carrier that is recorded.
    pub carrier: String,
    /// The carrier that is signalled.
    pub route: String,
    /// Whether nobody was eligible.
    pub fallback: bool,
}

/// What a carrier came to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CarrierReport {
    /// The carrier.
    pub id: String,
    /// Events that it woke somebody for.
    pub woken: u64,
    /// What they cost, in USD.
    pub cost_usd: f64,
    /// When it could not be chosen, and why.
    pub unavailable: Vec<Unavailable>,
}

impl CarrierReport {
    pub(super) fn new(id: &str) -> Self {
        Self {
            id: id.to_owned(),
            woken: 0,
            cost_usd: 0.0,
            unavailable: Vec::new(),
        }
    }
}

/// A span of time in which a carrier could not be chosen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Unavailable {
    /// Since when.
    #[serde(rename = "from", serialize_with = "iso")]
    pub from_ms: i64,
    /// Until when.
    #[serde(rename = "until", serialize_with = "maybe_iso")]
    pub until_ms: Option<i64>,
    /// The reason that the planner shows.
    pub reason: String,
}

/// Something that the scenario made happen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Happened {
    /// Since when.
    #[serde(rename = "from", serialize_with = "iso")]
    pub from_ms: i64,
    /// Until when.
    #[serde(rename = "until", serialize_with = "iso")]
    pub until_ms: i64,
    /// The carrier, stream or rate card that it happened to.
    pub to: String,
    /// What it was.
    pub what: String,
}

/// A stream moved, or was placed for the first time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Move {
    /// When.
    #[serde(rename = "at", serialize_with = "iso")]
    pub at_ms: i64,
    /// The stream.
    pub traffic: String,
    /// Its class.
    #[serde(serialize_with = "label")]
    pub class: Class,
    /// Where it was; `None` the first time.
    pub from: Option<String>,
    /// Where it is now.
    pub to: String,
    /// The planner's reasons.
    pub reasons: Vec<String>,
}

/// The cost at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CostPoint {
    /// When.
    #[serde(rename = "at", serialize_with = "iso")]
    pub at_ms: i64,
    /// USD since the beginning.
    pub cost_usd: f64,
}

fn iso<S: Serializer>(ms: &i64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_some(&crate::moment::iso(*ms))
}

fn maybe_iso<S: Serializer>(ms: &Option<i64>, serializer: S) -> Result<S::Ok, S::Error> {
    ms.and_then(crate::moment::iso).serialize(serializer)
}

fn label<S: Serializer>(class: &Class, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(class.label())
}
