//! Finds the loopback ports of the service, the issuer and the receiver, near those asked for.

use std::io;
use std::net::{Ipv4Addr, TcpListener};

/// Ports looked at after the one that was wanted.
const NEAR_MAX: u16 = 100;

/// A port that is ours.
#[derive(Debug)]
pub(super) struct Port {
    /// Its number.
    pub(super) number: u16,
    /// The one that was wanted, where that was taken.
    pub(super) instead_of: Option<u16>,
    /// Holds it.
    pub(super) listener: TcpListener,
}

/// Three ports from `first` on; 0 takes any.
///
/// # Errors
///
/// None near is free.
pub(super) fn three(first: u16) -> io::Result<[Port; 3]> {
    let wanted = |offset| if first == 0 { 0 } else { first.saturating_add(offset) };
    Ok([near(wanted(0))?, near(wanted(1))?, near(wanted(2))?])
}

fn near(wanted: u16) -> io::Result<Port> {
    let mut number = wanted;
    loop {
        match TcpListener::bind((Ipv4Addr::LOCALHOST, number)) {
            Ok(listener) => {
                listener.set_nonblocking(true)?;
                return Ok(Port {
                    number: listener.local_addr()?.port(),
                    instead_of: (number != wanted).then_some(wanted),
                    listener,
                });
            }
            Err(error) if number == u16::MAX || number - wanted >= NEAR_MAX => return Err(error),
            Err(_) => number += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_port_is_passed_over_and_named() {
        let taken = near(0).expect("a port");
        assert_eq!(taken.instead_of, None);
        let [service, issuer, receiver] = three(taken.number).expect("ports near");
        assert_eq!(service.instead_of, Some(taken.number));
        assert!(service.number > taken.number);
        assert!(
            issuer.number > service.number && receiver.number > issuer.number,
            "all differ"
        );
    }
}
