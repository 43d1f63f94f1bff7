//! What happens to each event of a group: pure, one request after the other.

use std::collections::{HashMap, HashSet};

use crate::domain::app::{App, Env, Project, QuotaFault};
use crate::domain::envelope::Envelope;
use crate::store::{Held, KnownEvent, LoopKey, LoopState, View, receipt_owner};

use super::{Bounds, PublishError, PublishRequest};

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
#[derive(PartialEq, Eq)]
struct Accepted {
    source: String,
    event_type: String,
    project: Option<Project>,
}

impl Accepted {
    fn of(envelope: &Envelope, project: Option<&Project>) -> Self {
        Self {
            source: envelope.source.clone(),
            event_type: envelope.event_type.clone(),
            project: project.cloned(),
        }
    }
}

/// What earlier requests of the group added to a trace, by who is counted together.
#[derive(Default)]
struct Trace {
    deepest_by_source: HashMap<String, i32>,
    requests_by_key: HashMap<LoopKey, HashSet<String>>,
}

/// The state that decisions are made on: what the database knows, and what this group adds to it.
pub(super) struct Ledger<'a> {
    known: &'a HashMap<String, KnownEvent>,
    loops: &'a HashMap<LoopKey, LoopState>,
    /// What is in force.
    view: &'a View,
    bounds: &'a Bounds,
    /// What projects hold, this group's events included.
    held: HashMap<Project, Held>,
    accepted: HashMap<String, Accepted>,
    /// By trace, and by project for what apps published.
    traces: HashMap<(String, Option<Project>), Trace>,
}

/// What the loop guard counts an event by.
pub(super) fn loop_key(envelope: &Envelope, project: Option<&Project>) -> LoopKey {
    LoopKey {
        trace_id: envelope.trace_id.clone(),
        source: envelope.source.clone(),
        event_type: envelope.event_type.clone(),
        subject_type: envelope.subject.kind.clone(),
        subject_id: envelope.subject.id.clone(),
        project: project.cloned(),
    }
}

impl<'a> Ledger<'a> {
    /// Starts with what the database knows.
    pub(super) fn new(
        known: &'a HashMap<String, KnownEvent>,
        loops: &'a HashMap<LoopKey, LoopState>,
        held: HashMap<Project, Held>,
        view: &'a View,
        bounds: &'a Bounds,
    ) -> Self {
        Self {
            known,
            loops,
            view,
            bounds,
            held,
            accepted: HashMap::new(),
            traces: HashMap::new(),
        }
    }

    /// Decides a request, all or nothing: a refused one leaves the ledger as it was.
    pub(super) fn decide(&mut self, request: &PublishRequest) -> Result<Vec<Decision>, PublishError> {
        if is_revoked(request, self.view) {
            return Err(PublishError::Revoked);
        }
        let project = request.project();
        let before = project
            .and_then(|project| self.held.get(project))
            .copied()
            .unwrap_or_default();
        let mut held = before;
        let mut decisions = Vec::with_capacity(request.events.len());
        for event in &request.events {
            let decision = self.decide_event(&event.envelope, event.guarded, project)?;
            if let (Some(app), Decision::Store { .. }) = (&request.app, decision) {
                self.reserve(app, &event.envelope, before, &mut held)?;
            }
            decisions.push(decision);
        }
        if let Some(project) = project {
            self.held.insert(project.clone(), held);
        }
        for (event, decision) in request.events.iter().zip(&decisions) {
            if let Decision::Store { hops } = *decision {
                self.accept(&event.envelope, project, &request.request_id, hops);
            }
        }
        Ok(decisions)
    }

    /// Takes room for an event, if its project has as much.
    fn reserve(&self, app: &App, envelope: &Envelope, before: Held, held: &mut Held) -> Result<(), QuotaFault> {
        let quota = self.bounds.quotas.of(app.project.env);
        held.recent += 1;
        held.bytes += envelope.size_bytes();
        match (quota.publish_per_minute, quota.retained_bytes) {
            (Some(limit), _) if held.recent > limit => Err(QuotaFault::PublishRate { limit }),
            (_, Some(limit)) if held.bytes > limit => Err(QuotaFault::RetainedBytes {
                limit,
                used: before.bytes,
            }),
            _ => Ok(()),
        }
    }

    fn decide_event(
        &self,
        envelope: &Envelope,
        guarded: bool,
        project: Option<&Project>,
    ) -> Result<Decision, PublishError> {
        let conflict = || PublishError::IdConflict {
            event_id: envelope.event_id.clone(),
        };
        match self.known.get(envelope.event_id.as_str()) {
            Some(KnownEvent::Stored {
                position,
                source,
                event_type,
                project_id,
                env,
            }) => {
                let own = project.map_or((None, Env::Production), |project| (Some(&*project.id), project.env));
                let same = *source == envelope.source
                    && *event_type == envelope.event_type
                    && (project_id.as_deref(), Env::named(env)) == (own.0, Some(own.1));
                return if same {
                    Ok(Decision::Stored { position: *position })
                } else {
                    Err(conflict())
                };
            }
            Some(KnownEvent::ReceiptOnly { owner }) => {
                let own = project.map(|project| receipt_owner(project, &envelope.source, &envelope.event_type));
                return if *owner == own {
                    Ok(Decision::ReceiptOnly)
                } else {
                    Err(conflict())
                };
            }
            None => {}
        }
        if let Some(accepted) = self.accepted.get(envelope.event_id.as_str()) {
            let same = *accepted == Accepted::of(envelope, project);
            return if same { Ok(Decision::SameGroup) } else { Err(conflict()) };
        }
        let hops = if guarded { self.hops(envelope, project) } else { 1 };
        let max_hops = self.bounds.max_hops;
        if hops > max_hops {
            return Err(PublishError::Loop {
                event_id: envelope.event_id.clone(),
                hops: (hops - 1).unsigned_abs(),
                max_hops: max_hops.unsigned_abs(),
            });
        }
        Ok(Decision::Store { hops })
    }

    /// The depth of an event: one more than the deepest event of another source in its trace, or than the number of
    /// earlier publish requests that said the same about the same subject, whichever is more. What apps published counts for
    /// their own project alone.
    fn hops(&self, envelope: &Envelope, project: Option<&Project>) -> i32 {
        let key = loop_key(envelope, project);
        let stored = self.loops.get(&key).copied().unwrap_or_default();
        let (mut deepest_other, mut repeats) = (stored.deepest_other, stored.repeats);
        let trace = |project: Option<&Project>| self.traces.get(&(envelope.trace_id.clone(), project.cloned()));
        let first_party = project.and_then(|_| trace(None));
        for trace in trace(project).into_iter().chain(first_party) {
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

    fn accept(&mut self, envelope: &Envelope, project: Option<&Project>, request_id: &str, hops: i32) {
        self.accepted
            .insert(envelope.event_id.to_string(), Accepted::of(envelope, project));
        let of = (envelope.trace_id.clone(), project.cloned());
        let trace = self.traces.entry(of).or_default();
        let deepest = trace.deepest_by_source.entry(envelope.source.clone()).or_insert(hops);
        *deepest = (*deepest).max(hops);
        trace
            .requests_by_key
            .entry(loop_key(envelope, project))
            .or_default()
            .insert(request_id.to_owned());
    }
}

/// Whether the app that publishes was revoked after its token was issued.
pub(super) fn is_revoked(request: &PublishRequest, view: &View) -> bool {
    let app = request.app.as_ref();
    app.is_some_and(|app| view.withdrawn(&request.publisher).ends_token(app.issued_at_s))
}
