//! Where processes write their logs, and every secret that was used against them: `scripts/test.sh` looks for the one in the
//! other when all tests have run.

use std::{
    fs::OpenOptions,
    io::Write as _,
    path::{Path, PathBuf},
};

use serde_json::Value;

/// The folder that `scripts/test.sh` looks through: its logs, and the file of secrets beside them.
const KEPT_IN: &str = "OV_TEST_LOGS";
/// Bytes of a token that are enough to find it; they end its signature.
const TOKEN_END: usize = 40;

/// The folder whose logs are kept to be looked through, when there is one.
pub(crate) fn kept() -> Option<PathBuf> {
    std::env::var_os(KEPT_IN).map(PathBuf::from)
}

/// The folder for logs.
pub(crate) fn folder() -> PathBuf {
    kept().unwrap_or_else(|| Path::new(env!("CARGO_TARGET_TMPDIR")).to_owned())
}

/// A token or ticket was made.
pub(crate) fn token(token: &str) {
    note(&token[token.len().saturating_sub(TOKEN_END)..]);
}

/// What was sent or answered may hold a signing secret.
pub(crate) fn body(body: &Value) {
    match body["secret"].as_str() {
        Some(secret) if secret.len() >= 32 => note(secret),
        _ => {}
    }
}

fn note(secret: &str) {
    let Some(folder) = kept() else { return };
    let file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(folder.join("secrets"));
    let line = format!("{secret}\n");
    // In one write: other tests append at the same time.
    file.and_then(|mut file| file.write_all(line.as_bytes()))
        .expect("the secrets of these tests can be noted");
}
