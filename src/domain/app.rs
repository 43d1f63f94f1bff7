//! Developer apps: what they are called, which names are theirs, what a project may use, and what was withdrawn.

use std::fmt;

use super::envelope::{Envelope, SubjectKind, SubjectRef};
use super::ids::is_prefixed_id;
use super::json::Members;
use super::time::parse_rfc3339;
use super::topic::TopicPattern;

/// The first segment of every app's event types, which no service may use.
pub const NAMESPACE: &str = "app";
/// The capability that a withdrawn grant for subscriptions names.
const SUBSCRIBE_GRANT: &str = "events.app.subscribe";
/// Grants that hold it among others.
const SUBSCRIBE_FAMILIES: [&str; 2] = ["events.app.*", "events.*"];

/// The environment of a token or an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Env {
    /// Where developers try things out.
    Sandbox,
    /// The real thing.
    Production,
}

impl Env {
    /// The environment of that name.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "sandbox" => Some(Self::Sandbox),
            "production" => Some(Self::Production),
            _ => None,
        }
    }

    /// Its name on the wire and in the store.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Sandbox => "sandbox",
            Self::Production => "production",
        }
    }
}

/// A project in one of its environments: what its apps store, read and receive is kept apart from everybody else's.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Project {
    /// `prj_` and a ULID.
    pub id: Box<str>,
    /// Sandbox or production.
    pub env: Env,
}

impl fmt::Debug for Project {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.id, self.env.as_str())
    }
}

/// A developer app as its token describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct App {
    /// `app_` and a ULID.
    pub id: String,
    /// Whose events it reads and writes.
    pub project: Project,
    /// The person it acts for: `usr_` and a ULID.
    pub on_behalf_of: Option<String>,
    /// When its token was issued, in seconds since 1970.
    pub issued_at_s: i64,
    key: String,
}

impl App {
    /// An app of these ids; each must have its prefix and a ULID.
    pub fn new(id: &str, project: Project, on_behalf_of: Option<&str>, issued_at_s: i64) -> Self {
        let key = format!("p{}", ulid_of(&project.id));
        Self {
            id: id.to_owned(),
            project,
            on_behalf_of: on_behalf_of.map(str::to_owned),
            issued_at_s,
            key,
        }
    }

    /// Its principal, which is also its name as a consumer: `app:` and its id.
    pub fn consumer(&self) -> String {
        format!("{NAMESPACE}:{}", self.id)
    }

    /// The source of its events: `app-` and its ULID in lower case.
    pub fn source(&self) -> String {
        format!("app-{}", ulid_of(&self.id))
    }

    /// What its event types begin with: `app.`, the key of its project and a dot.
    pub fn prefix(&self) -> String {
        format!("{NAMESPACE}.{}.", self.key)
    }

    /// Whether it may be named as the actor of an event of this app: the app itself, or the person its token acts for.
    pub fn speaks_for(&self, actor: &SubjectRef) -> bool {
        actor.kind() == SubjectKind::App && actor.id() == self.id || self.acts_for(actor)
    }

    /// Whether it is the person that the token acts for.
    pub fn acts_for(&self, subject: &SubjectRef) -> bool {
        subject.kind() == SubjectKind::User && self.on_behalf_of.as_deref() == Some(subject.id())
    }

    /// Whether it may ask for a pattern: one that begins with a literal segment, which in the namespace of apps is followed by
    /// the key of its own project.
    pub fn may_name(&self, pattern: &TopicPattern) -> bool {
        let mut segments = pattern.as_str().split('.');
        match segments.next() {
            Some(NAMESPACE) => segments.next() == Some(self.key.as_str()),
            first => first != Some("*"),
        }
    }
}

fn ulid_of(id: &str) -> String {
    id.rsplit('_').next().unwrap_or(id).to_ascii_lowercase()
}

/// Whether a pattern lies in the namespace of apps, where alone a service finds the events of production apps.
pub fn is_of_apps(pattern: &TopicPattern) -> bool {
    pattern.as_str().split('.').next() == Some(NAMESPACE)
}

/// Who holds subscriptions and checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder<'a> {
    /// A service's name, or the whole principal of an app.
    pub consumer: &'a str,
    /// An app's project.
    pub project: Option<&'a Project>,
}

impl<'a> Holder<'a> {
    /// A first-party service.
    pub const fn service(consumer: &'a str) -> Self {
        Self {
            consumer,
            project: None,
        }
    }

    /// The id of its project; `None` for a service.
    pub fn project_id(&self) -> Option<&'a str> {
        self.project.map(|project| &*project.id)
    }

    /// The environment of what it holds.
    pub fn env(&self) -> &'static str {
        self.project.map_or(Env::Production, |project| project.env).as_str()
    }
}

/// What a project may use in one environment; `None` is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Quota {
    /// Events stored in any 60 s.
    pub publish_per_minute: Option<i64>,
    /// Bytes of its events in the hot tier.
    pub retained_bytes: Option<i64>,
    /// Subscriptions.
    pub subscriptions: Option<i64>,
}

/// What a project may use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Quotas {
    /// In production.
    pub production: Quota,
    /// In the sandbox.
    pub sandbox: Quota,
}

impl Quotas {
    /// What it may use in an environment.
    pub fn of(&self, env: Env) -> &Quota {
        match env {
            Env::Production => &self.production,
            Env::Sandbox => &self.sandbox,
        }
    }
}

/// The quota of a project that a request would exceed. It tells of nobody else's use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum QuotaFault {
    /// Events stored in 60 s.
    #[error("a project may publish {limit} events a minute in this environment")]
    PublishRate {
        /// Events allowed.
        limit: i64,
    },
    /// Bytes kept.
    #[error("the project keeps {used} of {limit} bytes in this environment, and there is no room for this")]
    RetainedBytes {
        /// Bytes allowed.
        limit: i64,
        /// Bytes the project keeps.
        used: i64,
    },
    /// Subscriptions.
    #[error("a project may hold {limit} subscriptions in this environment")]
    Subscriptions {
        /// Subscriptions allowed.
        limit: i64,
    },
}

impl QuotaFault {
    /// Its name on the wire.
    pub const fn quota(self) -> &'static str {
        match self {
            Self::PublishRate { .. } => "publish_rate",
            Self::RetainedBytes { .. } => "retained_bytes",
            Self::Subscriptions { .. } => "subscriptions",
        }
    }

    /// What is allowed.
    pub const fn limit(self) -> i64 {
        match self {
            Self::PublishRate { limit } | Self::RetainedBytes { limit, .. } | Self::Subscriptions { limit } => limit,
        }
    }
}

/// What the network has withdrawn from an app, as moments in epoch milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Withdrawn {
    /// The app was revoked.
    pub app_at: Option<i64>,
    /// Its grant to subscribe was withdrawn.
    pub subscribe_at: Option<i64>,
}

impl Withdrawn {
    /// Whether a token of the app no longer holds.
    pub fn ends_token(&self, issued_at_s: i64) -> bool {
        self.app_at.is_some_and(|at| not_after(issued_at_s, at))
    }

    /// Whether a token of the app can no longer be used to make a subscription run.
    pub fn ends_subscribing(&self, issued_at_s: i64) -> bool {
        self.subscribe_at.is_some_and(|at| not_after(issued_at_s, at))
    }
}

/// A token knows whole seconds: one of the second of the withdrawal may have been issued before it.
fn not_after(issued_at_s: i64, at_ms: i64) -> bool {
    issued_at_s.saturating_mul(1000) <= at_ms
}

/// What is withdrawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Everything: the app is revoked.
    App,
    /// The grant to subscribe.
    Subscribe,
}

impl Scope {
    /// Its name in the store.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::App => "app",
            Self::Subscribe => SUBSCRIBE_GRANT,
        }
    }
}

/// A withdrawal that an event of the network asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Withdrawal {
    /// The app's principal, `app:app_` and a ULID.
    pub consumer: String,
    /// What.
    pub scope: Scope,
    /// When, in epoch milliseconds; `None` is the moment it is stored.
    pub at_ms: Option<i64>,
}

impl Withdrawal {
    /// What a first-party event withdraws, if anything.
    pub fn of(event: &Envelope) -> Option<Self> {
        if event.source != "network" || event.subject.kind != "app" || !is_prefixed_id("app", &event.subject.id) {
            return None;
        }
        let scope = match event.event_type.as_str() {
            "network.app.revoked" => Scope::App,
            "network.grant.changed" if withdraws_subscribing(&event.payload) => Scope::Subscribe,
            _ => return None,
        };
        Some(Self {
            consumer: format!("app:{}", event.subject.id),
            scope,
            at_ms: parse_rfc3339(&event.timestamp).map(|at| at.0),
        })
    }
}

fn withdraws_subscribing(payload: &str) -> bool {
    let Some(members) = Members::parse(payload) else {
        return false;
    };
    let text = |name: &str| -> Option<String> { serde_json::from_str(members.get(name)?.get()).ok() };
    let capability = text("capability");
    let is_about_it = capability
        .as_deref()
        .is_some_and(|held| held == SUBSCRIBE_GRANT || SUBSCRIBE_FAMILIES.contains(&held));
    // A word that is not known leaves nothing granted.
    is_about_it && !matches!(text("to").as_deref(), Some("approved" | "requested"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ULID: &str = "01K7AAB2CD3EF4GH5JK6MN7PQR";

    fn app() -> App {
        let project = Project {
            id: format!("prj_{ULID}").into(),
            env: Env::Sandbox,
        };
        App::new(&format!("app_{ULID}"), project, Some(&format!("usr_{ULID}")), 10)
    }

    fn network(event_type: &str, subject: &str, payload: &str) -> Option<Withdrawal> {
        let raw = format!(
            r#"{{"event_id":"evt_{ULID}","event_type":"{event_type}","version":1,"source":"network",
            "actor":{{"type":"system","id":"network"}},"timestamp":"1970-01-01T00:00:10.5Z","subject":{subject},
            "payload":{payload}}}"#
        );
        Withdrawal::of(&Envelope::parse(&raw, &"1".repeat(32)).expect("an envelope").0)
    }

    #[test]
    fn names_are_made_of_the_ids_in_lower_case() {
        assert_eq!(app().source(), "app-01k7aab2cd3ef4gh5jk6mn7pqr");
        assert_eq!(app().prefix(), "app.p01k7aab2cd3ef4gh5jk6mn7pqr.");
    }

    #[test]
    fn a_pattern_begins_with_a_literal_and_names_no_other_project() {
        let own = app().prefix();
        for (pattern, may) in [
            (format!("{own}*"), true),
            (format!("{own}order.created"), true),
            (own.trim_end_matches('.').to_owned(), true),
            ("live.*".to_owned(), true),
            ("apple.*".to_owned(), true),
            ("*".to_owned(), false),
            ("*.created".to_owned(), false),
            ("app".to_owned(), false),
            ("app.*".to_owned(), false),
            ("app.*.order.created".to_owned(), false),
            ("app.pother.*".to_owned(), false),
            (format!("{}x.*", own.trim_end_matches('.')), false),
        ] {
            let parsed = TopicPattern::parse(&pattern).expect("a pattern");
            assert_eq!(app().may_name(&parsed), may, "{pattern}");
        }
    }

    #[test]
    fn only_the_app_and_the_person_of_its_token_act() {
        let subject = |kind, id: &str| SubjectRef::new(kind, id).expect("a subject");
        assert!(app().speaks_for(&subject(SubjectKind::App, &format!("app_{ULID}"))));
        assert!(app().speaks_for(&subject(SubjectKind::User, &format!("usr_{ULID}"))));
        let stranger = "usr_01K7BBC3DE4FG5HJ6KM7NP8QRS";
        assert!(!app().speaks_for(&subject(SubjectKind::User, stranger)));
        assert!(!app().speaks_for(&subject(SubjectKind::Service, "live")));
        assert!(!app().acts_for(&subject(SubjectKind::App, &format!("app_{ULID}"))));
    }

    #[test]
    fn the_network_revokes_apps_and_withdraws_the_grant_to_subscribe() {
        let subject = format!(r#"{{"type":"app","id":"app_{ULID}"}}"#);
        let revoked = network("network.app.revoked", &subject, "{}").expect("a revocation");
        assert_eq!((revoked.scope, revoked.at_ms), (Scope::App, Some(10_500)));
        assert_eq!(revoked.consumer, format!("app:app_{ULID}"));
        for (payload, withdraws) in [
            (r#"{"capability":"events.app.subscribe","to":"revoked"}"#, true),
            (r#"{"capability":"events.app.subscribe","to":"denied"}"#, true),
            (r#"{"capability":"events.app.*","to":"revoked"}"#, true),
            (r#"{"capability":"events.*","to":"revoked"}"#, true),
            (r#"{"capability":"events.app.subscribe"}"#, true),
            (r#"{"capability":"events.app.subscribe","to":"approved"}"#, false),
            (r#"{"capability":"events.app.subscribe","to":"requested"}"#, false),
            (r#"{"capability":"events.app.publish","to":"revoked"}"#, false),
            (r#"{"to":"revoked"}"#, false),
            (r#"{"capability":7,"to":"revoked"}"#, false),
        ] {
            let found = network("network.grant.changed", &subject, payload);
            assert_eq!(
                found.map(|found| found.scope),
                withdraws.then_some(Scope::Subscribe),
                "{payload}"
            );
        }
        for subject in [
            format!(r#"{{"type":"app","id":"app:app_{ULID}"}}"#),
            format!(r#"{{"type":"project","id":"app_{ULID}"}}"#),
            r#"{"type":"app","id":"app_x"}"#.to_owned(),
        ] {
            assert_eq!(network("network.app.revoked", &subject, "{}"), None, "{subject}");
        }
        assert_eq!(
            network(
                "network.app.created",
                &format!(r#"{{"type":"app","id":"app_{ULID}"}}"#),
                "{}"
            ),
            None
        );
    }

    #[test]
    fn a_token_of_the_second_of_a_withdrawal_has_ended() {
        let withdrawn = Withdrawn {
            app_at: Some(10_500),
            subscribe_at: Some(20_000),
        };
        assert!(withdrawn.ends_token(10) && !withdrawn.ends_token(11));
        assert!(withdrawn.ends_subscribing(20) && !withdrawn.ends_subscribing(21));
        assert!(!Withdrawn::default().ends_token(0) && !Withdrawn::default().ends_subscribing(0));
    }
}
