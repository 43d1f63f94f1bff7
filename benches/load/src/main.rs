//! `load`: makes load on a running OpenVibe Events service, and measures what comes of it.
//!
//! It shares its machine with what it measures, so it must cost little: requests are bytes made once, answers are hardly
//! parsed, and the receiver is a few lines of HTTP.

mod account;
mod company;
mod fault;
mod figures;
mod keys;
mod kinds;
mod ledger;
mod line;
mod pace;
mod percentiles;
mod progress;
mod publisher;
mod receiver;
mod relay;
mod requests;
mod runs;
mod service;
mod sheet;
mod sse;
mod table;
mod watch;
mod wire;

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use company::Trouble;
use fault::Fault;
use keys::Signer;
use kinds::Kind;
use runs::{Publishing, Receiving};
use service::Service;
use sheet::{Format, Sheet};
use table::Results;
use watch::Watched;

/// Load on OpenVibe Events, and measurements of it.
///
/// The service must trust the tool's key and must not limit callers:
///   OV_NETWORK_PUBLIC_KEY="$(load key --key FILE)" EVENTS_LIMITS=off EVENTS_LOG=warn openvibe-events serve
///
/// Exit code: 0 all well; 1 nothing could be measured; 2 wrong arguments; 3 measured, and something was wrong: a
/// refused request, a lost delivery, a bad signature, a wrong order.
#[derive(Debug, Parser)]
#[command(name = "load", version, verbatim_doc_comment)]
struct Cli {
    #[command(subcommand)]
    mode: Mode,
}

#[derive(Debug, Subcommand)]
enum Mode {
    /// Print the public key that the service must trust, as PEM; made when the file is missing
    Key(KeyArgs),
    /// Publish as fast as the service answers, or at a rate, to no subscription
    Publish(PublishArgs),
    /// Publish to subscriptions of a receiver of its own, until all has arrived
    Deliver(DeliverArgs),
    /// From when an event was due to be sent until it is received, at a rate
    E2e(E2eArgs),
    /// As e2e, beside subscriptions whose endpoints are in trouble
    Fair(FairArgs),
    /// Fill a backlog on a service with EVENTS_WORKER=off, then start a worker and measure how fast it empties
    Drain(DrainArgs),
    /// Read the whole log in pages
    Pull(PullArgs),
    /// The same as e2e through a relay that stores nothing: the least there can be
    Floor(FloorArgs),
    /// Follow topics on many live streams, and measure how events fan out
    Sse(SseArgs),
    /// Write the frames of live streams and do nothing else: what sse compares a service with
    SseWriter(SseWriterArgs),
    /// Pass everything on to a broker; answers are late from SIGUSR1 on. Stop it for a black hole, kill it for a refusal
    Line(LineArgs),
    /// Make the table of figures from the results that scripts/bench.sh collected
    Table(TableArgs),
}

#[derive(Debug, Args)]
struct KeyArgs {
    /// The file of the signing key
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
}

#[derive(Debug, Args)]
struct Target {
    /// Where the service is
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:4300")]
    url: String,
    /// The file of the signing key; `load key` prints its public half
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
    /// The issuer that tokens name: OV_NETWORK_ISSUER of the service
    #[arg(long, value_name = "URL", default_value = "https://openvibe.network")]
    issuer: String,
    /// Report processor time and memory of a process and all it started; may be repeated
    #[arg(long, value_name = "NAME=PID")]
    watch: Vec<Watched>,
}

#[derive(Debug, Clone, Copy, Args)]
struct Common {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Threads of the tool
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    worker_threads: u16,
}

#[derive(Debug, Args)]
struct Shape {
    /// Connections with one request at a time each
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..))]
    connections: u16,
    /// How long to publish
    #[arg(long, value_name = "S", default_value_t = 10.0)]
    seconds: f64,
    /// Events in one request
    #[arg(long, value_name = "B", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=100))]
    batch: u16,
    /// Bytes of each payload
    #[arg(long, value_name = "N", default_value_t = 1024)]
    payload_bytes: usize,
    /// Open loop: so many requests a second, each measured from when it was due. Closed loop without
    #[arg(long, value_name = "R")]
    rate: Option<f64>,
    /// End earlier after so many events (closed loop)
    #[arg(long, value_name = "N")]
    events: Option<u64>,
}

#[derive(Debug, Args)]
struct Receive {
    /// Subscriptions, each of a consumer of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000))]
    subscriptions: u16,
    /// Their max_inflight
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u8).range(1..=64))]
    max_inflight: u8,
    /// Promise order by subject, over so many keys, and check it; each key is published by one connection
    #[arg(long, value_name = "K", default_value_t = 0)]
    keys: u16,
    /// Publish these kinds of work by turns: CLASS[=CARRIER], of queue, topic and stream. The run begins once that carrier
    /// is chosen for it
    #[arg(long, value_name = "KIND", value_delimiter = ',', conflicts_with = "keys")]
    kinds: Vec<Kind>,
    /// Seconds without an arrival after which the rest counts as lost
    #[arg(long, value_name = "S", default_value_t = 30.0)]
    patience: f64,
}

#[derive(Debug, Args)]
struct PublishArgs {
    #[command(flatten)]
    target: Target,
    #[command(flatten)]
    shape: Shape,
    /// Seconds of the same load before the measurement
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    warm_up: f64,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Args)]
struct DeliverArgs {
    #[command(flatten)]
    target: Target,
    #[command(flatten)]
    shape: Shape,
    #[command(flatten)]
    receive: Receive,
    /// Check every Nth signature; 0 for none
    #[arg(long, value_name = "N", default_value_t = 16)]
    check_every: u64,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Args)]
struct E2eArgs {
    #[command(flatten)]
    target: Target,
    /// Events a second
    #[arg(long, value_name = "R", default_value_t = 200.0)]
    rate: f64,
    /// How long to publish
    #[arg(long, value_name = "S", default_value_t = 20.0)]
    seconds: f64,
    /// Connections to publish over
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    connections: u16,
    /// Bytes of each payload
    #[arg(long, value_name = "N", default_value_t = 1024)]
    payload_bytes: usize,
    #[command(flatten)]
    receive: Receive,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Args)]
struct FairArgs {
    #[command(flatten)]
    e2e: E2eArgs,
    /// What is wrong with the endpoints beside; none for the measurement to compare with
    #[arg(long, value_name = "TROUBLE", value_delimiter = ',', value_enum)]
    beside: Vec<Trouble>,
}

#[derive(Debug, Args)]
struct DrainArgs {
    #[command(flatten)]
    target: Target,
    /// Deliveries to fill the backlog with: events times subscriptions
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    backlog: u64,
    /// Bytes of each payload
    #[arg(long, value_name = "N", default_value_t = 1024)]
    payload_bytes: usize,
    #[command(flatten)]
    receive: Receive,
    /// Check every Nth signature; 0 for none
    #[arg(long, value_name = "N", default_value_t = 16)]
    check_every: u64,
    /// Shell command that starts a service with a worker on the same database; begin it with `exec`. It is killed at the end
    #[arg(long, value_name = "COMMAND")]
    worker: String,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Args)]
struct PullArgs {
    #[command(flatten)]
    target: Target,
    /// Events on a page
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Args)]
struct FloorArgs {
    /// Events a second; closed loop when 0
    #[arg(long, value_name = "R", default_value_t = 200.0)]
    rate: f64,
    /// How long to publish
    #[arg(long, value_name = "S", default_value_t = 20.0)]
    seconds: f64,
    /// Connections to publish over
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    connections: u16,
    /// Bytes of each payload
    #[arg(long, value_name = "N", default_value_t = 1024)]
    payload_bytes: usize,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Args)]
struct SseArgs {
    #[command(flatten)]
    target: Target,
    /// The target is `load sse-writer`, not a service
    #[arg(long)]
    writer: bool,
    /// Streams; each follows the wide topic and, with nine others, a narrow one. Raise the limit of open files before
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(10..=60_000))]
    connections: u32,
    /// Events a second on the topic that all follow
    #[arg(long, value_name = "R", default_value_t = 4.0)]
    wide: f64,
    /// Events a second on topics that ten follow each
    #[arg(long, value_name = "R", default_value_t = 100.0)]
    narrow: f64,
    /// How long to publish
    #[arg(long, value_name = "S", default_value_t = 15.0)]
    seconds: f64,
    /// Bytes of each payload
    #[arg(long, value_name = "N", default_value_t = 256)]
    payload_bytes: usize,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Args)]
struct SseWriterArgs {
    /// Where to listen
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:4309")]
    listen: SocketAddr,
}

#[derive(Debug, Args)]
struct LineArgs {
    /// The broker
    #[arg(long, value_name = "ADDRESS")]
    to: SocketAddr,
    /// The loopback port to listen on; 0 for a free one. It is printed
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    port: u16,
    /// How late a slow line's answers are
    #[arg(long, value_name = "S", default_value_t = 0.2)]
    late: f64,
    /// Slow from the start
    #[arg(long)]
    slow: bool,
}

#[derive(Debug, Args)]
struct TableArgs {
    /// Lines of {"measure", "round", "sheet"}
    #[arg(long, value_name = "FILE")]
    results: PathBuf,
    /// Write the page there; what people wrote at its end is kept
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Write figures and runs there
    #[arg(long, value_name = "FILE")]
    json_file: Option<PathBuf>,
}

fn main() -> ExitCode {
    let shown = match Cli::parse().mode {
        Mode::Key(args) => return print_key(&args),
        Mode::Table(args) => print_table(&args),
        Mode::Line(args) => hold_line(&args),
        Mode::Publish(args) => run(args.common, publish(args)),
        Mode::Deliver(args) => run(args.common, deliver(args)),
        Mode::E2e(args) => run(args.common, e2e(args)),
        Mode::Fair(args) => run(args.e2e.common, fair(args)),
        Mode::Drain(args) => run(args.common, drain(args)),
        Mode::Pull(args) => run(args.common, pull(args)),
        Mode::Sse(args) => run(args.common, sse(args)),
        Mode::SseWriter(args) => return write_streams(args.listen),
        Mode::Floor(args) => run(args.common, floor(args)),
    };
    shown.unwrap_or_else(|fault| failed(&fault))
}

fn write_streams(listen: SocketAddr) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime.and_then(|runtime| runtime.block_on(sse::serve(listen))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(source) => failed(&Fault::Other(format!("{listen}: {source}"))),
    }
}

fn failed(fault: &Fault) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "load: {fault}");
    ExitCode::FAILURE
}

fn print_key(args: &KeyArgs) -> ExitCode {
    match Signer::open(&args.key, "").and_then(|signer| signer.public_pem()) {
        Ok(pem) => match write!(std::io::stdout(), "{pem}") {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        },
        Err(fault) => failed(&fault),
    }
}

fn print_table(args: &TableArgs) -> Result<ExitCode, Fault> {
    let write = |path: &PathBuf, text: String| {
        std::fs::write(path, text).map_err(|source| Fault::File {
            path: path.clone(),
            source,
        })
    };
    let results = Results::read(&args.results)?;
    if let Some(path) = &args.markdown {
        // The first time there is none to keep anything of.
        let former = std::fs::read_to_string(path).unwrap_or_default();
        write(path, results.markdown(&former))?;
    }
    if let Some(path) = &args.json_file {
        write(path, format!("{:#}\n", results.json()))?;
    }
    match write!(std::io::stdout(), "{}", results.text()) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(source) => Err(Fault::Io {
            what: "standard output",
            source,
        }),
    }
}

fn hold_line(args: &LineArgs) -> Result<ExitCode, Fault> {
    until_ended(1, line::serve(args.port, args.to, seconds(args.late), args.slow))?;
    Ok(ExitCode::SUCCESS)
}

fn run(common: Common, mode: impl Future<Output = Result<Sheet, Fault>>) -> Result<ExitCode, Fault> {
    let sheet = until_ended(common.worker_threads, mode)?;
    let format = if common.json { Format::Json } else { Format::Lines };
    sheet.show(format).map_err(|source| Fault::Io {
        what: "standard output",
        source,
    })
}

/// Runs a mode on as many threads as it may use, until it ends or Ctrl-C.
fn until_ended<T>(threads: u16, mode: impl Future<Output = Result<T, Fault>>) -> Result<T, Fault> {
    let runtime = match threads {
        1 => tokio::runtime::Builder::new_current_thread().enable_all().build(),
        threads => tokio::runtime::Builder::new_multi_thread()
            .worker_threads(threads.into())
            .enable_all()
            .build(),
    };
    let runtime = runtime.map_err(|source| Fault::Io {
        what: "the runtime",
        source,
    })?;
    runtime.block_on(async {
        tokio::select! {
            ended = mode => ended,
            _ = tokio::signal::ctrl_c() => Err(Fault::Other("interrupted".to_owned())),
        }
    })
}

async fn publish(args: PublishArgs) -> Result<Sheet, Fault> {
    let service = args.target.service()?;
    let publishing = args.shape.publishing(0);
    runs::publish(&service, &publishing, seconds(args.warm_up), &args.target.watch).await
}

async fn deliver(args: DeliverArgs) -> Result<Sheet, Fault> {
    let service = args.target.service()?;
    let publishing = args.shape.publishing(args.receive.keys);
    let receiving = args.receive.receiving(args.check_every);
    runs::deliver("deliver", &service, &publishing, &receiving, &args.target.watch).await
}

async fn e2e(args: E2eArgs) -> Result<Sheet, Fault> {
    let service = args.target.service()?;
    let receiving = args.receive.receiving(1);
    runs::deliver("e2e", &service, &args.publishing(), &receiving, &args.target.watch).await
}

async fn fair(args: FairArgs) -> Result<Sheet, Fault> {
    let FairArgs { e2e, beside } = args;
    let service = e2e.target.service()?;
    let receiving = e2e.receive.receiving(16);
    runs::fair(&service, &e2e.publishing(), &receiving, &beside, &e2e.target.watch).await
}

async fn drain(args: DrainArgs) -> Result<Sheet, Fault> {
    const BATCH: u64 = 100;

    let service = args.target.service()?;
    let events = (args.backlog / u64::from(args.receive.subscriptions)).next_multiple_of(BATCH);
    let publishing = Publishing {
        connections: 4,
        length: Duration::from_secs(600),
        events: Some(events),
        batch: 100,
        payload_bytes: args.payload_bytes,
        rate: None,
        keys: args.receive.keys.into(),
    };
    let receiving = args.receive.receiving(args.check_every);
    runs::drain(&service, &publishing, &receiving, &args.worker, &args.target.watch).await
}

async fn pull(args: PullArgs) -> Result<Sheet, Fault> {
    let service = args.target.service()?;
    runs::pull(&service, args.limit, &args.target.watch).await
}

async fn sse(args: SseArgs) -> Result<Sheet, Fault> {
    let service = args.target.service()?;
    let fan = sse::Fan {
        connections: args.connections as usize,
        wide: args.wide,
        narrow: args.narrow,
        length: seconds(args.seconds),
        payload_bytes: args.payload_bytes,
        writer: args.writer,
    };
    sse::run(&service, &fan, &args.target.watch).await
}

async fn floor(args: FloorArgs) -> Result<Sheet, Fault> {
    let publishing = Publishing {
        connections: args.connections.into(),
        length: seconds(args.seconds),
        events: None,
        batch: 1,
        payload_bytes: args.payload_bytes,
        rate: Some(args.rate).filter(|rate| *rate > 0.0),
        keys: 0,
    };
    runs::floor(&publishing, Duration::from_secs(10)).await
}

impl Target {
    fn service(&self) -> Result<Service, Fault> {
        Service::at(&self.url, Signer::open(&self.key, &self.issuer)?)
    }
}

impl Shape {
    fn publishing(&self, keys: u16) -> Publishing {
        Publishing {
            connections: self.connections.into(),
            length: seconds(self.seconds),
            events: self.events,
            batch: self.batch.into(),
            payload_bytes: self.payload_bytes,
            rate: self.rate,
            keys: keys.into(),
        }
    }
}

impl E2eArgs {
    fn publishing(&self) -> Publishing {
        Publishing {
            connections: self.connections.into(),
            length: seconds(self.seconds),
            events: None,
            batch: 1,
            payload_bytes: self.payload_bytes,
            rate: Some(self.rate),
            keys: self.receive.keys.into(),
        }
    }
}

impl Receive {
    fn receiving(&self, check_every: u64) -> Receiving {
        Receiving {
            subscriptions: self.subscriptions.into(),
            max_inflight: self.max_inflight,
            check_every,
            patience: seconds(self.patience),
            kinds: self.kinds.clone(),
        }
    }
}

/// A length of time; what is no such number is none.
fn seconds(count: f64) -> Duration {
    Duration::try_from_secs_f64(count).unwrap_or_default()
}
