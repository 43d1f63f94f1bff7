//! HTTP/1.1 by hand, as little of it as the load needs: heads through `httparse`, bodies by their Content-Length.

use std::io;
use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Headers of one message at most.
const HEADERS_MAX: usize = 40;
/// Bytes of a head at most.
const HEAD_MAX: usize = 32 * 1024;
/// Bytes of a body at most: a page of 1,000 large events.
const BODY_MAX: usize = 128 * 1024 * 1024;
/// Room that a buffer starts with.
const BUFFER: usize = 8 * 1024;

/// Why an exchange failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireFault {
    /// The connection.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It ended in the middle.
    #[error("the connection ended in the middle of a message")]
    Ended,
    /// What came is no message that can be read.
    #[error("not an HTTP message: {0}")]
    Malformed(&'static str),
}

/// The head of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AnswerHead {
    /// The status.
    pub(crate) status: u16,
    /// Bytes of the head, the empty line included.
    pub(crate) head_bytes: usize,
    /// Bytes of the body.
    pub(crate) body_bytes: usize,
    /// The peer closes the connection after it.
    pub(crate) closes: bool,
}

/// Reads the head of an answer at the start of `bytes`; `None` while it is not complete.
pub(crate) fn answer_head(bytes: &[u8]) -> Result<Option<AnswerHead>, WireFault> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut answer = httparse::Response::new(&mut headers);
    let head_bytes = match answer.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if bytes.len() > HEAD_MAX => return Err(WireFault::Malformed("a huge head")),
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(_) => return Err(WireFault::Malformed("its head")),
    };
    let status = answer.code.ok_or(WireFault::Malformed("no status"))?;
    let without_body = status == 204 || status == 304 || status < 200;
    let body_bytes = match content_length(answer.headers)? {
        _ if without_body => 0,
        Some(length) => length,
        None => return Err(WireFault::Malformed("an answer without Content-Length")),
    };
    Ok(Some(AnswerHead {
        status,
        head_bytes,
        body_bytes,
        closes: closes(answer.headers),
    }))
}

/// The one Content-Length of a message.
pub(crate) fn content_length(headers: &[httparse::Header<'_>]) -> Result<Option<usize>, WireFault> {
    let mut found = None;
    for header in headers {
        if header.name.eq_ignore_ascii_case("transfer-encoding") {
            return Err(WireFault::Malformed("a body in chunks"));
        }
        if !header.name.eq_ignore_ascii_case("content-length") {
            continue;
        }
        let length = str::from_utf8(header.value).ok().and_then(|text| text.parse().ok());
        let length = length.filter(|length| *length <= BODY_MAX && found.is_none());
        found = Some(length.ok_or(WireFault::Malformed("its Content-Length"))?);
    }
    Ok(found)
}

fn closes(headers: &[httparse::Header<'_>]) -> bool {
    headers
        .iter()
        .any(|header| header.name.eq_ignore_ascii_case("connection") && header.value.eq_ignore_ascii_case(b"close"))
}

/// A keep-alive connection to a server, one request at a time.
#[derive(Debug)]
pub(crate) struct Connection {
    address: SocketAddr,
    stream: Option<TcpStream>,
    buffer: Vec<u8>,
}

impl Connection {
    /// A connection that is opened by its first request.
    pub(crate) fn new(address: SocketAddr) -> Self {
        Self {
            address,
            stream: None,
            buffer: Vec::with_capacity(BUFFER),
        }
    }

    /// Opens it, so that no measured request has to.
    pub(crate) async fn open(&mut self) -> Result<(), WireFault> {
        if self.stream.is_none() {
            let stream = TcpStream::connect(self.address).await?;
            stream.set_nodelay(true)?;
            self.stream = Some(stream);
        }
        Ok(())
    }

    /// Forgets the connection; the next request opens another.
    pub(crate) fn close(&mut self) {
        self.stream = None;
    }

    /// Sends a whole request and reads its whole answer. A failure closes the connection; the next request opens another.
    pub(crate) async fn exchange(&mut self, request: &[u8]) -> Result<(u16, &[u8]), WireFault> {
        self.open().await?;
        let mut stream = self.stream.take().expect("opened above");
        stream.write_all(request).await?;
        self.buffer.clear();
        let head = loop {
            if stream.read_buf(&mut self.buffer).await? == 0 {
                return Err(WireFault::Ended);
            }
            if let Some(head) = answer_head(&self.buffer)? {
                break head;
            }
        };
        let length = head.head_bytes + head.body_bytes;
        self.buffer.reserve(length.saturating_sub(self.buffer.len()));
        while self.buffer.len() < length {
            if stream.read_buf(&mut self.buffer).await? == 0 {
                return Err(WireFault::Ended);
            }
        }
        if self.buffer.len() > length {
            return Err(WireFault::Malformed("more than one answer"));
        }
        if !head.closes {
            self.stream = Some(stream);
        }
        Ok((head.status, &self.buffer[head.head_bytes..]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &[u8] = b"HTTP/1.1 201 Created\r\ncontent-type: application/json\r\nContent-Length: 5\r\n\r\nhello";

    #[test]
    fn a_head_is_read_once_it_is_complete_however_it_is_cut() {
        for cut in 0..ANSWER.len() - 5 {
            assert!(
                answer_head(&ANSWER[..cut]).expect("so far so good").is_none(),
                "cut at {cut}"
            );
        }
        let head = answer_head(ANSWER).expect("a head").expect("complete");
        assert_eq!((head.status, head.body_bytes, head.closes), (201, 5, false));
        assert_eq!(&ANSWER[head.head_bytes..], b"hello");
    }

    #[test]
    fn an_answer_without_a_body_needs_no_length() {
        let head = answer_head(b"HTTP/1.1 204 No Content\r\nConnection: Close\r\n\r\n");
        let head = head.expect("a head").expect("complete");
        assert_eq!((head.status, head.body_bytes, head.closes), (204, 0, true));
    }

    #[test]
    fn what_cannot_be_followed_is_refused() {
        for bad in [
            &b"HTTP/1.1 200 OK\r\n\r\n"[..],
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 999999999999\r\n\r\n",
            b"SMTP ready\r\n\r\n",
        ] {
            assert!(answer_head(bad).is_err(), "{}", String::from_utf8_lossy(bad));
        }
        assert!(answer_head(&vec![b'a'; HEAD_MAX + 1]).is_err(), "no head at all");
    }
}
