//! A signal, and the two forms in which carriers send signals: ids, and never content.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The longest id that is looked at, in bytes.
pub const ID_LENGTH_MAX: usize = 64;

/// How many ids one announcement names at most.
pub(crate) const ANNOUNCED_MAX: usize = 1000;

/// The longest message that can be a signal of one delivery, in bytes: two ids and what surrounds them.
const DELIVERY_BYTES_MAX: usize = 1024;

/// The longest message that can be an announcement, in bytes.
pub(crate) const ANNOUNCEMENT_BYTES_MAX: usize = 256 * 1024;

/// A row that may be worth a look.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Signal {
    /// The event.
    pub event_id: String,
    /// The subscription, where it is one delivery that has work; none where the event itself is news.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subscription_id: Option<String>,
}

impl Signal {
    /// Whether both ids could be ids: 1 to 64 of `[A-Za-z0-9_.:-]`. That they exist, only the database knows.
    pub fn is_plausible(&self) -> bool {
        is_id(&self.event_id) && self.subscription_id.as_deref().is_none_or(is_id)
    }

    /// The message of one signal: `{"event_id":…,"subscription_id":…}`.
    pub(crate) fn to_json(&self) -> String {
        serde_json::to_string(self).expect("two strings are JSON")
    }

    /// What such a message says; `None` for anything else.
    pub(crate) fn from_json(message: &[u8]) -> Option<Self> {
        let signal: Self = (message.len() <= DELIVERY_BYTES_MAX).then(|| serde_json::from_slice(message).ok())??;
        signal.is_plausible().then_some(signal)
    }
}

fn is_id(text: &str) -> bool {
    (1..=ID_LENGTH_MAX).contains(&text.len())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"_.:-".contains(&byte))
}

/// Signals in the order given, each once.
pub(crate) fn distinct(signals: &[Signal]) -> Vec<&Signal> {
    let mut seen = BTreeSet::new();
    signals.iter().filter(|signal| seen.insert(*signal)).collect()
}

/// What one process tells all others: `{"from":…,"ids":[event…],"deliveries":[[event,subscription]…]}`, or
/// `"everything":true` in place of names.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Announcement<'a> {
    from: &'a str,
    ids: Vec<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    deliveries: Vec<(&'a str, &'a str)>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    everything: bool,
}

impl<'a> Announcement<'a> {
    /// The messages that announce these signals; each names at most a thousand.
    pub(crate) fn of(from: &'a str, signals: &'a [Signal]) -> impl Iterator<Item = String> {
        distinct(signals)
            .chunks(ANNOUNCED_MAX)
            .map(|chunk| {
                let mut announcement = Self {
                    from,
                    ..Self::default()
                };
                for signal in chunk {
                    match &signal.subscription_id {
                        None => announcement.ids.push(&signal.event_id),
                        Some(subscription_id) => announcement.deliveries.push((&signal.event_id, subscription_id)),
                    }
                }
                announcement.to_json()
            })
            .collect::<Vec<_>>()
            .into_iter()
    }

    /// The message that names nothing: look at everything.
    pub(crate) fn of_everything(from: &'a str) -> String {
        let announcement = Self {
            from,
            everything: true,
            ..Self::default()
        };
        announcement.to_json()
    }

    /// A message that says nothing, to see whether it may be sent.
    pub(crate) fn of_nothing(from: &'a str) -> String {
        let announcement = Self {
            from,
            ..Self::default()
        };
        announcement.to_json()
    }

    fn to_json(&self) -> String {
        serde_json::to_string(self).expect("strings are JSON")
    }
}

/// What an announcement says to this process.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Announced {
    /// This process sent it.
    Own,
    /// These signals; possibly none.
    Signals(Vec<Signal>),
    /// Everything may be worth a look.
    Everything,
    /// It is no announcement.
    Strange,
}

/// Reads an announcement that anybody may have sent. What is no id in it is skipped.
pub(crate) fn announced(message: &[u8], own: &str) -> Announced {
    #[derive(Deserialize)]
    struct Wire {
        from: String,
        ids: Vec<Value>,
        #[serde(default)]
        deliveries: Vec<Value>,
        #[serde(default)]
        everything: bool,
    }

    if message.len() > ANNOUNCEMENT_BYTES_MAX {
        return Announced::Strange;
    }
    let Ok(wire) = serde_json::from_slice::<Wire>(message) else {
        return Announced::Strange;
    };
    if wire.from == own {
        return Announced::Own;
    }
    if wire.everything {
        return Announced::Everything;
    }
    let events = wire.ids.iter().filter_map(|id| {
        Some(Signal {
            event_id: id.as_str()?.to_owned(),
            subscription_id: None,
        })
    });
    let deliveries = wire
        .deliveries
        .iter()
        .filter_map(|pair| match pair.as_array()?.as_slice() {
            [event_id, subscription_id] => Some(Signal {
                event_id: event_id.as_str()?.to_owned(),
                subscription_id: Some(subscription_id.as_str()?.to_owned()),
            }),
            _ => None,
        });
    let signals = events
        .chain(deliveries)
        .filter(Signal::is_plausible)
        .take(ANNOUNCED_MAX);
    Announced::Signals(signals.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(event_id: &str) -> Signal {
        Signal {
            event_id: event_id.into(),
            subscription_id: None,
        }
    }

    fn delivery(event_id: &str, subscription_id: &str) -> Signal {
        Signal {
            event_id: event_id.into(),
            subscription_id: Some(subscription_id.into()),
        }
    }

    #[test]
    fn a_signal_is_two_ids_on_the_wire_and_comes_back_unaltered() {
        let signal = delivery("evt_1", "sub_1");
        assert_eq!(signal.to_json(), r#"{"event_id":"evt_1","subscription_id":"sub_1"}"#);
        assert_eq!(Signal::from_json(signal.to_json().as_bytes()), Some(signal));
        assert_eq!(event("evt_1").to_json(), r#"{"event_id":"evt_1"}"#);
    }

    #[test]
    fn what_is_no_signal_is_nothing() {
        let long = format!(r#"{{"event_id":"{}","subscription_id":"s"}}"#, "e".repeat(65));
        let huge = format!(
            r#"{{"event_id":"e","subscription_id":"s","x":"{}"}}"#,
            "x".repeat(10_000_000)
        );
        let nested = format!(r#"{{"event_id":{}}}"#, "[".repeat(100_000));
        for message in [
            "",
            "{}",
            "null",
            "[]",
            "\u{0}",
            r#"{"event_id":1}"#,
            r#"{"event_id":"a b"}"#,
            r#"{"event_id":""}"#,
            r#"{"event_id":"e","subscription_id":{}}"#,
            r#"{"event_id":"e\n"}"#,
            &long,
            &huge,
            &nested,
        ] {
            assert_eq!(
                Signal::from_json(message.as_bytes()),
                None,
                "{}",
                &message[..message.len().min(80)]
            );
        }
        assert_eq!(Signal::from_json(b"\xff\xfe{"), None);
    }

    #[test]
    fn an_announcement_names_each_once_and_comes_back_to_others_only() {
        let signals = [event("evt_1"), delivery("evt_2", "sub_1"), event("evt_1")];
        let messages: Vec<_> = Announcement::of("me", &signals).collect();
        assert_eq!(
            messages,
            [r#"{"from":"me","ids":["evt_1"],"deliveries":[["evt_2","sub_1"]]}"#]
        );
        let message = messages[0].as_bytes();
        assert_eq!(announced(message, "me"), Announced::Own);
        let heard = Announced::Signals(vec![event("evt_1"), delivery("evt_2", "sub_1")]);
        assert_eq!(announced(message, "you"), heard);
        assert_eq!(
            announced(Announcement::of_everything("me").as_bytes(), "you"),
            Announced::Everything
        );
        assert_eq!(
            announced(Announcement::of_nothing("me").as_bytes(), "you"),
            Announced::Signals(vec![])
        );
    }

    #[test]
    fn many_are_announced_in_messages_of_bounded_size() {
        let signals: Vec<_> = (0..2500)
            .map(|n| delivery(&format!("evt_{n:060}"), &format!("sub_{n:060}")))
            .collect();
        let messages: Vec<_> = Announcement::of("me", &signals).collect();
        assert_eq!(messages.len(), 3);
        let mut heard = Vec::new();
        for message in &messages {
            assert!(
                message.len() <= ANNOUNCEMENT_BYTES_MAX,
                "{} bytes would be ignored on receipt",
                message.len()
            );
            let Announced::Signals(signals) = announced(message.as_bytes(), "you") else {
                panic!("it names signals")
            };
            heard.extend(signals);
        }
        assert_eq!(heard, signals);
    }

    #[test]
    fn strange_announcements_say_nothing() {
        let mixed = br#"{"from":"x","ids":["evt_1",7,null,"a b",["evt_3"]],"deliveries":[["evt_2"],["evt_2",3],"x"]}"#;
        assert_eq!(announced(mixed, "you"), Announced::Signals(vec![event("evt_1")]));
        let huge = format!(r#"{{"from":"x","ids":["{}"]}}"#, "e".repeat(ANNOUNCEMENT_BYTES_MAX));
        let nested = format!(r#"{{"from":"x","ids":{}"#, "[".repeat(100_000));
        for message in [
            "",
            "{}",
            r#"{"from":"x"}"#,
            r#"{"from":"x","ids":{}}"#,
            r#"{"from":1,"ids":[]}"#,
            &huge,
            &nested,
        ] {
            assert_eq!(announced(message.as_bytes(), "you"), Announced::Strange);
        }
        assert_eq!(announced(b"\xff\x00", "you"), Announced::Strange);
        let ids = vec!["evt_1"; 5000];
        let many = serde_json::to_vec(&serde_json::json!({ "from": "x", "ids": ids })).expect("JSON");
        assert_eq!(
            announced(&many, "you"),
            Announced::Signals(vec![event("evt_1"); ANNOUNCED_MAX])
        );
    }
}
