//! One open stream as the log sees it: what waits to be written, bounded, and whether the stream has ended.

use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::domain::topic::TopicPattern;

use super::viewer::Audience;

/// Bytes that may wait for a reader. One that falls further behind is closed, and resumes when it comes back.
const WAITING_BYTES_MAX: usize = 1024 * 1024;
/// A queue that was long once keeps no more places than these.
const PLACES_KEPT: usize = 16;

/// Why a stream ended by our doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Its reader fell too far behind.
    Slow,
    /// The session that opened it ended.
    Expired,
    /// The sessions of its person were withdrawn.
    Withdrawn,
    /// The log is no longer the one it was read from; its client learns that when it comes back.
    History,
    /// What was missed could not be read.
    Failed,
    /// The process stops.
    Stopping,
}

impl End {
    /// The word in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::Slow => "slow",
            Self::Expired => "expired",
            Self::Withdrawn => "withdrawn",
            Self::History => "history",
            Self::Failed => "failed",
            Self::Stopping => "stopping",
        }
    }
}

/// An open stream.
#[derive(Debug)]
pub(super) struct Session {
    /// Tells it from every other of this process.
    pub(super) id: u64,
    pub(super) audience: Audience,
    pub(super) topics: Vec<TopicPattern>,
    /// When what it was opened with was issued, in milliseconds since 1970; of people only.
    pub(super) issued_at_ms: i64,
    queue: Mutex<Queue>,
    /// When its connection last took something, or was ready to.
    taken_at: Mutex<Instant>,
    /// Cuts the connection, where a clean end would wait for a reader that does not read.
    pub(super) hangup: CancellationToken,
}

#[derive(Debug, Default)]
struct Queue {
    frames: VecDeque<Bytes>,
    bytes: usize,
    /// Events up to this position are in the past of this stream.
    seen: i64,
    /// The task that writes, where it waits.
    waker: Option<Waker>,
    /// It waits for its turn to be woken.
    is_listed: bool,
    end: Option<End>,
}

impl Session {
    pub(super) fn new(
        id: u64,
        audience: Audience,
        topics: Vec<TopicPattern>,
        issued_at_ms: i64,
        hangup: CancellationToken,
    ) -> Self {
        Self {
            id,
            audience,
            topics,
            issued_at_ms,
            queue: Mutex::default(),
            taken_at: Mutex::new(Instant::now()),
            hangup,
        }
    }

    /// Notes that the connection takes what there is.
    pub(super) fn takes(&self) {
        *self.taken_at.lock() = Instant::now();
    }

    /// For how long the connection has taken nothing.
    pub(super) fn untaken(&self) -> Duration {
        self.taken_at.lock().elapsed()
    }

    /// Everything up to `position` has been sent or was left out.
    pub(super) fn begin_after(&self, position: i64) {
        self.queue.lock().seen = position;
    }

    /// Adds the frame of an event, unless it lies in the past. Answers whether the writing task is to be woken: once for
    /// all that is added until [`Session::wake`].
    pub(super) fn push(&self, position: i64, frame: &Bytes) -> bool {
        let mut queue = self.queue.lock();
        if position <= queue.seen || queue.end.is_some() {
            return false;
        }
        queue.seen = position;
        if queue.bytes + frame.len() > WAITING_BYTES_MAX {
            drop(queue);
            self.end(End::Slow);
            return false;
        }
        queue.bytes += frame.len();
        queue.frames.push_back(frame.clone());
        !std::mem::replace(&mut queue.is_listed, true)
    }

    /// Lets the writing task look.
    pub(super) fn wake(&self) {
        let waker = {
            let mut queue = self.queue.lock();
            queue.is_listed = false;
            queue.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Ends the stream; what waits is never sent, and its memory is free at once. The first reason stands.
    pub(super) fn end(&self, why: End) {
        {
            let mut queue = self.queue.lock();
            if queue.end.is_some() {
                return;
            }
            queue.end = Some(why);
            queue.frames = VecDeque::new();
            queue.bytes = 0;
        }
        if why == End::Slow {
            self.hangup.cancel();
        }
        self.wake();
    }

    /// Why it ended, if it did.
    pub(super) fn ended(&self) -> Option<End> {
        self.queue.lock().end
    }

    /// The next frame; `None` when the stream has ended.
    pub(super) fn poll_next(&self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let mut queue = self.queue.lock();
        if queue.end.is_some() {
            return Poll::Ready(None);
        }
        let Some(frame) = queue.frames.pop_front() else {
            match &mut queue.waker {
                Some(waker) => waker.clone_from(cx.waker()),
                none => *none = Some(cx.waker().clone()),
            }
            return Poll::Pending;
        };
        queue.bytes -= frame.len();
        if queue.frames.is_empty() {
            queue.frames.shrink_to(PLACES_KEPT);
        }
        Poll::Ready(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session() -> Session {
        Session::new(1, Audience::Anyone, Vec::new(), 0, CancellationToken::new())
    }

    fn next(session: &Session) -> Poll<Option<Bytes>> {
        session.poll_next(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn each_event_is_sent_once_whoever_offers_it_again() {
        let session = session();
        session.begin_after(5);
        assert!(!session.push(5, &Bytes::from("history")));
        assert!(session.push(6, &Bytes::from("six")), "somebody has to wake it");
        assert!(!session.push(6, &Bytes::from("six again")));
        assert!(!session.push(8, &Bytes::from("eight")), "it is woken once for both");
        session.wake();
        assert!(session.push(9, &Bytes::from("nine")));
        let sent: Vec<_> = std::iter::from_fn(|| match next(&session) {
            Poll::Ready(frame) => frame,
            Poll::Pending => None,
        })
        .collect();
        assert_eq!(sent, ["six", "eight", "nine"]);
        assert!(next(&session).is_pending());
    }

    #[test]
    fn a_reader_that_falls_behind_by_a_mebibyte_is_hung_up_on_and_holds_nothing() {
        let session = session();
        let frame = Bytes::from(vec![b'x'; WAITING_BYTES_MAX / 4]);
        for position in 1..=4 {
            session.push(position, &frame);
        }
        assert!(session.ended().is_none() && !session.hangup.is_cancelled());
        session.push(5, &frame);
        assert_eq!(session.ended(), Some(End::Slow));
        assert!(session.hangup.is_cancelled());
        assert_eq!(session.queue.lock().frames.capacity(), 0);
        assert_eq!(next(&session), Poll::Ready(None));
        session.end(End::Stopping);
        assert_eq!(session.ended(), Some(End::Slow), "the first reason stands");
    }
}
