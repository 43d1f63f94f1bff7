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

impl Priority {
    /// The stored rank: 0 for critical, 1 for important, 2 for low.
    pub fn rank(self) -> i16 {
        match self {
            Self::Critical => 0,
            Self::Important => 1,
            Self::Low => 2,
        }
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
        let mut strangers = 0;
        for (name, value) in members.iter() {
            match known.iter().position(|own| *own == name) {
                Some(place) if places[place].is_none() => places[place] = Some(value),
                Some(_) => self.add(
                    &pointer(path, name),
                    format!("{name} appears more than once in {what}; send it once"),
                ),
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
            self.add(&pointer(path, name), format!("{name} is required; add it"));
        }
        value
    }

    /// A string member that satisfies `fits`; `form` says what would.
    fn text(
        &mut self,
        path: &str,
        name: &str,
        form: &str,
        value: &RawValue,
        fits: impl Fn(&str) -> bool,
    ) -> Option<String> {
        let problem = match json::string(value) {
            Ok(text) if fits(&text) => return Some(text),
            Ok(_) | Err(StringFault::NotAString) => format!("{name} must be {form}"),
            Err(StringFault::LoneSurrogate) => format!("{name} holds half of a surrogate pair; send whole characters"),
            Err(StringFault::Nul) => format!("{name} holds U+0000, which cannot be stored; remove it"),
        };
        self.add(&pointer(path, name), problem);
        None
    }

    fn integer(&mut self, path: &str, name: &str, least: i64, value: &RawValue) -> Option<i64> {
        let number = json::integer(value).filter(|number| *number >= least);
        if number.is_none() {
            let most = json::SAFE_INTEGER_MAX;
            self.add(
                &pointer(path, name),
                format!("{name} must be a whole number from {least} to {most}"),
            );
        }
        number
    }

    fn word<T>(
        &mut self,
        name: &str,
        words: &[&str],
        parse: impl Fn(&str) -> Option<T>,
        value: Option<&RawValue>,
        default: T,
    ) -> Option<T> {
        let Some(value) = value else { return Some(default) };
        let form = format!("one of {} (leave it out for the default)", words.join(", "));
        self.text("", name, &form, value, |text| parse(text).is_some())
            .and_then(|text| parse(&text))
    }

    fn subject_ref(&mut self, path: &str, name: &str, value: &RawValue) -> Option<SubjectRef> {
        let [kind, id] = self.members(path, name, value.get(), ["type", "id"])?;
        let (kind, id) = (self.required(path, "type", kind), self.required(path, "id", id));
        let kind = kind.and_then(|value| {
            let form = format!("one of {}", SubjectKind::WORDS.join(", "));
            self.text(path, "type", &form, value, |text| SubjectKind::parse(text).is_some())
        });
        let kind = kind.and_then(|text| SubjectKind::parse(&text));
        let form = match kind.map(SubjectKind::prefix) {
            Some(Some(prefix)) => format!("{prefix}_ and a ULID in upper case, as the type demands"),
            Some(None) => "2 to 40 characters: a lower-case letter, then letters, digits or hyphens".to_owned(),
            None => "a string that fits the type".to_owned(),
        };
        let fits = |text: &str| kind.is_none_or(|kind| SubjectRef::new(kind, text).is_some());
        let id = id.and_then(|value| self.text(path, "id", &form, value, fits));
        SubjectRef::new(kind?, id?)
    }

    fn subject(&mut self, value: &RawValue) -> Option<Subject> {
        let path = "/subject";
        let [kind, id, revision] = self.members(path, "subject", value.get(), ["type", "id", "revision"])?;
        let form = format!("a string of at most {TEXT_MAX_BYTES} bytes");
        let kind = self
            .required(path, "type", kind)
            .and_then(|value| self.text(path, "type", &form, value, fits_index));
        let id = self
            .required(path, "id", id)
            .and_then(|value| self.text(path, "id", &form, value, fits_index));
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
            let form = format!(
                "three or more segments of a-z, 0-9 and _ joined by dots, a letter first, at most {TEXT_MAX_BYTES} bytes"
            );
            self.text("", "event_type", &form, value, |text| fits_index(text) && is_event_type(text))
        });
        let version = self
            .required("", "version", version)
            .and_then(|value| self.integer("", "version", 1, value));
        let source = self.required("", "source", source).and_then(|value| {
            let form = "2 to 40 characters: a lower-case letter, then letters, digits or hyphens";
            self.text("", "source", form, value, is_slug)
        });
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

fn fits_index(text: &str) -> bool {
    text.len() <= TEXT_MAX_BYTES
}

/// A JSON pointer to a member, with the two characters that pointers escape.
fn pointer(path: &str, name: &str) -> String {
    format!("{path}/{}", name.replace('~', "~0").replace('/', "~1"))
}
