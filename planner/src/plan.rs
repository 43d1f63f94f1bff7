//! The choice among offers, as a pure function. Services that plan for themselves come to the same result from the same
//! documents, so the order of every test, sum and comparison is part of the contract.

use crate::Text;
use crate::cost::cost;
use crate::eligibility::{dear, excluded};
use crate::number::{fixed, rounded, significant, text};
use crate::offer::{Offer, Trust};
use crate::placement::{Candidate, Estimate, Placement, Verdict};
use crate::rate_card::RateCards;
use crate::requirements::{LatencyClass, Objective, Requirements};
use crate::usage::ProviderStates;

/// How much cost and latency count in a balanced score.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Weights {
    /// Of the cost, as a share of the highest.
    pub cost: f64,
    /// Of the latency, as a share of the highest.
    pub latency: f64,
}

/// What the load of an offer that is paid already costs: nothing up to `busy`, `max_usd` from `full` on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OwnedLoad {
    /// Load from 0 to 1 up to which a unit is free.
    pub busy: f64,
    /// Load from which a unit costs the most.
    pub full: f64,
    /// USD for a unit then.
    pub max_usd: f64,
}

/// What the choice depends on besides the offers.
#[derive(Debug, Clone, Copy)]
pub struct Options<'a> {
    /// Prices by card.
    pub rate_cards: &'a RateCards,
    /// Usage by provider.
    pub states: &'a ProviderStates,
    /// Now, in milliseconds since 1970.
    pub now_ms: i64,
    /// Where the work is, if it is anywhere.
    pub current: Option<&'a str>,
    /// How much better, as a share of its score, another must be than where the work is.
    pub min_gain: f64,
    /// How much cost and latency count.
    pub weights: Weights,
    /// What load costs.
    pub owned: OwnedLoad,
}

/// How much better another must be before work moves.
pub const MIN_GAIN: f64 = 0.15;

static NO_CARDS: RateCards = RateCards::none();
static NO_STATES: ProviderStates = ProviderStates::none();

impl Options<'static> {
    /// No prices, no usage, no place yet, and the weights that everybody has.
    pub fn at(now_ms: i64) -> Self {
        Self {
            rate_cards: &NO_CARDS,
            states: &NO_STATES,
            now_ms,
            current: None,
            min_gain: MIN_GAIN,
            weights: Weights {
                cost: 0.5,
                latency: 0.5,
            },
            owned: OwnedLoad {
                busy: 0.6,
                full: 0.9,
                max_usd: 0.001,
            },
        }
    }
}

/// An offer that is compared.
struct Scored<'a> {
    /// Its place among the offers.
    index: usize,
    offer: &'a Offer,
    cost: f64,
    latency: Option<f64>,
    score: f64,
}

/// Chooses among `offers` and says why.
pub fn plan(wanted: &Requirements, offers: &[Offer], options: &Options<'_>) -> Placement {
    const FIRST_PARTY: &[Trust] = &[Trust::FirstParty];
    let own_only = matches!(wanted.objective, Objective::FirstPartyOnly | Objective::Private);
    let trust = if own_only && wanted.trust.is_empty() {
        FIRST_PARTY
    } else {
        &wanted.trust
    };

    let mut candidates = Vec::with_capacity(offers.len());
    let mut scored = Vec::with_capacity(offers.len());
    for (index, offer) in offers.iter().enumerate() {
        let latency = offer.latency(wanted.latency_op.as_deref());
        let verdict = match judge(wanted, trust, offer, latency, options) {
            Err(because) => Verdict::Excluded(because),
            Ok(cost) if cost.is_finite() => {
                scored.push(Scored {
                    index,
                    offer,
                    cost,
                    latency,
                    score: 0.0,
                });
                Verdict::Eligible(Estimate {
                    cost_usd: Some(significant(cost)),
                    latency_ms: latency,
                    ..Estimate::default()
                })
            }
            Ok(_) => {
                let reasons = vec![unpriced(offer)];
                Verdict::Eligible(Estimate {
                    latency_ms: latency,
                    reasons,
                    ..Estimate::default()
                })
            }
        };
        candidates.push(Candidate {
            id: offer.id.clone(),
            verdict,
        });
    }
    score(wanted.objective, &mut scored, options);
    for one in &scored {
        if let Verdict::Eligible(estimate) = &mut candidates[one.index].verdict {
            estimate.score = Some(one.score);
        }
    }
    let (selected, reasons) = choose(wanted, &mut scored, options);
    Placement {
        selected,
        objective: wanted.objective,
        reasons,
        candidates,
        decided_at_ms: options.now_ms,
    }
}

/// What an offer costs, or why it may not be chosen.
fn judge(
    wanted: &Requirements,
    trust: &[Trust],
    offer: &Offer,
    latency: Option<f64>,
    options: &Options<'_>,
) -> Result<f64, Text> {
    if let Some(because) = excluded(wanted, trust, offer, latency) {
        return Err(because);
    }
    let cost = cost(wanted, offer, options);
    dear(wanted, cost).map_or(Ok(cost), Err)
}

fn unpriced(offer: &Offer) -> Text {
    match &offer.pricing.rate_card {
        Some(card) => format!("no rate card {card}").into(),
        None => Text::Borrowed("no price"),
    }
}

/// Scores are relative to the highest cost and latency among those that are compared.
fn score(objective: Objective, scored: &mut [Scored<'_>], options: &Options<'_>) {
    let cost_max = scored.iter().map(|one| one.cost).fold(1e-12, f64::max);
    let latency_max = scored.iter().filter_map(|one| one.latency).fold(1.0, f64::max);
    for one in scored {
        let cost = one.cost / cost_max;
        let latency = one.latency.unwrap_or(latency_max) / latency_max;
        one.score = rounded(match objective {
            Objective::Cheapest => cost + latency * 1e-3,
            Objective::LowestLatency => latency + cost * 1e-3,
            _ => cost * options.weights.cost + latency * options.weights.latency,
        });
    }
}

/// The winner, and why.
fn choose(wanted: &Requirements, scored: &mut [Scored<'_>], options: &Options<'_>) -> (Option<Text>, Vec<Text>) {
    // Stable: between equals the order of the offers decides.
    scored.sort_by(|a, b| {
        let unknown_last = |one: &Scored<'_>| one.latency.unwrap_or(f64::INFINITY);
        a.score
            .total_cmp(&b.score)
            .then_with(|| unknown_last(a).total_cmp(&unknown_last(b)))
    });
    let mut reasons = Vec::with_capacity(4);
    let Some(mut best) = scored.first() else {
        return (None, vec![Text::Borrowed("no eligible candidate")]);
    };
    let named = |id: Option<&str>| scored.iter().find(|one| Some(one.offer.id.as_ref()) == id);
    let current = named(options.current);
    let kept = wanted.objective == Objective::Correctness || wanted.latency_class == Some(LatencyClass::Critical);
    let authority = if kept {
        named(wanted.authority.as_deref()).or(current)
    } else {
        None
    };
    if let Some(authority) = authority {
        best = authority;
        reasons.push(Text::Borrowed("the authority keeps critical work"));
    } else if kept {
        // Nobody has the work yet, or whoever had it cannot keep it: the best one gets it.
    } else if let Some(current) = current {
        if current.index != best.index {
            let gain = if current.score == 0.0 {
                0.0
            } else {
                (current.score - best.score) / current.score
            };
            if gain < options.min_gain {
                best = current;
                reasons.push(stays(&current.offer.id, gain, options.min_gain));
            }
        }
    } else if let Some(gone) = options.current {
        reasons.push(format!("{gone} is no longer eligible: moved").into());
    }
    if best.cost == 0.0 {
        reasons.push(Text::Borrowed(
            "no marginal cost (already-paid capacity or a free allowance)",
        ));
    }
    if let Some(ceiling) = wanted.max_latency_ms {
        reasons.push(format!("meets the {} ms latency ceiling", text(ceiling)).into());
    }
    reasons.push(match wanted.objective {
        Objective::Balanced => Text::Borrowed("objective balanced"),
        objective => format!("objective {}", objective.as_str()).into(),
    });
    (Some(best.offer.id.clone()), reasons)
}

fn stays(id: &str, gain: f64, min_gain: f64) -> Text {
    let (gain, needed) = (fixed(gain * 100.0, 1), fixed(min_gain * 100.0, 0));
    format!("stays on {id}: the best alternative is only {gain}% better (needs {needed}%)").into()
}
