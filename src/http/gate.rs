//! What stands between a socket and the HTTP parser: deadlines, and a look at the head before it is parsed.
//!
//! The parser drops a `Content-Length` that comes beside a `Transfer-Encoding` without saying so, and has one timer for
//! idle connections and slow heads alike. So the gate hands it one head at a time and remembers what that head held.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use axum::http::{HeaderMap, HeaderValue};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep, sleep_until};

/// Time for one head, from its first byte (for the first head of a connection: from the accept).
pub(super) const HEAD_DEADLINE: Duration = Duration::from_secs(15);
/// Time a write may wait for the peer to take anything at all.
const WRITE_DEADLINE: Duration = Duration::from_secs(60);
/// Time a refused peer gets to stop sending, so that it can read the answer before the connection goes.
const LINGER: Duration = Duration::from_secs(1);
/// Bytes read and thrown away in that time.
const LINGER_BYTES: usize = 4 * 1024 * 1024;
/// Bytes read from the socket at once while a head is looked for.
const READ_SIZE: usize = 8 * 1024;

/// What the request line and headers say about where the body ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Framing {
    /// Nothing follows the head.
    None,
    /// As many bytes.
    Length(u64),
    /// Chunks. The connection is closed after the answer.
    Chunked,
}

/// Why a request is refused before it reaches a route.
pub(super) const CONTRADICTION: &str =
    "the request must say where its body ends once: Content-Length, or Transfer-Encoding: chunked";

/// The service's side of a gate: it learns of each head and says how the body is framed.
#[derive(Clone)]
pub(super) struct Gatekeeper(Arc<Mutex<State>>);

impl Gatekeeper {
    /// Called once for each parsed head. `Err` when the head frames its body twice, or in a way we do not read.
    pub(super) fn framing(&self, headers: &HeaderMap) -> Result<Framing, &'static str> {
        let mut state = self.0.lock();
        let head = std::mem::take(&mut state.head);
        let framing = framing(headers, head.saw_length);
        state.mode = match framing {
            Ok(Framing::None) => Mode::Head,
            Ok(Framing::Length(length)) => Mode::Body(length),
            Ok(Framing::Chunked) | Err(_) => Mode::Rest,
        };
        framing
    }

    /// Whether some of the body of the request under way has not been taken from the gate.
    pub(super) fn owes_body(&self) -> bool {
        matches!(self.0.lock().mode, Mode::Body(_))
    }
}

fn framing(headers: &HeaderMap, saw_length: bool) -> Result<Framing, &'static str> {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => {
            let length = headers.get(CONTENT_LENGTH).map(HeaderValue::to_str);
            let length = length.map(|text| text.ok().and_then(|text| text.trim().parse().ok()).ok_or(CONTRADICTION));
            Ok(match length.transpose()? {
                None | Some(0) => Framing::None,
                Some(length) => Framing::Length(length),
            })
        }
        (Some(coding), None) if !saw_length && coding.as_bytes().eq_ignore_ascii_case(b"chunked") => {
            Ok(Framing::Chunked)
        }
        (Some(_), _) => Err(CONTRADICTION),
    }
}

struct State {
    mode: Mode,
    head: Head,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Between requests, or inside a head.
    Head,
    /// A whole head has been handed over and not yet been answered for.
    HandedOver,
    /// As many bytes of a body are still to come.
    Body(u64),
    /// The rest of the connection belongs to this request.
    Rest,
}

/// What has been seen of the head under way.
#[derive(Debug, Default)]
struct Head {
    started: bool,
    saw_length: bool,
    /// The start of the current line, as far as a header name matters.
    line: Vec<u8>,
}

impl Head {
    /// Takes one byte; true when it ends the head.
    fn ends_with(&mut self, byte: u8) -> bool {
        const NAME: &[u8] = b"content-length:";
        match byte {
            b'\n' => {
                // Empty lines before a request line are skipped, as the parser skips them.
                let ends = self.started && self.line.is_empty();
                self.saw_length |= self.line.eq_ignore_ascii_case(NAME);
                self.line.clear();
                ends
            }
            b'\r' => false,
            _ => {
                self.started = true;
                if self.line.len() < NAME.len() {
                    self.line.push(byte);
                }
                false
            }
        }
    }
}

/// A socket behind its gate.
pub(super) struct Gate<S> {
    io: S,
    state: Arc<Mutex<State>>,
    /// Read from the socket, not yet handed over: `held[at..]`.
    held: Vec<u8>,
    at: usize,
    /// Runs while a head is under way.
    head_deadline: Option<Pin<Box<Sleep>>>,
    /// Runs while a write waits.
    write_deadline: Option<Pin<Box<Sleep>>>,
    linger: Option<Linger>,
    ended: bool,
}

struct Linger {
    until: Pin<Box<Sleep>>,
    bytes_left: usize,
}

impl<S> Gate<S> {
    pub(super) fn new(io: S) -> (Self, Gatekeeper) {
        let state = Arc::new(Mutex::new(State {
            mode: Mode::Head,
            head: Head::default(),
        }));
        let gate = Self {
            io,
            state: state.clone(),
            held: Vec::new(),
            at: 0,
            head_deadline: Some(Box::pin(sleep(HEAD_DEADLINE))),
            write_deadline: None,
            linger: None,
            ended: false,
        };
        (gate, Gatekeeper(state))
    }

    /// Moves held bytes to `buf`, as many as the mode allows.
    fn hand_over(&mut self, buf: &mut ReadBuf<'_>) -> io::Result<()> {
        let mut state = self.state.lock();
        let held = &self.held[self.at..];
        let room = held.len().min(buf.remaining());
        let count = match state.mode {
            Mode::Head => {
                let end = held[..room].iter().position(|&byte| state.head.ends_with(byte));
                if end.is_some() {
                    state.mode = Mode::HandedOver;
                    self.head_deadline = None;
                } else if state.head.started && self.head_deadline.is_none() {
                    self.head_deadline = Some(Box::pin(sleep_until(Instant::now() + HEAD_DEADLINE)));
                }
                end.map_or(room, |end| end + 1)
            }
            Mode::HandedOver => return Err(disagreement()),
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
            self.at = 0;
        }
        Ok(())
    }
}

/// The mode once `count` of the `left` bytes of a body have been handed over.
fn after(left: u64, count: usize) -> Mode {
    match left.saturating_sub(count as u64) {
        0 => Mode::Head,
        left => Mode::Body(left),
    }
}

/// The parser did not see the end of the head where we did. Guessing who is right is how requests are smuggled.
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
        if this.at < this.held.len() {
            return Poll::Ready(this.hand_over(buf));
        }
        let (before, limit) = match mode {
            Mode::HandedOver => return Poll::Ready(Err(disagreement())),
            Mode::Rest => return this.read_through(cx, buf, usize::MAX),
            Mode::Body(left) => (left, usize::try_from(left).unwrap_or(usize::MAX)),
            Mode::Head => {
                if expired(&mut this.head_deadline, cx) {
                    return Poll::Ready(Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        "the head did not arrive in time",
                    )));
                }
                let mut bytes = [0_u8; READ_SIZE];
                let mut read = ReadBuf::new(&mut bytes);
                ready!(Pin::new(&mut this.io).poll_read(cx, &mut read))?;
                this.ended |= read.filled().is_empty();
                this.held.extend_from_slice(read.filled());
                return Poll::Ready(this.hand_over(buf));
            }
        };
        let filled = buf.filled().len();
        ready!(this.read_through(cx, buf, limit))?;
        this.state.lock().mode = after(before, buf.filled().len() - filled);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + Unpin> Gate<S> {
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
        !self.ended && (state.mode != Mode::Head || state.head.started)
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

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
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
    /// Fails a write that has waited too long for a peer that takes nothing.
    fn timed(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.write_deadline = None;
            return written;
        }
        self.write_deadline
            .get_or_insert_with(|| Box::pin(sleep(WRITE_DEADLINE)));
        if expired(&mut self.write_deadline, cx) {
            return Poll::Ready(Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the peer does not read its answer",
            )));
        }
        Poll::Pending
    }
}
