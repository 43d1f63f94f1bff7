//! The carriers that a scenario can name without describing them.

use std::time::Duration;

use crate::class::Class;

/// What a carrier is when a scenario says no more than its id.
pub(super) struct Known {
    pub(super) id: &'static str,
    pub(super) classes: &'static [Class],
    pub(super) provider: &'static str,
    pub(super) rate_card: &'static str,
    pub(super) latency_ms: f64,
    pub(super) deadline: Duration,
}

/// How long a call may take.
pub(super) const DEADLINE: Duration = Duration::from_millis(250);

pub(super) const KNOWN: &[Known] = &[
    Known {
        id: crate::FLOOR,
        classes: &Class::ALL,
        provider: "postgres",
        rate_card: "rc-pg-v1",
        latency_ms: 250.0,
        deadline: DEADLINE,
    },
    Known {
        id: "valkey-v1",
        classes: &[Class::Topic, Class::Queue],
        provider: "valkey",
        rate_card: "rc-valkey-v1",
        latency_ms: 2.0,
        deadline: DEADLINE,
    },
    Known {
        id: "nats-v1",
        classes: &[Class::Topic],
        provider: "nats",
        rate_card: "rc-nats-v1",
        latency_ms: 1.0,
        deadline: DEADLINE,
    },
    Known {
        id: "nats-js-v1",
        classes: &[Class::Stream],
        provider: "nats",
        rate_card: "rc-nats-js-v1",
        latency_ms: 1.0,
        deadline: DEADLINE,
    },
    Known {
        id: "cloud-v1",
        classes: &[Class::Queue],
        provider: "cloud",
        rate_card: "rc-cloud-queue-v1",
        latency_ms: 1.0,
        deadline: Duration::from_secs(3),
    },
];
