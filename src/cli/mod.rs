//! The commands of the binary.

pub mod check_config;
pub mod dev;
