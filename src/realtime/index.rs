//! Which streams want an event: a trie of topic patterns by segment. What a look-up costs depends on the patterns that
//! begin like the event's type and on the streams that want it, not on how many streams there are.

use std::collections::{BTreeMap, HashMap};
use std::ops::RangeInclusive;

use crate::domain::envelope::{Envelope, Visibility};
use crate::domain::topic::TopicPattern;

use super::viewer::{Audience, persons};

/// Streams by what they follow. `S` is the stream itself, cheap to clone.
#[derive(Debug)]
pub(super) struct Index<S> {
    root: Node<S>,
}

#[derive(Debug)]
struct Node<S> {
    children: HashMap<Box<str>, Node<S>>,
    /// Behind a `*`, which takes one segment or more.
    star: Option<Box<Node<S>>>,
    /// Streams whose pattern ends here, those of one audience side by side.
    followers: BTreeMap<(Audience, u64), S>,
}

impl<S> Default for Node<S> {
    fn default() -> Self {
        Self {
            children: HashMap::new(),
            star: None,
            followers: BTreeMap::new(),
        }
    }
}

impl<S> Default for Index<S> {
    fn default() -> Self {
        Self { root: Node::default() }
    }
}

impl<S: Clone> Index<S> {
    /// Adds a stream under one of its patterns. `id` tells it from every other.
    pub(super) fn add(&mut self, pattern: &TopicPattern, audience: &Audience, id: u64, stream: S) {
        let mut node = &mut self.root;
        for segment in pattern.as_str().split('.') {
            node = match segment {
                "*" => node.star.get_or_insert_default(),
                name if node.children.contains_key(name) => node.children.get_mut(name).expect("it is there"),
                name => node.children.entry(name.into()).or_default(),
            };
        }
        node.followers.insert((audience.clone(), id), stream);
    }

    /// Removes what [`Index::add`] added.
    pub(super) fn remove(&mut self, pattern: &TopicPattern, audience: &Audience, id: u64) {
        self.root
            .remove(&mut pattern.as_str().split('.'), &(audience.clone(), id));
    }

    /// Whether there is no stream at all.
    pub(super) fn is_empty(&self) -> bool {
        self.root.is_empty()
    }

    /// Whether anybody may want an event of this type.
    pub(super) fn wants(&self, event_type: &str, visibility: Visibility) -> bool {
        self.ends_of(event_type).iter().any(|node| match visibility {
            Visibility::Public => !node.followers.is_empty(),
            Visibility::Subject => node
                .followers
                .range((Audience::Person("".into()), 0)..)
                .next()
                .is_some(),
            Visibility::Internal => node.followers.range(all_of(Audience::Service)).next().is_some(),
        })
    }

    /// Calls `with` for each stream that wants an event and may see it; more than once where several of its patterns match.
    pub(super) fn for_each(&self, event: &Envelope, mut with: impl FnMut(&S)) {
        for node in self.ends_of(&event.event_type) {
            match event.visibility {
                Visibility::Public => node.followers.values().for_each(&mut with),
                Visibility::Subject => {
                    for person in persons(event) {
                        node.each_of(Audience::Person(person.into()), &mut with);
                    }
                    node.each_of(Audience::Service, &mut with);
                }
                Visibility::Internal => node.each_of(Audience::Service, &mut with),
            }
        }
    }

    /// The nodes at which a pattern that matches may end. Each node is looked at once for each segment at most, however
    /// many stars a pattern has.
    fn ends_of(&self, event_type: &str) -> Vec<&Node<S>> {
        // A node that stands behind a star takes further segments as well.
        let mut active: Vec<(&Node<S>, bool)> = vec![(&self.root, false)];
        for segment in event_type.split('.') {
            let mut next: Vec<(&Node<S>, bool)> = Vec::new();
            let mut seen = std::collections::HashSet::new();
            for &(node, takes_more) in &active {
                let stays = takes_more.then_some((node, true));
                let child = node.children.get(segment).map(|child| (child, false));
                let star = node.star.as_deref().map(|star| (star, true));
                for state in [stays, child, star].into_iter().flatten() {
                    if seen.insert(std::ptr::from_ref(state.0)) {
                        next.push(state);
                    }
                }
            }
            active = next;
        }
        active.into_iter().map(|(node, _)| node).collect()
    }
}

impl<S> Node<S> {
    fn each_of(&self, audience: Audience, with: &mut impl FnMut(&S)) {
        self.followers
            .range(all_of(audience))
            .for_each(|(_, stream)| with(stream));
    }

    fn is_empty(&self) -> bool {
        self.children.is_empty() && self.star.is_none() && self.followers.is_empty()
    }

    /// Removes a follower, and every node that is left without one.
    fn remove<'a>(&mut self, segments: &mut impl Iterator<Item = &'a str>, follower: &(Audience, u64)) {
        match segments.next() {
            None => {
                self.followers.remove(follower);
            }
            Some("*") => {
                if let Some(star) = &mut self.star {
                    star.remove(segments, follower);
                    if star.is_empty() {
                        self.star = None;
                    }
                }
            }
            Some(name) => {
                if let Some(child) = self.children.get_mut(name) {
                    child.remove(segments, follower);
                    if child.is_empty() {
                        self.children.remove(name);
                    }
                }
            }
        }
    }
}

fn all_of(audience: Audience) -> RangeInclusive<(Audience, u64)> {
    (audience.clone(), 0)..=(audience, u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn pattern(text: &str) -> TopicPattern {
        TopicPattern::parse(text).expect("a pattern")
    }

    fn person(id: &str) -> Audience {
        Audience::Person(id.into())
    }

    fn event(event_type: &str, visibility: &str, actor: &str, subject: &str) -> Envelope {
        let raw = format!(
            r#"{{"event_id":"evt_01K7AAB2CD3EF4GH5JK6MN7PQR","event_type":"{event_type}","version":1,"source":"live",
                "actor":{actor},"timestamp":"2026-10-21T08:15:30Z","visibility":"{visibility}","subject":{subject},
                "payload":{{}}}}"#
        );
        Envelope::parse(&raw, "4bf92f3577b34da6a3ce929d0e0e4736")
            .expect("a valid envelope")
            .0
    }

    fn wanted(index: &Index<u64>, event: &Envelope) -> Vec<u64> {
        let mut all = Vec::new();
        index.for_each(event, |id| all.push(*id));
        all.sort_unstable();
        all
    }

    const ALICE: &str = "usr_01K7DDE5FG6HJ7KM8NP9QR0STV";
    const BOB: &str = "usr_01K7DDE5FG6HJ7KM8NP9QR0STW";

    #[test]
    fn an_event_finds_those_that_may_see_it_and_no_others() {
        let mut index = Index::default();
        let viewers = [Audience::Anyone, person(ALICE), person(BOB), Audience::Service];
        for (id, audience) in (0..).zip(&viewers) {
            index.add(&pattern("live.*"), audience, id, id);
        }
        let service = r#"{"type":"service","id":"live"}"#;
        let alice = format!(r#"{{"type":"user","id":"{ALICE}"}}"#);
        let thing = format!(r#"{{"type":"stream","id":"{ALICE}"}}"#);
        for (visibility, actor, subject, expected) in [
            ("public", service, &thing, vec![0, 1, 2, 3]),
            ("internal", &alice, &alice, vec![3]),
            ("subject", service, &alice, vec![1, 3]),
            ("subject", &alice, &thing, vec![1, 3]),
            ("subject", service, &thing, vec![3]),
        ] {
            let event = event("live.stream.started", visibility, actor, subject);
            let mut found = wanted(&index, &event);
            found.dedup();
            assert_eq!(found, expected, "{visibility} by {actor} about {subject}");
            let by_rule: Vec<u64> = (0..)
                .zip(&viewers)
                .filter(|(_, viewer)| viewer.may_see(&event))
                .map(|(id, _)| id)
                .collect();
            assert_eq!(by_rule, expected, "history is judged alike");
        }
        assert!(index.wants("live.stream.started", Visibility::Internal));
        index.remove(&pattern("live.*"), &Audience::Service, 3);
        assert!(!index.wants("live.stream.started", Visibility::Internal));
        assert!(index.wants("live.stream.started", Visibility::Subject));
        assert!(!index.wants("chat.message.sent", Visibility::Public));
    }

    #[test]
    fn what_was_removed_leaves_nothing_behind() {
        let mut index = Index::default();
        let patterns = ["*", "a.b.c", "a.*", "a.*.c", "*.c", "a.b.*.d.*"];
        for (id, text) in (0..).zip(patterns) {
            index.add(&pattern(text), &Audience::Anyone, id, id);
        }
        for (id, text) in (0..).zip(patterns) {
            index.remove(&pattern(text), &Audience::Anyone, id);
        }
        assert!(index.root.is_empty());
    }

    #[test]
    fn many_stars_and_many_segments_take_no_time() {
        let mut index = Index::default();
        index.add(&pattern(&["*"; 50].join(".a.")), &Audience::Anyone, 0, 0);
        let long = format!("{}b", "a.".repeat(500));
        assert!(index.wants(&long, Visibility::Public));
    }

    proptest! {
        #[test]
        fn the_index_finds_what_the_patterns_match(
            patterns in prop::collection::vec(prop::collection::vec("a|b|\\*", 1..5), 1..12),
            event_type in prop::collection::vec("a|b", 3..7),
        ) {
            let mut index = Index::default();
            let mut expected = BTreeSet::new();
            let event = event(&event_type.join("."), "public", r#"{"type":"service","id":"live"}"#,
                r#"{"type":"stream","id":"1"}"#);
            for (id, text) in (0..).zip(&patterns) {
                let Some(pattern) = TopicPattern::parse(&text.join(".")) else { continue };
                index.add(&pattern, &Audience::Anyone, id, id);
                if pattern.matches(&event.event_type) {
                    expected.insert(id);
                }
            }
            let found: BTreeSet<u64> = wanted(&index, &event).into_iter().collect();
            prop_assert_eq!(index.wants(&event.event_type, Visibility::Public), !expected.is_empty());
            prop_assert_eq!(found, expected);
        }
    }
}
