//! JSON objects with their members in order, repeated ones included, so that a reader of files can name every mistake.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde_json::Value;

/// The members of an object.
pub(crate) struct Members<V = Value>(pub(crate) Vec<(String, V)>);

impl<V: DeserializeOwned> Members<V> {
    /// The members of a value that is an object, given as the text it was read from.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    /// The last member of a name.
    pub(crate) fn get(&self, name: &str) -> Option<&V> {
        self.0.iter().rev().find(|(own, _)| own == name).map(|(_, value)| value)
    }
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Members<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for Object<V> {
            type Value = Members<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<V>, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Object(PhantomData))
    }
}

/// A value for a message: short, and cut where it is long.
pub(crate) fn shown(value: &Value) -> String {
    const CHARS_MAX: usize = 40;
    let text = value.to_string();
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
