//! Tests of the private cluster against real server programs.

use std::os::unix::fs::PermissionsExt;

use crate::config::process_variable;

use super::*;

/// A directory of its own under `/tmp`, reachable for the account that runs the server; removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        let path = std::env::temp_dir().join(format!("ov-dev-cluster-{}", ulid::Ulid::generate()));
        fs::create_dir(&path).expect("a directory");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("open to all");
        Self(path.canonicalize().expect("it exists"))
    }

    async fn start(&self) -> Result<Cluster, ClusterError> {
        Cluster::start(&self.0, &process_variable, &|_| {}).await
    }

    fn cluster(&self) -> PathBuf {
        self.0.join("postgres/cluster")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

fn postmaster_pid(scratch: &Scratch) -> Option<u32> {
    let mark = fs::read_to_string(scratch.cluster().join("postmaster.pid")).ok()?;
    mark.lines().next()?.trim().parse().ok()
}

#[tokio::test]
async fn a_cluster_is_made_once_keeps_its_port_and_is_stopped() {
    let scratch = Scratch::new();
    let first = scratch.start().await.expect("it starts");
    let (url, port) = (first.url(), first.port());
    assert!(Postgres::database_exists(&url).await.expect("it answers"));
    assert!(
        matches!(scratch.start().await, Err(ClusterError::InUse(_))),
        "one process at a time"
    );
    let secret = fs::metadata(scratch.0.join("postgres/password")).expect("a password");
    assert_eq!(secret.mode() & 0o077, 0, "nobody else may read the password");
    let stranger = url.replace(&first.password, "wrong");
    assert!(
        Postgres::database_exists(&stranger).await.is_err(),
        "a password is asked for"
    );
    first.stop().await.expect("it stops");
    assert_eq!(postmaster_pid(&scratch), None, "it has ended");

    let second = scratch.start().await.expect("it starts again");
    assert_eq!(
        (second.url(), second.port()),
        (url, port),
        "the same database on the same port"
    );
    second.stop().await.expect("it stops");
}

#[tokio::test]
async fn a_server_left_behind_is_stopped_and_a_dead_ones_mark_is_removed() {
    let scratch = Scratch::new();
    let mut left = scratch.start().await.expect("it starts");
    let pid = postmaster_pid(&scratch).expect("it runs");
    // As after a kill of the process that started it: the lock is free, the server lives.
    left._lock.unlock().expect("the lock is held");
    let next = scratch.start().await.expect("it takes over");
    assert_ne!(postmaster_pid(&scratch), Some(pid), "a server of its own");
    left.server.wait().await.expect("the earlier one has ended");

    // A crash: the mark stays, naming a process that is gone, or that is somebody else's by now.
    let Cluster { mut server, _lock, .. } = next;
    server.kill().await.expect("killed");
    drop(_lock);
    let mark = scratch.cluster().join("postmaster.pid");
    let text = fs::read_to_string(&mark).expect("the mark of a crash");
    let other = text.replacen(
        &text.lines().next().expect("a line").to_owned(),
        &std::process::id().to_string(),
        1,
    );
    fs::write(&mark, other).expect("rewritten");
    let recovered = scratch.start().await.expect("it recovers");
    recovered.stop().await.expect("it stops");
}

#[tokio::test]
async fn a_half_made_cluster_is_made_again() {
    let scratch = Scratch::new();
    let place = owned(
        scratch.0.join("postgres"),
        lent(&scratch.0).expect("an account").as_ref(),
    )
    .expect("made");
    fs::create_dir(place.join("cluster.part")).expect("a directory");
    fs::write(place.join("cluster.part/PG_VERSION"), "15\n").expect("half a cluster");
    fs::write(place.join("password"), "half").expect("an old password");
    let cluster = scratch.start().await.expect("it starts");
    cluster.stop().await.expect("it stops");
}

#[test]
fn a_directory_out_of_reach_is_replaced_by_one_that_is_owned() {
    let scratch = Scratch::new();
    let account = Account {
        name: "stranger".to_owned(),
        uid: 4_000_000,
        gid: 4_000_000,
    };
    fs::set_permissions(&scratch.0, fs::Permissions::from_mode(0o700)).expect("closed");
    let told = parking_lot::Mutex::new(Vec::new());
    let name = hex::encode(&Sha256::digest(scratch.0.join("postgres").as_os_str().as_encoded_bytes())[..8]);
    let substitute = PathBuf::from(format!("/var/tmp/openvibe-events-{name}"));
    fs::create_dir(&substitute).expect("somebody was here before");
    let refused = home(&scratch.0, Some(&account), &|line| told.lock().push(line.to_owned()));
    fs::remove_dir(&substitute).expect("clean up");
    assert!(matches!(refused, Err(ClusterError::Foreign { .. })), "{refused:?}");
    assert!(told.lock()[0].contains("/var/tmp/openvibe-events-"), "{told:?}");
}
