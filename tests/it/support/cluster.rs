//! A PostgreSQL server of a test's own, which it may kill and start again: what a crash of the database looks like.

use std::{
    fs::{self, OpenOptions},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use parking_lot::Mutex;
use sqlx::{Connection, PgConnection};

use super::{
    database::Server,
    process::{Account, Directory, kill_family, signal},
    service::free_port,
    wait::eventually,
};

/// How long a start may take, recovery after a crash included.
const START_MAX: Duration = Duration::from_secs(60);

/// What every cluster here runs with: a commit waits for the disk, so that a crash can lose none.
const SETTINGS: &str = "listen_addresses = '127.0.0.1'\nunix_socket_directories = ''\nmax_connections = 100\n\
                        shared_buffers = 64MB\nfsync = on\nsynchronous_commit = on\n";

/// A running cluster. It ends, with its data, when the value is dropped.
#[derive(Debug)]
pub(crate) struct Cluster {
    bin: PathBuf,
    account: Account,
    directory: Directory,
    port: u16,
    server: Mutex<Option<Child>>,
}

impl Cluster {
    /// Makes a cluster and starts its server; `settings` are lines for its configuration.
    pub(crate) async fn start(settings: &str) -> Self {
        let account = Account::for_servers();
        let cluster = Self {
            bin: programs(),
            account,
            directory: account.directory("cluster"),
            port: free_port(),
            server: Mutex::new(None),
        };
        let data = cluster.data();
        let mut initdb = cluster.command("initdb");
        initdb
            .arg("-D")
            .arg(&data)
            .args(["-U", "postgres", "--auth=trust", "--encoding=UTF8"]);
        initdb.args(["--locale=C", "--no-sync", "--no-instructions"]);
        let made = initdb.output().expect("initdb runs");
        assert!(
            made.status.success(),
            "initdb: {}",
            String::from_utf8_lossy(&made.stderr)
        );
        let path = data.join("postgresql.conf");
        let given = fs::read_to_string(&path).expect("a configuration");
        fs::write(&path, format!("{given}\n{SETTINGS}{settings}\n")).expect("a configuration");
        cluster.start_again().await;
        cluster
    }

    /// The server, for databases on it.
    pub(crate) fn server(&self) -> Server {
        Server::private(&self.url())
    }

    /// Kills the server and every process of it, as a machine that loses its power would.
    pub(crate) fn kill(&self) {
        let server = self.server.lock().take();
        kill_family(&mut server.expect("a server that runs"));
    }

    /// Stops the server as an operator does who restarts it: sessions are ended, what is committed is written.
    pub(crate) fn stop(&self) {
        let mut server = self.server.lock().take().expect("a server that runs");
        signal("INT", server.id());
        server.wait().expect("the server stops");
    }

    /// Puts the data as it is now aside, for [`Cluster::fail_over`]. The server is stopped for it and started again.
    pub(crate) async fn set_aside(&self) {
        self.stop();
        copy(&self.data(), &self.aside());
        self.start_again().await;
    }

    /// Kills the server and goes on with the data that was set aside, as a standby does that had received no more when
    /// the server failed: what was committed since is gone, and the history has a new timeline.
    pub(crate) async fn fail_over(&self) {
        self.kill();
        fs::remove_dir_all(self.data()).expect("the data of the failed server");
        fs::rename(self.aside(), self.data()).expect("the data of the standby");
        fs::write(self.data().join("standby.signal"), "").expect("a mark for the server");
        self.start_again().await;
        let mut admin = PgConnection::connect(&self.url())
            .await
            .expect("a standby that can be read");
        let promoted: bool = sqlx::query_scalar("SELECT pg_promote()")
            .fetch_one(&mut admin)
            .await
            .expect("a standby that can be promoted");
        assert!(promoted);
    }

    /// Starts the server after [`Cluster::kill`], on the same port, and waits until it has recovered.
    pub(crate) async fn start_again(&self) {
        let url = self.url();
        eventually("the private server answers", START_MAX, async || {
            self.run_if_ended();
            match PgConnection::connect(&url).await {
                Ok(connection) => connection.close().await.map_err(|error| error.to_string()),
                Err(error) => Err(format!("{error}\n{}", self.log())),
            }
        })
        .await;
    }

    /// What the server has written.
    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.log_path()).unwrap_or_default()).into_owned()
    }

    /// A start may fail while processes of a killed server still hold its memory; it is tried again then.
    fn run_if_ended(&self) {
        let mut server = self.server.lock();
        if let Some(running) = server.as_mut()
            && running.try_wait().expect("a child can be looked at").is_none()
        {
            return;
        }
        let log = OpenOptions::new().create(true).append(true).open(self.log_path());
        let log = log.expect("a log file");
        let mut command = self.command("postgres");
        command.arg("-D").arg(self.data()).arg("-p").arg(self.port.to_string());
        command.stdout(log.try_clone().expect("a second handle")).stderr(log);
        *server = Some(command.spawn().expect("postgres starts"));
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.bin.join(program));
        command
            .current_dir(self.directory.path())
            .env("LC_ALL", "C")
            .stdin(Stdio::null());
        self.account.lend_to(&mut command);
        command
    }

    fn data(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    fn aside(&self) -> PathBuf {
        self.directory.path().join("aside")
    }

    fn log_path(&self) -> PathBuf {
        self.directory.path().join("server.log")
    }

    fn url(&self) -> String {
        format!("postgresql://postgres@127.0.0.1:{}/postgres", self.port)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let start = log.ceil_char_boundary(log.len().saturating_sub(2_000));
            eprintln!("the private PostgreSQL wrote:\n{}", &log[start..]);
        }
        if let Some(mut server) = self.server.lock().take() {
            kill_family(&mut server);
        }
    }
}

fn programs() -> PathBuf {
    let Some(bin) = std::env::var_os("OV_PG_BIN") else {
        panic!("OV_PG_BIN is not set; run: eval \"$(scripts/services.sh up postgres)\"");
    };
    bin.into()
}

/// Copies a directory with its owners and modes.
fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp")
        .arg("-Rp")
        .arg(from)
        .arg(to)
        .output()
        .expect("the cp program runs");
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
}
