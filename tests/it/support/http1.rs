//! Just enough HTTP/1.1 for servers that must be able to misbehave: it reads one request off a socket.

use std::io;

use bytes::Bytes;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt};

/// The largest body a test server takes, in bytes. Anything larger is a mistake of the test.
const BODY_MAX: u64 = 8 * 1024 * 1024;

/// One request as it stood on the wire.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    /// The method, in the sender's spelling.
    pub(crate) method: String,
    /// The target: path and query.
    pub(crate) target: String,
    /// Header names and values in order, the names in the sender's spelling.
    pub(crate) headers: Vec<(String, String)>,
    /// The body, exactly as sent (without chunk framing).
    pub(crate) body: Bytes,
}

impl Request {
    /// The target without its query.
    pub(crate) fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or_default()
    }

    /// The only value of a header, whatever the spelling of its name; none when it is absent or repeated.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut values = self
            .headers
            .iter()
            .filter(|(given, _)| given.eq_ignore_ascii_case(name));
        match (values.next(), values.next()) {
            (Some((_, value)), None) => Some(value),
            _ => None,
        }
    }
}

/// Reads one request; none when the peer closed before sending another.
pub(crate) async fn read_request(stream: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<Request>> {
    let first = read_line(stream).await?;
    if first.is_empty() {
        return Ok(None);
    }
    let mut words = first.split(' ');
    let (Some(method), Some(target), Some("HTTP/1.1")) = (words.next(), words.next(), words.next()) else {
        return Err(invalid(format!("not a request line: {first:?}")));
    };
    let mut request = Request {
        method: method.to_owned(),
        target: target.to_owned(),
        headers: Vec::new(),
        body: Bytes::new(),
    };
    loop {
        let line = read_line(stream).await?;
        if line.is_empty() {
            break;
        }
        let (name, value) = line
            .split_once(':')
            .ok_or_else(|| invalid(format!("not a header: {line:?}")))?;
        request.headers.push((name.to_owned(), value.trim().to_owned()));
    }
    let chunked = request
        .header("transfer-encoding")
        .is_some_and(|value| value.eq_ignore_ascii_case("chunked"));
    request.body = if chunked {
        read_chunks(stream).await?
    } else {
        let length = request
            .header("content-length")
            .unwrap_or("0")
            .parse()
            .map_err(invalid)?;
        read_exactly(stream, length).await?.into()
    };
    Ok(Some(request))
}

async fn read_chunks(stream: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Bytes> {
    let mut body = Vec::new();
    loop {
        let line = read_line(stream).await?;
        let size = line.split(';').next().unwrap_or_default().trim();
        let size = u64::from_str_radix(size, 16).map_err(invalid)?;
        if size == 0 {
            while !read_line(stream).await?.is_empty() {}
            return Ok(body.into());
        }
        body.extend(read_exactly(stream, size).await?);
        read_line(stream).await?;
    }
}

async fn read_exactly(stream: &mut (impl AsyncBufRead + Unpin), length: u64) -> io::Result<Vec<u8>> {
    if length > BODY_MAX {
        return Err(invalid(format!("a body part of {length} bytes")));
    }
    let mut bytes = vec![0; usize::try_from(length).map_err(invalid)?];
    stream.read_exact(&mut bytes).await?;
    Ok(bytes)
}

/// One line without its end; empty at the end of the head and at the end of the stream.
async fn read_line(stream: &mut (impl AsyncBufRead + Unpin)) -> io::Result<String> {
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    line.truncate(line.trim_end_matches(['\r', '\n']).len());
    Ok(line)
}

fn invalid(error: impl ToString) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.to_string())
}
