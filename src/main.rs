//! The one binary: arguments, then the command.

use std::process::ExitCode;

fn main() -> ExitCode {
    openvibe_events::cli::run()
}
