//! The account that runs the server programs: PostgreSQL refuses to run as root, so root lends them another one.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use tokio::process::Command;

/// The accounts that root lends, in order of preference.
const LENT: [&str; 2] = ["postgres", "nobody"];

/// An account of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Account {
    /// Its name, for messages.
    pub(super) name: String,
    /// Its number.
    pub(super) uid: u32,
    /// The number of its group.
    pub(super) gid: u32,
}

impl Account {
    /// The first account of `passwd` (the text of `/etc/passwd`) that may be lent.
    pub(super) fn to_lend(passwd: &str) -> Option<Self> {
        LENT.iter().find_map(|wanted| {
            passwd
                .lines()
                .filter_map(Self::parse)
                .find(|account| account.name == *wanted)
        })
    }

    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split(':');
        let (name, _password) = (fields.next()?, fields.next()?);
        let (uid, gid) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        Some(Self {
            name: name.to_owned(),
            uid,
            gid,
        })
    }

    /// Makes a program run as this account, without any other group.
    pub(super) fn lend_to(&self, command: &mut Command) {
        command.uid(self.uid).gid(self.gid);
    }

    /// Whether this account may walk to `path`: every directory on the way lets it pass. `path` must be canonical.
    pub(super) fn reaches(&self, path: &Path) -> bool {
        path.ancestors().skip(1).all(|directory| {
            fs::metadata(directory).is_ok_and(|found| {
                let pass = match found.uid() {
                    owner if owner == self.uid => 0o100,
                    _ if found.gid() == self.gid => 0o010,
                    _ => 0o001,
                };
                found.mode() & pass != 0
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn postgres_is_lent_before_nobody_and_a_damaged_line_is_passed_over() {
        let passwd = "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\npostgres:x\npostgres:x:101:104::/:/bin/sh\n";
        let postgres = Account::to_lend(passwd).expect("an account");
        assert_eq!(
            (postgres.name.as_str(), postgres.uid, postgres.gid),
            ("postgres", 101, 104)
        );
        let nobody = Account::to_lend("nobody:x:65534:65533::/:/bin/false").expect("an account");
        assert_eq!((nobody.uid, nobody.gid), (65534, 65533));
        assert_eq!(Account::to_lend("root:x:0:0::/root:/bin/sh"), None);
    }

    #[test]
    fn a_closed_directory_on_the_way_is_noticed() {
        let root = std::env::temp_dir().join(format!("ov-dev-account-{}", ulid::Ulid::generate()));
        let inner = root.join("closed/inner");
        fs::create_dir_all(&inner).expect("a directory");
        let inner = inner.canonicalize().expect("it exists");
        let stranger = Account {
            name: "stranger".to_owned(),
            uid: 4_000_000,
            gid: 4_000_000,
        };
        fs::set_permissions(&root, fs::Permissions::from_mode(0o755)).expect("open");
        fs::set_permissions(root.join("closed"), fs::Permissions::from_mode(0o711)).expect("open");
        assert!(stranger.reaches(&inner));
        fs::set_permissions(root.join("closed"), fs::Permissions::from_mode(0o710)).expect("close");
        assert!(!stranger.reaches(&inner));
        let owner = Account {
            uid: fs::metadata(&root).expect("it exists").uid(),
            ..stranger
        };
        assert!(owner.reaches(&inner), "its owner passes");
        fs::remove_dir_all(root).expect("clean up");
    }
}
