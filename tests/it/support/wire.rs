//! Requests as bytes on a connection, for what no well-behaved client would send.

use std::time::Duration;

use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
};

use super::{service::Service, wait::within};

/// How long an answer may take that waits for nothing.
pub(crate) const PROMPT: Duration = Duration::from_secs(20);

/// A connection to a service.
#[derive(Debug)]
pub(crate) struct Wire {
    stream: TcpStream,
    seen: Vec<u8>,
}

/// One answer, as it stood on the wire.
#[derive(Debug)]
pub(crate) struct Reply {
    /// The status code.
    pub(crate) status: u16,
    /// The head, in lower case.
    pub(crate) head: String,
    /// The body as JSON; null when it is none.
    pub(crate) body: Value,
}

impl Reply {
    /// Whether the answer says that it is the last one of its connection.
    pub(crate) fn is_last(&self) -> bool {
        self.head.contains("\r\nconnection: close")
    }
}

impl Wire {
    /// Connects.
    pub(crate) async fn to(service: &Service) -> Self {
        Self::to_address(service.base().trim_start_matches("http://")).await
    }

    /// Connects to `host:port`.
    pub(crate) async fn to_address(address: &str) -> Self {
        let stream = TcpStream::connect(address).await.expect("a connection");
        stream.set_nodelay(true).expect("a TCP option");
        Self {
            stream,
            seen: Vec::new(),
        }
    }

    /// Connects with as little room for unread answers as the system allows.
    pub(crate) async fn narrow(service: &Service) -> Self {
        let address = service.base().trim_start_matches("http://");
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.set_recv_buffer_size(1024).expect("a socket option");
        let stream = socket.connect(address.parse().expect("an address")).await;
        Self {
            stream: stream.expect("a connection"),
            seen: Vec::new(),
        }
    }

    /// Sends bytes; fails the test when the service has closed.
    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream
            .write_all(bytes.as_ref())
            .await
            .expect("the connection is open");
    }

    /// Sends bytes, unless the service has closed.
    pub(crate) async fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> std::io::Result<()> {
        self.stream.write_all(bytes.as_ref()).await
    }

    /// Sends bytes and reads one answer meanwhile: a service may refuse before it has read everything. None
    /// when the connection ends without an answer.
    pub(crate) async fn ask(&mut self, bytes: impl AsRef<[u8]>) -> Option<Reply> {
        let (mut reading, mut writing) = self.stream.split();
        // A service that has answered may close on the rest.
        let sending = async { drop(writing.write_all(bytes.as_ref()).await) };
        let reply = reply(&mut reading, &mut self.seen);
        within("an answer", PROMPT, futures_util::future::join(reply, sending))
            .await
            .0
    }

    /// Says that nothing more will be sent.
    pub(crate) async fn end_sending(&mut self) {
        self.stream.shutdown().await.expect("the connection is open");
    }

    /// The next answer; none when the connection ends without one.
    pub(crate) async fn answer(&mut self, deadline: Duration) -> Option<Reply> {
        within("an answer", deadline, reply(&mut self.stream, &mut self.seen)).await
    }

    /// What came since the last look, waiting for at least one byte; nothing more once the connection has ended.
    pub(crate) async fn read_some(&mut self) -> Vec<u8> {
        self.seen.reserve(64 * 1024);
        // The end shows in what never came.
        self.stream.read_buf(&mut self.seen).await.ok();
        std::mem::take(&mut self.seen)
    }

    /// Makes the end of the connection a reset.
    pub(crate) fn reset(&self) {
        self.stream.set_zero_linger().expect("a TCP option");
    }

    /// Waits until the service closes the connection, which must be without another byte.
    pub(crate) async fn closed(&mut self) {
        let ended = within(
            "the end of the connection",
            PROMPT,
            self.stream.read_buf(&mut self.seen),
        )
        .await;
        assert!(
            ended.is_err() || self.seen.is_empty(),
            "more came: {:?}",
            String::from_utf8_lossy(&self.seen)
        );
    }

    /// Sends one byte after the other, one a second, until the service answers or closes; none when it closes.
    pub(crate) async fn drip(&mut self, byte: u8, deadline: Duration) -> Option<Reply> {
        let (mut reading, mut writing) = self.stream.split();
        let dripping = async {
            let mut tick = tokio::time::interval(Duration::from_secs(1));
            loop {
                tick.tick().await;
                if writing.write_all(&[byte]).await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        let reply = reply(&mut reading, &mut self.seen);
        within("an end", deadline, async {
            tokio::select! {
                reply = reply => reply,
                () = dripping => None,
            }
        })
        .await
    }
}

/// One answer of a declared length, leaving in `seen` what came after it.
async fn reply(stream: &mut (impl AsyncReadExt + Unpin), seen: &mut Vec<u8>) -> Option<Reply> {
    loop {
        if let Some(end) = seen.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&seen[..end]).to_lowercase();
            let length = head
                .lines()
                .find_map(|line| line.strip_prefix("content-length: ")?.parse().ok())
                .unwrap_or(0);
            let start = end + 4;
            if seen.len() >= start + length {
                let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
                let body = serde_json::from_slice(&seen[start..start + length]).unwrap_or(Value::Null);
                seen.drain(..start + length);
                return Some(Reply {
                    status: status.expect("a status line"),
                    head,
                    body,
                });
            }
        }
        match stream.read_buf(seen).await {
            Ok(1..) => {}
            Ok(0) | Err(_) => return None,
        }
    }
}
