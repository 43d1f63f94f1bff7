//! Live streams: browsers and services follow the log as it grows, each seeing what it may, resuming where it was.
//!
//! One task follows the log in the order of its positions; nothing else feeds a stream. So no stream skips an event,
//! whichever process took it, and a lost wake-up costs a second at most. A stream that resumes reads history up to where the
//! log was followed, and joins there. Whatever it cannot be given it is told of as a gap, or it ends and its client
//! comes back to be told.

mod frame;
mod hub;
mod index;
mod replay;
mod session;
mod start;
mod stream;
mod tail;
mod viewer;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::{FutureExt as _, StreamExt as _};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::domain::cursor::Cursor;
use crate::domain::time::Millis;
use crate::domain::topic::TopicPattern;
use crate::store::{Positions, SharedStore, StoreError, answered};

use hub::Hub;
use session::Session;
use start::Start;
use viewer::Audience;

pub use hub::{Bell, Slot};
pub use session::End;
pub use stream::{Framing, Stream};
pub use viewer::Viewer;

/// How long a stream outlives the session that opened it.
const GRACE: Duration = Duration::from_secs(30);
/// The wait after a failure inside.
const BEGIN_ANEW: Duration = Duration::from_millis(500);

/// How streams are served.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Streams open at a time.
    pub max_connections: usize,
    /// Between two heartbeats of a stream.
    pub heartbeat: Duration,
    /// Events that a stream replays at most.
    pub replay_max: u32,
    /// How far back browsers get public events again.
    pub public_replay: Duration,
    /// The wall clock.
    pub clock: fn() -> Millis,
}

/// A stream that somebody asks for.
pub struct Request {
    /// Who.
    pub viewer: Viewer,
    /// What it follows; never empty.
    pub topics: Vec<TopicPattern>,
    /// The last event it has had, where it says so.
    pub position: Option<Cursor>,
}

/// The live streams of this process.
#[derive(Clone)]
pub struct Realtime(Arc<Hub>);

impl Realtime {
    /// Starts to follow the log, until the stop, which ends every stream.
    ///
    /// # Errors
    /// [`StoreError`] when the head of the log cannot be read.
    pub async fn start(
        store: SharedStore,
        settings: Settings,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) -> Result<Self, StoreError> {
        let at = answered(store.positions()).await?;
        let hub = Hub::new(store, settings, at, stop.clone());
        for work in [follow, take_turns] {
            let (hub, stop) = (Arc::clone(&hub), stop.clone());
            tasks.spawn(async move { stop.run_until_cancelled(kept_up(&hub, work)).await });
        }
        let (ending, stop) = (Arc::clone(&hub), stop.clone());
        tasks.spawn(async move {
            stop.cancelled().await;
            ending.end_all(End::Stopping);
        });
        Ok(Self(hub))
    }

    /// What to ring when the log has grown.
    pub fn bell(&self) -> Bell {
        self.0.bell.clone()
    }

    /// How many streams are open.
    pub fn connections(&self) -> usize {
        self.0.connections()
    }

    /// Room for one more stream, unless as many are open as may be.
    pub fn reserve(&self) -> Option<Slot> {
        self.0.reserve()
    }

    /// Whether a person's sessions were withdrawn after what it came with was issued.
    ///
    /// # Errors
    /// [`StoreError`] when that cannot be read.
    pub async fn is_withdrawn(&self, viewer: &Viewer) -> Result<bool, StoreError> {
        let Viewer::Person(person) = viewer else {
            return Ok(false);
        };
        match &person.subject {
            Some(subject) => is_withdrawn(&self.0, subject, person.issued_at_ms).await,
            None => Ok(false),
        }
    }

    /// Finds out where a stream begins; it is there once it is opened, which cannot fail any more.
    ///
    /// # Errors
    /// [`StoreError`] when the bounds of the log cannot be read.
    pub async fn begin(&self, slot: Slot, request: Request) -> Result<Opening, StoreError> {
        let hub = &self.0;
        let audience = request.viewer.audience();
        let window = (audience != Audience::Service).then_some(hub.settings.public_replay);
        let bounds = {
            let _turn = hub.readers.acquire().await.expect("nobody closes the semaphore");
            let window_ms = window.map(|window| i64::try_from(window.as_millis()).unwrap_or(i64::MAX));
            answered(hub.store.start_bounds(request.position, window_ms)).await?
        };
        let start = start::start(
            request.position,
            &bounds,
            window.map(|window| window.as_secs()),
            audience == Audience::Anyone,
        );
        Ok(Opening {
            realtime: self.clone(),
            slot,
            request,
            start,
            at: bounds.positions,
        })
    }

    /// When a session that ends at this moment no longer keeps a stream open.
    fn instant_of(&self, end_ms: i64) -> Instant {
        let grace_ms = i64::try_from(GRACE.as_millis()).expect("half a minute");
        let left_ms = end_ms
            .saturating_add(grace_ms)
            .saturating_sub((self.0.settings.clock)().0);
        let left = Duration::from_millis(u64::try_from(left_ms).unwrap_or(0));
        // A session that ends in a century ends after this process.
        Instant::now() + left.min(Duration::from_secs(365 * 86_400))
    }
}

/// A stream that can be opened.
pub struct Opening {
    realtime: Realtime,
    slot: Slot,
    request: Request,
    start: Start,
    at: Positions,
}

impl Opening {
    /// Opens it.
    pub fn open(self) -> Stream {
        let hub = &self.realtime.0;
        let Request { viewer, topics, .. } = self.request;
        let (issued_at_ms, ends_at) = match &viewer {
            Viewer::Person(person) => {
                let ends_at = person.ends_at_ms.map(|end| self.realtime.instant_of(end));
                (person.issued_at_ms, ends_at)
            }
            Viewer::Anonymous | Viewer::Service => (0, None),
        };
        let at = self.at;
        let session = Session::new(hub.next_id(), viewer.audience(), topics, issued_at_ms, at.epoch);
        let session = Arc::new(session);
        hub.enter(&session);
        let hub = Arc::clone(hub);
        let replay = replay::replay(Arc::clone(&hub), Arc::clone(&session), self.start, at.head).boxed();
        Stream::new(hub, session, frame::opening(viewer.label()), replay, ends_at, self.slot)
    }
}

fn follow(hub: Arc<Hub>) -> BoxFuture<'static, ()> {
    tail::Tail::new(hub).follow().boxed()
}

fn take_turns(hub: Arc<Hub>) -> BoxFuture<'static, ()> {
    async move { hub.take_turns().await }.boxed()
}

/// Does work that has no end, also when it fails: then every stream ends, since what it was to get is in doubt.
async fn kept_up(hub: &Arc<Hub>, work: fn(Arc<Hub>) -> BoxFuture<'static, ()>) {
    while AssertUnwindSafe(work(Arc::clone(hub))).catch_unwind().await.is_err() {
        tracing::error!("live streams failed inside; all end, and begin anew");
        hub.end_all(End::Failed);
        tokio::time::sleep(BEGIN_ANEW).await;
    }
}

async fn is_withdrawn(hub: &Hub, subject: &str, issued_at_ms: i64) -> Result<bool, StoreError> {
    let valid_after = answered(hub.store.sessions_valid_after(subject)).await?;
    Ok(valid_after.is_some_and(|valid_after| issued_at_ms < valid_after.0))
}

async fn end_if_withdrawn(hub: &Hub, session: &Session) -> Result<(), StoreError> {
    if let Some(subject) = session.audience.person()
        && is_withdrawn(hub, subject, session.issued_at_ms).await?
    {
        session.end(End::Withdrawn);
    }
    Ok(())
}
