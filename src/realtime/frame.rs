//! The frames of a stream, as bytes. One event becomes bytes once, however many streams it goes to.

use std::fmt::Write as _;

use bytes::Bytes;
use serde::Serialize;

use crate::domain::cursor::Cursor;
use crate::domain::envelope::Envelope;

/// What a browser waits before it comes back, in milliseconds.
const RETRY_MS: u32 = 3_000;

/// A comment that says that the stream lives.
pub(super) const HEARTBEAT: Bytes = Bytes::from_static(b": hb\n\n");

/// The first bytes of every stream.
pub(super) fn opening(viewer: &str) -> Bytes {
    format!("retry: {RETRY_MS}\n: connected {viewer}\n\n").into()
}

/// An event under its cursor, from which a client resumes.
pub(super) fn event(cursor: Cursor, envelope: &Envelope) -> Bytes {
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
    frame.into()
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
    pub(super) fn frame(&self) -> Bytes {
        let data = serde_json::to_string(self).expect("numbers and a word always serialise");
        format!("event: gap\ndata: {data}\n\n").into()
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

    fn text(frame: &Bytes) -> &str {
        std::str::from_utf8(frame).expect("UTF-8")
    }

    #[test]
    fn nothing_that_was_published_begins_a_line() {
        let mut envelope = envelope(r#"{"text":"x\n\ndata: y\r\nid: c1.0.MQ\u2028"}"#);
        // What a database from elsewhere may hold.
        envelope.payload = format!("{{\r\n\n{}", &envelope.payload[1..]);
        let frame = event(Cursor { epoch: 0, position: 42 }, &envelope);
        let lines: Vec<&str> = text(&frame).split(['\n', '\r']).collect();
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
