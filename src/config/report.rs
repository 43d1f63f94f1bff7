//! What is in force and where it came from, for `check-config`, and the example file made from the same table.

use std::fmt::Write as _;

use super::reader::{Mistake, Setting};
use super::variables::{self, Fallback, Variable, sections};
use super::{Config, Delivery, Environment};

/// Everything `check-config` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Every variable, in the order of the table.
    pub settings: Vec<Setting>,
    /// What keeps the service from starting.
    pub mistakes: Vec<Mistake>,
    /// What an operator should know and may keep.
    pub warnings: Vec<String>,
}

impl Report {
    /// Reads everything through `get`; `names` are the variables that are set, whether known or not.
    pub fn of(get: &dyn Fn(&str) -> Option<String>, names: &[String]) -> Self {
        let (config, mut settings, mistakes) = Config::read_all(variables::table(), get);
        settings.sort_by_key(|setting| variables::all().position(|variable| variable.name == setting.variable.name));
        let mut warnings: Vec<String> = names.iter().filter_map(|name| likely_typo(name)).collect();
        warnings.extend(unusual_environment(&settings, config.environment));
        Self {
            settings,
            mistakes,
            warnings,
        }
    }
}

impl Delivery {
    /// What an operator must know about how signing secrets are stored; nothing where they are sealed.
    pub fn secrets_warning(&self) -> Option<&'static str> {
        self.secret_keys
            .is_empty()
            .then_some("EVENTS_SECRET_KEY is not set: signing secrets are stored as they are given")
    }
}

/// Only names that begin like ours are judged: what another program's variables are called is not our business.
fn likely_typo(name: &str) -> Option<String> {
    if !name.starts_with("EVENTS_") || variables::find(name).is_some() {
        return None;
    }
    let near = variables::all()
        .map(|known| (distance(name, known.name), known.name))
        .min()?;
    (near.0 <= 2).then(|| format!("{name} is not a variable of this service; {} was perhaps meant", near.1))
}

/// A misspelt `production` would otherwise pass for development in silence.
fn unusual_environment(settings: &[Setting], read_as: Environment) -> Option<String> {
    let node = settings
        .iter()
        .find(|setting| setting.variable.name == "NODE_ENV")?
        .shown
        .as_deref()?;
    let usual = matches!(node, "production" | "development" | "test");
    (!usual && read_as == Environment::Development).then(|| {
        format!("NODE_ENV is {node:?}, which counts as development; only production turns the production rules on")
    })
}

/// How many letters must be inserted, removed or replaced to turn one name into the other.
fn distance(left: &str, right: &str) -> usize {
    let right = right.as_bytes();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (at, byte) in left.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = at + 1;
        for (column, other) in right.iter().enumerate() {
            let replaced = diagonal + usize::from(byte != *other);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[right.len()]
}

/// The text of `.env.example`: every variable with its default, commented out, so that a copy changes nothing.
pub fn env_example() -> String {
    let mut text = String::from(
        "# Every setting of OpenVibe Events with its default. `openvibe-events dev` needs none of them; production needs\n\
         # DATABASE_URL. `openvibe-events check-config` shows what is in force and where it came from.\n",
    );
    for section in sections() {
        let _ = write!(text, "\n\n# {}\n# {}\n", section.title, "-".repeat(section.title.len()));
        for variable in section.variables {
            text.push('\n');
            text.push_str(&example(variable));
        }
    }
    text
}

fn example(variable: &Variable) -> String {
    let mut text = wrapped(variable.help);
    let default = match variable.default {
        Fallback::Text(default) => default,
        Fallback::Unset => "",
        Fallback::Computed(from) => {
            text.push_str(&wrapped(&format!("Default: {from}.")));
            ""
        }
    };
    if !variable.active {
        text.push_str("# Not yet in use by this version.\n");
    }
    let _ = writeln!(text, "#{}={default}", variable.name);
    text
}

fn wrapped(words: &str) -> String {
    let mut text = String::from("#");
    let mut width = 1;
    for word in words.split(' ') {
        if width + 1 + word.len() > 118 {
            text.push_str("\n#");
            width = 1;
        }
        text.push(' ');
        text.push_str(word);
        width += 1 + word.len();
    }
    text.push('\n');
    text
}
