//! Publish requests as bytes, made once; only ids and keys are written into them before each is sent.

use rand::RngExt as _;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::keys::unix_now;

/// The source that the tool publishes as.
pub(crate) const SOURCE: &str = "live";
/// Bytes of an id without its prefix.
const ULID_BYTES: usize = 26;
/// Characters at the end of an id that carry the number of the event.
const NUMBER_CHARS: usize = 8;
/// Digits of a key.
const KEY_DIGITS: usize = 7;
const CROCKFORD: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";
const ID_MARK: &str = "00000000000000000000000000";

/// A publish request of one or several events.
#[derive(Debug, Clone)]
pub(crate) struct Template {
    bytes: Vec<u8>,
    ids_at: Vec<usize>,
    keys_at: Vec<usize>,
}

/// What all requests of a run have in common.
#[derive(Debug, Clone)]
pub(crate) struct Shape<'a> {
    /// The value of the Host header.
    pub(crate) host: &'a str,
    /// The bearer token.
    pub(crate) token: &'a str,
    /// Their type.
    pub(crate) event_type: &'a str,
    /// Events in one request; one is sent bare, not as a list.
    pub(crate) batch: usize,
    /// Bytes of each payload as JSON.
    pub(crate) payload_bytes: usize,
}

impl Template {
    /// The request without ids.
    pub(crate) fn new(shape: &Shape<'_>) -> Self {
        let stamp = OffsetDateTime::UNIX_EPOCH + unix_now();
        let stamp = stamp.format(&Rfc3339).expect("a present time has an RFC 3339 form");
        let mut body = String::new();
        let (mut ids_at, mut keys_at) = (Vec::new(), Vec::new());
        let single = shape.batch == 1;
        if !single {
            body.push_str(r#"{"events":["#);
        }
        for index in 0..shape.batch {
            if index > 0 {
                body.push(',');
            }
            body.push_str(r#"{"event_id":"evt_"#);
            ids_at.push(body.len());
            body.push_str(ID_MARK);
            body.push_str(&format!(
                r#"","event_type":"{}","version":1,"source":"{SOURCE}","actor":{{"type":"service","id":"{SOURCE}"}},"timestamp":"{stamp}","subject":{{"type":"load","id":"k"#,
                shape.event_type
            ));
            keys_at.push(body.len());
            body.push_str("0000000\"},\"payload\":");
            body.push_str(&payload(shape.payload_bytes));
            body.push('}');
        }
        if !single {
            body.push_str("]}");
        }
        let head = format!(
            "POST /api/v1/events HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            shape.host,
            shape.token,
            body.len()
        );
        for at in ids_at.iter_mut().chain(&mut keys_at) {
            *at += head.len();
        }
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(body.as_bytes());
        Self { bytes, ids_at, keys_at }
    }

    /// Events in each request.
    pub(crate) fn events(&self) -> usize {
        self.ids_at.len()
    }

    /// Names the events of the next request: numbers from `first` on, all with one key.
    pub(crate) fn fill(&mut self, first: u64, key: u32) -> &[u8] {
        let unix_ms = u64::try_from(unix_now().as_millis()).unwrap_or_default();
        for (number, (&id_at, &key_at)) in (first..).zip(self.ids_at.iter().zip(&self.keys_at)) {
            write_ulid(
                &mut self.bytes[id_at..id_at + ULID_BYTES],
                unix_ms,
                rand::random(),
                number,
            );
            write_digits(&mut self.bytes[key_at..key_at + KEY_DIGITS], key);
        }
        &self.bytes
    }
}

/// A new id of the event of that number, `evt_` included.
pub(crate) fn event_id(number: u64) -> String {
    let unix_ms = u64::try_from(unix_now().as_millis()).unwrap_or_default();
    let mut ulid = [0; ULID_BYTES];
    write_ulid(&mut ulid, unix_ms, rand::random(), number);
    format!("evt_{}", String::from_utf8_lossy(&ulid))
}

/// A JSON object of exactly so many bytes (14 at least), of text that does not compress to nothing.
pub(crate) fn payload(bytes: usize) -> String {
    const FRAME: &str = r#"{"filler":""}"#;
    let filler: String = rand::rng()
        .sample_iter(rand::distr::Alphanumeric)
        .take(bytes.saturating_sub(FRAME.len()))
        .map(char::from)
        .collect();
    format!(r#"{{"filler":"{filler}"}}"#)
}

fn write_ulid(into: &mut [u8], unix_ms: u64, random: u64, number: u64) {
    let (stamp, rest) = into.split_at_mut(ULID_BYTES - 2 * NUMBER_CHARS);
    let (middle, tail) = rest.split_at_mut(NUMBER_CHARS);
    write_base32(stamp, unix_ms);
    write_base32(middle, random);
    write_base32(tail, number);
}

fn write_base32(into: &mut [u8], mut value: u64) {
    for place in into.iter_mut().rev() {
        *place = CROCKFORD[(value & 31) as usize];
        value >>= 5;
    }
}

fn write_digits(into: &mut [u8], mut value: u32) {
    for place in into.iter_mut().rev() {
        *place = b'0' + u8::try_from(value % 10).expect("a digit");
        value /= 10;
    }
}

/// The number in an event's id, `evt_` included; `None` where the tool made no such id.
pub(crate) fn number_of(event_id: &[u8]) -> Option<u64> {
    let ulid = event_id.strip_prefix(b"evt_").filter(|ulid| ulid.len() == ULID_BYTES)?;
    ulid[ULID_BYTES - NUMBER_CHARS..].iter().try_fold(0, |number, char| {
        let digit = CROCKFORD.iter().position(|known| known == char)?;
        Some(number << 5 | u64::try_from(digit).ok()?)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::wire::content_length;

    fn body_of(request: &[u8]) -> Value {
        let mut headers = [httparse::EMPTY_HEADER; 8];
        let mut head = httparse::Request::new(&mut headers);
        let head_bytes = head.parse(request).expect("a head").unwrap();
        let length = content_length(head.headers).expect("a length").expect("one");
        assert_eq!(request.len(), head_bytes + length, "the length is that of the body");
        serde_json::from_slice(&request[head_bytes..]).expect("JSON")
    }

    fn template(batch: usize) -> Template {
        Template::new(&Shape {
            host: "h",
            token: "t",
            event_type: "live.load.happened",
            batch,
            payload_bytes: 1024,
        })
    }

    #[test]
    fn one_event_is_sent_bare_with_its_number_in_its_id() {
        let mut template = template(1);
        let first = body_of(template.fill(12_345_678, 42));
        let id = first["event_id"].as_str().expect("an id");
        assert_eq!(number_of(id.as_bytes()), Some(12_345_678));
        assert_eq!(first["subject"]["id"], "k0000042");
        assert_eq!(first["payload"].to_string().len(), 1024);
        let second = body_of(template.fill(12_345_678, 43));
        assert_ne!(
            second["event_id"], first["event_id"],
            "a number used again makes another id"
        );
        assert_eq!(second["subject"]["id"], "k0000043");
    }

    #[test]
    fn a_batch_numbers_its_events_in_order() {
        let mut template = template(3);
        let body = body_of(template.fill(7, 1));
        let numbers: Vec<_> = body["events"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|event| number_of(event["event_id"].as_str().expect("an id").as_bytes()))
            .collect();
        assert_eq!(numbers, [Some(7), Some(8), Some(9)]);
    }

    #[test]
    fn foreign_ids_have_no_number() {
        assert_eq!(number_of(b"evt_short"), None);
        assert_eq!(number_of(b"evt_01K7AAB2CD3EF4GH5JK6MN7PQu"), None);
    }
}
