//! The figures and their aims: from the results of many runs to a table.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::fault::Fault;
use crate::figures::{Against, Bound, FIGURES, Figure, Source};

/// What stands behind this line in an existing file is written by people and kept.
const NOTES: &str = "<!-- Written by hand from here on; scripts/bench.sh keeps it. -->";

/// All results, by measure and round.
#[derive(Debug, Default)]
pub(crate) struct Results {
    environment: Value,
    sheets: BTreeMap<String, BTreeMap<u64, Value>>,
}

/// A figure that was measured.
#[derive(Debug)]
struct Row<'a> {
    figure: &'a Figure,
    /// Medians over the rounds.
    measured: f64,
    reference: Option<f64>,
    /// Of the ratios of the rounds, not of the medians.
    ratio: Option<f64>,
    met: bool,
    rounds: Vec<f64>,
}

impl Results {
    /// Reads lines of `{"measure", "round", "sheet"}`.
    pub(crate) fn read(path: &Path) -> Result<Self, Fault> {
        let text = fs::read_to_string(path).map_err(|source| Fault::File {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&text).map_err(|what| Fault::Content {
            path: path.to_owned(),
            what,
        })
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut results = Self::default();
        for (number, line) in (1..).zip(text.lines()) {
            let mut value: Value = serde_json::from_str(line).map_err(|error| format!("line {number}: {error}"))?;
            let sheet = value["sheet"].take();
            let (Some(measure), Some(round)) = (value["measure"].as_str(), value["round"].as_u64()) else {
                return Err(format!("line {number} names no measure and round"));
            };
            if measure == "environment" {
                results.environment = sheet;
            } else {
                let rounds = results.sheets.entry(measure.to_owned()).or_default();
                rounds.insert(round, sheet);
            }
        }
        Ok(results)
    }

    fn value(&self, source: Source, round: u64) -> Option<f64> {
        self.sheets.get(source.0)?.get(&round)?[source.1].as_f64()
    }

    fn reference(&self, against: &Against, round: u64) -> Option<f64> {
        match against {
            Against::Nothing => None,
            Against::Value(source) => self.value(*source, round),
            Against::Middle(sources) => median(sources.iter().filter_map(|source| self.value(*source, round))),
            Against::FloorAndTwoCommits => {
                let floor_ms = self.value(Source("floor", "received_p50_ms"), round)?;
                let commits_per_s = self.value(Source("r1_one_client", "per_s"), round)?;
                Some(floor_ms + 2.0 * 1000.0 / commits_per_s)
            }
        }
    }

    fn rows(&self) -> Vec<Row<'static>> {
        FIGURES.iter().filter_map(|figure| self.row(figure)).collect()
    }

    fn row<'a>(&self, figure: &'a Figure) -> Option<Row<'a>> {
        let rounds = self.sheets.get(figure.measured.0)?.keys();
        let pairs: Vec<(f64, Option<f64>)> = rounds
            .filter_map(|&round| {
                let measured = self.value(figure.measured, round)?;
                Some((measured, self.reference(&figure.against, round)))
            })
            .collect();
        let measured = median(pairs.iter().map(|pair| pair.0))?;
        let ratios: Vec<f64> = pairs
            .iter()
            .filter_map(|(value, reference)| Some(value / (*reference)?))
            .collect();
        let ratio = median(ratios.iter().copied());
        let judged = match figure.against {
            Against::Nothing => Some(measured),
            _ => ratio,
        };
        Some(Row {
            figure,
            measured,
            reference: median(pairs.iter().filter_map(|pair| pair.1)),
            ratio,
            met: judged.is_some_and(|value| match figure.bound {
                Bound::AtLeast(bound) => value >= bound,
                Bound::AtMost(bound) => value <= bound,
            }),
            rounds: match figure.against {
                Against::Nothing => pairs.iter().map(|pair| pair.0).collect(),
                _ => ratios,
            },
        })
    }

    /// What went wrong in the runs: losses, refusals and the like.
    fn faults(&self) -> Vec<String> {
        const MUST_BE_ZERO: [&str; 7] = [
            "not_2xx",
            "broken_exchanges",
            "lost",
            "order_faults",
            "strangers",
            "signature_faults",
            "unreadable_requests",
        ];
        let mut faults = Vec::new();
        for (measure, rounds) in &self.sheets {
            for (round, sheet) in rounds {
                for name in MUST_BE_ZERO {
                    if sheet[name].as_u64().is_some_and(|count| count > 0) {
                        faults.push(format!("{measure}, round {round}: {name} is {}", sheet[name]));
                    }
                }
            }
        }
        faults
    }

    /// The table for a terminal.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for row in self.rows() {
            let (unit, reference_unit) = row.figure.units;
            let _ = writeln!(text, "{}", row.figure.name);
            let _ = write!(text, "    {} {unit}", rounded(row.measured));
            if let (Some(reference), Some(ratio)) = (row.reference, row.ratio) {
                let _ = write!(text, "  ÷ {} {reference_unit}  = {ratio:.2}", rounded(reference));
            }
            let _ = writeln!(text, "  (aim {}) {}", row.figure.aim, verdict(row.met));
        }
        for fault in self.faults() {
            let _ = writeln!(text, "WRONG: {fault}");
        }
        text
    }

    /// The page, with the hand-written end of the former one.
    pub(crate) fn markdown(&self, former: &str) -> String {
        let environment = |name: &str| match &self.environment[name] {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let mut page = format!(
            "# Benchmarks\n\nWritten by `scripts/bench.sh`, which measures everything again: each figure beside its reference, on the same PostgreSQL, \
             within the same minutes. Payloads are 1 KB. The load tool, PostgreSQL and the service share the machine.\n\n\
             | | |\n|---|---|\n| date, commit | {}, `{}` |\n| machine | {}, {} cores, {} GB, Linux {} |\n| PostgreSQL | {}; {} |\n\
             | rounds | {}, of {} s (deliver {} s); {} publishes before the memory is read |\n\n",
            environment("date"),
            environment("commit"),
            environment("processor"),
            environment("cores"),
            environment("memory_gb"),
            environment("kernel"),
            environment("postgresql"),
            environment("settings"),
            environment("rounds"),
            environment("seconds"),
            environment("deliver_seconds"),
            environment("publishes"),
        );
        page.push_str("| figure | aim | measured | reference | ratio | |\n|---|---|---:|---:|---:|---|\n");
        for row in self.rows() {
            let (unit, reference_unit) = row.figure.units;
            let reference = row.reference.map_or_else(
                || "–".to_owned(),
                |value| format!("{} {reference_unit}", rounded(value)),
            );
            let ratio = row.ratio.map_or_else(|| "–".to_owned(), |ratio| format!("{ratio:.2}"));
            let _ = writeln!(
                page,
                "| {} | {} | {} {unit} | {reference} | {ratio} | {} |",
                row.figure.name,
                row.figure.aim,
                rounded(row.measured),
                verdict(row.met)
            );
        }
        page.push_str(
            "\nMeasured and reference are medians over the rounds; the ratio is the median of each round's own ratio. R1 and R100 are pgbench on \
             [reference.sql](../benches/load/reference.sql): one event row and one delivery row a commit with 32 clients, and a hundred of each with 8. \
             The floor is a relay of the load tool that takes a request, sends it on and stores nothing.\n\n## Rounds\n\n| figure | by round |\n|---|---|\n",
        );
        for row in self.rows() {
            let rounds: Vec<String> = row.rounds.iter().map(|value| rounded(*value)).collect();
            let _ = writeln!(page, "| {} | {} |", row.figure.name, rounds.join(", "));
        }
        page.push_str("\n## Latency and cost\n\n| run | p50 ms | p90 ms | p99 ms | p99.9 ms | CPU of the service µs | of PostgreSQL µs | of the load tool µs |\n|---|---:|---:|---:|---:|---:|---:|---:|\n");
        for (measure, prefix) in [
            ("publish", "publish"),
            ("publish_one_connection", "publish"),
            ("publish_batches", "publish"),
            ("floor", "received"),
            ("e2e", "received"),
            ("fair_alone", "received"),
            ("fair", "received"),
            ("beside_none", "received"),
            ("beside_one", "received"),
            ("carriers_alone", "publish"),
            ("carriers_all", "publish"),
            ("wake_valkey", "received"),
            ("wake_nats", "received"),
            ("wake_jetstream", "received"),
            ("wake_doorbell", "received"),
            ("drain", ""),
            ("pull", "page"),
        ] {
            let Some(rounds) = self.sheets.get(measure) else {
                continue;
            };
            let middle = |name: &str| {
                let value = median(rounds.values().filter_map(|sheet| sheet[name].as_f64()));
                value.map_or_else(|| "–".to_owned(), rounded)
            };
            let _ = write!(page, "| {}", measure.replace('_', " "));
            for quantile in ["p50", "p90", "p99", "p999"] {
                let _ = write!(page, " | {}", middle(&format!("{prefix}_{quantile}_ms")));
            }
            let service = if measure == "drain" { "worker" } else { "service" };
            for process in [service, "postgres", "load"] {
                let _ = write!(page, " | {}", middle(&format!("cpu_{process}_us_per_event")));
            }
            page.push_str(" |\n");
        }
        let faults = self.faults();
        if !faults.is_empty() {
            page.push_str("\n## Wrong\n\n");
            for fault in faults {
                let _ = writeln!(page, "- {fault}");
            }
        }
        let notes = former.split_once(NOTES).map_or("\n", |(_, notes)| notes);
        let _ = write!(page, "\n{NOTES}{notes}");
        page
    }

    /// The same for programs, with every sheet.
    pub(crate) fn json(&self) -> Value {
        let figures: Vec<Value> = self
            .rows()
            .iter()
            .map(|row| {
                json!({"figure": row.figure.name, "aim": row.figure.aim, "measured": row.measured, "unit": row.figure.units.0,
                    "reference": row.reference, "ratio": row.ratio, "met": row.met, "rounds": row.rounds})
            })
            .collect();
        json!({"environment": self.environment, "figures": figures, "faults": self.faults(), "runs": self.sheets})
    }
}

fn verdict(met: bool) -> &'static str {
    if met { "met" } else { "**missed**" }
}

/// Three digits that matter.
fn rounded(value: f64) -> String {
    match value.abs() {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(values[middle]),
        _ => Some(f64::midpoint(values[middle - 1], values[middle])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results() -> Results {
        let lines = [
            r#"{"measure":"environment","round":0,"sheet":{"cores":2}}"#,
            r#"{"measure":"r1","round":1,"sheet":{"per_s":10000}}"#,
            r#"{"measure":"publish","round":1,"sheet":{"published_per_s":11000,"cpu_us_per_event":131}}"#,
            r#"{"measure":"r1","round":2,"sheet":{"per_s":5000}}"#,
            r#"{"measure":"publish","round":2,"sheet":{"published_per_s":4000,"cpu_us_per_event":120}}"#,
            r#"{"measure":"r1","round":3,"sheet":{"per_s":10000}}"#,
            r#"{"measure":"publish","round":3,"sheet":{"published_per_s":10500,"cpu_us_per_event":132,"not_2xx":2}}"#,
            r#"{"measure":"r1_one_client","round":1,"sheet":{"per_s":4000}}"#,
            r#"{"measure":"floor","round":1,"sheet":{"received_p50_ms":0.5}}"#,
            r#"{"measure":"e2e","round":1,"sheet":{"received_p50_ms":1.0,"received_p99_ms":4.5}}"#,
        ];
        Results::parse(&lines.join("\n")).expect("results")
    }

    #[test]
    fn a_ratio_is_the_median_of_the_rounds_own() {
        let results = results();
        let row = results.row(&FIGURES[0]).expect("a row");
        assert_eq!(row.rounds, [1.1, 0.8, 1.05]);
        assert_eq!((row.ratio, row.met), (Some(1.05), true), "not 10500 by 10000");
    }

    #[test]
    fn each_kind_of_aim_is_judged() {
        let results = results();
        let met = |name: &str| {
            let figure = FIGURES
                .iter()
                .find(|figure| figure.name.contains(name))
                .expect("a figure");
            results.row(figure).map(|row| (row.measured, row.met))
        };
        assert_eq!(met("per published event"), Some((131.0, false)));
        assert_eq!(met("p50"), Some((1.0, true)), "0.5 + 2 × 0.25 is just met");
        assert_eq!(met("p99"), Some((4.5, false)));
        assert_eq!(met("drain"), None, "not measured, not shown");
    }

    #[test]
    fn a_figure_beside_several_runs_is_judged_by_the_middle_one_of_its_round() {
        let line = |measure: &str, ms: f64| {
            format!(r#"{{"measure":"{measure}","round":1,"sheet":{{"publish_p99_ms":{ms},"received_p50_ms":{ms}}}}}"#)
        };
        let alone = [("valkey", 9.0), ("nats", 2.0), ("cloud", 4.0)];
        let mut lines: Vec<String> = alone
            .map(|(broker, ms)| line(&format!("{broker}_alone_boot"), ms))
            .into();
        lines.extend([line("nats_dead_boot", 5.2), line("wake_nats", 5.1)]);
        let results = Results::parse(&lines.join("\n")).expect("results");
        let rows = results.rows();
        let shown: Vec<_> = rows.iter().map(|row| (row.measured, row.reference, row.met)).collect();
        assert_eq!(shown, [(5.2, Some(4.0), true), (5.1, None, false)]);
    }

    #[test]
    fn what_went_wrong_is_shown_and_what_people_wrote_stays() {
        let results = results();
        let page = results.markdown(&format!("old table\n{NOTES}\n\nBound by the disk.\n"));
        assert!(page.contains("publish, round 3: not_2xx is 2"), "{page}");
        assert!(page.ends_with("\n\nBound by the disk.\n"), "{page}");
        assert!(!page.contains("old table"));
        assert_eq!(page, results.markdown(&page), "written again, the same");
        assert_eq!(results.json()["figures"][0]["ratio"], 1.05);
    }

    #[test]
    fn medians() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0].into_iter()), Some(2.5));
        assert_eq!(median(std::iter::empty()), None);
    }
}
