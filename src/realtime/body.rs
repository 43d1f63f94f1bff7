//! The body of a stream's answer. It is asked for frames only while the connection takes them.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::BoxStream;
use hyper::body::{Body, Frame};
use tokio::time::{Instant, Sleep, sleep_until};

use super::frame;
use super::hub::{Hub, Slot};
use super::session::{End, Session};
use crate::telemetry;

/// The frames of one stream, until its client goes or it ends.
pub struct Frames {
    hub: Arc<Hub>,
    session: Arc<Session>,
    opening: Option<Bytes>,
    /// What it gets before it is live.
    replay: Option<BoxStream<'static, Bytes>>,
    heartbeat: Duration,
    beat_at: Instant,
    /// When what it was opened with ends.
    ends_at: Option<Instant>,
    /// Until the earlier of the two.
    timer: Pin<Box<Sleep>>,
    _slot: Slot,
}

impl Frames {
    pub(super) fn new(
        hub: Arc<Hub>,
        session: Arc<Session>,
        opening: Bytes,
        replay: BoxStream<'static, Bytes>,
        ends_at: Option<Instant>,
        slot: Slot,
    ) -> Self {
        let heartbeat = hub.settings.heartbeat;
        // Whoever opened at the same time does not beat at the same time.
        let beat_at = Instant::now() + heartbeat.mul_f64(rand::random_range(0.1..1.0));
        Self {
            hub,
            session,
            opening: Some(opening),
            replay: Some(replay),
            heartbeat,
            beat_at,
            ends_at,
            timer: Box::pin(sleep_until(ends_at.map_or(beat_at, |end| end.min(beat_at)))),
            _slot: slot,
        }
    }

    /// The heartbeat, when it is due.
    fn poll_timer(&mut self, cx: &mut Context<'_>) -> Poll<Bytes> {
        std::task::ready!(self.timer.as_mut().poll(cx));
        let now = Instant::now();
        if self.ends_at.is_some_and(|end| end <= now) {
            self.session.end(End::Expired);
            return Poll::Pending;
        }
        self.beat_at = now + self.heartbeat;
        let next = self.ends_at.map_or(self.beat_at, |end| end.min(self.beat_at));
        self.timer.as_mut().reset(next);
        Poll::Ready(frame::HEARTBEAT)
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        self.session.takes();
        if let Some(opening) = self.opening.take() {
            return Poll::Ready(Some(opening));
        }
        if let Poll::Ready(beat) = self.poll_timer(cx) {
            return Poll::Ready(Some(beat));
        }
        if let Some(replay) = &mut self.replay
            && self.session.ended().is_none()
        {
            match replay.as_mut().poll_next(cx) {
                Poll::Ready(None) => self.replay = None,
                Poll::Ready(frame) => return Poll::Ready(frame),
                // Whoever ends it meanwhile wakes it through the queue, and once it has joined its replay says no more.
                Poll::Pending => return self.session.poll_next(cx),
            }
        }
        self.session.poll_next(cx)
    }
}

impl Body for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.poll_next(cx)
            .map(|frame| frame.map(|frame| Ok(Frame::data(frame))))
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        self.hub.leave(&self.session);
        telemetry::stream_ended(self.session.ended());
    }
}
