//! The archive: a month of the replay tier as one object outside the database, and back.
//!
//! An export deletes a row only after the object that holds it was read back, and only where the row still is what the object
//! says, byte for byte. Between the steps a manifest names both what was there and what is to come, so that a run that was
//! cut anywhere is made good by the next. Nothing is kept in memory but a page.

mod export;
mod manifest;
mod month;
mod object;
mod restore;
mod storage;

pub use export::{Exported, export};
pub use month::{Month, MonthError};
pub use restore::{Restored, restore};
pub use storage::Storage;

use std::io;
use std::path::PathBuf;

use crate::store::StoreError;

/// Rows that are read, compared, deleted or inserted at a time: they are in memory together.
pub const PAGE: usize = 250;

/// How far a run has come: what it does now, and of how many rows.
pub type Progress<'p> = &'p mut dyn FnMut(&'static str, u64);

/// Why an archive command could not do what it was asked. Nothing was deleted, and it can be repeated.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The database.
    #[error("the database did not do its part; run the command again")]
    Store(#[from] StoreError),
    /// The month goes on.
    #[error("{0} has not ended yet; only a month that is over can be exported")]
    OpenMonth(Month),
    /// There is no such object.
    #[error("{storage} holds no events of {month}")]
    Absent {
        /// Where it was looked for.
        storage: String,
        /// Which.
        month: Month,
    },
    /// The object and its manifest do not belong together, or are not what this command writes.
    #[error("{key} cannot be used: {what}; nothing was changed")]
    Unusable {
        /// The object or manifest.
        key: String,
        /// What is wrong with it.
        what: String,
    },
    /// What was written did not come back.
    #[error("{key} was written and reads back otherwise; no row was deleted, run the command again")]
    ReadBack {
        /// The object or manifest.
        key: String,
    },
    /// The object store.
    #[error("{key} in {storage}: {hint}")]
    Bucket {
        /// Where.
        storage: String,
        /// Which.
        key: String,
        /// What may be the matter.
        hint: &'static str,
        /// What the store said.
        source: Box<object_store::Error>,
    },
    /// A file.
    #[error("cannot {what} {}", path.display())]
    File {
        /// `write`, `read` or `make`.
        what: &'static str,
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A row of the replay tier.
    #[error("the event {0} in the replay tier cannot be read, so its month cannot be exported")]
    Damaged(String),
    /// The settings of the bucket.
    #[error("{0}")]
    Settings(&'static str),
}
