//! The frames of a stream, as bytes. One event becomes bytes once, however many streams it goes to.

use std::fmt::Write as _;

use bytes::Bytes;
use serde::Serialize;

use crate::domain::cursor::Cursor;
use crate::domain::envelope::Envelope;

use super::stream::Framing;

/// What a browser waits before it comes back, in milliseconds.
const RETRY_MS: u32 = 3_000;

/// The end of a body in chunks.
pub(super) const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// One frame: as a chunk of a body, which is how nearly every stream gets it, and cut out of that for the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frame {
    chunk: Bytes,
    /// Bytes before the frame in its chunk.
    before: usize,
}

impl Frame {
    /// A frame of this text.
    pub(super) fn of(text: String) -> Self {
        let size = format!("{:x}\r\n", text.len());
        Self {
            chunk: [size.as_str(), &text, "\r\n"].concat().into(),
            before: size.len(),
        }
    }

    /// The bytes to be written.
    pub(super) fn wire(&self, framing: Framing) -> Bytes {
        match framing {
            Framing::Chunked => self.chunk.clone(),
            Framing::Close => self.chunk.slice(self.before..self.chunk.len() - 2),
        }
    }
}

/// A comment that says that the stream lives.
pub(super) fn heartbeat() -> Frame {
    Frame {
        chunk: Bytes::from_static(b"6\r\n: hb\n\n\r\n"),
        before: 3,
    }
}

/// The first bytes of every stream.
pub(super) fn opening(viewer: &str) -> Frame {
    Frame::of(format!("retry: {RETRY_MS}\n: connected {viewer}\n\n"))
}

/// An event under its cursor, from which a client resumes.
pub(super) fn event(cursor: Cursor, envelope: &Envelope) -> Frame {
    let mut data = String::with_capacity(512 + envelope.payload.len());
    data.push_str(r#"{"event":"#);
    envelope.write_json(&mut data);
    data.push('}');
    // A line end in JSON is white space between two tokens; in a frame it would begin a field.
    if data.contains(['\n', '\r']) {
        data = data.replace(['\n', '\r'], " ");
    }
    let mut frame = String::with_capacity(data.len() + 48);
    let _ = write!(frame, "id: {cursor}\ndata: {data}\n\n");
    Frame::of(frame)
}

/// Events that a stream leaves out, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Gap {
    pub(super) reason: Reason,
    /// The first position that is left out.
    pub(super) from_seq: i64,
    /// The last one.
    pub(super) to_seq: i64,
    /// The head of the log.
    pub(super) latest_seq: i64,
    /// How far back public events are sent again, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) window_seconds: Option<u64>,
}

/// Why events are left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reason {
    /// The position belongs to another history.
    Epoch,
    /// The position lies ahead of the log.
    CursorAhead,
    /// The events are no longer kept.
    Retention,
    /// They are public and too old to be sent again.
    PublicWindow,
    /// They are more than one stream replays.
    ReplayLimit,
}

impl Gap {
    /// The frame. It carries no id: a client that comes back still names the last event it had.
    pub(super) fn frame(&self) -> Frame {
        let data = serde_json::to_string(self).expect("numbers and a word always serialise");
        Frame::of(format!("event: gap\ndata: {data}\n\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::envelope::Envelope;

    fn envelope(payload: &str) -> Envelope {
        let raw = format!(
            r#"{{"event_id":"evt_01K7AAB2CD3EF4GH5JK6MN7PQR","event_type":"live.stream.started","version":1,
                "source":"live","actor":{{"type":"service","id":"live"}},"timestamp":"2026-10-21T08:15:30Z",
                "subject":{{"type":"stream","id":"a\nb"}},"payload":{payload}}}"#
        );
        Envelope::parse(&raw, "4bf92f3577b34da6a3ce929d0e0e4736")
            .expect("a valid envelope")
            .0
    }

    fn text(frame: &Frame) -> String {
        String::from_utf8(frame.wire(Framing::Close).to_vec()).expect("UTF-8")
    }

    #[test]
    fn a_frame_is_a_chunk_of_its_own_length() {
        for frame in [heartbeat(), opening("service")] {
            let chunk = String::from_utf8(frame.wire(Framing::Chunked).to_vec()).expect("UTF-8");
            let (size, rest) = chunk.split_once("\r\n").expect("a size");
            let size = usize::from_str_radix(size, 16).expect("hexadecimal");
            assert_eq!((&rest[..size], &rest[size..]), (text(&frame).as_str(), "\r\n"));
        }
        assert_eq!(text(&heartbeat()), ": hb\n\n");
    }

    #[test]
    fn nothing_that_was_published_begins_a_line() {
        let mut envelope = envelope(r#"{"text":"x\n\ndata: y\r\nid: c1.0.MQ\u2028"}"#);
        // What a database from elsewhere may hold.
        envelope.payload = format!("{{\r\n\n{}", &envelope.payload[1..]);
        let frame = event(Cursor { epoch: 0, position: 42 }, &envelope);
        let frame = text(&frame);
        let lines: Vec<&str> = frame.split(['\n', '\r']).collect();
        assert_eq!(lines.len(), 4, "{lines:?}");
        assert_eq!((lines[0], lines[2], lines[3]), ("id: c1.0.NDI", "", ""));
        let data: serde_json::Value =
            serde_json::from_str(lines[1].strip_prefix("data: ").expect("data")).expect("JSON");
        assert_eq!(data["event"]["payload"]["text"], "x\n\ndata: y\r\nid: c1.0.MQ\u{2028}");
        assert_eq!(data["event"]["subject"]["id"], "a\nb");
    }

    #[test]
    fn a_gap_names_what_is_left_out_and_has_no_id() {
        let gap = Gap {
            reason: Reason::PublicWindow,
            from_seq: 3,
            to_seq: 9,
            latest_seq: 12,
            window_seconds: Some(300),
        };
        assert_eq!(
            text(&gap.frame()),
            "event: gap\ndata: {\"reason\":\"public_window\",\"from_seq\":3,\"to_seq\":9,\"latest_seq\":12,\
             \"window_seconds\":300}\n\n"
        );
    }

    #[test]
    fn a_stream_opens_with_how_to_come_back() {
        assert_eq!(text(&opening("user")), "retry: 3000\n: connected user\n\n");
    }
}
