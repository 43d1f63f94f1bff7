//! The service as a child process: this same binary with `dev-service`, its settings in its environment.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::process::{Child, Command};
use tokio::time::Instant;

use crate::config::{Config, ConfigErrors, process_variable, process_variable_names, variables};

use super::cluster::{command_line, tail};

/// What the binary is asked for: `serve` with pages for developers.
const COMMAND: &str = "dev-service";

/// How long a start may take, migrations included.
const READY_MAX: Duration = Duration::from_secs(60);

/// How long a stop may take before the process is killed: the service promises 10 s.
const STOP_MAX: Duration = Duration::from_secs(15);

/// Names the process of the service, below the data directory.
const PID_FILE: &str = "service.pid";

const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Why the service does not run.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The environment holds a mistake that the service would refuse.
    #[error(transparent)]
    Settings(#[from] ConfigErrors),
    /// It cannot be started or watched.
    #[error("the service cannot be started: {0}")]
    Start(#[from] io::Error),
    /// It ended by itself.
    #[error("the service ended ({status}).{log}")]
    Ended {
        /// How.
        status: ExitStatus,
        /// The end of its log, where it has one.
        log: String,
    },
    /// One of an earlier run does not stop.
    #[error("process {0}, the service of an earlier run, does not stop; end it by hand")]
    Earlier(u32),
    /// It never became ready.
    #[error("the service was not ready within {} s; /api/ready last said: {last}.{log}", READY_MAX.as_secs())]
    NotReady {
        /// The last answer, or why there was none.
        last: String,
        /// The end of its log, where it has one.
        log: String,
    },
}

/// Which variables of our own environment the service inherits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Inherit {
    /// All but those that name a database or an issuer.
    Most,
    /// None that the service knows, so that a tour is the same on every machine.
    Unknown,
}

/// What the service is started with.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    ours: BTreeMap<&'static str, String>,
    inherit: Inherit,
    pid_file: PathBuf,
    log: Option<PathBuf>,
}

/// A running service. Dropping it kills it.
#[derive(Debug)]
pub(super) struct Service {
    child: Child,
    base: String,
    log: Option<PathBuf>,
}

impl Settings {
    /// A service on `port` of 127.0.0.1, with the database of `database_url`, that believes `issuer_url` only, with `more`
    /// variables. What is known of it is kept in `data`. Its log goes to `log`, else to where ours goes.
    pub(super) fn new(
        data: &Path,
        port: u16,
        database_url: &str,
        issuer_url: &str,
        inherit: Inherit,
        more: Vec<(&'static str, String)>,
        log: Option<PathBuf>,
    ) -> Result<Self, ServiceError> {
        let mut ours = BTreeMap::from([
            ("EVENTS_ENV", "development".to_owned()),
            ("HOST", "127.0.0.1".to_owned()),
            ("PORT", port.to_string()),
            ("DATABASE_URL", database_url.to_owned()),
            ("OV_NETWORK_URL", issuer_url.to_owned()),
            ("OV_NETWORK_INTERNAL_URL", issuer_url.to_owned()),
            ("OV_NETWORK_ISSUER", issuer_url.to_owned()),
        ]);
        ours.extend(more);
        let settings = Self {
            ours,
            inherit,
            pid_file: data.join(PID_FILE),
            log,
        };
        Config::read(&|name| settings.get(name, &process_variable))?;
        Ok(settings)
    }

    /// What the service will find in `name`, with `outer` as our own environment.
    fn get(&self, name: &str, outer: &dyn Fn(&str) -> Option<String>) -> Option<String> {
        match self.ours.get(name) {
            Some(value) => Some(value.clone()),
            None if self.hides(name) => None,
            None => outer(name),
        }
    }

    fn hides(&self, name: &str) -> bool {
        match self.inherit {
            Inherit::Most => name.starts_with("DATABASE_") || name.starts_with("OV_NETWORK_"),
            Inherit::Unknown => variables::all().any(|variable| variable.name == name),
        }
    }

    fn base(&self) -> String {
        format!("http://127.0.0.1:{}", self.ours["PORT"])
    }
}

impl Service {
    /// Starts the service and awaits that it is ready.
    ///
    /// # Errors
    ///
    /// It ends, or is not ready in time.
    pub(super) async fn start(settings: &Settings, http: &reqwest::Client) -> Result<Self, ServiceError> {
        let mut command = Command::new(std::env::current_exe()?);
        // A group of its own: a Ctrl-C in the terminal is for us, and we stop the service before its database.
        command
            .arg(COMMAND)
            .stdin(Stdio::null())
            .process_group(0)
            .kill_on_drop(true);
        for name in process_variable_names().iter().filter(|name| settings.hides(name)) {
            command.env_remove(name);
        }
        command.envs(&settings.ours);
        if let Some(log) = &settings.log {
            command.env("NO_COLOR", "1");
            // Written on, not anew: a restart belongs to the same story.
            let out = File::options().create(true).append(true).open(log)?;
            command.stderr(out.try_clone()?).stdout(out);
        }
        let mut service = Self {
            child: command.spawn()?,
            base: settings.base(),
            log: settings.log.clone(),
        };
        fs::write(&settings.pid_file, service.pid().to_string())?;
        service.ready(http).await?;
        Ok(service)
    }

    /// Its origin.
    pub(super) fn base(&self) -> &str {
        &self.base
    }

    /// Its process id; 0 when it has ended.
    pub(super) fn pid(&self) -> u32 {
        self.child.id().unwrap_or(0)
    }

    /// Ends it at once, as `kill -9` does.
    pub(super) async fn kill(&mut self) -> io::Result<ExitStatus> {
        self.child.start_kill()?;
        self.child.wait().await
    }

    /// Asks it to stop, and kills it when it does not.
    pub(super) async fn stop(mut self) -> io::Result<ExitStatus> {
        // One that has ended has no id any more.
        if let Some(pid) = self.child.id()
            && terminate(pid).await
            && let Ok(ended) = tokio::time::timeout(STOP_MAX, self.child.wait()).await
        {
            return ended;
        }
        self.child.start_kill().ok();
        self.child.wait().await
    }

    /// Awaits its end, which nobody asked for.
    pub(super) async fn ended(&mut self) -> ServiceError {
        match self.child.wait().await {
            Ok(status) => ServiceError::Ended {
                status,
                log: self.log_end(),
            },
            Err(error) => ServiceError::Start(error),
        }
    }

    async fn ready(&mut self, http: &reqwest::Client) -> Result<(), ServiceError> {
        let (url, started) = (format!("{}/api/ready", self.base), Instant::now());
        loop {
            if let Some(status) = self.child.try_wait()? {
                let log = self.log_end();
                return Err(ServiceError::Ended { status, log });
            }
            let last = match http.get(&url).send().await {
                Ok(answer) if answer.status().is_success() => return Ok(()),
                Ok(answer) => format!("{} {}", answer.status(), answer.text().await.unwrap_or_default()),
                Err(error) => error.to_string(),
            };
            if started.elapsed() > READY_MAX {
                let log = self.log_end();
                return Err(ServiceError::NotReady { last, log });
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    fn log_end(&self) -> String {
        match &self.log {
            Some(log) => format!(" Its log {} ends:\n{}", log.display(), tail(log)),
            None => String::new(),
        }
    }
}

/// Stops a service that an earlier run left behind when it was killed: it would work on our database beside ours.
///
/// # Errors
///
/// It does not stop.
pub(super) async fn end_earlier(data: &Path, say: &dyn Fn(&str)) -> Result<(), ServiceError> {
    let Some(pid) = fs::read_to_string(data.join(PID_FILE))
        .ok()
        .and_then(|text| text.parse().ok())
    else {
        return Ok(());
    };
    let started = Instant::now();
    let mut asked = false;
    // The number may belong to another program by now.
    while is_service(&command_line(pid).await) {
        if !asked {
            say("stopping the service of an earlier run");
            terminate(pid).await;
            asked = true;
        }
        if started.elapsed() > STOP_MAX {
            return Err(ServiceError::Earlier(pid));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    Ok(())
}

fn is_service(command_line: &str) -> bool {
    let mut words = command_line
        .split(['\0', ' '])
        .map(str::trim)
        .filter(|word| !word.is_empty());
    let program = words.next().unwrap_or_default();
    program.ends_with("/openvibe-events") && words.next() == Some(COMMAND) && words.next().is_none()
}

/// Sends SIGTERM through the shell, the one way that every system has and that needs no unsafe code.
async fn terminate(pid: u32) -> bool {
    let asked = Command::new("sh")
        .args(["-c", "kill -TERM \"$1\"", "sh", &pid.to_string()])
        .status()
        .await;
    asked.is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(inherit: Inherit) -> Settings {
        let made = Settings::new(
            Path::new("/nowhere"),
            4310,
            "postgresql://u:p@127.0.0.1:1/d",
            "http://127.0.0.1:4311",
            inherit,
            vec![("VALKEY_URL", "redis://127.0.0.1:2".to_owned())],
            None,
        );
        made.expect("settings")
    }

    #[test]
    fn the_environment_lies_under_ours_but_names_no_database_and_no_issuer() {
        let outer = |name: &str| Some(format!("outer {name}"));
        let most = settings(Inherit::Most);
        assert_eq!(most.get("PORT", &outer).as_deref(), Some("4310"));
        assert_eq!(
            most.get("EVENTS_MAX_ATTEMPTS", &outer).as_deref(),
            Some("outer EVENTS_MAX_ATTEMPTS")
        );
        for hidden in ["DATABASE_DIRECT_URL", "OV_NETWORK_PUBLIC_KEY"] {
            assert_eq!(most.get(hidden, &outer), None, "{hidden}");
        }
        let unknown = settings(Inherit::Unknown);
        assert_eq!(unknown.get("EVENTS_MAX_ATTEMPTS", &outer), None);
        assert_eq!(unknown.get("HOME", &outer).as_deref(), Some("outer HOME"));
        assert_eq!(
            unknown.get("VALKEY_URL", &outer).as_deref(),
            Some("redis://127.0.0.1:2")
        );
    }

    #[test]
    fn the_service_would_start_with_them() {
        let settings = settings(Inherit::Unknown);
        let config = Config::read(&|name| settings.get(name, &|_| None)).expect("valid");
        assert_eq!(config.http.listen.to_string(), "127.0.0.1:4310");
        assert_eq!(config.identity.issuer, "http://127.0.0.1:4311");
        assert_eq!(config.identity.network_internal_url, "http://127.0.0.1:4311");
    }

    #[test]
    fn only_a_service_of_ours_is_taken_for_one() {
        assert!(is_service("/x/target/debug/openvibe-events\0dev-service\0"));
        assert!(is_service("/x/openvibe-events dev-service\n"));
        for other in [
            "",
            "/bin/vi\0dev-service\0",
            "/x/openvibe-events\0dev\0",
            "/x/openvibe-events\0serve\0",
            "/x/openvibe-events\0dev-service\0more\0",
        ] {
            assert!(!is_service(other), "{other:?}");
        }
    }
}
