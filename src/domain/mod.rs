//! The rules of the service as pure functions and types: no I/O, no async, no SQL, and no reading of the environment.

pub mod app;
pub mod batch;
pub mod cursor;
pub mod deliveries;
pub mod endpoint;
pub mod envelope;
pub mod ids;
pub mod json;
pub mod packed;
pub mod policy;
pub mod retry;
pub mod seal;
pub mod signature;
pub mod sources;
pub mod time;
pub mod topic;
pub mod trace;

#[cfg(test)]
mod fixtures;
