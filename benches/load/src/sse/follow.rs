//! The reading side of a stream: it looks for the ids of events and for nothing else.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::fault::Fault;
use crate::percentiles::Latency;
use crate::requests::number_of;

/// Where the numbers of narrow events begin.
const NARROW: u64 = 1 << 30;
/// Bytes of an id.
const ID_BYTES: usize = 30;
const BUFFER: usize = 4 * 1024;

/// How many follow an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// All.
    Wide,
    /// A few.
    Narrow,
}

impl Kind {
    /// The number that the event's id carries.
    pub(super) fn tag(self, number: u64) -> u64 {
        match self {
            Self::Wide => number,
            Self::Narrow => NARROW + number,
        }
    }
}

/// When frames came.
#[derive(Debug)]
pub(super) struct Arrivals {
    start: Instant,
    wide: Vec<Event>,
    narrow: Vec<Event>,
    frames: AtomicU64,
}

#[derive(Debug, Default)]
struct Event {
    committed_us: AtomicU64,
    last_us: AtomicU64,
    count: AtomicU32,
}

impl Arrivals {
    pub(super) fn new(wide: u64, narrow: u64) -> Self {
        let events = |count| (0..count).map(|_| Event::default()).collect();
        Self {
            start: Instant::now(),
            wide: events(wide),
            narrow: events(narrow),
            frames: AtomicU64::new(0),
        }
    }

    pub(super) fn frames(&self) -> u64 {
        self.frames.load(Ordering::Relaxed)
    }

    /// The publisher has its answer.
    pub(super) fn committed(&self, kind: Kind, number: u64, at: Instant) {
        if let Some(event) = self.events(kind).get(number as usize) {
            event.committed_us.store(self.us(at), Ordering::Relaxed);
        }
    }

    fn arrived(&self, tag: u64, at: Instant) {
        let (kind, number) = if tag >= NARROW {
            (Kind::Narrow, tag - NARROW)
        } else {
            (Kind::Wide, tag)
        };
        if let Some(event) = self.events(kind).get(number as usize) {
            event.last_us.fetch_max(self.us(at), Ordering::Relaxed);
            event.count.fetch_add(1, Ordering::Relaxed);
            self.frames.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// From the answer to its publisher until the last follower has an event, of those that all have.
    pub(super) fn latency(&self, kind: Kind, followers: usize) -> Latency {
        let mut latency = Latency::new();
        for event in self.events(kind) {
            if event.count.load(Ordering::Relaxed) as usize == followers {
                let us = event
                    .last_us
                    .load(Ordering::Relaxed)
                    .saturating_sub(event.committed_us.load(Ordering::Relaxed));
                latency.record(Duration::from_micros(us));
            }
        }
        latency
    }

    fn events(&self, kind: Kind) -> &[Event] {
        match kind {
            Kind::Wide => &self.wide,
            Kind::Narrow => &self.narrow,
        }
    }

    fn us(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.start).as_micros() as u64
    }
}

/// Opens a stream, and reads it from then on.
pub(super) async fn open(
    address: SocketAddr,
    host: String,
    topics: String,
    arrivals: Arc<Arrivals>,
) -> Result<(), Fault> {
    let fault = |source: std::io::Error| Fault::Wire {
        request: "GET /realtime/stream".to_owned(),
        source: source.into(),
    };
    let mut stream = TcpStream::connect(address).await.map_err(fault)?;
    let request =
        format!("GET /realtime/stream?topics={topics} HTTP/1.1\r\nHost: {host}\r\nAccept: text/event-stream\r\n\r\n");
    stream.write_all(request.as_bytes()).await.map_err(fault)?;
    let mut opening = Vec::with_capacity(1024);
    while !opening.windows(11).any(|part| part == b": connected") {
        if opening.len() > 8 * 1024 || stream.read_buf(&mut opening).await.map_err(fault)? == 0 {
            return Err(Fault::Other(format!(
                "a stream did not open: {}",
                String::from_utf8_lossy(&opening).lines().next().unwrap_or_default()
            )));
        }
    }
    drop(opening);
    tokio::spawn(read(stream, arrivals));
    Ok(())
}

async fn read(stream: TcpStream, arrivals: Arc<Arrivals>) {
    let mut rest: Vec<u8> = Vec::new();
    loop {
        if stream.readable().await.is_err() {
            return;
        }
        let mut buffer = [0; BUFFER];
        let Ok(length) = stream.try_read(&mut buffer) else {
            continue;
        };
        if length == 0 {
            return;
        }
        let at = Instant::now();
        let bytes: &[u8] = if rest.is_empty() {
            &buffer[..length]
        } else {
            rest.extend_from_slice(&buffer[..length]);
            &rest
        };
        let left = note(bytes, &arrivals, at);
        rest = bytes[bytes.len() - left..].to_vec();
    }
}

/// Notes each id; answers how many bytes at the end may be the beginning of one.
fn note(bytes: &[u8], arrivals: &Arrivals, at: Instant) -> usize {
    let mut from = 0;
    while let Some(found) = bytes[from..].iter().position(|byte| *byte == b'_') {
        let end = from + found + ID_BYTES - 3;
        let Some(start) = (from + found).checked_sub(3) else {
            from += found + 1;
            continue;
        };
        if bytes.len() < end {
            return bytes.len() - start;
        }
        if let Some(tag) = number_of(&bytes[start..end]) {
            arrivals.arrived(tag, at);
            from = end;
        } else {
            from += found + 1;
        }
    }
    bytes.len().min(3)
}
