//! What a stream gets before it is live: what it has to be told first, then the history it missed, page by page as its
//! reader takes it, then its place among the live ones.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures_util::Stream;
use futures_util::stream::unfold;
use tokio::time::sleep;

use crate::domain::cursor::Cursor;
use crate::domain::envelope::Visibility;
use crate::store::{HISTORY_ROWS_MAX, HistoryRequest, StoreError, StoredEvent, answered};

use super::frame::{self, Frame, Gap, Reason};
use super::hub::{Hub, NotYet};
use super::session::{End, Session};
use super::start::Start;

/// Events of one page, and stored bytes after which it ends.
const PAGE: (i64, i64) = (100, 64 * 1024);
/// Rows examined for each event that a stream may replay.
const ROWS_PER_EVENT: i64 = 50;
/// What is committed while a stream reads history is no part of its replay; it has a limit of its own.
const CATCH_UP_MAX: i64 = 1_000;
/// How often a stream of another history than the one that is followed looks again, and how long it waits in between.
const LOOKS_MAX: u32 = 60;
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// The frames of a stream until it is live. A reader that takes nothing makes nothing be read.
pub(super) fn replay(hub: Arc<Hub>, session: Arc<Session>, start: Start, head: i64) -> impl Stream<Item = Frame> {
    let limit = i64::from(hub.settings.replay_max);
    let replay = Replay {
        frames: start.gaps.iter().map(Gap::frame).collect(),
        at: start.after,
        upto: head,
        events_left: limit,
        rows_left: limit * ROWS_PER_EVENT,
        public_from: start.public_from,
        is_done: false,
        looks_left: LOOKS_MAX,
        hub,
        session,
    };
    unfold(replay, Replay::next)
}

struct Replay {
    hub: Arc<Hub>,
    session: Arc<Session>,
    /// How often it still waits until the log is followed where it was opened.
    looks_left: u32,
    /// Read and not yet taken.
    frames: VecDeque<Frame>,
    /// Everything up to here was read.
    at: i64,
    /// Everything up to here has to be.
    upto: i64,
    events_left: i64,
    rows_left: i64,
    public_from: i64,
    is_done: bool,
}

impl Replay {
    async fn next(mut self) -> Option<(Frame, Self)> {
        loop {
            if let Some(frame) = self.frames.pop_front() {
                return Some((frame, self));
            }
            if self.is_done || self.session.ended().is_some() {
                return None;
            }
            if let Err(error) = self.go_on().await {
                tracing::warn!("a live stream ends, since what it missed cannot be read: {error}");
                self.session.end(End::Failed);
            }
        }
    }

    async fn go_on(&mut self) -> Result<(), StoreError> {
        if self.at < self.upto {
            if self.events_left <= 0 || self.rows_left <= 0 {
                self.leave_out(Reason::ReplayLimit, self.upto);
                return Ok(());
            }
            return self.read().await;
        }
        let at = Cursor {
            epoch: self.session.epoch,
            position: self.at,
        };
        match self.hub.join(&self.session, at) {
            Ok(()) => {
                self.is_done = true;
                // Every withdrawal that the log brings is heard; this is for one that came while it was opened.
                super::end_if_withdrawn(&self.hub, &self.session).await?;
            }
            Err(NotYet::Behind(position)) => {
                self.upto = position;
                self.events_left = CATCH_UP_MAX;
                self.rows_left = CATCH_UP_MAX * ROWS_PER_EVENT;
            }
            // Opened on a new history before the log is followed there, which is a matter of one look.
            Err(NotYet::Elsewhere) if self.looks_left > 0 => {
                self.looks_left -= 1;
                self.hub.bell.ring();
                sleep(LOOK_AGAIN).await;
            }
            Err(NotYet::Elsewhere) => self.session.end(End::History),
        }
        Ok(())
    }

    /// Says that what comes up to this position is left out.
    fn leave_out(&mut self, reason: Reason, to_seq: i64) {
        let gap = Gap {
            reason,
            from_seq: self.at + 1,
            to_seq,
            latest_seq: self.upto,
            window_seconds: None,
        };
        self.frames.push_back(gap.frame());
        self.at = to_seq;
    }

    async fn read(&mut self) -> Result<(), StoreError> {
        let audience = &self.session.audience;
        let request = HistoryRequest {
            after: self.at,
            upto: self.upto,
            topics: &self.session.topics,
            all: *audience == super::viewer::Audience::Service,
            person: audience.person(),
            public_from: self.public_from,
            limit: PAGE.0.min(self.events_left),
            bytes: PAGE.1,
        };
        let history = {
            let _turn = self.hub.readers.acquire().await.expect("nobody closes the semaphore");
            answered(self.hub.store.history(&request)).await?
        };
        if history.positions.epoch != self.session.epoch {
            self.session.end(End::History);
            return Ok(());
        }
        let floor = history.positions.floor;
        if self.at < floor {
            self.leave_out(Reason::Retention, floor.min(self.upto));
        }
        for event in history.events.iter().filter(|event| event.position > self.at) {
            if self.is_wanted(event) {
                let cursor = Cursor {
                    epoch: self.session.epoch,
                    position: event.position,
                };
                self.frames.push_back(frame::event(cursor, &event.envelope));
                self.events_left -= 1;
            }
        }
        let examined = history.examined.max(self.at);
        // Positions are nearly all rows; where they leap, a page has no more rows than it examines.
        self.rows_left -= (examined - self.at).min(HISTORY_ROWS_MAX);
        self.at = examined;
        Ok(())
    }

    fn is_wanted(&self, event: &StoredEvent) -> bool {
        let envelope = &event.envelope;
        let too_old = envelope.visibility == Visibility::Public && event.position < self.public_from;
        !too_old
            && self.session.audience.may_see(envelope)
            && self
                .session
                .topics
                .iter()
                .any(|topic| topic.matches(&envelope.event_type))
    }
}
