//! Who is calling, and what they may do: signing keys, tokens, the capability rule and the route guards.
//!
//! Nothing here touches the database or knows a status code; the edge turns refusals into answers.

mod capability;
mod claims;
mod guard;
mod jwks;
mod jws;
mod keys;
pub mod limits;
mod person;
mod ticket;
mod token;

pub use crate::domain::app::Env;
pub use capability::{Capability, granted};
pub use claims::{AppPrincipal, Claims, Principal, UnlistedPrincipal};
pub use guard::{Authenticated, Caller, Refusal, authenticate, bearer, first_party};
pub use jwks::KeySet;
pub use jws::Jws;
pub use keys::{KeyError, Keys, Unavailable};
pub use person::{Person, Sessions};
pub use ticket::{Ticket, TicketError, Tickets};
pub use token::{Sandbox, TokenError, Verifier};

#[cfg(test)]
mod testing;
