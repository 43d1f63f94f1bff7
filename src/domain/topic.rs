//! What a reader or a subscriber asks for: how patterns over event types are written, and which types each one covers.

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

    /// Whether the whole of a well-formed event type fits the pattern. Takes time linear in the two lengths.
    pub fn matches(&self, event_type: &str) -> bool {
        // Every star touches only dots and ends, so the text between stars carries the segment borders with it: what lies
        // between two pieces is whole segments, one at least. Taking the first place where each piece fits is always right.
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
                Some((_, after)) => rest = after,
                None => return false,
            }
        }
        true
    }

    /// The pattern for SQL `LIKE … ESCAPE '\'`, which lets through the event types that match and no others: no segment of
    /// one is empty. `None` for `*` alone, which needs no condition.
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::domain::ids::is_event_type;

    fn pattern(text: &str) -> TopicPattern {
        TopicPattern::parse(text).unwrap_or_else(|| panic!("{text:?} is a pattern"))
    }

    #[test]
    fn the_grammar() {
        let longest = "x".repeat(200);
        for good in [
            "*",
            "media",
            "*.created",
            "media.vod.*",
            "media.*.ready",
            "1.2_.x",
            "_",
            longest.as_str(),
        ] {
            assert_eq!(pattern(good).as_str(), good);
        }
        let too_long = "x".repeat(201);
        for bad in [
            "",
            " ",
            ".",
            "a.",
            ".a",
            "a..b",
            "Media.x",
            "a.*.*",
            "*.*",
            "a.b*",
            "*a",
            "**",
            "a/b",
            "a b.c",
            "a-b.c",
            "live.é.x",
            "live.%2a",
            "user:usr_1",
            ",",
            "a.b\n",
            "a.\0",
            too_long.as_str(),
        ] {
            assert!(TopicPattern::parse(bad).is_none(), "{bad:?}");
        }
    }

    #[test]
    fn a_star_stands_for_one_or_more_whole_segments() {
        for (text, yes, no) in [
            (
                "media.vod.*",
                &["media.vod.ready", "media.vod.clip.cut"][..],
                &["media.vod", "media.vodx.ready"][..],
            ),
            (
                "*.created",
                &["community.post.created", "a.b.c.created"],
                &["community.post.created_at", "created"],
            ),
            (
                "media.*.ready",
                &["media.vod.ready", "media.a.b.ready"],
                &["media.ready", "media.vod.ready.x"],
            ),
            (
                "media.*.b.*.d",
                &["media.x.b.y.d", "media.x.y.b.z.q.d", "media.b.b.b.d"],
                &["media.b.y.d", "media.x.b.d"],
            ),
            ("*.x.*.x.*", &["q.x.x.x.q", "a.x.b.x.c"], &["q.x.x.q", "x.x.x.x"]),
            ("*", &["live.stream.started", "a"], &[]),
            (
                "live.a_b.c",
                &["live.a_b.c"],
                &["live.axb.c", "live.a_b.c.d", "live.a_b"],
            ),
        ] {
            for event_type in yes {
                assert!(pattern(text).matches(event_type), "{text} {event_type}");
            }
            for event_type in no {
                assert!(!pattern(text).matches(event_type), "{text} {event_type}");
            }
        }
    }

    #[test]
    fn narrowing_for_sql() {
        assert_eq!(pattern("*").like(), None);
        assert_eq!(pattern("media.a_b.*").like().as_deref(), Some(r"media.a\_b.%"));
        assert_eq!(pattern("live.x.y").like().as_deref(), Some("live.x.y"));
        assert_eq!(pattern("live.x.y").exact(), Some("live.x.y"));
        assert_eq!(pattern("live.*").exact(), None);
    }

    #[test]
    fn comma_lists() {
        let list = |text: &str| {
            TopicPattern::parse_list(text).map(|all| all.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        assert_eq!(
            list("live.* , *.x,live.*"),
            Some(vec!["live.*".to_owned(), "*.x".to_owned()])
        );
        for bad in ["", " ", ",", "live.*,", "live.*,Bad"] {
            assert_eq!(list(bad), None, "{bad:?}");
        }
        let many = |count: usize| (0..count).map(|i| format!("live.t{i}.*")).collect::<Vec<_>>().join(",");
        assert_eq!(list(&many(20)).map(|all| all.len()), Some(20));
        assert_eq!(list(&many(21)), None);
    }

    #[test]
    fn a_hostile_pattern_costs_linear_time() {
        let hostile = pattern(&format!("{}z", "*.a.".repeat(49)));
        let long = "a.".repeat(500_000) + "b";
        let started = std::time::Instant::now();
        assert!(!hostile.matches(&long));
        assert!(
            started.elapsed() < std::time::Duration::from_secs(2),
            "took {:?}",
            started.elapsed()
        );
    }

    /// The definition read literally, exponential and obviously right.
    fn reference(pattern: &[&str], event_type: &[&str]) -> bool {
        match pattern.split_first() {
            None => event_type.is_empty(),
            Some((&"*", rest)) => (1..=event_type.len()).any(|taken| reference(rest, &event_type[taken..])),
            Some((segment, rest)) => event_type
                .split_first()
                .is_some_and(|(first, more)| first == segment && reference(rest, more)),
        }
    }

    /// SQL `LIKE` with the escape, for the characters that occur.
    fn sql_like(pattern: &[u8], text: &[u8]) -> bool {
        match pattern {
            [] => text.is_empty(),
            [b'%', rest @ ..] => (0..=text.len()).any(|taken| sql_like(rest, &text[taken..])),
            [b'\\', b'_', rest @ ..] => text.first() == Some(&b'_') && sql_like(rest, &text[1..]),
            [b'_', rest @ ..] => !text.is_empty() && sql_like(rest, &text[1..]),
            [byte, rest @ ..] => text.first() == Some(byte) && sql_like(rest, &text[1..]),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn agrees_with_the_definition(
            segments in prop::collection::vec("[ab]{1,2}|a_|\\*|\\*", 1..7),
            types in prop::collection::vec(prop::collection::vec("[ab]{1,2}|a_", 3..8), 1..8),
        ) {
            if let Some(pattern) = TopicPattern::parse(&segments.join(".")) {
                let own: Vec<&str> = pattern.as_str().split('.').collect();
                for event_type in types {
                    let text = event_type.join(".");
                    prop_assert!(is_event_type(&text));
                    let parts: Vec<&str> = text.split('.').collect();
                    let expected = reference(&own, &parts);
                    prop_assert_eq!(pattern.matches(&text), expected, "{} against {}", pattern, text);
                    if expected && let Some(like) = pattern.like() {
                        prop_assert!(sql_like(like.as_bytes(), text.as_bytes()), "SQL must not lose {}", text);
                    }
                }
            }
        }

        #[test]
        fn parses_exactly_the_grammar(text in "[a*._A-]{0,8}") {
            let segments: Vec<&str> = text.split('.').collect();
            let expected = segments.iter().all(|s| *s == "*" || (!s.is_empty() && s.chars().all(|c| c == 'a' || c == '_')))
                && segments.windows(2).all(|pair| pair != ["*", "*"]);
            prop_assert_eq!(TopicPattern::parse(&text).is_some(), expected);
        }
    }
}
