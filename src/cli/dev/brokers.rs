//! The brokers of a tour: those that the environment names, or else programs of this machine that run as children and may be
//! killed.

use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::Instant;

use super::cluster::{command_line, private_file, tail};

/// How long a broker may take until it accepts connections.
const START_MAX: Duration = Duration::from_secs(15);

/// Wait between two looks at a broker that starts or ends.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Ports tried when somebody else takes one between the choice and the start.
const PORTS_MAX: u32 = 3;

/// Why a broker does not run.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// A program was named and is of no use.
    #[error("{variable}={program} is no {needs} that runs here; correct it, or unset it to go without", needs = .kind.needs(), variable = .kind.program_variable())]
    Named {
        /// Which broker.
        kind: Kind,
        /// What was named.
        program: String,
    },
    /// It ended while it was starting, or never accepted a connection.
    #[error(
        "{} did not start ({how}). Name another program in {}. Its log {} ends:\n{}",
        .kind.title(), .kind.program_variable(), .log.display(), tail(.log)
    )]
    Start {
        /// Which broker.
        kind: Kind,
        /// How it ended, or that it did not answer.
        how: String,
        /// Its log.
        log: PathBuf,
    },
    /// Its process cannot be started, watched or ended, or its directory not be used.
    #[error("{} cannot be run: {source}", .kind.title())]
    System {
        /// Which broker.
        kind: Kind,
        /// Why.
        source: io::Error,
    },
}

/// A broker that carriers of the service ring through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// For `valkey-v1`.
    Valkey,
    /// For `nats-v1` and `nats-js-v1`.
    Nats,
}

/// A broker of the tour.
#[derive(Debug)]
pub(super) struct Broker {
    pub(super) kind: Kind,
    /// Our child; `None` for one that the environment names.
    own: Option<Own>,
}

#[derive(Debug)]
struct Own {
    program: PathBuf,
    port: u16,
    /// Its data and its log.
    home: PathBuf,
    child: Child,
}

/// All brokers of a tour.
#[derive(Debug, Default)]
pub(super) struct Brokers(pub(super) Vec<Broker>);

impl Kind {
    const ALL: [Self; 2] = [Self::Valkey, Self::Nats];

    /// Its name.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Valkey => "Valkey",
            Self::Nats => "NATS",
        }
    }

    /// The variable that names one to the service.
    pub(super) fn url_variable(self) -> &'static str {
        match self {
            Self::Valkey => "VALKEY_URL",
            Self::Nats => "NATS_URL",
        }
    }

    /// The variables that the service reads beside that one.
    fn other_variables(self) -> &'static [&'static str] {
        match self {
            Self::Valkey => &["VALKEY_PREFIX"],
            Self::Nats => &["NATS_SUBJECT_PREFIX", "NATS_JETSTREAM", "NATS_STREAM"],
        }
    }

    /// The variable that names its program.
    fn program_variable(self) -> &'static str {
        match self {
            Self::Valkey => "OV_VALKEY_SERVER",
            Self::Nats => "OV_NATS_SERVER",
        }
    }

    fn program(self) -> &'static str {
        match self {
            Self::Valkey => "valkey-server",
            Self::Nats => "nats-server",
        }
    }

    /// The oldest version that the carriers work with.
    fn oldest(self) -> (u32, u32) {
        match self {
            Self::Valkey => (8, 0),
            Self::Nats => (2, 10),
        }
    }

    fn needs(self) -> &'static str {
        match self {
            Self::Valkey => "Valkey 8 or newer",
            Self::Nats => "NATS 2.10 or newer",
        }
    }

    fn scheme(self) -> &'static str {
        match self {
            Self::Valkey => "redis",
            Self::Nats => "nats",
        }
    }

    fn arguments(self, port: u16, data: &Path) -> Vec<String> {
        let (port, data) = (port.to_string(), data.display().to_string());
        let words: &[&str] = match self {
            Self::Valkey => &[
                "--bind",
                "127.0.0.1",
                "--port",
                &port,
                "--dir",
                &data,
                "--save",
                "",
                "--appendonly",
                "no",
                "--set-proc-title",
                "no",
            ],
            Self::Nats => &["-js", "-a", "127.0.0.1", "-p", &port, "-sd", &data],
        };
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    fn system(self) -> impl Fn(io::Error) -> BrokerError {
        move |source| BrokerError::System { kind: self, source }
    }
}

impl Brokers {
    /// Takes the brokers that `get` names, and starts the others whose programs are here, with their data in `data`.
    ///
    /// # Errors
    ///
    /// A program that was named is of no use, or does not start.
    pub(super) async fn start(data: &Path, get: &dyn Fn(&str) -> Option<String>) -> Result<Self, BrokerError> {
        let mut brokers = Vec::new();
        for kind in Kind::ALL {
            let home = data.join(kind.program());
            end_earlier(kind, &home).await?;
            if given(get, kind.url_variable()).is_some() {
                brokers.push(Broker { kind, own: None });
            } else if let Some(program) = find(kind, get)? {
                let own = Some(Own::start(kind, program, home).await?);
                brokers.push(Broker { kind, own });
            }
        }
        Ok(Self(brokers))
    }

    /// What the service is told of them: of ours the address, of others whatever `get` holds.
    pub(super) fn settings(&self, get: &dyn Fn(&str) -> Option<String>) -> Vec<(&'static str, String)> {
        let mut settings = Vec::new();
        for broker in &self.0 {
            let kind = broker.kind;
            match &broker.own {
                Some(own) => {
                    let url = format!("{}://127.0.0.1:{}", kind.scheme(), own.port);
                    settings.push((kind.url_variable(), url));
                }
                None => {
                    let names = [kind.url_variable()]
                        .into_iter()
                        .chain(kind.other_variables().iter().copied());
                    settings.extend(names.filter_map(|name| Some((name, given(get, name)?))));
                }
            }
        }
        settings
    }

    /// Ends those that were started here.
    pub(super) async fn stop(&mut self) {
        for broker in &mut self.0 {
            // One that has ended already is what is wanted.
            broker.kill().await.ok();
        }
    }
}

impl Broker {
    /// What to tell of it at the start.
    pub(super) fn told(&self) -> String {
        let title = self.kind.title();
        match &self.own {
            Some(own) => format!("{title} on 127.0.0.1:{}, started for the tour", own.port),
            None => format!("{title}, the one that {} names", self.kind.url_variable()),
        }
    }

    /// Whether it was started here and may be killed.
    pub(super) fn is_ours(&self) -> bool {
        self.own.is_some()
    }

    /// The process id, where it is ours and runs.
    pub(super) fn pid(&self) -> Option<u32> {
        self.own.as_ref()?.child.id()
    }

    /// Ends the process at once, as `kill -9` does. One that is not ours is left alone.
    ///
    /// # Errors
    ///
    /// The process cannot be ended.
    pub(super) async fn kill(&mut self) -> Result<(), BrokerError> {
        if let Some(own) = &mut self.own {
            own.child.kill().await.map_err(self.kind.system())?;
        }
        Ok(())
    }

    /// Starts it again where it was.
    ///
    /// # Errors
    ///
    /// It does not start.
    pub(super) async fn restart(&mut self) -> Result<(), BrokerError> {
        if let Some(own) = &mut self.own {
            own.child = run(self.kind, &own.program, own.port, &own.home).await?;
        }
        Ok(())
    }

    /// Where to look when it does not do what it should.
    pub(super) fn remedy(&self) -> String {
        match &self.own {
            Some(own) => format!("look into its log {}", log(&own.home).display()),
            None => {
                let name = self.kind.url_variable();
                format!("look at the broker that {name} names, or unset {name} to go without")
            }
        }
    }
}

impl Own {
    async fn start(kind: Kind, program: PathBuf, home: PathBuf) -> Result<Self, BrokerError> {
        fs::create_dir_all(home.join("data")).map_err(kind.system())?;
        let home = home.canonicalize().map_err(kind.system())?;
        let mut tried = 1;
        loop {
            let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
            let port = free.map_err(kind.system())?.port();
            match run(kind, &program, port, &home).await {
                Err(BrokerError::Start { .. }) if tried < PORTS_MAX => tried += 1,
                child => {
                    return Ok(Self {
                        child: child?,
                        program,
                        port,
                        home,
                    });
                }
            }
        }
    }
}

/// Runs the program until it accepts connections.
async fn run(kind: Kind, program: &Path, port: u16, home: &Path) -> Result<Child, BrokerError> {
    let log = log(home);
    let out: File = private_file(&log).map_err(kind.system())?;
    let mut command = Command::new(program);
    // A group of its own: a Ctrl-C in the terminal is for us, and we stop the service first.
    command
        .args(kind.arguments(port, &home.join("data")))
        .stdin(Stdio::null())
        .stdout(out.try_clone().map_err(kind.system())?)
        .stderr(out)
        .process_group(0)
        .kill_on_drop(true);
    let mut child = command.spawn().map_err(kind.system())?;
    fs::write(pid_file(home), child.id().unwrap_or(0).to_string()).map_err(kind.system())?;
    let started = Instant::now();
    loop {
        let ended: Option<ExitStatus> = child.try_wait().map_err(kind.system())?;
        if let Some(status) = ended {
            let how = status.to_string();
            return Err(BrokerError::Start { kind, how, log });
        }
        if TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.is_ok() {
            return Ok(child);
        }
        if started.elapsed() > START_MAX {
            let how = format!("no connection within {} s", START_MAX.as_secs());
            return Err(BrokerError::Start { kind, how, log });
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Ends a broker that an earlier run left behind when it was killed itself.
async fn end_earlier(kind: Kind, home: &Path) -> Result<(), BrokerError> {
    let Ok(home) = home.canonicalize() else {
        return Ok(()); // There was no earlier run.
    };
    let recorded = fs::read_to_string(pid_file(&home));
    let Some(pid) = recorded.ok().and_then(|text| text.parse::<u32>().ok()) else {
        return Ok(());
    };
    // The number may belong to another program by now; nobody but ours works in that directory.
    let ours = home.join("data").display().to_string();
    let started = Instant::now();
    while command_line(pid).await.contains(&ours) {
        let killed = Command::new("sh")
            .args(["-c", "kill -KILL \"$1\"", "sh", &pid.to_string()])
            .status()
            .await;
        killed.map_err(kind.system())?;
        if started.elapsed() > START_MAX {
            let source = io::Error::other(format!("process {pid} of an earlier run does not end; end it by hand"));
            return Err(BrokerError::System { kind, source });
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    Ok(())
}

fn log(home: &Path) -> PathBuf {
    home.join("server.log")
}

fn pid_file(home: &Path) -> PathBuf {
    home.join("server.pid")
}

/// What a variable holds; empty counts as unset.
fn given(get: &dyn Fn(&str) -> Option<String>, name: &str) -> Option<String> {
    get(name)
        .map(|value| value.trim().to_owned())
        .filter(|value| !value.is_empty())
}

/// The program that is named, or else the first of `PATH` that is new enough.
fn find(kind: Kind, get: &dyn Fn(&str) -> Option<String>) -> Result<Option<PathBuf>, BrokerError> {
    if let Some(program) = given(get, kind.program_variable()) {
        let path = PathBuf::from(&program);
        return if runs(kind, &path) {
            Ok(Some(path))
        } else {
            Err(BrokerError::Named { kind, program })
        };
    }
    let path = get("PATH").unwrap_or_default();
    let entries = path.split(':').filter(|entry| !entry.is_empty());
    let mut programs = entries.map(|entry| Path::new(entry).join(kind.program()));
    Ok(programs.find(|program| program.is_file() && runs(kind, program)))
}

fn runs(kind: Kind, program: &Path) -> bool {
    let answer = std::process::Command::new(program).arg("--version").output();
    let version = answer.ok().and_then(|answer| {
        let text = String::from_utf8_lossy(&answer.stdout).into_owned();
        version(&text)
    });
    version.is_some_and(|version| version >= kind.oldest())
}

/// The version in an answer such as `Valkey server v=8.1.3 sha=…` or `nats-server: v2.11.0`.
fn version(answer: &str) -> Option<(u32, u32)> {
    let word = answer.split_whitespace().find_map(|word| {
        let digits = word.strip_prefix("v=").or_else(|| word.strip_prefix('v'))?;
        digits
            .starts_with(|first: char| first.is_ascii_digit())
            .then_some(digits)
    })?;
    let mut numbers = word.split('.').map(|number| {
        let end = number.find(|own: char| !own.is_ascii_digit()).unwrap_or(number.len());
        number[..end].parse().ok()
    });
    Some((numbers.next()??, numbers.next().flatten().unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_the_programs_tell_them() {
        assert_eq!(
            version("Valkey server v=8.1.3 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64 build=1"),
            Some((8, 1))
        );
        assert_eq!(version("nats-server: v2.11.0-RC.1\n"), Some((2, 11)));
        assert_eq!(version("Redis server v=7.2.4 sha=0"), Some((7, 2)));
        assert_eq!(version("very well, no version"), None);
    }

    #[tokio::test]
    async fn a_broker_that_an_earlier_run_left_behind_is_ended_and_nobody_else() {
        let root = std::env::temp_dir().join(format!("ov-dev-brokers-{}", ulid::Ulid::generate()));
        let home = root.join("valkey-server");
        fs::create_dir_all(home.join("data")).expect("a directory");
        let home = home.canonicalize().expect("it is there");
        let started = |argument: &Path| {
            let mut command = Command::new("sh");
            // Two commands, or the shell would become the first one and forget what it was called with.
            command.args(["-c", "sleep 60; true", "sh"]).arg(argument);
            command.process_group(0).kill_on_drop(true).spawn().expect("a shell")
        };
        let (mut ours, mut other) = (started(&home.join("data")), started(&root.join("elsewhere")));
        for child in [&other, &ours] {
            fs::write(pid_file(&home), child.id().expect("it runs").to_string()).expect("a file");
            end_earlier(Kind::Valkey, &home).await.expect("it ends");
        }
        assert!(ours.wait().await.expect("it ended").code().is_none(), "by a signal");
        assert!(
            other.try_wait().expect("a look").is_none(),
            "the number had been given to another"
        );
        fs::remove_dir_all(root).expect("clean up");
    }

    #[test]
    fn a_given_broker_is_passed_on_with_its_names_and_a_bad_program_is_named() {
        let brokers = Brokers(vec![Broker {
            kind: Kind::Nats,
            own: None,
        }]);
        let get = |name: &str| match name {
            "NATS_URL" => Some("nats://u:p@broker:4222".to_owned()),
            "NATS_STREAM" => Some("MINE".to_owned()),
            "VALKEY_PREFIX" => Some("none:".to_owned()),
            "OV_VALKEY_SERVER" => Some("/nowhere/valkey".to_owned()),
            _ => None,
        };
        assert_eq!(
            brokers.settings(&get),
            [
                ("NATS_URL", "nats://u:p@broker:4222".to_owned()),
                ("NATS_STREAM", "MINE".to_owned())
            ]
        );
        assert!(!brokers.0[0].told().contains("u:p"), "{}", brokers.0[0].told());
        let error = find(Kind::Valkey, &get).expect_err("no such program").to_string();
        assert!(
            error.starts_with("OV_VALKEY_SERVER=/nowhere/valkey is no Valkey 8"),
            "{error}"
        );
        assert!(find(Kind::Nats, &|_| None).expect("nothing named").is_none());
    }
}
