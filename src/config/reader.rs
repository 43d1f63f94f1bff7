//! Reads variables one by one, remembers every mistake and what is in force, and never stops at the first mistake.

use std::fmt;
use std::time::Duration;

use super::values::{self, Refusal};
use super::variables::{Fallback, Table, Variable};

/// One mistake in the environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// The variable to correct.
    pub variable: &'static str,
    /// The whole sentence: the variable, what is allowed, and what was given unless that is a secret.
    pub message: String,
}

/// Every mistake in the environment, in the order of reading.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigErrors(pub Vec<Mistake>);

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let messages: Vec<&str> = self.0.iter().map(|mistake| mistake.message.as_str()).collect();
        f.write_str(&messages.join("; "))
    }
}

impl std::error::Error for ConfigErrors {}

/// Where a value came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The environment.
    Environment,
    /// The table of variables.
    Default,
}

/// One variable as it is in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// The variable.
    pub variable: &'static Variable,
    /// Its value in a form that may be shown; `None` where nothing is set.
    pub shown: Option<String>,
    /// Where the value came from.
    pub origin: Origin,
    /// What holds instead of the value, and why.
    pub note: Option<String>,
}

/// The longest part of a value that a message repeats, in characters.
const SHOWN_MAX: usize = 200;

pub(super) struct Reader<'a> {
    table: Table,
    get: &'a dyn Fn(&str) -> Option<String>,
    settings: Vec<Setting>,
    mistakes: Vec<Mistake>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(table: Table, get: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self {
            table,
            get,
            settings: Vec::new(),
            mistakes: Vec::new(),
        }
    }

    pub(super) fn finish(self) -> (Vec<Setting>, Vec<Mistake>) {
        (self.settings, self.mistakes)
    }

    /// A variable with a default in the table. After a mistake the default stands in, so that reading can go on.
    pub(super) fn value<T>(&mut self, name: &'static str, parse: impl Fn(&str) -> Result<T, Refusal>) -> T {
        let variable = self.known(name);
        let Fallback::Text(default) = variable.default else {
            unreachable!("{name} has a default text in the table");
        };
        let given = self
            .given(variable)
            .and_then(|given| self.accept(variable, parse(&given), &given));
        given.unwrap_or_else(|| parse(default).unwrap_or_else(|refusal| unreachable!("{name}: {}", refusal.allowed)))
    }

    /// A variable without a default text; `None` when it is unset or wrong.
    pub(super) fn optional<T>(&mut self, name: &'static str, parse: impl Fn(&str) -> Result<T, Refusal>) -> Option<T> {
        let variable = self.known(name);
        let given = self.given(variable)?;
        self.accept(variable, parse(&given), &given)
    }

    /// A variable whose rules live in another room; `rules` says every mistake in a sentence of its own.
    pub(super) fn judged<T>(
        &mut self,
        name: &'static str,
        rules: impl FnOnce(Option<&str>) -> Result<T, Vec<String>>,
    ) -> Option<T> {
        let variable = self.known(name);
        let given = self.given(variable);
        let default = match variable.default {
            Fallback::Text(text) => Some(text),
            Fallback::Unset | Fallback::Computed(_) => None,
        };
        match rules(given.as_deref().or(default)) {
            Ok(value) => Some(value),
            Err(_) if given.is_some_and(|given| is_hidden(variable, &given)) => {
                self.mistake(
                    name,
                    "is wrong; what was given is not repeated, since it may hold a password",
                );
                None
            }
            Err(faults) => {
                for fault in faults {
                    self.mistake(name, format_args!("is wrong: {fault}"));
                }
                None
            }
        }
    }

    /// A whole number.
    pub(super) fn number<T: TryFrom<u64>>(&mut self, name: &'static str, least: u64, most: u64) -> T {
        let number = self.value(name, |text| values::whole(text, least, most));
        T::try_from(number).unwrap_or_else(|_| unreachable!("{name}: the range fits the type"))
    }

    pub(super) fn millis(&mut self, name: &'static str, least: u64, most: u64) -> Duration {
        Duration::from_millis(self.number(name, least, most))
    }

    pub(super) fn seconds(&mut self, name: &'static str, least: u64, most: u64) -> Duration {
        Duration::from_secs(self.number(name, least, most))
    }

    pub(super) fn days(&mut self, name: &'static str, least: u64, most: u64) -> Duration {
        Duration::from_secs(self.number::<u64>(name, least, most) * 86_400)
    }

    /// What the table's carriers declare.
    pub(super) fn table(&self) -> Table {
        self.table
    }

    fn known(&self, name: &str) -> &'static Variable {
        self.table
            .find(name)
            .expect("every variable that is read stands in the table")
    }

    /// Whether the environment sets a variable that has been read, rightly or wrongly.
    pub(super) fn is_set(&mut self, name: &'static str) -> bool {
        self.setting(name).origin == Origin::Environment
    }

    /// What may be shown of a variable that has been read; empty where nothing is set.
    pub(super) fn shown(&mut self, name: &'static str) -> String {
        self.setting(name).shown.clone().unwrap_or_default()
    }

    /// Says what a computed default came to.
    pub(super) fn computed(&mut self, name: &'static str, value: &str) {
        let setting = self.setting(name);
        if setting.origin == Origin::Default {
            setting.shown = Some(shown(setting.variable, value));
        }
    }

    /// Says that something else than the value is in force.
    pub(super) fn note(&mut self, name: &'static str, note: impl Into<String>) {
        self.setting(name).note = Some(note.into());
    }

    /// Adds a mistake that no single value shows. `says` completes the sentence that begins with the name.
    pub(super) fn mistake(&mut self, name: &'static str, says: impl fmt::Display) {
        self.mistakes.push(Mistake {
            variable: name,
            message: format!("{name} {says}"),
        });
    }

    fn setting(&mut self, name: &'static str) -> &mut Setting {
        let found = self.settings.iter_mut().find(|setting| setting.variable.name == name);
        found.expect("a variable is read before it is spoken of")
    }

    fn given(&mut self, variable: &'static Variable) -> Option<String> {
        let given = (self.get)(variable.name)
            .map(|text| text.trim().to_owned())
            .filter(|text| !text.is_empty());
        let (origin, shown) = match (&given, variable.default) {
            (Some(text), _) => (Origin::Environment, Some(shown(variable, text))),
            (None, Fallback::Text(text)) => (Origin::Default, Some(text.to_owned())),
            (None, Fallback::Unset | Fallback::Computed(_)) => (Origin::Default, None),
        };
        self.settings.push(Setting {
            variable,
            shown,
            origin,
            note: None,
        });
        given
    }

    fn accept<T>(&mut self, variable: &'static Variable, parsed: Result<T, Refusal>, given: &str) -> Option<T> {
        let refusal = match parsed {
            Ok(value) => return Some(value),
            Err(refusal) => refusal,
        };
        let Refusal { allowed, given: part } = refusal;
        let part = part.as_deref().unwrap_or(given);
        if is_hidden(variable, given) {
            self.mistake(variable.name, format_args!("must {allowed}"));
        } else {
            self.mistake(variable.name, format_args!("must {allowed}, got {:?}", cut(part)));
        }
        None
    }
}

/// A password in a place that should hold none is still a password; nothing that may be shown needs an `@`.
fn is_hidden(variable: &Variable, text: &str) -> bool {
    variable.secret || text.contains('@')
}

fn shown(variable: &Variable, text: &str) -> String {
    if is_hidden(variable, text) {
        "(set)".to_owned()
    } else {
        cut(text)
    }
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(SHOWN_MAX) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}
