//! The one binary: arguments, then the command.

use std::process::ExitCode;

/// Many small pieces of many sizes come and go: the load tool publishes and delivers measurably more with this one.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    openvibe_events::cli::run()
}
