//! Reads the file of rate cards that `EVENTS_RATE_CARDS` names, or the cards that come with the service.
//!
//! The configuration reads it to report its mistakes beside all others, the fabric to decide with it; both must judge alike.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use carriers::REGISTRY;
use planner::{CARDS_BYTES_MAX, Charged, RateCards, SHIPPED_RATE_CARDS};

use crate::domain::time::Millis;

/// The name in messages of the cards this release comes with.
const SHIPPED_NAME: &str = "rate-cards/rate-cards.json";

/// The cards of `file`, which messages call `name`, as they are in force at `now`; without a file, the shipped ones.
///
/// # Errors
///
/// Each mistake as a sentence that begins with the file: at least one.
pub(crate) fn read(file: Option<(&Path, &str)>, now: Millis) -> Result<RateCards, Vec<String>> {
    let Some((path, name)) = file else {
        return parse(SHIPPED_NAME, SHIPPED_RATE_CARDS.as_bytes(), now);
    };
    // One byte more than may be, so that a larger file shows; what has no end is not read to it.
    let most = u64::try_from(CARDS_BYTES_MAX).expect("a megabyte") + 1;
    let mut text = Vec::new();
    let found = open(path).and_then(|opened| opened.take(most).read_to_end(&mut text));
    match found {
        Ok(_) if text.len() > CARDS_BYTES_MAX => Err(vec![format!(
            "{name}: is larger than {CARDS_BYTES_MAX} bytes: name a file of rate cards, or unset EVENTS_RATE_CARDS"
        )]),
        Ok(_) => parse(name, &text, now),
        Err(error) => Err(vec![format!(
            "{name}: cannot be read ({error}): correct the path or the rights, or unset EVENTS_RATE_CARDS for the cards \
             that come with the service"
        )]),
    }
}

/// Opens a regular file. Anything else may have no end, or wait for ever for somebody to write.
fn open(path: &Path) -> io::Result<File> {
    if std::fs::metadata(path)?.is_file() {
        File::open(path)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"))
    }
}

/// The carriers of this release must be charged by what is counted of them.
fn parse(name: &str, text: &[u8], now: Millis) -> Result<RateCards, Vec<String>> {
    let charged: Vec<Charged<'_>> = REGISTRY
        .iter()
        .map(|descriptor| Charged {
            carrier: descriptor.id,
            rate_card: descriptor.rate_card,
            provider: descriptor.provider,
            metric: descriptor.price_unit,
        })
        .collect();
    RateCards::parse(name, text, now.0)
        .and_then(|cards| cards.check(name, &charged).map(|()| cards))
        .map_err(|found| found.lines())
}
