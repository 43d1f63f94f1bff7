//! The commands of the binary. Exit codes: 0 done, 1 failed, 2 wrong arguments or configuration.

mod archive;
mod carriers;
pub mod check_config;
pub mod dev;
mod migrate;
mod runtime;
mod serve;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::config::{Config, Database};

/// A durable event bus on PostgreSQL: signed webhooks and cursors.
#[derive(Debug, Parser)]
#[command(name = "openvibe-events", version)]
struct Arguments {
    /// What to do; without one, `serve`.
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Bring the schema up to date and serve until SIGTERM. Configured by environment variables; see `check-config`.
    Serve,
    /// Bring the schema up to date and exit.
    Migrate,
    /// Run everything on this machine without configuration: database, identity issuer, service and a webhook receiver.
    Dev(dev::DevArgs),
    /// The service that `dev` starts: `serve`, and pages for developers.
    #[command(hide = true)]
    DevService,
    /// Move months of old events out of the database, and back.
    Archive(archive::ArchiveArgs),
    /// Try what the carriers would do.
    #[command(subcommand)]
    Carriers(carriers::CarriersCommand),
    /// Print what is configured and where it came from, or every mistake.
    CheckConfig {
        /// One JSON document instead of a table.
        #[arg(long)]
        json: bool,
    },
}

/// Runs the command that the arguments name.
pub fn run() -> ExitCode {
    // One TLS provider for every connection of the process; a second call would be the only way to fail.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    match Arguments::parse().command.unwrap_or(Command::Serve) {
        Command::Serve => serve::main(None),
        Command::Migrate => migrate::main(),
        Command::Dev(args) => dev::main(&args),
        Command::DevService => dev::service(),
        Command::Archive(args) => archive::main(&args),
        Command::Carriers(command) => carriers::main(&command),
        Command::CheckConfig { json } => check_config::main(json),
    }
}

/// The configuration and the database it names, or the exit code after saying what is wrong.
fn configured() -> Result<(Config, Database), ExitCode> {
    let config = Config::from_env().map_err(|mistakes| refused(&mistakes))?;
    let Some(database) = config.database.clone() else {
        return Err(refused(
            &"DATABASE_URL is not set; set it to a PostgreSQL URL, or run `openvibe-events dev` for a private one",
        ));
    };
    Ok((config, database))
}

/// Says on standard error what is wrong with the configuration.
fn refused(mistakes: &dyn std::fmt::Display) -> ExitCode {
    eprintln!("openvibe-events: {mistakes}");
    ExitCode::from(2)
}

/// Says on standard error why a command failed, with every cause, each said once.
fn failed(error: &dyn std::error::Error) -> ExitCode {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let own = error.to_string();
        // Some errors end with the words of their cause.
        if !text.ends_with(&own) {
            text.push_str(": ");
            text.push_str(&own);
        }
        cause = error.source();
    }
    eprintln!("openvibe-events: {text}");
    ExitCode::FAILURE
}
