//! Names the commit the binary is built from and its time, and builds again when a migration is added.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=migrations");
    println!("cargo:rerun-if-changed=.git/HEAD");
    println!("cargo:rerun-if-changed=.git/logs/HEAD");
    println!("cargo:rustc-env=OPENVIBE_EVENTS_COMMIT={}", head("%H"));
    println!("cargo:rustc-env=OPENVIBE_EVENTS_COMMITTED_AT={}", head("%cI"));
}

/// What git says of the commit that is checked out; nothing where it cannot say.
fn head(format: &str) -> String {
    let format = format!("--format={format}");
    let output = Command::new("git")
        .args(["show", "--no-patch", &format, "HEAD"])
        .output();
    let text = output
        .ok()
        .filter(|output| output.status.success())
        .and_then(|output| String::from_utf8(output.stdout).ok());
    text.map_or_else(String::new, |text| text.trim().to_owned())
}
