//! Publishing: validate, match, group, commit, answer, ring the doorbells.
//!
//! Stage A (`request`) runs per request and touches no database. Stage B (`group`) runs one at a time for every
//! request that waits, in one transaction: one sync of the disk carries them all. Stage C answers and rings.

mod decide;
mod group;
mod request;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::delivery::Wake;
use crate::domain::app::{QuotaFault, Quotas};
use crate::domain::cursor::Cursor;
use crate::domain::ids::EventId;
use crate::fabric::Fabric;
use crate::realtime::Bell;
use crate::store::{SharedStore, StoreError, answered};

pub use request::{ItemFault, PublishRequest, RequestFault, RequestTrace, Rules};

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
    /// The app was revoked after its token was issued.
    #[error("the app was revoked after this token was issued")]
    Revoked,
    /// The app's project has no room for it.
    #[error(transparent)]
    Quota(#[from] QuotaFault),
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
        bounds: Bounds,
        fabric: Arc<Fabric>,
        bells: Bells,
        stop: CancellationToken,
    ) -> (Self, tokio::task::JoinHandle<()>) {
        let (queue, waiting) = mpsc::channel(WAITING_REQUESTS_MAX);
        let room = Arc::new(Semaphore::new(WAITING_KIB_MAX as usize));
        let groups = Groups {
            store,
            bounds,
            fabric,
            bells,
        };
        let task = tokio::spawn(groups.run(waiting, stop));
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

/// What no event may exceed.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Events of a chain under one trace.
    pub max_hops: i32,
    /// What the projects of apps may use.
    pub quotas: Quotas,
}

/// What is rung in this process when events are stored.
pub struct Bells {
    /// The dispatcher of deliveries.
    pub deliveries: Wake,
    /// The live streams.
    pub streams: Bell,
}

/// What groups are run with.
struct Groups {
    store: SharedStore,
    bounds: Bounds,
    fabric: Arc<Fabric>,
    bells: Bells,
}

impl Groups {
    /// Takes what waits, group by group.
    async fn run(self, mut queue: mpsc::Receiver<Waiting>, stop: CancellationToken) {
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
                self.commit(group).await;
            }
        }
    }

    /// Runs a group and answers its requests. One that fails for a reason of its own is run again request by request, so
    /// that one request cannot spoil the answer of another.
    async fn commit(&self, group: Vec<Waiting>) {
        let requests: Vec<&PublishRequest> = group.iter().map(|waiting| &waiting.request).collect();
        let running =
            AssertUnwindSafe(answered(group::run(&self.store, &self.fabric, &requests, &self.bounds))).catch_unwind();
        let error = match running.await {
            Ok(Ok(mut done)) => {
                let newest = done.newest();
                for (waiting, answer) in group.into_iter().zip(done.answers.drain(..)) {
                    let _ = waiting.answer.send(answer);
                }
                self.bells.deliveries.subscriptions(done.subscriptions());
                if let Some(newest) = newest {
                    self.bells.streams.ring();
                    self.fabric.news(&newest);
                }
                done.ring(&self.fabric);
                return;
            }
            // Where no answer came, whether it was committed is unknown; the ids tell a producer that tries again.
            Ok(Err(error)) => error,
            Err(_panic) => {
                tracing::error!(requests = group.len(), "a publish group failed by a defect");
                refuse(group, PublishError::Internal);
                return;
            }
        };
        if group.len() == 1 || error.is_outage() {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                requests = group.len(),
                "a publish group failed"
            );
            refuse(group, PublishError::from(&error));
            return;
        }
        tracing::warn!(
            error = &error as &dyn std::error::Error,
            requests = group.len(),
            "a publish group failed and is run again request by request"
        );
        for waiting in group {
            let Some(waiting) = still_wanted(waiting) else { continue };
            // Boxed: the same function, one level down and never deeper.
            Box::pin(self.commit(vec![waiting])).await;
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

/// Gives every request of a group the same refusal. A caller may be gone; then nobody reads it.
fn refuse(group: Vec<Waiting>, error: PublishError) {
    for waiting in group {
        let _ = waiting.answer.send(Err(error.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(events: usize, bytes: usize) -> (Waiting, oneshot::Receiver<Answer>) {
        let raw = r#"{"event_id":"evt_01K7AAB2CD3EF4GH5JK6MN7PQR","event_type":"live.stream.started","version":1,
            "source":"live","actor":{"type":"service","id":"live"},"timestamp":"2026-10-21T08:15:30Z",
            "subject":{"type":"stream","id":"1"},"payload":{}}"#;
        let rules = Rules {
            sources: Default::default(),
            max_payload_bytes: 65_536,
        };
        let trace = RequestTrace {
            id: "4bf92f3577b34da6a3ce929d0e0e4736",
            given: false,
        };
        let one = PublishRequest::of_service(raw, "live", trace, &rules);
        let mut request = one.expect("a valid event");
        request.events = vec![request.events[0].clone(); events];
        request.bytes = bytes;
        let (answer, answered) = oneshot::channel();
        let room = Arc::new(Semaphore::new(1));
        let waiting = Waiting {
            request,
            since: Instant::now(),
            answer,
            _room: room.try_acquire_owned().expect("a free permit"),
        };
        (waiting, answered)
    }

    fn sizes(requests: &[(usize, usize)]) -> (usize, bool) {
        let (sender, mut queue) = mpsc::channel(1000);
        let mut all = requests.iter().map(|&(events, bytes)| waiting(events, bytes).0);
        let first = all.next().expect("a first request");
        for next in all {
            assert!(sender.try_send(next).is_ok());
        }
        let (group, carried) = gather(first, &mut queue);
        (group.len(), carried.is_some())
    }

    #[test]
    fn a_group_ends_at_256_events_or_a_mebibyte_and_a_larger_request_runs_alone() {
        assert_eq!(sizes(&[(1, 100); 256]), (256, false));
        assert_eq!(sizes(&[(1, 100); 257]), (256, true));
        assert_eq!(sizes(&[(100, 100), (100, 100), (100, 100)]), (2, true));
        let mebibyte = 1024 * 1024;
        assert_eq!(sizes(&[(1, mebibyte - 1), (1, 1)]), (2, false));
        assert_eq!(sizes(&[(1, mebibyte), (1, 1)]), (1, true));
        assert_eq!(sizes(&[(100, 2 * mebibyte), (1, 1)]), (1, true));
    }

    #[tokio::test(start_paused = true)]
    async fn what_has_waited_too_long_is_refused_and_never_run() {
        let (waiting, answered) = waiting(1, 100);
        tokio::time::advance(WAIT_MAX + Duration::from_millis(1)).await;
        assert!(still_wanted(waiting).is_none());
        assert!(matches!(answered.await, Ok(Err(PublishError::Unavailable))));
    }

    #[tokio::test]
    async fn a_full_queue_refuses_at_once() {
        let (queue, _kept) = mpsc::channel(1);
        let publisher = Publisher {
            queue,
            room: Arc::new(Semaphore::new(2)),
        };
        let large = waiting(1, 3 * 1024).0.request;
        assert!(
            matches!(publisher.publish(large).await, Err(PublishError::Unavailable)),
            "no room"
        );
        let (small, more) = (waiting(1, 10).0.request, waiting(1, 10).0.request);
        let first = tokio::spawn({
            let publisher = publisher.clone();
            async move { publisher.publish(small).await }
        });
        while publisher.queue.capacity() > 0 {
            tokio::task::yield_now().await;
        }
        assert!(
            matches!(publisher.publish(more).await, Err(PublishError::Unavailable)),
            "no place"
        );
        first.abort();
    }
}
