//! Publishing: validate, match, group, commit, answer, ring the doorbells.
//!
//! Stage A ([`request`]) runs per request and touches no database. Stage B ([`group`]) runs one at a time for every
//! request that waits, in one transaction: one sync of the disk carries them all. Stage C answers and rings.

mod decide;
mod group;
mod request;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::domain::cursor::Cursor;
use crate::domain::ids::{EventId, SubscriptionId};
use crate::store::{SharedStore, StoreError};

pub use request::{ItemFault, PublishRequest, RequestFault, Rules};

/// Requests that may wait for the next group.
const WAITING_REQUESTS_MAX: usize = 4_096;
/// Payload that may wait for the next group, in KiB: 64 MiB.
const WAITING_KIB_MAX: u32 = 64 * 1024;
/// How long a request may wait before it is told "not now"; it is then never stored.
const WAIT_MAX: Duration = Duration::from_secs(5);
/// Events of one group, unless a single request has more.
const GROUP_EVENTS_MAX: usize = 256;
/// Bytes of one group, unless a single request has more.
const GROUP_BYTES_MAX: usize = 1024 * 1024;

/// What became of one event of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// Its id.
    pub event_id: EventId,
    /// It was stored before this request.
    pub duplicate: bool,
    /// Where it stands; `None` when only its receipt is left.
    pub cursor: Option<Cursor>,
}

/// Why a request was refused after validation. Nothing of it is stored.
#[derive(Debug, Clone, thiserror::Error)]
pub enum PublishError {
    /// An event of this id is stored with another source or type.
    #[error("{event_id} was published before with another source or type; use a new id")]
    IdConflict {
        /// The id.
        event_id: EventId,
    },
    /// The event's trace is too deep.
    #[error("{event_id} would be hop {} of its trace; at most {max_hops} are accepted", .hops + 1)]
    Loop {
        /// The event.
        event_id: EventId,
        /// How deep the trace is.
        hops: u32,
        /// How deep it may be.
        max_hops: u32,
    },
    /// The database cannot take it now.
    #[error("events cannot be stored at the moment")]
    Unavailable,
    /// The database refused it; the cause is logged where it happened.
    #[error("the events could not be stored")]
    Internal,
}

impl From<&StoreError> for PublishError {
    fn from(error: &StoreError) -> Self {
        match error {
            StoreError::Unavailable(_) => Self::Unavailable,
            _ => Self::Internal,
        }
    }
}

/// Told after a commit which subscriptions got work. Must not block.
pub type Ring = Arc<dyn Fn(&[SubscriptionId]) + Send + Sync>;

type Answer = Result<Vec<Published>, PublishError>;

/// A request in the queue, with what it holds while it waits.
struct Waiting {
    request: PublishRequest,
    since: Instant,
    answer: oneshot::Sender<Answer>,
    _room: OwnedSemaphorePermit,
}

/// The way in: any number of requests at once, one group at a time.
#[derive(Clone)]
pub struct Publisher {
    queue: mpsc::Sender<Waiting>,
    room: Arc<Semaphore>,
}

impl Publisher {
    /// Starts the task that runs the groups; it ends when `stop` is cancelled and nothing waits any more.
    pub fn start(
        store: SharedStore,
        max_hops: i32,
        ring: Ring,
        stop: CancellationToken,
    ) -> (Self, tokio::task::JoinHandle<()>) {
        let (queue, waiting) = mpsc::channel(WAITING_REQUESTS_MAX);
        let room = Arc::new(Semaphore::new(WAITING_KIB_MAX as usize));
        let task = tokio::spawn(run(store, max_hops, ring, waiting, stop));
        (Self { queue, room }, task)
    }

    /// Stores a request, whole or not at all. A caller that goes away while it waits changes nothing about that.
    pub async fn publish(&self, request: PublishRequest) -> Answer {
        let kib = u32::try_from(request.bytes / 1024 + 1)
            .unwrap_or(WAITING_KIB_MAX)
            .min(WAITING_KIB_MAX);
        let room = Arc::clone(&self.room)
            .try_acquire_many_owned(kib)
            .map_err(|_full| PublishError::Unavailable)?;
        let (answer, answered) = oneshot::channel();
        let waiting = Waiting {
            request,
            since: Instant::now(),
            answer,
            _room: room,
        };
        self.queue
            .try_send(waiting)
            .map_err(|_full_or_stopped| PublishError::Unavailable)?;
        answered.await.unwrap_or(Err(PublishError::Unavailable))
    }
}

/// Takes what waits, group by group.
async fn run(
    store: SharedStore,
    max_hops: i32,
    ring: Ring,
    mut queue: mpsc::Receiver<Waiting>,
    stop: CancellationToken,
) {
    let mut carried = None;
    loop {
        let first = match carried.take() {
            Some(waiting) => waiting,
            None => tokio::select! {
                biased;
                next = queue.recv() => match next {
                    Some(waiting) => waiting,
                    None => return,
                },
                () = stop.cancelled() => {
                    // No request is accepted any more; those that are already here are still stored.
                    queue.close();
                    match queue.recv().await {
                        Some(waiting) => waiting,
                        None => return,
                    }
                }
            },
        };
        let group;
        (group, carried) = gather(first, &mut queue);
        let group: Vec<Waiting> = group.into_iter().filter_map(still_wanted).collect();
        if !group.is_empty() {
            commit(&store, max_hops, &ring, group).await;
        }
    }
}

/// The requests of the next group, and the one that no longer fits.
fn gather(first: Waiting, queue: &mut mpsc::Receiver<Waiting>) -> (Vec<Waiting>, Option<Waiting>) {
    let (mut events, mut bytes) = (first.request.events.len(), first.request.bytes);
    let mut group = vec![first];
    while let Ok(next) = queue.try_recv() {
        events += next.request.events.len();
        bytes += next.request.bytes;
        if events > GROUP_EVENTS_MAX || bytes > GROUP_BYTES_MAX {
            return (group, Some(next));
        }
        group.push(next);
    }
    (group, None)
}

/// Refuses what has waited too long.
fn still_wanted(waiting: Waiting) -> Option<Waiting> {
    if waiting.since.elapsed() <= WAIT_MAX {
        return Some(waiting);
    }
    // The caller may be gone; then nobody reads the refusal.
    let _ = waiting.answer.send(Err(PublishError::Unavailable));
    None
}

/// Runs a group; one that fails for a reason other than the database's absence is run again request by request, so that
/// one request cannot spoil the answer of another.
async fn commit(store: &SharedStore, max_hops: i32, ring: &Ring, group: Vec<Waiting>) {
    let requests: Vec<&PublishRequest> = group.iter().map(|waiting| &waiting.request).collect();
    match group::run(store, &requests, max_hops).await {
        Ok(done) => {
            for (waiting, answer) in group.into_iter().zip(done.answers) {
                let _ = waiting.answer.send(answer);
            }
            ring(&done.subscriptions);
        }
        Err(error) if group.len() == 1 || matches!(error, StoreError::Unavailable(_)) => {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                requests = group.len(),
                "a publish group failed"
            );
            for waiting in group {
                let _ = waiting.answer.send(Err(PublishError::from(&error)));
            }
        }
        Err(error) => {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                requests = group.len(),
                "a publish group failed and is run again request by request"
            );
            for waiting in group {
                let Some(waiting) = still_wanted(waiting) else { continue };
                // Boxed: the same function, one level down and never deeper.
                Box::pin(commit(store, max_hops, ring, vec![waiting])).await;
            }
        }
    }
}
