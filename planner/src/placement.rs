//! The answer: who was chosen, why, and what speaks for and against everybody. Serialises as `platform.placement-result@1`.

use serde::ser::{SerializeStruct as _, Serializer};
use serde::{Serialize, ser};

use crate::Text;
use crate::requirements::Objective;

/// A choice and its reasons.
#[derive(Debug, Clone, PartialEq)]
pub struct Placement {
    /// Who was chosen; nobody when nobody could be.
    pub selected: Option<Text>,
    /// What the choice was made by.
    pub objective: Objective,
    /// Why, for people.
    pub reasons: Vec<Text>,
    /// Everybody, in the order of the offers.
    pub candidates: Vec<Candidate>,
    /// When, in milliseconds since 1970.
    pub decided_at_ms: i64,
}

impl Placement {
    /// What was found of one candidate.
    pub fn candidate(&self, id: &str) -> Option<&Candidate> {
        self.candidates.iter().find(|candidate| candidate.id == id)
    }
}

/// What was found of one offer.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// The offer.
    pub id: Text,
    /// Whether it may be chosen.
    pub verdict: Verdict,
}

/// Whether an offer may be chosen.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// No, and why.
    Excluded(Text),
    /// Yes, unless it has no score.
    Eligible(Estimate),
}

/// What an eligible offer would cost and take.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Estimate {
    /// USD for the units asked for, to six significant digits; scores are made of the unrounded cost. `None` when nothing
    /// prices it: such an offer is never chosen.
    pub cost_usd: Option<f64>,
    /// Milliseconds; `None` when unknown.
    pub latency_ms: Option<f64>,
    /// The lower the better; `None` when it was not compared.
    pub score: Option<f64>,
    /// What else is to be said of it.
    pub reasons: Vec<Text>,
}

impl Serialize for Placement {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let decided_at = crate::moment::iso(self.decided_at_ms).ok_or_else(|| ser::Error::custom("no such time"))?;
        let mut object = serializer.serialize_struct("Placement", 5)?;
        object.serialize_field("selected", &self.selected)?;
        object.serialize_field("objective", self.objective.as_str())?;
        object.serialize_field("reasons", &self.reasons)?;
        object.serialize_field("candidates", &self.candidates)?;
        object.serialize_field("decided_at", &decided_at)?;
        object.end()
    }
}

impl Serialize for Candidate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_struct("Candidate", 6)?;
        object.serialize_field("id", &self.id)?;
        match &self.verdict {
            Verdict::Excluded(because) => {
                object.serialize_field("eligible", &false)?;
                object.serialize_field("excluded_because", because)?;
            }
            Verdict::Eligible(estimate) => {
                object.serialize_field("eligible", &true)?;
                for (name, value) in [
                    ("estimated_cost_usd", estimate.cost_usd),
                    ("estimated_latency_ms", estimate.latency_ms),
                    ("score", estimate.score),
                ] {
                    if let Some(value) = value {
                        object.serialize_field(name, &Number(value))?;
                    }
                }
                if !estimate.reasons.is_empty() {
                    object.serialize_field("reasons", &estimate.reasons)?;
                }
            }
        }
        object.end()
    }
}

/// A number without a point where it is whole.
struct Number(f64);

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        const WHOLE_MAX: f64 = 9_007_199_254_740_992.0;
        if self.0.fract() == 0.0 && self.0.abs() < WHOLE_MAX {
            #[expect(clippy::cast_possible_truncation, reason = "a whole number below 2^53")]
            return serializer.serialize_i64(self.0 as i64);
        }
        serializer.serialize_f64(self.0)
    }
}
