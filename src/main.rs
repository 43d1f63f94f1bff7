//! The one binary: arguments, then the command.

fn main() {}
