//! What integration tests stand on: one file per thing a test can start, script or ask.
//!
//! Nothing here calls into the product except the one line of `database` that migrates a template. A helper that
//! judges an answer (signatures, problem documents, tokens) is written from the contract, so that a mistake in the
//! product cannot hide in a mistake shared with its test.

#![expect(dead_code, reason = "a helper may be ahead of the tests that use it")]
#![expect(
    clippy::disallowed_methods,
    reason = "tests read their own environment, stamp real times and build a plain HTTP client"
)]

pub(crate) mod authority;
pub(crate) mod balancer;
#[path = "../../../carriers/tests/contract/support/broker.rs"]
pub(crate) mod broker;
pub(crate) mod browser;
pub(crate) mod client;
pub(crate) mod cluster;
pub(crate) mod contracts;
pub(crate) mod database;
pub(crate) mod dice;
pub(crate) mod dns;
pub(crate) mod envelopes;
pub(crate) mod follower;
pub(crate) mod http1;
pub(crate) mod ledger;
pub(crate) mod logs;
pub(crate) mod netns;
pub(crate) mod network;
pub(crate) mod nginx;
pub(crate) mod pgbouncer;
pub(crate) mod process;
pub(crate) mod proxy;
pub(crate) mod receiver;
pub(crate) mod service;
#[path = "../../../carriers/tests/contract/support/sqs.rs"]
pub(crate) mod sqs;
pub(crate) mod sse;
pub(crate) mod tls;
pub(crate) mod wait;
pub(crate) mod wire;
