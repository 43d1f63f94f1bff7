//! `check-config`: prints what is in force and where it came from, and every mistake; it starts and changes nothing.

use std::io::{self, Write};
use std::process::ExitCode;

use serde_json::{Value, json};

use crate::config::variables::{Fallback, sections};
use crate::config::{self, Origin, Report, Setting};

/// Prints the configuration of this process. Exit code 0 when the service would start with it, 2 when it would not.
pub fn main(json: bool) -> ExitCode {
    let names = config::process_variable_names();
    match run(&config::process_variable, &names, json, &mut io::stdout().lock()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(2),
        Err(_) => ExitCode::FAILURE,
    }
}

/// Writes the report to `out` and says whether the configuration is valid. `get` answers what a variable holds, `names`
/// are the variables that are set.
///
/// # Errors
///
/// Only when `out` cannot be written.
pub fn run(
    get: &dyn Fn(&str) -> Option<String>,
    names: &[String],
    json: bool,
    out: &mut dyn Write,
) -> io::Result<bool> {
    let report = Report::of(get, names);
    if json {
        write_json(&report, out)?
    } else {
        write_text(&report, out)?
    }
    Ok(report.mistakes.is_empty())
}

fn write_text(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let width = report
        .settings
        .iter()
        .map(|setting| setting.variable.name.len())
        .max()
        .unwrap_or_default();
    for section in sections() {
        writeln!(out, "{}", section.title)?;
        let own = |setting: &&Setting| section.variables.contains(setting.variable);
        for setting in report.settings.iter().filter(own) {
            let line = format!(
                "  {:width$}  {:11}  {}",
                setting.variable.name,
                origin(setting),
                value(setting)
            );
            writeln!(out, "{}{}", line.trim_end(), remarks(setting))?;
        }
        writeln!(out)?;
    }
    for warning in &report.warnings {
        writeln!(out, "warning: {warning}")?;
    }
    for mistake in &report.mistakes {
        writeln!(out, "mistake: {}", mistake.message)?;
    }
    match report.mistakes.len() {
        0 if report
            .settings
            .iter()
            .any(|s| s.variable.name == "DATABASE_URL" && s.origin == Origin::Default) =>
        {
            writeln!(
                out,
                "The configuration is valid. serve and migrate also need DATABASE_URL; dev brings its own database."
            )
        }
        0 => writeln!(out, "The configuration is valid."),
        1 => writeln!(out, "The service does not start with this configuration: 1 mistake."),
        count => writeln!(
            out,
            "The service does not start with this configuration: {count} mistakes."
        ),
    }
}

fn value(setting: &Setting) -> String {
    match (&setting.shown, setting.variable.default) {
        (Some(shown), _) => shown.clone(),
        (None, Fallback::Computed(from)) => format!("({from})"),
        (None, _) => "(unset)".to_owned(),
    }
}

fn remarks(setting: &Setting) -> String {
    let idle = (!setting.variable.active).then_some("not yet in use by this version");
    let remarks: Vec<&str> = setting.note.as_deref().into_iter().chain(idle).collect();
    if remarks.is_empty() {
        String::new()
    } else {
        format!("  ({})", remarks.join("; "))
    }
}

fn origin(setting: &Setting) -> &'static str {
    match setting.origin {
        Origin::Environment => "environment",
        Origin::Default => "default",
    }
}

fn write_json(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let variables: Vec<Value> = report
        .settings
        .iter()
        .map(|setting| {
            json!({
                "name": setting.variable.name,
                "value": setting.shown,
                "origin": origin(setting),
                "secret": setting.variable.secret,
                "active": setting.variable.active,
                "note": setting.note,
            })
        })
        .collect();
    let mistakes: Vec<Value> = report
        .mistakes
        .iter()
        .map(|mistake| json!({ "variable": mistake.variable, "message": mistake.message }))
        .collect();
    let document = json!({
        "valid": report.mistakes.is_empty(),
        "variables": variables,
        "warnings": report.warnings,
        "mistakes": mistakes,
    });
    writeln!(out, "{document:#}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(env: &[(&str, &str)], json: bool) -> (bool, String) {
        let names: Vec<String> = env.iter().map(|(name, _)| (*name).to_owned()).collect();
        let get = |name: &str| {
            env.iter()
                .find(|(known, _)| *known == name)
                .map(|(_, value)| (*value).to_owned())
        };
        let mut out = Vec::new();
        let valid = run(&get, &names, json, &mut out).expect("a vector can be written");
        (valid, String::from_utf8(out).expect("text"))
    }

    fn line<'a>(text: &'a str, name: &str) -> &'a str {
        let found = text.lines().find(|line| line.split_whitespace().next() == Some(name));
        found.unwrap_or_else(|| panic!("no line for {name} in\n{text}"))
    }

    #[test]
    fn every_variable_has_a_line_with_its_value_and_origin() {
        let (valid, text) = output(&[("PORT", "4400"), ("DATABASE_URL", "postgres://ov:pa55@db/ov")], false);
        assert!(valid, "{text}");
        for variable in config::variables::all() {
            let line = line(&text, variable.name);
            assert_eq!(
                line.contains("not yet in use by this version"),
                !variable.active,
                "{line}"
            );
        }
        let words = |name| {
            line(&text, name)
                .split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(words("PORT"), ["PORT", "environment", "4400"]);
        assert_eq!(words("BASE_URL")[..3], ["BASE_URL", "default", "http://localhost:4400"]);
        assert_eq!(words("DATABASE_URL"), ["DATABASE_URL", "environment", "(set)"]);
        assert_eq!(
            words("DATABASE_DIRECT_URL"),
            ["DATABASE_DIRECT_URL", "default", "(set)"]
        );
        assert_eq!(words("SSL_CERT_FILE"), ["SSL_CERT_FILE", "default", "(unset)"]);
        assert!(
            line(&text, "EVENTS_RECEIPT_RETENTION_DAYS").contains("365 in force"),
            "{text}"
        );
        assert!(!text.contains("pa55"));
    }

    #[test]
    fn mistakes_are_all_printed_and_the_answer_is_no() {
        let (valid, text) = output(&[("PORT", "http"), ("EVENTS_WORKER", "perhaps")], false);
        assert!(!valid);
        assert!(
            text.contains("mistake: PORT must be a whole number from 0 to 65535, got \"http\""),
            "{text}"
        );
        assert!(
            text.contains("mistake: EVENTS_WORKER must be on or off, got \"perhaps\""),
            "{text}"
        );
        assert!(text.ends_with("2 mistakes.\n"), "{text}");
    }

    #[test]
    fn json_says_the_same_for_scripts() {
        let (valid, text) = output(
            &[
                ("PORT", "http"),
                ("EVENTS_WROKER", "off"),
                ("NATS_URL", "nats://u:pa55@n"),
            ],
            true,
        );
        assert!(!valid);
        assert!(!text.contains("pa55"));
        let document: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(document["valid"], false);
        assert_eq!(document["mistakes"][0]["variable"], "PORT");
        assert_eq!(document["mistakes"].as_array().map(Vec::len), Some(1));
        assert!(
            document["warnings"][0]
                .as_str()
                .is_some_and(|warning| warning.contains("EVENTS_WORKER")),
            "{text}"
        );
        let variables = document["variables"].as_array().expect("a list");
        assert_eq!(variables.len(), config::variables::all().count());
        let shown = |name: &str| {
            let variable = variables.iter().find(|variable| variable["name"] == name);
            variable.expect("every variable is listed")
        };
        let expected = json!({ "name": "NATS_URL", "value": "(set)", "origin": "environment", "secret": true,
            "active": true, "note": null });
        assert_eq!(*shown("NATS_URL"), expected);
        assert_eq!(shown("EVENTS_USAGE_FLUSH_MS")["active"], false);
    }
}
