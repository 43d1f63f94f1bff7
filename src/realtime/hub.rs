//! What every stream of the process shares: who is there, how far the log was followed, and the one place where a
//! stream passes from history to what is live.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::domain::cursor::Cursor;
use crate::domain::envelope::Visibility;
use crate::store::{Heading, Positions, SharedStore, StoredEvent, valid_after};
use crate::telemetry;

use super::index::Index;
use super::session::{End, Pushed, Session};
use super::{Settings, frame};

/// The event that withdraws the sessions of a person.
const WITHDRAWAL: &str = "network.user.token_valid_after";
/// Who may publish it.
const WITHDRAWER: &str = "network";
/// Reads of history at a time, so that a crowd that comes back leaves connections to everybody else.
const READERS: usize = 4;
/// Streams that are written at a time. An event that many follow becomes their turns, and one that few follow comes in between.
const TURN: usize = 32;

/// Says that the log has grown. Cheap to clone and to ring.
#[derive(Debug, Clone, Default)]
pub struct Bell(Arc<Notify>);

impl Bell {
    /// Rings; never blocks, and never counts.
    pub fn ring(&self) {
        self.0.notify_one();
    }

    pub(super) async fn rung(&self) {
        self.0.notified().await;
    }
}

pub(super) struct Hub {
    pub(super) store: SharedStore,
    pub(super) settings: Settings,
    pub(super) bell: Bell,
    pub(super) readers: Semaphore,
    log: Mutex<Log>,
    /// Everybody who is there, joined or not.
    sessions: Mutex<HashMap<u64, Arc<Session>>>,
    open: AtomicUsize,
    ids: AtomicU64,
    turns: Turns,
    stop: CancellationToken,
}

/// How far the log was followed, and by whom.
struct Log {
    index: Index<Arc<Session>>,
    /// Those of people, by person.
    people: BTreeMap<(Arc<str>, u64), Arc<Session>>,
    epoch: i64,
    /// For every event up to here it is decided who gets it.
    position: i64,
}

/// Streams that wait to be written; each stands here once.
#[derive(Default)]
struct Turns {
    waiting: Mutex<VecDeque<Arc<Session>>>,
    added: Notify,
}

/// Why a stream cannot join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NotYet {
    /// What lies up to this position has to be read first.
    Behind(i64),
    /// The log is another one now.
    Elsewhere,
}

/// One of the streams that may be open at a time, from before it is opened until it is gone.
pub struct Slot(Arc<Hub>);

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Log {
    fn is_wanted(&self, event_type: &str, visibility: Visibility) -> bool {
        event_type == WITHDRAWAL || self.index.wants(event_type, visibility)
    }
}

impl Hub {
    pub(super) fn new(store: SharedStore, settings: Settings, at: Positions, stop: CancellationToken) -> Arc<Self> {
        Arc::new(Self {
            store,
            settings,
            bell: Bell::default(),
            readers: Semaphore::new(READERS),
            log: Mutex::new(Log {
                index: Index::default(),
                people: BTreeMap::new(),
                epoch: at.epoch,
                position: at.head,
            }),
            sessions: Mutex::default(),
            open: AtomicUsize::new(0),
            ids: AtomicU64::new(0),
            turns: Turns::default(),
            stop,
        })
    }

    /// How many streams are open.
    pub(super) fn connections(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Room for one more stream.
    pub(super) fn reserve(self: &Arc<Self>) -> Option<Slot> {
        let max = self.settings.max_connections;
        self.open
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |open| {
                (open < max).then_some(open + 1)
            })
            .ok()?;
        Some(Slot(Arc::clone(self)))
    }

    pub(super) fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    /// Notes that a stream is there. One that comes while the process stops ends at once, and one whose person's sessions
    /// are withdrawn ends wherever it stands.
    pub(super) fn enter(&self, session: &Arc<Session>) {
        if let Some(person) = session.audience.person() {
            let of_a_person = (person.into(), session.id);
            self.log.lock().people.insert(of_a_person, Arc::clone(session));
        }
        self.sessions.lock().insert(session.id, Arc::clone(session));
        if self.stop.is_cancelled() {
            session.end(End::Stopping);
        }
    }

    /// Forgets a stream.
    pub(super) fn leave(&self, session: &Session) {
        self.sessions.lock().remove(&session.id);
        let mut log = self.log.lock();
        for topic in &session.topics {
            log.index.remove(topic, &session.audience, session.id);
        }
        if let Some(person) = session.audience.person() {
            log.people.remove(&(person.into(), session.id));
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.sessions.lock().is_empty()
    }

    /// Lets a stream that has had everything up to `at` have what comes.
    pub(super) fn join(&self, session: &Arc<Session>, at: Cursor) -> Result<(), NotYet> {
        let mut log = self.log.lock();
        if log.epoch != at.epoch {
            return Err(NotYet::Elsewhere);
        }
        if at.position < log.position {
            return Err(NotYet::Behind(log.position));
        }
        session.begin_after(at.position);
        for topic in &session.topics {
            log.index.add(topic, &session.audience, session.id, Arc::clone(session));
        }
        Ok(())
    }

    pub(super) fn position(&self) -> i64 {
        self.log.lock().position
    }

    /// Whether what was read after this position goes on from it. Otherwise the log was restored, replaced or pruned under
    /// us: every stream ends, and each client is told what it missed when it comes back.
    pub(super) fn goes_on(&self, after: i64, at: Positions) -> bool {
        let mut log = self.log.lock();
        if log.epoch == at.epoch && (at.floor..=at.head).contains(&after) {
            return true;
        }
        let former = std::mem::replace(&mut log.epoch, at.epoch);
        log.position = at.head;
        drop(log);
        for session in self.all() {
            // One that was opened on the new history already goes on.
            if session.epoch != at.epoch || former == at.epoch {
                session.end(End::History);
            }
        }
        false
    }

    /// Follows the log without reading it, while nobody is there. A stream that joined after `at` was asked for may have
    /// begun before it; then nothing is passed over.
    pub(super) fn skip_to(&self, at: Positions) {
        let mut log = self.log.lock();
        if log.index.is_empty() {
            (log.epoch, log.position) = (at.epoch, at.head);
        }
    }

    /// The positions of those events that are worth loading. Who joins from now on begins after `examined`.
    pub(super) fn take(&self, events: &[Heading], examined: i64) -> Vec<i64> {
        let mut log = self.log.lock();
        log.position = examined;
        let wanted = |event: &&Heading| log.is_wanted(&event.event_type, event.visibility);
        events.iter().filter(wanted).map(|event| event.position).collect()
    }

    /// Hands out the next events. Who joins from now on begins after `examined`.
    pub(super) fn pass(&self, events: &[StoredEvent], examined: i64) {
        let mut log = self.log.lock();
        log.position = examined;
        let wanted = |event: &&StoredEvent| log.is_wanted(&event.envelope.event_type, event.envelope.visibility);
        let wanted: Vec<&StoredEvent> = events.iter().filter(wanted).collect();
        drop(log);
        for event in wanted {
            self.hand_out(event);
        }
    }

    /// Hands an event to every stream that wants it and may see it.
    pub(super) fn hand_out(&self, event: &StoredEvent) {
        let log = self.log.lock();
        let cursor = Cursor {
            epoch: log.epoch,
            position: event.position,
        };
        let frame = frame::event(cursor, &event.envelope);
        let mut first: Vec<Arc<Session>> = Vec::new();
        let mut sent = 0;
        log.index.for_each(&event.envelope, |session| {
            // Few followers have it at once, also where something that thousands follow waits for them.
            if first.len() < TURN {
                if session.push(event.position, &frame) {
                    sent += 1;
                    first.push(Arc::clone(session));
                }
                return;
            }
            let pushed = session.push_in_turn(event.position, &frame);
            if pushed != Pushed::Past {
                sent += 1;
            }
            if pushed == Pushed::ToList {
                self.turns.waiting.lock().push_back(Arc::clone(session));
            }
        });
        self.withdraw(&log, event);
        drop(log);
        telemetry::stream_events(sent);
        for session in &first {
            session.write();
        }
        if first.len() == TURN {
            self.turns.added.notify_one();
        }
    }

    fn withdraw(&self, log: &Log, event: &StoredEvent) {
        let envelope = &event.envelope;
        if envelope.event_type != WITHDRAWAL || envelope.source != WITHDRAWER || envelope.subject.kind != "user" {
            return;
        }
        let Some(valid_after) = valid_after(&envelope.payload) else {
            return;
        };
        let person: Arc<str> = envelope.subject.id.as_str().into();
        for (_, session) in log.people.range((person.clone(), 0)..=(person, u64::MAX)) {
            if session.issued_at_ms < valid_after.0 {
                session.end(End::Withdrawn);
            }
        }
    }

    /// Ends every stream.
    pub(super) fn end_all(&self, why: End) {
        for session in self.all() {
            session.end(why);
        }
    }

    fn all(&self) -> Vec<Arc<Session>> {
        self.sessions.lock().values().cloned().collect()
    }

    /// Writes to streams whose turn it is, a few at a time, and lets others run in between.
    pub(super) async fn take_turns(&self) {
        loop {
            let turn: Vec<Arc<Session>> = {
                let mut waiting = self.turns.waiting.lock();
                let some = waiting.len().min(TURN);
                waiting.drain(..some).collect()
            };
            if turn.is_empty() {
                self.turns.added.notified().await;
                continue;
            }
            for session in turn {
                session.take_turn();
            }
            tokio::task::yield_now().await;
        }
    }
}
