//! Stage B: one group in one transaction.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use crate::domain::app::{Project, Withdrawal};
use crate::domain::cursor::Cursor;
use crate::domain::envelope::Envelope;
use crate::domain::ids::{EventId, SubscriptionId};
use crate::domain::policy::Semantics;
use crate::fabric::{Fabric, Placed, Rung};
use crate::store::{KnownEvent, LoopKey, NewDelivery, NewEvent, Store, StoreError, Stored, View};

use super::decide::{Decision, Ledger, is_revoked, loop_key};
use super::request::Prepared;
use super::{Bounds, PublishError, PublishRequest, Published};

/// A committed group.
pub(super) struct Done {
    /// One answer per request, in their order.
    pub(super) answers: Vec<Result<Vec<Published>, PublishError>>,
    /// What got work.
    work: Vec<Work>,
    placed: Placed,
}

/// A subscription that got work, and how it is woken.
struct Work {
    subscription_id: SubscriptionId,
    /// The newest of its events.
    event_id: EventId,
    /// A place in the group's choices.
    choice: usize,
    pinned: Option<String>,
}

impl Done {
    /// The subscriptions that got work; one may stand here twice.
    pub(super) fn subscriptions(&self) -> impl Iterator<Item = SubscriptionId> {
        self.work.iter().map(|work| work.subscription_id.clone())
    }

    /// The last event that is new.
    pub(super) fn newest(&self) -> Option<EventId> {
        let mut published = self.answers.iter().flatten().flatten();
        published.rfind(|one| !one.duplicate).map(|one| one.event_id.clone())
    }

    /// Says to the fabric what was committed.
    pub(super) fn ring(self, fabric: &Fabric) {
        let rung: Vec<Rung<'_>> = self
            .work
            .iter()
            .map(|work| Rung {
                event_id: &work.event_id,
                subscription_id: &work.subscription_id,
                choice: self.placed.choice(work.choice),
                pinned: work.pinned.as_deref(),
            })
            .collect();
        fabric.ring(&rung);
        fabric.committed(self.placed);
    }
}

/// Decides and stores a group. Every transaction is opened, used and closed here; a failure leaves nothing of it behind.
pub(super) async fn run(
    store: &Store,
    fabric: &Fabric,
    requests: &[&PublishRequest],
    bounds: &Bounds,
) -> Result<Done, StoreError> {
    let view = store.view();
    let plans = Plans::of(requests, &view, fabric);
    let usual = requests
        .iter()
        .all(|request| !is_revoked(request, &view) && withdrawals(request).next().is_none());
    if usual && stand_alone(requests) && plans.placed.is_recorded() {
        let all: Vec<Result<Vec<Decision>, PublishError>> = requests
            .iter()
            .map(|request| Ok(vec![Decision::Store { hops: 1 }; request.events.len()]))
            .collect();
        let rows = Rows::of(requests, &all, &plans, &view);
        let guarded: Vec<bool> = requests
            .iter()
            .flat_map(|request| &request.events)
            .map(|event| event.guarded)
            .collect();
        let stored = store
            .publish_at_once(
                view.version,
                bounds.max_hops,
                &guarded,
                &bounds.quotas,
                &rows.events,
                &rows.deliveries,
            )
            .await?;
        if let Some(stored) = stored {
            let (answers, work) = done(requests, all, &rows, &stored, view.epoch);
            let placed = plans.placed;
            return Ok(Done { answers, work, placed });
        }
    }
    decide(store, fabric, requests, bounds, view, plans).await
}

/// Whether no request has a say in what happens to another of the group: no id stands in it twice, and no trace that the
/// loop guard looks at is shared by two of them.
fn stand_alone(requests: &[&PublishRequest]) -> bool {
    let mut ids: HashSet<&str> = HashSet::new();
    let mut traces: HashMap<&str, usize> = HashMap::new();
    requests.iter().enumerate().all(|(place, request)| {
        request.events.iter().all(|event| {
            ids.insert(event.envelope.event_id.as_str())
                && (!event.guarded || *traces.entry(&event.envelope.trace_id).or_insert(place) == place)
        })
    })
}

/// Looks at what is stored, decides each request alone, and stores what is new.
async fn decide(
    store: &Store,
    fabric: &Fabric,
    requests: &[&PublishRequest],
    bounds: &Bounds,
    mut view: Arc<View>,
    mut plans: Plans,
) -> Result<Done, StoreError> {
    let ids: BTreeSet<&str> = requests
        .iter()
        .flat_map(|request| &request.events)
        .map(|event| event.envelope.event_id.as_str())
        .collect();
    let ids: Vec<&str> = ids.into_iter().collect();
    let mut group = store.open_group(&ids).await?;

    let keys = guarded_keys(requests, &group.known);
    let loops = group.loops(&keys.iter().collect::<Vec<_>>(), bounds.max_hops).await?;
    let held = group.held(&brought(requests), &bounds.quotas).await?;
    let in_force = Arc::clone(&group.view);
    let mut ledger = Ledger::new(&group.known, &loops, held, &in_force, bounds);
    let decisions: Vec<Result<Vec<Decision>, PublishError>> =
        requests.iter().map(|request| ledger.decide(request)).collect();
    // Before anything is queued for whoever has just lost the right to it.
    group.withdraw(&withdrawn(requests, &decisions)).await?;

    if !Arc::ptr_eq(&view, &group.view) {
        view = Arc::clone(&group.view);
        plans = Plans::of(requests, &view, fabric);
    }
    if !plans.placed.is_recorded() {
        // A decision is put on record with the first delivery that is made under it.
        let used = Rows::of(requests, &decisions, &plans, &view).choices;
        plans.placed.keep(&used.into_iter().collect());
        let ids = group.record_placements(&plans.placed.unrecorded()).await?;
        plans.placed.recorded(&ids);
    }
    let rows = Rows::of(requests, &decisions, &plans, &view);
    let stored = group.store(&rows.events, &rows.deliveries).await?;
    group.commit().await?;
    let (answers, work) = done(requests, decisions, &rows, &stored, view.epoch);
    let placed = plans.placed;
    Ok(Done { answers, work, placed })
}

/// What the events of a request withdraw from apps.
fn withdrawals(request: &PublishRequest) -> impl Iterator<Item = (usize, Withdrawal)> {
    let of_service = request.app.is_none();
    let events = request.events.iter().enumerate().filter(move |_| of_service);
    events.filter_map(|(place, event)| Some((place, Withdrawal::of(&event.envelope)?)))
}

/// What the events that are stored withdraw from apps.
fn withdrawn(requests: &[&PublishRequest], decisions: &[Result<Vec<Decision>, PublishError>]) -> Vec<Withdrawal> {
    let decided = requests.iter().zip(decisions);
    let accepted = decided.filter_map(|(request, decided)| Some((request, decided.as_ref().ok()?)));
    accepted
        .flat_map(|(request, decided)| {
            withdrawals(request).filter(|(place, _)| matches!(decided[*place], Decision::Store { .. }))
        })
        .map(|(_, withdrawal)| withdrawal)
        .collect()
}

/// How many events each project asks to store.
fn brought<'a>(requests: &[&'a PublishRequest]) -> HashMap<&'a Project, i64> {
    let mut brought: HashMap<&Project, i64> = HashMap::new();
    for request in requests {
        if let Some(project) = request.project() {
            *brought.entry(project).or_default() += i64::try_from(request.events.len()).unwrap_or(i64::MAX);
        }
    }
    brought
}

/// What is stored for the events that are new.
#[derive(Default)]
struct Rows<'a> {
    events: Vec<NewEvent<'a>>,
    deliveries: Vec<NewDelivery<'a>>,
    /// How each delivery is woken, as a place among the choices.
    choices: Vec<usize>,
}

impl<'a> Rows<'a> {
    fn of(
        requests: &[&'a PublishRequest],
        decisions: &[Result<Vec<Decision>, PublishError>],
        plans: &'a Plans,
        view: &'a View,
    ) -> Self {
        let mut rows = Self::default();
        for ((request, decided), of_events) in requests.iter().zip(decisions).zip(&plans.of_requests) {
            let Ok(decided) = decided else { continue };
            for ((event, decision), plan) in request.events.iter().zip(decided).zip(of_events) {
                let Decision::Store { hops } = *decision else { continue };
                if let Some(choice) = plan.choice {
                    let placed = plans.placed.choice(choice);
                    rows.choices.extend(plan.subscribers.iter().map(|_| choice));
                    rows.deliveries
                        .extend(plan.subscribers.iter().map(|&index| NewDelivery {
                            event: rows.events.len(),
                            subscription_id: &view.subscribers()[index].id,
                            ordering_key: plan.ordering_key.as_deref(),
                            at_most_once: plan.at_most_once,
                            carrier: &placed.decision.carrier,
                            placement_id: placed.placement_id,
                        }));
                }
                rows.events.push(NewEvent {
                    envelope: &event.envelope,
                    hops,
                    publisher: &request.publisher,
                    request_id: &request.request_id,
                    project: request.project(),
                });
            }
        }
        rows
    }
}

/// What a committed group answers, and what got work.
fn done(
    requests: &[&PublishRequest],
    decisions: Vec<Result<Vec<Decision>, PublishError>>,
    rows: &Rows<'_>,
    stored: &Stored,
    epoch: i64,
) -> (Vec<Result<Vec<Published>, PublishError>>, Vec<Work>) {
    let positions: HashMap<&str, i64> = rows
        .events
        .iter()
        .zip(stored.first..)
        .map(|(event, position)| (event.envelope.event_id.as_str(), position))
        .collect();
    let answers = requests
        .iter()
        .zip(decisions)
        .map(|(request, decided)| decided.map(|decided| answer(request, &decided, &positions, epoch)))
        .collect();
    // One for each way a subscription is woken, with its newest event.
    let mut newest: HashMap<(&SubscriptionId, usize, Option<&str>), &EventId> = HashMap::new();
    for (index, (delivery, choice)) in rows.deliveries.iter().zip(&rows.choices).enumerate() {
        let pinned = stored.pinned(index);
        let event_id = &rows.events[delivery.event].envelope.event_id;
        newest.insert((delivery.subscription_id, *choice, pinned), event_id);
    }
    let work = newest
        .into_iter()
        .map(|((subscription_id, choice, pinned), event_id)| Work {
            subscription_id: subscription_id.clone(),
            event_id: event_id.clone(),
            choice,
            pinned: pinned.map(str::to_owned),
        });
    (answers, work.collect())
}

/// How one event is carried.
struct Plan {
    /// The subscriptions it goes to, as places in the view.
    subscribers: Vec<usize>,
    /// The key in whose order it is delivered.
    ordering_key: Option<String>,
    at_most_once: bool,
    /// How its deliveries are woken, as a place among the choices; none where nobody receives it.
    choice: Option<usize>,
}

/// The plans of a group.
struct Plans {
    /// Of each event of each request.
    of_requests: Vec<Vec<Plan>>,
    placed: Placed,
}

impl Plans {
    /// What nobody receives needs neither a key nor a carrier.
    fn of(requests: &[&PublishRequest], view: &View, fabric: &Fabric) -> Self {
        let mut placed = Placed::default();
        let mut of_event = |event: &Prepared, project: Option<&Project>| {
            let Envelope {
                event_type, visibility, ..
            } = &event.envelope;
            let subscribers: Vec<usize> = view.matching(event_type, *visibility, project).collect();
            let (policy_key, policy) = view.policies.in_force(&event.envelope.event_type);
            let received = !subscribers.is_empty();
            Plan {
                ordering_key: received.then(|| policy.ordering_key(&event.envelope)).flatten(),
                at_most_once: policy.semantics() == Semantics::AtMostOnce,
                choice: received.then(|| fabric.place(&mut placed, policy_key, policy.intent())),
                subscribers,
            }
        };
        let of_requests = requests
            .iter()
            .map(|request| {
                let project = request.project();
                request.events.iter().map(|event| of_event(event, project)).collect()
            })
            .collect();
        Self { of_requests, placed }
    }
}

/// What the loop guard must look up: events that are new and name a trace of their own. A trace that the server made for
/// this request cannot have been seen before.
fn guarded_keys(requests: &[&PublishRequest], known: &HashMap<String, KnownEvent>) -> Vec<LoopKey> {
    let keys: HashSet<LoopKey> = requests
        .iter()
        .flat_map(|request| request.events.iter().map(|event| (event, request.project())))
        .filter(|(event, _)| event.guarded && !known.contains_key(event.envelope.event_id.as_str()))
        .map(|(event, project)| loop_key(&event.envelope, project))
        .collect();
    keys.into_iter().collect()
}

fn answer(
    request: &PublishRequest,
    decided: &[Decision],
    positions: &HashMap<&str, i64>,
    epoch: i64,
) -> Vec<Published> {
    let at = |position: i64| Some(Cursor { epoch, position });
    request
        .events
        .iter()
        .zip(decided)
        .map(|(event, decision)| {
            let event_id = event.envelope.event_id.clone();
            let stored_here = positions.get(event_id.as_str()).copied().and_then(at);
            match *decision {
                Decision::Store { .. } => Published {
                    event_id,
                    duplicate: false,
                    cursor: stored_here,
                },
                Decision::SameGroup => Published {
                    event_id,
                    duplicate: true,
                    cursor: stored_here,
                },
                Decision::Stored { position } => Published {
                    event_id,
                    duplicate: true,
                    cursor: at(position),
                },
                Decision::ReceiptOnly => Published {
                    event_id,
                    duplicate: true,
                    cursor: None,
                },
            }
        })
        .collect()
}
