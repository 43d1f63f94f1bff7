//! Finds the PostgreSQL server programs of this machine; it installs nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The oldest major version the service runs on.
const OLDEST: u32 = 15;

/// The programs that make, run and stop a cluster.
const PROGRAMS: [&str; 3] = ["initdb", "pg_ctl", "postgres"];

/// Places where packages put each major version in a directory of its own: what comes before and after the version.
const PLACES: [(&str, &str); 4] = [
    ("/usr/lib/postgresql/", "/bin"),
    ("/usr/pgsql-", "/bin"),
    ("/opt/homebrew/opt/postgresql@", "/bin"),
    ("/usr/local/opt/postgresql@", "/bin"),
];

/// A directory of server programs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Programs {
    /// The directory.
    pub(super) bin: PathBuf,
    /// Their major version.
    pub(super) major: u32,
}

/// Why no server programs are at hand.
#[derive(Debug, thiserror::Error)]
pub enum ProgramsError {
    /// `OV_PG_BIN` names a directory that is of no use.
    #[error("OV_PG_BIN={} holds no PostgreSQL {OLDEST} or newer (initdb, pg_ctl and postgres) that runs here", .0.display())]
    Named(PathBuf),
    /// There is no server on this machine.
    #[error(
        "no PostgreSQL {OLDEST} or newer was found on this machine. Any one of these helps:\n  \
         scripts/dev.sh              fetches one by itself\n  \
         Debian, Ubuntu              apt-get install postgresql\n  \
         macOS                       brew install postgresql@18\n  \
         elsewhere                   OV_PG_BIN=<the directory of initdb, pg_ctl and postgres>"
    )]
    Missing,
    /// The cluster was made by another major version than those at hand.
    #[error(
        "{} was made by PostgreSQL {made_by}, and this machine has {at_hand} only. Set OV_PG_BIN to the programs of \
         version {made_by}, or delete that directory (its events are lost)",
        .cluster.display()
    )]
    OtherVersion {
        /// The cluster.
        cluster: PathBuf,
        /// The version that made it.
        made_by: u32,
        /// The newest version found.
        at_hand: u32,
    },
}

/// Finds the programs: those that `OV_PG_BIN` names, or else the newest of `PATH` and the places of packages. A cluster
/// that exists already (`cluster`, with the version that made it) decides the version.
///
/// # Errors
///
/// None are there, or none that fit.
pub(super) fn find(
    named: Option<String>,
    path: Option<&str>,
    cluster: Option<(&Path, u32)>,
) -> Result<Programs, ProgramsError> {
    let found = if let Some(named) = named {
        let named = PathBuf::from(named);
        vec![inspect(&named).ok_or(ProgramsError::Named(named))?]
    } else {
        let on_path = path
            .unwrap_or_default()
            .split(':')
            .filter(|entry| !entry.is_empty())
            .map(PathBuf::from);
        on_path.chain(packaged()).filter_map(|bin| inspect(&bin)).collect()
    };
    choose(found, cluster)
}

fn choose(found: Vec<Programs>, cluster: Option<(&Path, u32)>) -> Result<Programs, ProgramsError> {
    let newest = found
        .iter()
        .map(|programs| programs.major)
        .max()
        .ok_or(ProgramsError::Missing)?;
    let wanted = cluster.map_or(newest, |(_, made_by)| made_by);
    // The first of a version wins, so PATH goes before the places of packages.
    match (found.into_iter().find(|programs| programs.major == wanted), cluster) {
        (Some(programs), _) => Ok(programs),
        (None, Some((cluster, made_by))) => Err(ProgramsError::OtherVersion {
            cluster: cluster.to_owned(),
            made_by,
            at_hand: newest,
        }),
        (None, None) => Err(ProgramsError::Missing),
    }
}

/// The directories of the packages that are installed, in no order.
fn packaged() -> Vec<PathBuf> {
    let mut found = Vec::new();
    for (before, after) in PLACES {
        let (parent, stem) = before.rsplit_once('/').unwrap_or_default();
        let entries = fs::read_dir(format!("{parent}/")).into_iter().flatten().flatten();
        for entry in entries {
            let name = entry.file_name();
            let version = name.to_str().and_then(|name| name.strip_prefix(stem));
            if version.is_some_and(|version| version.starts_with(|first: char| first.is_ascii_digit())) {
                found.push(PathBuf::from(format!("{}{after}", entry.path().display())));
            }
        }
    }
    found
}

/// The programs of a directory, when all are there, run, and are new enough.
fn inspect(bin: &Path) -> Option<Programs> {
    if !PROGRAMS.iter().all(|program| bin.join(program).is_file()) {
        return None;
    }
    let answer = Command::new(bin.join("postgres")).arg("--version").output().ok()?;
    let major = major(&String::from_utf8_lossy(&answer.stdout))?;
    (major >= OLDEST).then(|| Programs {
        bin: bin.to_owned(),
        major,
    })
}

/// The major version in an answer such as `postgres (PostgreSQL) 15.8 (Debian 15.8-0+deb12u1)`.
fn major(answer: &str) -> Option<u32> {
    let version = answer.split_once("(PostgreSQL) ")?.1;
    let digits = version.split(|c: char| !c.is_ascii_digit()).next()?;
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn fake(root: &Path, name: &str, version: &str) -> PathBuf {
        let bin = root.join(name);
        fs::create_dir_all(&bin).expect("a directory");
        for program in PROGRAMS {
            let file = bin.join(program);
            fs::write(&file, format!("#!/bin/sh\necho '{program} (PostgreSQL) {version}'\n")).expect("a script");
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect("it can run");
        }
        bin
    }

    #[test]
    fn versions_are_read_from_every_spelling() {
        assert_eq!(major("postgres (PostgreSQL) 15.8 (Debian 15.8-0+deb12u1)\n"), Some(15));
        assert_eq!(major("postgres (PostgreSQL) 18beta1\n"), Some(18));
        assert_eq!(major("something else 15"), None);
    }

    #[test]
    fn the_newest_wins_unless_a_cluster_or_a_name_decides() {
        let root = std::env::temp_dir().join(format!("ov-dev-programs-{}", ulid::Ulid::generate()));
        let (old, new) = (fake(&root, "16", "16.4"), fake(&root, "97", "97.0"));
        fake(&root, "9", "9.6.1");
        let path = format!(
            "{}:/nowhere:{}:{}",
            root.join("9").display(),
            old.display(),
            new.display()
        );
        let newest = find(None, Some(&path), None).expect("found");
        assert_eq!((newest.bin, newest.major), (new, 97));

        let cluster = Path::new("/c");
        assert_eq!(find(None, Some(&path), Some((cluster, 16))).expect("found").bin, old);
        let other = find(None, Some(&path), Some((cluster, 96))).expect_err("no such version");
        assert!(other.to_string().contains("made by PostgreSQL 96"), "{other}");
        assert!(other.to_string().contains("OV_PG_BIN"), "{other}");

        let named = find(Some(old.display().to_string()), Some(&path), None).expect("found");
        assert_eq!(named.major, 16);
        let useless = find(Some(root.join("9").display().to_string()), Some(&path), None).expect_err("too old");
        assert!(useless.to_string().starts_with("OV_PG_BIN="), "{useless}");
        fs::remove_dir_all(root).expect("clean up");
    }

    #[test]
    fn a_machine_without_a_server_is_told_what_helps() {
        let message = choose(Vec::new(), None).expect_err("none").to_string();
        for remedy in [
            "scripts/dev.sh",
            "apt-get install postgresql",
            "brew install",
            "OV_PG_BIN",
        ] {
            assert!(message.contains(remedy), "{message}");
        }
    }
}
