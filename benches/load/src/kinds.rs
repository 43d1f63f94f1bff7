//! What the events of a run are: one type of its own, or one for each kind of work that carriers tell apart.

use std::str::FromStr;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde_json::{Value, json};

use crate::fault::Fault;
use crate::service::Service;
use crate::sheet::Sheet;

/// How long a carrier may take to be chosen before a run: one that comes back has to win its place again.
const CHOSEN_MAX: Duration = Duration::from_secs(20);
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// A kind of work: the class that its policy gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Class {
    /// Work of types without a policy
    Queue,
    /// News that nobody keeps
    Topic,
    /// Durable work in the order of its keys; each connection publishes a key of its own
    Stream,
}

impl Class {
    fn name(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Topic => "topic",
            Self::Stream => "stream",
        }
    }

    fn policy(self) -> Option<Value> {
        match self {
            Self::Queue => None,
            Self::Topic => Some(json!({"class": "realtime_ephemeral", "durability": "none",
                "delivery_semantics": "at_least_once"})),
            Self::Stream => Some(ordered()),
        }
    }
}

/// The policy that promises the order of each subject.
pub(crate) fn ordered() -> Value {
    json!({"class": "domain", "durability": "required", "delivery_semantics": "at_least_once",
        "ordering": {"scope": "key", "key": "subject"}})
}

/// A class, and the carrier that must be chosen for it before a run begins: `CLASS[=CARRIER]`.
#[derive(Debug, Clone)]
pub(crate) struct Kind {
    class: Class,
    carrier: Option<String>,
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (class, carrier) = match text.split_once('=') {
            Some((class, carrier)) => (class, Some(carrier.to_owned())),
            None => (text, None),
        };
        Ok(Self {
            class: <Class as ValueEnum>::from_str(class, false)
                .map_err(|_| format!("{class} is none of queue, topic, stream"))?,
            carrier,
        })
    }
}

/// The types of one run, which no other run uses.
#[derive(Debug, Clone)]
pub(crate) struct Types {
    /// What the connections publish, by turns.
    pub(crate) all: Vec<String>,
    /// What subscriptions ask for.
    pub(crate) pattern: String,
    kinds: Vec<Kind>,
}

impl Types {
    /// One for each kind; just one without.
    pub(crate) fn fresh(kinds: &[Kind]) -> Self {
        let stem = format!("live.load_{:08x}", rand::random::<u32>());
        if kinds.is_empty() {
            let one = format!("{stem}.happened");
            return Self {
                all: vec![one.clone()],
                pattern: one,
                kinds: Vec::new(),
            };
        }
        Self {
            all: kinds
                .iter()
                .map(|kind| format!("{stem}.{}", kind.class.name()))
                .collect(),
            pattern: format!("{stem}.*"),
            kinds: kinds.to_vec(),
        }
    }

    /// Gives each its policy, and waits until the carriers that were asked for are the chosen ones.
    pub(crate) async fn announce(&self, service: &Service) -> Result<(), Fault> {
        for (event_type, kind) in self.each() {
            if let Some(policy) = kind.class.policy() {
                service.put_policy(event_type, policy).await?;
            }
        }
        for (event_type, kind) in self.each() {
            let Some(wanted) = &kind.carrier else { continue };
            let since = Instant::now();
            loop {
                let placement = service.placement(event_type).await?;
                if placement["selected"] == **wanted {
                    break;
                }
                if since.elapsed() > CHOSEN_MAX {
                    return Err(Fault::Other(format!(
                        "{wanted} is not chosen for {event_type}: {placement}"
                    )));
                }
                tokio::time::sleep(ASK_AGAIN).await;
            }
        }
        Ok(())
    }

    /// Writes down which carrier is chosen for each kind now, and why others are not.
    pub(crate) async fn write(&self, service: &Service, sheet: &mut Sheet) -> Result<(), Fault> {
        for (event_type, kind) in self.each() {
            let placement = service.placement(event_type).await?;
            let name = kind.class.name();
            sheet.text(
                &format!("{name}_at_end"),
                placement["selected"].as_str().unwrap_or_default(),
            );
            let candidates = placement["candidates"].as_array().into_iter().flatten();
            let excluded: Vec<&str> = candidates.filter_map(|one| one["excluded_because"].as_str()).collect();
            if !excluded.is_empty() {
                sheet.text(&format!("{name}_excluded"), excluded.join("; "));
            }
        }
        Ok(())
    }

    fn each(&self) -> impl Iterator<Item = (&str, &Kind)> {
        self.all.iter().map(String::as_str).zip(&self.kinds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_a_type_that_the_pattern_covers() {
        let kinds: Vec<Kind> = ["queue=valkey-v1", "stream"]
            .map(|text| text.parse().expect("a kind"))
            .into();
        assert_eq!(kinds[0].carrier.as_deref(), Some("valkey-v1"));
        let types = Types::fresh(&kinds);
        let stem = types.pattern.strip_suffix(".*").expect("a wildcard");
        assert_eq!(types.all, [format!("{stem}.queue"), format!("{stem}.stream")]);
        assert_ne!(Types::fresh(&kinds).pattern, types.pattern);
    }

    #[test]
    fn without_a_kind_there_is_one_type_and_it_is_the_pattern() {
        let types = Types::fresh(&[]);
        assert_eq!(types.all, [types.pattern.as_str()]);
        assert_eq!(types.each().count(), 0, "nothing is promised of it");
    }

    #[test]
    fn an_unknown_class_is_named() {
        assert!("bulk=x".parse::<Kind>().expect_err("no such class").contains("bulk"));
    }
}
