//! A network of a test's own, in which addresses of the public internet are this machine's.
//!
//! The test runs once more in a process of its own inside a network namespace, where nothing leads outside. Only the
//! database is reached from there, through a socket in the file system that is forwarded from outside.

use std::{
    path::Path,
    process::{Output, Stdio},
    time::Duration,
};

use tokio::{
    net::{TcpStream, UnixListener},
    process::Command,
};
use tokio_util::task::AbortOnDropHandle;
use url::Url;

use super::wait::within;

/// An address of the public internet, and this machine's own in here.
pub(crate) const PUBLIC: &str = "93.184.216.34";
/// Another one.
pub(crate) const PUBLIC_TOO: &str = "93.184.216.35";
/// One of IPv6.
pub(crate) const PUBLIC_V6: &str = "2606:2800:220:1::34";
/// An address of a private network, and this machine's own in here.
pub(crate) const PRIVATE: &str = "10.20.30.40";

/// Says to a process that it is the one inside.
const INSIDE: &str = "OV_TEST_INSIDE_NETWORK";
const DATABASE: &str = "OV_TEST_PG_URL";
const DEADLINE: Duration = Duration::from_secs(120);

/// Whether this process is the one inside. Where it is not, the test of this name has been run inside and has passed.
pub(crate) async fn inside(test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let directory = std::env::temp_dir().join(format!("ov-it-net-{}", ulid::Ulid::generate()));
    std::fs::create_dir(&directory).expect("a new directory");
    let ended = within("the test inside ends", DEADLINE, run(test, &directory)).await;
    std::fs::remove_dir_all(&directory).ok();
    assert!(
        ended.status.success(),
        "inside a network of its own (which takes root, `unshare` and `ip`) the test ended with {}:\n{}\n{}",
        ended.status,
        String::from_utf8_lossy(&ended.stdout),
        String::from_utf8_lossy(&ended.stderr)
    );
    let tests = String::from_utf8_lossy(&ended.stdout).into_owned();
    assert!(tests.contains("1 passed"), "no test of the name {test} ran:\n{tests}");
    false
}

async fn run(test: &str, directory: &Path) -> Output {
    let set_up = format!(
        "ip link set lo up && ip address add {PUBLIC}/32 dev lo && ip address add {PUBLIC_TOO}/32 dev lo && \
         ip address add {PRIVATE}/32 dev lo && ip address add {PUBLIC_V6}/128 dev lo nodad && exec \"$@\""
    );
    let (url, _forwarder) = forward(directory);
    let mut command = Command::new("unshare");
    command
        .args(["--net", "--mount", "sh", "-c", &set_up, "sh"])
        .arg(std::env::current_exe().expect("this program has a path"))
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .env(DATABASE, url)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    command.output().await.expect("the program `unshare` (of util-linux)")
}

/// A URL by which the database of the tests is reached without any network, as long as the handle lives.
fn forward(directory: &Path) -> (String, AbortOnDropHandle<()>) {
    let mut url = std::env::var(DATABASE)
        .ok()
        .and_then(|url| Url::parse(&url).ok())
        .unwrap_or_else(|| panic!("{DATABASE} is not set; run: eval \"$(scripts/services.sh up postgres)\""));
    let server = format!("{}:{}", url.host_str().expect("a host"), url.port().unwrap_or(5432));
    let listener = UnixListener::bind(directory.join(".s.PGSQL.5432")).expect("a socket in a new directory");
    url.query_pairs_mut()
        .append_pair("host", &directory.display().to_string())
        .append_pair("port", "5432");
    let forwarder = tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            let server = server.clone();
            tokio::spawn(async move {
                let mut far = TcpStream::connect(server).await?;
                tokio::io::copy_bidirectional(&mut near, &mut far).await
            });
        }
    });
    (url.into(), AbortOnDropHandle::new(forwarder))
}
