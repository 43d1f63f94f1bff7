//! An endpoint of a developer app, read once: what is judged, stored and sent to is one and the same value.

use url::{Host, Url};

use crate::domain::endpoint::{EndpointFault, is_host_name, parse_endpoint};

use super::Refused;
use super::address::is_public;

/// Last labels of names that mean something only inside a network, or on a host.
const LOCAL_SUFFIXES: [&str; 3] = ["localhost", "local", "internal"];
/// The domain of names in a home.
const HOME: &str = "home.arpa";

/// An https endpoint whose host is a public address, or a name that may have some. What addresses a name has is only known
/// when it is dialled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppEndpoint(Url);

impl AppEndpoint {
    /// Reads an endpoint. Other spellings of an address are that address.
    ///
    /// # Errors
    /// Every rule but those about the addresses of a name; none of them passes by waiting.
    pub fn parse(text: &str) -> Result<Self, Refused> {
        let url = parse_endpoint(text).map_err(|fault| match fault {
            EndpointFault::NotHttp => Refused::NotHttps,
            fault => Refused::Syntax(fault),
        })?;
        if url.scheme() != "https" {
            return Err(Refused::NotHttps);
        }
        let public = match url.host().ok_or(Refused::Syntax(EndpointFault::Malformed))? {
            Host::Ipv4(address) => is_public(address.into()),
            Host::Ipv6(address) => is_public(address.into()),
            Host::Domain(name) if !is_host_name(name) => return Err(Refused::Syntax(EndpointFault::Malformed)),
            Host::Domain(name) if is_local(name) => return Err(Refused::LocalName),
            Host::Domain(_) => true,
        };
        if public { Ok(Self(url)) } else { Err(Refused::NotPublic) }
    }

    /// Its one spelling: the form to store, to compare and to send to.
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    /// The name whose addresses are still to be judged; `None` of an address.
    pub(super) fn name(&self) -> Option<&str> {
        self.0.domain()
    }

    pub(super) fn into_url(self) -> Url {
        self.0
    }
}

fn is_local(name: &str) -> bool {
    let Some((_, last)) = name.rsplit_once('.') else {
        return true;
    };
    LOCAL_SUFFIXES.contains(&last)
        || name
            .strip_suffix(HOME)
            .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::domain::endpoint::ENDPOINT_MAX;

    #[test]
    fn what_may_be_public_is_kept_in_its_one_spelling() {
        for (given, stored) in [
            ("https://hooks.example.com/ov", "https://hooks.example.com/ov"),
            ("HTTPS://Hooks.Example.COM", "https://hooks.example.com/"),
            (
                "https://hooks.example.com:8443/a?b=c#d",
                "https://hooks.example.com:8443/a?b=c#d",
            ),
            ("https://hooks.example.com:443/a/../b", "https://hooks.example.com/b"),
            ("https://bücher.example/", "https://xn--bcher-kva.example/"),
            ("https://93.184.216.34/hook", "https://93.184.216.34/hook"),
            ("https://1572395042/hook", "https://93.184.216.34/hook"),
            ("https://0x5d.0270.0xd822/hook", "https://93.184.216.34/hook"),
            (
                "https://[2606:4700:4700::1111]/hook",
                "https://[2606:4700:4700::1111]/hook",
            ),
            ("https://[64:ff9b::5db8:d822]/hook", "https://[64:ff9b::5db8:d822]/hook"),
            ("https://notlocal.example/", "https://notlocal.example/"),
            ("https://local.example/", "https://local.example/"),
            ("https://xlocal.test/", "https://xlocal.test/"),
            ("https://nothome.arpa/", "https://nothome.arpa/"),
            (
                "https://127.0.0.1.example.com/@user:pass@x",
                "https://127.0.0.1.example.com/@user:pass@x",
            ),
        ] {
            let parsed = AppEndpoint::parse(given);
            assert_eq!(parsed.as_ref().map(AppEndpoint::as_str), Ok(stored), "{given}");
        }
    }

    #[test]
    fn no_spelling_of_an_address_inside_is_accepted() {
        for host in [
            "127.0.0.1",
            "127.1",
            "127.0.1",
            "10.0.0.1",
            "10.1",
            "172.16.0.1",
            "192.168.1.1",
            "192.168.257",
            "100.64.0.1",
            "169.254.169.254",
            "0.0.0.0",
            "0",
            "255.255.255.255",
            "2130706433",
            "0177.0.0.1",
            "0177.1",
            "017700000001",
            "0x7f000001",
            "0x7f.0.0.1",
            "0x7f.0x0.0x0.0x1",
            "0x7F.1",
            "2852039166",
            "%31%32%37.0.0.1",
            "１２７.0.0.1",
            "①②⑦.0.0.1",
            "127。0。0。1",
            "[::]",
            "[::1]",
            "[0:0:0:0:0:0:0:1]",
            "[::127.0.0.1]",
            "[::ffff:127.0.0.1]",
            "[::ffff:7f00:1]",
            "[0:0:0:0:0:FFFF:7F00:1]",
            "[::ffff:a9fe:a9fe]",
            "[64:ff9b::10.0.0.1]",
            "[64:ff9b:1::a00:1]",
            "[2002:7f00:1::]",
            "[2002:a00:1::]",
            "[2001:0:4136:e378:8000:63bf:80ff:fffe]",
            "[fc00::1]",
            "[fd12:3456::1]",
            "[fe80::1]",
            "[fec0::1]",
            "[ff02::1]",
            "[100::1]",
            "[2001:db8::1]",
            "[3fff::1]",
            "[5f00::1]",
        ] {
            for port in ["", ":8443"] {
                let endpoint = format!("https://{host}{port}/hook");
                assert_eq!(AppEndpoint::parse(&endpoint), Err(Refused::NotPublic), "{endpoint}");
            }
        }
    }

    #[test]
    fn names_of_an_inside_are_refused() {
        for host in [
            "localhost",
            "LOCALHOST",
            "foo.localhost",
            "printer.local",
            "db.internal",
            "metadata.google.internal",
            "intranet",
            "router.home.arpa",
            "home.arpa",
            "ℓocalhost",
        ] {
            let endpoint = format!("https://{host}/hook");
            assert_eq!(AppEndpoint::parse(&endpoint), Err(Refused::LocalName), "{endpoint}");
        }
    }

    #[test]
    fn syntax_is_refused_by_kind() {
        use EndpointFault::{Credentials, Malformed, TooLong, TrailingDot};
        let syntax = Refused::Syntax;
        let long = format!("https://hooks.example.com/{}", "x".repeat(ENDPOINT_MAX));
        let long_label = format!("https://{}.example.com/", "a".repeat(64));
        let long_name = format!("https://{}example.com/", "abcdefg.".repeat(32));
        for (endpoint, fault) in [
            (long.as_str(), syntax(TooLong)),
            (&long_label, syntax(Malformed)),
            (&long_name, syntax(Malformed)),
            ("http://93.184.216.34/hook", Refused::NotHttps),
            ("ftp://93.184.216.34/hook", Refused::NotHttps),
            ("file:///etc/passwd", Refused::NotHttps),
            ("javascript:alert(1)", Refused::NotHttps),
            ("//93.184.216.34/hook", Refused::NotHttps),
            ("", Refused::NotHttps),
            ("https:/93.184.216.34/", Refused::NotHttps),
            ("not a url", syntax(Malformed)),
            ("https://", syntax(Malformed)),
            ("https:///hook", syntax(Malformed)),
            ("https://[::1", syntax(Malformed)),
            ("https://[::1]x/", syntax(Malformed)),
            ("https://[fe80::1%25eth0]/", syntax(Malformed)),
            ("https://[fe80::1%eth0]/", syntax(Malformed)),
            ("https://[2606:4700::1%25lo]/", syntax(Malformed)),
            ("https://[127.0.0.1]/", syntax(Malformed)),
            ("https://127.0.0.1.1/", syntax(Malformed)),
            ("https://256.1.1.1/", syntax(Malformed)),
            ("https://a..example.com/", syntax(Malformed)),
            ("https://-a.example.com/", syntax(Malformed)),
            ("https://a*.example.com/", syntax(Malformed)),
            ("https://93.184.216.34:99999/hook", syntax(Malformed)),
            ("https://hooks.example.com\\@127.0.0.1/", syntax(Malformed)),
            ("https://hooks.example.com\t/", syntax(Malformed)),
            ("https://user:pass@93.184.216.34/hook", syntax(Credentials)),
            ("https://user@93.184.216.34/hook", syntax(Credentials)),
            ("https://@93.184.216.34/hook", syntax(Credentials)),
            ("https://93.184.216.34@127.0.0.1/hook", syntax(Credentials)),
            ("https://hooks.example.com./", syntax(TrailingDot)),
            ("https://localhost./", syntax(TrailingDot)),
            ("https://127.0.0.1./", syntax(TrailingDot)),
            ("https://93.184.216.34./", syntax(TrailingDot)),
            ("https://hooks.example.com%2e/", syntax(TrailingDot)),
            ("https://hooks.example.com。/", syntax(TrailingDot)),
        ] {
            assert_eq!(AppEndpoint::parse(endpoint), Err(fault), "{endpoint}");
        }
    }

    proptest! {
        #[test]
        fn every_spelling_of_an_address_is_judged_as_that_address(address: std::net::Ipv4Addr) {
            let number = u32::from(address);
            let [a, b, c, d] = address.octets();
            for host in [
                address.to_string(),
                number.to_string(),
                format!("0x{number:X}"),
                format!("0{number:o}"),
                format!("0{a:o}.0x{b:x}.{}", u16::from_be_bytes([c, d])),
                format!("[::ffff:{address}]"),
                format!("[64:ff9b::{address}]"),
            ] {
                let accepted = AppEndpoint::parse(&format!("https://{host}/")).is_ok();
                prop_assert_eq!(accepted, is_public(address.into()), "{}", host);
            }
        }

        #[test]
        fn what_is_accepted_is_accepted_again_and_unchanged(
            text in "https://[a-z0-9.@:%/\\\\#?\\[\\]-]{0,20}(local|127|::1|example)[a-z0-9.@:%/\\\\#?\\[\\]-]{0,20}"
        ) {
            if let Ok(endpoint) = AppEndpoint::parse(&text) {
                prop_assert_eq!(AppEndpoint::parse(endpoint.as_str()), Ok(endpoint.clone()));
                if let Some(name) = endpoint.name() {
                    prop_assert!(name.parse::<std::net::IpAddr>().is_err() && name.contains('.') && !name.ends_with('.'));
                }
            }
        }
    }
}
