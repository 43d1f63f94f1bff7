//! Why a measurement could not be made.

use std::io;
use std::path::PathBuf;

use crate::wire::WireFault;

/// A run that ended without a result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    /// A file of the tool.
    #[error("{}: {source}", .path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A file that holds something else.
    #[error("{}: {what}", .path.display())]
    Content {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The key cannot be made or used.
    #[error("an RSA key cannot be made or used")]
    Key,
    /// The target's address.
    #[error("{0} is no address of the form http://HOST:PORT")]
    Address(String),
    /// A socket.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// A control request got no usable answer.
    #[error("{request}: {source}")]
    Wire {
        /// Method and path.
        request: String,
        /// Why not.
        source: WireFault,
    },
    /// A control request was refused.
    #[error("{request} answered {status}: {body}")]
    Refused {
        /// Method and path.
        request: String,
        /// The status.
        status: u16,
        /// The answer.
        body: String,
    },
    /// Options that do not go together, or a state in which nothing can be measured.
    #[error("{0}")]
    Other(String),
}
