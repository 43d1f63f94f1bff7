//! The name of a policy in one of its revisions, made once and looked up often.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// A policy in one of its revisions. Cloning and comparing it is cheap.
#[derive(Clone)]
pub struct PolicyKey {
    /// Of pattern and revision; made once, because patterns are long.
    hash: u64,
    pattern: Option<Arc<str>>,
    revision: i32,
}

impl PolicyKey {
    /// The policy of a pattern; `None` and revision 0 for the one in force where no pattern matches.
    pub fn new(pattern: Option<&str>, revision: i32) -> Self {
        // FNV-1a: patterns are operators' and few, so nobody gains by making two meet.
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        let revision_bytes = revision.to_le_bytes();
        for byte in pattern.unwrap_or_default().bytes().chain(revision_bytes) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        Self {
            hash,
            pattern: pattern.map(Arc::from),
            revision,
        }
    }

    /// The pattern.
    pub fn pattern(&self) -> Option<&str> {
        self.pattern.as_deref()
    }

    /// How often it was written.
    pub fn revision(&self) -> i32 {
        self.revision
    }
}

impl PartialEq for PolicyKey {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash && self.revision == other.revision && self.pattern == other.pattern
    }
}

impl Eq for PolicyKey {}

impl Hash for PolicyKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl fmt::Debug for PolicyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.pattern().unwrap_or("(default)"), self.revision)
    }
}
