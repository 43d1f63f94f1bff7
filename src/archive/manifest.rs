//! The manifest of a month's object: what tells a whole object from a cut, foreign or older one.

use serde::{Deserialize, Serialize};

use super::{ArchiveError, Month};

/// The format of objects that this program reads and writes.
const FORMAT: &str = "openvibe.events.archive@1";

/// What an object holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Contents {
    /// Its lines.
    pub(super) count: u64,
    /// SHA-256 of the compressed object, hex; empty where there is none.
    pub(super) sha256: String,
    /// Bytes of the compressed object.
    pub(super) bytes: u64,
}

/// The document beside an object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Manifest {
    format: String,
    month: String,
    #[serde(flatten)]
    pub(super) contents: Contents,
    exported_at: String,
    /// What the object is about to become. It stands only while an export writes: the object is the one or the other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) next: Option<Contents>,
}

impl Manifest {
    pub(super) fn new(month: Month, contents: Contents, exported_at: String, next: Option<Contents>) -> Self {
        Self {
            format: FORMAT.to_owned(),
            month: month.to_string(),
            contents,
            exported_at,
            next,
        }
    }

    pub(super) fn parse(month: Month, bytes: &[u8]) -> Result<Self, ArchiveError> {
        let unusable = |what: String| ArchiveError::Unusable {
            key: month.manifest(),
            what,
        };
        let manifest: Self =
            serde_json::from_slice(bytes).map_err(|error| unusable(format!("it is no manifest ({error})")))?;
        if manifest.format != FORMAT {
            return Err(unusable(format!("its format is {:?}, not {FORMAT}", manifest.format)));
        }
        if manifest.month != month.to_string() {
            return Err(unusable(format!("it is that of {:?}", manifest.month)));
        }
        Ok(manifest)
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut text = serde_json::to_vec_pretty(self).expect("a manifest is plain data");
        text.push(b'\n');
        text
    }
}
