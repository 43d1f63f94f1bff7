//! `openvibe-events dev` as a stranger starts it: no configuration, the tour, and everything gone at the end.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Output, Stdio},
    time::Duration,
};

use tokio::process::{Child, Command};
use ulid::Ulid;

use super::support::wait::{SOON, eventually, within};

/// The tour takes about eight seconds on a quiet machine.
const TOUR_MAX: Duration = Duration::from_secs(120);

/// A directory of its own, open to the account that runs the database; removed at the end.
pub(super) struct Data(PathBuf);

impl Data {
    pub(super) fn new() -> Self {
        let path = std::env::temp_dir().join(format!("ov-dev-{}", Ulid::generate()));
        fs::create_dir(&path).expect("a directory");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("open to all");
        Self(path)
    }

    /// `dev` on any free ports, without the colours and the settings of whoever runs the tests.
    pub(super) fn dev(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_openvibe-events"));
        command
            .arg("dev")
            .arg("--data")
            .arg(&self.0)
            .args(["--port", "0"])
            .args(args);
        command.env_remove("NODE_ENV").env_remove("EVENTS_ENV");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    /// The process ids that the database and the service have written down.
    fn pids(&self) -> Vec<String> {
        ["postgres/cluster/postmaster.pid", "service.pid"]
            .iter()
            .filter_map(|name| fs::read_to_string(self.0.join(name)).ok())
            .filter_map(|text| text.lines().next().map(|pid| pid.trim().to_owned()))
            .collect()
    }
}

impl Drop for Data {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

fn text(output: &Output) -> String {
    let both = [output.stdout.as_slice(), &output.stderr].concat();
    String::from_utf8_lossy(&both).into_owned()
}

async fn lives(pid: &str) -> bool {
    let asked = Command::new("sh")
        .args(["-c", "kill -0 \"$1\" 2>&1", "sh", pid])
        .output()
        .await;
    asked.expect("a shell").status.success()
}

async fn ended(child: Child) -> Output {
    within("the end of dev", TOUR_MAX, child.wait_with_output())
        .await
        .expect("its output")
}

#[tokio::test]
async fn the_tour_holds_all_it_promises_and_leaves_nothing_running() {
    let data = Data::new();
    // A setting of the tester's that would spoil the tour, were it inherited.
    let child = data
        .dev(&["--demo", "--once"])
        .env("EVENTS_WORKER", "off")
        .spawn()
        .expect("it starts");
    let output = ended(child).await;
    let told = text(&output);
    assert!(output.status.success(), "{told}");
    for line in [
        "published  15",
        "delivered  15",
        "retried    4",
        "replayed   1",
        "lost       0",
    ] {
        assert!(told.contains(line), "{line} is missing from\n{told}");
    }
    assert!(!told.contains('\u{1b}'), "colour goes to terminals only:\n{told}");
    for pid in data.pids() {
        assert!(!lives(&pid).await, "process {pid} was left running");
    }
}

#[tokio::test]
async fn a_tour_whose_promise_does_not_hold_fails() {
    let data = Data::new();
    let child = data.dev(&["--demo", "--once"]).spawn().expect("it starts");
    // Without its database no service can keep its word.
    let mark = data.0.join("service.pid");
    eventually("the service to start", TOUR_MAX, async || mark.exists()).await;
    let postmaster = data.pids().into_iter().next().expect("a database");
    let killed = Command::new("sh")
        .args(["-c", "kill -9 \"$1\"", "sh", &postmaster])
        .status()
        .await;
    assert!(killed.expect("a shell").success());
    let output = ended(child).await;
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(
        !text(&output).contains("every published event has arrived"),
        "{}",
        text(&output)
    );
}

/// Starts `dev`, sends the signal once the service runs, and answers its end. Nothing may be left running.
async fn stopped_by(signal: &str, args: &[&str]) -> Output {
    let data = Data::new();
    let child = data.dev(args).spawn().expect("it starts");
    let mark = data.0.join("service.pid");
    eventually("the service to start", TOUR_MAX, async || mark.exists()).await;
    let pids = data.pids();
    assert_eq!(pids.len(), 2, "a database and a service");
    let own = child.id().expect("it runs").to_string();
    let asked = Command::new("sh")
        .args(["-c", "kill \"-$1\" \"$2\"", "sh", signal, &own])
        .status()
        .await;
    assert!(asked.expect("a shell").success());
    let output = ended(child).await;
    for pid in pids {
        eventually("everything to end", SOON, async || !lives(&pid).await).await;
    }
    output
}

#[tokio::test]
async fn sigterm_and_a_closed_terminal_stop_the_service_and_its_database() {
    for signal in ["TERM", "HUP"] {
        let output = stopped_by(signal, &[]).await;
        assert!(output.status.success(), "{signal}: {}", text(&output));
    }
}

#[tokio::test]
async fn a_tour_that_is_stopped_did_not_happen() {
    let output = stopped_by("TERM", &["--demo", "--once"]).await;
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(
        text(&output).contains("before the end of the tour"),
        "{}",
        text(&output)
    );
}

#[tokio::test]
async fn production_gets_no_issuer() {
    for name in ["EVENTS_ENV", "NODE_ENV"] {
        let data = Data::new();
        let child = data.dev(&[]).env(name, "production").spawn().expect("it starts");
        let output = ended(child).await;
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output).contains("never runs in production"), "{}", text(&output));
        assert_eq!(
            fs::read_dir(&data.0).expect("a directory").count(),
            0,
            "nothing was made"
        );
    }
}
