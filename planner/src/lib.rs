//! Chooses the carrier that wakes a waiting delivery or stream. Everything here is a pure function of its arguments: no
//! clock, no input or output, no randomness of its own.

mod class;

pub use class::Class;
