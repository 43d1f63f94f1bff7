//! What hostile bytes are tried on. Each target takes any bytes and panics where a promise of the product is broken.
//!
//! `cargo fuzz` drives these with coverage; the integration tests of the product replay the corpus and mutations of it.

use std::net::IpAddr;
use std::str;

use axum::http::Uri;
use openvibe_events::domain::batch::{self, BATCH_MAX, PublishBody};
use openvibe_events::domain::cursor::Cursor;
use openvibe_events::domain::envelope::Envelope;
use openvibe_events::domain::ids::{is_event_type, is_trace_id};
use openvibe_events::domain::json::{check_document, compact};
use openvibe_events::domain::signature::{header_v2, sign_v2, verify_v2};
use openvibe_events::domain::topic::{LIST_MAX, TopicPattern};
use openvibe_events::domain::trace::Traceparent;
use openvibe_events::egress::{AppEndpoint, is_public};
use url::{Host, Url};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const SECRET: &str = "0123456789abcdef0123456789abcdef";
const NOW_S: i64 = 1_761_033_600;

/// The body of a publish: what is accepted is written as well-formed JSON that reads as the same event.
pub fn envelope(data: &[u8]) {
    let Ok(body) = check_document(data) else { return };
    let items = match batch::split(body) {
        Ok(PublishBody::Single(item)) => vec![item],
        Ok(PublishBody::Batch(items)) => items,
        Err(_) => return,
    };
    assert!((1..=BATCH_MAX).contains(&items.len()));
    for item in items {
        match Envelope::parse(item, TRACE) {
            Ok((envelope, _)) => {
                let mut written = String::new();
                envelope.write_json(&mut written);
                let written = check_document(written.as_bytes()).expect("what is written is well formed");
                assert_eq!(compact(written), written, "what is written has no white space to lose");
                let (again, _) = Envelope::parse(written, "").expect("what is written is accepted");
                assert_eq!(again, envelope);
                assert!(envelope.size_bytes() >= 0);
            }
            Err(faults) => assert!(!faults.is_empty(), "a refusal says why"),
        }
    }
}

/// A pattern on the first line, an event type on the second: what matches is what the definition of a pattern says.
pub fn topic_pattern(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    let (given, event_type) = text.split_once('\n').unwrap_or((text, "live.stream.started"));
    if let Some(list) = TopicPattern::parse_list(given) {
        assert!((1..=LIST_MAX).contains(&list.len()));
        assert!(
            list.iter()
                .all(|one| TopicPattern::parse(one.as_str()).as_ref() == Some(one))
        );
    }
    let Some(pattern) = TopicPattern::parse(given) else {
        return;
    };
    assert_eq!(pattern.as_str(), given);
    assert_eq!(pattern.exact().is_some(), !given.contains('*'));
    if is_event_type(event_type) {
        let (pattern_segments, segments) = (segments(given), segments(event_type));
        assert_eq!(
            pattern.matches(event_type),
            covers(&pattern_segments, &segments),
            "{given} {event_type}"
        );
    }
    // Whatever it is asked about, it answers.
    pattern.matches(event_type);
}

fn segments(dotted: &str) -> Vec<&str> {
    dotted.split('.').collect()
}

/// The definition: a star stands for one or more segments.
fn covers(pattern: &[&str], segments: &[&str]) -> bool {
    // Which beginnings of the pattern fit the segments so far.
    let mut fits = vec![false; pattern.len() + 1];
    fits[0] = true;
    for segment in segments {
        let mut next = vec![false; pattern.len() + 1];
        for (at, wanted) in pattern.iter().enumerate() {
            let star = *wanted == "*";
            if fits[at] && (star || wanted == segment) || star && fits[at + 1] {
                next[at + 1] = true;
            }
        }
        fits = next;
    }
    fits[pattern.len()]
}

/// A cursor has one spelling.
pub fn cursor(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    if let Ok(cursor) = text.parse::<Cursor>() {
        assert_eq!(cursor.to_string(), text);
        assert!(cursor.epoch >= 0 && (0..1 << 53).contains(&cursor.position));
    }
}

/// A signature header on the first line, the signed body behind it: no header is genuine without the signature itself.
pub fn signature(data: &[u8]) {
    let end = data.iter().position(|byte| *byte == b'\n').unwrap_or(data.len());
    let (header, body) = (&data[..end], data.get(end + 1..).unwrap_or_default());
    assert!(verify_v2(
        &header_v2(NOW_S, &[SECRET], body),
        None,
        body,
        SECRET,
        NOW_S,
        300
    ));
    let Ok(header) = str::from_utf8(header) else { return };
    if verify_v2(header, None, body, SECRET, NOW_S, 300) {
        let header = header.to_ascii_lowercase();
        let genuine = (NOW_S - 300..=NOW_S + 300).any(|stamp| header.contains(&sign_v2(SECRET, stamp, body)));
        assert!(genuine, "accepted without a signature: {header:?}");
    }
    let (stamp, rest) = header.split_once('\r').unwrap_or((header, header));
    verify_v2(rest, Some(stamp), body, SECRET, NOW_S, 300);
}

/// A trace context reads as itself.
pub fn traceparent(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    let Some(context) = Traceparent::parse(text) else {
        return;
    };
    let written = context.to_string();
    assert_eq!(written, text.trim().to_ascii_lowercase());
    assert_eq!(Traceparent::parse(&written).as_ref(), Some(&context));
    assert!(is_trace_id(context.trace_id()));
    let next = context.next_span();
    assert_eq!(next.trace_id(), context.trace_id());
    assert_ne!(next, context);
}

/// An endpoint of an app that is accepted leads to a public host, for whoever reads it.
pub fn app_endpoint(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    let Ok(endpoint) = AppEndpoint::parse(text) else { return };
    let stored = endpoint.as_str();
    assert_eq!(
        AppEndpoint::parse(stored).as_ref(),
        Ok(&endpoint),
        "it is accepted as it is stored"
    );
    let url = Url::parse(stored).expect("a URL");
    assert_eq!(url.scheme(), "https");
    assert!(url.username().is_empty() && url.password().is_none());
    let host = match url.host().expect("a host") {
        Host::Ipv4(address) => {
            assert!(is_public(address.into()), "{stored}");
            address.to_string()
        }
        Host::Ipv6(address) => {
            assert!(is_public(address.into()), "{stored}");
            format!("[{address}]")
        }
        Host::Domain(name) => {
            assert!(
                name.contains('.') && !name.ends_with('.') && name.parse::<IpAddr>().is_err(),
                "{stored}"
            );
            for inside in [".localhost", ".local", ".internal", ".home.arpa"] {
                assert!(!name.ends_with(inside), "{stored}");
            }
            name.to_owned()
        }
    };
    // What dials reads the stored text with another parser.
    if let Ok(uri) = stored.parse::<Uri>() {
        let dialled = uri
            .host()
            .map(|dialled| match dialled.trim_matches(['[', ']']).parse() {
                Ok(IpAddr::V6(address)) => format!("[{address}]"),
                _ => dialled.to_owned(),
            });
        assert_eq!(dialled.as_deref(), Some(host.as_str()), "{stored}");
        assert_eq!(uri.port_u16().unwrap_or(443), url.port().unwrap_or(443), "{stored}");
    }
}
