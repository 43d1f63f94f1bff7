//! Which carrier the deliveries of a group are placed on. What is new is remembered only once the group has committed.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use planner::{Ask, Class, Decided, Decision, Intent, Memory, PolicyKey, Proposal};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::store::{NewPlacement, PLACED_BY_MAX, Placements, Placer, answered};
use crate::telemetry;

use super::Fabric;

/// Recorded decisions that are known by id; beyond it they are looked up again.
const RECORDED_MAX: usize = 16_384;

/// How often the store is told which decisions are still acted on.
const SAY_INTERVAL: Duration = PLACED_BY_MAX.checked_div(6).expect("six is not zero");
/// How soon it is told again where that failed.
const SAY_AGAIN_AFTER: Duration = Duration::from_secs(60);

/// What this process decided, and under which id it is on record.
#[derive(Debug)]
pub(super) struct Places {
    pub(super) memory: Memory,
    recorded: HashMap<(Class, PolicyKey), i64>,
    /// Since then every one of `recorded` was recorded, or said to be in use.
    said_at: Instant,
}

impl Default for Places {
    fn default() -> Self {
        Self {
            memory: Memory::default(),
            recorded: HashMap::new(),
            said_at: Instant::now(),
        }
    }
}

impl Places {
    /// Forgets everything where the store was not told for too long that it is in use: it may have been pruned.
    fn forget_unsaid(&mut self, now: Instant) {
        if now.duration_since(self.said_at) >= PLACED_BY_MAX {
            *self = Self::default();
        }
    }
}

/// How the deliveries of one policy are woken.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// What is woken.
    pub class: Class,
    /// What was decided: the carrier that is recorded with the delivery, and who is signalled.
    pub decision: Arc<Decision>,
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
        let mut places = self.places.lock();
        places.forget_unsaid(Instant::now());
        let decided = places.memory.decide(ask, &market, (self.clock)().0);
        let decision = decided.decision();
        let choice = Choice {
            class: decision.class,
            decision: Arc::clone(decision),
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
            if let Some(from) = before.filter(|from| *from != choice.decision.carrier) {
                let to = &choice.decision.carrier;
                telemetry::placement_changed(choice.class, from, to);
                tracing::info!(class = %choice.class, "{policy:?} moved from {from} to {to}");
            }
            proposal.committed(&mut places.memory);
        }
    }
}

impl Fabric {
    /// Tells the store now and then which decisions are acted on here, so that none of them is forgotten, until the stop.
    pub(super) async fn keep_recorded(&self, stop: CancellationToken) {
        let mut wait = SAY_INTERVAL;
        while stop.run_until_cancelled(sleep(wait)).await.is_some() {
            let asked = Instant::now();
            let ids: Vec<i64> = self.places.lock().recorded.values().copied().collect();
            wait = match answered(self.store.use_placements(&ids)).await {
                Ok(()) => {
                    self.places.lock().said_at = asked;
                    SAY_INTERVAL
                }
                Err(error) => {
                    tracing::debug!(error = %error, "that decisions are in use could not be said yet: {error}");
                    SAY_AGAIN_AFTER
                }
            };
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
        (&choice.decision.carrier, choice.placement_id)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_the_store_was_not_told_of_for_an_hour_is_put_on_record_anew() {
        let mut places = Places::default();
        places.recorded.insert((Class::Queue, PolicyKey::new(None, 0)), 7);
        tokio::time::advance(PLACED_BY_MAX - Duration::from_secs(1)).await;
        places.forget_unsaid(Instant::now());
        assert_eq!(places.recorded.len(), 1);
        tokio::time::advance(Duration::from_secs(1)).await;
        places.forget_unsaid(Instant::now());
        assert!(places.recorded.is_empty(), "it may have been forgotten");
        places.recorded.insert((Class::Queue, PolicyKey::new(None, 0)), 8);
        places.forget_unsaid(Instant::now());
        assert_eq!(places.recorded.len(), 1, "it has begun anew");
    }
}
