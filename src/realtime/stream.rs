//! One stream on its socket, from the head of its answer to its end.
//!
//! It is written past the HTTP server: ten thousand idle streams hold no buffers of a server, and an event goes from the
//! log into each socket without waking anybody. A task of its own only does what has to wait: history, a reader that is
//! slow, heartbeats, and the end.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use socket2::SockRef;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout};

use super::frame::{self, Frame};
use super::hub::{Hub, Slot};
use super::session::{End, Session};
use crate::telemetry;

/// Heartbeats in a row that a reader may leave where they are, and the least time that it has.
const HEARTBEATS_LEFT: u32 = 4;
const PATIENCE_MIN: Duration = Duration::from_secs(5);
/// How long the last bytes may take.
const LAST_BYTES_MAX: Duration = Duration::from_millis(500);
/// What a peer sends on its stream is thrown away, so much at a time.
const IGNORED_BYTES: usize = 256;

/// A stream that has been granted, before anything of it is sent.
pub struct Stream {
    hub: Arc<Hub>,
    session: Arc<Session>,
    opening: Frame,
    /// What it gets before it is live.
    replay: BoxStream<'static, Frame>,
    /// When what it was opened with ends.
    ends_at: Option<Instant>,
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
            _slot: slot,
        }
    }

    /// Writes the head of the answer and serves the stream to its end.
    pub async fn serve(mut self, mut socket: TcpStream, mut head: Vec<u8>, framing: Framing) {
        self.notice_when_it_vanishes(&socket);
        self.session.frame_as(framing);
        head.extend_from_slice(&self.opening.wire(framing));
        if let Some(socket) = self.replay(&mut socket, head, framing).await.then_some(socket) {
            self.live(socket, framing).await;
        }
    }

    /// Has the system say so when the client acknowledges nothing any more.
    #[cfg(target_os = "linux")]
    fn notice_when_it_vanishes(&self, socket: &TcpStream) {
        // The system counts a reader that takes nothing among those: it has its patience first.
        let vanished = self.patience() + self.hub.settings.heartbeat;
        if let Err(error) = SockRef::from(socket).set_tcp_user_timeout(Some(vanished)) {
            tracing::debug!("a stream notices late when its client vanishes: {error}");
        }
    }

    /// Other systems have no such setting; there a reader that takes nothing is noticed when its socket is full.
    #[cfg(not(target_os = "linux"))]
    fn notice_when_it_vanishes(&self, _socket: &TcpStream) {}

    /// Writes what comes before the live part; false when the stream is over.
    async fn replay(&mut self, socket: &mut TcpStream, head: Vec<u8>, framing: Framing) -> bool {
        let mut next: Option<Bytes> = Some(head.into());
        while let Some(bytes) = next.take() {
            let written = tokio::select! {
                biased;
                written = timeout(self.patience(), socket.write_all(&bytes)) => written,
                () = self.session.over_for(LAST_BYTES_MAX) => return false,
            };
            match written {
                Ok(Ok(())) => {}
                Ok(Err(_left)) => return false,
                Err(_elapsed) => {
                    self.session.end(End::Slow);
                    return false;
                }
            }
            let ends_at = self.ends_at;
            next = tokio::select! {
                biased;
                () = self.session.over() => None,
                () = async { sleep_until(ends_at.unwrap_or_else(Instant::now)).await }, if ends_at.is_some() => {
                    self.session.end(End::Expired);
                    None
                }
                frame = self.replay.next() => frame.map(|frame| frame.wire(framing)),
            };
        }
        // History is behind it; what it held for that is free.
        self.replay = futures_util::stream::empty().boxed();
        true
    }

    async fn live(&mut self, socket: TcpStream, framing: Framing) {
        let socket = Arc::new(socket);
        self.session.write_to(Arc::clone(&socket));
        match self.attend(&socket).await {
            Over::Left => {}
            // Whoever is hung up on would not read an end either.
            Over::Ended if self.session.ended() == Some(End::Slow) => {
                let _ = SockRef::from(&*socket).set_linger(Some(Duration::ZERO));
            }
            Over::Ended if framing == Framing::Chunked => {
                let _ = timeout(LAST_BYTES_MAX, self.finish(&socket)).await;
            }
            Over::Ended => {}
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
                gone = left(socket) => {
                    if gone {
                        return Over::Left;
                    }
                }
            }
            match self.session.state() {
                Ok(None) => {}
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
        let mut last = &last[..];
        while !last.is_empty() {
            socket.writable().await?;
            match socket.try_write(last) {
                Ok(count) => last = &last[count..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
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

/// Waits until the peer says something or goes; true when it has gone.
async fn left(socket: &TcpStream) -> bool {
    if socket.readable().await.is_err() {
        return true;
    }
    let mut ignored = [0; IGNORED_BYTES];
    match socket.try_read(&mut ignored) {
        Ok(0) => true,
        Ok(_) => false,
        Err(error) => error.kind() != io::ErrorKind::WouldBlock,
    }
}
