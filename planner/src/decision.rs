//! One decision of the fabric: the choice among the carriers of a class, with the reasons that only carriers know, and
//! the floor that always delivers.

use crate::Text;
use crate::class::Class;
use crate::intent::Intent;
use crate::market::{Carrier, Health, Market};
use crate::offer::{Offer, Status};
use crate::placement::{Candidate, Placement, Verdict};
use crate::plan::{Options, plan};
use crate::requirements::Requirements;

/// The carrier that needs nothing but the database. It delivers whatever is switched off or down.
pub const FLOOR: &str = "pg-v1";

/// Who wakes a delivery, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// What is woken.
    pub class: Class,
    /// The carrier that is recorded with the delivery.
    pub carrier: Text,
    /// The carrier that is signalled. It is another one only while the carrier that a key's backlog is on is not eligible.
    pub route: Text,
    /// Everything that was weighed; `selected` is the carrier.
    pub placement: Placement,
}

/// Decides for what a policy asks, with the work at `current` if it is anywhere. Never without a carrier.
pub fn decide(intent: &Intent, market: &Market, current: Option<&str>, now_ms: i64) -> Decision {
    decide_for(&intent.requirements(), intent.class, market, current, now_ms)
}

/// [`decide`] with requirements that were made before.
pub(crate) fn decide_for(
    wanted: &Requirements,
    class: Class,
    market: &Market,
    current: Option<&str>,
    now_ms: i64,
) -> Decision {
    let serving = || {
        market
            .carriers
            .iter()
            .filter(|carrier| carrier.classes.contains(&class))
    };
    let enabled = || serving().filter(|carrier| !matches!(carrier.health, Health::Disabled(_)));
    let offers: Vec<Offer> = enabled().map(offered).collect();
    let options = Options {
        rate_cards: &market.cards,
        states: &market.states,
        current,
        ..Options::at(now_ms)
    };
    let mut placement = plan(wanted, &offers, &options);
    for (carrier, candidate) in enabled().zip(&mut placement.candidates) {
        explain(carrier, candidate);
    }
    for carrier in serving() {
        if let Health::Disabled(reason) = &carrier.health {
            let verdict = Verdict::Excluded(reason.clone());
            placement.candidates.push(Candidate {
                id: carrier.offer.id.clone(),
                verdict,
            });
        }
    }
    let carrier = match &placement.selected {
        Some(selected) => selected.clone(),
        None => {
            placement
                .reasons
                .push(format!("no eligible candidate: falling back to {FLOOR}").into());
            Text::Borrowed(FLOOR)
        }
    };
    placement.selected = Some(carrier.clone());
    Decision {
        class,
        route: carrier.clone(),
        carrier,
        placement,
    }
}

impl Decision {
    /// The decision for a key whose waiting deliveries are on `backlog`: they stay together until they have drained.
    pub(crate) fn held_by(&self, backlog: &str) -> Self {
        let mut held = self.clone();
        held.carrier = backlog.to_owned().into();
        held.route = self.route_of(backlog).to_owned().into();
        let mut reason = format!("the backlog of this key stays on {backlog} until it has drained");
        if held.route != held.carrier {
            reason = format!("{reason}; signals go through {} meanwhile", held.route);
        }
        held.placement.selected = Some(held.carrier.clone());
        held.placement.reasons.insert(0, reason.into());
        held
    }

    /// Who is signalled for a key whose waiting deliveries are on `backlog`: that carrier while it is eligible, priced or
    /// not, and whoever was chosen while it is not.
    pub fn route_of<'a>(&'a self, backlog: &'a str) -> &'a str {
        match self.placement.candidate(backlog) {
            Some(Candidate {
                verdict: Verdict::Eligible(_),
                ..
            }) => backlog,
            _ => &self.route,
        }
    }

    /// Whether nobody could be chosen and the floor stood in.
    pub fn is_fallback(&self) -> bool {
        let chosen = |candidate: &Candidate| matches!(&candidate.verdict, Verdict::Eligible(estimate) if estimate.score.is_some());
        !self.placement.candidates.iter().any(chosen)
    }
}

fn offered(carrier: &Carrier) -> Offer {
    let status = match carrier.health {
        Health::Up => Status::Up,
        Health::Degraded(_) => Status::Degraded,
        Health::Down(_) | Health::Disabled(_) => Status::Down,
    };
    Offer {
        status: Some(status),
        ..carrier.offer.clone()
    }
}

/// The carrier's own words take the place of what the choice could only guess.
fn explain(carrier: &Carrier, candidate: &mut Candidate) {
    match (&carrier.health, &mut candidate.verdict) {
        (Health::Down(reason), verdict) => *verdict = Verdict::Excluded(reason.clone()),
        (Health::Degraded(reason), Verdict::Eligible(estimate)) => estimate.reasons.push(reason.clone()),
        _ => {}
    }
}
