//! The result of a run: named values in order, as lines for people or one line of JSON for programs.

use std::io::{self, Write as _};
use std::process::ExitCode;

use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::percentiles::Latency;

/// Exit code of a run that was made and found something wrong: a refusal, a loss, a bad signature, a wrong order.
const FOUND_FAULTS: u8 = 3;

/// What a run measured.
#[derive(Debug, Default)]
pub(crate) struct Sheet {
    lines: Vec<(String, Value)>,
    faults: Vec<String>,
}

/// How it is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// A line each.
    Lines,
    /// One JSON object.
    Json,
}

impl Sheet {
    /// A sheet that names its mode.
    pub(crate) fn new(mode: &str) -> Self {
        let mut sheet = Self::default();
        sheet.text("mode", mode);
        sheet
    }

    /// A word.
    pub(crate) fn text(&mut self, name: &str, value: impl Into<String>) {
        self.lines.push((name.to_owned(), Value::String(value.into())));
    }

    /// A count.
    pub(crate) fn count(&mut self, name: &str, value: u64) {
        self.lines.push((name.to_owned(), value.into()));
    }

    /// A measure, kept to four digits behind the point.
    pub(crate) fn number(&mut self, name: &str, value: f64) {
        let rounded = (value * 10_000.0).round() / 10_000.0;
        self.lines.push((name.to_owned(), rounded.into()));
    }

    /// The usual quantiles, in milliseconds.
    pub(crate) fn latency(&mut self, name: &str, latency: &Latency) {
        for (label, quantile) in [
            ("p50", 0.5),
            ("p90", 0.9),
            ("p95", 0.95),
            ("p99", 0.99),
            ("p999", 0.999),
            ("max", 1.0),
        ] {
            self.number(&format!("{name}_{label}_ms"), latency.quantile_ms(quantile));
        }
    }

    /// Something that must be zero.
    pub(crate) fn must_be_zero(&mut self, name: &str, value: u64) {
        self.count(name, value);
        if value > 0 {
            self.fault(format!("{name} is {value}"));
        }
    }

    /// Something wrong that was found.
    pub(crate) fn fault(&mut self, what: String) {
        self.faults.push(what);
    }

    /// Shows it on standard output; what was found wrong goes to standard error and into the exit code.
    pub(crate) fn show(&self, format: Format) -> io::Result<ExitCode> {
        let mut out = io::stdout().lock();
        match format {
            Format::Json => writeln!(out, "{}", serde_json::to_string(self)?)?,
            Format::Lines => {
                for (name, value) in &self.lines {
                    match value {
                        Value::String(text) => writeln!(out, "{name:<34} {text}")?,
                        other => writeln!(out, "{name:<34} {other}")?,
                    }
                }
            }
        }
        for fault in &self.faults {
            writeln!(io::stderr(), "load: {fault}")?;
        }
        Ok(if self.faults.is_empty() {
            ExitCode::SUCCESS
        } else {
            ExitCode::from(FOUND_FAULTS)
        })
    }
}

impl Serialize for Sheet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.lines.len()))?;
        for (name, value) in &self.lines {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}
