//! Accepts streams and writes the frames it is given, and nothing else: no store, no order, no permission, no HTTP worth
//! the name. A service cannot fan out for less.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::LocalSet;

const HEAD: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n1b\r\nretry: 3000\n: connected x\n\n\r\n";
const TAKEN: &[u8] = b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\n{}";

type Followers = Rc<RefCell<HashMap<String, Vec<Rc<TcpStream>>>>>;

/// Serves until it is killed, on one thread.
pub(crate) async fn serve(listen: SocketAddr) -> io::Result<()> {
    let listener = TcpListener::bind(listen).await?;
    let followers = Followers::default();
    LocalSet::new()
        .run_until(async {
            loop {
                let (stream, _) = listener.accept().await?;
                stream.set_nodelay(true)?;
                let followers = Rc::clone(&followers);
                tokio::task::spawn_local(async move { converse(stream, &followers).await });
            }
        })
        .await
}

async fn converse(mut stream: TcpStream, followers: &Followers) -> io::Result<()> {
    let mut buffer = Vec::new();
    loop {
        let Some(head) = buffer.windows(4).position(|part| part == b"\r\n\r\n").map(|at| at + 4) else {
            if stream.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
            continue;
        };
        let text = String::from_utf8_lossy(&buffer[..head]).into_owned();
        let path = text.split(' ').nth(1).unwrap_or_default();
        let query = path
            .split_once('=')
            .map(|(_, value)| value.to_owned())
            .unwrap_or_default();
        if text.starts_with("GET") {
            stream.write_all(HEAD).await?;
            let stream = Rc::new(stream);
            for topic in query.split(',') {
                followers
                    .borrow_mut()
                    .entry(topic.to_owned())
                    .or_default()
                    .push(Rc::clone(&stream));
            }
            return Ok(());
        }
        let length = text.lines().find_map(|line| line.strip_prefix("Content-Length: "));
        let length = head + length.and_then(|text| text.parse::<usize>().ok()).unwrap_or_default();
        while buffer.len() < length {
            if stream.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
        }
        stream.write_all(TAKEN).await?;
        let mut chunk = format!("{:x}\r\n", length - head).into_bytes();
        chunk.extend_from_slice(&buffer[head..length]);
        chunk.extend_from_slice(b"\r\n");
        buffer.drain(..length);
        if let Some(all) = followers.borrow().get(&query) {
            for follower in all {
                // Frames are small and the readers fast; one that is not would show as missing frames.
                let _ = follower.try_write(&chunk);
            }
        }
    }
}
