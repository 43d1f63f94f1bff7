//! Runs the planner, its memory, the breakers and the latency windows over a scenario on virtual time: months in a moment.
//!
//! What is invented is the world around them: traffic, brokers that come and go, prices. The decisions are the service's.

mod broker;
mod carriers;
mod dice;
mod report;
mod run;
mod scenario;
mod span;
mod svg;
mod world;

pub use report::{CarrierReport, ClassReport, CostPoint, Happened, Lane, Move, Report, Segment, Unavailable};
pub use run::run;
pub use scenario::{PolicyJudge, SCENARIO_BYTES_MAX, Scenario, ScenarioMistakes, Traffic};
pub use svg::draw;
