//! Topic patterns: one grammar and one matcher for pull, streams, subscriptions and fan-out.

use std::fmt;

use serde::{Serialize, Serializer};

use super::ids::is_segment;

/// Longest pattern, in characters.
pub const PATTERN_MAX: usize = 200;

/// Most patterns in one comma list.
pub const LIST_MAX: usize = 20;

/// A pattern over event types: dot-separated segments, where `*` stands for one or more whole segments. Two stars never
/// stand side by side.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TopicPattern(String);

impl TopicPattern {
    /// Accepts 1 to 200 characters of `[a-z0-9_]` segments and stars; anything else is no pattern.
    pub fn parse(text: &str) -> Option<Self> {
        if text.len() > PATTERN_MAX || !text.split('.').all(|segment| segment == "*" || is_segment(segment)) {
            return None;
        }
        (!text.contains("*.*")).then(|| Self(text.to_owned()))
    }

    /// Reads a comma list of 1 to 20 patterns, trimming each and dropping repeats; one bad item spoils the list. What an
    /// absent or empty list means is the caller's decision.
    pub fn parse_list(text: &str) -> Option<Vec<Self>> {
        let mut patterns = Vec::new();
        for (index, item) in text.split(',').enumerate() {
            let pattern = Self::parse(item.trim()).filter(|_| index < LIST_MAX)?;
            if !patterns.contains(&pattern) {
                patterns.push(pattern);
            }
        }
        Some(patterns)
    }

    /// The pattern as it was given.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether the whole event type fits the pattern. Takes time linear in the two lengths.
    pub fn matches(&self, event_type: &str) -> bool {
        // Every star touches only dots and ends, so the text between stars carries the segment borders with it, and
        // taking the first place where each piece fits is always right.
        let mut pieces = self.0.split('*');
        let first = pieces.next().unwrap_or_default();
        let Some(last) = pieces.next_back() else {
            return first == event_type;
        };
        let Some(rest) = event_type.strip_prefix(first) else {
            return false;
        };
        let Some(mut rest) = rest.strip_suffix(last) else {
            return false;
        };
        for piece in pieces {
            match rest.split_once(piece) {
                Some((skipped, after)) if !skipped.is_empty() => rest = after,
                _ => return false,
            }
        }
        !rest.is_empty()
    }

    /// The pattern for SQL `LIKE … ESCAPE '\'`, which lets through every type that matches and some that do not; `None`
    /// for `*` alone, which needs no condition.
    pub fn like(&self) -> Option<String> {
        (self.0 != "*").then(|| self.0.replace('_', "\\_").replace('*', "%"))
    }

    /// The one event type the pattern can match, when it has no star.
    pub fn exact(&self) -> Option<&str> {
        (!self.0.contains('*')).then_some(self.0.as_str())
    }
}

impl fmt::Display for TopicPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for TopicPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for TopicPattern {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}
