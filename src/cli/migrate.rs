//! `migrate`: brings the schema up to date, as `serve` does before it listens.

use std::process::ExitCode;

use crate::store::{Addresses, migrate};

pub(super) fn main() -> ExitCode {
    let (_, database) = match super::configured() {
        Ok(configured) => configured,
        Err(code) => return code,
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return super::failed(&error),
    };
    let migrated = Addresses::parse(database.url.expose(), database.direct_url.expose())
        .and_then(|addresses| runtime.block_on(migrate(&addresses)));
    match migrated {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => super::failed(&error),
    }
}
