//! `openvibe-events dev` as a stranger starts it: no configuration, the tour, and everything gone at the end.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Output, Stdio},
    time::Duration,
};

use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    net::TcpStream,
    process::{Child, Command},
};
use ulid::Ulid;

use super::fabric_world::url;
use super::support::broker::{Broker, PASSWORD};
use super::support::client::Client;
use super::support::wait::{SOON, eventually, within};

/// The tour takes about eight seconds on a quiet machine.
const TOUR_MAX: Duration = Duration::from_secs(120);

/// Where the processes of a run write down their numbers.
const PID_FILES: [&str; 4] = [
    "postgres/cluster/postmaster.pid",
    "service.pid",
    "valkey-server/server.pid",
    "nats-server/server.pid",
];

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
        for name in ["NODE_ENV", "EVENTS_ENV", "VALKEY_URL", "NATS_URL"] {
            command.env_remove(name);
        }
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    /// `dev` without brokers: none is named, and no program is to be found.
    fn dev_alone(&self, args: &[&str]) -> Command {
        let bin = self.0.join("bin");
        if fs::create_dir(&bin).is_ok() {
            // The one program that `dev` itself looks for on PATH.
            std::os::unix::fs::symlink("/bin/sh", bin.join("sh")).expect("a link");
        }
        let mut command = self.dev(args);
        command
            .env("PATH", bin)
            .env_remove("OV_VALKEY_SERVER")
            .env_remove("OV_NATS_SERVER");
        command
    }

    /// The process ids that the database, the service and the brokers have written down.
    fn pids(&self) -> Vec<String> {
        PID_FILES
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
    // The brokers are programs of `scripts/services.sh`; the tour runs them, kills them and starts them again.
    in_order(
        &told,
        &[
            "broker     Valkey on 127.0.0.1:",
            "broker     NATS on 127.0.0.1:",
            "selected=valkey-v1",
            "✓ its delivery is on valkey-v1",
            "kill -9",
            "selected=pg-v1",
            "valkey-v1   left out: not connected (valkey-v1)",
            "✓ its delivery is on pg-v1: not connected (valkey-v1)",
            "Valkey runs again",
            "selected=valkey-v1",
            "✓ its delivery is on valkey-v1",
            "✓ all 4 events arrived",
            "carrier_class=STREAM",
            "selected=nats-js-v1",
            "nats-js-v1  left out: not connected (nats-js-v1)",
            "NATS runs again",
            "✓ its delivery is on nats-js-v1",
            "✓ all 4 events arrived",
            "connected user",
            "✓ the stream that resumes gets both events that came meanwhile, in order, and no gap",
            "✓ her ticket opens no second stream; her browser asks for a new one",
            "published  23",
            "delivered  23",
            "retried    4",
            "replayed   1",
            "lost       0",
        ],
    );
    assert!(!told.contains('\u{1b}'), "colour goes to terminals only:\n{told}");
    let pids = data.pids();
    assert_eq!(pids.len(), 3, "the database takes its own file away: {pids:?}");
    for pid in pids {
        assert!(!lives(&pid).await, "process {pid} was left running");
    }
}

/// Holds when the lines are there in this order.
#[track_caller]
fn in_order(told: &str, lines: &[&str]) {
    let mut rest = told;
    for line in lines {
        let found = rest.find(line);
        let at = found.unwrap_or_else(|| panic!("{line:?} is missing, or in another place, in\n{told}"));
        rest = &rest[at + line.len()..];
    }
}

/// Runs `dev`, switches a carrier off as the lines it prints allow, and stops it.
async fn switched_off(mut dev: Command, carrier: &str) {
    let mut child = dev.spawn().expect("it starts");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let told = async {
        let (mut base, mut token): (Option<String>, Option<String>) = (None, None);
        loop {
            let line = lines.next_line().await.expect("text").expect("more lines");
            let rest = |start: &str| line.strip_prefix(start).map(|rest| rest.trim().to_owned());
            (base, token) = (base.or_else(|| rest("service ")), token.or_else(|| rest("TOKEN=")));
            if let (Some(base), Some(token)) = (&base, &token) {
                return (base.clone(), token.clone());
            }
        }
    };
    let (base, token) = within("the lines to paste", TOUR_MAX, told).await;
    let client = Client::new(&base);
    let switched = client
        .put(
            &format!("/api/v1/carriers/{carrier}"),
            Some(&token),
            &json!({ "disabled": true }),
        )
        .await;
    assert_eq!(switched.status, 200);
    let pid = child.id().expect("it runs").to_string();
    let asked = Command::new("sh")
        .args(["-c", "kill -TERM \"$1\"", "sh", &pid])
        .status()
        .await;
    assert!(asked.expect("a shell").success());
    // Read on, or it would wait for a reader at its end.
    let rest = async { while let Ok(Some(_)) = lines.next_line().await {} };
    within("the end of dev", TOUR_MAX, async { tokio::join!(rest, child.wait()) })
        .await
        .1
        .expect("it ends");
}

#[tokio::test]
async fn a_broker_that_is_given_is_switched_off_and_never_killed() {
    let (valkey, nats) = (Broker::valkey().await, Broker::nats().await);
    let data = Data::new();
    let given = |args: &[&str]| {
        let mut command = data.dev_alone(args);
        command
            .env("VALKEY_URL", url("redis", valkey.address()))
            .env("NATS_URL", url("nats", nats.address()));
        command
    };
    // What an operator switched off before is kept in the database; the tour must not wait for it in vain.
    switched_off(given(&[]), "valkey-v1").await;
    let child = given(&["--demo", "--once"]).spawn().expect("it starts");
    let output = ended(child).await;
    let told = text(&output);
    assert!(output.status.success(), "{told}");
    in_order(
        &told,
        &[
            "broker     Valkey, the one that VALKEY_URL names",
            "it was switched off by an operator; the tour needs it",
            "selected=valkey-v1",
            "this Valkey is yours, and nobody kills it",
            "valkey-v1   left out: disabled by an operator",
            "✓ its delivery is on pg-v1: disabled by an operator",
            "selected=valkey-v1",
            "✓ its delivery is on valkey-v1",
            "✓ all 4 events arrived",
            "this NATS is yours",
            "nats-js-v1  left out: disabled by an operator",
            "selected=nats-js-v1",
            "✓ all 4 events arrived",
            "published  23",
            "lost       0",
        ],
    );
    assert!(!told.contains(PASSWORD), "a password is shown:\n{told}");
    for broker in [&valkey, &nats] {
        let address = broker.address();
        TcpStream::connect(address).await.expect("it was left alone");
    }
}

#[tokio::test]
async fn without_brokers_the_tour_says_how_to_get_them_and_goes_on() {
    let data = Data::new();
    let child = data.dev_alone(&["--demo", "--once"]).spawn().expect("it starts");
    let output = ended(child).await;
    let told = text(&output);
    assert!(output.status.success(), "{told}");
    let left_out = told
        .lines()
        .find(|line| line.contains("left out, since no broker is here"));
    let left_out = left_out.expect("the line");
    for way in ["scripts/dev.sh", "valkey-server", "VALKEY_URL", "NATS_URL"] {
        assert!(left_out.contains(way), "{left_out}");
    }
    in_order(&told, &["published  15", "lost       0"]);
}

#[tokio::test]
async fn a_given_broker_that_does_not_answer_ends_the_tour_with_what_to_do() {
    let data = Data::new();
    let child = data
        .dev_alone(&["--demo", "--once"])
        .env("VALKEY_URL", "redis://127.0.0.1:1")
        .spawn()
        .expect("it starts");
    let output = ended(child).await;
    let told = text(&output);
    assert_eq!(output.status.code(), Some(1), "{told}");
    in_order(
        &told,
        &[
            "for work to be placed on valkey-v1",
            "says: not connected (valkey-v1)",
            "unset VALKEY_URL to go without",
        ],
    );
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
    assert!(pids.len() >= 2, "a database and a service, and in a tour brokers");
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
