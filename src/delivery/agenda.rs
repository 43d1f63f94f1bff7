//! Which subscriptions are worth a claim, in which order, and when the next retry is due.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};

use tokio::time::Instant;

use crate::domain::ids::SubscriptionId;

use super::wake::{Cause, Told};

/// Retry times that are remembered; the poll finds the others.
const TIMES_MAX: usize = 16_384;

/// What to do with a waiting subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// Claim for it now.
    Take,
    /// It must wait for a slot.
    Wait,
    /// There is nothing to claim for it, or something else will put it back.
    Drop,
}

/// Subscriptions that may have work, first come first served.
#[derive(Default)]
pub(super) struct Agenda {
    waiting: VecDeque<SubscriptionId>,
    /// What was first said of each of them.
    told: HashMap<SubscriptionId, Told>,
    /// At their own cap when last counted.
    full: HashSet<SubscriptionId>,
    times: BTreeSet<(Instant, SubscriptionId)>,
}

impl Agenda {
    /// The subscription may have work.
    pub(super) fn want(&mut self, id: SubscriptionId, told: Told) {
        if let Entry::Vacant(free) = self.told.entry(id) {
            self.waiting.push_back(free.key().clone());
            free.insert(told);
        }
    }

    /// The subscription may have work from then on.
    pub(super) fn want_at(&mut self, at: Instant, id: SubscriptionId) {
        if self.times.len() < TIMES_MAX {
            self.times.insert((at, id));
        }
    }

    /// When the next remembered time comes.
    pub(super) fn next_time(&self) -> Option<Instant> {
        self.times.first().map(|(at, _)| *at)
    }

    /// Puts the subscriptions whose time has come among the waiting.
    pub(super) fn ring_times(&mut self, now: Instant) {
        while self.times.first().is_some_and(|(at, _)| *at <= now) {
            if let Some((at, id)) = self.times.pop_first() {
                self.want(id, Told { cause: Cause::Next, at });
            }
        }
    }

    /// The subscription runs as many as it may; the end of one of them opens it again.
    pub(super) fn set_full(&mut self, id: SubscriptionId) {
        self.full.insert(id);
    }

    /// One of its deliveries ended.
    pub(super) fn set_open(&mut self, id: &SubscriptionId) {
        self.full.remove(id);
    }

    pub(super) fn is_full(&self, id: &SubscriptionId) -> bool {
        self.full.contains(id)
    }

    pub(super) fn is_waiting(&self, id: &SubscriptionId) -> bool {
        self.told.contains_key(id)
    }

    /// Forgets which subscriptions were at their cap: their caps may have changed.
    pub(super) fn open_all(&mut self) {
        self.full.clear();
    }

    /// Takes up to `most` of the waiting; `turn` is told whether each is at its cap. Those that must wait keep their
    /// places.
    pub(super) fn choose(
        &mut self,
        most: usize,
        mut turn: impl FnMut(&SubscriptionId, bool) -> Turn,
    ) -> Vec<(SubscriptionId, Told)> {
        let mut chosen = Vec::new();
        let mut kept = VecDeque::new();
        while chosen.len() < most {
            let Some(id) = self.waiting.pop_front() else { break };
            match turn(&id, self.full.contains(&id)) {
                Turn::Take => {
                    let told = self.told.remove(&id).expect("something was said of each that waits");
                    chosen.push((id, told));
                }
                Turn::Wait => kept.push_back(id),
                Turn::Drop => {
                    self.told.remove(&id);
                }
            }
        }
        kept.append(&mut self.waiting);
        self.waiting = kept;
        chosen
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn chosen(
        agenda: &mut Agenda,
        most: usize,
        turn: impl FnMut(&SubscriptionId, bool) -> Turn,
    ) -> Vec<SubscriptionId> {
        agenda.choose(most, turn).into_iter().map(|(id, _)| id).collect()
    }

    #[test]
    fn the_first_to_wait_is_the_first_chosen_and_waits_once() {
        let ids: Vec<_> = (0..4).map(|_| SubscriptionId::generate()).collect();
        let mut agenda = Agenda::default();
        for id in ids.iter().chain(&ids) {
            agenda.want(id.clone(), Told::now(Cause::Local));
        }
        let two = chosen(&mut agenda, 2, |id, _| match ids.iter().position(|other| other == id) {
            Some(0) => Turn::Wait,
            Some(1) => Turn::Drop,
            _ => Turn::Take,
        });
        assert_eq!(two, [ids[2].clone(), ids[3].clone()]);
        assert_eq!(
            chosen(&mut agenda, 9, |_, _| Turn::Take),
            [ids[0].clone()],
            "kept its place; nothing else waits"
        );
        assert!(ids.iter().all(|id| !agenda.is_waiting(id)));
    }

    #[test]
    fn a_time_rings_when_it_has_come_and_every_one_of_them() {
        let (id, zero) = (SubscriptionId::generate(), Instant::now());
        let (soon, later) = (zero + Duration::from_millis(50), zero + Duration::from_millis(90));
        let mut agenda = Agenda::default();
        agenda.want_at(later, id.clone());
        agenda.want_at(soon, id.clone());
        assert_eq!(agenda.next_time(), Some(soon));
        agenda.ring_times(zero);
        assert!(!agenda.is_waiting(&id));
        agenda.ring_times(soon);
        let (next, told) = agenda.choose(1, |_, _| Turn::Take).remove(0);
        assert_eq!((next, told.at, told.cause.path()), (id, soon, "next"));
        assert_eq!(
            agenda.next_time(),
            Some(later),
            "the second delivery's retry is not lost"
        );
    }
}
