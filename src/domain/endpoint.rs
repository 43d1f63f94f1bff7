//! Which addresses a first-party service may have its events sent to; decided on the parsed address, never on its text.

use std::net::IpAddr;

use url::{Host, Url};

/// Longest endpoint in characters, as given and as normalised.
pub const ENDPOINT_MAX: usize = 2048;

const NETWORK_LABEL: &str = "openvibe";

/// Why an endpoint is refused; each is a 422 `events.endpoint_not_allowed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EndpointFault {
    /// It is longer than [`ENDPOINT_MAX`].
    #[error("endpoint is longer than {ENDPOINT_MAX} characters")]
    TooLong,
    /// It is no URL, or holds characters that parsers disagree on.
    #[error("endpoint is not a well-formed URL")]
    Malformed,
    /// Its scheme is neither http nor https.
    #[error("endpoint must begin with http:// or https://")]
    NotHttp,
    /// It carries a user name or a password.
    #[error("endpoint must not carry credentials")]
    Credentials,
    /// Its host ends in a dot.
    #[error("endpoint's host must not end in a dot")]
    TrailingDot,
    /// Its host is on no entry of the list.
    #[error(
        "endpoint's host is not one that events may be sent to: EVENTS_ENDPOINT_HOSTS of the service lists them (unless \
         set otherwise 127.0.0.1, which must be written so and not as localhost, and *.openvibe.*)"
    )]
    HostNotAllowed,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum HostRule {
    /// One name or address.
    Exact(Host),
    /// A name and everything under it.
    Under(String),
    /// `openvibe.<tld>` and everything under it.
    Network,
}

/// The hosts that first-party endpoints may name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostRules(Vec<HostRule>);

impl HostRules {
    /// Reads the entries: a host name, an address, `*.<name>` or `*.openvibe.*`. The error names the entry.
    pub fn parse(entries: &[String]) -> Result<Self, String> {
        entries
            .iter()
            .map(|entry| rule(entry.trim()))
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// Checks an endpoint and returns it normalised as WHATWG URLs are: the form to store, to compare and to send to. A
    /// host that is another spelling of an address is judged as that address.
    pub fn check(&self, url: &str) -> Result<Url, EndpointFault> {
        let url = parse_endpoint(url)?;
        let host = url.host().ok_or(EndpointFault::Malformed)?;
        if self.0.iter().any(|rule| rule.covers(&host)) {
            Ok(url)
        } else {
            Err(EndpointFault::HostNotAllowed)
        }
    }

    /// Whether a page of this origin is one of ours: `https`, no port, a host that a rule covers, written as browsers do.
    pub fn covers_origin(&self, origin: &str) -> bool {
        let Some(host) = origin
            .strip_prefix("https://")
            .filter(|host| is_host_name(host) && !host.contains('_'))
        else {
            return false;
        };
        self.0.iter().any(|rule| rule.covers(&Host::Domain(host)))
    }
}

impl HostRule {
    fn covers(&self, host: &Host<&str>) -> bool {
        match (self, host) {
            (Self::Exact(own), _) => own == host,
            (Self::Under(name), Host::Domain(host)) => {
                is_host_name(host)
                    && host
                        .strip_suffix(name.as_str())
                        .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
            }
            (Self::Network, Host::Domain(host)) => {
                let mut labels = host.rsplit('.');
                let tld = labels.next().unwrap_or_default();
                is_host_name(host)
                    && (2..=63).contains(&tld.len())
                    && tld.bytes().all(|b| b.is_ascii_lowercase())
                    && labels.next() == Some(NETWORK_LABEL)
            }
            (Self::Under(_) | Self::Network, _) => false,
        }
    }
}

fn rule(entry: &str) -> Result<HostRule, String> {
    let wrong = || format!("{entry:?} is not a host, an address, *.<name> or *.{NETWORK_LABEL}.*");
    if entry.eq_ignore_ascii_case("*.openvibe.*") {
        return Ok(HostRule::Network);
    }
    let (under, name) = match entry.strip_prefix("*.") {
        Some(rest) => (true, rest),
        None => (false, entry),
    };
    let host = match name.parse::<IpAddr>() {
        Ok(IpAddr::V6(address)) => Host::Ipv6(address),
        _ => Host::parse(name).map_err(|_| wrong())?,
    };
    match host {
        Host::Domain(name) if !is_host_name(&name) => Err(wrong()),
        Host::Domain(name) if under => Ok(HostRule::Under(name)),
        _ if under => Err(wrong()),
        host => Ok(HostRule::Exact(host)),
    }
}

/// The syntax every endpoint must have, whoever owns it.
pub(crate) fn parse_endpoint(text: &str) -> Result<Url, EndpointFault> {
    if text.chars().count() > ENDPOINT_MAX {
        return Err(EndpointFault::TooLong);
    }
    // URL parsers mend these in different ways; nobody needs them.
    if text.chars().any(|c| c.is_whitespace() || c.is_control() || c == '\\') {
        return Err(EndpointFault::Malformed);
    }
    let Some((scheme, rest)) = text.split_once("://") else {
        return Err(EndpointFault::NotHttp);
    };
    if !scheme.eq_ignore_ascii_case("http") && !scheme.eq_ignore_ascii_case("https") {
        return Err(EndpointFault::NotHttp);
    }
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if authority.contains('@') {
        return Err(EndpointFault::Credentials);
    }
    if authority.is_empty() {
        return Err(EndpointFault::Malformed);
    }
    let written_host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
    let url = Url::parse(text).map_err(|_| EndpointFault::Malformed)?;
    if written_host.ends_with('.') || url.host_str().is_some_and(|host| host.ends_with('.')) {
        return Err(EndpointFault::TrailingDot);
    }
    if url.as_str().len() > ENDPOINT_MAX {
        Err(EndpointFault::TooLong)
    } else {
        Ok(url)
    }
}

/// Whether the name consists of DNS labels: 1 to 63 of `[a-z0-9_-]`, no hyphen at either end, 253 in all.
pub(crate) fn is_host_name(name: &str) -> bool {
    name.len() <= 253
        && name.split('.').all(|label| {
            (1..=63).contains(&label.len())
                && !label.starts_with('-')
                && !label.ends_with('-')
                && label
                    .bytes()
                    .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_')
        })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rules(entries: &[&str]) -> HostRules {
        HostRules::parse(&entries.iter().map(ToString::to_string).collect::<Vec<_>>()).expect("valid entries")
    }

    fn usual() -> HostRules {
        rules(&["127.0.0.1", "*.openvibe.*"])
    }

    #[test]
    fn what_is_allowed_is_stored_in_its_one_spelling() {
        for (given, stored) in [
            (
                "http://127.0.0.1:3000/internal/events",
                "http://127.0.0.1:3000/internal/events",
            ),
            (
                "https://openvibe.live/internal/events",
                "https://openvibe.live/internal/events",
            ),
            (
                "https://live.openvibe.network/hook",
                "https://live.openvibe.network/hook",
            ),
            (
                "https://a.b.c.openvibe.space/x?y=1",
                "https://a.b.c.openvibe.space/x?y=1",
            ),
            ("HTTPS://OpenVibe.LIVE/Path", "https://openvibe.live/Path"),
            ("http://127.0.0.1:9", "http://127.0.0.1:9/"),
            ("http://127.0.0.1:80/a/../b", "http://127.0.0.1/b"),
            ("http://2130706433:9/x", "http://127.0.0.1:9/x"),
            ("http://0x7f.1:9/x", "http://127.0.0.1:9/x"),
            ("http://0177.0.0.1/x", "http://127.0.0.1/x"),
            ("http://１２７.0.0.1/x", "http://127.0.0.1/x"),
            ("https://openvibe.live/x#part", "https://openvibe.live/x#part"),
        ] {
            assert_eq!(usual().check(given).map(String::from).as_deref(), Ok(stored), "{given}");
        }
    }

    #[test]
    fn hosts_off_the_list_are_refused() {
        for bad in [
            "http://localhost:4000/x",
            "http://[::1]:4000/x",
            "http://[::ffff:127.0.0.1]:4000/x",
            "http://0.0.0.0:4000/x",
            "http://10.0.0.5/x",
            "http://2852039166/latest/meta-data",
            "http://127.0.0.2/x",
            "http://127.0.0.1.nip.io/x",
            "https://openvibe.live.evil.test/x",
            "https://openvibe.live%2eevil.test/x",
            "https://evilopenvibe.live/x",
            "https://xopenvibe.live/x",
            "https://x.openvibe/x",
            "https://openvibe/x",
            "https://openvibe.l/x",
            "https://openvibe.c0m/x",
            "https://openvibe.xn--p1ai/x",
            "https://-.openvibe.live/x",
            "https://a..openvibe.live/x",
            "https://openvibe.evil.live/x",
        ] {
            assert_eq!(usual().check(bad).err(), Some(EndpointFault::HostNotAllowed), "{bad}");
        }
    }

    #[test]
    fn a_refused_host_is_told_where_the_list_is() {
        let fault = usual().check("http://localhost:4000/x").expect_err("off the list");
        for word in ["EVENTS_ENDPOINT_HOSTS", "127.0.0.1", "localhost"] {
            assert!(fault.to_string().contains(word), "{fault}");
        }
        assert!(rules(&["localhost"]).check("http://localhost:4000/x").is_ok());
    }

    #[test]
    fn syntax_is_refused_by_kind() {
        let long = |length: usize| format!("http://127.0.0.1/{}", "x".repeat(length - 17));
        assert!(usual().check(&long(ENDPOINT_MAX)).is_ok());
        for (bad, fault) in [
            (long(ENDPOINT_MAX + 1).as_str(), EndpointFault::TooLong),
            (
                format!("http://127.0.0.1/{}", "é".repeat(1000)).as_str(),
                EndpointFault::TooLong,
            ),
            ("", EndpointFault::NotHttp),
            ("not", EndpointFault::NotHttp),
            ("not a url", EndpointFault::Malformed),
            ("ftp://openvibe.live/x", EndpointFault::NotHttp),
            ("file:///etc/passwd", EndpointFault::NotHttp),
            ("gopher://127.0.0.1:25/", EndpointFault::NotHttp),
            ("http:127.0.0.1/x", EndpointFault::NotHttp),
            ("//127.0.0.1/x", EndpointFault::NotHttp),
            ("http:///127.0.0.1/x", EndpointFault::Malformed),
            ("http:\\\\127.0.0.1\\x", EndpointFault::Malformed),
            ("http://127.0.0.1\\@evil.test/", EndpointFault::Malformed),
            ("http://127.0.0.1/a\tb", EndpointFault::Malformed),
            (" http://127.0.0.1/", EndpointFault::Malformed),
            ("http://127.0.0.1/\n", EndpointFault::Malformed),
            ("https://openvibe.live:x/", EndpointFault::Malformed),
            ("https://openvibe.live:99999/", EndpointFault::Malformed),
            ("http://[127.0.0.1]/x", EndpointFault::Malformed),
            ("http://[::1/x", EndpointFault::Malformed),
            ("https://openvibe.live@evil.test/x", EndpointFault::Credentials),
            ("https://u:p@openvibe.live/x", EndpointFault::Credentials),
            ("http://@127.0.0.1/x", EndpointFault::Credentials),
            ("https://openvibe.live./x", EndpointFault::TrailingDot),
            ("https://openvibe.live.:443/x", EndpointFault::TrailingDot),
            ("https://openvibe.live%2e/x", EndpointFault::TrailingDot),
            ("https://openvibe.live。/x", EndpointFault::TrailingDot),
            ("http://127.0.0.1./x", EndpointFault::TrailingDot),
        ] {
            assert_eq!(usual().check(bad).err(), Some(fault), "{bad}");
        }
        assert!(
            usual().check("https://openvibe.live/@user:pass@x").is_ok(),
            "an @ in the path is no credential"
        );
    }

    #[test]
    fn each_entry_matches_only_what_it_says() {
        let listed = rules(&[
            "hooks.example.test",
            "*.Wild.test",
            "[::1]",
            "2001:db8::7",
            "under_score",
            "ünï.test",
        ]);
        for good in [
            "https://hooks.example.test/x",
            "https://wild.test/x",
            "https://a.b.wild.test/x",
            "http://[::1]:9/x",
            "http://[0:0:0:0:0:0:0:1]/x",
            "http://[2001:DB8::7]/x",
            "http://under_score:8080/x",
            "http://ÜNÏ.test/x",
        ] {
            assert!(listed.check(good).is_ok(), "{good}");
        }
        for bad in [
            "https://a.hooks.example.test/x",
            "https://example.test/x",
            "https://notwild.test/x",
            "https://wild.test.evil/x",
            "http://[::2]/x",
            "http://0.0.0.1/x",
            "https://openvibe.live/x",
            "http://127.0.0.1/x",
        ] {
            assert_eq!(listed.check(bad).err(), Some(EndpointFault::HostNotAllowed), "{bad}");
        }
        assert!(rules(&[]).check("http://127.0.0.1/").is_err());
    }

    #[test]
    fn entries_that_make_no_sense_are_named() {
        for bad in [
            "",
            " ",
            "*",
            "*.",
            "*.*",
            "*.127.0.0.1",
            "*.[::1]",
            "a.*.b",
            "*.x.*",
            "http://x",
            "x:80",
            "x/y",
            "x.",
            "*.x.",
            "-a.test",
            "a b",
        ] {
            let message = HostRules::parse(&["127.0.0.1".to_owned(), bad.to_owned()]).expect_err(bad);
            assert!(message.contains(bad.trim()), "{message}");
        }
    }

    proptest! {
        #[test]
        fn every_spelling_of_an_address_is_judged_as_that_address(address: std::net::Ipv4Addr, port: u16) {
            let [a, b, c, d] = address.octets();
            let number = u32::from(address);
            let dotted = address.to_string();
            let only = rules(&[&dotted]);
            for host in [address.to_string(), number.to_string(), format!("0x{number:x}"), format!("0{a:o}.0x{b:x}.{}", u16::from_be_bytes([c, d]))] {
                let url = only.check(&format!("http://{host}:{port}/")).expect("the same address");
                prop_assert_eq!(url.host_str(), Some(dotted.as_str()));
            }
            prop_assert_eq!(usual().check(&format!("http://{number}/")).is_ok(), address == std::net::Ipv4Addr::LOCALHOST);
        }

        #[test]
        fn what_is_accepted_is_accepted_again_and_unchanged(text in "https?://[a-z0-9.@:%/\\\\#?-]{0,20}(openvibe|127)[a-z0-9.@:%/\\\\#?-]{0,20}") {
            if let Ok(url) = usual().check(&text) {
                prop_assert_eq!(usual().check(url.as_str()).map(String::from), Ok(url.to_string()));
            }
        }
    }
}
