//! `GET /release.json`: which release runs here, and what it can work with.

use std::collections::BTreeMap;

use axum::Router;
use serde::Serialize;

use super::document;
use super::health::SERVICE;
use crate::domain::time::Millis;

/// How many characters of a commit name a release.
const RELEASE_CHARS: usize = 12;
/// The release where nobody knows the commit.
const RELEASE_UNKNOWN: &str = "0000000";
/// The release of the network's contracts that this wire follows.
const CONTRACTS_VERSION: &str = "0.215.0";
/// How long two releases may run side by side, in hours.
const MIXED_VERSION_WINDOW_HOURS: u32 = 24;
/// Migrations only add, so that a release of any earlier schema goes on working.
const SCHEMA_COMPATIBLE_FROM: i64 = 1;
/// The contracts of this wire, all in their first major.
const CONTRACTS: [&str; 27] = [
    "events.carrier-result",
    "events.carrier-switch-request",
    "events.checkpoint-request",
    "events.cursor",
    "events.delivery-admin-request",
    "events.delivery-admin-result",
    "events.delivery-body",
    "events.delivery-headers",
    "events.delivery-placement",
    "events.delivery-policy",
    "events.delivery-policy-result",
    "events.delivery-skip-request",
    "events.event-envelope",
    "events.placement-explanation",
    "events.publish-request",
    "events.publish-result",
    "events.read-request",
    "events.read-result",
    "events.rotate-secret-request",
    "events.rotate-secret-result",
    "events.stream-event",
    "events.stream-gap",
    "events.subscription",
    "events.subscription-request",
    "events.subscription-result",
    "events.subscription-update-request",
    "events.topic-pattern",
];

/// What the manifest says of this process.
#[derive(Debug, Clone)]
pub struct Release {
    /// Its name, as of [`release_name`].
    pub name: String,
    /// When that commit was made or deployed.
    pub released_at: Millis,
    /// When this process started.
    pub booted_at: Millis,
    /// Oldest release of a client that is still served.
    pub min_client: Option<String>,
    /// The newest migration of this release.
    pub schema_generation: i64,
}

/// How a commit is named everywhere: its first twelve digits, zeros when it is not known.
pub fn release_name(commit: &str) -> String {
    match commit.get(..RELEASE_CHARS).unwrap_or(commit) {
        "" => RELEASE_UNKNOWN.to_owned(),
        name => name.to_owned(),
    }
}

/// The document, members in the order of the wire.
#[derive(Serialize)]
struct Manifest<'a> {
    service: &'static str,
    release: &'a str,
    released_at: Millis,
    booted_at: Millis,
    contracts_version: &'static str,
    packages: Nothing,
    min_client_release: Option<&'a str>,
    mixed_version_window_hours: u32,
    components: BTreeMap<&'static str, Component<'a>>,
    assets: Nothing,
    schema_generation: i64,
    schema_compatible_from: i64,
    contract_ranges: BTreeMap<&'static str, Range>,
    /// There are no pages here that could report or be too old.
    metrics_url: (),
    client_generation: (),
    min_client_generation: (),
    shell: (),
}

#[derive(Serialize)]
struct Nothing {}

#[derive(Serialize)]
struct Component<'a> {
    kind: &'static str,
    version: &'a str,
}

#[derive(Serialize)]
struct Range {
    version: &'static str,
    accepts: &'static str,
}

/// The route.
pub fn routes(release: &Release) -> Router {
    let range = || Range {
        version: "1.0.0",
        accepts: ">=1.0.0 <2.0.0",
    };
    let manifest = Manifest {
        service: SERVICE,
        release: &release.name,
        released_at: release.released_at,
        booted_at: release.booted_at,
        contracts_version: CONTRACTS_VERSION,
        packages: Nothing {},
        min_client_release: release.min_client.as_deref(),
        mixed_version_window_hours: MIXED_VERSION_WINDOW_HOURS,
        components: BTreeMap::from([(
            "server",
            Component {
                kind: "server",
                version: &release.name,
            },
        )]),
        assets: Nothing {},
        schema_generation: release.schema_generation,
        schema_compatible_from: SCHEMA_COMPATIBLE_FROM,
        contract_ranges: CONTRACTS.into_iter().map(|id| (id, range())).collect(),
        metrics_url: (),
        client_generation: (),
        min_client_generation: (),
        shell: (),
    };
    document::route("/release.json", "no-cache, max-age=0", &manifest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_named_by_twelve_digits_of_its_commit_or_by_zeros() {
        for (commit, name) in [
            ("0123456789abcdef0123456789abcdef01234567", "0123456789ab"),
            ("0123456", "0123456"),
            ("", "0000000"),
        ] {
            assert_eq!(release_name(commit), name);
        }
    }
}
