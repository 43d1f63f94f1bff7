//! Names the commit the binary is built from, and builds again when a migration is added.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=migrations");
    println!("cargo:rerun-if-changed=.git/HEAD");
    println!("cargo:rerun-if-changed=.git/logs/HEAD");
    let commit = Command::new("git").args(["rev-parse", "HEAD"]).output().ok();
    let commit = commit
        .filter(|output| output.status.success())
        .and_then(|output| String::from_utf8(output.stdout).ok());
    println!(
        "cargo:rustc-env=OPENVIBE_EVENTS_COMMIT={}",
        commit.as_deref().map_or("", str::trim)
    );
}
