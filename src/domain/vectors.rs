//! The published test vectors of the contracts that the domain types implement, line by line.

use super::batch::{BatchFault, PublishBody, split};
use super::envelope::{Envelope, SubjectRef};
use super::json::{Members, check_document};
use super::retry::RetryPolicy;
use super::topic::TopicPattern;

/// `events.event-envelope@1`
const ENVELOPE: &str = r#"
VALID {"event_id":"evt_01K7AAB2CD3EF4GH5JK6MN7PQR","event_type":"media.vod.ready","version":1,"source":"media","actor":{"type":"service","id":"media"},"timestamp":"2026-10-21T08:15:30.250Z","subject":{"type":"vod","id":"v-77","revision":3},"payload":{}}
VALID {"event_id":"evt_01K7AAB2CD3EF4GH5JK6MN7PQR","trace_id":"4bf92f3577b34da6a3ce929d0e0e4736","event_type":"app.p01k7bbc3de4fg5hj6km7np8qrs.invoice.paid","version":2,"source":"app-01k7ccd4ef5gh6jk7mn8pq9rst","actor":{"type":"app","id":"app_01K7CCD4EF5GH6JK7MN8PQ9RST"},"on_behalf_of":{"type":"user","id":"usr_01K7DDE5FG6HJ7KM8NP9QR0STV"},"timestamp":"2026-10-21T10:15:30+02:00","priority":"low","visibility":"subject","subject":{"type":"","id":"INV 9/é"},"payload":{"nested":{"a":[1,2]}}}
INVALID(two segment type) {"event_id":"evt_01K7AAB2CD3EF4GH5JK6MN7PQR","event_type":"media.ready","version":1,"source":"media","actor":{"type":"service","id":"media"},"timestamp":"2026-10-21T08:15:30Z","subject":{"type":"vod","id":"v-77"},"payload":{}}
INVALID(unknown member seq) {"event_id":"evt_01K7AAB2CD3EF4GH5JK6MN7PQR","seq":9,"event_type":"media.vod.ready","version":1,"source":"media","actor":{"type":"service","id":"media"},"timestamp":"2026-10-21T08:15:30Z","subject":{"type":"vod","id":"v-77"},"payload":{}}
INVALID(priority normal) {"event_id":"evt_01K7AAB2CD3EF4GH5JK6MN7PQR","event_type":"media.vod.ready","version":1,"source":"media","actor":{"type":"service","id":"media"},"timestamp":"2026-10-21T08:15:30Z","priority":"normal","subject":{"type":"vod","id":"v-77"},"payload":{}}
INVALID(service-local actor id) {"event_id":"evt_01K7AAB2CD3EF4GH5JK6MN7PQR","event_type":"media.vod.ready","version":1,"source":"media","actor":{"type":"user","id":"42"},"timestamp":"2026-10-21T08:15:30Z","subject":{"type":"vod","id":"v-77"},"payload":{}}
INVALID(zoneless time) {"event_id":"evt_01K7AAB2CD3EF4GH5JK6MN7PQR","event_type":"media.vod.ready","version":1,"source":"media","actor":{"type":"service","id":"media"},"timestamp":"2026-10-21T08:15:30","subject":{"type":"vod","id":"v-77"},"payload":{}}
INVALID(raw app source) {"event_id":"evt_01K7AAB2CD3EF4GH5JK6MN7PQR","event_type":"media.vod.ready","version":1,"source":"app:app_01K7CCD4EF5GH6JK7MN8PQ9RST","actor":{"type":"service","id":"media"},"timestamp":"2026-10-21T08:15:30Z","subject":{"type":"vod","id":"v-77"},"payload":{}}
INVALID(ULID with excluded letter I) {"event_id":"evt_01K7AAB2CD3EF4GH5JK6MN7PQI","event_type":"media.vod.ready","version":1,"source":"media","actor":{"type":"service","id":"media"},"timestamp":"2026-10-21T08:15:30Z","subject":{"type":"vod","id":"v-77"},"payload":{}}
INVALID(payload array) {"event_id":"evt_01K7AAB2CD3EF4GH5JK6MN7PQR","event_type":"media.vod.ready","version":1,"source":"media","actor":{"type":"service","id":"media"},"timestamp":"2026-10-21T08:15:30Z","subject":{"type":"vod","id":"v-77"},"payload":[]}
"#;

/// `events.publish-request@1`
const PUBLISH_REQUEST: &str = r#"
VALID {"events":[{"event_id":"evt_01K7AAB2CD3EF4GH5JK6MN7PQR","event_type":"live.stream.started","version":1,"source":"live","actor":{"type":"system","id":"live"},"timestamp":"2026-10-21T08:00:00Z","subject":{"type":"stream","id":"5"},"payload":{}}]}
INVALID(empty batch) {"events":[]}
INVALID(batch with an event_id beside it) {"event_id":"evt_01K7AAB2CD3EF4GH5JK6MN7PQR","events":[{"event_id":"evt_01K7AAB2CD3EF4GH5JK6MN7PQR","event_type":"live.stream.started","version":1,"source":"live","actor":{"type":"system","id":"live"},"timestamp":"2026-10-21T08:00:00Z","subject":{"type":"stream","id":"5"},"payload":{}}]}
INVALID(one bad envelope in the batch) {"events":[{"event_id":"evt_1","event_type":"live.stream.started"}]}
"#;

/// `identity.subject-ref@1`
const SUBJECT_REF: &str = r#"
VALID {"type":"user","id":"usr_01K7DDE5FG6HJ7KM8NP9QR0STV"}
VALID {"type":"system","id":"network"}
INVALID(prefix of another type) {"type":"user","id":"gst_01K7DDE5FG6HJ7KM8NP9QR0STV"}
INVALID(project is not a subject) {"type":"project","id":"prj_01K7BBC3DE4FG5HJ6KM7NP8QRS"}
INVALID(display name added) {"type":"service","id":"live","name":"Live"}
"#;

/// `events.read-request@1`
const READ_REQUEST: &str = r#"
VALID {"topic":"media.vod.*","cursor":"opaque-1","carrier":"pg-v1"}
VALID {}
INVALID(numeric cursor) {"topic":"media.vod.*","cursor":88}
INVALID(upper case and hyphen in a pattern) {"topic":"Media.vod-x.*","cursor":"opaque-1"}
INVALID(no cursor) {"topic":"media.vod.*"}
INVALID(person topic) {"topic":"user:usr_01K7DDE5FG6HJ7KM8NP9QR0STV","cursor":"opaque-1"}
"#;

/// `events.subscription-request@1`
const SUBSCRIPTION_REQUEST: &str = r#"
VALID {"topic_pattern":"media.vod.*","endpoint":"http://127.0.0.1:3000/internal/events","retry_policy":{"max_attempts":8,"backoff_ms":[1000,5000]}}
VALID {"topic":"live.*","endpoint":"https://hooks.example.net/ov","retry_policy":null,"secret":"0123456789abcdef0123456789abcdef"}
INVALID(no pattern) {"endpoint":"https://hooks.example.net/ov"}
INVALID(unknown retry field) {"topic_pattern":"live.*","endpoint":"https://hooks.example.net/ov","retry_policy":{"jitter":true}}
INVALID(short secret) {"topic_pattern":"live.*","endpoint":"https://hooks.example.net/ov","secret":"short"}
INVALID(21 attempts) {"topic_pattern":"live.*","endpoint":"https://hooks.example.net/ov","retry_policy":{"max_attempts":21}}
INVALID(not a web address) {"topic_pattern":"live.*","endpoint":"ftp://hooks.example.net/ov"}
"#;

/// Runs every line of a block: `VALID` must be accepted, `INVALID(why)` refused.
fn run(block: &str, accepts: impl Fn(&str) -> bool) {
    let mut lines = 0;
    for line in block.lines().filter(|line| !line.is_empty()) {
        let (verdict, json) = line.split_at(line.find('{').expect("every vector is an object"));
        assert!(check_document(json.as_bytes()).is_ok(), "{line}");
        assert_eq!(accepts(json), verdict.starts_with("VALID"), "{line}");
        lines += 1;
    }
    assert!(lines > 1, "the block has lines");
}

fn is_envelope(json: &str) -> bool {
    Envelope::parse(json, "4bf92f3577b34da6a3ce929d0e0e4736").is_ok()
}

/// The text of a string member, when there is one.
fn text_of(json: &str, name: &str) -> Option<String> {
    let members = Members::parse(json).expect("an object");
    members
        .get(name)
        .map(|value| serde_json::from_str(value.get()).expect("a string"))
}

#[test]
fn envelopes() {
    run(ENVELOPE, is_envelope);
}

#[test]
fn accepted_envelopes_are_written_as_valid_ones() {
    for line in ENVELOPE.lines().filter_map(|line| line.strip_prefix("VALID ")) {
        let (envelope, _) = Envelope::parse(line, "4bf92f3577b34da6a3ce929d0e0e4736").expect("valid");
        let mut out = String::new();
        envelope.write_json(&mut out);
        assert_eq!(Envelope::parse(&out, "").expect("valid").0, envelope);
    }
}

#[test]
fn publish_requests() {
    run(PUBLISH_REQUEST, |json| match split(json) {
        Ok(PublishBody::Single(one)) => is_envelope(one),
        Ok(PublishBody::Batch(items)) => items.into_iter().all(is_envelope),
        Err(fault) => {
            assert_eq!(fault, BatchFault::Empty);
            false
        }
    });
}

#[test]
fn subject_references() {
    run(SUBJECT_REF, |json| SubjectRef::parse_json(json).is_some());
}

/// Topics only; the other members of these requests are judged where the requests are read.
#[test]
fn topics_of_requests() {
    for line in READ_REQUEST
        .lines()
        .chain(SUBSCRIPTION_REQUEST.lines())
        .filter(|line| !line.is_empty())
    {
        let (verdict, json) = line.split_at(line.find('{').expect("every vector is an object"));
        let bad = ["upper case", "person topic"].iter().any(|why| verdict.contains(why));
        for topic in ["topic", "topic_pattern"].iter().filter_map(|name| text_of(json, name)) {
            assert_eq!(TopicPattern::parse(&topic).is_some(), !bad, "{line}");
        }
    }
}

#[test]
fn retry_policies_of_subscription_requests() {
    for line in SUBSCRIPTION_REQUEST.lines().filter(|line| !line.is_empty()) {
        let (verdict, json) = line.split_at(line.find('{').expect("every vector is an object"));
        let bad = ["unknown retry field", "21 attempts"]
            .iter()
            .any(|why| verdict.contains(why));
        let members = Members::parse(json).expect("an object");
        if let Some(policy) = members.get("retry_policy") {
            assert_eq!(RetryPolicy::parse(policy.get()).is_ok(), !bad, "{line}");
        }
    }
}
