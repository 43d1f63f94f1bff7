//! A line to a broker that passes everything, and can be made slow, stopped (a black hole) and killed (a refusal).

use std::io::{self, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use crate::fault::Fault;

/// Pieces that are on their way at once; more wait at the broker.
const PIECES_MAX: usize = 1024;
const BUFFER: usize = 16 * 1024;

/// Serves the line until it is interrupted. Answers come `late` after a SIGUSR1, and from the start where `slow` says so.
pub(crate) async fn serve(port: u16, to: SocketAddr, late: Duration, slow: bool) -> Result<(), Fault> {
    let failed = |source| Fault::Io {
        what: "the line",
        source,
    };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let mut slower = signal(SignalKind::user_defined1()).map_err(failed)?;
    let delay = watch::Sender::new(if slow { late } else { Duration::ZERO });
    writeln!(io::stdout(), "{address}").map_err(failed)?;
    loop {
        tokio::select! {
            _ = slower.recv() => drop(delay.send_replace(late)),
            accepted = listener.accept() => if let Ok((stream, _)) = accepted {
                tokio::spawn(join(stream, to, delay.subscribe()));
            },
        }
    }
}

async fn join(client: TcpStream, to: SocketAddr, delay: watch::Receiver<Duration>) -> io::Result<()> {
    let broker = TcpStream::connect(to).await?;
    client.set_nodelay(true)?;
    broker.set_nodelay(true)?;
    let (from_client, to_client) = client.into_split();
    let (from_broker, to_broker) = broker.into_split();
    let never = watch::Sender::new(Duration::ZERO);
    // Either side's end ends both.
    tokio::select! {
        ended = pass(from_client, to_broker, never.subscribe()) => ended,
        ended = pass(from_broker, to_client, delay) => ended,
    }
}

/// Carries bytes one way. What comes while other pieces are on their way waits for none of them.
async fn pass(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, delay: watch::Receiver<Duration>) -> io::Result<()> {
    let (sender, mut pieces) = mpsc::channel::<(Instant, Vec<u8>)>(PIECES_MAX);
    let reads = async {
        loop {
            let mut piece = Vec::with_capacity(BUFFER);
            if from.read_buf(&mut piece).await? == 0 {
                return io::Result::Ok(());
            }
            let due = Instant::now() + *delay.borrow();
            if sender.send((due, piece)).await.is_err() {
                return Ok(());
            }
        }
    };
    let writes = async {
        while let Some((due, piece)) = pieces.recv().await {
            if due > Instant::now() {
                sleep_until(due).await;
            }
            to.write_all(&piece).await?;
        }
        Ok(())
    };
    tokio::select! {
        ended = reads => ended,
        ended = writes => ended,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A broker that says back what it hears.
    async fn echo() -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a client");
            let (mut from, mut to) = stream.split();
            tokio::io::copy(&mut from, &mut to).await
        });
        address
    }

    #[tokio::test]
    async fn a_slow_line_delays_every_answer_and_keeps_their_order() {
        const LATE: Duration = Duration::from_millis(60);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let mut client = TcpStream::connect(listener.local_addr().expect("an address"))
            .await
            .expect("it listens");
        let (near, _) = listener.accept().await.expect("the client");
        let delay = watch::Sender::new(Duration::ZERO);
        tokio::spawn(join(near, echo().await, delay.subscribe()));

        let mut heard = [0; 3];
        client.write_all(b"one").await.expect("sent");
        client.read_exact(&mut heard).await.expect("an answer");
        delay.send_replace(LATE);
        let began = Instant::now();
        let mut heard = [0; 6];
        client.write_all(b"two").await.expect("sent");
        tokio::time::sleep(LATE / 2).await;
        client.write_all(b"six").await.expect("sent");
        client.read_exact(&mut heard).await.expect("both answers");
        assert_eq!(&heard, b"twosix");
        let took = began.elapsed();
        assert!(took >= LATE + LATE / 2, "{took:?}");
        assert!(took < LATE * 2, "the second did not wait for the first: {took:?}");
    }
}
