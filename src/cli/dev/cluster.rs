//! A private PostgreSQL cluster: made once, started as a child process, reached over loopback with a password of its own.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, chown, fchown};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use sha2::{Digest, Sha256};
use sqlx::Postgres;
use sqlx::migrate::MigrateDatabase;
use tokio::process::{Child, Command};
use tokio::time::Instant;

use super::account::Account;
use super::programs::{self, Programs, ProgramsError};

const DATABASE: &str = "openvibe_events";
const ROLE: &str = "openvibe";

/// How long a start may take, recovery after a crash included.
const START_MAX: Duration = Duration::from_secs(60);

/// Wait between two looks at a server that starts.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Ports tried when somebody else takes one between the choice and the start.
const PORTS_MAX: u32 = 3;

/// Lines of the server's log that a message repeats.
const LOG_LINES: usize = 8;

/// Why there is no running cluster.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// No server programs.
    #[error(transparent)]
    Programs(#[from] ProgramsError),
    /// Started as root, and nobody to run the server as.
    #[error(
        "started as root, and PostgreSQL refuses to run as root; this machine has neither an account postgres nor an \
         account nobody to run it as. Start this as an ordinary user"
    )]
    NoAccount,
    /// A file or directory cannot be used.
    #[error("{what} {}: {source}", .path.display())]
    File {
        /// What was tried.
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// Another process works with the same data.
    #[error("another `openvibe-events dev` is using {}; stop it, or name another directory with --data", .0.display())]
    InUse(PathBuf),
    /// The substitute directory belongs to somebody else.
    #[error("{} belongs to somebody else; name a directory with --data that the account {account} can reach", .path.display())]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// The account that must own it.
        account: String,
    },
    /// A server program failed.
    #[error("{program} failed ({status}): {output}")]
    Program {
        /// Its name.
        program: &'static str,
        /// How it ended.
        status: ExitStatus,
        /// What it said last.
        output: String,
    },
    /// The server ended while it was starting.
    #[error("PostgreSQL ended while it was starting ({status}). Its log {} ends:\n{tail}", .log.display())]
    Ended {
        /// How it ended.
        status: ExitStatus,
        /// Its log.
        log: PathBuf,
        /// The end of the log.
        tail: String,
    },
    /// The server does not accept connections.
    #[error("PostgreSQL did not accept a connection within {} s. Its log {} ends:\n{tail}", START_MAX.as_secs(), .log.display())]
    Silent {
        /// Its log.
        log: PathBuf,
        /// The end of the log.
        tail: String,
        /// What the last try met.
        #[source]
        source: sqlx::Error,
    },
    /// The database could not be made.
    #[error("the database {DATABASE} cannot be made: {0}")]
    Database(#[source] sqlx::Error),
}

/// A running cluster. It ends with [`Cluster::stop`]; dropping it kills the server, which recovers at the next start.
#[derive(Debug)]
pub(super) struct Cluster {
    place: Place,
    server: Child,
    port: u16,
    password: String,
    /// Held while the cluster is in use: only one process may.
    _lock: File,
}

impl Cluster {
    /// Starts the cluster below `data`, making it first where there is none. `variable` answers what an environment
    /// variable holds; `say` is told what takes time or is not where it is expected.
    ///
    /// # Errors
    ///
    /// Each with what the reader can do about it.
    pub(super) async fn start(
        data: &Path,
        variable: &dyn Fn(&str) -> Option<String>,
        say: &dyn Fn(&str),
    ) -> Result<Self, ClusterError> {
        fs::create_dir_all(data).map_err(file("cannot make", data))?;
        let data = data.canonicalize().map_err(file("cannot reach", data))?;
        let lock = lock(&data)?;
        let account = lent(&data)?;
        let home = home(&data, account.as_ref(), say)?;
        let cluster = home.join("cluster");
        let made_by = fs::read_to_string(cluster.join("PG_VERSION"))
            .ok()
            .and_then(|version| version.trim().parse().ok());
        let programs = programs::find(
            variable("OV_PG_BIN"),
            variable("PATH").as_deref(),
            made_by.map(|major| (cluster.as_path(), major)),
        )?;
        let place = Place {
            data,
            home,
            programs,
            account,
        };
        if made_by.is_none() {
            say("making a PostgreSQL cluster");
            place.make().await?;
        }
        place.end_earlier(say).await?;
        let password = place.password()?;
        let (server, port) = place.run(&password).await?;
        let cluster = Self {
            place,
            server,
            port,
            password,
            _lock: lock,
        };
        let url = cluster.url();
        if !Postgres::database_exists(&url).await.map_err(ClusterError::Database)? {
            Postgres::create_database(&url).await.map_err(ClusterError::Database)?;
        }
        Ok(cluster)
    }

    /// The URL of the service's database, password included.
    pub(super) fn url(&self) -> String {
        url(self.port, &self.password)
    }

    /// The port of the server on 127.0.0.1.
    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// The major version of the server.
    pub(super) fn major(&self) -> u32 {
        self.place.programs.major
    }

    /// Where the cluster lives.
    pub(super) fn home(&self) -> &Path {
        &self.place.home
    }

    /// Stops the server: its sessions end, its data is written.
    ///
    /// # Errors
    ///
    /// It could not be asked to stop. It is killed then.
    pub(super) async fn stop(mut self) -> Result<(), ClusterError> {
        let asked = self.place.stop_server().await;
        if asked.is_err() {
            self.server.start_kill().ok();
        }
        self.server
            .wait()
            .await
            .map_err(file("cannot await the end of", &self.place.home))?;
        asked
    }
}

/// Where a cluster lives and who runs it.
#[derive(Debug)]
struct Place {
    /// Ours: the server's log and the port it had.
    data: PathBuf,
    /// The account's: the cluster and its password. Root writes only new files here, since the account could have put a
    /// link in the place of an old one.
    home: PathBuf,
    programs: Programs,
    account: Option<Account>,
}

impl Place {
    fn cluster(&self) -> PathBuf {
        self.home.join("cluster")
    }

    fn log(&self) -> PathBuf {
        self.data.join("postgres.log")
    }

    /// A server program, ready for its arguments. It has a process group of its own: a Ctrl-C in the terminal must reach
    /// the service before the database.
    fn command(&self, program: &'static str) -> Command {
        let mut command = Command::new(self.programs.bin.join(program));
        command
            .current_dir(&self.home)
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .process_group(0)
            .kill_on_drop(true);
        if let Some(account) = &self.account {
            account.lend_to(&mut command);
        }
        command
    }

    async fn run_to_end(&self, program: &'static str, args: &[&str]) -> Result<(), ClusterError> {
        let path = self.programs.bin.join(program);
        let answer = self
            .command(program)
            .args(args)
            .output()
            .await
            .map_err(file("cannot run", &path))?;
        if answer.status.success() {
            return Ok(());
        }
        let output = [answer.stdout, answer.stderr].concat();
        Err(ClusterError::Program {
            program,
            status: answer.status,
            output: String::from_utf8_lossy(&output).trim().to_owned(),
        })
    }

    /// Makes the cluster beside its place and moves it there when it is whole, so that a run that was cut short leaves
    /// nothing that looks like a cluster.
    async fn make(&self) -> Result<(), ClusterError> {
        let part = self.home.join("cluster.part");
        if part.exists() {
            fs::remove_dir_all(&part).map_err(file("cannot remove", &part))?;
        }
        let password = self.new_password()?;
        let args = [
            "--pgdata",
            &part.to_string_lossy(),
            "--username",
            ROLE,
            "--pwfile",
            &password.to_string_lossy(),
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            "--no-instructions",
        ];
        self.run_to_end("initdb", &args).await?;
        fs::rename(&part, self.cluster()).map_err(file("cannot move", &part))
    }

    fn password(&self) -> Result<String, ClusterError> {
        let path = self.home.join("password");
        let text = fs::read_to_string(&path).map_err(file("cannot read", &path))?;
        Ok(text.trim().to_owned())
    }

    /// A file with a new password, readable by the server's account (and root) alone.
    fn new_password(&self) -> Result<PathBuf, ClusterError> {
        let path = self.home.join("password");
        if path.exists() {
            fs::remove_file(&path).map_err(file("cannot remove", &path))?;
        }
        let mut new = OpenOptions::new();
        let mut out = new
            .create_new(true)
            .write(true)
            .mode(0o600)
            .open(&path)
            .map_err(file("cannot write", &path))?;
        let password = hex::encode(rand::random::<[u8; 24]>());
        out.write_all(password.as_bytes())
            .map_err(file("cannot write", &path))?;
        if let Some(account) = &self.account {
            fchown(&out, Some(account.uid), Some(account.gid)).map_err(file("cannot hand over", &path))?;
        }
        Ok(path)
    }

    /// Stops a server that an earlier run left behind when it was killed, and removes the mark of one that is gone.
    async fn end_earlier(&self, say: &dyn Fn(&str)) -> Result<(), ClusterError> {
        let mark = self.cluster().join("postmaster.pid");
        let Ok(text) = fs::read_to_string(&mark) else {
            return Ok(());
        };
        let pid = text.lines().next().and_then(|line| line.trim().parse().ok());
        // The number may belong to another program by now, which must neither be stopped nor hold up the start.
        let lives = match pid {
            Some(pid) => command_line(pid).await.contains(&*self.cluster().to_string_lossy()),
            None => false,
        };
        if lives {
            say("stopping the PostgreSQL of an earlier run");
            self.stop_server().await
        } else {
            fs::remove_file(&mark).map_err(file("cannot remove", &mark))
        }
    }

    async fn stop_server(&self) -> Result<(), ClusterError> {
        let cluster = self.cluster();
        let args = [
            "stop",
            "-w",
            "-s",
            "-m",
            "fast",
            "-t",
            "30",
            "-D",
            &cluster.to_string_lossy(),
        ];
        self.run_to_end("pg_ctl", &args).await
    }

    /// Starts the server, on the port of the run before where that is free.
    async fn run(&self, password: &str) -> Result<(Child, u16), ClusterError> {
        let remembered = self.data.join("postgres.port");
        let mut wanted = fs::read_to_string(&remembered)
            .ok()
            .and_then(|text| text.trim().parse().ok());
        let mut tries = 0;
        loop {
            tries += 1;
            let port = free_port(wanted.take()).map_err(file("no free port for", &self.home))?;
            match self.run_on(port, password).await {
                Err(ClusterError::Ended { tail, .. }) if tail.contains("could not bind") && tries < PORTS_MAX => {}
                Err(error) => return Err(error),
                Ok(server) => {
                    fs::write(&remembered, port.to_string()).map_err(file("cannot write", &remembered))?;
                    return Ok((server, port));
                }
            }
        }
    }

    async fn run_on(&self, port: u16, password: &str) -> Result<Child, ClusterError> {
        let log = self.log();
        let out = private_file(&log).map_err(file("cannot write", &log))?;
        let both = out.try_clone().map_err(file("cannot write", &log))?;
        let mut server = self
            .command("postgres")
            .arg("-D")
            .arg(self.cluster())
            .args(["-p", &port.to_string()])
            .args(["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="])
            .args(["-c", "shared_buffers=64MB", "-c", "max_connections=100"])
            .stdout(out)
            .stderr(both)
            .spawn()
            .map_err(file("cannot run", &self.programs.bin.join("postgres")))?;
        let (url, started) = (url(port, password), Instant::now());
        loop {
            if let Some(status) = server.try_wait().map_err(file("cannot watch", &log))? {
                let tail = tail(&log);
                return Err(ClusterError::Ended { status, log, tail });
            }
            match Postgres::database_exists(&url).await {
                Ok(_) => return Ok(server),
                Err(source) if started.elapsed() > START_MAX => {
                    let tail = tail(&log);
                    return Err(ClusterError::Silent { log, tail, source });
                }
                Err(_) => tokio::time::sleep(LOOK_EVERY).await,
            }
        }
    }
}

fn url(port: u16, password: &str) -> String {
    format!("postgresql://{ROLE}:{password}@127.0.0.1:{port}/{DATABASE}?sslmode=disable")
}

/// Takes the right to use `data`; it ends with this process, however that ends.
fn lock(data: &Path) -> Result<File, ClusterError> {
    let path = data.join("lock");
    let mut open = OpenOptions::new();
    open.create(true).truncate(false).write(true);
    let lock = open.open(&path).map_err(file("cannot open", &path))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(fs::TryLockError::WouldBlock) => Err(ClusterError::InUse(data.to_owned())),
        Err(fs::TryLockError::Error(source)) => Err(file("cannot lock", &path)(source)),
    }
}

/// The account to run the server as; `None` when that is our own.
fn lent(data: &Path) -> Result<Option<Account>, ClusterError> {
    // The owner of a new file is who we are.
    let probe = data.join(format!("probe-{}", ulid::Ulid::generate()));
    let own = private_file(&probe)
        .and_then(|made| made.metadata())
        .and_then(|found| fs::remove_file(&probe).map(|()| found.uid()))
        .map_err(file("cannot write in", data))?;
    if own != 0 {
        return Ok(None);
    }
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    Account::to_lend(&passwd).map(Some).ok_or(ClusterError::NoAccount)
}

/// The directory of the cluster, owned by the account that runs the server: below `data`, or below `/var/tmp` where that
/// account cannot get to `data`.
fn home(data: &Path, account: Option<&Account>, say: &dyn Fn(&str)) -> Result<PathBuf, ClusterError> {
    let usual = data.join("postgres");
    let Some(account) = account else {
        return owned(usual, None);
    };
    if account.reaches(&usual) {
        return owned(usual, Some(account));
    }
    let name = hex::encode(&Sha256::digest(usual.as_os_str().as_encoded_bytes())[..8]);
    let other = PathBuf::from(format!("/var/tmp/openvibe-events-{name}"));
    say(&format!(
        "the account {} cannot get to {}: the cluster lives in {}",
        account.name,
        data.display(),
        other.display()
    ));
    owned(other, Some(account))
}

/// Makes the directory where it is missing. One that is there must belong to the account.
fn owned(path: PathBuf, account: Option<&Account>) -> Result<PathBuf, ClusterError> {
    match fs::DirBuilder::new().mode(0o700).create(&path) {
        Ok(()) => {
            if let Some(account) = account {
                chown(&path, Some(account.uid), Some(account.gid)).map_err(file("cannot hand over", &path))?;
            }
            Ok(path)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let found = fs::symlink_metadata(&path).map_err(file("cannot reach", &path))?;
            match account {
                Some(account) if !found.is_dir() || found.uid() != account.uid => Err(ClusterError::Foreign {
                    path,
                    account: account.name.clone(),
                }),
                _ => Ok(path),
            }
        }
        Err(error) => Err(file("cannot make", &path)(error)),
    }
}

/// `wanted` if nobody listens there, else any free port.
fn free_port(wanted: Option<u16>) -> io::Result<u16> {
    let bind = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port));
    let listener = match wanted.map(bind) {
        Some(Ok(listener)) => listener,
        _ => bind(0)?,
    };
    Ok(listener.local_addr()?.port())
}

/// How a process was started; empty when there is none of that number or nothing tells.
pub(super) async fn command_line(pid: u32) -> String {
    if let Ok(line) = fs::read(format!("/proc/{pid}/cmdline")) {
        return String::from_utf8_lossy(&line).into_owned();
    }
    let pid = pid.to_string();
    let answer = Command::new("ps").args(["-o", "command=", "-p", &pid]).output().await;
    answer.map_or_else(
        |_| String::new(),
        |answer| String::from_utf8_lossy(&answer.stdout).into_owned(),
    )
}

/// A new or emptied file that nobody else can read.
pub(super) fn private_file(path: &Path) -> io::Result<File> {
    let mut open = OpenOptions::new();
    open.create(true).write(true).truncate(true).mode(0o600);
    open.open(path)
}

/// The last lines of a log.
pub(super) fn tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
}

fn file(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ClusterError {
    let path = path.to_owned();
    move |source| ClusterError::File { what, path, source }
}

#[cfg(test)]
mod tests;
