//! Which carrier the deliveries of a group are placed on. What is new is remembered only once the group has committed.

use std::collections::{BTreeSet, HashMap};

use planner::{Ask, Class, Decided, Intent, Memory, PolicyKey, Proposal, Text};

use crate::store::{NewPlacement, Placements, Placer};
use crate::telemetry;

use super::Fabric;

/// Recorded decisions that are known by id; beyond it they are looked up again.
const RECORDED_MAX: usize = 16_384;

/// What this process decided, and under which id it is on record.
#[derive(Debug, Default)]
pub(super) struct Places {
    pub(super) memory: Memory,
    recorded: HashMap<(Class, PolicyKey), i64>,
}

/// How the deliveries of one policy are woken.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// What is woken.
    pub class: Class,
    /// The carrier that is recorded with the delivery.
    pub carrier: Text,
    /// The carrier that is signalled.
    pub route: Text,
    /// The decision on record; `None` until it is recorded.
    pub placement_id: Option<i64>,
}

/// The choices of one group. Dropping it forgets what is new in it.
#[derive(Debug, Default)]
pub struct Placed {
    choices: Vec<(PolicyKey, Choice)>,
    /// New decisions, each with its place among the choices.
    proposals: Vec<(usize, Proposal)>,
}

impl Fabric {
    /// Places a policy's deliveries, and answers its place in `placed`.
    pub fn place(&self, placed: &mut Placed, policy: &PolicyKey, intent: &Intent) -> usize {
        let same = |(key, choice): &(PolicyKey, Choice)| key == policy && choice.class == intent.class;
        if let Some(index) = placed.choices.iter().position(same) {
            return index;
        }
        let ask = Ask {
            policy,
            intent,
            key: None,
        };
        let market = self.market.load();
        let places = self.places.lock();
        let decided = places.memory.decide(ask, &market, (self.clock)().0);
        let decision = decided.decision();
        let choice = Choice {
            class: decision.class,
            carrier: decision.carrier.clone(),
            route: decision.route.clone(),
            placement_id: places.recorded.get(&(decision.class, policy.clone())).copied(),
        };
        let index = placed.choices.len();
        if let Decided::Proposed(proposal) = decided {
            placed.proposals.push((index, proposal));
        }
        placed.choices.push((policy.clone(), choice));
        index
    }

    /// Remembers what was decided, now that it has been committed.
    pub fn committed(&self, placed: Placed) {
        if placed.proposals.is_empty() {
            return;
        }
        let mut places = self.places.lock();
        if places.recorded.len() >= RECORDED_MAX {
            // Both, or what is remembered would never be recorded again.
            *places = Places::default();
        }
        for (index, proposal) in placed.proposals {
            let (policy, choice) = &placed.choices[index];
            if let Some(id) = choice.placement_id {
                places.recorded.insert((choice.class, policy.clone()), id);
            }
            let before = places.memory.current(choice.class, policy);
            if let Some(from) = before.filter(|from| *from != choice.carrier) {
                telemetry::placement_changed(choice.class, from, &choice.carrier);
                tracing::info!(class = %choice.class, "{policy:?} moved from {from} to {}", choice.carrier);
            }
            proposal.committed(&mut places.memory);
        }
    }
}

impl Placer for Fabric {
    type Decisions = Placed;

    fn begin(&self) -> Placed {
        Placed::default()
    }

    fn decide(&self, decisions: &mut Placed, policy: &PolicyKey, intent: &Intent) -> usize {
        self.place(decisions, policy, intent)
    }

    fn committed(&self, decisions: Placed) {
        self.committed(decisions);
    }
}

impl Placements for Placed {
    fn unrecorded(&self) -> Vec<NewPlacement<'_>> {
        self.unrecorded()
    }

    fn recorded(&mut self, ids: &[i64]) {
        self.recorded(ids);
    }

    fn placement(&self, place: usize) -> (&str, Option<i64>) {
        let choice = self.choice(place);
        (&choice.carrier, choice.placement_id)
    }
}

impl Placed {
    /// A choice by its place.
    pub fn choice(&self, index: usize) -> &Choice {
        &self.choices[index].1
    }

    /// Whether every decision is on record.
    pub fn is_recorded(&self) -> bool {
        self.news().next().is_none()
    }

    /// Forgets decisions that were not acted on.
    pub fn keep(&mut self, used: &BTreeSet<usize>) {
        self.proposals.retain(|(index, _)| used.contains(index));
    }

    /// The decisions that must be put on record.
    pub fn unrecorded(&self) -> Vec<NewPlacement<'_>> {
        self.news()
            .map(|(index, proposal)| {
                let (policy, choice) = &self.choices[*index];
                NewPlacement {
                    class: choice.class.label(),
                    pattern: policy.pattern(),
                    revision: policy.revision(),
                    carrier: proposal.decision().carrier.as_ref(),
                    result: serde_json::to_string(&proposal.decision().placement).expect("a placement is JSON"),
                }
            })
            .collect()
    }

    /// They are on record under these ids, in the order of [`Placed::unrecorded`].
    pub fn recorded(&mut self, ids: &[i64]) {
        let places: Vec<usize> = self.news().map(|(index, _)| *index).collect();
        for (place, id) in places.into_iter().zip(ids) {
            self.choices[place].1.placement_id = Some(*id);
        }
    }

    fn news(&self) -> impl Iterator<Item = &(usize, Proposal)> {
        let is_new = |(index, proposal): &&(usize, Proposal)| {
            proposal.record().is_some() || self.choices[*index].1.placement_id.is_none()
        };
        self.proposals.iter().filter(is_new)
    }
}
