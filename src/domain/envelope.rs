//! The event envelope: reading one from a publisher with every failure named, and writing it the same way everywhere.

use std::fmt;

use serde::Serialize;
use serde_json::value::RawValue;

use super::ids::{EventId, is_event_type, is_prefixed_id, is_slug, is_trace_id};
use super::json::{self, Members, StringFault};
use super::time::is_rfc3339;

/// Longest `event_type`, `subject.type` and `subject.id`, in bytes of UTF-8. Larger ones would not fit an index.
pub const TEXT_MAX_BYTES: usize = 1024;

/// Unknown members named one by one in a refusal; the rest are counted.
const UNKNOWN_NAMED_MAX: usize = 20;

/// Characters of an unknown member's name that a refusal repeats.
const NAME_SHOWN_MAX: usize = 64;

/// One thing wrong with a request body.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FieldError {
    /// JSON pointer to the member at fault; `/` for the whole value.
    pub path: String,
    /// What is wrong and what would be right, naming the member.
    pub message: String,
}

impl FieldError {
    /// A fault at a JSON pointer.
    pub fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            message: message.into(),
        }
    }
}

/// Closed word lists of the wire: a type with its words, in order.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name { $($(#[$vdoc])* $variant),+ }

        impl $name {
            /// The word of the wire.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word),+ }
            }

            /// The value a word of the wire stands for.
            pub fn parse(text: &str) -> Option<Self> {
                match text { $($word => Some(Self::$variant),)+ _ => None }
            }

            const WORDS: &'static [&'static str] = &[$($word),+];
        }

        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

words! {
    /// How urgently an event's deliveries are taken up; an event that names none is important.
    Priority {
        /// Before all others.
        Critical = "critical",
        /// The usual case.
        Important = "important",
        /// After all others.
        Low = "low",
    }
}

words! {
    /// Who may see an event; an event that names none is internal.
    Visibility {
        /// Anyone.
        Public = "public",
        /// The person it is about or who caused it, and services.
        Subject = "subject",
        /// Services only.
        Internal = "internal",
    }
}

words! {
    /// The kinds of subject that can act.
    SubjectKind {
        /// A person, `usr_<ULID>`.
        User = "user",
        /// A visitor without an account, `gst_<ULID>`.
        Guest = "guest",
        /// A developer app, `app_<ULID>`.
        App = "app",
        /// A module, `mod_<ULID>`.
        Mod = "mod",
        /// An agent, `agt_<ULID>`.
        Agent = "agent",
        /// A service of the network, by its slug.
        Service = "service",
        /// A part of the network itself, by its slug.
        System = "system",
    }
}

impl SubjectKind {
    /// The id prefix of this kind; `None` for kinds named by a slug.
    fn prefix(self) -> Option<&'static str> {
        match self {
            Self::User => Some("usr"),
            Self::Guest => Some("gst"),
            Self::App => Some("app"),
            Self::Mod => Some("mod"),
            Self::Agent => Some("agt"),
            Self::Service | Self::System => None,
        }
    }
}

/// Who did something: a kind and an id that fits it (`identity.subject-ref@1`).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SubjectRef {
    kind: SubjectKind,
    id: String,
}

impl SubjectRef {
    /// A reference whose id has the form of its kind; `None` otherwise.
    pub fn new(kind: SubjectKind, id: impl Into<String>) -> Option<Self> {
        let id = id.into();
        let fits = match kind.prefix() {
            Some(prefix) => is_prefixed_id(prefix, &id),
            None => is_slug(&id),
        };
        fits.then_some(Self { kind, id })
    }

    /// The kind of subject.
    pub fn kind(&self) -> SubjectKind {
        self.kind
    }

    /// The id, in the form of its kind.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The stored and sent form, `{"type":"…","id":"…"}`.
    pub fn to_json(&self) -> String {
        // Neither word list nor id grammar has a character that JSON would escape.
        format!(r#"{{"type":"{}","id":"{}"}}"#, self.kind, self.id)
    }

    /// Reads the stored form, with the members in any order; `None` for anything else.
    pub fn parse_json(text: &str) -> Option<Self> {
        let mut faults = Faults::default();
        let value: &RawValue = serde_json::from_str(text).ok()?;
        faults.subject_ref("", "actor", value).filter(|_| faults.0.is_empty())
    }
}

impl Serialize for SubjectRef {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeStruct;

        let mut members = serializer.serialize_struct("SubjectRef", 2)?;
        members.serialize_field("type", &self.kind)?;
        members.serialize_field("id", &self.id)?;
        members.end()
    }
}

/// What an event is about: a kind and an id of the producer's own making.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// `subject.type`, any text of at most [`TEXT_MAX_BYTES`].
    pub kind: String,
    /// `subject.id`, any text of at most [`TEXT_MAX_BYTES`].
    pub id: String,
    /// The producer's ordering number of this subject, 0 or more.
    pub revision: Option<i64>,
}

/// Where an event's trace id came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceOrigin {
    /// The envelope named it.
    Given,
    /// The server took the one of the request.
    Server,
}

/// One event as it is published, stored and sent (`events.event-envelope@1`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// The producer's id.
    pub event_id: EventId,
    /// 32 lower-case hexadecimal digits.
    pub trace_id: String,
    /// Three or more segments, at most [`TEXT_MAX_BYTES`].
    pub event_type: String,
    /// Major version of the payload's contract, 1 or more.
    pub version: i64,
    /// The publishing service's slug, or `app-<ulid>`.
    pub source: String,
    /// Who did it.
    pub actor: SubjectRef,
    /// For whom the actor acted.
    pub on_behalf_of: Option<SubjectRef>,
    /// When it happened, as the producer wrote it.
    pub timestamp: String,
    /// How urgently it is delivered.
    pub priority: Priority,
    /// Who may see it.
    pub visibility: Visibility,
    /// What it is about.
    pub subject: Subject,
    /// A JSON object without insignificant white space, otherwise as received.
    pub payload: String,
}

impl Envelope {
    /// Reads one envelope from well-formed JSON of bounded depth ([`json::check_document`]). A missing trace id becomes
    /// `default_trace`. A refusal lists everything that is wrong, not only the first thing.
    pub fn parse(raw: &str, default_trace: &str) -> Result<(Self, TraceOrigin), Vec<FieldError>> {
        let mut faults = Faults::default();
        let envelope = faults.envelope(raw, default_trace);
        match envelope {
            Some(envelope) if faults.0.is_empty() => Ok(envelope),
            _ => Err(faults.0),
        }
    }

    /// What the event counts for in quotas: bytes of payload and actor as JSON, plus the lengths of the event type and
    /// the subject id in UTF-16 units.
    pub fn size_bytes(&self) -> i64 {
        let utf16 = |text: &str| text.encode_utf16().count();
        let size = self.payload.len() + self.actor.to_json().len() + utf16(&self.event_type) + utf16(&self.subject.id);
        i64::try_from(size).expect("an envelope fits in memory")
    }

    /// Appends the envelope as compact JSON, members in the order of the wire.
    pub fn write_json(&self, out: &mut String) {
        let member = |out: &mut String, name: &str, text: &str| {
            out.push_str(name);
            json::write_string(out, text);
        };
        member(out, r#"{"event_id":"#, self.event_id.as_str());
        member(out, r#","trace_id":"#, &self.trace_id);
        member(out, r#","event_type":"#, &self.event_type);
        out.push_str(r#","version":"#);
        out.push_str(&self.version.to_string());
        member(out, r#","source":"#, &self.source);
        out.push_str(r#","actor":"#);
        out.push_str(&self.actor.to_json());
        if let Some(principal) = &self.on_behalf_of {
            out.push_str(r#","on_behalf_of":"#);
            out.push_str(&principal.to_json());
        }
        member(out, r#","timestamp":"#, &self.timestamp);
        member(out, r#","priority":"#, self.priority.as_str());
        member(out, r#","visibility":"#, self.visibility.as_str());
        member(out, r#","subject":{"type":"#, &self.subject.kind);
        member(out, r#","id":"#, &self.subject.id);
        if let Some(revision) = self.subject.revision {
            out.push_str(r#","revision":"#);
            out.push_str(&revision.to_string());
        }
        out.push_str(r#"},"payload":"#);
        out.push_str(&self.payload);
        out.push('}');
    }

    /// The payload's first member of that name, however the name is escaped.
    pub fn payload_member(&self, name: &str) -> Option<&RawValue> {
        Members::parse(&self.payload)?.get(name)
    }
}

/// The failures found so far; each reader below returns `None` exactly when it has added one.
#[derive(Default)]
struct Faults(Vec<FieldError>);

impl Faults {
    fn add(&mut self, path: &str, message: impl Into<String>) {
        let path = if path.is_empty() { "/" } else { path };
        self.0.push(FieldError {
            path: path.to_owned(),
            message: message.into(),
        });
    }

    /// Sorts an object's members into the known names' places, refusing strangers and repeats.
    fn members<'a, const N: usize>(
        &mut self,
        path: &str,
        what: &str,
        json: &'a str,
        known: [&str; N],
    ) -> Option<[Option<&'a RawValue>; N]> {
        let Some(members) = Members::parse(json) else {
            self.add(path, format!("{what} must be a JSON object"));
            return None;
        };
        let mut places = [None; N];
        let mut repeated = [false; N];
        let mut strangers = 0;
        for (name, value) in members.iter() {
            match known.iter().position(|own| *own == name) {
                Some(place) if places[place].is_none() => places[place] = Some(value),
                Some(place) if !repeated[place] => {
                    repeated[place] = true;
                    self.add(
                        &pointer(path, name),
                        format!("{name} appears more than once in {what}; send it once"),
                    );
                }
                Some(_) => {}
                None => {
                    strangers += 1;
                    if strangers <= UNKNOWN_NAMED_MAX {
                        let shown: String = name.chars().take(NAME_SHOWN_MAX).collect();
                        let names = known.join(", ");
                        self.add(
                            &pointer(path, &shown),
                            format!("{shown:?} is not a member of {what}; remove it (known members: {names})"),
                        );
                    }
                }
            }
        }
        if strangers > UNKNOWN_NAMED_MAX {
            let more = strangers - UNKNOWN_NAMED_MAX;
            self.add(path, format!("{what} has {more} more unknown members; remove them"));
        }
        Some(places)
    }

    fn required<'a>(&mut self, path: &str, name: &str, value: Option<&'a RawValue>) -> Option<&'a RawValue> {
        if value.is_none() {
            self.add(
                &pointer(path, name),
                format!("{} is required; add it", dotted(path, name)),
            );
        }
        value
    }

    /// A string member that satisfies `fits`; `form` says what would.
    fn text(
        &mut self,
        path: &str,
        name: &str,
        form: impl fmt::Display,
        value: &RawValue,
        fits: impl Fn(&str) -> bool,
    ) -> Option<String> {
        let fault = match json::string(value) {
            Ok(text) if fits(&text) => return Some(text),
            Ok(_) | Err(StringFault::NotAString) => format!("must be {form}"),
            Err(StringFault::LoneSurrogate) => "holds half of a surrogate pair; send whole characters".to_owned(),
            Err(StringFault::Nul) => "holds U+0000, which cannot be stored; remove it".to_owned(),
        };
        self.add(&pointer(path, name), format!("{} {fault}", dotted(path, name)));
        None
    }

    fn integer(&mut self, path: &str, name: &str, least: i64, value: &RawValue) -> Option<i64> {
        let number = json::integer(value).filter(|number| *number >= least);
        if number.is_none() {
            let most = json::SAFE_INTEGER_MAX;
            self.add(
                &pointer(path, name),
                format!("{} must be a whole number from {least} to {most}", dotted(path, name)),
            );
        }
        number
    }

    fn word<T>(
        &mut self,
        name: &str,
        words: &'static [&'static str],
        parse: impl Fn(&str) -> Option<T>,
        value: Option<&RawValue>,
        default: T,
    ) -> Option<T> {
        let Some(value) = value else { return Some(default) };
        self.text("", name, OneOf(words), value, |text| parse(text).is_some())
            .and_then(|text| parse(&text))
    }

    fn subject_ref(&mut self, path: &str, name: &str, value: &RawValue) -> Option<SubjectRef> {
        let [kind, id] = self.members(path, name, value.get(), ["type", "id"])?;
        let (kind, id) = (self.required(path, "type", kind), self.required(path, "id", id));
        let kind = kind.and_then(|value| {
            self.text(path, "type", OneOf(SubjectKind::WORDS), value, |text| {
                SubjectKind::parse(text).is_some()
            })
        });
        let kind = kind.and_then(|text| SubjectKind::parse(&text));
        let fits = |text: &str| kind.is_none_or(|kind| SubjectRef::new(kind, text).is_some());
        let id = id.and_then(|value| self.text(path, "id", IdForm(kind), value, fits));
        SubjectRef::new(kind?, id?)
    }

    fn subject(&mut self, value: &RawValue) -> Option<Subject> {
        let path = "/subject";
        let [kind, id, revision] = self.members(path, "subject", value.get(), ["type", "id", "revision"])?;
        let mut text = |name, value| {
            let value = self.required(path, name, value)?;
            self.text(
                path,
                name,
                format_args!("a string of at most {TEXT_MAX_BYTES} bytes"),
                value,
                fits_index,
            )
        };
        let (kind, id) = (text("type", kind), text("id", id));
        let revision = match revision {
            Some(value) => Some(self.integer(path, "revision", 0, value)?),
            None => None,
        };
        Some(Subject {
            kind: kind?,
            id: id?,
            revision,
        })
    }

    fn envelope(&mut self, raw: &str, default_trace: &str) -> Option<(Envelope, TraceOrigin)> {
        let known = [
            "event_id",
            "trace_id",
            "event_type",
            "version",
            "source",
            "actor",
            "on_behalf_of",
            "timestamp",
            "priority",
            "visibility",
            "subject",
            "payload",
        ];
        let [
            event_id,
            trace_id,
            event_type,
            version,
            source,
            actor,
            on_behalf_of,
            timestamp,
            priority,
            visibility,
            subject,
            payload,
        ] = self.members("", "the envelope", raw, known)?;

        let event_id = self.required("", "event_id", event_id).and_then(|value| {
            let form = "evt_ and a ULID in upper case";
            self.text("", "event_id", form, value, |text| EventId::parse(text).is_some())
        });
        let (trace_id, origin) = match trace_id {
            Some(value) => {
                let form = "32 lower-case hexadecimal digits (leave it out to take the request's trace)";
                (self.text("", "trace_id", form, value, is_trace_id), TraceOrigin::Given)
            }
            None => (Some(default_trace.to_owned()), TraceOrigin::Server),
        };
        let event_type = self.required("", "event_type", event_type).and_then(|value| {
            let form = format_args!(
                "three or more segments of a-z, 0-9 and _ joined by dots, a letter first, at most {TEXT_MAX_BYTES} bytes"
            );
            self.text("", "event_type", form, value, |text| fits_index(text) && is_event_type(text))
        });
        let version = self
            .required("", "version", version)
            .and_then(|value| self.integer("", "version", 1, value));
        let source = self
            .required("", "source", source)
            .and_then(|value| self.text("", "source", SLUG_FORM, value, is_slug));
        let actor = self
            .required("", "actor", actor)
            .and_then(|value| self.subject_ref("/actor", "actor", value));
        let on_behalf_of = match on_behalf_of {
            Some(value) => self.subject_ref("/on_behalf_of", "on_behalf_of", value).map(Some),
            None => Some(None),
        };
        let timestamp = self.required("", "timestamp", timestamp).and_then(|value| {
            let form = "an RFC 3339 date and time with a zone, such as 2026-09-23T12:00:00Z";
            self.text("", "timestamp", form, value, is_rfc3339)
        });
        let priority = self.word(
            "priority",
            Priority::WORDS,
            Priority::parse,
            priority,
            Priority::Important,
        );
        let visibility = self.word(
            "visibility",
            Visibility::WORDS,
            Visibility::parse,
            visibility,
            Visibility::Internal,
        );
        let subject = self
            .required("", "subject", subject)
            .and_then(|value| self.subject(value));
        let payload = self.required("", "payload", payload).and_then(|value| {
            let object = value.get().starts_with('{');
            if !object {
                self.add("/payload", "payload must be a JSON object");
            }
            object.then(|| json::compact(value.get()))
        });

        let envelope = Envelope {
            event_id: EventId::parse(&event_id?)?,
            trace_id: trace_id?,
            event_type: event_type?,
            version: version?,
            source: source?,
            actor: actor?,
            on_behalf_of: on_behalf_of?,
            timestamp: timestamp?,
            priority: priority?,
            visibility: visibility?,
            subject: subject?,
            payload: payload?,
        };
        Some((envelope, origin))
    }
}

const SLUG_FORM: &str = "2 to 40 characters: a lower-case letter, then a-z, 0-9 or hyphens";

/// Names the words a member may hold.
struct OneOf(&'static [&'static str]);

impl fmt::Display for OneOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "one of {}", self.0.join(", "))
    }
}

/// Names the form of an id of that kind, as far as the kind is known.
struct IdForm(Option<SubjectKind>);

impl fmt::Display for IdForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.map(SubjectKind::prefix) {
            Some(Some(prefix)) => write!(f, "{prefix}_ and a ULID in upper case, as the type demands"),
            Some(None) => f.write_str(SLUG_FORM),
            None => f.write_str("a string that fits the type"),
        }
    }
}

fn fits_index(text: &str) -> bool {
    text.len() <= TEXT_MAX_BYTES
}

/// A member's name as a person would write it, `subject.id`.
fn dotted(path: &str, name: &str) -> String {
    format!("{path}/{name}").trim_start_matches('/').replace('/', ".")
}

/// A JSON pointer to a member, with the two characters that pointers escape.
fn pointer(path: &str, name: &str) -> String {
    format!("{path}/{}", name.replace('~', "~0").replace('/', "~1"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::domain::json::check_document;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const FULL: &str = r#"{"event_id":"evt_01K7AAB2CD3EF4GH5JK6MN7PQR","trace_id":"0af7651916cd43dd8448eb211c80319c","event_type":"media.vod.ready","version":3,"source":"media","actor":{"type":"agent","id":"agt_01K7CCD4EF5GH6JK7MN8PQ9RST"},"on_behalf_of":{"type":"user","id":"usr_01K7DDE5FG6HJ7KM8NP9QR0STV"},"timestamp":"2026-10-21T10:15:30+02:00","priority":"critical","visibility":"public","subject":{"type":"vod","id":"v-77","revision":4},"payload":{"a":1}}"#;
    const LEAST: &str = r#"{"event_id":"evt_01K7AAB2CD3EF4GH5JK6MN7PQR","event_type":"media.vod.ready","version":1,"source":"media","actor":{"type":"service","id":"media"},"timestamp":"2026-10-21T08:15:30.250Z","subject":{"type":"vod","id":"v-77"},"payload":{}}"#;

    fn parse(raw: &str) -> Envelope {
        Envelope::parse(raw, TRACE)
            .unwrap_or_else(|faults| panic!("{raw}: {faults:?}"))
            .0
    }

    fn paths(raw: &str) -> Vec<String> {
        check_document(raw.as_bytes()).expect("well formed");
        Envelope::parse(raw, TRACE)
            .expect_err(raw)
            .into_iter()
            .map(|fault| fault.path)
            .collect()
    }

    fn written(envelope: &Envelope) -> String {
        let mut out = String::new();
        envelope.write_json(&mut out);
        out
    }

    /// The smallest envelope with one piece of its text replaced.
    fn with(from: &str, to: &str) -> String {
        assert!(LEAST.contains(from), "{from}");
        LEAST.replace(from, to)
    }

    #[test]
    fn a_full_envelope_comes_back_byte_for_byte() {
        let (envelope, origin) = Envelope::parse(FULL, TRACE).expect("valid");
        assert_eq!(origin, TraceOrigin::Given);
        assert_eq!(written(&envelope), FULL);
    }

    #[test]
    fn defaults_fill_only_what_is_absent() {
        let (envelope, origin) = Envelope::parse(LEAST, TRACE).expect("valid");
        assert_eq!(origin, TraceOrigin::Server);
        assert_eq!(envelope.trace_id, TRACE);
        assert_eq!(
            (envelope.priority, envelope.visibility),
            (Priority::Important, Visibility::Internal)
        );
        assert_eq!((envelope.on_behalf_of, envelope.subject.revision), (None, None));
        for member in ["trace_id", "priority", "visibility", "on_behalf_of"] {
            let pointer = if member == "on_behalf_of" {
                "/on_behalf_of".to_owned()
            } else {
                format!("/{member}")
            };
            assert_eq!(
                paths(&with("{\"event_id\"", &format!("{{\"{member}\":null,\"event_id\""))),
                [pointer]
            );
        }
        assert_eq!(
            paths(&with(r#""id":"v-77""#, r#""id":"v-77","revision":null"#)),
            ["/subject/revision"]
        );
    }

    #[test]
    fn the_output_has_the_order_of_the_wire_whatever_the_input_had() {
        let shuffled = r#"{"payload" : {"z":1, "a": [ 1.0 ]},"subject":{"revision":0,"id":"v","type":"t"},"timestamp":"2026-10-21t08:15:30z","actor":{"id":"media","type":"service"},"source":"media","version":1.0,"event_type":"media.vod.ready","event_id":"evt_01K7AAB2CD3EF4GH5JK6MN7PQR"}"#;
        let wanted = r#"{"event_id":"evt_01K7AAB2CD3EF4GH5JK6MN7PQR","trace_id":"4bf92f3577b34da6a3ce929d0e0e4736","event_type":"media.vod.ready","version":1,"source":"media","actor":{"type":"service","id":"media"},"timestamp":"2026-10-21t08:15:30z","priority":"important","visibility":"internal","subject":{"type":"t","id":"v","revision":0},"payload":{"z":1,"a":[1.0]}}"#;
        assert_eq!(written(&parse(shuffled)), wanted);
    }

    #[test]
    fn the_payload_is_carried_as_text() {
        let payload = r#"{"10":1.10,"2":1e400,"n":123456789012345678901234567890,"d":1,"d":2,"nul":"\u0000","half":"\ud800","\udfff":"\/","__proto__":{}}"#;
        let spaced = payload.replace(",\"", " ,\n\t\"");
        assert_eq!(
            parse(&with("\"payload\":{}", &format!("\"payload\":{spaced}"))).payload,
            payload
        );
    }

    #[test]
    fn every_failure_is_reported_with_a_pointer_and_a_remedy() {
        let raw = r#"{"event_id":"nope","event_type":"live.started","version":0,"source":"Live","actor":{"type":"user","id":"57"},"timestamp":"yesterday","priority":"urgent","visibility":"everyone","trace_id":"abc","subject":{"type":1,"revision":-1,"name":"x"},"payload":[],"a/b~c":1}"#;
        let faults = Envelope::parse(raw, TRACE).expect_err("invalid");
        let mut found: Vec<&str> = faults.iter().map(|fault| fault.path.as_str()).collect();
        found.sort_unstable();
        assert_eq!(
            found,
            [
                "/actor/id",
                "/a~1b~0c",
                "/event_id",
                "/event_type",
                "/payload",
                "/priority",
                "/source",
                "/subject/id",
                "/subject/name",
                "/subject/revision",
                "/subject/type",
                "/timestamp",
                "/trace_id",
                "/version",
                "/visibility"
            ]
        );
        let message = |path: &str| &faults.iter().find(|fault| fault.path == path).expect("listed").message;
        assert_eq!(
            message("/actor/id"),
            "actor.id must be usr_ and a ULID in upper case, as the type demands"
        );
        assert_eq!(message("/subject/id"), "subject.id is required; add it");
        assert_eq!(message("/priority"), "priority must be one of critical, important, low");
        assert_eq!(
            message("/version"),
            "version must be a whole number from 1 to 9007199254740991"
        );

        assert_eq!(paths("{}").len(), 8, "every required member is named");
        for other in ["[]", "[{}]", "null", "1", "\"x\""] {
            let faults = Envelope::parse(other, TRACE).expect_err("no object");
            assert_eq!(
                faults.iter().map(|fault| fault.path.as_str()).collect::<Vec<_>>(),
                ["/"],
                "{other}"
            );
        }
    }

    #[test]
    fn one_wrong_member_is_one_failure_at_its_place() {
        let ulid = "01K7AAB2CD3EF4GH5JK6MN7PQR";
        for (from, to, path) in [
            (ulid, "01K7AAB2CD3EF4GH5JK6MN7PQI", "/event_id"),
            (&format!("\"evt_{ulid}\""), "5", "/event_id"),
            ("media.vod.ready", "media.ready", "/event_type"),
            ("media.vod.ready", "media.vod.ready\\n", "/event_type"),
            ("\"version\":1", "\"version\":1.5", "/version"),
            ("\"version\":1", "\"version\":\"1\"", "/version"),
            ("\"version\":1", "\"version\":-1", "/version"),
            ("\"version\":1", "\"version\":9007199254740992", "/version"),
            (
                "\"source\":\"media\"",
                "\"source\":\"app:app_01K7CCD4EF5GH6JK7MN8PQ9RST\"",
                "/source",
            ),
            ("\"type\":\"service\"", "\"type\":\"robot\"", "/actor/type"),
            ("\"id\":\"media\"", "\"id\":\"media\",\"name\":\"x\"", "/actor/name"),
            ("{\"type\":\"service\",\"id\":\"media\"}", "\"live\"", "/actor"),
            ("{\"type\":\"vod\",\"id\":\"v-77\"}", "null", "/subject"),
            ("2026-10-21T08:15:30.250Z", "2026-10-21T08:15:30.250", "/timestamp"),
            ("\"2026-10-21T08:15:30.250Z\"", "1790000000", "/timestamp"),
            ("\"payload\":{}", "\"payload\":null", "/payload"),
            ("\"payload\":{}", "\"payload\":{},\"seq\":1", "/seq"),
            (
                "\"payload\":{}",
                "\"payload\":{},\"\\ud800\":1",
                "/\u{fffd}\u{fffd}\u{fffd}",
            ),
        ] {
            assert_eq!(paths(&with(from, to)), [path], "{to}");
        }
    }

    #[test]
    fn repeated_members_nul_and_half_surrogates_are_refused_in_fields_and_carried_in_payloads() {
        for (from, to, path) in [
            ("\"payload\":{}", "\"payload\":{},\"payload\":{}", "/payload"),
            (
                "\"version\":1",
                "\"version\":1,\"\\u0076ersion\":1,\"version\":1",
                "/version",
            ),
            ("\"id\":\"v-77\"", "\"id\":\"v-77\",\"id\":\"v-77\"", "/subject/id"),
            (
                "\"id\":\"media\"",
                "\"id\":\"media\",\"type\":\"service\"",
                "/actor/type",
            ),
            ("v-77", "v\\u0000", "/subject/id"),
            ("\"type\":\"vod\"", "\"type\":\"\\u0000\"", "/subject/type"),
            ("v-77", "\\ud800", "/subject/id"),
            ("media.vod.ready", "media.vod.\\udc00", "/event_type"),
        ] {
            assert_eq!(paths(&with(from, to)), [path], "{to}");
        }
    }

    #[test]
    fn texts_that_would_not_fit_an_index_are_refused() {
        let long = "x".repeat(TEXT_MAX_BYTES);
        let wide = "é".repeat(TEXT_MAX_BYTES / 2);
        assert_eq!(parse(&with("v-77", &long)).subject.id.len(), TEXT_MAX_BYTES);
        assert_eq!(parse(&with("v-77", &wide)).subject.id, wide);
        assert_eq!(paths(&with("v-77", &format!("{long}x"))), ["/subject/id"]);
        assert_eq!(
            paths(&with("v-77", &format!("{wide}x"))),
            ["/subject/id"],
            "bytes are counted, not characters"
        );
        assert_eq!(paths(&with("\"vod\"", &format!("\"{long}x\""))), ["/subject/type"]);
        let event_type = format!("a.b.{}", "c".repeat(TEXT_MAX_BYTES - 4));
        assert_eq!(parse(&with("media.vod.ready", &event_type)).event_type, event_type);
        assert_eq!(
            paths(&with("media.vod.ready", &format!("{event_type}c"))),
            ["/event_type"]
        );
    }

    #[test]
    fn a_refusal_stays_small_however_much_is_wrong() {
        let strangers: String = (0..5000).map(|i| format!("\"{}{i}\":1,", "x".repeat(200))).collect();
        let faults = Envelope::parse(&with("{\"event_id\"", &format!("{{{strangers}\"event_id\"")), TRACE)
            .expect_err("strangers");
        assert_eq!(faults.len(), UNKNOWN_NAMED_MAX + 1);
        assert!(
            faults
                .iter()
                .all(|fault| fault.path.len() < 100 && fault.message.len() < 400)
        );
        let repeats = "\"version\":1,".repeat(5000);
        assert_eq!(paths(&with("\"version\":1,", &repeats)), ["/version"]);
    }

    #[test]
    fn integers_have_many_spellings() {
        for (spelt, version) in [
            ("1.0", 1),
            ("1e3", 1000),
            ("9007199254740991", 9_007_199_254_740_991),
            ("2147483648", 2_147_483_648),
        ] {
            assert_eq!(
                parse(&with("\"version\":1", &format!("\"version\":{spelt}"))).version,
                version
            );
        }
        assert_eq!(
            parse(&with("\"v-77\"", "\"v-77\",\"revision\":0.0")).subject.revision,
            Some(0)
        );
    }

    #[test]
    fn the_size_counts_what_quotas_count() {
        let envelope = parse(&with("\"payload\":{}", "\"payload\": { \"k\" : \"€\" }"));
        let actor = r#"{"type":"service","id":"media"}"#.len();
        assert_eq!(
            envelope.size_bytes(),
            i64::try_from(r#"{"k":"€"}"#.len() + actor + "media.vod.ready".len() + 4).expect("small")
        );
        assert_eq!(
            parse(&with("v-77", "😀é")).size_bytes() - parse(&with("v-77", "")).size_bytes(),
            3,
            "UTF-16 units"
        );
    }

    #[test]
    fn a_payload_member_is_found_however_it_is_spelt() {
        let envelope = |payload: &str| parse(&with("\"payload\":{}", &format!("\"payload\":{payload}")));
        assert_eq!(
            envelope(r#"{"a":{"redacts":1},"redacts":{}}"#)
                .payload_member("redacts")
                .map(RawValue::get),
            Some("{}")
        );
        assert!(envelope(r#"{"\u0072edacts":null}"#).payload_member("redacts").is_some());
        assert!(
            envelope(r#"{"\ud800":1,"redacts":null}"#)
                .payload_member("redacts")
                .is_some()
        );
        assert!(
            envelope(r#"{"a":{"redacts":1},"b":"redacts"}"#)
                .payload_member("redacts")
                .is_none()
        );
    }

    #[test]
    fn subject_references_fit_their_kind() {
        let ulid = "01K7AAB2CD3EF4GH5JK6MN7PQR";
        for (kind, prefix) in [
            ("user", "usr"),
            ("guest", "gst"),
            ("app", "app"),
            ("mod", "mod"),
            ("agent", "agt"),
        ] {
            let text = format!(r#"{{"type":"{kind}","id":"{prefix}_{ulid}"}}"#);
            let reference = SubjectRef::parse_json(&text).expect("valid");
            assert_eq!(reference.to_json(), text);
            assert_eq!(serde_json::to_string(&reference).expect("json"), text);
            assert!(SubjectRef::new(reference.kind(), "media").is_none());
            assert!(SubjectRef::new(reference.kind(), format!("nod_{ulid}")).is_none());
        }
        for kind in ["service", "system"] {
            let reference = SubjectRef::parse_json(&format!(r#"{{"id":"media-hub","type":"{kind}"}}"#)).expect("valid");
            assert_eq!(reference.id(), "media-hub");
            assert!(SubjectRef::new(reference.kind(), format!("usr_{ulid}")).is_none());
        }
        for bad in [
            "",
            "null",
            "{}",
            "[]",
            r#"{"type":"user"}"#,
            r#"{"type":"service","id":"live","name":"Live"}"#,
            "{",
        ] {
            assert!(SubjectRef::parse_json(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn words() {
        for word in ["critical", "important", "low"] {
            assert_eq!(Priority::parse(word).map(Priority::as_str), Some(word));
        }
        assert!(Priority::parse("normal").is_none());
        assert_eq!(Visibility::parse("subject").map(Visibility::as_str), Some("subject"));
    }

    proptest! {
        #[test]
        fn any_text_in_subjects_survives_a_round_trip(kind in "[^\u{0}]{0,40}", id in any::<String>(), key in any::<String>()) {
            let id = id.replace('\0', "");
            let subject = serde_json::json!({"type": kind, "id": id}).to_string();
            let payload = serde_json::json!({ key: id }).to_string();
            let raw = with(r#"{"type":"vod","id":"v-77"}"#, &subject).replace("\"payload\":{}", &format!("\"payload\":{payload}"));
            let envelope = parse(&raw);
            prop_assert_eq!(&envelope.subject.id, &id);
            prop_assert_eq!(&envelope.payload, &payload);
            prop_assert_eq!(&parse(&written(&envelope)), &envelope);
        }

        #[test]
        fn no_document_panics(raw in r#"(\{("(event_id|actor|subject|version|payload|type|id)":(\{\}|1|"x"|null),){0,4}"subject":\{"id":1\}\})|[\[\]{}",:1]{0,12}"#) {
            if check_document(raw.as_bytes()).is_ok() {
                prop_assert!(Envelope::parse(&raw, TRACE).is_err_and(|faults| !faults.is_empty()));
            }
        }
    }
}
