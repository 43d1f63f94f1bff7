//! Reads a file of rate cards. Every mistake is reported at once, each with its file, card, field and remedy; a file with
//! a mistake gives no card at all, since half a price list decides wrongly and says nothing.

use std::collections::HashSet;
use std::fmt;

use serde_json::Value;
use serde_json::value::RawValue;
use time::format_description::StaticFormatDescription;
use time::macros::format_description;
use time::{Date, OffsetDateTime, Time};

use super::{RateCard, RateCards, ResetPeriod};
use crate::json::{Members, shown};
use crate::moment::instant;

/// Largest file of cards, in bytes.
pub const CARDS_BYTES_MAX: usize = 1024 * 1024;
/// Most mistakes that are reported; a file that is of another kind altogether has as many as it has lines.
const MISTAKES_MAX: usize = 50;
const DATE: StaticFormatDescription = format_description!("[year]-[month]-[day]");

const FIELDS: [&str; 13] = [
    "id",
    "provider",
    "adapter",
    "metric",
    "unit_size",
    "unit_price_usd",
    "free_allowance",
    "reset_period",
    "region",
    "effective_from",
    "effective_until",
    "source",
    "verified_at",
];

/// One thing that is wrong with a file of cards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CardMistake {
    /// Which card: its id, else its place in the file, as in `card 2`; `None` for the file as a whole.
    pub card: Option<String>,
    /// Which field of it; `None` for the card as a whole.
    pub field: Option<String>,
    /// What is wrong and what to do about it.
    pub message: String,
}

/// Everything that is wrong with a file of cards.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct CardMistakes {
    /// The file as it was named.
    pub file: String,
    /// Each mistake, in the order of the file; at least one.
    pub mistakes: Vec<CardMistake>,
    /// Mistakes that are not listed because there are too many.
    pub unlisted: usize,
}

impl CardMistakes {
    /// Each mistake as a line of its own that names the file, the card and the field.
    pub fn lines(&self) -> Vec<String> {
        let line = |mistake: &CardMistake| {
            let place = [&mistake.card, &mistake.field].into_iter().flatten();
            let named: String = place.map(|name| format!(": {name}")).collect();
            format!("{}{named}: {}", self.file, mistake.message)
        };
        let unlisted = (self.unlisted > 0).then(|| format!("and {} more", self.unlisted));
        self.mistakes.iter().map(line).chain(unlisted).collect()
    }
}

impl fmt::Display for CardMistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.lines().join("; "))
    }
}

impl RateCards {
    /// Reads a file of cards, a JSON array of `platform.rate-card@1`. `file` is what messages call it; a card whose last
    /// day lies before `now_ms` (milliseconds since 1970, UTC) is a mistake.
    ///
    /// # Errors
    ///
    /// Everything that is wrong with it.
    pub fn parse(file: &str, text: &[u8], now_ms: i64) -> Result<Self, CardMistakes> {
        let mut reader = Reader {
            mistakes: Vec::new(),
            unlisted: 0,
        };
        let cards = reader.cards(text, now_ms);
        if reader.mistakes.is_empty() {
            return Ok(cards.into_iter().collect());
        }
        Err(CardMistakes {
            file: file.to_owned(),
            mistakes: reader.mistakes,
            unlisted: reader.unlisted,
        })
    }
}

struct Reader {
    mistakes: Vec<CardMistake>,
    unlisted: usize,
}

impl Reader {
    fn fault(&mut self, card: Option<&str>, field: Option<&str>, message: String) {
        if self.mistakes.len() >= MISTAKES_MAX {
            self.unlisted += 1;
            return;
        }
        let owned = |text: Option<&str>| text.map(str::to_owned);
        self.mistakes.push(CardMistake {
            card: owned(card),
            field: owned(field),
            message,
        });
    }

    fn cards(&mut self, text: &[u8], now_ms: i64) -> Vec<RateCard> {
        if text.len() > CARDS_BYTES_MAX {
            let message = format!(
                "has {} bytes; a file of rate cards has at most {CARDS_BYTES_MAX}",
                text.len()
            );
            self.fault(None, None, message);
            return Vec::new();
        }
        let entries: Vec<Box<RawValue>> = match serde_json::from_slice(text) {
            Ok(entries) => entries,
            Err(error) if error.is_data() => {
                let message = "must be a JSON array of rate cards: put the cards between [ and ]".to_owned();
                self.fault(None, None, message);
                return Vec::new();
            }
            Err(error) => {
                self.fault(None, None, format!("is not JSON ({error}): correct it there"));
                return Vec::new();
            }
        };
        let mut ids = HashSet::new();
        let mut cards = Vec::new();
        for (index, entry) in entries.iter().enumerate() {
            let place = format!("card {}", index + 1);
            let Some(members) = Members::parse(entry.get()) else {
                self.fault(
                    Some(&place),
                    None,
                    "must be an object with the fields of a rate card".to_owned(),
                );
                continue;
            };
            if let Some(card) = self.card(&place, &members, now_ms, &mut ids) {
                cards.push(card);
            }
        }
        cards
    }

    fn card(&mut self, place: &str, members: &Members, now_ms: i64, ids: &mut HashSet<String>) -> Option<RateCard> {
        let id = members.get("id").and_then(Value::as_str).filter(|id| !id.is_empty());
        let name = id.map_or_else(|| place.to_owned(), str::to_owned);
        let mut card = Fields {
            reader: self,
            card: &name,
            members,
        };
        card.closed();
        let id = card.text("id");
        if let Some(id) = &id
            && !ids.insert(id.clone())
        {
            card.fault(
                "id",
                format!("{id:?} is the id of an earlier card too: keep one of the two"),
            );
        }
        let provider = card.text("provider");
        let adapter = card.optional("adapter", Fields::text);
        let metric = card.text("metric");
        let unit_size = card.number("unit_size");
        let unit_price_usd = card.number("unit_price_usd");
        let free_allowance = card.number("free_allowance");
        let reset_period = card.reset_period();
        card.allowance_is_counted(free_allowance, reset_period);
        let region = card.optional("region", Fields::text);
        let effective_from = card.date("effective_from");
        let effective_until = card.optional("effective_until", Fields::date);
        card.in_force(effective_from, effective_until.flatten(), now_ms);
        let source = card.uri("source");
        let verified_at = card.date("verified_at");
        Some(RateCard {
            id: id?,
            provider: provider?,
            adapter: adapter.flatten(),
            metric: metric?,
            unit_size: unit_size?,
            unit_price_usd: unit_price_usd?,
            free_allowance: free_allowance?,
            reset_period: reset_period?,
            region: region.flatten(),
            effective_from: effective_from?,
            effective_until: effective_until.flatten(),
            source: source?,
            verified_at: verified_at?,
        })
    }
}

/// The fields of one card.
struct Fields<'a> {
    reader: &'a mut Reader,
    card: &'a str,
    members: &'a Members,
}

impl Fields<'_> {
    fn fault(&mut self, field: &str, message: String) {
        self.reader.fault(Some(self.card), Some(field), message);
    }

    fn closed(&mut self) {
        for (index, (name, _)) in self.members.0.iter().enumerate() {
            if !FIELDS.contains(&name.as_str()) {
                self.fault(
                    name,
                    format!(
                        "is no field of a rate card: remove it, or choose of {}",
                        FIELDS.join(", ")
                    ),
                );
            } else if self.members.0[..index].iter().any(|(earlier, _)| earlier == name) {
                self.fault(name, "is given more than once: keep one".to_owned());
            }
        }
    }

    /// The value of a field that must be there.
    fn value(&mut self, field: &str, what: &str) -> Option<Value> {
        let value = self.members.get(field).cloned();
        if value.is_none() {
            self.fault(field, format!("is missing: give {what}"));
        }
        value
    }

    /// What a field that may be left out says, once it is there.
    fn optional<T>(&mut self, field: &str, read: fn(&mut Self, &str) -> Option<T>) -> Option<Option<T>> {
        self.members.get(field).is_some().then(|| read(self, field))
    }

    fn text(&mut self, field: &str) -> Option<String> {
        let value = self.value(field, "a text")?;
        let text = value.as_str().filter(|text| !text.trim().is_empty());
        if text.is_none() {
            self.fault(
                field,
                format!("must be a text that is not empty, got {}", shown(&value)),
            );
        }
        text.map(str::to_owned)
    }

    fn number(&mut self, field: &str) -> Option<f64> {
        let value = self.value(field, "a number of 0 or more")?;
        let number = value.as_f64().filter(|number| number.is_finite() && *number >= 0.0);
        if number.is_none() {
            self.fault(field, format!("must be a number of 0 or more, got {}", shown(&value)));
        }
        number
    }

    fn date(&mut self, field: &str) -> Option<Date> {
        let value = self.value(field, "a date such as 2026-09-01")?;
        let date = value.as_str().and_then(|text| Date::parse(text, &DATE).ok());
        if date.is_none() {
            self.fault(
                field,
                format!(
                    "must be a day of the calendar such as 2026-09-01, got {}",
                    shown(&value)
                ),
            );
        }
        date
    }

    fn uri(&mut self, field: &str) -> Option<String> {
        let value = self.value(field, "the address where the price can be read")?;
        let scheme = |text: &&str| {
            let (scheme, rest) = text.split_once(':').unwrap_or_default();
            let first = scheme.starts_with(|first: char| first.is_ascii_alphabetic());
            let plain = scheme
                .chars()
                .all(|own| own.is_ascii_alphanumeric() || "+-.".contains(own));
            first && plain && !rest.is_empty() && text.chars().all(|own| own.is_ascii_graphic())
        };
        let uri = value.as_str().filter(scheme);
        if uri.is_none() {
            self.fault(
                field,
                format!(
                    "must be an address such as https://example.org/prices, got {}",
                    shown(&value)
                ),
            );
        }
        uri.map(str::to_owned)
    }

    fn reset_period(&mut self) -> Option<ResetPeriod> {
        const FIELD: &str = "reset_period";
        let value = self.value(FIELD, "one of day, month, none")?;
        let known = [ResetPeriod::Day, ResetPeriod::Month, ResetPeriod::None];
        let found = known.into_iter().find(|period| value.as_str() == Some(period.as_str()));
        if found.is_none() {
            self.fault(FIELD, format!("must be one of day, month, none, got {}", shown(&value)));
        }
        found
    }

    /// Use is counted by the month: an allowance of another period would be taken for one of each month.
    fn allowance_is_counted(&mut self, free_allowance: Option<f64>, reset_period: Option<ResetPeriod>) {
        let (Some(allowance), Some(period)) = (free_allowance, reset_period) else {
            return;
        };
        if allowance > 0.0 && period != ResetPeriod::Month {
            self.fault(
                "reset_period",
                format!(
                    "must be month where free_allowance is more than 0, since use is counted by the month, got \
                     \"{}\": set free_allowance to 0, or state what is free in a month",
                    period.as_str()
                ),
            );
        }
    }

    fn in_force(&mut self, from: Option<Date>, until: Option<Date>, now_ms: i64) {
        const FIELD: &str = "effective_until";
        let Some(until) = until else { return };
        if from.is_some_and(|from| until < from) {
            self.fault(
                FIELD,
                "lies before effective_from: exchange the two, or correct one".to_owned(),
            );
            return;
        }
        let ends = until.next_day().map(|day| OffsetDateTime::new_utc(day, Time::MIDNIGHT));
        let now = instant(now_ms);
        if ends.zip(now).is_some_and(|(ends, now)| ends <= now) {
            self.fault(
                FIELD,
                format!("the price expired on {until}: verify it and set a later day, or remove the card"),
            );
        }
    }
}
