//! A month back into the replay tier.

use serde::Serialize;

use super::export::kept;
use super::{ArchiveError, Month, PAGE, Progress, Storage};
use crate::store::ArchiveSession;

const DAY_MS: i64 = 86_400_000;

/// What a restore came to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Restored {
    /// `YYYY-MM`.
    pub month: String,
    /// Lines of the object.
    pub count: u64,
    /// Rows that came back.
    pub inserted: u64,
    /// Events that the database has, whatever became of them there; they stay as they are.
    pub skipped: u64,
    /// Where the object is.
    pub storage: String,
}

/// Puts every event of a month's object that the database has not back into the replay tier, where no prune takes it for
/// `hold_days`.
pub async fn restore(
    session: &mut ArchiveSession,
    storage: &Storage,
    month: Month,
    hold_days: u32,
    progress: Progress<'_>,
) -> Result<Restored, ArchiveError> {
    let kept = kept(storage, month).await?.ok_or_else(|| ArchiveError::Absent {
        storage: storage.name(),
        month,
    })?;
    let hold_until = session.now_ms().await? + i64::from(hold_days) * DAY_MS;
    let mut lines = kept.object.lines(month)?;
    let (mut count, mut inserted) = (0, 0);
    loop {
        let page = lines.page(PAGE)?;
        if page.is_empty() {
            break;
        }
        count += u64::try_from(page.len()).expect("a page");
        let events = page.into_iter().map(|line| line.event).collect();
        inserted += session.insert(events, hold_until).await?;
        progress("restoring", count);
    }
    Ok(Restored {
        month: month.to_string(),
        count,
        inserted,
        skipped: count - inserted,
        storage: storage.name(),
    })
}
