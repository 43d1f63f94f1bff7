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
    #[error("endpoint's host is not one that events may be sent to")]
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
    if entry == "*.openvibe.*" {
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
fn parse_endpoint(text: &str) -> Result<Url, EndpointFault> {
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
fn is_host_name(name: &str) -> bool {
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
