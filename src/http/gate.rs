//! What stands between a socket and the HTTP server: deadlines, and one judged head at a time.
//!
//! The server answers what it cannot parse without a word of ours, drops a `Content-Length` beside a
//! `Transfer-Encoding` without saying so, and has one timer for idle connections and slow heads alike. So the gate
//! holds each head until it is whole and judged. In place of a refused one it hands over [`STAND_IN`]: the refusal is
//! then an answer like any other, after those of the requests before it.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::http::HeaderMap;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

use super::arriving::{Budget, Share};
use super::head::{self, Framing, Scan};
use crate::problem::ApiError;

/// Time for one head, from its first byte (for the first head of a connection: from the accept).
pub(super) const HEAD_DEADLINE: Duration = Duration::from_secs(15);
/// Time in which a peer that lets an answer wait must have taken all of it, and what it gains by taking some: one second
/// for so many bytes, as long as it has no more than the time again.
const WRITE_DEADLINE: Duration = Duration::from_secs(60);
const WRITE_BYTES_PER_S: usize = 16 * 1024;
/// Time a refused peer gets to stop sending, so that it can read the answer before the connection goes.
const LINGER: Duration = Duration::from_secs(1);
/// Bytes read and thrown away in that time.
const LINGER_BYTES: usize = 4 * 1024 * 1024;
/// Bytes read from the socket at once while a head is looked for.
const READ_SIZE: usize = 8 * 1024;

/// What the heads that are on their way may hold in all, however many connections there are.
pub(super) static HEADS: Budget = Budget::new(32 * 1024 * 1024);
/// Bytes of a head that are not counted: an ordinary one is smaller, and ten thousand of them fit beside all else.
const UNCOUNTED: usize = 4 * 1024;

/// What the server reads in place of a head that was refused.
const STAND_IN: &[u8] = b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n";
/// The same where the answer must have no body.
const STAND_IN_HEAD: &[u8] = b"HEAD / HTTP/1.1\r\nConnection: close\r\n\r\n";

/// Why a request goes to no route.
#[derive(Debug)]
pub(super) struct Refusal {
    /// What it is answered with.
    pub(super) error: ApiError,
    /// Its ids, as far as they could be read.
    pub(super) ids: HeaderMap,
}

/// The service's side of a gate: it learns what was found out about each head.
#[derive(Clone)]
pub(super) struct Gatekeeper(Arc<Mutex<State>>, Arc<AtomicBool>);

impl Gatekeeper {
    /// Called once for each head that the server has parsed.
    pub(super) fn verdict(&self) -> Result<Framing, Box<Refusal>> {
        let mut state = self.0.lock();
        let verdict = match state.mode {
            Mode::Handing(0) => state.verdict.take(),
            _ => None,
        };
        // The server saw the end of the head elsewhere than we did.
        let verdict = verdict.unwrap_or_else(|| {
            Err(Box::new(Refusal {
                error: head::unclear_end(),
                ids: HeaderMap::new(),
            }))
        });
        state.mode = match verdict {
            Ok(Framing::None) => Mode::Head,
            Ok(Framing::Length(length)) => Mode::Body(length),
            Ok(Framing::Chunked) => Mode::Rest,
            Err(_) => Mode::Closed,
        };
        verdict
    }

    /// Whether everything that was given to be sent is on its way.
    pub(super) fn has_written_all(&self) -> bool {
        self.1.load(Ordering::Relaxed)
    }

    /// Whether some of the body of the request under way has not been taken from the gate.
    pub(super) fn owes_body(&self) -> bool {
        matches!(self.0.lock().mode, Mode::Body(_))
    }
}

struct State {
    mode: Mode,
    scan: Scan,
    /// About the head being handed over.
    verdict: Option<Result<Framing, Box<Refusal>>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Between requests, or inside a head.
    Head,
    /// As many bytes of a whole head are still to be handed over; none when its verdict has not been asked for yet.
    Handing(usize),
    /// As many bytes of a body are still to come.
    Body(u64),
    /// The rest of the connection belongs to this request.
    Rest,
    /// Nothing more of this connection is a request.
    Closed,
}

/// A socket behind its gate.
pub(super) struct Gate<S> {
    io: S,
    state: Arc<Mutex<State>>,
    /// Read from the socket, not yet handed over: `held[at..]`.
    held: Vec<u8>,
    at: usize,
    /// Where heads are counted, and what a large one under way holds of it.
    heads: &'static Budget,
    share: Option<Share<'static>>,
    /// Nothing waits to be written.
    has_written_all: Arc<AtomicBool>,
    /// Runs while a head is under way.
    head_deadline: Option<Pin<Box<Sleep>>>,
    /// Runs from a write that waits until all is written.
    write_deadline: Option<Pin<Box<Sleep>>>,
    /// Bytes taken in that time which have not made it longer yet.
    taken: usize,
    linger: Option<Linger>,
    ended: bool,
}

struct Linger {
    until: Pin<Box<Sleep>>,
    bytes_left: usize,
}

impl<S> Gate<S> {
    /// `heads` bounds what heads may hold until they are whole.
    pub(super) fn new(io: S, heads: &'static Budget) -> (Self, Gatekeeper) {
        let state = Arc::new(Mutex::new(State {
            mode: Mode::Head,
            scan: Scan::default(),
            verdict: None,
        }));
        let gate = Self {
            io,
            state: state.clone(),
            held: Vec::new(),
            at: 0,
            heads,
            share: None,
            has_written_all: Arc::new(AtomicBool::new(true)),
            head_deadline: Some(Box::pin(sleep(HEAD_DEADLINE))),
            write_deadline: None,
            taken: 0,
            linger: None,
            ended: false,
        };
        let keeper = Gatekeeper(state, Arc::clone(&gate.has_written_all));
        (gate, keeper)
    }

    /// The socket. What was read from it and not handed over is gone.
    pub(super) fn into_inner(self) -> S {
        self.io
    }

    /// Looks at the held bytes of a head; true when it is ready to be handed over.
    fn judge(&mut self) -> bool {
        let mut state = self.state.lock();
        let held = &self.held[self.at..];
        let (length, framing) = match state.scan.head(held) {
            Ok(None) => {
                if state.scan.started && self.head_deadline.is_none() {
                    self.head_deadline = Some(Box::pin(sleep(HEAD_DEADLINE)));
                }
                return false;
            }
            Ok(Some(found)) => found,
            Err(error) => {
                drop(state);
                self.refuse(error);
                return true;
            }
        };
        *state = State {
            mode: Mode::Handing(length),
            scan: Scan::default(),
            verdict: Some(Ok(framing)),
        };
        drop(state);
        self.end_head();
        true
    }

    /// Hands over a stand-in for the head under way.
    fn refuse(&mut self, error: ApiError) {
        let held = &self.held[self.at..];
        let ids = head::ids(held);
        let is_head = held.trim_ascii_start().starts_with(b"HEAD ");
        let stand_in = if is_head { STAND_IN_HEAD } else { STAND_IN };
        self.held = stand_in.to_vec();
        self.at = 0;
        *self.state.lock() = State {
            mode: Mode::Handing(stand_in.len()),
            scan: Scan::default(),
            verdict: Some(Err(Box::new(Refusal { error, ids }))),
        };
        self.end_head();
    }

    fn end_head(&mut self) {
        self.head_deadline = None;
        self.share = None;
    }

    /// Counts what is held of a head that is not whole.
    fn count(&mut self) {
        if let Some(counted @ 1..) = self.held.capacity().checked_sub(UNCOUNTED) {
            let heads = self.heads;
            self.share.get_or_insert_with(|| heads.share()).hold(counted);
        }
    }

    /// Moves held bytes to `buf`, as many as the mode allows.
    fn hand_over(&mut self, buf: &mut ReadBuf<'_>) {
        let mut state = self.state.lock();
        let held = &self.held[self.at..];
        let room = held.len().min(buf.remaining());
        let count = match state.mode {
            Mode::Head | Mode::Closed => 0,
            Mode::Handing(left) => {
                let count = room.min(left);
                state.mode = Mode::Handing(left - count);
                count
            }
            Mode::Body(left) => {
                let count = room.min(usize::try_from(left).unwrap_or(usize::MAX));
                state.mode = after(left, count);
                count
            }
            Mode::Rest => room,
        };
        buf.put_slice(&held[..count]);
        self.at += count;
        if self.at == self.held.len() {
            self.held.clear();
            self.held.shrink_to(READ_SIZE);
            self.at = 0;
        }
    }
}

/// The mode once `count` of the `left` bytes of a body have been handed over.
fn after(left: u64, count: usize) -> Mode {
    match left.saturating_sub(count as u64) {
        0 => Mode::Head,
        left => Mode::Body(left),
    }
}

/// The server asks for more though it has a whole head: it did not see the end of it where we did.
fn disagreement() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the head has no clear end")
}

fn expired(deadline: &mut Option<Pin<Box<Sleep>>>, cx: &mut Context<'_>) -> bool {
    deadline
        .as_mut()
        .is_some_and(|deadline| deadline.as_mut().poll(cx).is_ready())
}

impl<S: AsyncRead + Unpin> AsyncRead for Gate<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let mode = this.state.lock().mode;
        let (before, limit) = match mode {
            Mode::Head => {
                ready!(this.poll_head(cx))?;
                this.hand_over(buf);
                return Poll::Ready(Ok(()));
            }
            Mode::Handing(0) => return Poll::Ready(Err(disagreement())),
            // The answer is being written, and the end of the connection comes after it.
            Mode::Closed => return Poll::Pending,
            Mode::Handing(_) | Mode::Body(_) | Mode::Rest if this.at < this.held.len() => {
                this.hand_over(buf);
                return Poll::Ready(Ok(()));
            }
            Mode::Handing(_) => return Poll::Ready(Err(disagreement())),
            Mode::Rest => return this.read_through(cx, buf, usize::MAX),
            Mode::Body(left) => (left, usize::try_from(left).unwrap_or(usize::MAX)),
        };
        let filled = buf.filled().len();
        ready!(this.read_through(cx, buf, limit))?;
        this.state.lock().mode = after(before, buf.filled().len() - filled);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + Unpin> Gate<S> {
    /// Reads until a head is ready to be handed over, or the peer has ended.
    fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.judge() {
            self.count();
            if self.share.as_ref().is_some_and(|share| share.poll_told(cx).is_ready()) {
                self.refuse(ApiError::unavailable(
                    "too many large request heads are arriving at once",
                ));
                break;
            }
            if expired(&mut self.head_deadline, cx) {
                let late = io::Error::new(io::ErrorKind::TimedOut, "the head did not arrive in time");
                return Poll::Ready(Err(late));
            }
            let mut bytes = [0_u8; READ_SIZE];
            let mut read = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut self.io).poll_read(cx, &mut read))?;
            if read.filled().is_empty() {
                self.ended = true;
                break;
            }
            // What was handed over makes room, or a pipelining peer would have us hold all it ever sent.
            self.held.drain(..self.at);
            self.at = 0;
            self.held.reserve_exact(read.filled().len());
            self.held.extend_from_slice(read.filled());
        }
        Poll::Ready(Ok(()))
    }

    /// Reads at most `limit` bytes straight into `buf`.
    fn read_through(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>, limit: usize) -> Poll<io::Result<()>> {
        let filled = {
            let size = buf.remaining().min(limit);
            let mut part = ReadBuf::new(buf.initialize_unfilled_to(size));
            ready!(Pin::new(&mut self.io).poll_read(cx, &mut part))?;
            part.filled().len()
        };
        buf.advance(filled);
        self.ended |= filled == 0;
        Poll::Ready(Ok(()))
    }

    /// Whether the peer may still be sending something that nobody will read.
    fn is_unread(&self) -> bool {
        let state = self.state.lock();
        !self.ended && (state.mode != Mode::Head || state.scan.started)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Gate<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, buf);
        self.timed(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.timed(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    /// The server flushes when it has nothing left to write.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.write_deadline = None;
        self.has_written_all.store(true, Ordering::Relaxed);
        Pin::new(&mut self.io).poll_flush(cx)
    }

    /// Ends our half, then reads what a refused peer is still sending: closing on unread bytes resets the connection,
    /// and the peer would lose the answer.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.linger.is_none() {
            ready!(Pin::new(&mut this.io).poll_shutdown(cx))?;
            this.linger = Some(Linger {
                until: Box::pin(sleep(LINGER)),
                bytes_left: LINGER_BYTES,
            });
        }
        if !this.is_unread() {
            return Poll::Ready(Ok(()));
        }
        let Gate {
            io,
            linger: Some(linger),
            ..
        } = this
        else {
            return Poll::Ready(Ok(()));
        };
        let mut bytes = [0_u8; READ_SIZE];
        while linger.until.as_mut().poll(cx).is_pending() && linger.bytes_left > 0 {
            let mut read = ReadBuf::new(&mut bytes);
            match ready!(Pin::new(&mut *io).poll_read(cx, &mut read)) {
                Ok(()) if !read.filled().is_empty() => {
                    linger.bytes_left = linger.bytes_left.saturating_sub(read.filled().len());
                }
                Ok(()) | Err(_) => break,
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<S> Gate<S> {
    /// Fails a write that has waited too long for a peer that takes nothing, or next to nothing.
    fn timed(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        self.has_written_all.store(false, Ordering::Relaxed);
        if let Poll::Ready(result) = written {
            if let (Ok(bytes), Some(deadline)) = (&result, &mut self.write_deadline) {
                self.taken += bytes;
                let gained = Duration::from_secs((self.taken / WRITE_BYTES_PER_S) as u64);
                self.taken %= WRITE_BYTES_PER_S;
                let latest = Instant::now() + WRITE_DEADLINE;
                let until = deadline.deadline() + gained;
                deadline.as_mut().reset(until.min(latest));
            }
            return Poll::Ready(result);
        }
        if self.write_deadline.is_none() {
            self.write_deadline = Some(Box::pin(sleep(WRITE_DEADLINE)));
            self.taken = 0;
        }
        if expired(&mut self.write_deadline, cx) {
            return Poll::Ready(Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the peer does not read its answer",
            )));
        }
        Poll::Pending
    }
}
