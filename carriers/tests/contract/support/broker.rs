//! A broker of a test's own, which it may kill, stall and start again.

use std::{
    fs,
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU16, Ordering::Relaxed},
    time::Duration,
};

use parking_lot::Mutex;

use super::wait::{SOON, eventually};

/// The password of the one user in the shipped configurations.
pub(crate) const PASSWORD: &str = "of-a-test";

/// The user of Valkey that may do anything, for the test itself.
const ADMIN: &str = "user admin on >admin ~* &* +@all\n";

/// A running broker. It ends, with its data, when the value is dropped.
#[derive(Debug)]
pub(crate) struct Broker {
    program: String,
    arguments: Vec<String>,
    directory: PathBuf,
    port: u16,
    child: Mutex<Option<Child>>,
}

impl Broker {
    /// NATS with the shipped configuration.
    pub(crate) async fn nats() -> Self {
        Self::nats_with(&shipped("nats/nats-server.conf")).await
    }

    /// NATS with this configuration; its address and store are the test's.
    pub(crate) async fn nats_with(configuration: &str) -> Self {
        let (directory, port) = place("nats");
        let file = directory.join("nats-server.conf");
        let store = directory.join("store");
        fs::write(&file, configuration.replace("/var/lib/nats", text(&store))).expect("a file of its own");
        let port_text = port.to_string();
        let mut arguments = vec!["-c", text(&file), "-a", "127.0.0.1", "-p", &port_text];
        if !configuration.contains("store_dir") {
            arguments.extend(["-sd", text(&store)]);
        }
        Self::start("OV_NATS_SERVER", "nats", &arguments, directory.clone(), port).await
    }

    /// Valkey with the shipped users, and one more for the test itself.
    pub(crate) async fn valkey() -> Self {
        let users = shipped("valkey/users.acl").replace("CHANGE-ME", PASSWORD) + ADMIN;
        let (directory, port) = place("valkey");
        let file = directory.join("users.acl");
        fs::write(&file, users).expect("a file of its own");
        let own = directory.clone();
        let arguments = [
            "--bind",
            "127.0.0.1",
            "--port",
            &port.to_string(),
            "--dir",
            text(&own),
            "--save",
            "",
            "--appendonly",
            "no",
            "--aclfile",
            text(&file),
        ];
        Self::start("OV_VALKEY_SERVER", "valkey", &arguments, directory, port).await
    }

    async fn start(variable: &str, service: &str, arguments: &[&str], directory: PathBuf, port: u16) -> Self {
        let broker = Self {
            program: required(variable, service),
            arguments: arguments.iter().map(|&argument| argument.to_owned()).collect(),
            directory,
            port,
            child: Mutex::new(None),
        };
        broker.revive().await;
        broker
    }

    /// `host:port`.
    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Starts the server, on the same port and data.
    pub(crate) async fn revive(&self) {
        let log = fs::File::create(self.directory.join("server.log")).expect("a log");
        let child = Command::new(&self.program)
            .args(&self.arguments)
            .env("EVENTS_NATS_PASSWORD", PASSWORD)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a log"))
            .stderr(log)
            .spawn();
        *self.child.lock() = Some(child.unwrap_or_else(|error| panic!("{}: {error}", self.program)));
        eventually("the broker answers", SOON, async || {
            TcpStream::connect(self.address()).map(drop).map_err(|error| {
                let log = fs::read_to_string(self.directory.join("server.log")).unwrap_or_default();
                format!("{error}\n{log}")
            })
        })
        .await;
    }

    /// Kills the server, as a crash does.
    pub(crate) fn kill(&self) {
        if let Some(mut child) = self.child.lock().take() {
            child.kill().expect("a running server");
            child.wait().expect("a killed server ends");
        }
    }

    /// Stops the process; its sockets stay open.
    pub(crate) fn stall(&self) {
        self.signal("STOP");
    }

    /// Lets a stalled process go on.
    pub(crate) fn resume(&self) {
        self.signal("CONT");
    }

    /// Gives NATS another configuration while it runs.
    pub(crate) fn reload(&self, configuration: &str) {
        fs::write(self.directory.join("nats-server.conf"), configuration).expect("its file");
        self.signal("HUP");
    }

    fn signal(&self, name: &str) {
        let child = self.child.lock();
        let id = child.as_ref().expect("a running server").id();
        let done = Command::new("kill")
            .arg(format!("-{name}"))
            .arg(id.to_string())
            .status();
        assert!(done.is_ok_and(|status| status.success()), "kill -{name} {id}");
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.kill();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// A file of `deploy/`, for the tests of the crate and for those of the service.
fn shipped(name: &str) -> String {
    let mut folders = Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .map(|folder| folder.join("deploy"));
    let deploy = folders
        .find(|folder| folder.is_dir())
        .expect("deploy/ of the repository");
    fs::read_to_string(deploy.join(name)).expect("a shipped configuration")
}

/// What the environment says; without it the test fails with the command that provides it.
#[expect(clippy::disallowed_methods, reason = "tests are told where their servers are")]
pub(crate) fn required(variable: &str, service: &str) -> String {
    std::env::var(variable)
        .unwrap_or_else(|_| panic!("{variable} is not set; run: eval \"$(scripts/services.sh up {service})\""))
}

/// A directory and a port of the test's own. Outgoing connections never take ports of this range.
fn place(name: &str) -> (PathBuf, u16) {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let own = u16::try_from(std::process::id() % 8000).expect("below 8000");
    loop {
        let port = 11_000 + (own + NEXT.fetch_add(1, Relaxed) * 37) % 8000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            let directory = std::env::temp_dir().join(format!("ov-carriers-{name}-{}-{port}", std::process::id()));
            fs::create_dir_all(&directory).expect("a directory");
            return (directory, port);
        }
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are text")
}

/// Long enough for a carrier to notice whatever happened to its broker.
pub(crate) const NOTICED: Duration = Duration::from_secs(10);
