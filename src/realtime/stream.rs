//! One stream on its socket, from the head of its answer to its end.
//!
//! It is written past the HTTP server: ten thousand idle streams hold no buffers of a server, and an event goes from the
//! log into each socket without waking anybody. A task of its own only does what has to wait: history, a reader that is
//! slow, heartbeats, and the end.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::frame::{self, Frame};
use super::hub::{Hub, Slot};
use super::session::{End, Session};
use crate::telemetry;

/// Heartbeats in a row that a reader may leave where they are, and the least time that it has.
const HEARTBEATS_LEFT: u32 = 4;
const PATIENCE_MIN: Duration = Duration::from_secs(5);
/// How long the last bytes may take.
const LAST_BYTES_MAX: Duration = Duration::from_millis(500);
/// What a peer sends on its stream is thrown away, so much at a time and so much in all.
const IGNORED_AT_A_TIME: usize = 256;
const IGNORED_MAX: usize = 64 * 1024;
/// Bytes that the system keeps for a reader, besides those that wait in the session. Linux keeps twice as many, and
/// several mebibytes where nothing is said.
const SYSTEM_BUFFER: usize = 128 * 1024;

/// A stream that has been granted, before anything of it is sent.
pub struct Stream {
    hub: Arc<Hub>,
    session: Arc<Session>,
    opening: Frame,
    /// What it gets before it is live.
    replay: BoxStream<'static, Frame>,
    /// When what it was opened with ends.
    ends_at: Option<Instant>,
    /// Bytes that its peer has sent.
    ignored: usize,
    _slot: Slot,
}

/// How the body of an answer is told from what follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// In chunks, of which the last is empty (HTTP/1.1).
    Chunked,
    /// By the end of the connection (HTTP/1.0).
    Close,
}

/// Why a stream is over.
enum Over {
    /// By our doing: the last chunk is written.
    Ended,
    /// By our doing, and its client would not read an end.
    Cut,
    /// Its client has gone.
    Left,
}

impl Stream {
    pub(super) fn new(
        hub: Arc<Hub>,
        session: Arc<Session>,
        opening: Frame,
        replay: BoxStream<'static, Frame>,
        ends_at: Option<Instant>,
        slot: Slot,
    ) -> Self {
        Self {
            hub,
            session,
            opening,
            replay,
            ends_at,
            ignored: 0,
            _slot: slot,
        }
    }

    /// Writes the head of the answer and serves the stream to its end.
    pub async fn serve(mut self, socket: TcpStream, mut head: Vec<u8>, framing: Framing) {
        self.bound(&socket);
        self.session.frame_as(framing);
        head.extend_from_slice(&self.opening.wire(framing));
        match self.replay(&socket, head.into(), framing).await {
            Some(over) => Self::end(over, &socket),
            None => self.live(socket, framing).await,
        }
    }

    /// Bounds what the system does for the stream: the bytes it keeps, and the time until it says that the client
    /// acknowledges nothing any more.
    fn bound(&self, socket: &TcpStream) {
        let socket = SockRef::from(socket);
        let buffer = socket.set_send_buffer_size(SYSTEM_BUFFER);
        // The system counts a reader that takes nothing among those that vanished: it has its patience first. Other
        // systems have no such setting; there it is noticed when its socket is full.
        #[cfg(target_os = "linux")]
        let vanished = socket.set_tcp_user_timeout(Some(self.patience() + self.hub.settings.heartbeat));
        #[cfg(not(target_os = "linux"))]
        let vanished = Ok(());
        if let Err(error) = buffer.and(vanished) {
            tracing::debug!("a stream costs more than its share when its client stops reading: {error}");
        }
    }

    /// Writes what comes before the live part; answers why the stream is over, if it is.
    async fn replay(&mut self, socket: &TcpStream, head: Bytes, framing: Framing) -> Option<Over> {
        let mut bytes = head;
        loop {
            if let Some(over) = self.write(socket, bytes).await {
                return Some(over);
            }
            match self.next(socket).await {
                Ok(Some(frame)) => bytes = frame.wire(framing),
                Ok(None) => break,
                Err(over) => return Some(over),
            }
        }
        // History is behind it; what it held for that is free.
        self.replay = futures_util::stream::empty().boxed();
        None
    }

    /// Writes bytes as their reader takes them; answers why the stream is over, if it is.
    async fn write(&mut self, socket: &TcpStream, mut bytes: Bytes) -> Option<Over> {
        let (session, patience, ends_at) = (Arc::clone(&self.session), self.patience(), self.ends_at);
        let cut = async {
            over(&session, ends_at).await;
            sleep(LAST_BYTES_MAX).await;
        };
        tokio::pin!(cut);
        while !bytes.is_empty() {
            tokio::select! {
                biased;
                writable = timeout(patience, socket.writable()) => match writable {
                    Ok(Ok(())) => {}
                    Ok(Err(_)) => return Some(Over::Left),
                    Err(_elapsed) => {
                        session.end(End::Slow);
                        return Some(Over::Cut);
                    }
                },
                () = &mut cut => return Some(Over::Cut),
            }
            if write_some(socket, &mut bytes).is_err() {
                return Some(Over::Left);
            }
        }
        None
    }

    /// What comes next before the live part; nothing when that has come, or the stream is over by our doing.
    async fn next(&mut self, socket: &TcpStream) -> Result<Option<Frame>, Over> {
        let session = Arc::clone(&self.session);
        let over = over(&session, self.ends_at);
        let beat = sleep(self.hub.settings.heartbeat);
        tokio::pin!(over, beat);
        loop {
            tokio::select! {
                biased;
                () = &mut over => return Ok(None),
                frame = self.replay.next() => return Ok(frame),
                gone = left(socket, &mut self.ignored) => if gone {
                    return Err(Over::Left);
                },
                // Its reader is told that it lives while the database takes its time.
                () = &mut beat => return Ok(Some(frame::heartbeat())),
            }
        }
    }

    async fn live(&mut self, socket: TcpStream, framing: Framing) {
        let socket = Arc::new(socket);
        self.session.write_to(Arc::clone(&socket));
        match self.attend(&socket).await {
            Over::Ended if framing == Framing::Chunked => {
                let _ = timeout(LAST_BYTES_MAX, self.finish(&socket)).await;
            }
            over => Self::end(over, &socket),
        }
    }

    /// Lets the system keep nothing for a client that is hung up on.
    fn end(over: Over, socket: &TcpStream) {
        if matches!(over, Over::Cut) {
            let _ = SockRef::from(socket).set_linger(Some(Duration::ZERO));
        }
    }

    /// Does what cannot be done in passing, until the stream is over.
    async fn attend(&mut self, socket: &TcpStream) -> Over {
        let (heartbeat, patience) = (self.hub.settings.heartbeat, self.patience());
        // Whoever opened at the same time does not beat at the same time.
        let mut beat_at = Instant::now() + heartbeat.mul_f64(rand::random_range(0.1..1.0));
        let far = beat_at + Duration::from_secs(365 * 86_400);
        let mut blocked_since: Option<(Instant, u64)> = None;
        let timer = sleep_until(beat_at);
        tokio::pin!(timer);
        loop {
            let blocked = self.session.blocked();
            blocked_since = blocked.map(|written| match blocked_since {
                Some((since, before)) if before == written => (since, before),
                _ => (Instant::now(), written),
            });
            let gives_up_at = blocked_since.map_or(far, |(since, _)| since + patience);
            let next = beat_at.min(self.ends_at.unwrap_or(far)).min(gives_up_at);
            if timer.deadline() != next {
                timer.as_mut().reset(next);
            }
            tokio::select! {
                biased;
                () = self.session.attention() => {}
                () = &mut timer => {
                    let now = Instant::now();
                    if self.ends_at.is_some_and(|end| end <= now) {
                        self.session.end(End::Expired);
                    } else if gives_up_at <= now {
                        self.session.end(End::Slow);
                    } else {
                        beat_at = now + heartbeat;
                        self.session.beat();
                    }
                }
                writable = socket.writable(), if blocked.is_some() => match writable {
                    Ok(()) => self.session.unblock(),
                    Err(_) => return Over::Left,
                },
                gone = left(socket, &mut self.ignored) => if gone {
                    return Over::Left;
                },
            }
            match self.session.state() {
                Ok(None) => {}
                Ok(Some(End::Slow)) => return Over::Cut,
                Ok(Some(_)) => return Over::Ended,
                Err(_broken) => return Over::Left,
            }
        }
    }

    /// How long a reader may take nothing of what waits for it.
    fn patience(&self) -> Duration {
        (self.hub.settings.heartbeat * HEARTBEATS_LEFT).max(PATIENCE_MIN)
    }

    /// Writes the last chunk, behind a frame that was written in part.
    async fn finish(&mut self, socket: &TcpStream) -> io::Result<()> {
        let mut last = self.session.rest_of_a_frame();
        last.extend_from_slice(frame::LAST_CHUNK);
        let mut last = Bytes::from(last);
        while !last.is_empty() {
            socket.writable().await?;
            write_some(socket, &mut last)?;
        }
        Ok(())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.hub.leave(&self.session);
        telemetry::stream_ended(self.session.ended());
    }
}

/// Writes as much as the socket takes now, and leaves the rest.
fn write_some(socket: &TcpStream, bytes: &mut Bytes) -> io::Result<()> {
    match socket.try_write(bytes) {
        Ok(count) => bytes.advance(count),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        Err(error) => return Err(error),
    }
    Ok(())
}

/// Waits until the stream is over by our doing, which it is when what it was opened with ends.
async fn over(session: &Session, ends_at: Option<Instant>) {
    tokio::select! {
        () = session.over() => {}
        () = async { sleep_until(ends_at.unwrap_or_else(Instant::now)).await }, if ends_at.is_some() => {
            session.end(End::Expired);
        }
    }
}

/// Waits until the peer says something or goes; true when it has gone, or has said more than anybody need.
async fn left(socket: &TcpStream, ignored: &mut usize) -> bool {
    if socket.readable().await.is_err() {
        return true;
    }
    match socket.try_read(&mut [0; IGNORED_AT_A_TIME]) {
        Ok(0) => true,
        Ok(count) => {
            *ignored += count;
            *ignored > IGNORED_MAX
        }
        Err(error) => error.kind() != io::ErrorKind::WouldBlock,
    }
}
