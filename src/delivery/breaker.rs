//! Which endpoints may use how many slots: one that keeps failing is tried alone, one that was never heard of is tried with
//! a single delivery, and each of these kinds has a part of the slots, so that the others always find one. No clock, no I/O; nothing is disabled, and no schedule changes.
//!
//! An endpoint is the address of a subscription, query and all. Subscriptions with the same one share what is known of it;
//! two paths of a host may be two programs, and are two endpoints. What is known is this process's own and may be lost.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::outcome::Ended;

/// Failures in a row after which an endpoint is tried alone.
const ALONE_AFTER: u32 = 3;

/// What an attempt tells about its endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Heard {
    /// Somebody is there: any status below 500, a refusal included.
    Answer,
    /// No answer in time, no connection, or a status from 500 on.
    Failure,
}

impl Heard {
    /// `None` where the attempt says nothing about the endpoint.
    pub(super) fn of(ended: &Ended) -> Option<Self> {
        match ended {
            Ended::Answered { status, .. } if *status < 500 => Some(Self::Answer),
            Ended::Answered { .. } | Ended::Failed(_) => Some(Self::Failure),
            Ended::Refused(_) | Ended::Interrupted => None,
        }
    }
}

/// What is known of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// Nothing yet: one attempt at a time.
    Fresh,
    /// Its last attempt was answered.
    Answering,
    /// Its last attempt failed.
    Failing,
    /// The last few failed: one attempt at a time.
    Alone,
}

/// A turn between tried together and tried alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turned {
    /// From now on alone.
    Alone,
    /// No longer alone.
    Together,
}

#[derive(Default)]
struct Endpoint {
    failures: u32,
    answered: bool,
    inflight: usize,
}

impl Endpoint {
    fn standing(&self) -> Standing {
        match self.failures {
            0 if self.answered => Standing::Answering,
            0 => Standing::Fresh,
            ALONE_AFTER.. => Standing::Alone,
            _ => Standing::Failing,
        }
    }
}

/// Every endpoint that was tried, and the slots they hold.
pub(super) struct Endpoints {
    of: HashMap<Arc<str>, Endpoint>,
    /// Slots that the failing ones and those tried alone may hold together.
    lane: usize,
    /// Slots that the fresh may hold together beside an answering one.
    fresh_lane: usize,
    /// How many are answering.
    answering: usize,
    /// Slots held by the fresh.
    fresh_inflight: usize,
    /// Slots held by the failing and those tried alone.
    failing_inflight: usize,
}

impl Endpoints {
    pub(super) fn new(slots: usize) -> Self {
        Self {
            of: HashMap::new(),
            lane: (slots / 2).max(1),
            fresh_lane: (slots / 4).max(1),
            answering: 0,
            fresh_inflight: 0,
            failing_inflight: 0,
        }
    }

    /// An attempt begins.
    pub(super) fn take(&mut self, endpoint: &Arc<str>) {
        self.change(endpoint, |known| known.inflight += 1);
    }

    /// A slot is given back.
    pub(super) fn release(&mut self, endpoint: &Arc<str>) {
        self.change(endpoint, |known| known.inflight = known.inflight.saturating_sub(1));
    }

    /// An attempt has told something.
    pub(super) fn heard(&mut self, endpoint: &Arc<str>, heard: Heard) -> Option<Turned> {
        let before = self.standing(endpoint) == Standing::Alone;
        self.change(endpoint, |known| match heard {
            Heard::Answer => (known.failures, known.answered) = (0, true),
            Heard::Failure => known.failures = known.failures.saturating_add(1),
        });
        match (before, self.standing(endpoint) == Standing::Alone) {
            (false, true) => Some(Turned::Alone),
            (true, false) => Some(Turned::Together),
            _ => None,
        }
    }

    /// Forgets endpoints that no subscription has any more.
    pub(super) fn keep(&mut self, known: impl Fn(&str) -> bool) {
        self.of.retain(|endpoint, one| one.inflight > 0 || known(endpoint));
        let answering = |one: &&Endpoint| one.standing() == Standing::Answering;
        self.answering = self.of.values().filter(answering).count();
    }

    /// Begins to choose for one claim.
    pub(super) fn choice(&self) -> Choice {
        let fresh_left = match self.answering {
            // Nobody is known to answer, so nobody loses a slot to them.
            0 => usize::MAX,
            _ => self.fresh_lane.saturating_sub(self.fresh_inflight),
        };
        Choice {
            left: self.lane.saturating_sub(self.failing_inflight),
            fresh_left,
            doubtful: 0,
            alone: HashSet::new(),
        }
    }

    fn standing(&self, endpoint: &str) -> Standing {
        self.of.get(endpoint).map_or(Standing::Fresh, Endpoint::standing)
    }

    fn change(&mut self, endpoint: &Arc<str>, change: impl FnOnce(&mut Endpoint)) {
        let one = self.of.entry(Arc::clone(endpoint)).or_default();
        let count = |standing, inflight: usize| match standing {
            Standing::Fresh => (0, inflight, 0),
            Standing::Answering => (1, 0, 0),
            Standing::Failing | Standing::Alone => (0, 0, inflight),
        };
        let before = count(one.standing(), one.inflight);
        change(one);
        let after = count(one.standing(), one.inflight);
        self.answering = self.answering + after.0 - before.0;
        self.fresh_inflight = self.fresh_inflight + after.1 - before.1;
        self.failing_inflight = self.failing_inflight + after.2 - before.2;
    }
}

/// Endpoints chosen for one claim so far.
pub(super) struct Choice {
    /// Slots left for those that fail.
    left: usize,
    /// Slots left for those that were never heard of.
    fresh_left: usize,
    /// How many of those that fail were chosen.
    doubtful: usize,
    /// Chosen ones that get a single slot.
    alone: HashSet<Arc<str>>,
}

impl Choice {
    /// Chooses a subscription of this endpoint, unless it has to wait.
    pub(super) fn take(&mut self, endpoints: &Endpoints, endpoint: &Arc<str>) -> bool {
        let standing = endpoints.standing(endpoint);
        let alone = matches!(standing, Standing::Fresh | Standing::Alone);
        if alone {
            let busy = endpoints.of.get(endpoint).is_some_and(|one| one.inflight > 0);
            if busy || self.alone.contains(endpoint) {
                return false;
            }
        }
        match standing {
            Standing::Answering => return true,
            Standing::Fresh if self.fresh_left == 0 => return false,
            Standing::Fresh => self.fresh_left -= 1,
            Standing::Failing | Standing::Alone if self.doubtful >= self.left => return false,
            Standing::Failing | Standing::Alone => self.doubtful += 1,
        }
        if alone {
            self.alone.insert(Arc::clone(endpoint));
        }
        true
    }

    /// How many deliveries a chosen subscription of this endpoint may claim; `None` where this does not bound it. What
    /// fails shares evenly.
    pub(super) fn room(&self, endpoints: &Endpoints, endpoint: &str) -> Option<usize> {
        match endpoints.standing(endpoint) {
            Standing::Answering => None,
            Standing::Fresh | Standing::Alone => Some(1),
            Standing::Failing => Some((self.left / self.doubtful.max(1)).max(1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn endpoint(name: &str) -> Arc<str> {
        Arc::from(format!("http://127.0.0.1/{name}"))
    }

    fn failed(endpoints: &mut Endpoints, one: &Arc<str>, times: u32) -> Vec<Option<Turned>> {
        (0..times).map(|_| endpoints.heard(one, Heard::Failure)).collect()
    }

    fn chosen(endpoints: &Endpoints, wanted: &[&Arc<str>]) -> Vec<bool> {
        let mut choice = endpoints.choice();
        wanted.iter().map(|one| choice.take(endpoints, one)).collect()
    }

    #[test]
    fn what_an_attempt_tells() {
        let answered = |status| {
            Heard::of(&Ended::Answered {
                status,
                retry_after: None,
            })
        };
        for status in [200, 204, 301, 404, 410, 422, 429] {
            assert_eq!(answered(status), Some(Heard::Answer), "{status}");
        }
        assert_eq!(
            (answered(500), answered(503)),
            (Some(Heard::Failure), Some(Heard::Failure))
        );
        assert_eq!(Heard::of(&Ended::Failed("timeout".into())), Some(Heard::Failure));
        assert_eq!(Heard::of(&Ended::Refused("not allowed".into())), None);
        assert_eq!(Heard::of(&Ended::Interrupted), None);
    }

    #[test]
    fn an_endpoint_that_keeps_failing_is_tried_alone_until_it_answers() {
        let (mut endpoints, one) = (Endpoints::new(100), endpoint("one"));
        assert_eq!(failed(&mut endpoints, &one, 2), [None, None]);
        assert_eq!(endpoints.heard(&one, Heard::Answer), None, "not in a row");
        assert_eq!(failed(&mut endpoints, &one, 4), [None, None, Some(Turned::Alone), None]);
        assert_eq!(
            chosen(&endpoints, &[&one, &one]),
            [true, false],
            "two subscriptions, one endpoint"
        );
        let mut choice = endpoints.choice();
        assert!(choice.take(&endpoints, &one));
        assert_eq!(choice.room(&endpoints, &one), Some(1));
        endpoints.take(&one);
        assert_eq!(chosen(&endpoints, &[&one, &endpoint("other")]), [false, true]);
        endpoints.release(&one);
        assert_eq!(chosen(&endpoints, &[&one]), [true]);
        assert_eq!(endpoints.heard(&one, Heard::Answer), Some(Turned::Together));
        let mut choice = endpoints.choice();
        assert!(choice.take(&endpoints, &one) && choice.take(&endpoints, &one));
        assert_eq!(choice.room(&endpoints, &one), None);
    }

    #[test]
    fn those_that_fail_share_half_of_the_slots() {
        let mut endpoints = Endpoints::new(8);
        let good = endpoint("good");
        let bad: Vec<Arc<str>> = (0..6).map(|n| endpoint(&n.to_string())).collect();
        let wanted: Vec<&Arc<str>> = bad.iter().collect();
        for one in &bad {
            failed(&mut endpoints, one, 1);
        }
        endpoints.heard(&good, Heard::Answer);
        assert_eq!(chosen(&endpoints, &wanted), [true, true, true, true, false, false]);
        for one in &bad[..3] {
            endpoints.take(one);
        }
        assert_eq!(chosen(&endpoints, &wanted[3..]), [true, false, false]);
        assert_eq!(chosen(&endpoints, &[&good, &good]), [true, true], "they are not bound");
        let mut choice = endpoints.choice();
        assert!(choice.take(&endpoints, &bad[4]));
        assert_eq!(choice.room(&endpoints, &bad[4]), Some(1));
        // One that begins to fail counts with all that it holds.
        for _ in 0..5 {
            endpoints.take(&good);
        }
        failed(&mut endpoints, &good, 1);
        assert_eq!(chosen(&endpoints, &[&good]), [false]);
    }

    #[test]
    fn those_never_heard_of_get_one_slot_each_and_a_part_of_their_own() {
        let mut endpoints = Endpoints::new(8);
        let fresh: Vec<Arc<str>> = (0..6).map(|n| endpoint(&n.to_string())).collect();
        let wanted: Vec<&Arc<str>> = fresh.iter().collect();
        assert_eq!(
            chosen(&endpoints, &wanted),
            [true; 6],
            "no slot stays unused before anybody has answered"
        );
        assert_eq!(
            chosen(&endpoints, &[&fresh[0], &fresh[0]]),
            [true, false],
            "two subscriptions, one endpoint"
        );
        let mut choice = endpoints.choice();
        assert!(choice.take(&endpoints, &fresh[0]));
        assert_eq!(
            choice.room(&endpoints, &fresh[0]),
            Some(1),
            "one that hangs takes no more than one slot"
        );
        endpoints.take(&fresh[0]);
        assert_eq!(chosen(&endpoints, &wanted[..2]), [false, true]);
        // Those that hang and fail hold all that they may.
        let bad = endpoint("bad");
        failed(&mut endpoints, &bad, 1);
        for _ in 0..4 {
            endpoints.take(&bad);
        }
        endpoints.heard(&endpoint("good"), Heard::Answer);
        assert_eq!(chosen(&endpoints, &[&bad]), [false]);
        assert_eq!(chosen(&endpoints, &wanted[1..]), [true, false, false, false, false]);
        endpoints.heard(&fresh[0], Heard::Answer);
        let mut choice = endpoints.choice();
        assert!(choice.take(&endpoints, &fresh[0]) && choice.take(&endpoints, &fresh[0]));
        assert_eq!(choice.room(&endpoints, &fresh[0]), None, "it answers");
    }

    #[test]
    fn a_single_slot_still_goes_round() {
        let (mut endpoints, one) = (Endpoints::new(1), endpoint("one"));
        failed(&mut endpoints, &one, 5);
        assert_eq!(chosen(&endpoints, &[&one]), [true]);
    }

    proptest! {
        /// The counts are those of the endpoints, whatever happens in whatever order.
        #[test]
        fn nothing_is_counted_twice_or_lost(steps in prop::collection::vec((0_usize..4, 0_u8..6), 0..200)) {
            let mut endpoints = Endpoints::new(8);
            let all: Vec<Arc<str>> = (0..4).map(|n| endpoint(&n.to_string())).collect();
            for (which, step) in steps {
                let one = &all[which];
                match step {
                    0 | 1 => endpoints.take(one),
                    2 => if endpoints.of.get(one).is_some_and(|known| known.inflight > 0) { endpoints.release(one) },
                    3 => { endpoints.heard(one, Heard::Answer); }
                    4 => { endpoints.heard(one, Heard::Failure); }
                    _ => endpoints.keep(|known| known.ends_with('1')),
                }
                let sum = |wanted: &[Standing], count: fn(&Endpoint) -> usize| -> usize {
                    endpoints.of.values().filter(|one| wanted.contains(&one.standing())).map(count).sum()
                };
                prop_assert_eq!(endpoints.answering, sum(&[Standing::Answering], |_| 1));
                prop_assert_eq!(endpoints.fresh_inflight, sum(&[Standing::Fresh], |one| one.inflight));
                prop_assert_eq!(endpoints.failing_inflight, sum(&[Standing::Failing, Standing::Alone], |one| one.inflight));
                let mut choice = endpoints.choice();
                let took = all.iter().filter(|one| choice.take(&endpoints, one)).count();
                let failing = |one: &&Arc<str>| matches!(endpoints.standing(one), Standing::Failing | Standing::Alone);
                let shared: usize = all.iter().filter(failing)
                    .filter_map(|one| choice.room(&endpoints, one)).take(choice.doubtful).sum();
                prop_assert!(took <= 4 && shared <= choice.left.max(choice.doubtful));
            }
        }
    }
}
