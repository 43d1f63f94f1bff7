//! Reads scenario files: everything that is wrong with one is told at once, by file, path and remedy.

use std::fmt;

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::members::{COUNT, Form, Mistakes, NUMBER, Object, TEXT};
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
const LATENCY_MS_MAX: f64 = 120_000.0;
/// Between two looks of a process, in milliseconds.
const POLL_MS: f64 = 500.0;

const SCENARIO: [&str; 10] = [
    "title",
    "description",
    "start",
    "duration",
    "seed",
    "poll_ms",
    "carriers",
    "rate_cards",
    "traffic",
    "happenings",
];
const CARRIER: [&str; 6] = ["id", "classes", "provider", "rate_card", "latency_ms", "used"];
const TRAFFIC: [&str; 5] = ["name", "policy", "per_second", "key", "daily_swing"];
const HAPPENING: [&str; 10] = [
    "what",
    "at",
    "for",
    "carrier",
    "traffic",
    "rate_card",
    "latency_ms",
    "unit_price_usd",
    "free_allowance",
    "factor",
];

/// May be empty.
const DESCRIPTION: Form<String> = Form {
    what: "a text",
    of: |value| value.as_str().map(str::to_owned),
};

const SPAN: Form<Span> = Form {
    what: "a duration such as \"90s\", \"15m\", \"1h30m\" or \"30d\"",
    of: |value| Span::parse(value.as_str()?),
};

const INSTANT: Form<i64> = Form {
    what: "a time such as \"2026-10-01T00:00:00Z\"",
    of: |value| OffsetDateTime::parse(value.as_str()?, &Rfc3339).ok().map(millis),
};

const CLASSES: Form<Vec<Class>> = Form {
    what: "a list of TOPIC, QUEUE and STREAM",
    of: |value| {
        let class = |value: &serde_json::Value| Class::ALL.into_iter().find(|class| value == class.label());
        value.as_array()?.iter().map(class).collect()
    },
};

const WHAT: Form<Kind> = Form {
    what: "one of outage, stall, latency, disabled, price, backlog and surge",
    of: |value| match value.as_str()? {
        "outage" => Some(Kind::Outage),
        "stall" => Some(Kind::Stall),
        "latency" => Some(Kind::Latency),
        "disabled" => Some(Kind::Disabled),
        "price" => Some(Kind::Price),
        "backlog" => Some(Kind::Backlog),
        "surge" => Some(Kind::Surge),
        _ => None,
    },
};

/// What a happening is.
#[derive(Clone, Copy)]
enum Kind {
    Outage,
    Stall,
    Latency,
    Disabled,
    Price,
    Backlog,
    Surge,
}

impl Kind {
    /// The members that it must have beside its time.
    fn needs(self) -> &'static [&'static str] {
        match self {
            Self::Outage | Self::Stall | Self::Disabled => &["carrier"],
            Self::Latency => &["carrier", "latency_ms"],
            Self::Price => &["rate_card"],
            Self::Backlog => &["traffic"],
            Self::Surge => &["traffic", "factor"],
        }
    }

    /// The members that it may have.
    fn may(self) -> &'static [&'static str] {
        match self {
            Self::Price => &["unit_price_usd", "free_allowance"],
            _ => &[],
        }
    }
}

/// Everything that is wrong with a scenario file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct ScenarioMistakes {
    /// The file as it was named.
    pub file: String,
    /// Each mistake with where it is; at least one.
    pub mistakes: Vec<String>,
}

impl ScenarioMistakes {
    /// Each mistake as a line of its own that names the file.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        self.mistakes.iter().map(|mistake| format!("{}: {mistake}", self.file))
    }
}

impl fmt::Display for ScenarioMistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.lines().collect::<Vec<_>>().join("; "))
    }
}

/// Says what is wrong with the text of a policy: each mistake with its path below the policy (`.class`), and the sentence.
pub type PolicyJudge<'a> = &'a dyn Fn(&str) -> Vec<(String, String)>;

impl Scenario {
    /// Reads a scenario. `file` is what messages call it. Where it has no cards of its own, those of the service are in
    /// force. Of policies, only what placement reads is judged.
    ///
    /// # Errors
    ///
    /// Everything that is wrong with it.
    pub fn parse(file: &str, text: &[u8]) -> Result<Self, ScenarioMistakes> {
        Self::parse_judged(file, text, &|_| Vec::new())
    }

    /// As [`Scenario::parse`], with every policy judged by `judge` as well.
    ///
    /// # Errors
    ///
    /// Everything that is wrong with it.
    pub fn parse_judged(file: &str, text: &[u8], judge: PolicyJudge<'_>) -> Result<Self, ScenarioMistakes> {
        let mut reader = Reader {
            mistakes: Mistakes::default(),
            judge,
        };
        match reader.file(text) {
            Some(scenario) if reader.mistakes.is_empty() => Ok(scenario),
            _ => Err(ScenarioMistakes {
                file: file.to_owned(),
                mistakes: reader.mistakes.finish(),
            }),
        }
    }
}

struct Reader<'a> {
    mistakes: Mistakes,
    judge: PolicyJudge<'a>,
}

/// What happenings may refer to: whatever is named, rightly described or not.
#[derive(Default)]
struct Names {
    carriers: Vec<String>,
    traffic: Vec<String>,
    /// Of the traffic, what has no key.
    keyless: Vec<String>,
    /// Unknown where the cards cannot be read.
    cards: Option<Vec<String>>,
}

impl Reader<'_> {
    fn file(&mut self, text: &[u8]) -> Option<Scenario> {
        if text.len() > SCENARIO_BYTES_MAX {
            let length = text.len();
            self.mistakes.add(
                "",
                format_args!("has {length} bytes; a scenario has at most {SCENARIO_BYTES_MAX}: make it smaller"),
            );
            return None;
        }
        let whole: Box<serde_json::value::RawValue> = match serde_json::from_slice(text) {
            Ok(whole) => whole,
            Err(error) => {
                self.mistakes
                    .add("", format_args!("is not JSON ({error}): correct it there"));
                return None;
            }
        };
        let file = self.mistakes.object("", whole.get(), "a scenario", &SCENARIO)?;
        self.scenario(&file)
    }

    fn scenario(&mut self, file: &Object) -> Option<Scenario> {
        let title = self.mistakes.needed(file, "title", &TEXT);
        let description = self.mistakes.optional(file, "description", &DESCRIPTION);
        let start_ms = self.mistakes.needed(file, "start", &INSTANT);
        let duration = self.mistakes.needed(file, "duration", &SPAN);
        if duration.is_some_and(|span| span.0.is_zero() || span.0.as_secs() / 86_400 >= DURATION_DAYS_MAX) {
            let message = format_args!("must be from 1s to {DURATION_DAYS_MAX}d");
            self.mistakes.add("duration", message);
        }
        let seed = self.mistakes.optional(file, "seed", &COUNT).unwrap_or_default();
        let poll_ms = self.mistakes.optional(file, "poll_ms", &NUMBER).or(Some(POLL_MS));
        let poll_ms = self.mistakes.within("poll_ms", poll_ms, 1.0, 60_000.0)?;
        let mut names = Names::default();
        // Nothing has expired by the first day of all, so that a missing start is one mistake and not many.
        let cards = self.cards(file, start_ms.unwrap_or_default());
        names.cards = cards
            .as_ref()
            .map(|cards| cards.iter().map(|card| card.id.clone()).collect());
        let carriers = self.carriers(file, poll_ms, &mut names);
        let traffic = self.all_traffic(file, &mut names);
        let mut happenings = Vec::new();
        for (at, text) in self.mistakes.list(file, "happenings", HAPPENINGS_MAX) {
            happenings.extend(self.happening(&at, text.get(), duration, &names));
        }
        Some(Scenario {
            title: title?,
            description: description.unwrap_or_default(),
            start_ms: start_ms?,
            duration: duration?,
            seed,
            poll_ms,
            carriers,
            traffic,
            cards: cards?,
            happenings,
        })
    }

    fn cards(&mut self, file: &Object, start_ms: i64) -> Option<RateCards> {
        let own = file.raw("rate_cards").map(|cards| ("rate_cards", cards));
        let (name, cards) = own.unwrap_or(("the cards of the service", SHIPPED_RATE_CARDS));
        match RateCards::parse(name, cards.as_bytes(), start_ms) {
            Ok(cards) => Some(cards),
            Err(found) => {
                for line in found.lines() {
                    self.mistakes.add("", line);
                }
                None
            }
        }
    }

    fn carriers(&mut self, file: &Object, poll_ms: f64, names: &mut Names) -> Vec<CarrierSetup> {
        let mut carriers = Vec::new();
        for (at, text) in self.mistakes.list(file, "carriers", CARRIERS_MAX) {
            let Some(object) = self.mistakes.object(&at, text.get(), "a carrier", &CARRIER) else {
                continue;
            };
            let id = self.mistakes.needed(&object, "id", &TEXT);
            if let Some(id) = &id
                && names.carriers.contains(id)
            {
                self.mistakes
                    .add(&at, format_args!("{id:?} is there already: keep one"));
            }
            names.carriers.extend(id.clone());
            carriers.extend(self.carrier(&object, id, poll_ms));
        }
        if !names.carriers.iter().any(|id| id == FLOOR) {
            let floor = self.mistakes.object("carriers", "{}", "a carrier", &CARRIER);
            carriers.splice(
                0..0,
                floor.and_then(|floor| self.carrier(&floor, Some(FLOOR.to_owned()), poll_ms)),
            );
            names.carriers.insert(0, FLOOR.to_owned());
        }
        carriers
    }

    fn carrier(&mut self, object: &Object, id: Option<String>, poll_ms: f64) -> Option<CarrierSetup> {
        let known = KNOWN.iter().find(|known| id.as_deref() == Some(known.id));
        let classes = self.mistakes.optional(object, "classes", &CLASSES);
        let classes = classes.or_else(|| known.map(|known| known.classes.to_vec()));
        let provider = self.mistakes.optional(object, "provider", &TEXT);
        let provider = provider.or_else(|| known.map(|known| known.provider.to_owned()));
        let rate_card = self.mistakes.optional(object, "rate_card", &TEXT);
        let rate_card = rate_card.or_else(|| known.map(|known| known.rate_card.to_owned()));
        let latency_ms = self.mistakes.optional(object, "latency_ms", &NUMBER);
        let latency_ms = latency_ms.or_else(|| known.map(|known| known.latency_ms));
        let latency_ms = self
            .mistakes
            .within(&object.path("latency_ms"), latency_ms, 0.0, LATENCY_MS_MAX);
        let used = self.mistakes.optional(object, "used", &COUNT).unwrap_or_default();
        let id = id?;
        for name in ["classes", "provider", "rate_card", "latency_ms"] {
            if known.is_none() && object.raw(name).is_none() {
                let ids: Vec<&str> = KNOWN.iter().map(|known| known.id).collect();
                self.mistakes.add(
                    &object.path(name),
                    format_args!("is missing: {id:?} is none of {}, so say what it is", ids.join(", ")),
                );
            }
        }
        // What the floor promises is its poll.
        let latency_ms = if id == FLOOR {
            floor_latency_ms(poll_ms)
        } else {
            latency_ms?
        };
        Some(CarrierSetup {
            id,
            classes: classes?,
            provider: provider?,
            rate_card: rate_card?,
            latency_ms,
            used,
        })
    }

    fn all_traffic(&mut self, file: &Object, names: &mut Names) -> Vec<Traffic> {
        let mut traffic = Vec::new();
        let lanes = self.mistakes.list(file, "traffic", TRAFFIC_MAX);
        if lanes.is_empty() && matches!(file.raw("traffic"), None | Some("[]")) {
            self.mistakes
                .add("traffic", "is empty: name at least one stream of events");
        }
        for (at, text) in lanes {
            let Some(object) = self.mistakes.object(&at, text.get(), "a stream of events", &TRAFFIC) else {
                continue;
            };
            let name = self.mistakes.needed(&object, "name", &TEXT);
            if let Some(name) = &name
                && names.traffic.contains(name)
            {
                self.mistakes.add(
                    &object.path("name"),
                    format_args!("{name:?} is there already: choose another"),
                );
            }
            if object.raw("key").is_none() {
                names.keyless.extend(name.clone());
            }
            names.traffic.extend(name.clone());
            traffic.extend(self.traffic(&object, name));
        }
        traffic
    }

    fn traffic(&mut self, object: &Object, name: Option<String>) -> Option<Traffic> {
        let per_second = self.mistakes.needed(object, "per_second", &NUMBER);
        let per_second = self
            .mistakes
            .within(&object.path("per_second"), per_second, 0.0, PER_SECOND_MAX);
        let daily_swing = self.mistakes.optional(object, "daily_swing", &NUMBER);
        let daily_swing = self
            .mistakes
            .within(&object.path("daily_swing"), daily_swing.or(Some(0.0)), 0.0, 1.0);
        let key = self.mistakes.optional(object, "key", &TEXT);
        let policy = self.mistakes.there(object, "policy", "a delivery policy")?;
        let at = object.path("policy");
        let judged = (self.judge)(policy);
        for (path, sentence) in &judged {
            self.mistakes.add(&format!("{at}{path}"), sentence);
        }
        let intent = match Intent::parse(policy) {
            Ok(intent) => Some(intent),
            Err(error) => {
                if judged.is_empty() {
                    self.mistakes
                        .add(&at, format_args!("is no delivery policy ({error}): correct it there"));
                }
                None
            }
        };
        Some(Traffic {
            name: name?,
            policy: policy.to_owned(),
            intent: intent?,
            key,
            per_second: per_second?,
            daily_swing: daily_swing?,
        })
    }

    fn happening(&mut self, at: &str, text: &str, duration: Option<Span>, names: &Names) -> Option<Happening> {
        let object = self.mistakes.object(at, text, "a happening", &HAPPENING)?;
        let starts = self.mistakes.needed(&object, "at", &SPAN);
        if starts.zip(duration).is_some_and(|(starts, end)| starts.0 >= end.0) {
            self.mistakes.add(
                &object.path("at"),
                "lies behind the end of the scenario: choose an earlier time",
            );
        }
        let lasts = self.mistakes.optional(&object, "for", &SPAN);
        let kind = self.mistakes.needed(&object, "what", &WHAT);
        if let Some(kind) = kind {
            self.fitting(&object, kind);
        }
        let carrier = self.named(&object, "carrier", Some(&names.carriers));
        let lane = self.named(&object, "traffic", Some(&names.traffic));
        let card = self.named(&object, "rate_card", names.cards.as_ref());
        let latency_ms = self.amount(&object, "latency_ms", LATENCY_MS_MAX);
        let unit_price_usd = self.amount(&object, "unit_price_usd", 1e6);
        let free_allowance = self.amount(&object, "free_allowance", 1e18);
        let factor = self.amount(&object, "factor", 1e6);
        let kind = kind?;
        if carrier.as_deref() == Some(FLOOR) && !matches!(kind, Kind::Disabled) {
            let message = format!("{FLOOR} is the database itself, without which nothing runs: name another carrier");
            self.mistakes.add(&object.path("carrier"), message);
        }
        if matches!(kind, Kind::Backlog) && lane.as_ref().is_some_and(|lane| names.keyless.contains(lane)) {
            self.mistakes.add(
                &object.path("traffic"),
                "has no key, and only keys stay together: give it one",
            );
        }
        let what = match kind {
            Kind::Outage => What::Outage { carrier: carrier? },
            Kind::Stall => What::Stall { carrier: carrier? },
            Kind::Disabled => What::Disabled { carrier: carrier? },
            Kind::Latency => What::Latency {
                carrier: carrier?,
                latency_ms: latency_ms?,
            },
            Kind::Price => What::Price {
                rate_card: card?,
                unit_price_usd,
                free_allowance,
            },
            Kind::Backlog => What::Backlog { traffic: lane? },
            Kind::Surge => What::Surge {
                traffic: lane?,
                factor: factor?,
            },
        };
        let at = starts?;
        Some(Happening {
            at,
            until: lasts.map(|span| Span(at.0 + span.0)),
            what,
        })
    }

    /// Tells what its kind lacks and what it has no use for.
    fn fitting(&mut self, object: &Object, kind: Kind) {
        for name in HAPPENING.iter().filter(|name| !matches!(**name, "what" | "at" | "for")) {
            let given = object.raw(name).is_some();
            let needed = kind.needs().contains(name);
            if needed && !given {
                self.mistakes.add(
                    &object.path(name),
                    "is missing: this kind of happening needs it, so give it",
                );
            } else if given && !needed && !kind.may().contains(name) {
                self.mistakes.add(
                    &object.path(name),
                    "has no meaning for this kind of happening: remove it",
                );
            }
        }
        if matches!(kind, Kind::Price) && kind.may().iter().all(|name| object.raw(name).is_none()) {
            let at = object.path("unit_price_usd");
            self.mistakes.add(
                &at,
                "is missing, as is free_allowance, so that no price changes: give one of the two",
            );
        }
    }

    /// The name of something in this scenario.
    fn named(&mut self, object: &Object, name: &str, known: Option<&Vec<String>>) -> Option<String> {
        let value = self.mistakes.optional(object, name, &TEXT)?;
        if let Some(known) = known
            && !known.contains(&value)
        {
            let known = known.join(", ");
            self.mistakes.add(
                &object.path(name),
                format_args!("{value:?} is not in this scenario; there are {known}"),
            );
        }
        Some(value)
    }

    fn amount(&mut self, object: &Object, name: &str, most: f64) -> Option<f64> {
        let value = self.mistakes.optional(object, name, &NUMBER);
        self.mistakes.within(&object.path(name), value, 0.0, most)
    }
}
