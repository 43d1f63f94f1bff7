//! Stage B: one group in one transaction.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use crate::domain::cursor::Cursor;
use crate::domain::ids::SubscriptionId;
use crate::domain::policy::Semantics;
use crate::store::{KnownEvent, LoopKey, NewDelivery, NewEvent, Store, StoreError, View};

use super::decide::{Decision, Ledger, loop_key};
use super::request::Prepared;
use super::{PublishError, PublishRequest, Published};

/// A committed group.
pub(super) struct Done {
    /// One answer per request, in their order.
    pub(super) answers: Vec<Result<Vec<Published>, PublishError>>,
    /// The subscriptions that got work.
    pub(super) subscriptions: Vec<SubscriptionId>,
}

/// Decides and stores a group. Every transaction is opened, used and closed here; a failure leaves nothing of it behind.
pub(super) async fn run(store: &Store, requests: &[&PublishRequest], max_hops: i32) -> Result<Done, StoreError> {
    let view = store.view();
    let plans = plan(requests, &view);
    if stand_alone(requests) {
        let all: Vec<Result<Vec<Decision>, PublishError>> = requests
            .iter()
            .map(|request| Ok(vec![Decision::Store { hops: 1 }; request.events.len()]))
            .collect();
        let (events, deliveries) = rows(requests, &all, &plans, &view);
        let guarded: Vec<bool> = requests
            .iter()
            .flat_map(|request| &request.events)
            .map(|event| event.guarded)
            .collect();
        let stored = store
            .publish_at_once(view.version, max_hops, &guarded, &events, &deliveries)
            .await?;
        if let Some(first) = stored {
            return Ok(done(requests, all, &events, &deliveries, first, view.epoch));
        }
    }
    decide(store, requests, max_hops, view, plans).await
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
    requests: &[&PublishRequest],
    max_hops: i32,
    mut view: Arc<View>,
    mut plans: Vec<Vec<Plan>>,
) -> Result<Done, StoreError> {
    let ids: BTreeSet<&str> = requests
        .iter()
        .flat_map(|request| &request.events)
        .map(|event| event.envelope.event_id.as_str())
        .collect();
    let ids: Vec<&str> = ids.into_iter().collect();
    let mut group = store.open_group(&ids).await?;

    let keys = guarded_keys(requests, &group.known);
    let loops = group.loops(&keys.iter().collect::<Vec<_>>(), max_hops).await?;
    let mut ledger = Ledger::new(&group.known, &loops, max_hops);
    let decisions: Vec<Result<Vec<Decision>, PublishError>> =
        requests.iter().map(|request| ledger.decide(request)).collect();

    if !Arc::ptr_eq(&view, &group.view) {
        view = Arc::clone(&group.view);
        plans = plan(requests, &view);
    }
    let (events, deliveries) = rows(requests, &decisions, &plans, &view);
    let first = group.store(&events, &deliveries).await?;
    group.commit().await?;
    Ok(done(requests, decisions, &events, &deliveries, first, view.epoch))
}

/// What is stored for the events that are new.
fn rows<'a>(
    requests: &[&'a PublishRequest],
    decisions: &[Result<Vec<Decision>, PublishError>],
    plans: &'a [Vec<Plan>],
    view: &'a View,
) -> (Vec<NewEvent<'a>>, Vec<NewDelivery<'a>>) {
    let mut events = Vec::new();
    let mut deliveries = Vec::new();
    for ((request, decided), plans) in requests.iter().zip(decisions).zip(plans) {
        let Ok(decided) = decided else { continue };
        for ((event, decision), plan) in request.events.iter().zip(decided).zip(plans) {
            let Decision::Store { hops } = *decision else { continue };
            deliveries.extend(plan.subscribers.iter().map(|&index| NewDelivery {
                event: events.len(),
                subscription_id: &view.subscribers()[index].id,
                ordering_key: plan.ordering_key.as_deref(),
                at_most_once: plan.at_most_once,
            }));
            events.push(NewEvent {
                envelope: &event.envelope,
                hops,
                publisher: &request.publisher,
                request_id: &request.request_id,
            });
        }
    }
    (events, deliveries)
}

/// What a committed group answers; `first` is where its first new event stands.
fn done(
    requests: &[&PublishRequest],
    decisions: Vec<Result<Vec<Decision>, PublishError>>,
    events: &[NewEvent<'_>],
    deliveries: &[NewDelivery<'_>],
    first: i64,
    epoch: i64,
) -> Done {
    let subscriptions: HashSet<&SubscriptionId> = deliveries.iter().map(|delivery| delivery.subscription_id).collect();
    let positions: HashMap<&str, i64> = events
        .iter()
        .zip(first..)
        .map(|(event, position)| (event.envelope.event_id.as_str(), position))
        .collect();
    let answers = requests
        .iter()
        .zip(decisions)
        .map(|(request, decided)| decided.map(|decided| answer(request, &decided, &positions, epoch)))
        .collect();
    Done {
        answers,
        subscriptions: subscriptions.into_iter().cloned().collect(),
    }
}

/// How one event is carried.
struct Plan {
    /// The subscriptions it goes to, as places in the view.
    subscribers: Vec<usize>,
    /// The key in whose order it is delivered.
    ordering_key: Option<String>,
    at_most_once: bool,
}

/// The plan of each event of each request. What nobody receives needs no key.
fn plan(requests: &[&PublishRequest], view: &View) -> Vec<Vec<Plan>> {
    let of_event = |event: &Prepared| {
        let subscribers: Vec<usize> = view.matching(&event.envelope.event_type).collect();
        let policy = view.policies.policy(&event.envelope.event_type);
        Plan {
            ordering_key: if subscribers.is_empty() {
                None
            } else {
                policy.ordering_key(&event.envelope)
            },
            at_most_once: policy.semantics() == Semantics::AtMostOnce,
            subscribers,
        }
    };
    requests
        .iter()
        .map(|request| request.events.iter().map(of_event).collect())
        .collect()
}

/// What the loop guard must look up: events that are new and name a trace of their own. A trace that the server made for
/// this request cannot have been seen before.
fn guarded_keys(requests: &[&PublishRequest], known: &HashMap<String, KnownEvent>) -> Vec<LoopKey> {
    let keys: HashSet<LoopKey> = requests
        .iter()
        .flat_map(|request| &request.events)
        .filter(|event| event.guarded && !known.contains_key(event.envelope.event_id.as_str()))
        .map(|event| loop_key(&event.envelope))
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
