//! What the contract suite stands on: brokers of its own, a line to cut, and processes that use a carrier.

#[expect(dead_code, reason = "shared with the tests of the service, which use all of it")]
#[path = "../../../../tests/it/support/proxy.rs"]
pub(crate) mod proxy;
#[expect(dead_code, reason = "shared with the tests of the service, which use all of it")]
#[path = "../../../../tests/it/support/wait.rs"]
pub(crate) mod wait;

pub(crate) mod broker;
pub(crate) mod process;
pub(crate) mod sqs;
pub(crate) mod world;
