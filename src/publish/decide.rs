//! What happens to each event of a group: pure, one request after the other.

use std::collections::{HashMap, HashSet};

use crate::domain::envelope::Envelope;
use crate::store::{KnownEvent, LoopKey, LoopState};

use super::{PublishError, PublishRequest};

/// What happens to one event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Decision {
    /// It is new, and stands this deep in its trace.
    Store {
        /// Depth, from 1.
        hops: i32,
    },
    /// It repeats an event that an earlier request of this group stores.
    SameGroup,
    /// It repeats a stored event.
    Stored {
        /// Where that one stands.
        position: i64,
    },
    /// It repeats an event of which only the receipt is left.
    ReceiptOnly,
}

/// An event that an earlier request of the group stores.
struct Accepted {
    source: String,
    event_type: String,
}

/// What earlier requests of the group added to a trace.
#[derive(Default)]
struct Trace {
    deepest_by_source: HashMap<String, i32>,
    requests_by_key: HashMap<LoopKey, HashSet<String>>,
}

/// The state that decisions are made on: what the database knows, and what this group adds to it.
pub(super) struct Ledger<'a> {
    known: &'a HashMap<String, KnownEvent>,
    loops: &'a HashMap<LoopKey, LoopState>,
    max_hops: i32,
    accepted: HashMap<String, Accepted>,
    traces: HashMap<String, Trace>,
}

/// What the loop guard counts an event by.
pub(super) fn loop_key(envelope: &Envelope) -> LoopKey {
    LoopKey {
        trace_id: envelope.trace_id.clone(),
        source: envelope.source.clone(),
        event_type: envelope.event_type.clone(),
        subject_type: envelope.subject.kind.clone(),
        subject_id: envelope.subject.id.clone(),
    }
}

impl<'a> Ledger<'a> {
    /// Starts with what the database knows.
    pub(super) fn new(
        known: &'a HashMap<String, KnownEvent>,
        loops: &'a HashMap<LoopKey, LoopState>,
        max_hops: i32,
    ) -> Self {
        Self {
            known,
            loops,
            max_hops,
            accepted: HashMap::new(),
            traces: HashMap::new(),
        }
    }

    /// Decides a request, all or nothing: a refused one leaves the ledger as it was.
    pub(super) fn decide(&mut self, request: &PublishRequest) -> Result<Vec<Decision>, PublishError> {
        let decisions = request
            .events
            .iter()
            .map(|event| self.decide_event(&event.envelope, event.guarded))
            .collect::<Result<Vec<Decision>, PublishError>>()?;
        for (event, decision) in request.events.iter().zip(&decisions) {
            if let Decision::Store { hops } = *decision {
                self.accept(&event.envelope, &request.request_id, hops);
            }
        }
        Ok(decisions)
    }

    fn decide_event(&self, envelope: &Envelope, guarded: bool) -> Result<Decision, PublishError> {
        let conflict = || PublishError::IdConflict {
            event_id: envelope.event_id.clone(),
        };
        match self.known.get(envelope.event_id.as_str()) {
            // Developer apps' events have owners of their own; a service's id never repeats one of theirs.
            Some(KnownEvent::Stored {
                position,
                source,
                event_type,
                project_id,
                env,
            }) => {
                let same = *source == envelope.source
                    && *event_type == envelope.event_type
                    && project_id.is_none()
                    && env == "production";
                return if same {
                    Ok(Decision::Stored { position: *position })
                } else {
                    Err(conflict())
                };
            }
            Some(KnownEvent::ReceiptOnly) => return Ok(Decision::ReceiptOnly),
            None => {}
        }
        if let Some(accepted) = self.accepted.get(envelope.event_id.as_str()) {
            let same = accepted.source == envelope.source && accepted.event_type == envelope.event_type;
            return if same { Ok(Decision::SameGroup) } else { Err(conflict()) };
        }
        let hops = if guarded { self.hops(envelope) } else { 1 };
        if hops > self.max_hops {
            return Err(PublishError::Loop {
                event_id: envelope.event_id.clone(),
                hops: (hops - 1).unsigned_abs(),
                max_hops: self.max_hops.unsigned_abs(),
            });
        }
        Ok(Decision::Store { hops })
    }

    /// The depth of an event: one more than the deepest event of another source in its trace, or than the number of
    /// earlier publish requests that said the same about the same subject, whichever is more.
    fn hops(&self, envelope: &Envelope) -> i32 {
        let key = loop_key(envelope);
        let stored = self.loops.get(&key).copied().unwrap_or_default();
        let (mut deepest_other, mut repeats) = (stored.deepest_other, stored.repeats);
        if let Some(trace) = self.traces.get(&envelope.trace_id) {
            let others = trace
                .deepest_by_source
                .iter()
                .filter(|(source, _)| **source != envelope.source);
            deepest_other = others.map(|(_, &hops)| hops).fold(deepest_other, i32::max);
            let here = trace.requests_by_key.get(&key).map_or(0, HashSet::len);
            repeats = repeats.saturating_add(i32::try_from(here).unwrap_or(i32::MAX));
        }
        deepest_other.max(repeats).saturating_add(1)
    }

    fn accept(&mut self, envelope: &Envelope, request_id: &str, hops: i32) {
        let accepted = Accepted {
            source: envelope.source.clone(),
            event_type: envelope.event_type.clone(),
        };
        self.accepted.insert(envelope.event_id.to_string(), accepted);
        let trace = self.traces.entry(envelope.trace_id.clone()).or_default();
        let deepest = trace.deepest_by_source.entry(envelope.source.clone()).or_insert(hops);
        *deepest = (*deepest).max(hops);
        trace
            .requests_by_key
            .entry(loop_key(envelope))
            .or_default()
            .insert(request_id.to_owned());
    }
}
