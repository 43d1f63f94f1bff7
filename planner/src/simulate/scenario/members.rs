//! The members of one object of a scenario file. What is unknown, missing, doubled or of another form is told with its path,
//! and reading goes on.

use std::fmt;

use serde_json::Value;
use serde_json::value::RawValue;

use crate::json::{Members, shown};

/// Most mistakes that are told; a file of another kind has as many as it has members.
const MISTAKES_MAX: usize = 50;

/// What has been found wrong so far.
#[derive(Default)]
pub(super) struct Mistakes {
    told: Vec<String>,
    untold: usize,
}

/// An object and where it is in the file.
pub(super) struct Object {
    at: String,
    members: Members<Box<RawValue>>,
}

/// What a member must be.
pub(super) struct Form<T> {
    /// In words: "a text".
    pub(super) what: &'static str,
    /// Reads it.
    pub(super) of: fn(&Value) -> Option<T>,
}

pub(super) const TEXT: Form<String> = Form {
    what: "a text that is not empty",
    of: |value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned),
};

pub(super) const NUMBER: Form<f64> = Form {
    what: "a number",
    of: Value::as_f64,
};

pub(super) const COUNT: Form<u64> = Form {
    what: "a whole number of 0 or more",
    of: Value::as_u64,
};

impl Mistakes {
    /// Adds one; `at` is empty for the file as a whole.
    pub(super) fn add(&mut self, at: &str, message: impl fmt::Display) {
        if self.told.len() >= MISTAKES_MAX {
            self.untold += 1;
        } else if at.is_empty() {
            self.told.push(message.to_string());
        } else {
            self.told.push(format!("{at}: {message}"));
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.told.is_empty()
    }

    /// All of them, in the order of finding.
    pub(super) fn finish(mut self) -> Vec<String> {
        if self.untold > 0 {
            self.told.push(format!("and {} more", self.untold));
        }
        self.told
    }

    /// An object at `at`, with these members and no others. `whose` says what it is: "a carrier".
    pub(super) fn object(&mut self, at: &str, text: &str, whose: &str, known: &[&str]) -> Option<Object> {
        let Some(members) = Members::<Box<RawValue>>::parse(text) else {
            self.add(
                at,
                format_args!("must be an object, the members of {whose} between {{ and }}"),
            );
            return None;
        };
        let object = Object {
            at: at.to_owned(),
            members,
        };
        for (index, (name, _)) in object.members.0.iter().enumerate() {
            if !known.contains(&name.as_str()) {
                let known = known.join(", ");
                self.add(
                    &object.path(name),
                    format_args!("is no member of {whose}: remove it, or choose of {known}"),
                );
            } else if object.members.0[..index].iter().any(|(earlier, _)| earlier == name) {
                self.add(&object.path(name), "is given more than once: keep one");
            }
        }
        Some(object)
    }

    /// A member that may be left out.
    pub(super) fn optional<T>(&mut self, object: &Object, name: &str, form: &Form<T>) -> Option<T> {
        let text = object.raw(name)?;
        let value: Option<Value> = serde_json::from_str(text).ok();
        let read = value.as_ref().and_then(form.of);
        if read.is_none() {
            let given = shown(&value.unwrap_or_else(|| Value::String(text.to_owned())));
            self.add(&object.path(name), format_args!("must be {}, got {given}", form.what));
        }
        read
    }

    /// A member that must be there.
    pub(super) fn needed<T>(&mut self, object: &Object, name: &str, form: &Form<T>) -> Option<T> {
        self.there(object, name, form.what)?;
        self.optional(object, name, form)
    }

    /// The text of a member that must be there.
    pub(super) fn there<'a>(&mut self, object: &'a Object, name: &str, what: &str) -> Option<&'a str> {
        let text = object.raw(name);
        if text.is_none() {
            self.add(&object.path(name), format_args!("is missing: give {what}"));
        }
        text
    }

    /// The entries of a list, with where each is; none where it is left out.
    pub(super) fn list(&mut self, object: &Object, name: &str, most: usize) -> Vec<(String, Box<RawValue>)> {
        let Some(text) = object.raw(name) else {
            return Vec::new();
        };
        let at = object.path(name);
        let Ok(entries) = serde_json::from_str::<Vec<Box<RawValue>>>(text) else {
            self.add(&at, "must be a list: put its entries between [ and ]");
            return Vec::new();
        };
        if entries.len() > most {
            let count = entries.len();
            self.add(
                &at,
                format_args!("has {count} entries; a scenario has at most {most}: remove some"),
            );
            return Vec::new();
        }
        let numbered = entries.into_iter().enumerate();
        numbered
            .map(|(index, entry)| (format!("{at}[{index}]"), entry))
            .collect()
    }

    /// Holds a number to its limits.
    pub(super) fn within(&mut self, at: &str, value: Option<f64>, least: f64, most: f64) -> Option<f64> {
        let value = value?;
        if !(least..=most).contains(&value) {
            self.add(at, format_args!("must be a number from {least} to {most}, got {value}"));
        }
        Some(value)
    }
}

impl Object {
    /// Where one of its members is.
    pub(super) fn path(&self, name: &str) -> String {
        if self.at.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.at)
        }
    }

    /// The text of a member; null counts as left out.
    pub(super) fn raw(&self, name: &str) -> Option<&str> {
        self.members
            .get(name)
            .map(|value| value.get())
            .filter(|text| *text != "null")
    }
}
