//! Reads scenario files. Members that it does not know are refused by name; all other mistakes are reported at once.

use std::fmt;

use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::{CarrierSetup, Happening, Scenario, Traffic, What};
use crate::FLOOR;
use crate::class::Class;
use crate::health::floor_latency_ms;
use crate::intent::Intent;
use crate::moment::millis;
use crate::rate_card::{RateCards, SHIPPED_RATE_CARDS};
use crate::simulate::carriers::KNOWN;
use crate::simulate::span::Span;

/// Largest scenario file, in bytes.
pub const SCENARIO_BYTES_MAX: usize = 1024 * 1024;
/// Longest run: a few months take seconds, and nobody waits for a century.
const DURATION_DAYS_MAX: u64 = 400;
const CARRIERS_MAX: usize = 32;
const TRAFFIC_MAX: usize = 64;
const HAPPENINGS_MAX: usize = 1_000;
const PER_SECOND_MAX: f64 = 1e6;
const MISTAKES_MAX: usize = 50;

/// Everything that is wrong with a scenario file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct ScenarioMistakes {
    /// The file as it was named.
    pub file: String,
    /// Each mistake with where it is; at least one.
    pub mistakes: Vec<String>,
}

impl fmt::Display for ScenarioMistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, mistake) in self.mistakes.iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{}: {mistake}", self.file)?;
        }
        Ok(())
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    title: String,
    #[serde(default)]
    description: String,
    #[serde(deserialize_with = "instant")]
    start: i64,
    duration: Span,
    #[serde(default)]
    seed: u64,
    #[serde(default = "poll_ms")]
    poll_ms: f64,
    #[serde(default)]
    carriers: Vec<CarrierMembers>,
    rate_cards: Option<Box<RawValue>>,
    traffic: Vec<TrafficMembers>,
    #[serde(default)]
    happenings: Vec<HappeningMembers>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CarrierMembers {
    id: String,
    classes: Option<Vec<ClassName>>,
    provider: Option<String>,
    rate_card: Option<String>,
    latency_ms: Option<f64>,
    #[serde(default)]
    used: u64,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum ClassName {
    Topic,
    Queue,
    Stream,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TrafficMembers {
    name: String,
    policy: Box<RawValue>,
    per_second: f64,
    key: Option<String>,
    #[serde(default)]
    daily_swing: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HappeningMembers {
    what: WhatName,
    at: Span,
    r#for: Option<Span>,
    carrier: Option<String>,
    traffic: Option<String>,
    rate_card: Option<String>,
    latency_ms: Option<f64>,
    unit_price_usd: Option<f64>,
    free_allowance: Option<f64>,
    factor: Option<f64>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum WhatName {
    Outage,
    Stall,
    Latency,
    Disabled,
    Price,
    Backlog,
    Surge,
}

fn poll_ms() -> f64 {
    500.0
}

fn instant<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
    let text = String::deserialize(deserializer)?;
    OffsetDateTime::parse(&text, &Rfc3339).map(millis).map_err(|_| {
        serde::de::Error::custom(format!(
            "start must be a time such as \"2026-10-01T00:00:00Z\", got {text:?}"
        ))
    })
}

impl Scenario {
    /// Reads a scenario. `file` is what messages call it. Where it has no cards of its own, those of the service are in
    /// force.
    ///
    /// # Errors
    ///
    /// What is wrong with it: the first thing where it cannot be read, else everything.
    pub fn parse(file: &str, text: &[u8]) -> Result<Self, ScenarioMistakes> {
        let refused = |mistake: String| ScenarioMistakes {
            file: file.to_owned(),
            mistakes: vec![mistake],
        };
        if text.len() > SCENARIO_BYTES_MAX {
            return Err(refused(format!(
                "has {} bytes; a scenario has at most {SCENARIO_BYTES_MAX}",
                text.len()
            )));
        }
        let members: File = serde_json::from_slice(text).map_err(|error| {
            refused(if error.is_data() {
                error.to_string()
            } else {
                format!("is not JSON ({error}): correct it there")
            })
        })?;
        let mut reader = Reader::default();
        let scenario = reader.scenario(members);
        if reader.mistakes.is_empty() {
            return Ok(scenario);
        }
        reader.mistakes.truncate(MISTAKES_MAX);
        Err(ScenarioMistakes {
            file: file.to_owned(),
            mistakes: reader.mistakes,
        })
    }
}

#[derive(Default)]
struct Reader {
    mistakes: Vec<String>,
}

impl Reader {
    fn fault(&mut self, at: &str, message: impl fmt::Display) {
        self.mistakes.push(format!("{at}: {message}"));
    }

    fn number(&mut self, at: &str, value: f64, least: f64, most: f64) -> f64 {
        if !(least..=most).contains(&value) {
            self.fault(at, format_args!("must be a number from {least} to {most}, got {value}"));
        }
        value
    }

    fn count<T>(&mut self, at: &str, list: &[T], most: usize) {
        if list.len() > most {
            self.fault(
                at,
                format_args!("has {} entries; a scenario has at most {most}", list.len()),
            );
        }
    }

    fn scenario(&mut self, file: File) -> Scenario {
        let days = file.duration.0.as_secs() / 86_400;
        if file.duration.0.is_zero() || days >= DURATION_DAYS_MAX {
            self.fault("duration", format_args!("must be from 1s to {DURATION_DAYS_MAX}d"));
        }
        let poll_ms = self.number("poll_ms", file.poll_ms, 1.0, 60_000.0);
        self.count("carriers", &file.carriers, CARRIERS_MAX);
        self.count("traffic", &file.traffic, TRAFFIC_MAX);
        self.count("happenings", &file.happenings, HAPPENINGS_MAX);
        let own = file.rate_cards.as_ref().map(|cards| ("rate_cards", cards.get()));
        let (name, cards) = own.unwrap_or(("the cards of the service", SHIPPED_RATE_CARDS));
        let cards = RateCards::parse(name, cards.as_bytes(), file.start).unwrap_or_else(|found| {
            self.mistakes.push(found.to_string());
            RateCards::none()
        });
        let mut carriers = Vec::new();
        if !file.carriers.iter().any(|carrier| carrier.id == FLOOR) {
            let floor = CarrierMembers {
                id: FLOOR.to_owned(),
                classes: None,
                provider: None,
                rate_card: None,
                latency_ms: None,
                used: 0,
            };
            carriers.extend(self.carrier("carriers", floor, poll_ms));
        }
        for (index, members) in file.carriers.into_iter().enumerate() {
            let at = format!("carriers[{index}]");
            if carriers.iter().any(|own: &CarrierSetup| own.id == members.id) {
                self.fault(&at, format_args!("{:?} is there already: keep one", members.id));
            }
            carriers.extend(self.carrier(&at, members, poll_ms));
        }
        let mut traffic: Vec<Traffic> = Vec::new();
        for (index, members) in file.traffic.into_iter().enumerate() {
            let at = format!("traffic[{index}]");
            if traffic.iter().any(|own| own.name == members.name) {
                self.fault(
                    &at,
                    format_args!("the name {:?} is there already: choose another", members.name),
                );
            }
            traffic.extend(self.traffic(&at, members));
        }
        if traffic.is_empty() && self.mistakes.is_empty() {
            self.fault("traffic", "is empty: name at least one stream of events");
        }
        let mut happenings = Vec::new();
        for (index, members) in file.happenings.into_iter().enumerate() {
            let at = format!("happenings[{index}]");
            happenings.extend(self.happening(&at, members, file.duration, &carriers, &traffic, &cards));
        }
        Scenario {
            title: file.title,
            description: file.description,
            start_ms: file.start,
            duration: file.duration,
            seed: file.seed,
            poll_ms,
            carriers,
            traffic,
            cards,
            happenings,
        }
    }

    fn carrier(&mut self, at: &str, members: CarrierMembers, poll_ms: f64) -> Option<CarrierSetup> {
        let known = KNOWN.iter().find(|known| known.id == members.id);
        let listed = members.classes.map(|names| {
            let class = |name: &ClassName| match name {
                ClassName::Topic => Class::Topic,
                ClassName::Queue => Class::Queue,
                ClassName::Stream => Class::Stream,
            };
            names.iter().map(class).collect::<Vec<_>>()
        });
        let classes = listed.or_else(|| known.map(|known| known.classes.to_vec()));
        let provider = members
            .provider
            .or_else(|| known.map(|known| known.provider.to_owned()));
        let rate_card = members
            .rate_card
            .or_else(|| known.map(|known| known.rate_card.to_owned()));
        let latency_ms = members.latency_ms.or_else(|| known.map(|known| known.latency_ms));
        let missing = [
            ("classes", classes.is_none()),
            ("provider", provider.is_none()),
            ("rate_card", rate_card.is_none()),
            ("latency_ms", latency_ms.is_none()),
        ];
        for (name, _) in missing.into_iter().filter(|(_, missing)| *missing) {
            let ids: Vec<&str> = KNOWN.iter().map(|known| known.id).collect();
            let id = &members.id;
            self.fault(
                &format!("{at}.{name}"),
                format_args!("is missing: {id:?} is none of {}, so say what it is", ids.join(", ")),
            );
        }
        let mut setup = CarrierSetup {
            classes: classes?,
            provider: provider?,
            rate_card: rate_card?,
            latency_ms: self.number(&format!("{at}.latency_ms"), latency_ms?, 0.0, 120_000.0),
            used: members.used,
            id: members.id,
        };
        if setup.id == FLOOR {
            // What it promises is its poll.
            setup.latency_ms = floor_latency_ms(poll_ms);
        }
        Some(setup)
    }

    fn traffic(&mut self, at: &str, members: TrafficMembers) -> Option<Traffic> {
        let per_second = self.number(&format!("{at}.per_second"), members.per_second, 0.0, PER_SECOND_MAX);
        let daily_swing = self.number(&format!("{at}.daily_swing"), members.daily_swing, 0.0, 1.0);
        match Intent::parse(members.policy.get()) {
            Ok(intent) => Some(Traffic {
                name: members.name,
                policy: members.policy.get().to_owned(),
                intent,
                key: members.key,
                per_second,
                daily_swing,
            }),
            Err(error) => {
                self.fault(&format!("{at}.policy"), format_args!("is no delivery policy: {error}"));
                None
            }
        }
    }

    fn happening(
        &mut self,
        at: &str,
        members: HappeningMembers,
        duration: Span,
        carriers: &[CarrierSetup],
        traffic: &[Traffic],
        cards: &RateCards,
    ) -> Option<Happening> {
        if members.at.0 >= duration.0 {
            self.fault(
                &format!("{at}.at"),
                "lies behind the end of the scenario: choose an earlier time",
            );
        }
        let needs: &[&str] = match members.what {
            WhatName::Outage | WhatName::Stall | WhatName::Disabled => &["carrier"],
            WhatName::Latency => &["carrier", "latency_ms"],
            WhatName::Price => &["rate_card"],
            WhatName::Backlog => &["traffic"],
            WhatName::Surge => &["traffic", "factor"],
        };
        let may: &[&str] = if matches!(members.what, WhatName::Price) {
            &["unit_price_usd", "free_allowance"]
        } else {
            &[]
        };
        let given = [
            ("carrier", members.carrier.is_some()),
            ("traffic", members.traffic.is_some()),
            ("rate_card", members.rate_card.is_some()),
            ("latency_ms", members.latency_ms.is_some()),
            ("unit_price_usd", members.unit_price_usd.is_some()),
            ("free_allowance", members.free_allowance.is_some()),
            ("factor", members.factor.is_some()),
        ];
        for (name, given) in given {
            match (needs.contains(&name), may.contains(&name), given) {
                (true, _, false) => self.fault(&format!("{at}.{name}"), "is missing: this kind of happening needs it"),
                (false, false, true) => {
                    self.fault(
                        &format!("{at}.{name}"),
                        "has no meaning for this kind of happening: remove it",
                    );
                }
                _ => {}
            }
        }
        let named = |reader: &mut Self, field: &str, value: Option<String>, known: Vec<&str>| {
            let value = value?;
            if !known.contains(&value.as_str()) {
                let message = format!("{value:?} is not in this scenario; there are {}", known.join(", "));
                reader.fault(&format!("{at}.{field}"), message);
            }
            Some(value)
        };
        let carrier = named(
            self,
            "carrier",
            members.carrier,
            carriers.iter().map(|own| own.id.as_str()).collect(),
        );
        let lane = named(
            self,
            "traffic",
            members.traffic,
            traffic.iter().map(|own| own.name.as_str()).collect(),
        );
        let card = named(
            self,
            "rate_card",
            members.rate_card,
            cards.iter().map(|own| own.id.as_str()).collect(),
        );
        let amount = |reader: &mut Self, field: &str, value: Option<f64>, most: f64| {
            value.map(|value| reader.number(&format!("{at}.{field}"), value, 0.0, most))
        };
        let latency_ms = amount(self, "latency_ms", members.latency_ms, 120_000.0);
        let unit_price_usd = amount(self, "unit_price_usd", members.unit_price_usd, 1e6);
        let free_allowance = amount(self, "free_allowance", members.free_allowance, 1e18);
        let factor = amount(self, "factor", members.factor, 1e6);
        if matches!(members.what, WhatName::Price) && unit_price_usd.is_none() && free_allowance.is_none() {
            self.fault(at, "changes no price: give unit_price_usd or free_allowance");
        }
        if carrier.as_deref() == Some(FLOOR) && !matches!(members.what, WhatName::Disabled) {
            let message = format!("{FLOOR} is the database itself, without which nothing runs: name another carrier");
            self.fault(&format!("{at}.carrier"), message);
        }
        let keyless = |lane: &str| traffic.iter().any(|own| own.name == lane && own.key.is_none());
        if matches!(members.what, WhatName::Backlog) && lane.as_deref().is_some_and(keyless) {
            self.fault(
                &format!("{at}.traffic"),
                "has no key, and only keys stay together: give it one",
            );
        }
        let what = match members.what {
            WhatName::Outage => What::Outage { carrier: carrier? },
            WhatName::Stall => What::Stall { carrier: carrier? },
            WhatName::Disabled => What::Disabled { carrier: carrier? },
            WhatName::Latency => What::Latency {
                carrier: carrier?,
                latency_ms: latency_ms?,
            },
            WhatName::Price => What::Price {
                rate_card: card?,
                unit_price_usd,
                free_allowance,
            },
            WhatName::Backlog => What::Backlog { traffic: lane? },
            WhatName::Surge => What::Surge {
                traffic: lane?,
                factor: factor?,
            },
        };
        let until = members.r#for.map(|span| Span(members.at.0 + span.0));
        Some(Happening {
            at: members.at,
            until,
            what,
        })
    }
}
