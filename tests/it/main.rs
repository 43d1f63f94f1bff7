//! The one integration test binary.

mod contracts;
mod support;
