//! One open stream as the log sees it: what waits to be written, bounded, and whether the stream has ended.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::sync::Notify;

use crate::domain::topic::TopicPattern;

use super::frame::{self, Frame};
use super::stream::Framing;
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
    /// The history that it is read from.
    pub(super) epoch: i64,
    queue: Mutex<Queue>,
    /// Told when its task has to look.
    attention: Notify,
}

#[derive(Debug)]
struct Queue {
    frames: VecDeque<Bytes>,
    bytes: usize,
    /// Bytes of the first frame that were written.
    begun: usize,
    /// Events up to this position are in the past of this stream.
    seen: i64,
    framing: Framing,
    /// Where to write, once it is live.
    socket: Option<Arc<TcpStream>>,
    /// The socket takes no more for now; its task waits until it does.
    is_blocked: bool,
    /// The socket failed.
    is_broken: bool,
    /// Bytes written in all.
    written: u64,
    /// It waits for its turn to be written.
    is_listed: bool,
    end: Option<End>,
}

/// What became of the frame of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pushed {
    /// It lies in the past of the stream, or in nobody's future.
    Past,
    /// It was added to a stream that waits for its turn already.
    Listed,
    /// It was added, and the stream has to be given a turn.
    ToList,
}

/// The socket of a stream failed: its client has gone.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Broken;

impl Session {
    pub(super) fn new(id: u64, audience: Audience, topics: Vec<TopicPattern>, issued_at_ms: i64, epoch: i64) -> Self {
        Self {
            id,
            audience,
            topics,
            issued_at_ms,
            epoch,
            queue: Mutex::new(Queue {
                frames: VecDeque::new(),
                bytes: 0,
                begun: 0,
                seen: 0,
                framing: Framing::Chunked,
                socket: None,
                is_blocked: false,
                is_broken: false,
                written: 0,
                is_listed: false,
                end: None,
            }),
            attention: Notify::new(),
        }
    }

    /// How its frames are told apart.
    pub(super) fn frame_as(&self, framing: Framing) {
        self.queue.lock().framing = framing;
    }

    /// Everything up to `position` has been sent or was left out.
    pub(super) fn begin_after(&self, position: i64) {
        self.queue.lock().seen = position;
    }

    /// Adds the frame of an event, unless it lies in the past; answers whether it did. It is for the caller to write it.
    pub(super) fn push(&self, position: i64, frame: &Frame) -> bool {
        let mut queue = self.queue.lock();
        let added = queue.push(position, frame);
        drop(queue);
        self.is_added(added)
    }

    /// Adds the frame of an event and has the stream wait for its turn to be written.
    pub(super) fn push_in_turn(&self, position: i64, frame: &Frame) -> Pushed {
        let mut queue = self.queue.lock();
        let added = queue.push(position, frame);
        let was_listed = added == Ok(true) && std::mem::replace(&mut queue.is_listed, true);
        drop(queue);
        match self.is_added(added) {
            true if was_listed => Pushed::Listed,
            true => Pushed::ToList,
            false => Pushed::Past,
        }
    }

    fn is_added(&self, added: Result<bool, TooFarBehind>) -> bool {
        added.unwrap_or_else(|TooFarBehind| {
            self.end(End::Slow);
            false
        })
    }

    /// Says that the stream lives, unless something is on its way anyway.
    pub(super) fn beat(&self) {
        {
            let mut queue = self.queue.lock();
            if queue.end.is_some() || !queue.frames.is_empty() {
                return;
            }
            let beat = frame::heartbeat().wire(queue.framing);
            queue.add(beat);
        }
        self.write();
    }

    /// From now on frames are written there.
    pub(super) fn write_to(&self, socket: Arc<TcpStream>) {
        self.queue.lock().socket = Some(socket);
        self.write();
    }

    /// Writes what waits, since its turn has come.
    pub(super) fn take_turn(&self) {
        let mut queue = self.queue.lock();
        queue.is_listed = false;
        let is_done = queue.write();
        drop(queue);
        if !is_done {
            self.attention.notify_one();
        }
    }

    /// Writes what waits, as far as the socket takes it now. Its task is told when something is left or wrong.
    pub(super) fn write(&self) {
        let is_done = self.queue.lock().write();
        if !is_done {
            self.attention.notify_one();
        }
    }

    /// The socket takes something again.
    pub(super) fn unblock(&self) {
        self.queue.lock().is_blocked = false;
        self.write();
    }

    /// While something waits for the socket: how many bytes were written so far.
    pub(super) fn blocked(&self) -> Option<u64> {
        let queue = self.queue.lock();
        queue.is_blocked.then_some(queue.written)
    }

    /// Why it ended, if it did.
    ///
    /// # Errors
    /// [`Broken`] when its client has gone.
    pub(super) fn state(&self) -> Result<Option<End>, Broken> {
        let queue = self.queue.lock();
        match queue.is_broken {
            true => Err(Broken),
            false => Ok(queue.end),
        }
    }

    /// Why it ended by our doing, if it did.
    pub(super) fn ended(&self) -> Option<End> {
        self.queue.lock().end
    }

    /// Waits until its task has to look.
    pub(super) async fn attention(&self) {
        self.attention.notified().await;
    }

    /// Waits until it has ended.
    pub(super) async fn over(&self) {
        while self.ended().is_none() {
            self.attention().await;
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
            // A frame that was written in part is needed for a clean end.
            let begun = if queue.begun > 0 { 1 } else { 0 };
            queue.frames.truncate(begun);
            queue.frames.shrink_to_fit();
            queue.bytes = 0;
        }
        self.attention.notify_one();
    }

    /// What is left of a frame that was written in part; nobody writes after that.
    pub(super) fn rest_of_a_frame(&self) -> Vec<u8> {
        let mut queue = self.queue.lock();
        let begun = std::mem::take(&mut queue.begun);
        queue
            .frames
            .pop_front()
            .map_or_else(Vec::new, |frame| frame[begun..].to_vec())
    }
}

/// More would wait for a reader than may.
#[derive(Debug, PartialEq, Eq)]
struct TooFarBehind;

impl Queue {
    fn push(&mut self, position: i64, frame: &Frame) -> Result<bool, TooFarBehind> {
        if position <= self.seen || self.end.is_some() {
            return Ok(false);
        }
        self.seen = position;
        let bytes = frame.wire(self.framing);
        if self.bytes + bytes.len() > WAITING_BYTES_MAX {
            return Err(TooFarBehind);
        }
        self.add(bytes);
        Ok(true)
    }

    fn add(&mut self, frame: Bytes) {
        self.bytes += frame.len();
        self.frames.push_back(frame);
    }

    /// Whether there is nothing for anybody to do.
    fn write(&mut self) -> bool {
        if self.end.is_some() || self.is_broken {
            return false;
        }
        let Some(socket) = self.socket.clone() else { return true };
        while !self.is_blocked
            && let Some(frame) = self.frames.front()
        {
            let left = frame.len() - self.begun;
            match socket.try_write(&frame[self.begun..]) {
                Ok(count) => {
                    self.bytes -= count;
                    self.written += count as u64;
                    self.begun += count;
                    if count == left {
                        self.frames.pop_front();
                        self.begun = 0;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.is_blocked = true,
                Err(_) => {
                    self.is_broken = true;
                    self.frames = VecDeque::new();
                    self.bytes = 0;
                    return false;
                }
            }
        }
        if self.frames.is_empty() && self.frames.capacity() > PLACES_KEPT {
            self.frames.shrink_to(PLACES_KEPT);
        }
        !self.is_blocked
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;
    use tokio::net::TcpListener;

    use super::*;

    fn session() -> Session {
        Session::new(1, Audience::Anyone, Vec::new(), 0, 0)
    }

    fn frame(text: &str) -> Frame {
        Frame::of(text.to_owned())
    }

    async fn pair() -> (Arc<TcpStream>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let reader = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (Arc::new(listener.accept().await.unwrap().0), reader)
    }

    #[tokio::test]
    async fn each_event_is_written_once_whoever_offers_it_again() {
        let session = session();
        session.frame_as(Framing::Close);
        session.begin_after(5);
        assert!(!session.push(5, &frame("history")));
        assert!(session.push(6, &frame("six ")));
        assert!(!session.push(6, &frame("six again ")));
        assert_eq!(session.push_in_turn(8, &frame("eight ")), Pushed::ToList);
        let (socket, mut reader) = pair().await;
        session.write_to(socket);
        assert_eq!(
            session.push_in_turn(9, &frame("nine ")),
            Pushed::Listed,
            "one turn is enough for both"
        );
        session.take_turn();
        assert_eq!(session.push_in_turn(10, &frame("ten")), Pushed::ToList);
        assert_eq!(session.push_in_turn(10, &frame("ten")), Pushed::Past);
        session.take_turn();
        let mut read = [0; 18];
        reader.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"six eight nine ten");
        assert_eq!(session.queue.lock().bytes, 0);
    }

    #[tokio::test]
    async fn a_reader_that_falls_behind_by_a_mebibyte_is_ended_and_holds_nothing() {
        let session = session();
        let quarter = frame(&"x".repeat(WAITING_BYTES_MAX / 4 - 16));
        for position in 1..=4 {
            session.push(position, &quarter);
        }
        assert_eq!(session.ended(), None);
        session.push(5, &quarter);
        assert_eq!(session.ended(), Some(End::Slow));
        assert_eq!(session.queue.lock().frames.capacity(), 0);
        session.end(End::Stopping);
        assert_eq!(session.ended(), Some(End::Slow), "the first reason stands");
        session.over().await;
    }

    #[tokio::test]
    async fn what_a_socket_does_not_take_waits_and_an_end_comes_behind_the_frame_that_was_begun() {
        let (socket, mut reader) = pair().await;
        let session = session();
        session.frame_as(Framing::Close);
        session.write_to(Arc::clone(&socket));
        let big = frame(&"y".repeat(300_000));
        let mut position = 0;
        while session.blocked().is_none() {
            position += 1;
            session.push(position, &big);
            session.write();
            assert!(position < 100, "a socket takes something, and not all");
            assert_eq!(session.ended(), None);
        }
        let waiting = session.queue.lock().bytes;
        assert!(waiting > 0);
        session.end(End::Stopping);
        let rest = session.rest_of_a_frame();
        let written = usize::try_from(session.queue.lock().written).unwrap();
        assert!(
            rest.len() < 300_000 && (written + rest.len()).is_multiple_of(300_000),
            "whole frames"
        );
        let mut read = vec![0; written];
        reader.read_exact(&mut read).await.unwrap();
        assert!(read.iter().all(|byte| *byte == b'y'));
    }

    #[tokio::test]
    async fn a_client_that_went_is_noticed_by_the_next_frames() {
        let (socket, reader) = pair().await;
        let session = session();
        session.write_to(socket);
        drop(reader);
        for position in 1.. {
            session.push(position, &frame("z"));
            session.write();
            if session.state() == Err(Broken) {
                break;
            }
            tokio::task::yield_now().await;
        }
        assert_eq!(session.ended(), None, "not by our doing");
    }
}
