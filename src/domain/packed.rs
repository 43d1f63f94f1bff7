//! An event as the replay tier and the archive keep it: columns to choose by, and a compressed body with the rest.
//!
//! The members and their order are those of the service before this one, whose rows and objects are read as well.

use std::io::Read;

use flate2::read::GzDecoder;
use flate2::{Compress, Compression, Crc, FlushCompress, Status};
use serde::{Deserialize, Serialize};

/// Most bytes that a body unpacks to; a publish takes less, so more is damage.
const BODY_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// A gzip header without name and time: the same body is the same bytes.
const GZIP_HEADER: [u8; 10] = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];

/// What readers do not choose by.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Body {
    /// Version of the event type.
    pub version: i64,
    /// Who acted, as stored JSON text.
    pub actor: String,
    /// Revision of the subject.
    pub subject_revision: Option<i64>,
    /// The trace.
    pub trace_id: String,
    /// `critical`, `important` or `low`.
    pub priority: String,
    /// The envelope's `timestamp`.
    pub occurred_at: String,
    /// The payload, as stored JSON text.
    pub payload: String,
    /// How deep it stands in its trace.
    pub hops: i32,
    /// The principal that published it.
    pub publisher: String,
    /// The server's id of the publish request.
    pub request_id: Option<String>,
    /// Its size as it was counted.
    pub size_bytes: i64,
    /// The event or operator that redacted it.
    pub redacted_by: Option<String>,
    /// For whom the actor acted, as stored JSON text; the former service had no such member.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_behalf_of: Option<String>,
}

/// A whole row of the replay tier: one line of an archive object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedEvent {
    /// `evt_…`.
    pub id: String,
    /// Its position.
    pub seq: i64,
    /// Its type.
    pub event_type: String,
    /// Who published it.
    pub source: String,
    /// Kind of what it is about.
    pub subject_type: String,
    /// Id of what it is about.
    pub subject_id: String,
    /// `public`, `subject` or `internal`.
    pub visibility: String,
    /// The developer app's project.
    pub project_id: Option<String>,
    /// `production` or `sandbox`.
    pub env: String,
    /// When it was stored, milliseconds.
    pub received_at: i64,
    /// When it was redacted, milliseconds.
    pub redacted_at: Option<i64>,
    /// 1 where it carries a directive.
    pub redacts: i32,
    /// The rest.
    #[serde(flatten)]
    pub body: Body,
    /// The history that its position belongs to.
    pub epoch: i64,
    /// When it left the hot store, milliseconds.
    pub archived_at: i64,
}

impl Body {
    /// The body of stored bytes, or nothing where they are damaged.
    pub fn unpack(packed: &[u8]) -> Option<Self> {
        let mut text = Vec::new();
        let mut unpacked = GzDecoder::new(packed).take(BODY_BYTES_MAX);
        unpacked.read_to_end(&mut text).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// The id of the user that acted; nothing where a service did.
    pub fn user(&self) -> Option<String> {
        #[derive(Deserialize)]
        struct Actor {
            #[serde(rename = "type")]
            kind: String,
            id: String,
        }
        let actor: Actor = serde_json::from_str(&self.actor).ok()?;
        (actor.kind == "user").then_some(actor.id)
    }
}

/// Packs bodies, one after the other, with one compressor: to make one costs more than to pack an event.
#[derive(Debug)]
pub struct Packer {
    compress: Compress,
    text: Vec<u8>,
}

impl Default for Packer {
    fn default() -> Self {
        Self {
            compress: Compress::new(Compression::new(6), false),
            text: Vec::new(),
        }
    }
}

impl Packer {
    /// The bytes that [`Body::unpack`] takes.
    pub fn pack(&mut self, body: &Body) -> Vec<u8> {
        self.text.clear();
        serde_json::to_writer(&mut self.text, body).expect("a body is plain data, and memory takes every byte");
        self.compress.reset();
        // Room for what cannot be made smaller: five bytes for each block, and the frame.
        let mut packed = Vec::with_capacity(self.text.len() + self.text.len() / 1024 * 5 + 128);
        packed.extend_from_slice(&GZIP_HEADER);
        loop {
            let read = usize::try_from(self.compress.total_in()).expect("a body in memory");
            let status = self
                .compress
                .compress_vec(&self.text[read..], &mut packed, FlushCompress::Finish)
                .expect("a stream that was just reset");
            if status == Status::StreamEnd {
                break;
            }
            packed.reserve(1024);
        }
        let mut crc = Crc::new();
        crc.update(&self.text);
        packed.extend_from_slice(&crc.sum().to_le_bytes());
        packed.extend_from_slice(&crc.amount().to_le_bytes());
        packed.shrink_to_fit();
        packed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(payload: String) -> Body {
        Body {
            version: 1,
            actor: r#"{"type":"user","id":"usr_1"}"#.to_owned(),
            subject_revision: Some(3),
            trace_id: "trc_1".to_owned(),
            priority: "low".to_owned(),
            occurred_at: "2026-01-01T00:00:00Z".to_owned(),
            size_bytes: i64::try_from(payload.len()).unwrap(),
            payload,
            hops: 1,
            publisher: "svc:live".to_owned(),
            request_id: None,
            redacted_by: None,
            on_behalf_of: None,
        }
    }

    #[test]
    fn what_is_packed_is_unpacked_whatever_its_size_and_however_often() {
        let mut packer = Packer::default();
        let noise: String = (0..70_000_u32)
            .map(|n| char::from(b' ' + u8::try_from(n.wrapping_mul(2_654_435_761) >> 26).unwrap()))
            .collect();
        for payload in [
            "{}".to_owned(),
            r#"{"é":"\u0000 🛰️"}"#.to_owned(),
            noise,
            "0".repeat(65_536),
        ] {
            let body = body(payload);
            let packed = packer.pack(&body);
            assert_eq!(Body::unpack(&packed), Some(body.clone()));
            assert_eq!(packer.pack(&body), packed, "the same body is the same bytes");
            assert_eq!(Body::unpack(&packed[..packed.len() - 9]), None, "a cut body is damage");
        }
    }

    #[test]
    fn a_line_has_the_members_of_the_former_service_in_their_order() {
        let line = PackedEvent {
            id: "evt_1".to_owned(),
            seq: 7,
            event_type: "live.x.y".to_owned(),
            source: "live".to_owned(),
            subject_type: "thing".to_owned(),
            subject_id: "1".to_owned(),
            visibility: "public".to_owned(),
            project_id: None,
            env: "production".to_owned(),
            received_at: 1,
            redacted_at: None,
            redacts: 0,
            body: body("{\"a\":1.0}".to_owned()),
            epoch: 0,
            archived_at: 2,
        };
        let text = serde_json::to_string(&line).unwrap();
        assert_eq!(
            text,
            r#"{"id":"evt_1","seq":7,"event_type":"live.x.y","source":"live","subject_type":"thing","subject_id":"1","#
                .to_owned()
                + r#""visibility":"public","project_id":null,"env":"production","received_at":1,"redacted_at":null,"redacts":0,"#
                + r#""version":1,"actor":"{\"type\":\"user\",\"id\":\"usr_1\"}","subject_revision":3,"trace_id":"trc_1","#
                + r#""priority":"low","occurred_at":"2026-01-01T00:00:00Z","payload":"{\"a\":1.0}","hops":1,"#
                + r#""publisher":"svc:live","request_id":null,"size_bytes":9,"redacted_by":null,"epoch":0,"archived_at":2}"#
        );
        assert_eq!(serde_json::from_str::<PackedEvent>(&text).unwrap(), line);
    }
}
