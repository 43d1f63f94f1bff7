//! Judges the head of a request before the HTTP server sees it, by the server's own grammar: what that would refuse in
//! a bare answer, or frame otherwise than we do, is refused here and gets its problem document.

use axum::http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Uri};

use super::context::{REQUEST_ID, TRACEPARENT};
use crate::problem::ApiError;

/// Headers of a request.
pub(super) const HEADERS_MAX: usize = 100;
/// Bytes of a head, request line included.
pub(super) const HEAD_BYTES_MAX: usize = 32 * 1024;

/// What the request line and headers say about where the body ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Framing {
    /// Nothing follows the head.
    None,
    /// As many bytes, at least one.
    Length(u64),
    /// Chunks. The connection is closed after the answer.
    Chunked,
}

/// How far the head under way has been looked at.
#[derive(Debug, Default)]
pub(super) struct Scan {
    seen: usize,
    /// Where the current line starts.
    line: usize,
    /// Whether anything but line ends has come.
    pub(super) started: bool,
    has_request_line: bool,
}

impl Scan {
    /// Looks at what is new in `bytes`, which start where the head does: its length and framing once it is whole.
    ///
    /// Each byte is looked at once, and a request line is judged when it ends, so that a peer that speaks something
    /// else learns so at once.
    pub(super) fn head(&mut self, bytes: &[u8]) -> Result<Option<(usize, Framing)>, ApiError> {
        while let Some(&byte) = bytes.get(self.seen) {
            self.seen += 1;
            if self.seen > HEAD_BYTES_MAX {
                return Err(too_large());
            }
            if !self.started && !matches!(byte, b'\r' | b'\n') {
                self.started = true;
                if !byte.is_ascii_graphic() {
                    return Err(no_request_line());
                }
            }
            if byte != b'\n' {
                continue;
            }
            let is_empty = matches!(&bytes[self.line..self.seen], b"\n" | b"\r\n");
            self.line = self.seen;
            match (self.has_request_line, is_empty) {
                (true, true) => return judge(&bytes[..self.seen]).map(|framing| Some((self.seen, framing))),
                (false, false) => {
                    judge(&bytes[..self.seen])?;
                    self.has_request_line = true;
                }
                // A header line, or an empty one before the request line, which the server skips.
                (true, false) | (false, true) => {}
            }
        }
        Ok(None)
    }
}

/// The framing of a head; of the start of one, an error or nothing of meaning.
fn judge(head: &[u8]) -> Result<Framing, ApiError> {
    use httparse::Error;
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    request.parse(head).map_err(|error| match error {
        Error::TooManyHeaders => too_large(),
        Error::HeaderName | Error::HeaderValue => {
            ApiError::BadRequest("a header must be a name, a colon and a value without control characters".into())
        }
        Error::NewLine | Error::Status | Error::Token | Error::Version => no_request_line(),
    })?;
    if request.path.is_none_or(|target| target.parse::<Uri>().is_err()) {
        return Err(no_request_line());
    }
    framing(request.version == Some(1), request.headers).ok_or_else(unclear_end)
}

fn framing(may_be_chunked: bool, headers: &[httparse::Header<'_>]) -> Option<Framing> {
    let values = |name: HeaderName| {
        let mut found = headers
            .iter()
            .filter(move |header| name.as_str().eq_ignore_ascii_case(header.name));
        (found.next().map(|header| header.value), found.next().is_some())
    };
    match (values(CONTENT_LENGTH), values(TRANSFER_ENCODING)) {
        ((None, _), (None, _)) => Some(Framing::None),
        ((Some(length), false), (None, _)) if length.iter().all(u8::is_ascii_digit) => {
            match std::str::from_utf8(length).ok()?.parse().ok()? {
                0 => Some(Framing::None),
                length => i64::try_from(length).is_ok().then_some(Framing::Length(length)),
            }
        }
        ((None, _), (Some(coding), false)) if may_be_chunked && coding.eq_ignore_ascii_case(b"chunked") => {
            Some(Framing::Chunked)
        }
        _ => None,
    }
}

fn too_large() -> ApiError {
    ApiError::HeadTooLarge {
        bytes: HEAD_BYTES_MAX,
        headers: HEADERS_MAX,
    }
}

fn no_request_line() -> ApiError {
    ApiError::BadRequest("the request must start with a line of a method, a path and HTTP/1.0 or HTTP/1.1".into())
}

/// The refusal of a head that does not frame its body clearly. Guessing what was meant is how requests are smuggled.
pub(super) fn unclear_end() -> ApiError {
    ApiError::BadRequest(
        "the request must say where its body ends once: Content-Length, or Transfer-Encoding: chunked".into(),
    )
}

/// The ids that a refused head can still be recognised by.
pub(super) fn ids(head: &[u8]) -> HeaderMap {
    let mut ids = HeaderMap::new();
    let head = &head[..head.len().min(HEAD_BYTES_MAX)];
    for line in head.split(|&byte| byte == b'\n') {
        let Some(colon) = line.iter().position(|&byte| byte == b':') else {
            continue;
        };
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        if let Some(known) = [REQUEST_ID, TRACEPARENT]
            .into_iter()
            .find(|known| name.eq_ignore_ascii_case(known.as_str().as_bytes()))
            && let Ok(value) = HeaderValue::from_bytes(value)
        {
            ids.entry(known).or_insert(value);
        }
    }
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_found_and_framed_alike_however_it_arrives() {
        let cases = [
            ("GET / HTTP/1.1\r\n\r\n", Framing::None),
            ("\n\r\nGET / HTTP/1.0\nA: b\n\r\n", Framing::None),
            ("POST / HTTP/1.1\r\ncontent-LENGTH:\t007 \r\n\r\n", Framing::Length(7)),
            ("POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n", Framing::None),
            (
                "POST / HTTP/1.1\r\nTransfer-Encoding: CHUNKED\r\n\r\n",
                Framing::Chunked,
            ),
        ];
        for (head, framing) in cases {
            let bytes = format!("{head}GET ").into_bytes();
            for size in 1..=bytes.len() {
                let mut scan = Scan::default();
                let found = (size..=bytes.len() + size)
                    .step_by(size)
                    .find_map(|end| scan.head(&bytes[..end.min(bytes.len())]).unwrap());
                assert_eq!(found, Some((head.len(), framing)), "{head:?} in pieces of {size}");
            }
        }
    }

    #[test]
    fn the_ids_of_a_head_are_read_as_far_as_they_came() {
        let ids = ids(b"nonsense\nX-OPENVIBE-request-id:\t first-id \r\nx-openvibe-request-id: second\r\ntraceparent");
        assert_eq!(ids.len(), 1);
        assert_eq!(ids[REQUEST_ID], "first-id");
    }
}
