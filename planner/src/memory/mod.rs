//! What was decided before: the answer while nothing has changed, and the place that work is at when something has.
//!
//! A decision is for a policy in one of its revisions, since other policies ask for other things. One that was removed and
//! written again has the revision of the one before, so what was asked must be the same as well. A key has an entry of
//! its own only while its decision differs. What is new is a [`Proposal`]; it is remembered by [`Proposal::committed`]
//! alone, so a transaction that fails leaves neither a row nor a memory.

mod bounded;
mod policy;

use std::sync::Arc;

use crate::class::Class;
use crate::decision::{Decision, decide};
use crate::intent::Intent;
use crate::market::Market;

use bounded::Bounded;
pub use policy::PolicyKey;

/// Policies that are remembered for each class; the one that was added first goes.
pub const POLICIES_MAX: usize = 4_096;
/// Keys that are remembered; the one that was added first goes.
pub const KEYS_MAX: usize = 10_000;
/// Policies under which one key is remembered.
const POLICIES_OF_KEY_MAX: usize = 4;

/// What is to be decided.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// The policy in force.
    pub policy: &'a PolicyKey,
    /// What it asks of placement.
    pub intent: &'a Intent,
    /// The ordering key, where the delivery has one.
    pub key: Option<Key<'a>>,
}

/// An ordering key.
#[derive(Debug, Clone, Copy)]
pub struct Key<'a> {
    /// The key.
    pub name: &'a str,
    /// The carrier that its waiting deliveries are on, where some wait.
    pub backlog: Option<&'a str>,
}

/// A decision, and whether it is new.
#[derive(Debug)]
pub enum Decided<'a> {
    /// Nothing has changed since it was committed.
    Remembered(&'a Arc<Decision>),
    /// To be used now, and remembered after the commit.
    Proposed(Proposal),
}

impl Decided<'_> {
    /// The decision.
    pub fn decision(&self) -> &Arc<Decision> {
        match self {
            Self::Remembered(decision) => decision,
            Self::Proposed(proposal) => &proposal.decision,
        }
    }
}

/// A new decision. Dropping it forgets it, and the next one asked is told the same again.
#[derive(Debug)]
#[must_use = "a proposal is remembered by `committed`, after the transaction"]
pub struct Proposal {
    epoch: u64,
    policy: PolicyKey,
    intent: Intent,
    key: Option<Box<str>>,
    effect: Effect,
    changes: bool,
    decision: Arc<Decision>,
}

/// What a commit does to the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Effect {
    Remember,
    /// The key follows its policy again.
    Forget,
    Nothing,
}

/// What the transaction writes down.
#[derive(Debug, Clone, Copy)]
pub struct Record<'a> {
    /// The policy that it was decided for.
    pub policy: &'a PolicyKey,
    /// The key, where its decision differs from that of the policy, or begins to follow it again.
    pub key: Option<&'a str>,
    /// The decision.
    pub decision: &'a Decision,
}

impl Proposal {
    /// The decision.
    pub fn decision(&self) -> &Arc<Decision> {
        &self.decision
    }

    /// What is to be written down in the transaction; `None` when the carrier is the one that was recorded last.
    pub fn record(&self) -> Option<Record<'_>> {
        let record = Record {
            policy: &self.policy,
            key: self.key.as_deref(),
            decision: &self.decision,
        };
        self.changes.then_some(record)
    }

    /// Remembers it, once the transaction that wrote it down has committed. One that comes later than a newer one for the
    /// same place changes nothing.
    pub fn committed(self, memory: &mut Memory) {
        let entry = Entry {
            epoch: self.epoch,
            intent: self.intent,
            decision: self.decision,
        };
        let class = entry.decision.class;
        match (self.effect, self.key) {
            (Effect::Nothing, _) => {}
            (Effect::Remember, None) => memory.remember(class, self.policy, entry),
            (Effect::Remember, Some(key)) => memory.remember_key(key, class, self.policy, entry),
            (Effect::Forget, Some(key)) => memory.forget_key(&key, class, &self.policy),
            (Effect::Forget, None) => {}
        }
    }
}

#[derive(Debug, Clone)]
struct Entry {
    epoch: u64,
    intent: Intent,
    decision: Arc<Decision>,
}

#[derive(Debug, Clone)]
struct OfKey {
    class: Class,
    policy: PolicyKey,
    entry: Entry,
}

/// The decisions of a process.
#[derive(Debug, Clone, Default)]
pub struct Memory {
    policies: [Bounded<PolicyKey, Entry, POLICIES_MAX>; 3],
    keys: Bounded<Box<str>, Vec<OfKey>, KEYS_MAX>,
}

impl Memory {
    /// Nothing was decided yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// What is decided in this market: from memory while nothing has changed, which allocates nothing, else as a proposal.
    pub fn decide(&self, ask: Ask<'_>, market: &Market, now_ms: i64) -> Decided<'_> {
        let own = self.own(ask);
        let fresh = own.filter(|entry| entry.epoch == market.epoch());
        if let Some(key) = ask.key
            && let Some(decided) = self.decide_key(ask, key, own, market, now_ms)
        {
            return decided;
        }
        match fresh {
            Some(entry) => Decided::Remembered(&entry.decision),
            None => Decided::Proposed(propose(ask, own, market, now_ms)),
        }
    }

    /// What would be decided now, with the reasons of this moment. Changes nothing.
    pub fn explain(&self, ask: Ask<'_>, market: &Market, now_ms: i64) -> Decision {
        let own = self.own(ask);
        let current = own.map(|entry| entry.decision.carrier.as_ref());
        let decision = decide(ask.intent, market, current, now_ms);
        match ask
            .key
            .and_then(|key| key.backlog)
            .filter(|backlog| *backlog != decision.carrier)
        {
            Some(backlog) => decision.held_by(backlog),
            None => decision,
        }
    }

    /// Where the work of a policy is, as far as this process has decided it.
    pub fn current(&self, class: Class, policy: &PolicyKey) -> Option<&str> {
        self.policies[place(class)]
            .get(policy)
            .map(|entry| entry.decision.carrier.as_ref())
    }

    /// Policies and keys that are remembered.
    pub fn len(&self) -> usize {
        self.policies.iter().map(Bounded::len).sum::<usize>() + self.keys.len()
    }

    /// Whether nothing is remembered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The decision of a key where it is not simply that of its policy.
    fn decide_key<'m>(
        &'m self,
        ask: Ask<'_>,
        key: Key<'_>,
        own: Option<&'m Entry>,
        market: &Market,
        now_ms: i64,
    ) -> Option<Decided<'m>> {
        let known = self.key(key.name, ask);
        if known.is_none() && key.backlog.is_none() {
            return None;
        }
        if let Some(known) = known.filter(|known| known.epoch == market.epoch())
            && key.backlog == Some(known.decision.carrier.as_ref())
        {
            return Some(Decided::Remembered(&known.decision));
        }
        let fresh = own.filter(|entry| entry.epoch == market.epoch());
        let base = match fresh {
            Some(entry) => Arc::clone(&entry.decision),
            None => propose(ask, own, market, now_ms).decision,
        };
        let proposed = |effect, changes, decision| {
            let (policy, key) = (ask.policy.clone(), Some(key.name.into()));
            Some(Decided::Proposed(Proposal {
                epoch: market.epoch(),
                policy,
                intent: *ask.intent,
                key,
                effect,
                changes,
                decision,
            }))
        };
        match (key.backlog.filter(|backlog| *backlog != base.carrier), known) {
            (None, None) => None,
            (None, Some(_)) => proposed(Effect::Forget, true, base),
            (Some(backlog), None) => proposed(Effect::Remember, true, Arc::new(base.held_by(backlog))),
            (Some(backlog), Some(known)) if known.decision.carrier != backlog => {
                // Another subscription's backlog of the key: the row names the carrier, and nothing goes to and fro.
                proposed(Effect::Nothing, false, Arc::new(base.held_by(backlog)))
            }
            (Some(backlog), Some(_)) => proposed(Effect::Remember, false, Arc::new(base.held_by(backlog))),
        }
    }

    /// What was decided for the same policy when it asked for the same.
    fn own(&self, ask: Ask<'_>) -> Option<&Entry> {
        let policies = &self.policies[place(ask.intent.class)];
        policies.get(ask.policy).filter(|own| own.intent == *ask.intent)
    }

    fn key(&self, name: &str, ask: Ask<'_>) -> Option<&Entry> {
        let entries = self.keys.get(name)?;
        entries
            .iter()
            .find(|own| own.class == ask.intent.class && own.policy == *ask.policy)
            .map(|own| &own.entry)
            .filter(|entry| entry.intent == *ask.intent)
    }

    fn remember(&mut self, class: Class, policy: PolicyKey, entry: Entry) {
        let policies = &mut self.policies[place(class)];
        if policies.get(&policy).is_none_or(|known| known.epoch <= entry.epoch) {
            policies.insert(policy, entry);
        }
    }

    fn remember_key(&mut self, name: Box<str>, class: Class, policy: PolicyKey, entry: Entry) {
        let mut entries = self.keys.get(&name).cloned().unwrap_or_default();
        entries.retain(|own| own.class != class || own.policy != policy);
        entries.push(OfKey { class, policy, entry });
        if entries.len() > POLICIES_OF_KEY_MAX {
            entries.remove(0);
        }
        self.keys.insert(name, entries);
    }

    fn forget_key(&mut self, name: &str, class: Class, policy: &PolicyKey) {
        let Some(mut entries) = self.keys.get(name).cloned() else {
            return;
        };
        entries.retain(|own| own.class != class || own.policy != *policy);
        if entries.is_empty() {
            self.keys.remove(name);
        } else {
            self.keys.insert(name.into(), entries);
        }
    }
}

fn place(class: Class) -> usize {
    class as usize
}

fn propose(ask: Ask<'_>, own: Option<&Entry>, market: &Market, now_ms: i64) -> Proposal {
    let current = own.map(|entry| entry.decision.carrier.as_ref());
    let decision = Arc::new(decide(ask.intent, market, current, now_ms));
    let changes = current != Some(&decision.carrier);
    let policy = ask.policy.clone();
    Proposal {
        epoch: market.epoch(),
        policy,
        intent: *ask.intent,
        key: None,
        effect: Effect::Remember,
        changes,
        decision,
    }
}
