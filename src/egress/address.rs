//! Which addresses are public: unicast, reachable from anywhere, and nobody's inside.
//!
//! What is not known to be public is not. An address that carries an IPv4 address is judged by that one as well, since a
//! translator or a tunnel on the way would take the packet there.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};

/// Networks that are special, by the registry of IPv4 addresses for special purposes.
const SPECIAL_V4: [Ipv4Net; 15] = [
    v4(Ipv4Addr::new(0, 0, 0, 0), 8),
    v4(Ipv4Addr::new(10, 0, 0, 0), 8),
    v4(Ipv4Addr::new(100, 64, 0, 0), 10),
    v4(Ipv4Addr::new(127, 0, 0, 0), 8),
    v4(Ipv4Addr::new(169, 254, 0, 0), 16),
    v4(Ipv4Addr::new(172, 16, 0, 0), 12),
    v4(Ipv4Addr::new(192, 0, 0, 0), 24),
    v4(Ipv4Addr::new(192, 0, 2, 0), 24),
    v4(Ipv4Addr::new(192, 88, 99, 0), 24),
    v4(Ipv4Addr::new(192, 168, 0, 0), 16),
    v4(Ipv4Addr::new(198, 18, 0, 0), 15),
    v4(Ipv4Addr::new(198, 51, 100, 0), 24),
    v4(Ipv4Addr::new(203, 0, 113, 0), 24),
    v4(Ipv4Addr::new(224, 0, 0, 0), 4),
    v4(Ipv4Addr::new(240, 0, 0, 0), 4),
];

/// Where all of IPv6's global unicast addresses lie. Loopback, private, link-local and multicast ones, IPv4-compatible
/// ones, and what nobody has been given yet, lie outside.
const UNICAST_V6: Ipv6Net = v6(0x2000, 0, 0, 3);
/// Special networks among those: Teredo and other protocols, and two for documentation.
const SPECIAL_V6: [Ipv6Net; 3] = [v6(0x2001, 0, 0, 23), v6(0x2001, 0xdb8, 0, 32), v6(0x3fff, 0, 0, 20)];
/// Addresses that carry the IPv4 address of their site in bits 16 to 47.
const SIX_TO_FOUR: Ipv6Net = v6(0x2002, 0, 0, 16);
/// Addresses that a translator takes to the IPv4 address in their last 32 bits. Its neighbour `64:ff9b:1::/48` is for
/// translators of a private network.
const NAT64: Ipv6Net = v6(0x64, 0xff9b, 0, 96);

const fn v4(address: Ipv4Addr, length: u8) -> Ipv4Net {
    Ipv4Net::new_assert(address, length)
}

const fn v6(first: u16, second: u16, third: u16, length: u8) -> Ipv6Net {
    Ipv6Net::new_assert(Ipv6Addr::new(first, second, third, 0, 0, 0, 0, 0), length)
}

/// Whether whoever has this address can be reached by everybody.
pub fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    !SPECIAL_V4.iter().any(|network| network.contains(&address))
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    if let Some(mapped) = address.to_ipv4_mapped() {
        return is_public_v4(mapped);
    }
    if NAT64.contains(&address) {
        return is_public_v4(carried(address, 0));
    }
    UNICAST_V6.contains(&address)
        && !SPECIAL_V6.iter().any(|network| network.contains(&address))
        && (!SIX_TO_FOUR.contains(&address) || is_public_v4(carried(address, 80)))
        && (!is_isatap(address) || is_public_v4(carried(address, 0)))
}

/// Whether a host would take it for a tunnel to the IPv4 address in its last 32 bits, whatever network it is in.
fn is_isatap(address: Ipv6Addr) -> bool {
    let [.., a, b, _, _] = address.segments();
    matches!(a, 0 | 0x200) && b == 0x5efe
}

/// The IPv4 address that is followed by so many bits.
fn carried(address: Ipv6Addr, bits_behind: u32) -> Ipv4Addr {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the 32 bits in question are the lowest ones"
    )]
    Ipv4Addr::from_bits((address.to_bits() >> bits_behind) as u32)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> IpAddr {
        text.parse().expect(text)
    }

    #[test]
    fn networks_for_special_purposes_are_not_public_from_their_first_address_to_their_last() {
        for network in [
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/4",
            "240.0.0.0/4",
            "::/128",
            "::1/128",
            "::/96",
            "100::/64",
            "64:ff9b:1::/48",
            "2001::/23",
            "2001:db8::/32",
            "3fff::/20",
            "5f00::/16",
            "4000::/3",
            "fc00::/7",
            "fe80::/10",
            "fec0::/10",
            "ff00::/8",
            "::ffff:0:0:0/96",
            "64:ff9b::1:0:0/96",
        ] {
            let network: ipnet::IpNet = network.parse().expect(network);
            for address in [network.network(), network.broadcast()] {
                assert!(!is_public(address), "{address} of {network}");
            }
        }
    }

    #[test]
    fn neighbours_of_special_networks_are_public() {
        for address in [
            "1.0.0.0",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.0",
            "169.253.255.255",
            "169.255.0.0",
            "172.15.255.255",
            "172.32.0.0",
            "191.255.255.255",
            "192.0.1.0",
            "192.0.3.0",
            "192.88.98.255",
            "192.88.100.0",
            "192.167.255.255",
            "192.169.0.0",
            "198.17.255.255",
            "198.20.0.0",
            "198.51.99.255",
            "198.51.101.0",
            "203.0.112.255",
            "203.0.114.0",
            "223.255.255.255",
            "93.184.216.34",
            "2000::1",
            "2001:200::1",
            "2001:db7::1",
            "2001:db9::1",
            "2003::1",
            "2606:4700:4700::1111",
            "2a00:1450:4001::1",
            "3ffe:ffff::1",
            "3fff:1000::1",
        ] {
            assert!(is_public(parse(address)), "{address}");
        }
    }

    #[test]
    fn what_carries_an_ipv4_address_is_judged_by_it() {
        let forms: [fn(Ipv4Addr) -> String; 6] = [
            |a| format!("::ffff:{a}"),
            |a| format!("64:ff9b::{a}"),
            |a| {
                let [high, low] = halves(a);
                format!("2002:{high:x}:{low:x}::1")
            },
            |a| format!("2606:4700::5efe:{a}"),
            |a| format!("2606:4700::200:5efe:{a}"),
            |a| {
                let [high, low] = halves(a);
                format!("2002:{high:x}:{low:x}::5efe:{a}")
            },
        ];
        for form in forms {
            for (inner, public) in [
                ("127.0.0.1", false),
                ("10.0.0.1", false),
                ("169.254.169.254", false),
                ("0.0.0.0", false),
                ("255.255.255.255", false),
                ("93.184.216.34", true),
            ] {
                let outer = form(inner.parse().expect(inner));
                assert_eq!(is_public(parse(&outer)), public, "{outer}");
            }
        }
        assert!(
            !is_public(parse("2002:5db8:d822::5efe:10.0.0.1")),
            "each of two carried ones counts"
        );
        for never in [
            "::93.184.216.34",
            "2001:0:5db8:d822:8000:63bf:a247:27dd",
            "2001:0:4136:e378:8000:63bf:80ff:fffe",
            "64:ff9b:1::93.184.216.34",
        ] {
            assert!(!is_public(parse(never)), "{never}");
        }
    }

    fn halves(address: Ipv4Addr) -> [u16; 2] {
        let [a, b, c, d] = address.octets();
        [u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])]
    }

    /// What the standard library knows of an address, which knows of fewer special networks.
    fn is_known_inside(address: Ipv4Addr) -> bool {
        address.is_private()
            || address.is_loopback()
            || address.is_link_local()
            || address.is_multicast()
            || address.is_broadcast()
            || address.is_unspecified()
            || address.is_documentation()
    }

    proptest! {
        #[test]
        fn nothing_that_is_known_to_be_inside_is_public(address: Ipv4Addr, high: u64) {
            let public = is_public(address.into());
            prop_assert!(!(public && is_known_inside(address)));
            let [first, second] = halves(address);
            for outer in [
                address.to_ipv6_mapped(),
                Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, first, second),
                Ipv6Addr::from_bits((0x2002_u128 << 112) | (u128::from(address.to_bits()) << 80) | u128::from(high >> 32)),
            ] {
                prop_assert_eq!(is_public(outer.into()), public, "{}", outer);
            }
            prop_assert!(!is_public(address.to_ipv6_compatible().into()));
        }

        #[test]
        fn no_address_outside_global_unicast_is_public(bits: u128) {
            let address = Ipv6Addr::from_bits(bits);
            let outside = address.is_loopback() || address.is_unspecified() || address.is_multicast()
                || address.is_unique_local() || address.is_unicast_link_local();
            let global = bits >> 125 == 1;
            prop_assert!(!(is_public(address.into()) && (outside || !global)), "{}", address);
        }
    }
}
