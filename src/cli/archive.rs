//! `archive`: months of old events out of the database and back. It needs the service's configuration and nothing that runs.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use serde::Serialize;

use super::{configured, failed};
use crate::archive::{self, ArchiveError, Month, Storage};
use crate::config::{Archive, Database};
use crate::store::{Addresses, ArchiveSession, StoreError, TierStatus};

/// Between two lines of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

#[derive(Debug, Args)]
pub(super) struct ArchiveArgs {
    #[command(subcommand)]
    command: ArchiveCommand,
    /// JSON, also on a terminal.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum ArchiveCommand {
    /// What the tiers hold: rows of the replay tier by month, and the oldest event of the hot store.
    Status,
    /// Write a month that is over into its object, read that back, and delete the rows that it holds unchanged.
    ///
    /// Run it again after anything went wrong, or for the rest of a month: it goes on where it stopped. Exit codes: 0 done,
    /// 1 failed and nothing lost, 2 wrong arguments or configuration.
    Export {
        /// The month, in UTC.
        #[arg(long, value_name = "YYYY-MM")]
        month: Month,
        /// Leave what was received later.
        #[arg(long, value_name = "DAYS", default_value_t = 90, value_parser = clap::value_parser!(u32).range(0..=36_500))]
        older_than_days: u32,
    },
    /// Put a month's events back into the replay tier, where they can be read again.
    Restore {
        /// The month, in UTC.
        #[arg(long, value_name = "YYYY-MM")]
        month: Month,
        /// Keep them this long, whatever their age.
        #[arg(long, value_name = "DAYS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=36_500))]
        hold_days: u32,
    },
}

pub(super) fn main(args: &ArchiveArgs) -> ExitCode {
    let (config, database) = match configured() {
        Ok(configured) => configured,
        Err(code) => return code,
    };
    let runtime = match super::runtime::build() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&error),
    };
    let text = runtime.block_on(run(args, &config.archive, &database));
    let written = match text {
        Ok(text) => writeln!(io::stdout(), "{text}"),
        Err(error @ ArchiveError::Settings(_)) => return super::refused(&error),
        Err(error) => return failed(&error),
    };
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

async fn run(args: &ArchiveArgs, archive: &Archive, database: &Database) -> Result<String, ArchiveError> {
    let addresses = Addresses::parse(database.url.expose(), database.direct_url.expose())?;
    let plain = !args.json && io::stdout().is_terminal();
    match args.command {
        ArchiveCommand::Status => {
            let status = ArchiveSession::open(&addresses).await?.status().await?;
            Ok(if plain { table(&status) } else { json(&status) })
        }
        ArchiveCommand::Export { month, older_than_days } => {
            let storage = Storage::open(archive)?;
            let mut session = session(&addresses, month).await?;
            let mut progress = progress(month);
            let done = archive::export(&mut session, &storage, month, older_than_days, &mut progress).await?;
            Ok(if plain {
                format!(
                    "{month}: {} rows exported, {} deleted, {} changed meanwhile; {}/{} holds {}",
                    done.exported, done.deleted, done.changed, done.storage, done.object, done.count
                )
            } else {
                json(&done)
            })
        }
        ArchiveCommand::Restore { month, hold_days } => {
            let storage = Storage::open(archive)?;
            let mut session = session(&addresses, month).await?;
            let mut progress = progress(month);
            let done = archive::restore(&mut session, &storage, month, hold_days, &mut progress).await?;
            Ok(if plain {
                format!(
                    "{month}: {} of {} events restored, kept for {hold_days} days; {} were there",
                    done.inserted, done.count, done.skipped
                )
            } else {
                json(&done)
            })
        }
    }
}

/// A connection that holds the month.
async fn session(addresses: &Addresses, month: Month) -> Result<ArchiveSession, StoreError> {
    let mut session = ArchiveSession::open(addresses).await?;
    let waiting = || eprintln!("openvibe-events: waiting for another export or restore of {month}");
    session.lock(&month.to_string(), waiting).await?;
    Ok(session)
}

/// Shows on a terminal how far a run has come.
fn progress(month: Month) -> impl FnMut(&'static str, u64) {
    let shown = io::stderr().is_terminal();
    let mut last: Option<(Instant, &'static str)> = None;
    move |what, rows| {
        if !shown || last.is_some_and(|(at, was)| was == what && at.elapsed() < PROGRESS_INTERVAL) {
            return;
        }
        last = Some((Instant::now(), what));
        // A terminal that is gone stops nothing.
        let _ = write!(io::stderr(), "\r\x1b[K{month}: {what}, {rows} rows");
    }
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).expect("plain data")
}

fn table(status: &TierStatus) -> String {
    let mut text = format!(
        "{:<8} {:>12} {:>12} {:>14} {:>14}\n",
        "replay", "rows", "held", "first", "last"
    );
    for month in &status.replay {
        text.push_str(&format!(
            "{:<8} {:>12} {:>12} {:>14} {:>14}\n",
            month.month, month.rows, month.held, month.first_seq, month.last_seq
        ));
    }
    let oldest = status
        .hot
        .oldest_received_at
        .map_or("none".to_owned(), |at| crate::domain::time::Millis(at).to_iso());
    text.push_str(&format!(
        "hot      {:>12} rows, the oldest of {oldest}",
        status.hot.rows
    ));
    text
}
