//! The ways a waiting delivery or stream is woken. A carrier can say "look at this row"; it knows nothing of the store.
//!
//! A signal is a hint: lost, doubled, late or forged it changes when a row is looked at, never what becomes of it. So a
//! carrier carries ids and nothing else, and whoever hears one asks the database.

mod backoff;
mod carrier;
mod env;
mod health;
mod inbound;
mod nats;
mod signal;
mod variable;

pub use backoff::Backoff;
pub use carrier::{Carrier, Descriptor, DynCarrier, Opened, Probed, SignalError};
pub use env::Env;
pub use health::{Health, Standing};
pub use inbound::{Arrival, Arrivals, Heard, Inbound, channel};
pub use planner::Class;
pub use signal::{ID_LENGTH_MAX, Signal};
pub use variable::{Takes, Variable};

/// Declares the module of each carrier and lists their descriptors, in this order.
macro_rules! registry {
    [$($module:ident),+ $(,)?] => {
        $(mod $module;)+

        /// Every carrier there is, in the order in which they are shown.
        pub const REGISTRY: &[Descriptor] = &[$($module::DESCRIPTOR),+];
    };
}

// `cargo fmt` cannot see modules declared by a macro; scripts/fmt.sh formats every tracked file.
registry![pg_v1, valkey_v1, nats_v1, nats_js_v1, cloud_v1];

/// The carrier of this id.
pub fn descriptor(id: &str) -> Option<&'static Descriptor> {
    REGISTRY.iter().find(|descriptor| descriptor.id == id)
}
