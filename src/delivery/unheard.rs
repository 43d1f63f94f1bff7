//! Claims whose answers were lost. The store holds them for an owner that lives and does not know of them: nothing was sent,
//! and nobody else may take them. So an owner that was left without an answer asks what it holds, and gives back the rest.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// How often an owner in doubt looks.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// How long after the lost answer it does: a statement may have been on its way, and running, for a while.
const IN_DOUBT: Duration = Duration::from_secs(20);

/// The claims that one owner knows of.
#[derive(Default)]
pub(super) struct Known(Mutex<HashSet<i64>>);

impl Known {
    /// An answer named the claim.
    pub(super) fn add(&self, claim_id: i64) {
        self.0.lock().insert(claim_id);
    }

    /// The store says that the claim has ended. Where that is not known the claim stays: an attempt of it was made, and it is
    /// not to be taken for one that never left.
    pub(super) fn ended(&self, claim_id: i64) {
        self.0.lock().remove(&claim_id);
    }

    /// All of them.
    pub(super) fn all(&self) -> Vec<i64> {
        self.0.lock().iter().copied().collect()
    }
}

/// The owners that may hold claims they have not heard of: this one, or earlier ones of the process.
#[derive(Default)]
pub(super) struct Doubts(Vec<Doubt>);

/// One of them.
#[derive(Clone)]
pub(super) struct Doubt {
    pub(super) owner: Arc<str>,
    pub(super) known: Arc<Known>,
    look_at: Instant,
    until: Instant,
}

impl Doubts {
    /// An answer to this owner was lost.
    pub(super) fn raise(&mut self, owner: &Arc<str>, known: &Arc<Known>, now: Instant) {
        self.0.retain(|doubt| doubt.owner != *owner);
        self.0.push(Doubt {
            owner: Arc::clone(owner),
            known: Arc::clone(known),
            look_at: now,
            until: now + IN_DOUBT,
        });
    }

    /// Those who are to look now.
    pub(super) fn due(&mut self, now: Instant) -> Vec<Doubt> {
        let mut due = Vec::new();
        for doubt in self.0.iter_mut().filter(|doubt| doubt.look_at <= now) {
            due.push(doubt.clone());
            doubt.look_at = now + LOOK_INTERVAL;
        }
        due
    }

    /// This owner has looked, having begun at that time.
    pub(super) fn looked(&mut self, owner: &str, began: Instant) {
        self.0.retain(|doubt| &*doubt.owner != owner || began < doubt.until);
    }

    /// Has everybody look once more.
    pub(super) fn look_now(&mut self, now: Instant) {
        for doubt in &mut self.0 {
            doubt.look_at = now;
        }
    }

    /// When the next look is due.
    pub(super) fn next_look(&self) -> Option<Instant> {
        self.0.iter().map(|doubt| doubt.look_at).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_doubt_looks_at_once_and_until_no_statement_can_still_run() {
        let (mut doubts, zero) = (Doubts::default(), Instant::now());
        let owner: Arc<str> = "host:1:00000000".into();
        let known = Arc::new(Known::default());
        known.add(7);
        doubts.raise(&owner, &known, zero);
        doubts.raise(&owner, &known, zero);
        let mut looks = Vec::new();
        while let Some(next) = doubts.next_look() {
            let due = doubts.due(next);
            assert_eq!(due.len(), 1, "one owner looks once");
            assert_eq!(due[0].known.all(), [7]);
            doubts.looked(&due[0].owner, next);
            looks.push(next.duration_since(zero));
        }
        assert_eq!(looks[..2], [Duration::ZERO, LOOK_INTERVAL]);
        assert!(looks.last().is_some_and(|last| *last >= IN_DOUBT));
        known.ended(7);
        assert!(known.all().is_empty());
    }
}
