//! Where claims start their search: per subscription and priority, a due time before which nothing runnable is left.
//!
//! Without it every claim would walk over the dead versions of all rows finished while somebody holds a snapshot. What
//! a frontier hides by mistake is found by the next sweep, which forgets all of them.
//!
//! A claim does not see rows that somebody holds locked, so claims alone move no frontier: a plain read, from which no lock
//! hides a row, has the last word.
//!
//! Most claims start nearer still, where the one before ended: the dead versions of the last seconds alone are thousands
//! under load. What that hides is found by the next wide search, a moment later.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use tokio::time::Instant;

use crate::domain::ids::SubscriptionId;
use crate::store::Stretch;

/// How far a frontier stays behind, in milliseconds: a publish commits seconds after it chose a row's due time.
const MARGIN_MS: i64 = 10_000;
/// How long a proposed frontier waits for a second search to confirm it. A claim skips rows that a publish or a settle
/// holds locked at that moment; none holds them that long without ending.
const CONFIRM_AFTER: Duration = Duration::from_secs(1);

/// How far behind the end of the last search the next one starts, in milliseconds: rows commit in the order of their due
/// times, but for a few that were replayed, retried or became the first of their key meanwhile.
const NEAR_MARGIN_MS: i64 = 50;
/// How often a claim searches from the frontier on, all the same.
const WIDE_INTERVAL: Duration = Duration::from_millis(200);

const PRIORITIES: usize = 3;

/// What one claim found for one subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// Everything that was due was taken; nothing else bounded the claim.
    AllOfIt,
    /// The claim ended at its bound, with this row last.
    UpTo {
        /// 0 critical, 1 important, 2 low.
        priority: usize,
        /// Its due time, epoch milliseconds.
        due_ms: i64,
    },
    /// The claim could take nothing, so it says nothing.
    Unknown,
}

#[derive(Default, Clone, Copy)]
struct Frontier {
    in_force_ms: i64,
    /// Where two claims have found nothing before, and a plain read has not looked yet.
    confirmed_ms: i64,
    proposed: Option<(i64, Instant)>,
}

impl Frontier {
    /// Answers whether there is something new to look for.
    fn propose(&mut self, due_ms: i64, at: Instant) -> bool {
        match self.proposed {
            Some((_, since)) if at.duration_since(since) < CONFIRM_AFTER => false,
            Some((former_ms, _)) => {
                self.confirmed_ms = self.confirmed_ms.max(former_ms.min(due_ms));
                self.proposed = Some((due_ms, at));
                self.confirmed_ms > self.in_force_ms
            }
            None => {
                self.proposed = Some((due_ms, at));
                false
            }
        }
    }
}

/// What is known of one subscription.
#[derive(Default, Clone, Copy)]
struct Search {
    frontiers: [Frontier; PRIORITIES],
    /// Where the last search ended, less a little.
    near_ms: [i64; PRIORITIES],
    /// When the last wide search began.
    wide_at: Option<Instant>,
    /// The search under way is a wide one; no other may move a frontier.
    wide: bool,
}

/// The frontiers of every subscription looked at since the last sweep.
#[derive(Default)]
pub(super) struct Frontiers {
    of: HashMap<SubscriptionId, Search>,
    /// Where the count of each subscription's claims in flight starts. Claims only grow, so this is as good as a count from
    /// the beginning, and a sweep does not forget it.
    claims_from: HashMap<SubscriptionId, i64>,
    /// Subscriptions with a frontier that waits for a plain read.
    unread: HashSet<SubscriptionId>,
    newest_now_ms: i64,
}

impl Frontiers {
    /// Where everything runnable lies behind, by priority.
    pub(super) fn start(&self, id: &SubscriptionId) -> [i64; PRIORITIES] {
        self.of
            .get(id)
            .map_or([0; PRIORITIES], |search| search.frontiers.map(|f| f.in_force_ms))
    }

    /// Where a claim that is made now starts, by priority.
    pub(super) fn begin(&mut self, id: &SubscriptionId, at: Instant) -> [i64; PRIORITIES] {
        let search = self.of.entry(id.clone()).or_default();
        search.wide = search
            .wide_at
            .is_none_or(|wide_at| at.duration_since(wide_at) >= WIDE_INTERVAL);
        if search.wide {
            search.wide_at = Some(at);
        }
        let wide = search.wide;
        let mut starts = search.frontiers.map(|frontier| frontier.in_force_ms);
        for (start, near) in starts.iter_mut().zip(search.near_ms) {
            if !wide {
                *start = near.max(*start);
            }
        }
        starts
    }

    /// The next claim searches from the frontier on: something is known to lie there.
    pub(super) fn widen(&mut self, id: &SubscriptionId) {
        if let Some(search) = self.of.get_mut(id) {
            search.wide_at = None;
        }
    }

    /// Where the count of what is in flight starts.
    pub(super) fn claims_from(&self, id: &SubscriptionId) -> i64 {
        self.claims_from.get(id).copied().unwrap_or(0)
    }

    /// Notes where the next count of what is in flight may start.
    pub(super) fn counted(&mut self, id: &SubscriptionId, claims_from: i64) {
        self.claims_from.insert(id.clone(), claims_from);
    }

    /// Counts what is in flight from the beginning again: the store may be another one, whose claims begin earlier.
    pub(super) fn forget_claims(&mut self) {
        self.claims_from = HashMap::new();
    }

    /// Forgets what is known of any other subscription.
    pub(super) fn keep(&mut self, is_kept: impl Fn(&SubscriptionId) -> bool) {
        self.of.retain(|id, _| is_kept(id));
        self.claims_from.retain(|id, _| is_kept(id));
        self.unread.retain(|id| is_kept(id));
    }

    /// Forgets all frontiers: the next claims search from the beginning.
    pub(super) fn sweep(&mut self) {
        self.of = HashMap::new();
        self.unread = HashSet::new();
    }

    /// Up to `most` subscriptions' stretches in which nothing runnable may be left, for [`Self::read`] to be told.
    pub(super) fn take_unread(&mut self, most: usize) -> Vec<Stretch> {
        let ids: Vec<SubscriptionId> = self.unread.iter().take(most).cloned().collect();
        let mut stretches = Vec::new();
        for id in ids {
            self.unread.remove(&id);
            let Some(search) = self.of.get(&id) else { continue };
            for (priority, frontier) in (0..).zip(&search.frontiers) {
                if frontier.confirmed_ms > frontier.in_force_ms {
                    stretches.push(Stretch {
                        id: id.clone(),
                        priority,
                        from_ms: frontier.in_force_ms,
                        until_ms: frontier.confirmed_ms,
                    });
                }
            }
        }
        stretches
    }

    /// Notes where in a stretch a plain read has found the first runnable row, if any.
    pub(super) fn read(&mut self, stretch: &Stretch, first_ms: Option<i64>) {
        let search = self.of.get_mut(&stretch.id);
        let frontier = search.and_then(|search| search.frontiers.get_mut(usize::try_from(stretch.priority).ok()?));
        // A sweep or a clock that went back has forgotten it meanwhile.
        if let Some(frontier) = frontier.filter(|frontier| frontier.confirmed_ms >= stretch.until_ms) {
            let clear_ms = first_ms.unwrap_or(stretch.until_ms);
            frontier.in_force_ms = frontier.in_force_ms.max(clear_ms.min(stretch.until_ms));
        }
    }

    /// Notes what the claim found that began last, at `now_ms` of the database clock.
    pub(super) fn note(&mut self, id: &SubscriptionId, found: Found, now_ms: i64, at: Instant) {
        if now_ms + MARGIN_MS / 2 < self.newest_now_ms {
            // The database clock went back: new rows are due before what was seen as the present.
            self.sweep();
            self.newest_now_ms = now_ms;
        }
        self.newest_now_ms = self.newest_now_ms.max(now_ms);
        if found == Found::Unknown {
            return;
        }
        let search = self.of.entry(id.clone()).or_default();
        let each = search.frontiers.iter_mut().zip(&mut search.near_ms);
        let mut is_new = false;
        for (priority, (frontier, near_ms)) in each.enumerate() {
            let end_ms = match found {
                Found::UpTo { priority: last, due_ms } if priority == last => due_ms,
                Found::UpTo { priority: last, .. } if priority > last => continue,
                _ => now_ms,
            };
            *near_ms = end_ms - NEAR_MARGIN_MS;
            if search.wide {
                is_new |= frontier.propose(end_ms - MARGIN_MS, at);
            }
        }
        if is_new {
            self.unread.insert(id.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    impl Frontiers {
        /// Notes what a wide search found, behind which a plain read finds nothing.
        fn found(&mut self, id: &SubscriptionId, found: Found, now_ms: i64, at: Instant) {
            self.found_beside(&[], id, found, now_ms, at);
        }

        /// Notes what a wide search found, behind which a plain read finds what is left.
        fn found_beside(
            &mut self,
            left: &[(usize, i64, u64)],
            id: &SubscriptionId,
            found: Found,
            now_ms: i64,
            at: Instant,
        ) {
            self.widen(id);
            self.begin(id, at);
            self.note(id, found, now_ms, at);
            for stretch in self.take_unread(10) {
                let in_it = |&&(priority, due_ms, _): &&(usize, i64, u64)| {
                    priority == usize::try_from(stretch.priority).expect("small")
                        && (stretch.from_ms..stretch.until_ms).contains(&due_ms)
                };
                let first = left.iter().filter(in_it).map(|&(_, due_ms, _)| due_ms).min();
                self.read(&stretch, first);
            }
        }
    }

    fn after(start: Instant, ms: u64) -> Instant {
        start + Duration::from_millis(ms)
    }

    #[test]
    fn a_frontier_moves_once_a_later_search_confirms_it() {
        let (id, zero) = (SubscriptionId::generate(), Instant::now());
        let mut frontiers = Frontiers::default();
        frontiers.found(&id, Found::AllOfIt, 100_000, zero);
        assert_eq!(frontiers.start(&id), [0; 3], "a row locked just then would be lost");
        frontiers.found(&id, Found::AllOfIt, 100_500, after(zero, 500));
        assert_eq!(frontiers.start(&id), [0; 3]);
        frontiers.found(&id, Found::AllOfIt, 101_000, after(zero, 1000));
        assert_eq!(frontiers.start(&id), [90_000; 3]);
    }

    #[test]
    fn a_claim_at_its_bound_says_nothing_of_less_urgent_work() {
        let (id, zero) = (SubscriptionId::generate(), Instant::now());
        let mut frontiers = Frontiers::default();
        let found = Found::UpTo {
            priority: 1,
            due_ms: 50_000,
        };
        for second in 0..3 {
            frontiers.found(&id, found, 100_000, after(zero, second * 1000));
        }
        assert_eq!(frontiers.start(&id), [90_000, 40_000, 0]);
        frontiers.found(
            &id,
            Found::UpTo {
                priority: 1,
                due_ms: 20_000,
            },
            103_000,
            after(zero, 3000),
        );
        assert_eq!(frontiers.start(&id)[1], 40_000, "never back");
    }

    #[test]
    fn a_clock_that_went_back_and_a_sweep_forget() {
        let (id, zero) = (SubscriptionId::generate(), Instant::now());
        let mut frontiers = Frontiers::default();
        for second in 0..2 {
            frontiers.found(&id, Found::AllOfIt, 100_000, after(zero, second * 1000));
        }
        assert_eq!(frontiers.start(&id), [90_000; 3]);
        frontiers.found(&id, Found::Unknown, 70_000, after(zero, 3000));
        assert_eq!(frontiers.start(&id), [0; 3]);
        for second in 4..6 {
            frontiers.found(&id, Found::AllOfIt, 70_000, after(zero, second * 1000));
        }
        frontiers.sweep();
        assert_eq!(frontiers.start(&id), [0; 3]);
    }

    #[test]
    fn a_claim_starts_where_the_last_one_ended_and_now_and_then_at_the_frontier() {
        let (id, zero) = (SubscriptionId::generate(), Instant::now());
        let mut frontiers = Frontiers::default();
        assert_eq!(frontiers.begin(&id, zero), [0; 3], "nothing is known yet");
        frontiers.note(&id, Found::AllOfIt, 100_000, zero);
        assert_eq!(frontiers.begin(&id, after(zero, 10)), [99_950; 3]);
        let found = Found::UpTo {
            priority: 1,
            due_ms: 100_005,
        };
        frontiers.note(&id, found, 100_010, after(zero, 10));
        assert_eq!(frontiers.begin(&id, after(zero, 20)), [99_960, 99_955, 99_950]);
        assert_eq!(
            frontiers.start(&id),
            [0; 3],
            "what a near search finds moves no frontier"
        );
        assert_eq!(frontiers.begin(&id, after(zero, 200)), [0; 3], "a wide search");
        assert_eq!(frontiers.begin(&id, after(zero, 210)), [99_960, 99_955, 99_950]);
        frontiers.widen(&id);
        assert_eq!(frontiers.begin(&id, after(zero, 220)), [0; 3], "something lies there");
    }

    #[derive(Debug, Clone)]
    enum Step {
        /// A row appears, due at most the margin before now.
        Publish {
            priority: usize,
            late_ms: i64,
        },
        /// A claim of so many rows; rows for which the draw says so are locked elsewhere and skipped.
        Claim {
            bound: usize,
            locked: u8,
        },
        Wait {
            ms: u64,
        },
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0_usize..3, 0..MARGIN_MS).prop_map(|(priority, late_ms)| Step::Publish { priority, late_ms }),
            (1_usize..4, any::<u8>()).prop_map(|(bound, locked)| Step::Claim { bound, locked }),
            (1_u64..30_000).prop_map(|ms| Step::Wait { ms }),
        ]
    }

    proptest! {
        /// No row is ever hidden, however long somebody holds it locked.
        #[test]
        fn nothing_runnable_is_hidden(steps in prop::collection::vec(step(), 1..120)) {
            let (id, zero) = (SubscriptionId::generate(), Instant::now());
            let mut frontiers = Frontiers::default();
            let mut elapsed = 0_u64;
            let mut rows: Vec<(usize, i64, u64)> = Vec::new(); // priority, due, when its lock ends
            for step in steps {
                let now_ms = 1_000_000 + i64::try_from(elapsed).expect("small");
                match step {
                    Step::Publish { priority, late_ms } => rows.push((priority, now_ms - late_ms, 0)),
                    Step::Wait { ms } => elapsed += ms,
                    Step::Claim { bound, locked } => {
                        let start = frontiers.start(&id);
                        rows.sort_unstable();
                        for (index, row) in rows.iter_mut().enumerate() {
                            if locked >> (index % 8) & 1 == 1 && row.2 == 0 {
                                row.2 = elapsed + 30_000;
                            }
                        }
                        let mut taken: Vec<(usize, i64)> = Vec::new();
                        rows.retain(|&(priority, due_ms, until)| {
                            let seen = due_ms >= start[priority] && until <= elapsed && taken.len() < bound;
                            if seen {
                                taken.push((priority, due_ms));
                            }
                            !seen
                        });
                        let found = match taken.last() {
                            Some(&(priority, due_ms)) if taken.len() == bound => Found::UpTo { priority, due_ms },
                            _ => Found::AllOfIt,
                        };
                        frontiers.found_beside(&rows, &id, found, now_ms, after(zero, elapsed));
                        let start = frontiers.start(&id);
                        for &(priority, due_ms, _) in &rows {
                            prop_assert!(due_ms >= start[priority], "{due_ms} is hidden by {start:?}");
                        }
                    }
                }
            }
        }
    }
}
