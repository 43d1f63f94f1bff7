//! OpenVibe Events: a durable event bus on PostgreSQL.
//!
//! PostgreSQL is the record; everything else is a doorbell. The rooms and the arrows between them are described in
//! `docs/architecture.md`. This file is the composition root: the only one that knows every part.

pub mod cli;
mod clock;
pub mod config;
pub mod delivery;
pub mod domain;
pub mod http;
pub mod identity;
pub mod problem;
pub mod publish;
pub mod store;
pub mod telemetry;
