//! Which service may publish which event types.

use std::collections::BTreeMap;

use super::ids::{is_segment, is_slug};
use super::json::{Members, check_document};

/// The shared prefixes in force when nothing else is configured, as the comma list that [`parse_shared`] reads.
pub const SHARED_DEFAULT: &str = "provider.";

/// The services that publish out of the box, each in the namespace of its own name.
const BUILT_IN: [&str; 27] = [
    "live",
    "media",
    "network",
    "community",
    "chat",
    "openre",
    "billing",
    "tips",
    "vip",
    "ai",
    "games",
    "tools",
    "codes",
    "host",
    "bot",
    "watch",
    "run",
    "space",
    "wiki",
    "blog",
    "news",
    "reviews",
    "deals",
    "coupons",
    "trade",
    "sources",
    "search",
];

/// The name under which the service itself writes usage events; nobody publishes it over HTTP.
const OWN_SOURCE: &str = "events";

/// Prefixes that every mapped service may publish under, each ending in a dot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharedPrefixes(Vec<String>);

/// Which prefixes of event types each source owns, and which are shared by all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceMap {
    owned: BTreeMap<String, Vec<String>>,
    shared: SharedPrefixes,
}

/// Why a source may not publish a type; each is a 403.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourceFault {
    /// The source owns nothing: `events.unknown_source`.
    #[error("this source owns no event types")]
    UnknownSource,
    /// The type is neither the source's nor shared: `events.type_not_allowed`.
    #[error("this source does not own this event type")]
    TypeNotAllowed,
}

impl Default for SourceMap {
    fn default() -> Self {
        let owned = BUILT_IN
            .iter()
            .map(|source| ((*source).to_owned(), vec![format!("{source}.")]))
            .collect();
        Self {
            owned,
            shared: SharedPrefixes(vec![SHARED_DEFAULT.to_owned()]),
        }
    }
}

impl SourceMap {
    /// The prefixes that a source may publish under: its own, then the shared ones.
    pub fn prefixes_of(&self, source: &str) -> impl Iterator<Item = &str> {
        let own = self.owned.get(source).into_iter().flatten();
        own.chain(&self.shared.0).map(String::as_str)
    }

    /// Reads `{"<source>": ["<prefix>", …], …}`. The map replaces the built-in one and shares nothing until
    /// [`SourceMap::with_shared`] says so. Every mistake is reported.
    pub fn from_json(text: &str) -> Result<Self, Vec<String>> {
        let document =
            check_document(text.as_bytes()).map_err(|fault| vec![fault.to_string().replacen("the body", "it", 1)])?;
        let members = Members::parse(document).ok_or_else(|| vec!["it must be a JSON object".to_owned()])?;
        let (mut owned, mut namespaces, mut faults) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        for (source, prefixes) in members.iter() {
            if let Err(fault) = check_source(source) {
                faults.push(fault);
                continue;
            }
            if let Some(other) = namespaces.insert(namespace(source), source.to_owned()) {
                faults.push(format!("{other:?} and {source:?} claim the same namespace"));
            }
            match own_prefixes(source, prefixes.get()) {
                Ok(prefixes) => {
                    owned.insert(source.to_owned(), prefixes);
                }
                Err(fault) => faults.push(fault),
            }
        }
        if faults.is_empty() {
            Ok(Self {
                owned,
                shared: SharedPrefixes::default(),
            })
        } else {
            Err(faults)
        }
    }

    /// The same map with other shared prefixes.
    pub fn with_shared(self, shared: SharedPrefixes) -> Self {
        Self { shared, ..self }
    }

    /// Whether the source may publish the type.
    pub fn may_publish(&self, source: &str, event_type: &str) -> Result<(), SourceFault> {
        let own = self.owned.get(source).ok_or(SourceFault::UnknownSource)?;
        if own
            .iter()
            .chain(&self.shared.0)
            .any(|prefix| event_type.starts_with(prefix.as_str()))
        {
            Ok(())
        } else {
            Err(SourceFault::TypeNotAllowed)
        }
    }
}

/// Reads a comma list of shared prefixes, each a name and a dot; none may be reserved or belong to a source of the map.
/// Every mistake is reported.
pub fn parse_shared(text: &str, map: &SourceMap) -> Result<SharedPrefixes, Vec<String>> {
    let (mut shared, mut faults) = (Vec::new(), Vec::new());
    for prefix in text.split(',').map(str::trim).filter(|prefix| !prefix.is_empty()) {
        match check_shared(prefix, map) {
            Ok(()) => shared.push(prefix.to_owned()),
            Err(fault) => faults.push(fault),
        }
    }
    if faults.is_empty() {
        Ok(SharedPrefixes(shared))
    } else {
        Err(faults)
    }
}

/// The first segment of the types a source owns: its name without hyphens, since event types have none.
fn namespace(source: &str) -> String {
    source.replace('-', "")
}

/// Whether a name belongs to developer apps or to this service.
fn is_reserved(name: &str) -> bool {
    name.starts_with("app-") || matches!(namespace(name).as_str(), "app" | OWN_SOURCE)
}

fn check_source(source: &str) -> Result<(), String> {
    if !is_slug(source) {
        return Err(format!(
            "{source:?} is not a source (2 to 40 characters: a lower-case letter, then a-z, 0-9 or -)"
        ));
    }
    if is_reserved(source) {
        Err(format!("{source:?} is reserved"))
    } else {
        Ok(())
    }
}

fn own_prefixes(source: &str, json: &str) -> Result<Vec<String>, String> {
    let prefixes: Vec<String> =
        serde_json::from_str(json).map_err(|_| format!("{source:?} must have an array of prefixes"))?;
    if prefixes.is_empty() {
        return Err(format!("{source:?} has no prefix"));
    }
    let namespace = namespace(source);
    for prefix in &prefixes {
        let segments = prefix.strip_suffix('.').map(|segments| segments.split('.'));
        let Some(mut segments) = segments.filter(|segments| segments.clone().all(is_segment)) else {
            return Err(format!(
                "{source:?} has the prefix {prefix:?}, which is not segments that each end in a dot"
            ));
        };
        if segments.next() != Some(namespace.as_str()) {
            return Err(format!(
                "{source:?} has the prefix {prefix:?}, which does not begin with {namespace}."
            ));
        }
    }
    Ok(prefixes)
}

fn check_shared(prefix: &str, map: &SourceMap) -> Result<(), String> {
    let name = prefix.strip_suffix('.').filter(|name| {
        name.starts_with(|c: char| c.is_ascii_lowercase())
            && name
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    });
    let Some(name) = name else {
        return Err(format!("{prefix:?} is not a name that ends in a dot"));
    };
    if is_reserved(name) {
        return Err(format!("{prefix:?} is reserved"));
    }
    match map.owned.keys().find(|source| namespace(source) == namespace(name)) {
        Some(source) => Err(format!("{prefix:?} belongs to the source {source:?}")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(json: &str) -> SourceMap {
        SourceMap::from_json(json).unwrap_or_else(|faults| panic!("{json}: {faults:?}"))
    }

    #[test]
    fn every_built_in_source_publishes_its_own_and_the_shared_types_only() {
        let built_in = SourceMap::default();
        for source in BUILT_IN {
            assert_eq!(
                built_in.may_publish(source, &format!("{source}.thing.happened")),
                Ok(())
            );
            assert_eq!(built_in.may_publish(source, "provider.health.degraded"), Ok(()));
            let other = if source == "media" { "live" } else { "media" };
            assert_eq!(
                built_in.may_publish(source, &format!("{other}.a.b")),
                Err(SourceFault::TypeNotAllowed)
            );
            assert_eq!(
                built_in.may_publish(source, &format!("{source}x.a.b")),
                Err(SourceFault::TypeNotAllowed)
            );
            assert_eq!(
                built_in.may_publish(source, "events.usage.recorded"),
                Err(SourceFault::TypeNotAllowed)
            );
            assert_eq!(
                built_in.may_publish(source, "app.p01k7.x"),
                Err(SourceFault::TypeNotAllowed)
            );
        }
        for stranger in [
            "stranger",
            "events",
            "app",
            "app-01k7ccd4ef5gh6jk7mn8pq9rst",
            "provider",
            "",
        ] {
            assert_eq!(
                built_in.may_publish(stranger, "provider.a.b"),
                Err(SourceFault::UnknownSource),
                "{stranger}"
            );
        }
    }

    #[test]
    fn a_configured_map_replaces_the_built_in_one() {
        let map = map(r#"{"live": ["live.stream.", "live.x."], "media-hub": ["mediahub."]}"#);
        assert_eq!(map.may_publish("live", "live.stream.started"), Ok(()));
        assert_eq!(
            map.may_publish("live", "live.chat.sent"),
            Err(SourceFault::TypeNotAllowed)
        );
        assert_eq!(
            map.may_publish("live", "live.streams.sent"),
            Err(SourceFault::TypeNotAllowed)
        );
        assert_eq!(map.may_publish("media-hub", "mediahub.item.added"), Ok(()));
        assert_eq!(
            map.may_publish("live", "mediahub.item.added"),
            Err(SourceFault::TypeNotAllowed)
        );
        assert_eq!(map.may_publish("games", "games.a.b"), Err(SourceFault::UnknownSource));
        assert_eq!(
            map.may_publish("live", "provider.a.b"),
            Err(SourceFault::TypeNotAllowed)
        );
        let shared = parse_shared("provider., storage.,", &map).expect("valid");
        let map = map.with_shared(shared);
        assert_eq!(map.may_publish("live", "storage.zone.full"), Ok(()));
        assert_eq!(map.may_publish("live", "provider.zone.full"), Ok(()));
        assert_eq!(
            map.may_publish("games", "storage.zone.full"),
            Err(SourceFault::UnknownSource)
        );
    }

    #[test]
    fn maps_that_would_leak_a_namespace_are_refused() {
        for bad in [
            "",
            "{nope",
            "[]",
            "5",
            r#"{"live":["media."]}"#,
            r#"{"live":["mediahub."]}"#,
            r#"{"live":["live"]}"#,
            r#"{"live":["live.stream"]}"#,
            r#"{"live":["livestream."]}"#,
            r#"{"live":["live..a."]}"#,
            r#"{"live":["live.*."]}"#,
            r#"{"live":["."]}"#,
            r#"{"live":[""]}"#,
            r#"{"live":[]}"#,
            r#"{"live":"live."}"#,
            r#"{"live":[5]}"#,
            r#"{"Live":["live."]}"#,
            r#"{"l":["l."]}"#,
            r#"{"app":["app."]}"#,
            r#"{"app-x1":["appx1."]}"#,
            r#"{"a-pp":["app."]}"#,
            r#"{"events":["events."]}"#,
            r#"{"event-s":["events."]}"#,
            r#"{"media-hub":["mediahub."],"mediahub":["mediahub."]}"#,
            r#"{"live":["live."],"live":["live."]}"#,
            r#"{"media-hub":["media-hub."]}"#,
        ] {
            assert!(
                SourceMap::from_json(bad).is_err_and(|faults| faults.len() == 1),
                "{bad}"
            );
        }
        let faults =
            SourceMap::from_json(r#"{"live":[],"app":["app."],"media":["live."]}"#).expect_err("three mistakes");
        assert_eq!(faults.len(), 3, "{faults:?}");
    }

    #[test]
    fn shared_prefixes_belong_to_nobody() {
        let map = map(r#"{"live":["live."],"media-hub":["mediahub."]}"#);
        assert_eq!(parse_shared("", &map), Ok(SharedPrefixes(Vec::new())));
        assert!(parse_shared(SHARED_DEFAULT, &SourceMap::default()).is_ok());
        for bad in [
            "provider",
            "Provider.",
            "a.b.",
            "1a.",
            ".",
            "live.",
            "media-hub.",
            "mediahub.",
            "li-ve.",
            "app.",
            "app-x.",
            "a-pp.",
            "events.",
        ] {
            assert!(parse_shared(bad, &map).is_err_and(|faults| faults.len() == 1), "{bad}");
        }
        assert_eq!(parse_shared("app.,live.,ok.", &map).expect_err("two mistakes").len(), 2);
    }
}
