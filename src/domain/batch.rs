//! Telling one envelope from a batch, borrowing each item from the body without reading into it.

use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::json::Members;

/// Most events in one batch.
pub const BATCH_MAX: usize = 100;

/// What a publish request carries. Items are as written and unread: whether each is an object at all is judged with the
/// rest of its envelope, in order, so that the first bad item is the one a refusal names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PublishBody<'a> {
    /// The body is one envelope, or something that will fail as one (a bare array, for example).
    Single(&'a str),
    /// The body is `{"events": […]}` with 1 to [`BATCH_MAX`] items.
    Batch(Vec<&'a str>),
}

/// Why a batch is refused before its items are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BatchFault {
    /// `events` is an empty array: 400 `events.bad_request`.
    #[error("events is empty; send 1 to {BATCH_MAX} events")]
    Empty,
    /// `events` has more than [`BATCH_MAX`] items: 413 `events.batch_too_large`.
    #[error("events has {count} items; send at most {BATCH_MAX} in one request")]
    TooMany {
        /// How many items were sent.
        count: usize,
    },
    /// `events` appears twice, so that readers could differ on what was sent: 422 `events.invalid_envelope`.
    #[error("events appears more than once; send one array")]
    Repeated,
}

/// Splits a well-formed body. It is a batch when it is an object, `events` is an array and `event_id` is absent.
pub fn split(body: &str) -> Result<PublishBody<'_>, BatchFault> {
    let Some(members) = Members::parse(body) else {
        return Ok(PublishBody::Single(body));
    };
    if members.get("event_id").is_some() {
        return Ok(PublishBody::Single(body));
    }
    let mut lists = members
        .iter()
        .filter(|(name, _)| *name == "events")
        .map(|(_, value)| value);
    let Some(events) = lists
        .next()
        .and_then(|list| serde_json::from_str::<Items<'_>>(list.get()).ok())
    else {
        return Ok(PublishBody::Single(body));
    };
    if lists.next().is_some() {
        return Err(BatchFault::Repeated);
    }
    match events.count {
        0 => Err(BatchFault::Empty),
        count if count > BATCH_MAX => Err(BatchFault::TooMany { count }),
        _ => Ok(PublishBody::Batch(events.first)),
    }
}

/// The first items of an array, as written, and how many there are in all.
struct Items<'a> {
    first: Vec<&'a str>,
    count: usize,
}

impl<'de: 'a, 'a> Deserialize<'de> for Items<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Borrowed;

        impl<'de> Visitor<'de> for Borrowed {
            type Value = Items<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Items<'de>, A::Error> {
                let mut items = Items {
                    first: Vec::new(),
                    count: 0,
                };
                while items.count < BATCH_MAX {
                    let Some(item) = seq.next_element::<&RawValue>()? else {
                        return Ok(items);
                    };
                    items.first.push(item.get());
                    items.count += 1;
                }
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    items.count += 1;
                }
                Ok(items)
            }
        }

        deserializer.deserialize_seq(Borrowed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch_of(count: usize) -> String {
        format!("{{\"events\":[{}]}}", vec!["{}"; count].join(","))
    }

    #[test]
    fn a_batch_is_an_object_with_events_and_no_event_id() {
        for single in [
            "{}",
            "[]",
            "[{}]",
            r#"{"event_id":"evt_1"}"#,
            r#"{"event_id":"evt_1","events":[]}"#,
            r#"{"event_id":null,"events":[{}]}"#,
            r#"{"events":{}}"#,
            r#"{"events":null}"#,
            r#"{"payload":{"events":[{}]}}"#,
        ] {
            assert_eq!(split(single), Ok(PublishBody::Single(single)), "{single}");
        }
        let text = r#" {"other": 1, "events": [ {"a": 1.0} , 5, [ ] ], "more": {"event_id": 1}} "#;
        assert_eq!(
            split(text),
            Ok(PublishBody::Batch(vec![r#"{"a": 1.0}"#, "5", "[ ]"])),
            "items are as written"
        );
        assert_eq!(split(r#"{"\u0065vents":[{}]}"#), Ok(PublishBody::Batch(vec!["{}"])));
    }

    #[test]
    fn the_size_of_a_batch_is_bounded() {
        assert_eq!(split(&batch_of(0)), Err(BatchFault::Empty));
        assert!(matches!(split(&batch_of(100)), Ok(PublishBody::Batch(items)) if items.len() == 100));
        assert_eq!(split(&batch_of(101)), Err(BatchFault::TooMany { count: 101 }));
        assert_eq!(split(&batch_of(50_000)), Err(BatchFault::TooMany { count: 50_000 }));
    }

    #[test]
    fn two_lists_are_refused_rather_than_one_chosen() {
        assert_eq!(split(r#"{"events":[{}],"events":[]}"#), Err(BatchFault::Repeated));
        assert_eq!(split(r#"{"events":[{}],"events":1}"#), Err(BatchFault::Repeated));
    }
}
