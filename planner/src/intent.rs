//! From a delivery policy to what placement is asked: what to wake, and what a carrier must be able to do for it.

use serde::Deserialize;

use crate::Text;
use crate::class::Class;
use crate::requirements::{LatencyClass, Objective, Requirements};

/// What a policy says its events are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyClass {
    /// Worth nothing a moment later.
    RealtimeEphemeral,
    /// Somebody waits for it.
    Interactive,
    /// Somebody waits for it, and it must not be lost.
    InteractiveDurable,
    /// What happened in a domain; the default.
    Domain,
    /// It must not go wrong.
    Critical,
    /// Nobody waits for it.
    Background,
    /// Much at once, and it may take long.
    Bulk,
    /// For other people's receivers.
    Webhook,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Durability {
    None,
    Optional,
    Required,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Routing {
    LatencyFirst,
    Cheapest,
    Balanced,
    Correctness,
}

/// The members of `events.delivery-policy@1` that placement reads.
#[derive(Deserialize)]
struct Document {
    class: PolicyClass,
    durability: Durability,
    ordering: Option<OrderingMembers>,
    latency: Option<LatencyMembers>,
    routing: Option<RoutingMembers>,
}

#[derive(Deserialize)]
struct OrderingMembers {
    key: Option<String>,
}

#[derive(Deserialize)]
struct LatencyMembers {
    maximum_p95_ms: Option<f64>,
}

#[derive(Deserialize)]
struct RoutingMembers {
    objective: Option<Routing>,
}

/// What a policy asks of placement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Intent {
    /// What is to be woken.
    pub class: Class,
    /// What the events are.
    pub policy_class: PolicyClass,
    /// What the choice is made by.
    pub objective: Objective,
    /// Highest p95 in milliseconds.
    pub max_latency_ms: Option<f64>,
}

impl Intent {
    /// Of the policy that is in force where no pattern matches.
    pub const DEFAULT: Self = Self {
        class: Class::Queue,
        policy_class: PolicyClass::Domain,
        objective: Objective::Balanced,
        max_latency_ms: None,
    };

    /// Reads a valid policy, `events.delivery-policy@1`. Members that placement does not use may be anything.
    ///
    /// # Errors
    ///
    /// When a member it uses is missing or has another form.
    pub fn parse(policy: &str) -> Result<Self, serde_json::Error> {
        let document: Document = serde_json::from_str(policy)?;
        let ordered = document
            .ordering
            .and_then(|ordering| ordering.key)
            .is_some_and(|key| !key.is_empty());
        let class = match (document.durability, document.class) {
            (Durability::Required, _) if ordered => Class::Stream,
            (_, PolicyClass::RealtimeEphemeral) => Class::Topic,
            _ => Class::Queue,
        };
        let objective = document
            .routing
            .and_then(|routing| routing.objective)
            .map_or(Objective::Balanced, Routing::into);
        let max_latency_ms = document
            .latency
            .and_then(|latency| latency.maximum_p95_ms)
            .filter(|ms| ms.is_finite());
        Ok(Self {
            class,
            policy_class: document.class,
            objective,
            max_latency_ms,
        })
    }

    /// What placement is asked.
    pub fn requirements(&self) -> Requirements {
        Requirements {
            objective: self.objective,
            capabilities: capabilities(self.class).iter().copied().map(Text::Borrowed).collect(),
            latency_op: Some(Text::Borrowed(latency_op(self.class))),
            max_latency_ms: self.max_latency_ms,
            units: 1.0,
            latency_class: Some(self.policy_class.into()),
            ..Requirements::default()
        }
    }
}

/// What a carrier must be able to do for a class.
pub fn capabilities(class: Class) -> &'static [&'static str] {
    match class {
        Class::Topic | Class::Queue => &["events:gateway"],
        Class::Stream => &["events:gateway", "events:durable", "events:ordered"],
    }
}

/// The operation whose latency counts for a class: a carrier that serves several does each at its own pace.
pub fn latency_op(class: Class) -> &'static str {
    match class {
        Class::Topic => "topic_p95",
        Class::Queue => "queue_p95",
        Class::Stream => "stream_p95",
    }
}

impl From<Routing> for Objective {
    fn from(routing: Routing) -> Self {
        match routing {
            Routing::LatencyFirst => Self::LowestLatency,
            Routing::Cheapest => Self::Cheapest,
            Routing::Balanced => Self::Balanced,
            Routing::Correctness => Self::Correctness,
        }
    }
}

impl From<PolicyClass> for LatencyClass {
    fn from(class: PolicyClass) -> Self {
        match class {
            PolicyClass::RealtimeEphemeral => Self::Realtime,
            PolicyClass::Interactive | PolicyClass::InteractiveDurable | PolicyClass::Domain => Self::Interactive,
            PolicyClass::Critical => Self::Critical,
            PolicyClass::Background | PolicyClass::Webhook => Self::Background,
            PolicyClass::Bulk => Self::Bulk,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn intent(class: &str, durability: &str, more: &str) -> Intent {
        let semantics = "at_least_once";
        let text =
            format!(r#"{{"class":"{class}","durability":"{durability}","delivery_semantics":"{semantics}"{more}}}"#);
        Intent::parse(&text).expect("a policy")
    }

    const ORDERED: &str = r#","ordering":{"scope":"key","key":"subject"}"#;

    #[test]
    fn a_policy_becomes_a_class_and_a_latency_class() {
        for (name, latency_class) in [
            ("realtime_ephemeral", LatencyClass::Realtime),
            ("interactive", LatencyClass::Interactive),
            ("interactive_durable", LatencyClass::Interactive),
            ("domain", LatencyClass::Interactive),
            ("critical", LatencyClass::Critical),
            ("background", LatencyClass::Background),
            ("webhook", LatencyClass::Background),
            ("bulk", LatencyClass::Bulk),
        ] {
            let plain = if name == "realtime_ephemeral" {
                Class::Topic
            } else {
                Class::Queue
            };
            assert_eq!(intent(name, "required", "").class, plain, "{name}");
            assert_eq!(intent(name, "optional", ORDERED).class, plain, "{name}");
            assert_eq!(intent(name, "none", ORDERED).class, plain, "{name}");
            assert_eq!(intent(name, "required", ORDERED).class, Class::Stream, "{name}");
            let keyless = r#","ordering":{"scope":"key","key":""}"#;
            assert_eq!(intent(name, "required", keyless).class, plain, "{name}");
            let wanted = intent(name, "none", "").requirements();
            assert_eq!(wanted.latency_class, Some(latency_class), "{name}");
        }
        let default = r#"{"class":"domain","durability":"required","delivery_semantics":"at_least_once"}"#;
        assert_eq!(Intent::parse(default).expect("a policy"), Intent::DEFAULT);
    }

    #[test]
    fn objective_ceiling_capabilities_and_operation_follow() {
        for (name, objective) in [
            ("latency_first", Objective::LowestLatency),
            ("cheapest", Objective::Cheapest),
            ("balanced", Objective::Balanced),
            ("correctness", Objective::Correctness),
        ] {
            let more = format!(r#","routing":{{"objective":"{name}"}},"latency":{{"maximum_p95_ms":40.5}}"#);
            let wanted = intent("domain", "required", &more).requirements();
            assert_eq!((wanted.objective, wanted.max_latency_ms), (objective, Some(40.5)));
        }
        let wanted = intent("bulk", "required", r#","routing":{"multi_provider":true},"latency":{}"#).requirements();
        assert_eq!((wanted.objective, wanted.max_latency_ms), (Objective::Balanced, None));
        assert_eq!(
            (wanted.capabilities, wanted.latency_op),
            (vec!["events:gateway".into()], Some("queue_p95".into()))
        );
        let wanted = intent("bulk", "required", ORDERED).requirements();
        assert_eq!(
            wanted.capabilities,
            ["events:gateway", "events:durable", "events:ordered"]
        );
        assert_eq!(wanted.latency_op.as_deref(), Some("stream_p95"));
        let wanted = intent("realtime_ephemeral", "none", "").requirements();
        assert_eq!(
            (wanted.capabilities.len(), wanted.latency_op.as_deref()),
            (1, Some("topic_p95"))
        );
        for broken in ["{}", "[]", r#"{"class":"warp","durability":"none"}"#] {
            assert!(Intent::parse(broken).is_err(), "{broken}");
        }
    }
}
