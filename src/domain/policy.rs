//! Delivery policies: how an event type is carried, in which order, and how often it may be tried.

use std::borrow::Cow;
use std::collections::HashMap;

use hmac::digest::Digest as _;
use planner::{Class, Intent, PolicyKey};

use super::envelope::{Envelope, FieldError};
use super::json::{self, Decimal, Members};
use super::topic::TopicPattern;

/// Longest ordering key in characters; a longer one ends in its digest there, and so does one with a NUL.
pub const KEY_CHARS_MAX: usize = 200;
/// Characters of a digest and the sign in front of it.
const DIGEST_CHARS: usize = 65;
/// Longest number in a policy, in characters, when it has no exponent.
const PLAIN_CHARS_MAX: usize = 1_100;
/// Longest number with one, without the exponent itself: written out by PostgreSQL it is still within the other bound.
const MANTISSA_CHARS_MAX: usize = 40;
/// Longest exponent, sign included: those of a double fit.
const EXPONENT_CHARS_MAX: usize = 4;
/// The policy of a type that no pattern matches.
pub const DEFAULT_POLICY: &str = r#"{"class":"domain","durability":"required","delivery_semantics":"at_least_once"}"#;

/// What a policy is about; its minimum semantics.
const CLASSES: [&str; 8] = [
    "realtime_ephemeral",
    "interactive",
    "interactive_durable",
    "domain",
    "critical",
    "background",
    "bulk",
    "webhook",
];

/// How often a delivery may leave the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Semantics {
    /// Until it is answered with a 2xx or its attempts are used up.
    AtLeastOnce,
    /// Once, whatever comes of it.
    AtMostOnce,
}

/// One policy, `events.delivery-policy@1`.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    document: String,
    intent: Intent,
    semantics: Semantics,
    key: Option<String>,
    without_effect: Vec<&'static str>,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            document: DEFAULT_POLICY.to_owned(),
            intent: Intent::DEFAULT,
            semantics: Semantics::AtLeastOnce,
            key: None,
            without_effect: Vec::new(),
        }
    }
}

impl Policy {
    /// Reads a policy. Every level is closed; all failures are reported, by JSON pointer.
    pub fn parse(text: &str) -> Result<Self, Vec<FieldError>> {
        let mut reader = Reader::default();
        let Some(members) = Members::parse(text) else {
            return Err(vec![FieldError::new("/", "the policy must be an object")]);
        };
        reader.closed("", &members, &MEMBERS);
        reader.word("", &members, "class", &CLASSES, Presence::Required);
        reader.word(
            "",
            &members,
            "durability",
            &["none", "optional", "required"],
            Presence::Required,
        );
        let semantics = reader.word(
            "",
            &members,
            "delivery_semantics",
            &["at_most_once", "at_least_once"],
            Presence::Required,
        );
        let mut key = None;
        if let Some(ordering) = reader.object(&members, "ordering", &["scope", "key"]) {
            reader.text("/ordering", &ordering, "scope");
            key = reader.text("/ordering", &ordering, "key").filter(|key| !key.is_empty());
        }
        if let Some(latency) = reader.object(&members, "latency", &["target_p95_ms", "maximum_p95_ms"]) {
            for name in ["target_p95_ms", "maximum_p95_ms"] {
                reader.number("/latency", &latency, name);
            }
        }
        if let Some(retention) = reader.object(&members, "retention", &["hot", "replay", "archive"]) {
            for (name, units) in [("hot", "hdm"), ("replay", "hdm"), ("archive", "hdmy")] {
                reader.span("/retention", &retention, name, units);
            }
        }
        if let Some(routing) = reader.object(&members, "routing", &["objective", "multi_provider"]) {
            let objectives = ["latency_first", "cheapest", "balanced", "correctness"];
            reader.word("/routing", &routing, "objective", &objectives, Presence::Optional);
            reader.truth("/routing", &routing, "multi_provider");
        }
        if let Some(batching) = reader.object(&members, "batching", &["max_messages", "max_delay_ms"]) {
            reader.integer("/batching", &batching, "max_messages", 1, json::SAFE_INTEGER_MAX);
            reader.integer("/batching", &batching, "max_delay_ms", 0, json::SAFE_INTEGER_MAX);
        }
        if let Some(residency) = reader.object(&members, "residency", &["inherit_project_region", "region"]) {
            reader.truth("/residency", &residency, "inherit_project_region");
            if residency.get("region").is_some() {
                reader.text("/residency", &residency, "region");
            }
        }
        reader.integer("", &members, "max_payload_bytes", 1, 65_536);
        if !reader.errors.is_empty() {
            return Err(reader.errors);
        }
        let is_given = |path: &&str| match path.split_once('.') {
            None => members.get(path).is_some(),
            Some((member, inner)) => members
                .get(member)
                .and_then(|value| Members::parse(value.get())?.get(inner).map(|_| ()))
                .is_some(),
        };
        let without_effect = WITHOUT_EFFECT.into_iter().filter(is_given).collect();
        let document = json::compact(text);
        // It was read above; what placement cannot read of it is a number that no double holds.
        let intent = Intent::parse(&document)
            .map_err(|error| vec![FieldError::new("/", format!("the policy cannot be placed: {error}"))])?;
        Ok(Self {
            document,
            intent,
            semantics: match semantics {
                Some("at_most_once") => Semantics::AtMostOnce,
                _ => Semantics::AtLeastOnce,
            },
            key,
            without_effect,
        })
    }

    /// The policy as it was given, compact JSON.
    pub fn document(&self) -> &str {
        &self.document
    }

    /// How its deliveries are woken.
    pub fn carrier_class(&self) -> Class {
        self.intent.class
    }

    /// What it asks of placement.
    pub fn intent(&self) -> &Intent {
        &self.intent
    }

    /// How often its deliveries may leave the process.
    pub fn semantics(&self) -> Semantics {
        self.semantics
    }

    /// Whether its deliveries keep an order.
    pub fn is_ordered(&self) -> bool {
        self.key.is_some()
    }

    /// Members that are kept and change nothing in this version.
    pub fn without_effect(&self) -> &[&'static str] {
        &self.without_effect
    }

    /// The key in whose order an event is delivered; `None` when the policy asks for no order.
    ///
    /// Different subjects never share a key, whatever characters they hold, at any length.
    pub fn ordering_key(&self, envelope: &Envelope) -> Option<String> {
        let path = self.key.as_deref()?;
        let named = if path == "subject" {
            None
        } else {
            value_at(path, envelope)
        };
        let key = named
            .filter(|value| !value.is_empty())
            .unwrap_or_else(|| subject_key(envelope));
        Some(bounded_key(key))
    }
}

/// A key as it is kept: one that is too long ends in its digest. Text in PostgreSQL holds no NUL, and a payload may.
pub fn bounded_key(key: impl Into<String>) -> String {
    let key = key.into();
    if key.chars().count() > KEY_CHARS_MAX || key.contains('\0') || looks_bounded(&key) {
        let readable = key.chars().filter(|character| *character != '\0');
        let start: String = readable.take(KEY_CHARS_MAX - DIGEST_CHARS).collect();
        format!("{start}~{}", hex::encode(sha2::Sha256::digest(key.as_bytes())))
    } else {
        key
    }
}

/// Whether a key could be taken for one that was too long.
fn looks_bounded(key: &str) -> bool {
    let digest = key.rsplit_once('~').map_or("", |(_, digest)| digest);
    key.chars().count() == KEY_CHARS_MAX
        && digest.len() == DIGEST_CHARS - 1
        && digest.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// `<type>:<id>`, or a JSON array where the type would make that ambiguous: with a colon in it, or where it starts as such
/// an array does. The event type when both are empty.
fn subject_key(envelope: &Envelope) -> String {
    let subject = &envelope.subject;
    if subject.kind.is_empty() && subject.id.is_empty() {
        return envelope.event_type.clone();
    }
    if subject.kind.contains(':') || subject.kind.starts_with('[') {
        let mut key = String::from("[");
        json::write_string(&mut key, &subject.kind);
        key.push(',');
        json::write_string(&mut key, &subject.id);
        key.push(']');
        return key;
    }
    format!("{}:{}", subject.kind, subject.id)
}

/// What a dotted path finds in an envelope, where it is a string or a number.
fn value_at(path: &str, envelope: &Envelope) -> Option<String> {
    let (root, rest) = path.split_once('.')?;
    match (root, rest) {
        ("subject", "type") => Some(envelope.subject.kind.clone()),
        ("subject", "id") => Some(envelope.subject.id.clone()),
        ("subject", "revision") => envelope.subject.revision.map(|revision| revision.to_string()),
        ("actor", "type") => Some(envelope.actor.kind().as_str().to_owned()),
        ("actor", "id") => Some(envelope.actor.id().to_owned()),
        ("payload", path) => {
            let mut value: Cow<'_, str> = Cow::Borrowed(&envelope.payload);
            for name in path.split('.') {
                // Of members of one name the last counts, as in every JSON reader that keeps one of them.
                let found = Members::parse(&value)?
                    .iter()
                    .filter(|(own, _)| *own == name)
                    .last()
                    .map(|(_, value)| value.get().to_owned())?;
                value = Cow::Owned(found);
            }
            scalar(&value)
        }
        _ => None,
    }
}

/// A string or a number as a key. A number is spelled as the shortest one that a double takes for it, as JavaScript does,
/// so that 3, 3.0 and 30e-1 are one key; where that would be another number, by all of its own digits, so that two numbers
/// are never one key.
fn scalar(json: &str) -> Option<String> {
    if json.starts_with('"') {
        return serde_json::from_str(json).ok();
    }
    let number: f64 = json.parse().ok().filter(|number: &f64| number.is_finite())?;
    let exact = Decimal::parse(json)?;
    // No key is "-0".
    let short = (number + 0.0).to_string();
    if Decimal::parse(&short).as_ref() == Some(&exact) {
        return Some(short);
    }
    let sign = if exact.negative { "-" } else { "" };
    Some(match exact.exponent {
        0 => format!("{sign}{}", exact.digits),
        exponent => format!("{sign}{}e{exponent}", exact.digits),
    })
}

/// Members of a policy.
const MEMBERS: [&str; 10] = [
    "class",
    "durability",
    "delivery_semantics",
    "ordering",
    "latency",
    "retention",
    "routing",
    "batching",
    "residency",
    "max_payload_bytes",
];
/// Members that this version keeps and does not act on.
const WITHOUT_EFFECT: [&str; 6] = [
    "latency.target_p95_ms",
    "retention",
    "routing.multi_provider",
    "batching",
    "residency",
    "max_payload_bytes",
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Presence {
    Required,
    Optional,
}

/// Collects what is wrong with a policy.
#[derive(Default)]
struct Reader {
    errors: Vec<FieldError>,
}

impl Reader {
    fn fault(&mut self, at: &str, name: &str, message: impl std::fmt::Display) {
        let path = format!("{at}/{name}");
        let dotted = path[1..].replace('/', ".");
        self.errors.push(FieldError::new(path, format!("{dotted} {message}")));
    }

    fn closed(&mut self, at: &str, members: &Members<'_>, known: &[&str]) {
        for (index, (name, _)) in members.iter().enumerate() {
            if !known.contains(&name) {
                self.errors.push(FieldError::new(
                    at_or_root(at),
                    match at {
                        "" => format!(
                            "{name:?} is no member of a policy (known members: {})",
                            known.join(", ")
                        ),
                        _ => format!(
                            "{name:?} is no member of {} (known members: {})",
                            &at[1..],
                            known.join(", ")
                        ),
                    },
                ));
            } else if members.iter().take(index).any(|(earlier, _)| earlier == name) {
                self.fault(at, name, "is given more than once");
            }
        }
    }

    fn object<'a>(&mut self, members: &Members<'a>, name: &str, known: &[&str]) -> Option<Members<'a>> {
        let value = members.get(name)?;
        let Some(object) = Members::parse(value.get()) else {
            self.fault("", name, "must be an object");
            return None;
        };
        self.closed(&format!("/{name}"), &object, known);
        Some(object)
    }

    fn word<'w>(
        &mut self,
        at: &str,
        members: &Members<'_>,
        name: &str,
        words: &[&'w str],
        presence: Presence,
    ) -> Option<&'w str> {
        let Some(value) = members.get(name) else {
            if presence == Presence::Required {
                self.fault(
                    at,
                    name,
                    format_args!("is missing; it must be one of {}", words.join(", ")),
                );
            }
            return None;
        };
        let given = json::string(value).ok();
        let found = words.iter().find(|word| given.as_deref() == Some(**word));
        if found.is_none() {
            self.fault(at, name, format_args!("must be one of {}", words.join(", ")));
        }
        found.copied()
    }

    fn text(&mut self, at: &str, members: &Members<'_>, name: &str) -> Option<String> {
        let Some(value) = members.get(name) else {
            self.fault(at, name, "is missing; it must be a string");
            return None;
        };
        let text = json::string(value).ok();
        if text.is_none() {
            self.fault(at, name, "must be a string");
        }
        text
    }

    fn number(&mut self, at: &str, members: &Members<'_>, name: &str) {
        let Some(value) = members.get(name) else { return };
        let positive = value.get().parse().is_ok_and(|number: f64| number >= 0.0);
        if !positive || !is_kept(value.get()) {
            self.fault(at, name, "must be a number of 0 or more");
        }
    }

    fn integer(&mut self, at: &str, members: &Members<'_>, name: &str, least: i64, most: i64) {
        let Some(value) = members.get(name) else { return };
        if !is_kept(value.get()) || !json::integer(value).is_some_and(|number| (least..=most).contains(&number)) {
            self.fault(at, name, format_args!("must be a whole number from {least} to {most}"));
        }
    }

    fn truth(&mut self, at: &str, members: &Members<'_>, name: &str) {
        let Some(value) = members.get(name) else { return };
        if !matches!(value.get(), "true" | "false") {
            self.fault(at, name, "must be true or false");
        }
    }

    fn span(&mut self, at: &str, members: &Members<'_>, name: &str, units: &str) {
        let Some(value) = members.get(name) else { return };
        let text = json::string(value).unwrap_or_default();
        let digits = text.strip_suffix(|unit| units.contains(unit)).unwrap_or_default();
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            self.fault(
                at,
                name,
                format_args!("must be digits and one of {units:?}, such as 30d"),
            );
        }
    }
}

/// Whether JSON is a number that PostgreSQL keeps: it refuses very large exponents, and writes the others out.
fn is_kept(json: &str) -> bool {
    let short = match json.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => mantissa.len() <= MANTISSA_CHARS_MAX && exponent.len() <= EXPONENT_CHARS_MAX,
        None => json.len() <= PLAIN_CHARS_MAX,
    };
    short && json.parse().is_ok_and(f64::is_finite)
}

fn at_or_root(at: &str) -> &str {
    if at.is_empty() { "/" } else { at }
}

/// A policy in force for a pattern.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Which types it is for.
    pub pattern: TopicPattern,
    /// What it says.
    pub policy: Policy,
    /// Its pattern and how often it was written.
    pub key: PolicyKey,
}

/// Every policy, ready to be asked for a type.
#[derive(Debug)]
pub struct Policies {
    exact: HashMap<String, Rule>,
    /// Most specific first.
    wildcards: Vec<Rule>,
    default: Policy,
    default_key: PolicyKey,
}

impl Default for Policies {
    fn default() -> Self {
        Self::new(Vec::new())
    }
}

impl Policies {
    /// Orders the rules by how specific they are.
    pub fn new(rules: Vec<Rule>) -> Self {
        let (exact, mut wildcards): (Vec<Rule>, Vec<Rule>) =
            rules.into_iter().partition(|rule| rule.pattern.exact().is_some());
        let literal = |rule: &Rule| rule.pattern.as_str().bytes().filter(|byte| *byte != b'*').count();
        wildcards.sort_by(|a, b| {
            literal(b)
                .cmp(&literal(a))
                .then_with(|| a.pattern.as_str().cmp(b.pattern.as_str()))
        });
        let exact = exact
            .into_iter()
            .map(|rule| (rule.pattern.as_str().to_owned(), rule))
            .collect();
        Self {
            exact,
            wildcards,
            default: Policy::default(),
            default_key: PolicyKey::new(None, 0),
        }
    }

    /// The rule for a type: a pattern without `*` before any with one, then the one with more literal characters, then
    /// the smaller pattern. `None` when the default is in force.
    pub fn rule(&self, event_type: &str) -> Option<&Rule> {
        self.exact
            .get(event_type)
            .or_else(|| self.wildcards.iter().find(|rule| rule.pattern.matches(event_type)))
    }

    /// What is in force for a type.
    pub fn policy(&self, event_type: &str) -> &Policy {
        self.in_force(event_type).1
    }

    /// What is in force for a type, and its name.
    pub fn in_force(&self, event_type: &str) -> (&PolicyKey, &Policy) {
        self.rule(event_type)
            .map_or((&self.default_key, &self.default), |rule| (&rule.key, &rule.policy))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(extra: &str) -> Policy {
        let base = r#""class":"domain","durability":"required","delivery_semantics":"at_least_once""#;
        Policy::parse(&format!("{{{base}{extra}}}")).expect("a valid policy")
    }

    fn event(subject: (&str, &str), payload: &str) -> Envelope {
        let raw = format!(
            r#"{{"event_id":"evt_01K7AAB2CD3EF4GH5JK6MN7PQR","event_type":"live.stream.started","version":1,
                "source":"live","actor":{{"type":"service","id":"live"}},"timestamp":"2026-10-21T08:15:30Z",
                "subject":{{"type":{:?},"id":{:?},"revision":7}},"payload":{payload}}}"#,
            subject.0, subject.1
        );
        Envelope::parse(&raw, "4bf92f3577b34da6a3ce929d0e0e4736")
            .expect("a valid envelope")
            .0
    }

    fn key(path: &str, event: &Envelope) -> String {
        let ordering = format!(r#","ordering":{{"scope":"x","key":{path:?}}}"#);
        policy(&ordering).ordering_key(event).expect("an ordered policy")
    }

    #[test]
    fn the_carrier_class_follows_durability_key_and_class() {
        let class = |text: &str| Policy::parse(text).expect("valid").carrier_class();
        let ordered = r#","ordering":{"scope":"key","key":"subject"}"#;
        for (name, plain) in CLASSES.map(|name| {
            (
                name,
                if name == "realtime_ephemeral" {
                    Class::Topic
                } else {
                    Class::Queue
                },
            )
        }) {
            let with = |durability: &str, extra: &str| {
                class(&format!(
                    r#"{{"class":"{name}","durability":"{durability}","delivery_semantics":"at_least_once"{extra}}}"#
                ))
            };
            assert_eq!(with("required", ""), plain, "{name}");
            assert_eq!(with("required", ordered), Class::Stream, "{name}");
            assert_eq!(with("optional", ordered), plain, "{name}");
            assert_eq!(
                with("required", r#","ordering":{"scope":"key","key":""}"#),
                plain,
                "{name}"
            );
        }
        let default = Policy::parse(DEFAULT_POLICY).expect("a policy");
        assert_eq!(default.intent(), Policy::default().intent());
    }

    #[test]
    fn every_mistake_is_named() {
        let errors = Policy::parse(
            r#"{"class":"warp","delivery_semantics":"exactly_once","mode":"fast","ordering":{"scope":"x"},
               "retention":{"hot":"1y"},"max_payload_bytes":65537,"batching":{"max_messages":0},"routing":{"x":1}}"#,
        )
        .expect_err("nine mistakes");
        let paths: Vec<&str> = errors.iter().map(|error| error.path.as_str()).collect();
        assert_eq!(
            paths,
            [
                "/",
                "/class",
                "/durability",
                "/delivery_semantics",
                "/ordering/key",
                "/retention/hot",
                "/routing",
                "/batching/max_messages",
                "/max_payload_bytes"
            ]
        );
        assert_eq!(errors[4].message, "ordering.key is missing; it must be a string");
        for no_object in ["[]", "5", r#""fast""#, "null"] {
            assert!(Policy::parse(no_object).is_err(), "{no_object}");
        }
    }

    #[test]
    fn a_key_is_the_value_at_its_path_or_the_subject() {
        let event = event(
            ("stream", "A"),
            r#"{"room":1.0,"deep":{"x":"a"},"flag":true,"twice":1,"twice":"last"}"#,
        );
        assert_eq!(key("subject", &event), "stream:A");
        assert_eq!(key("payload.room", &event), "1");
        assert_eq!(key("payload.deep.x", &event), "a");
        assert_eq!(key("payload.twice", &event), "last");
        assert_eq!(key("actor.id", &event), "live");
        assert_eq!(key("subject.revision", &event), "7");
        for nothing in [
            "payload.flag",
            "payload.deep",
            "payload.none",
            "trace_id",
            "source.x",
            "payload.room.x",
        ] {
            assert_eq!(key(nothing, &event), "stream:A", "{nothing}");
        }
        assert_eq!(policy("").ordering_key(&event), None);
    }

    #[test]
    fn different_subjects_never_share_a_key() {
        let of = |kind: &str, id: &str| key("subject", &event((kind, id), "{}"));
        assert_ne!(of("a:b", "c"), of("a", "b:c"));
        assert_ne!(of("a:b", "c"), of("[\"a", "b\",\"c\"]"));
        let long = "x".repeat(300);
        assert_ne!(of("a", &format!("{long}1")), of("a", &format!("{long}2")));
        assert_eq!(of("a", &long).chars().count(), KEY_CHARS_MAX);
        assert_eq!(of("", ""), "live.stream.started");
    }

    #[test]
    fn equal_numbers_are_one_key_and_different_numbers_never() {
        let of = |number: &str| key("payload.n", &event(("stream", "A"), &format!(r#"{{"n":{number}}}"#)));
        for (spellings, key) in [
            (&["3", "3.0", "30e-1", "0.3E+1"][..], "3"),
            (&["0", "-0", "0.0", "-0e99"], "0"),
            (&["-2.5", "-25e-1"], "-2.5"),
            (&["0.1", "1e-1", "0.10"], "0.1"),
            (&["9007199254740992", "9007199254740992.0"], "9007199254740992"),
            (&["9007199254740993", "90071992547409930e-1"], "9007199254740993"),
            (&["-9007199254740993"], "-9007199254740993"),
            (
                &["0.10000000000000001", "10000000000000001e-17"],
                "10000000000000001e-17",
            ),
        ] {
            for spelling in spellings {
                assert_eq!(of(spelling), key, "{spelling}");
            }
        }
        let near = ["18446744073709551615", "18446744073709551616", "1e-400", "1e-401", "0"];
        for (n, one) in near.iter().enumerate() {
            for other in &near[n + 1..] {
                assert_ne!(of(one), of(other), "{one} and {other}");
            }
        }
    }

    #[test]
    fn every_key_can_be_stored() {
        let with_nul = |room: &str| {
            key(
                "payload.room",
                &event(("stream", "A"), &format!(r#"{{"room":"{room}\u0000"}}"#)),
            )
        };
        assert!(!with_nul("a").contains('\0'));
        assert_ne!(with_nul("a"), with_nul("b"));
    }

    #[test]
    fn a_number_that_cannot_be_stored_is_refused() {
        let read = |member: &str| {
            let base = r#""class":"domain","durability":"required","delivery_semantics":"at_least_once""#;
            Policy::parse(&format!("{{{base},{member}}}"))
        };
        let zeros = "0".repeat(20_000);
        for number in [
            "1e999",
            "1e131073",
            "1e-20000",
            "0e99999",
            "-1",
            "null",
            r#""5""#,
            "true",
            &format!("0.{zeros}"),
        ] {
            assert!(
                read(&format!(r#""latency":{{"target_p95_ms":{number}}}"#)).is_err(),
                "{number}"
            );
        }
        for number in ["0", "-0", "0.5", "250", "1e308", "1.5E-3", "1e-999"] {
            assert!(
                read(&format!(r#""latency":{{"target_p95_ms":{number}}}"#)).is_ok(),
                "{number}"
            );
        }
        assert!(read(r#""batching":{"max_delay_ms":0e99999}"#).is_err());
    }

    #[test]
    fn the_most_specific_pattern_wins() {
        let rule = |pattern: &str| Rule {
            pattern: TopicPattern::parse(pattern).expect("a pattern"),
            policy: Policy::default(),
            key: PolicyKey::new(Some(pattern), 1),
        };
        let patterns = [
            "live.t.order.exact",
            "live.t.order.*",
            "live.t.*",
            "live.t.a.b.*.d",
            "live.t.a.*.c.d",
        ];
        let policies = Policies::new(patterns.map(rule).into());
        let resolved = |event_type: &str| policies.rule(event_type).map(|rule| rule.pattern.as_str());
        assert_eq!(resolved("live.t.order.exact"), Some("live.t.order.exact"));
        assert_eq!(resolved("live.t.order.other"), Some("live.t.order.*"));
        assert_eq!(resolved("live.t.elsewhere"), Some("live.t.*"));
        assert_eq!(
            resolved("live.t.a.b.c.d"),
            Some("live.t.a.*.c.d"),
            "a tie goes to the smaller pattern"
        );
        assert_eq!(resolved("media.vod.ready"), None);
    }

    #[test]
    fn what_has_no_effect_is_named() {
        let policy = policy(
            r#","latency":{"maximum_p95_ms":5,"target_p95_ms":2},"routing":{"objective":"cheapest"},"max_payload_bytes":100"#,
        );
        assert_eq!(policy.without_effect(), ["latency.target_p95_ms", "max_payload_bytes"]);
    }
}
