//! `carriers simulate`: runs the planner over a scenario and prints, draws or writes down what it came to. It needs no
//! configuration, no database and no broker.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use planner::simulate::{self, Lane, Report, SCENARIO_BYTES_MAX, Scenario};

use super::{failed, refused};
use crate::domain::envelope::FieldError;
use crate::domain::policy::Policy;

/// Most moves in the printed list; `--json` has all of them.
const MOVES_PRINTED_MAX: usize = 60;

#[derive(Debug, Subcommand)]
pub(super) enum CarriersCommand {
    /// Run the planner over a scenario on virtual time: months of traffic, prices and outages in a moment.
    ///
    /// Prints where each stream of events was placed and why it moved, what it cost, and how long it was without a
    /// carrier. docs/simulator.md explains scenarios; scenarios/ has four. Exit codes: 0 done, 1 the answer cannot be
    /// written, 2 the scenario cannot be used.
    Simulate(SimulateArgs),
}

#[derive(Debug, Args)]
pub(super) struct SimulateArgs {
    /// The scenario, a JSON file.
    #[arg(long, value_name = "FILE")]
    scenario: PathBuf,
    /// One JSON document instead of tables.
    #[arg(long)]
    json: bool,
    /// Draw it into this file as well: who carried what and when, who could not be chosen, and the cost.
    #[arg(long, value_name = "OUT")]
    svg: Option<PathBuf>,
}

pub(super) fn main(command: &CarriersCommand) -> ExitCode {
    let CarriersCommand::Simulate(args) = command;
    let scenario = match read(&args.scenario) {
        Ok(scenario) => scenario,
        Err(mistakes) => {
            for mistake in &mistakes {
                refused(mistake);
            }
            return ExitCode::from(2);
        }
    };
    let report = simulate::run(&scenario);
    if let Some(out) = &args.svg
        && let Err(error) = std::fs::write(out, simulate::draw(&report))
    {
        return failed(&io::Error::new(
            error.kind(),
            format!("cannot write {}: {error}", out.display()),
        ));
    }
    let mut stdout = io::stdout().lock();
    let written = if args.json {
        write_json(&report, &mut stdout)
    } else {
        write_text(&report, &mut stdout)
    };
    if written.is_ok() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// The scenario in a file, or everything that is wrong with it.
fn read(path: &Path) -> Result<Scenario, Vec<String>> {
    let file = path.display().to_string();
    let mut text = Vec::new();
    let most = u64::try_from(SCENARIO_BYTES_MAX).expect("a megabyte") + 1;
    File::open(path)
        .and_then(|opened| opened.take(most).read_to_end(&mut text))
        .map_err(|error| {
            vec![format!(
                "{file}: cannot be read ({error}): name a scenario file, such as scenarios/outage.json"
            )]
        })?;
    Scenario::parse_judged(&file, &text, &policy_mistakes).map_err(|mistakes| mistakes.lines().collect())
}

/// Holds a policy to the whole contract, as the route that stores policies does.
fn policy_mistakes(policy: &str) -> Vec<(String, String)> {
    let mistakes = Policy::parse(policy).err().unwrap_or_default();
    let told = |mistake: &FieldError| {
        let place = mistake.path.trim_end_matches('/').replace('/', ".");
        // The sentence begins with the name of the member, which the place ends in already.
        let sentence = mistake.message.strip_prefix(place.trim_start_matches('.'));
        let sentence = sentence.filter(|_| !place.is_empty()).unwrap_or(&mistake.message);
        (place, sentence.trim_start().to_owned())
    };
    mistakes.iter().map(told).collect()
}

fn write_json(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, report)?;
    writeln!(out)
}

fn write_text(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{}", report.title)?;
    if !report.description.is_empty() {
        writeln!(out, "{}", report.description)?;
    }
    writeln!(out, "\n{} to {}\n", time(report.start_ms), time(report.end_ms))?;

    let mut table = Table::of(&[
        "class",
        "events",
        "left to the poll",
        "without a carrier",
        "carrier failing",
    ]);
    for class in &report.classes {
        table.row([
            class.class.label().to_owned(),
            class.events.to_string(),
            class.left_to_poll.to_string(),
            seconds(class.without_carrier_s),
            seconds(class.failing_s),
        ]);
    }
    table.write(out)?;

    let mut table = Table::of(&[
        "stream",
        "class",
        "events",
        "left to the poll",
        "mean wake-up",
        "placed",
    ]);
    for lane in &report.lanes {
        let name = lane
            .key
            .as_ref()
            .map_or_else(|| lane.traffic.clone(), |key| format!("{} ({key})", lane.traffic));
        table.row([
            name,
            lane.class.label().to_owned(),
            lane.events.to_string(),
            lane.left_to_poll.to_string(),
            format!("{:.1} ms", lane.mean_wake_ms),
            shares(lane),
        ]);
    }
    table.write(out)?;

    let mut table = Table::of(&["carrier", "woken", "cost", "could not be chosen"]);
    for carrier in &report.carriers {
        let span = |until: Option<i64>, from| seconds(span_s(from, until.unwrap_or(report.end_ms)));
        let spans = carrier
            .unavailable
            .iter()
            .map(|one| format!("{} {}", span(one.until_ms, one.from_ms), one.reason));
        let mut spans: Vec<String> = spans.collect();
        if spans.len() > 4 {
            let more = spans.len() - 3;
            spans.truncate(3);
            spans.push(format!("{more} more times"));
        }
        table.row([
            carrier.id.clone(),
            carrier.woken.to_string(),
            usd(carrier.cost_usd),
            spans.join(", "),
        ]);
    }
    table.write(out)?;

    for one in report.moves.iter().take(MOVES_PRINTED_MAX) {
        let from = one.from.as_ref().map_or_else(String::new, |from| format!("{from} → "));
        let (class, reasons) = (one.class.label(), one.reasons.join("; "));
        writeln!(
            out,
            "{}  {class} {}: {from}{}  ({reasons})",
            time(one.at_ms),
            one.traffic,
            one.to
        )?;
    }
    if report.moves.len() > MOVES_PRINTED_MAX {
        writeln!(
            out,
            "… and {} more; --json lists them",
            report.moves.len() - MOVES_PRINTED_MAX
        )?;
    }
    let (moves, recorded) = (report.moves_total, report.recorded);
    writeln!(
        out,
        "\n{moves} moves, {recorded} decisions recorded, {} in all",
        usd(report.cost_usd)
    )
}

/// How much of the time a stream was on each carrier.
fn shares(lane: &Lane) -> String {
    let mut carriers: Vec<(&str, f64)> = Vec::new();
    for segment in &lane.segments {
        let span_s = span_s(segment.from_ms, segment.until_ms);
        match carriers.iter_mut().find(|(carrier, _)| *carrier == segment.carrier) {
            Some((_, total)) => *total += span_s,
            None => carriers.push((&segment.carrier, span_s)),
        }
    }
    let whole: f64 = carriers.iter().map(|(_, span_s)| span_s).sum();
    let share = |span_s: f64| if whole == 0.0 { 0.0 } else { span_s / whole * 100.0 };
    let shares: Vec<String> = carriers
        .iter()
        .map(|(carrier, span_s)| format!("{carrier} {:.1} %", share(*span_s)))
        .collect();
    shares.join(", ")
}

#[expect(clippy::cast_precision_loss, reason = "a run is far shorter than 2^53 ms")]
fn span_s(from_ms: i64, until_ms: i64) -> f64 {
    (until_ms - from_ms) as f64 / 1000.0
}

fn seconds(seconds: f64) -> String {
    if seconds < 600.0 {
        format!("{seconds:.0} s")
    } else if seconds < 2.0 * 86_400.0 {
        format!("{:.0} min", seconds / 60.0)
    } else {
        format!("{:.1} days", seconds / 86_400.0)
    }
}

fn usd(value: f64) -> String {
    match value {
        0.0 => "$0".to_owned(),
        value if value < 0.01 => format!("${value:.6}"),
        value => format!("${value:.2}"),
    }
}

fn time(at_ms: i64) -> String {
    planner::iso(at_ms).map_or_else(|| at_ms.to_string(), |iso| iso[..19].replace('T', " "))
}

/// Columns that are as wide as they need to be.
struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    fn of(heads: &[&str]) -> Self {
        Self {
            rows: vec![heads.iter().map(|head| (*head).to_owned()).collect()],
        }
    }

    fn row<const COLUMNS: usize>(&mut self, cells: [String; COLUMNS]) {
        self.rows.push(cells.into());
    }

    /// Writes it, and an empty line.
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let wide = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or_default()
        };
        for row in &self.rows {
            let cells = row
                .iter()
                .enumerate()
                .map(|(column, cell)| format!("{cell:width$}", width = wide(column)));
            writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
        }
        writeln!(out)
    }
}
