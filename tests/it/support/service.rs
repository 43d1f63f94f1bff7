//! The service as a process: the real binary, started with given variables and ended by its pid.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        LazyLock,
        atomic::{AtomicU16, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use tokio::sync::watch;

use super::{
    client::Client,
    database::Database,
    logs,
    network::{ISSUER, Network},
    wait::{SOON, eventually, within},
};

/// What the process inherits from the test: only what any program needs to run.
const INHERITED: [&str; 6] = [
    "PATH",
    "HOME",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "RUST_BACKTRACE",
    "LLVM_PROFILE_FILE",
];

/// How often a start is tried again because another process took the port first.
const PORT_TRIES: usize = 5;

/// How much of a log a failure quotes, in bytes from its end.
const LOG_QUOTED: usize = 6000;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Exit {
    /// The exit code; none when a signal ended it.
    pub(crate) code: Option<i32>,
    /// The signal that ended it.
    pub(crate) signal: Option<i32>,
}

/// A started process. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Service {
    pid: u32,
    base: String,
    log: PathBuf,
    client: Client,
    exit: watch::Receiver<Option<Exit>>,
    reaper: Option<JoinHandle<()>>,
}

impl Service {
    /// Starts `serve` on a database and an issuer, and waits until it is ready.
    ///
    /// `env` is added to what the tests run with: rate limits off and a poll every 50 ms. A later pair wins.
    pub(crate) async fn start(database: &Database, network: &Network, env: &[(&str, &str)]) -> Self {
        let mut all = vec![
            ("DATABASE_URL", database.url()),
            ("DATABASE_DIRECT_URL", database.url()),
        ];
        all.extend(env);
        for _ in 1..PORT_TRIES {
            let service = Self::spawn(network, &all);
            if service.ready_or_ended().await || !service.port_was_taken() {
                service.wait_ready().await;
                return service;
            }
        }
        let service = Self::spawn(network, &all);
        service.wait_ready().await;
        service
    }

    /// Starts `serve` with what `env` says and nothing about a database, without waiting for anything.
    pub(crate) fn spawn(network: &Network, env: &[(&str, &str)]) -> Self {
        let port = free_port().to_string();
        let mut all: BTreeMap<&str, &str> = BTreeMap::from([
            ("HOST", "127.0.0.1"),
            ("PORT", port.as_str()),
            ("OV_NETWORK_URL", network.url()),
            ("OV_NETWORK_INTERNAL_URL", network.url()),
            ("OV_NETWORK_ISSUER", ISSUER),
            ("EVENTS_LIMITS", "off"),
            ("EVENTS_WORKER_INTERVAL_MS", "50"),
            ("EVENTS_LIMITS", "off"),
        ]);
        all.extend(env.iter().copied());
        let base = format!("http://{}:{}", all["HOST"], all["PORT"]);
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let log = logs::folder().join(format!("service-{}.log", ulid::Ulid::generate()));
        let output = File::create(&log).expect("a log file in the target folder");
        let inherited = INHERITED
            .iter()
            .filter_map(|name| Some((*name, std::env::var_os(name)?)));
        let mut child = Command::new(env!("CARGO_BIN_EXE_openvibe-events"))
            .arg("serve")
            .env_clear()
            .envs(inherited)
            .envs(all)
            .current_dir(directory)
            .stdin(Stdio::null())
            .stdout(output.try_clone().expect("a second handle on the log file"))
            .stderr(output)
            .spawn()
            .expect("the built binary starts");
        let pid = child.id();
        let (ended, exit) = watch::channel(None);
        let reaper = thread::spawn(move || {
            let status = child.wait().expect("a child can be waited for");
            ended.send_replace(Some(Exit {
                code: status.code(),
                signal: status.signal(),
            }));
        });
        let client = Client::new(&base);
        Self {
            pid,
            base,
            log,
            client,
            exit,
            reaper: Some(reaper),
        }
    }

    /// The process id.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// `http://host:port`.
    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    /// A client of this process.
    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Everything the process has written so far.
    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Whether the process still runs (a stopped one does).
    pub(crate) fn is_alive(&self) -> bool {
        self.exit.borrow().is_none()
    }

    /// Waits until `/api/ready` answers 200; fails at once when the process ends first.
    pub(crate) async fn wait_ready(&self) {
        let ready = self.ready_or_ended().await;
        assert!(
            ready,
            "the service ended before it was ready ({:?}):\n{}",
            *self.exit.borrow(),
            self.log_end()
        );
    }

    /// Waits for the process to end by itself.
    pub(crate) async fn wait_exit(&self, deadline: Duration) -> Exit {
        let mut exit = self.exit.clone();
        let ended = tokio::time::timeout(deadline, exit.wait_for(Option::is_some)).await;
        match ended {
            Ok(exit) => exit
                .expect("the exit is told before the reaper ends")
                .expect("it has ended"),
            Err(_) => panic!(
                "process {} did not end within {deadline:?}:\n{}",
                self.pid,
                self.log_end()
            ),
        }
    }

    /// SIGKILL: what a crash looks like. Returns when the process is gone.
    pub(crate) async fn kill(&self) {
        self.signal("KILL");
        self.wait_exit(SOON).await;
    }

    /// SIGTERM; how the process ended and how long that took. A stop has 10 s, so 15 s are given.
    pub(crate) async fn terminate(&self) -> (Exit, Duration) {
        let asked = Instant::now();
        self.signal("TERM");
        (self.wait_exit(Duration::from_secs(15)).await, asked.elapsed())
    }

    /// SIGSTOP: the process freezes where it stands, its connections open.
    pub(crate) fn freeze(&self) {
        self.signal("STOP");
    }

    /// SIGCONT: a frozen process goes on.
    pub(crate) fn thaw(&self) {
        self.signal("CONT");
    }

    fn signal(&self, name: &str) {
        if self.is_alive() {
            let sent = Command::new("kill")
                .arg(format!("-{name}"))
                .arg(self.pid.to_string())
                .output();
            let sent = sent.expect("the kill program runs");
            let late = !self.is_alive();
            assert!(
                sent.status.success() || late,
                "{}",
                String::from_utf8_lossy(&sent.stderr)
            );
        }
    }

    /// True once it is ready, false once it has ended.
    async fn ready_or_ended(&self) -> bool {
        let log = || self.log_end();
        let seen = eventually("the service is ready", Duration::from_secs(60), async || {
            if !self.is_alive() {
                return Ok(false);
            }
            let asked = self.client.request(reqwest::Method::GET, "/api/ready", None);
            match self.client.try_send(asked.timeout(Duration::from_secs(3))).await {
                Ok(answer) if answer.status == 200 => Ok(true),
                Ok(answer) => Err(format!("{} {}\n{}", answer.status, answer.text, log())),
                Err(error) => Err(format!("{error:?}\n{}", log())),
            }
        });
        seen.await
    }

    fn port_was_taken(&self) -> bool {
        self.log().to_lowercase().contains("address already in use")
    }

    fn log_end(&self) -> String {
        let log = self.log();
        let start = log.ceil_char_boundary(log.len().saturating_sub(LOG_QUOTED));
        log[start..].to_owned()
    }
}

impl Drop for Service {
    /// Ends the process; a failing test quotes its log, a passing one removes it unless it is wanted.
    fn drop(&mut self) {
        if self.is_alive() {
            Command::new("kill")
                .arg("-KILL")
                .arg(self.pid.to_string())
                .output()
                .ok();
        }
        if let Some(reaper) = self.reaper.take() {
            reaper.join().ok();
        }
        if thread::panicking() {
            eprintln!(
                "process {} wrote ({}):\n{}",
                self.pid,
                self.log.display(),
                self.log_end()
            );
        } else if logs::kept().is_none() {
            fs::remove_file(&self.log).ok();
        }
    }
}

/// Starts `count` processes on one database, all at once.
pub(crate) async fn start_many(
    database: &Database,
    network: &Network,
    count: usize,
    env: &[(&str, &str)],
) -> Vec<Service> {
    let starts = (0..count).map(|_| Service::start(database, network, env));
    within(
        "all processes are ready",
        Duration::from_secs(90),
        futures_util::future::join_all(starts),
    )
    .await
}

/// A port that nothing listens on. It lies below those that the system gives to outgoing connections: one of the many of
/// these tests would sooner or later take it before the service does. No two callers get the same one.
pub(crate) fn free_port() -> u16 {
    const PORTS: std::ops::Range<u16> = 10_000..20_000;
    static NEXT: LazyLock<AtomicU16> = LazyLock::new(|| AtomicU16::new(rand::random_range(PORTS)));
    loop {
        let port = PORTS.start + NEXT.fetch_add(1, Ordering::Relaxed) % (PORTS.end - PORTS.start);
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
