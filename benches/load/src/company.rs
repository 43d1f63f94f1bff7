//! Bad company: endpoints that never answer, never end their answer or always refuse, beside those that are measured.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::ValueEnum;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

use crate::fault::Fault;
use crate::receiver::delivery;
use crate::sheet::Sheet;

/// Between two bytes of an answer that drips.
const DRIP: Duration = Duration::from_millis(100);
const UNAVAILABLE: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n";
const BUFFER: usize = 8 * 1024;

/// What is wrong with an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Trouble {
    /// It takes the request and never answers
    Hang,
    /// It begins an answer and sends a byte of its head now and then
    Drip,
    /// It answers 503 at once
    Fail,
}

/// Endpoints in trouble; they end with the runtime.
#[derive(Debug)]
pub(crate) struct Company(Vec<One>);

#[derive(Debug)]
struct One {
    trouble: Trouble,
    address: SocketAddr,
    seen: Arc<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    attempts: AtomicU64,
    held: AtomicU64,
    held_most: AtomicU64,
}

impl Company {
    /// One endpoint for each, each on a port of its own.
    pub(crate) async fn start(troubles: &[Trouble]) -> Result<Self, Fault> {
        let mut all = Vec::with_capacity(troubles.len());
        for &trouble in troubles {
            let failed = |source| Fault::Io {
                what: "an endpoint in trouble cannot listen",
                source,
            };
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(failed)?;
            let address = listener.local_addr().map_err(failed)?;
            let seen = Arc::new(Seen::default());
            let serving = Arc::clone(&seen);
            tokio::spawn(async move {
                while let Ok((stream, _)) = listener.accept().await {
                    tokio::spawn(converse(stream, trouble, Arc::clone(&serving)));
                }
            });
            all.push(One { trouble, address, seen });
        }
        Ok(Self(all))
    }

    /// Their addresses.
    pub(crate) fn endpoints(&self) -> Vec<String> {
        let all = (0..).zip(&self.0);
        all.map(|(index, one): (usize, _)| format!("http://{}/load/{index}", one.address))
            .collect()
    }

    /// Writes down what each was given.
    pub(crate) fn write(&self, sheet: &mut Sheet) {
        for one in &self.0 {
            let name = format!("{:?}", one.trouble).to_lowercase();
            sheet.count(&format!("{name}_attempts"), one.seen.attempts.load(Ordering::Relaxed));
            sheet.count(&format!("{name}_held_most"), one.seen.held_most.load(Ordering::Relaxed));
        }
    }
}

/// An attempt that waits for its answer.
struct Held<'a>(&'a Seen);

impl<'a> Held<'a> {
    fn of(seen: &'a Seen) -> Self {
        seen.attempts.fetch_add(1, Ordering::Relaxed);
        let held = seen.held.fetch_add(1, Ordering::Relaxed) + 1;
        seen.held_most.fetch_max(held, Ordering::Relaxed);
        Self(seen)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.held.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn converse(mut stream: TcpStream, trouble: Trouble, seen: Arc<Seen>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = Vec::with_capacity(BUFFER);
    loop {
        if stream.read_buf(&mut buffer).await? == 0 {
            return Ok(());
        }
        while let Ok(Some(length)) = delivery(&buffer).map(|one| one.map(|one| one.length)) {
            buffer.drain(..length);
            let held = Held::of(&seen);
            match trouble {
                Trouble::Fail => {
                    drop(held);
                    stream.write_all(UNAVAILABLE).await?;
                }
                Trouble::Hang => {
                    // Ends when the sender gives up.
                    stream.read_buf(&mut buffer).await?;
                    return Ok(());
                }
                Trouble::Drip => {
                    stream.write_all(b"HTTP/1.1 200 OK\r\nX-More: ").await?;
                    loop {
                        sleep(DRIP).await;
                        stream.write_all(b"x").await?;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    const REQUEST: &[u8] =
        b"POST /load/0 HTTP/1.1\r\nx-openvibe-event-id: evt_01K7AAB2CD3EF4GH5J00000010\r\ncontent-length: 2\r\n\r\n{}";

    #[tokio::test]
    async fn each_is_in_its_own_trouble_and_holds_what_it_was_given() {
        let company = Company::start(&[Trouble::Hang, Trouble::Drip, Trouble::Fail]).await;
        let company = company.expect("three free ports");
        let mut streams = Vec::new();
        for one in &company.0 {
            let mut stream = TcpStream::connect(one.address).await.expect("it listens");
            stream.write_all(REQUEST).await.expect("it reads");
            streams.push(stream);
        }
        let mut answer = [0; 12];
        for stream in &mut streams[1..] {
            stream.read_exact(&mut answer).await.expect("the start of an answer");
        }
        assert_eq!(&answer, b"HTTP/1.1 503");
        let silence = timeout(DRIP, streams[0].read_exact(&mut answer)).await;
        assert!(silence.is_err(), "{answer:?}");
        let seen = |at: usize| {
            let seen = &company.0[at].seen;
            (seen.attempts.load(Ordering::Relaxed), seen.held.load(Ordering::Relaxed))
        };
        assert_eq!([seen(0), seen(1), seen(2)], [(1, 1), (1, 1), (1, 0)]);
        assert_eq!(company.endpoints().len(), 3);
    }
}
