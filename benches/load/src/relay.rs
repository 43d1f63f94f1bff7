//! HTTP in, HTTP out, nothing stored: the least that any service between a publisher and a receiver must take.

use std::io;
use std::net::SocketAddr;
use std::thread;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime;

use crate::wire::{Connection, content_length};

const HEADERS_MAX: usize = 16;
const BUFFER: usize = 8 * 1024;
const CREATED: &[u8] = b"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}";
/// Where the id stands in the body of a request with one event, its prefix included.
const ID: std::ops::Range<usize> = 13..43;

/// Relays what comes to `listener` to a receiver, on a thread and a runtime of its own, as a service would.
pub(crate) fn start(listener: std::net::TcpListener, receiver: SocketAddr) {
    thread::spawn(move || -> io::Result<()> {
        runtime::Builder::new_current_thread()
            .enable_all()
            .build()?
            .block_on(async {
                let listener = TcpListener::from_std(listener)?;
                loop {
                    let (stream, _) = listener.accept().await?;
                    tokio::spawn(converse(stream, receiver));
                }
            })
    });
}

async fn converse(mut stream: TcpStream, receiver: SocketAddr) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut out = Connection::new(receiver);
    let mut buffer = Vec::with_capacity(BUFFER);
    loop {
        if stream.read_buf(&mut buffer).await? == 0 {
            return Ok(());
        }
        while let Some((head, length)) = frame(&buffer) {
            let Some(event_id) = buffer
                .get(head..length)
                .and_then(|body| str::from_utf8(body.get(ID)?).ok())
            else {
                return Err(io::Error::other("no event"));
            };
            let mut request = format!(
                "POST /load/0 HTTP/1.1\r\nHost: receiver\r\nContent-Type: application/json\r\nX-OpenVibe-Event-Id: {event_id}\r\nContent-Length: {}\r\n\r\n",
                length - head
            )
            .into_bytes();
            request.extend_from_slice(&buffer[head..length]);
            out.exchange(&request).await.map_err(io::Error::other)?;
            stream.write_all(CREATED).await?;
            buffer.drain(..length);
        }
    }
}

/// Bytes of the head and of the whole of a request at the start of `bytes`, once it is complete.
fn frame(bytes: &[u8]) -> Option<(usize, usize)> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    let httparse::Status::Complete(head) = request.parse(bytes).ok()? else {
        return None;
    };
    let length = head + content_length(request.headers).ok()??;
    (bytes.len() >= length).then_some((head, length))
}
