//! Envelopes and the ids in them, all fresh, so that no test sees another's events.

use serde_json::{Value, json};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

/// A fresh id: the prefix, an underscore and a ULID in upper case.
pub(crate) fn id(prefix: &str) -> String {
    format!("{prefix}_{}", ulid::Ulid::generate())
}

/// A fresh event id.
pub(crate) fn event_id() -> String {
    id("evt")
}

/// A fresh word that may stand as a segment of an event type.
pub(crate) fn unique_segment() -> String {
    format!("t{}", ulid::Ulid::generate().to_string().to_lowercase())
}

/// A fresh event type in a source's own namespace (its name without hyphens).
pub(crate) fn unique_type(source: &str) -> String {
    format!("{}.{}.happened", source.replace('-', ""), unique_segment())
}

/// The present time as the wire writes it.
pub(crate) fn now_text() -> String {
    OffsetDateTime::now_utc()
        .format(&Rfc3339)
        .expect("a present time has an RFC 3339 form")
}

/// A valid envelope of `source`: a fresh id and a fresh type, nothing that has a default.
pub(crate) fn envelope(source: &str) -> Envelope {
    Envelope(json!({
        "event_id": event_id(),
        "event_type": unique_type(source),
        "version": 1,
        "source": source,
        "actor": { "type": "service", "id": source },
        "timestamp": now_text(),
        "subject": { "type": "thing", "id": "1" },
        "payload": { "greeting": "hello" },
    }))
}

/// `count` envelopes of one source and one fresh type, told apart by `payload.n`.
pub(crate) fn envelopes(source: &str, count: usize) -> Vec<Envelope> {
    let event_type = unique_type(source);
    (0..count)
        .map(|n| envelope(source).event_type(&event_type).payload(json!({ "n": n })))
        .collect()
}

/// The body of a batch publish.
pub(crate) fn batch(envelopes: &[Envelope]) -> Value {
    json!({ "events": envelopes.iter().map(|envelope| &envelope.0).collect::<Vec<_>>() })
}

/// An envelope under construction; `json` is what goes on the wire.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Envelope(Value);

impl Envelope {
    /// Replaces any member, valid or not.
    pub(crate) fn set(mut self, member: &str, value: impl Into<Value>) -> Self {
        self.0[member] = value.into();
        self
    }

    /// Leaves a member out.
    pub(crate) fn without(mut self, member: &str) -> Self {
        self.0.as_object_mut().expect("an envelope is an object").remove(member);
        self
    }

    /// Sets `event_id`.
    pub(crate) fn with_id(self, event_id: &str) -> Self {
        self.set("event_id", event_id)
    }

    /// Sets `event_type`.
    pub(crate) fn event_type(self, event_type: &str) -> Self {
        self.set("event_type", event_type)
    }

    /// Sets `subject`.
    pub(crate) fn subject(self, subject_type: &str, subject_id: &str) -> Self {
        self.set("subject", json!({ "type": subject_type, "id": subject_id }))
    }

    /// Sets `payload`.
    pub(crate) fn payload(self, payload: Value) -> Self {
        self.set("payload", payload)
    }

    /// Sets `priority`.
    pub(crate) fn priority(self, priority: &str) -> Self {
        self.set("priority", priority)
    }

    /// Sets `visibility`.
    pub(crate) fn visibility(self, visibility: &str) -> Self {
        self.set("visibility", visibility)
    }

    /// The `event_id`; empty when it was taken out or is no string.
    pub(crate) fn id(&self) -> &str {
        self.text("event_id")
    }

    /// The `event_type`; empty when it was taken out or is no string.
    pub(crate) fn type_name(&self) -> &str {
        self.text("event_type")
    }

    /// The `source`; empty when it was taken out or is no string.
    pub(crate) fn source(&self) -> &str {
        self.text("source")
    }

    /// The envelope as JSON.
    pub(crate) fn json(&self) -> &Value {
        &self.0
    }

    fn text(&self, member: &str) -> &str {
        self.0[member].as_str().unwrap_or_default()
    }
}
