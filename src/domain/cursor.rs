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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_spelling_of_stored_cursors() {
        let cursor = Cursor { epoch: 0, position: 42 };
        assert_eq!(cursor.to_string(), "c1.0.NDI");
        assert_eq!("c1.0.NDI".parse(), Ok(cursor));
        assert_eq!(serde_json::to_string(&cursor).expect("json"), "\"c1.0.NDI\"");
        let last = Cursor {
            epoch: 999_999_999_999_999,
            position: SAFE_INTEGER_MAX,
        };
        assert_eq!(last.to_string().parse(), Ok(last));
    }

    #[test]
    fn nothing_else_is_a_cursor() {
        let encoded = |position: &str| format!("c1.0.{}", URL_SAFE_NO_PAD.encode(position));
        for bad in [
            "",
            "0",
            "42",
            "opaque-1",
            "c1",
            "c1.0",
            "c1..NDI",
            "c1.0.",
            "c1.0.NDI.",
            "c1.0.NDI.x",
            "c2.0.NDI",
            "C1.0.NDI",
            " c1.0.NDI",
            "c1.0.NDI ",
            "c1.0.NDI=",
            "c1.0.NDJ",
            "c1.00.NDI",
            "c1.+0.NDI",
            "c1.-1.NDI",
            "c1.0.ND+",
            "c1.0.N DI",
            "c1.1000000000000000.NDI",
            "c1.x.NDI",
            "c1.é.NDI",
        ] {
            assert_eq!(bad.parse::<Cursor>(), Err(NotACursor), "{bad:?}");
        }
        for bad in [
            "",
            "-1",
            "+1",
            "042",
            "4.2",
            "4e2",
            " 42",
            "9007199254740992",
            "99999999999999999999",
            "x",
            "\u{661}",
        ] {
            assert_eq!(encoded(bad).parse::<Cursor>(), Err(NotACursor), "{bad:?}");
        }
        assert_eq!(format!("c1.0.{}", "A".repeat(300)).parse::<Cursor>(), Err(NotACursor));
    }

    proptest! {
        #[test]
        fn every_position_has_one_spelling(epoch in 0..=999_999_999_999_999_i64, position in 0..=SAFE_INTEGER_MAX) {
            let cursor = Cursor { epoch, position };
            prop_assert_eq!(cursor.to_string().parse(), Ok(cursor));
        }

        #[test]
        fn what_parses_was_issued(text in "c1\\.[0-9+-]{0,4}\\.[A-Za-z0-9_-]{0,8}") {
            if let Ok(cursor) = text.parse::<Cursor>() {
                prop_assert_eq!(cursor.to_string(), text);
            }
        }
    }
}
