//! `openvibe-events dev`: a database, an identity issuer, the service and a webhook receiver on this machine, with no
//! configuration; and a tour that shows and verifies what the service promises.
//!
//! Nothing here is for production: the issuer gives everybody a token, so the command refuses to start there.

mod account;
mod api;
mod brokers;
mod cluster;
mod demo;
mod issuer;
mod lines;
mod page;
mod ports;
mod programs;
mod receiver;
mod server;
mod service;
mod terminal;

use std::fmt::Display;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

pub use brokers::{BrokerError, Kind};
pub use cluster::ClusterError;
pub use demo::TourError;
pub use issuer::IssuerError;
pub use programs::ProgramsError;
pub use service::ServiceError;

use crate::config::process_variable;
use brokers::Brokers;
use cluster::{Cluster, private_file};
use demo::Stage;
use issuer::Issuer;
use receiver::Receiver;
use service::{Inherit, Service, Settings};
use terminal::Terminal;

/// What `dev` can be told.
#[derive(Debug, Clone, clap::Args)]
pub struct DevArgs {
    /// Play the tour: publish, deliver, fail, recover, kill and pull, each step verified
    #[arg(long)]
    pub demo: bool,
    /// Stop everything after the tour instead of leaving it running
    #[arg(long, requires = "demo")]
    pub once: bool,
    /// Directory of the database, the signing key and the logs
    #[arg(long, value_name = "DIR", default_value = "data/dev")]
    pub data: PathBuf,
    /// Port of the service on 127.0.0.1; the issuer and the receiver take the next two. One that is taken is passed over
    #[arg(long, value_name = "N", default_value_t = 4300)]
    pub port: u16,
}

/// Why `dev` ended.
#[derive(Debug, thiserror::Error)]
pub enum DevError {
    /// It was started where it must never run.
    #[error("{0}=production: this command gives a token to everybody who asks, and never runs in production")]
    Production(&'static str),
    /// No database.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// No identity issuer.
    #[error(transparent)]
    Issuer(#[from] IssuerError),
    /// A broker that was asked for does not run.
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// No service.
    #[error(transparent)]
    Service(#[from] ServiceError),
    /// The tour met something that is not as it must be.
    #[error(transparent)]
    Tour(#[from] TourError),
    /// It was stopped before the tour, which its exit code is about, had ended.
    #[error("stopped before the end of the tour")]
    Unfinished,
    /// No HTTP client.
    #[error("the HTTP client cannot be made: {0}")]
    Http(#[from] reqwest::Error),
    /// No free port, no signal, or no log.
    #[error("{0}: {1}")]
    System(&'static str, #[source] io::Error),
}

/// What keeps `dev` from going on.
enum End {
    /// Ctrl-C, SIGTERM, or a terminal that was closed.
    Asked,
    /// A failure.
    Failed(DevError),
}

impl<E: Into<DevError>> From<E> for End {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// Runs the command until it is done, is asked to stop, or fails. Exit code 0 unless it failed.
pub(super) fn main(args: &DevArgs) -> ExitCode {
    let terminal = Terminal::new(process_variable("NO_COLOR").as_deref());
    if let Err(error) = refuse_production(&process_variable) {
        return super::failed(&error);
    }
    let runtime = match super::runtime::build() {
        Ok(runtime) => runtime,
        Err(error) => return super::failed(&error),
    };
    match runtime.block_on(with_cluster(args, terminal)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => super::failed(&error),
    }
}

/// Runs the service that `dev` starts, until it is asked to stop.
pub(super) fn service() -> ExitCode {
    match refuse_production(&process_variable) {
        Ok(()) => super::serve::main(Some(page::routes)),
        Err(error) => super::failed(&error),
    }
}

/// Either variable is enough here, unlike for the service: a half-changed environment must not open the issuer.
fn refuse_production(get: &dyn Fn(&str) -> Option<String>) -> Result<(), DevError> {
    let says = |name: &&str| get(name).is_some_and(|value| value.trim().eq_ignore_ascii_case("production"));
    match ["EVENTS_ENV", "NODE_ENV"].into_iter().find(says) {
        Some(name) => Err(DevError::Production(name)),
        None => Ok(()),
    }
}

/// Starts the database, runs the rest beside it, and stops it whatever happened.
async fn with_cluster(args: &DevArgs, terminal: Terminal) -> Result<(), DevError> {
    let say = |line: &str| terminal.line(line);
    let stop = stopped()?;
    tokio::pin!(stop);
    let starting = Cluster::start(&args.data, &process_variable, &say);
    let cluster = tokio::select! {
        started = starting => started?,
        () = &mut stop => return asked(args),
    };
    terminal.line(format_args!(
        "database   PostgreSQL {} on 127.0.0.1:{}, in {}",
        cluster.major(),
        cluster.port(),
        cluster.home().display()
    ));
    let outcome = beside(args, terminal, &cluster, stop).await;
    terminal.line("stopping the database");
    let stopped = cluster.stop().await;
    match outcome {
        Err(End::Failed(error)) => Err(error),
        Err(End::Asked) => stopped.map_err(DevError::from).and_then(|()| asked(args)),
        Ok(()) => Ok(stopped?),
    }
}

/// What it means to be asked to stop: the end of `dev`, but not of a tour that was to be played to its end.
fn asked(args: &DevArgs) -> Result<(), DevError> {
    if args.once { Err(DevError::Unfinished) } else { Ok(()) }
}

/// Everything that needs the database. The service has ended when this returns.
async fn beside(
    args: &DevArgs,
    terminal: Terminal,
    cluster: &Cluster,
    mut stop: std::pin::Pin<&mut impl Future<Output = ()>>,
) -> Result<(), End> {
    let http = api::http()?;
    service::end_earlier(&args.data, &|line| terminal.line(line)).await?;
    let no_port = |error| DevError::System("no free port", error);
    let [service_port, issuer_port, receiver_port] = ports::three(args.port).map_err(no_port)?;
    let service_url = format!("http://127.0.0.1:{}", service_port.number);
    let issuer = Issuer::start(
        listen(issuer_port.listener)?,
        &args.data.join("issuer.key"),
        &service_url,
    )?;
    let receiver = Receiver::start(listen(receiver_port.listener)?).map_err(no_port)?;
    let log = args.demo.then(|| args.data.join("service.log"));
    if let Some(log) = &log {
        private_file(log).map_err(|error| DevError::System("the log of the service cannot be written", error))?;
    }
    let mut brokers = Brokers::default();
    if args.demo {
        let starting = Brokers::start(&args.data, &process_variable);
        brokers = tokio::select! {
            started = starting => started?,
            () = &mut stop => return Err(End::Asked),
        };
    }
    let inherit = if args.demo { Inherit::Unknown } else { Inherit::Most };
    let settings = Settings::new(
        &args.data,
        service_port.number,
        &cluster.url(),
        issuer.url(),
        inherit,
        brokers.settings(&process_variable),
        log.clone(),
    )?;
    // Held until now, so that neither of the other two took it.
    drop(service_port.listener);
    told(terminal, "issuer", issuer.url(), issuer_port.instead_of);
    told(terminal, "receiver", receiver.url("/hook"), receiver_port.instead_of);
    for broker in &brokers.0 {
        told(terminal, "broker", broker.told(), None);
    }

    let starting = Service::start(&settings, &http);
    let mut service = tokio::select! {
        started = terminal.progress("for the service to start", starting) => started?,
        () = &mut stop => return Err(End::Asked),
    };
    let stage = Stage {
        terminal,
        http: &http,
        issuer: &issuer,
        receiver: &receiver,
        settings: &settings,
    };
    told(terminal, "service", service.base(), service_port.instead_of);
    if let Some(log) = &log {
        terminal.line(format_args!("log        {}", log.display()));
    }
    let outcome = tokio::select! {
        outcome = with_service(args, &stage, &mut service, &mut brokers) => outcome,
        () = &mut stop => Err(End::Asked),
    };
    terminal.line("stopping the service");
    let stopped = service.stop().await;
    brokers.stop().await;
    outcome?;
    stopped.map_err(|error| DevError::System("the service cannot be stopped", error))?;
    Ok(())
}

/// The tour, where it is asked for, and then what `dev` shows until it is stopped.
async fn with_service(
    args: &DevArgs,
    stage: &Stage<'_>,
    service: &mut Service,
    brokers: &mut Brokers,
) -> Result<(), End> {
    let terminal = stage.terminal;
    if args.demo {
        demo::play(*stage, service, brokers)
            .await
            .inspect_err(|error| terminal.bad(error))?;
    }
    if args.once {
        return Ok(());
    }
    lines::print(terminal, stage.issuer, service.base(), &stage.receiver.url("/hook"));
    tokio::select! {
        error = service.ended() => Err(error.into()),
        () = lines::follow(terminal, stage.receiver) => Ok(()),
    }
}

fn listen(listener: std::net::TcpListener) -> Result<TcpListener, DevError> {
    TcpListener::from_std(listener).map_err(|error| DevError::System("a port cannot be used", error))
}

fn told(terminal: Terminal, what: &str, url: impl Display, instead_of: Option<u16>) {
    match instead_of {
        Some(taken) => terminal.line(format_args!("{what:10} {url}  (port {taken} is taken)")),
        None => terminal.line(format_args!("{what:10} {url}")),
    }
}

/// Ends at the first Ctrl-C, SIGTERM, or close of the terminal.
fn stopped() -> Result<impl Future<Output = ()>, DevError> {
    let watch = |kind| signal(kind).map_err(|error| DevError::System("signals cannot be awaited", error));
    let (mut interrupt, mut terminate) = (watch(SignalKind::interrupt())?, watch(SignalKind::terminate())?);
    let mut hang_up = watch(SignalKind::hangup())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hang_up.recv() => {}
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn production_is_refused_by_either_variable() {
        let with =
            |set: &'static str, to: &'static str| refuse_production(&move |name| (name == set).then(|| to.to_owned()));
        for name in ["EVENTS_ENV", "NODE_ENV"] {
            assert!(matches!(with(name, "production"), Err(DevError::Production(said)) if said == name));
            assert!(with(name, " Production ").is_err());
            assert!(with(name, "development").is_ok());
        }
        assert!(with("PORT", "production").is_ok());
    }
}
