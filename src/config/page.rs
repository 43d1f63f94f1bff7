//! The reference of all variables, `docs/configuration.md`, made from the table so that it cannot drift from it.

use std::fmt::Write as _;

use super::variables::{Fallback, Variable, sections};

const OPENING: &str = "\
# Configuration

OpenVibe Events is configured by environment variables alone; there is no settings file. This page is made from the table that
the service reads by, and a test keeps the two the same. [`.env.example`](../.env.example) is the same list to copy from.

`openvibe-events check-config` shows what is in force, where each value came from, and what will be ignored; with `--json` for
programs. Every mistake is reported at once, by name, and stops the start with exit code 2. Nothing is guessed: a number is
decimal digits within the range that is stated, a switch is exactly `on` (also spelt `true` or `1`) or `off` unless the table says
otherwise, and an empty value counts as unset. A name that begins with `EVENTS_` and is near to a known one is pointed out.

*Secret* variables are never shown, logged or repeated in a message. *Later* ones are checked by this version, which does not
act on them yet.
";

/// The text of `docs/configuration.md`.
pub fn configuration_page() -> String {
    let mut text = OPENING.to_owned();
    for section in sections() {
        let _ = write!(
            text,
            "\n## {}\n\n| variable | default | |\n|---|---|---|\n",
            section.title
        );
        for variable in section.variables {
            let _ = writeln!(
                text,
                "| `{}` | {} | {} |",
                variable.name,
                default(variable),
                meaning(variable)
            );
        }
    }
    text
}

fn default(variable: &Variable) -> String {
    match variable.default {
        Fallback::Text(value) => format!("`{value}`"),
        Fallback::Unset => "–".to_owned(),
        Fallback::Computed(from) => cell(from),
    }
}

fn meaning(variable: &Variable) -> String {
    let mut text = cell(variable.help);
    if variable.secret {
        text.push_str(" *Secret.*");
    }
    if !variable.active {
        text.push_str(" *Later.*");
    }
    text
}

/// Words that a table cell shows as they are.
fn cell(words: &str) -> String {
    let mut text = String::with_capacity(words.len());
    for character in words.chars() {
        if matches!(character, '|' | '<' | '*' | '\\') {
            text.push('\\');
        }
        text.push(character);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_is_made_from_the_table() {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/");
        let committed = std::fs::read_to_string(format!("{root}docs/configuration.md")).unwrap_or_default();
        if committed != configuration_page() {
            let made = format!("{root}target/configuration.md");
            std::fs::write(made, configuration_page()).expect("the target folder can be written");
            panic!("docs/configuration.md differs from the table of variables: cp target/configuration.md docs/");
        }
    }

    #[test]
    fn a_cell_is_one_cell() {
        for line in configuration_page().lines().filter(|line| line.starts_with("| `")) {
            let bare = line.replace("\\|", "");
            assert_eq!(bare.matches('|').count(), 4, "{line}");
        }
    }
}
