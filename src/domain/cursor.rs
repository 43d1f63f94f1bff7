//! The opaque cursor: one spelling for one position of one history, and nothing else is read as a cursor.

use std::fmt;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Serialize, Serializer};

use super::json::SAFE_INTEGER_MAX;

const CURSOR_MAX: usize = 200;
const EPOCH_DIGITS_MAX: usize = 15;

/// A position in the store, spelt `c1.<epoch>.<base64url of the decimal position, no padding>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cursor {
    /// The retention epoch: positions of different epochs have nothing to do with one another.
    pub epoch: i64,
    /// The position inside the epoch, 0 to 2^53 - 1.
    pub position: i64,
}

/// The text is not a cursor that this service could have issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a cursor")]
pub struct NotACursor;

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "c1.{}.{}",
            self.epoch,
            URL_SAFE_NO_PAD.encode(self.position.to_string())
        )
    }
}

impl FromStr for Cursor {
    type Err = NotACursor;

    fn from_str(text: &str) -> Result<Self, NotACursor> {
        decode(text)
            .filter(|cursor| cursor.to_string() == text)
            .ok_or(NotACursor)
    }
}

fn decode(text: &str) -> Option<Cursor> {
    if text.len() > CURSOR_MAX {
        return None;
    }
    let (epoch, position) = text.strip_prefix("c1.")?.split_once('.')?;
    if epoch.len() > EPOCH_DIGITS_MAX {
        return None;
    }
    let position = URL_SAFE_NO_PAD.decode(position).ok()?;
    let cursor = Cursor {
        epoch: epoch.parse().ok()?,
        position: std::str::from_utf8(&position).ok()?.parse().ok()?,
    };
    (cursor.epoch >= 0 && (0..=SAFE_INTEGER_MAX).contains(&cursor.position)).then_some(cursor)
}

impl Serialize for Cursor {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
