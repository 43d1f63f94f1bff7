//! A month out of the replay tier.

use serde::Serialize;

use super::manifest::{Contents, Manifest};
use super::object::{Hashed, Line, Lines, Writer};
use super::{ArchiveError, Month, PAGE, Progress, Storage};
use crate::domain::time::Millis;
use crate::store::{ArchiveSession, Offer};

const DAY_MS: i64 = 86_400_000;

/// What an export came to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Exported {
    /// `YYYY-MM`.
    pub month: String,
    /// Rows of the replay tier that went into the object.
    pub exported: u64,
    /// Lines that the object holds now.
    pub count: u64,
    /// Rows that were deleted, since the object holds them as they were.
    pub deleted: u64,
    /// Rows that changed meanwhile and stayed; another run takes them.
    pub changed: u64,
    /// The key of the object.
    pub object: String,
    /// Where it is.
    pub storage: String,
}

/// What is kept of a month.
pub(super) struct Kept {
    pub(super) object: Hashed,
    pub(super) contents: Contents,
    /// The manifest says so, and nothing else.
    settled: bool,
}

/// Exports the rows of a month that were received `older_than_days` ago or earlier.
pub async fn export(
    session: &mut ArchiveSession,
    storage: &Storage,
    month: Month,
    older_than_days: u32,
    progress: Progress<'_>,
) -> Result<Exported, ArchiveError> {
    let now = session.now_ms().await?;
    if now < month.end_ms() {
        return Err(ArchiveError::OpenMonth(month));
    }
    let before = month.end_ms().min(now - i64::from(older_than_days) * DAY_MS);
    let kept = kept(storage, month).await?;
    let (exported, written) = merge(session, storage, month, before, kept.as_ref(), progress).await?;
    let unchanged = kept
        .as_ref()
        .is_some_and(|kept| exported == 0 || written.0.is(&kept.contents));
    let contents = match &kept {
        Some(kept) if unchanged => kept.contents.clone(),
        _ => written.1.clone(),
    };
    let result = |deleted| Exported {
        month: month.to_string(),
        exported,
        count: contents.count,
        deleted,
        changed: exported - deleted,
        object: month.object(),
        storage: storage.name(),
    };
    if kept.is_none() && exported == 0 {
        return Ok(result(0));
    }
    let time = Millis(now).to_iso();
    if !unchanged {
        let spool = written.0.spool().expect("what was just written");
        let before = kept.as_ref().map(|kept| kept.contents.clone()).unwrap_or_default();
        let manifest = Manifest::new(month, before, time.clone(), Some(contents.clone()));
        storage.put_bytes(&month.manifest(), &manifest.to_bytes()).await?;
        storage.put(&month.object(), spool).await?;
    }
    drop(written);
    if !unchanged || kept.as_ref().is_some_and(|kept| !kept.settled) {
        let manifest = Manifest::new(month, contents.clone(), time, None);
        storage.put_bytes(&month.manifest(), &manifest.to_bytes()).await?;
    }
    if exported == 0 {
        return Ok(result(0));
    }
    let object = read_back(storage, month, &contents, progress).await?;
    let mut lines = object.lines(month)?;
    let mut deleted = 0;
    loop {
        let page = lines.page(PAGE)?;
        if page.is_empty() {
            break;
        }
        let offers = page.into_iter().map(|line| Offer {
            id: line.event.id,
            text: line.text,
        });
        deleted += session
            .delete_matching(offers.collect(), |row| Line::of(row).text)
            .await?;
        progress("deleting", deleted);
    }
    Ok(result(deleted))
}

/// Writes the rows and the lines that are kept into one file, in order. A row takes the place of its line.
async fn merge(
    session: &mut ArchiveSession,
    storage: &Storage,
    month: Month,
    before: i64,
    kept: Option<&Kept>,
    progress: Progress<'_>,
) -> Result<(u64, (Hashed, Contents)), ArchiveError> {
    let mut writer = Writer::new(storage.spool(&month.object())?)?;
    let mut lines: Option<Lines> = match kept {
        Some(kept) => Some(kept.object.lines(month)?),
        None => None,
    };
    let mut next_line = |wanted: &mut Option<Line>| -> Result<(), ArchiveError> {
        *wanted = match &mut lines {
            Some(lines) => lines.next()?,
            None => None,
        };
        Ok(())
    };
    let mut line = None;
    next_line(&mut line)?;
    let mut exported = 0;
    let mut rows = session.month_rows(month.start_ms(), before).await?;
    loop {
        let page = session.next_rows(&mut rows, PAGE).await?;
        if page.is_empty() {
            break;
        }
        for row in page {
            let row = Line::of(row.map_err(ArchiveError::Damaged)?);
            while let Some(former) = line.take_if(|former| former.place() < row.place()) {
                writer.write(&former)?;
                next_line(&mut line)?;
            }
            if let Some(former) = line.take_if(|former| former.place() == row.place()) {
                if former.event.id != row.event.id {
                    return Err(ArchiveError::Unusable {
                        key: month.object(),
                        what: format!("{} stands where the database has {}", former.event.id, row.event.id),
                    });
                }
                next_line(&mut line)?;
            }
            writer.write(&row)?;
            exported += 1;
        }
        progress("writing", exported);
    }
    while let Some(former) = line.take() {
        writer.write(&former)?;
        next_line(&mut line)?;
    }
    Ok((exported, writer.finish()?))
}

/// Reads manifest and object back; the object is whole and what was written.
async fn read_back(
    storage: &Storage,
    month: Month,
    contents: &Contents,
    progress: Progress<'_>,
) -> Result<Hashed, ArchiveError> {
    let differs = |key| ArchiveError::ReadBack { key };
    let manifest = storage
        .get(&month.manifest())
        .await?
        .ok_or_else(|| differs(month.manifest()))?;
    if Manifest::parse(month, &manifest)?.contents != *contents {
        return Err(differs(month.manifest()));
    }
    let object = storage
        .fetch(&month.object())
        .await?
        .ok_or_else(|| differs(month.object()))?;
    if !object.is(contents) || count(&object, month, progress)? != contents.count {
        return Err(differs(month.object()));
    }
    Ok(object)
}

/// What is kept of a month, found to be whole; `None` where nothing is.
pub(super) async fn kept(storage: &Storage, month: Month) -> Result<Option<Kept>, ArchiveError> {
    let unusable = |key, what: &str| ArchiveError::Unusable {
        key,
        what: what.to_owned(),
    };
    let manifest = storage.get(&month.manifest()).await?;
    let object = storage.fetch(&month.object()).await?;
    let (manifest, object) = match (manifest, object) {
        (None, None) => return Ok(None),
        (None, Some(_)) => return Err(unusable(month.object(), "it has no manifest")),
        (Some(manifest), object) => (Manifest::parse(month, &manifest)?, object),
    };
    let Some(object) = object else {
        // Cut before the first object was there.
        if manifest.contents == Contents::default() && manifest.next.is_some() {
            return Ok(None);
        }
        return Err(unusable(month.manifest(), "its object is not there"));
    };
    let settled = manifest.next.is_none();
    let known = manifest.next.into_iter().chain([manifest.contents]);
    let contents = known.into_iter().find(|contents| object.is(contents));
    let contents = contents.ok_or_else(|| unusable(month.object(), "it is not the one that its manifest describes"))?;
    if count(&object, month, &mut |_, _| {})? != contents.count {
        return Err(unusable(
            month.object(),
            "it has not as many lines as its manifest says",
        ));
    }
    Ok(Some(Kept {
        object,
        contents,
        settled,
    }))
}

/// Reads every line, and counts them.
fn count(object: &Hashed, month: Month, progress: Progress<'_>) -> Result<u64, ArchiveError> {
    let mut lines = object.lines(month)?;
    let mut count = 0;
    while lines.next()?.is_some() {
        count += 1;
        progress("verifying", count);
    }
    Ok(count)
}
