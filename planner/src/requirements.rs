//! What a workload asks of an offer. Fields that it leaves empty exclude nobody.

use crate::Text;
use crate::offer::Trust;

/// What the best offer is best at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Objective {
    /// Cost and latency count alike.
    #[default]
    Balanced,
    /// Cost, and latency between equal costs.
    Cheapest,
    /// Latency, and cost between equal latencies.
    LowestLatency,
    /// Whoever has the work keeps it.
    Correctness,
    /// Scored like balanced.
    LocalOnly,
    /// Scored like balanced.
    HighReliability,
    /// Like balanced, among first-party offers unless the trust says otherwise.
    FirstPartyOnly,
    /// Like balanced, among first-party offers unless the trust says otherwise.
    Private,
}

impl Objective {
    /// Its name in answers and reasons.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Balanced => "balanced",
            Self::Cheapest => "cheapest",
            Self::LowestLatency => "lowest-latency",
            Self::Correctness => "correctness",
            Self::LocalOnly => "local-only",
            Self::HighReliability => "high-reliability",
            Self::FirstPartyOnly => "first-party-only",
            Self::Private => "private",
        }
    }
}

/// How soon the work is wanted. Critical work also stays where it is, and both it and realtime work are priced without
/// the reserve of an allowance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LatencyClass {
    /// At once or not at all.
    Realtime,
    /// Somebody waits for it.
    Interactive,
    /// It must not go wrong.
    Critical,
    /// Nobody waits for it.
    Background,
    /// It may take long.
    Bulk,
}

/// Resources that an offer must have free; 0 asks for none.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Resources {
    /// Processor cores.
    pub cpu: f64,
    /// Memory in MB.
    pub memory_mb: f64,
    /// Whether a GPU is needed.
    pub gpu: bool,
}

/// What a workload asks for.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Requirements {
    /// What the choice is made by.
    pub objective: Objective,
    /// Capabilities that an offer must have; the first that it lacks is the one that is named.
    pub capabilities: Vec<Text>,
    /// Trusts that are allowed, in the order in which a refusal names them. Empty: any.
    pub trust: Vec<Trust>,
    /// Where data must stay.
    pub residency: Option<Text>,
    /// Where the work must run; `nearest` is anywhere.
    pub region: Option<Text>,
    /// The operation whose latency counts; an offer without it is judged by its best p95.
    pub latency_op: Option<Text>,
    /// Highest p95 in milliseconds.
    pub max_latency_ms: Option<f64>,
    /// Highest cost of all units in USD.
    pub max_cost_usd: Option<f64>,
    /// What an offer must have free.
    pub resources: Resources,
    /// Units that are paid for; 0 is 1.
    pub units: f64,
    /// How soon it is wanted.
    pub latency_class: Option<LatencyClass>,
    /// The offer that keeps critical work while it is eligible.
    pub authority: Option<Text>,
}
