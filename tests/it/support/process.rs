//! Processes that are not the service's: signals by pid, and the account that servers run as which refuse root.

use std::{
    fmt::Debug,
    fs,
    os::unix::{
        fs::{MetadataExt, PermissionsExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command},
    str::FromStr,
    time::SystemTime,
};

/// What an environment variable says that makes a test longer; none when it is not set or empty.
pub(crate) fn setting<T: FromStr<Err: Debug>>(name: &str) -> Option<T> {
    let text = std::env::var(name).ok().filter(|text| !text.is_empty())?;
    Some(text.parse().unwrap_or_else(|error| panic!("{name}={text}: {error:?}")))
}

/// The time as logs write it.
pub(crate) fn wall_clock() -> SystemTime {
    SystemTime::now()
}

/// Sends a signal by its name. One that comes too late is no fault.
pub(crate) fn signal(name: &str, pid: u32) {
    let sent = Command::new("kill")
        .arg(format!("-{name}"))
        .arg(pid.to_string())
        .output();
    sent.expect("the kill program runs");
}

/// The account that a server runs as, which refuses to run as root; none where that is our own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Account(Option<(u32, u32)>);

impl Account {
    /// `postgres` or `nobody` where the tests run as root.
    pub(crate) fn for_servers() -> Self {
        let probe = std::env::temp_dir().join(format!("ov-it-probe-{}", ulid::Ulid::generate()));
        fs::write(&probe, "").expect("a file in the temporary directory");
        let owner = fs::metadata(&probe).expect("it was just made").uid();
        fs::remove_file(&probe).expect("it is ours");
        if owner != 0 {
            return Self(None);
        }
        let passwd = fs::read_to_string("/etc/passwd").expect("the accounts of this machine");
        let numbers = |name: &str| {
            let line = passwd.lines().find(|line| line.starts_with(&format!("{name}:")))?;
            let mut fields = line.split(':').skip(2);
            Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
        };
        let found = numbers("postgres").or_else(|| numbers("nobody"));
        Self(Some(found.expect("an account postgres or nobody to run servers as")))
    }

    /// Makes a program run as this account.
    pub(crate) fn lend_to(self, command: &mut Command) {
        if let Self(Some((uid, gid))) = self {
            command.uid(uid).gid(gid);
        }
    }

    /// A new directory of this account.
    pub(crate) fn directory(self, purpose: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("ov-it-{purpose}-{}", ulid::Ulid::generate()));
        fs::create_dir(&path).expect("a new directory");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).expect("ours alone");
        if let Self(Some((uid, gid))) = self {
            chown(&path, Some(uid), Some(gid)).expect("root may hand it over");
        }
        Directory(path)
    }
}

/// A directory that is removed with its value.
#[derive(Debug)]
pub(crate) struct Directory(PathBuf);

impl Directory {
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

/// The children of a process, where the system tells (Linux).
pub(crate) fn children(pid: u32) -> Vec<u32> {
    let listed = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    listed
        .split_whitespace()
        .filter_map(|child| child.parse().ok())
        .collect()
}

/// SIGKILL to a child and everything it started; returns when the child is gone.
pub(crate) fn kill_family(child: &mut Child) {
    let family = children(child.id());
    child.kill().ok();
    for one in family {
        signal("KILL", one);
    }
    child.wait().ok();
}

/// The memory that a process keeps resident, where the system tells (Linux).
pub(crate) fn resident_kib(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}
