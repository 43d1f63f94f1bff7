//! What a carrier charges: `platform.rate-card@1`, and the cards in force by id.

use std::collections::BTreeMap;

use time::Date;

mod parse;

pub use parse::{CARDS_BYTES_MAX, CardMistake, CardMistakes};

/// The cards that come with the service, a JSON array.
pub const SHIPPED_RATE_CARDS: &str = include_str!("../../rate-cards/rate-cards.json");

/// When a free allowance begins anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ResetPeriod {
    /// Each day.
    Day,
    /// Each calendar month.
    Month,
    /// Never.
    None,
}

impl ResetPeriod {
    /// Its name on a card.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Day => "day",
            Self::Month => "month",
            Self::None => "none",
        }
    }
}

/// One price.
#[derive(Debug, Clone, PartialEq)]
pub struct RateCard {
    /// What offers name it by.
    pub id: String,
    /// Who charges it, and whose usage consumes its allowance.
    pub provider: String,
    /// The carrier it was written for; nothing is decided by it.
    pub adapter: Option<String>,
    /// What is counted.
    pub metric: String,
    /// How many units the price is for; 0 is 1.
    pub unit_size: f64,
    /// USD for that many units.
    pub unit_price_usd: f64,
    /// Units of a period that are free.
    pub free_allowance: f64,
    /// When the allowance begins anew.
    pub reset_period: ResetPeriod,
    /// Where it is charged; nothing is decided by it.
    pub region: Option<String>,
    /// The first day of the price.
    pub effective_from: Date,
    /// The last day of the price.
    pub effective_until: Option<Date>,
    /// Where the price was read.
    pub source: String,
    /// When it was read.
    pub verified_at: Date,
}

impl RateCard {
    /// USD for `used` units of a period of which `allowance` are free, in proportion, without rounding up.
    pub fn price(&self, used: f64, allowance: f64) -> f64 {
        let unit_size = if self.unit_size == 0.0 { 1.0 } else { self.unit_size };
        let billable = (used - allowance).max(0.0);
        if billable == 0.0 {
            0.0
        } else {
            billable / unit_size * self.unit_price_usd
        }
    }
}

/// What a carrier is charged by: a card prices it only where both name the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Charged<'a> {
    /// The carrier's id.
    pub carrier: &'a str,
    /// The id of its card.
    pub rate_card: &'a str,
    /// Whose usage it adds to.
    pub provider: &'a str,
    /// What is counted of it.
    pub metric: &'a str,
}

/// The cards in force.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RateCards {
    by_id: BTreeMap<String, RateCard>,
}

impl RateCards {
    /// No card: nothing has a price.
    pub const fn none() -> Self {
        Self { by_id: BTreeMap::new() }
    }

    /// The card of this id.
    pub fn get(&self, id: &str) -> Option<&RateCard> {
        self.by_id.get(id)
    }

    /// Holds the cards to what is counted: a card of another provider or metric would find no use at all, so that what it
    /// prices would be free for ever. `file` is what messages call it.
    ///
    /// # Errors
    ///
    /// Each field that names something else than its carrier.
    pub fn check(&self, file: &str, charged: &[Charged<'_>]) -> Result<(), CardMistakes> {
        let mut mistakes = Vec::new();
        for one in charged {
            let Some(card) = self.get(one.rate_card) else { continue };
            for (field, given, counted) in [
                ("provider", &card.provider, one.provider),
                ("metric", &card.metric, one.metric),
            ] {
                if given != counted {
                    mistakes.push(CardMistake {
                        card: Some(card.id.clone()),
                        field: Some(field.to_owned()),
                        message: format!(
                            "must be \"{counted}\", which is what {} is counted by, got {given:?}",
                            one.carrier
                        ),
                    });
                }
            }
        }
        if mistakes.is_empty() {
            return Ok(());
        }
        Err(CardMistakes {
            file: file.to_owned(),
            mistakes,
            unlisted: 0,
        })
    }

    /// Every card, by id.
    pub fn iter(&self) -> impl Iterator<Item = &RateCard> {
        self.by_id.values()
    }
}

impl FromIterator<RateCard> for RateCards {
    fn from_iter<I: IntoIterator<Item = RateCard>>(cards: I) -> Self {
        Self {
            by_id: cards.into_iter().map(|card| (card.id.clone(), card)).collect(),
        }
    }
}
