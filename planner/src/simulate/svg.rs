//! A picture of a run: who carried what and when, who could not be chosen, and what it cost.

use std::fmt::Write as _;

use super::report::{Lane, Report};
use crate::class::Class;
use crate::moment::instant;

const WIDTH: f64 = 1200.0;
const LEFT: f64 = 220.0;
const PLOT: f64 = WIDTH - LEFT - 40.0;
const ROW: f64 = 26.0;
const THIN_ROW: f64 = 16.0;
const COST_HEIGHT: f64 = 90.0;
const INK: &str = "#1e293b";
const FAINT: &str = "#64748b";
const TROUBLE: &str = "#dc2626";
const HAPPENED: &str = "#f59e0b";
/// Characters of a heading that fit in its line.
const LINE_CHARS: usize = 170;

/// Draws a report as one SVG document that needs nothing else.
pub fn draw(report: &Report) -> String {
    let mut picture = Picture {
        report,
        body: String::new(),
        y: 0.0,
    };
    picture.heading();
    let top = picture.y;
    picture.lanes();
    picture.carriers();
    let bottom = picture.y;
    picture.cost();
    picture.times(top);
    let bands = picture.bands(top, bottom);
    let (height, body) = (picture.y + 14.0, picture.body);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height:.0}\" \
         viewBox=\"0 0 {WIDTH} {height:.0}\" font-family=\"system-ui, sans-serif\" font-size=\"12\" fill=\"{INK}\">\n\
         <title>{}</title>\n\
         <defs><pattern id=\"trouble\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" \
         patternTransform=\"rotate(45)\"><rect width=\"6\" height=\"6\" fill=\"#fecaca\"/>\
         <rect width=\"3\" height=\"6\" fill=\"{TROUBLE}\"/></pattern></defs>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n{bands}{body}</svg>\n",
        escaped(&report.title)
    )
}

struct Picture<'a> {
    report: &'a Report,
    body: String,
    /// Where the next thing is drawn.
    y: f64,
}

impl Picture<'_> {
    fn heading(&mut self) {
        let report = self.report;
        let events: u64 = report.classes.iter().map(|class| class.events).sum();
        let left: u64 = report.classes.iter().map(|class| class.left_to_poll).sum();
        let without: f64 = report.classes.iter().map(|class| class.without_carrier_s).sum();
        self.text(
            20.0,
            28.0,
            "start",
            "font-size=\"18\" font-weight=\"600\"",
            &report.title,
        );
        self.text(20.0, 48.0, "start", &format!("fill=\"{FAINT}\""), &report.description);
        let sum = format!(
            "{} to {} · {events} events · {} moves · {left} left to the poll · {without:.0} s without an eligible carrier · {}",
            day_time(report.start_ms),
            day_time(report.end_ms),
            report.moves_total,
            usd(report.cost_usd)
        );
        self.text(20.0, 70.0, "start", "", &sum);
        let mut x = 20.0;
        for (index, carrier) in report.carriers.iter().enumerate() {
            let colour = colour(&carrier.id, index);
            let _ = writeln!(
                self.body,
                "<rect x=\"{x:.0}\" y=\"82\" width=\"12\" height=\"12\" rx=\"2\" fill=\"{colour}\"/>"
            );
            self.text(x + 17.0, 92.0, "start", "", &carrier.id);
            x += 120.0;
        }
        let _ = writeln!(
            self.body,
            "<rect x=\"{x:.0}\" y=\"82\" width=\"12\" height=\"12\" rx=\"2\" fill=\"url(#trouble)\"/>"
        );
        self.text(x + 17.0, 92.0, "start", "", "could not be chosen");
        x += 160.0;
        let _ = writeln!(
            self.body,
            "<rect x=\"{x:.0}\" y=\"87\" width=\"16\" height=\"3\" fill=\"{HAPPENED}\"/>"
        );
        self.text(x + 21.0, 92.0, "start", "", "what the scenario did to it");
        self.y = 112.0;
    }

    fn lanes(&mut self) {
        for class in Class::ALL {
            let lanes: Vec<&Lane> = self.report.lanes.iter().filter(|lane| lane.class == class).collect();
            if lanes.is_empty() {
                continue;
            }
            self.y += 14.0;
            self.text(20.0, self.y, "start", "font-weight=\"600\"", class.label());
            self.y += 6.0;
            for lane in lanes {
                self.lane(lane);
            }
            self.y += 6.0;
        }
    }

    fn lane(&mut self, lane: &Lane) {
        let middle = self.y + ROW / 2.0 + 3.0;
        let name = lane
            .key
            .as_ref()
            .map_or_else(|| lane.traffic.clone(), |key| format!("{} · {key}", lane.traffic));
        self.text(LEFT - 10.0, middle, "end", "", &cut(&name, 30));
        for segment in &lane.segments {
            let (x, width) = self.span(segment.from_ms, segment.until_ms);
            let place = self
                .report
                .carriers
                .iter()
                .position(|carrier| carrier.id == segment.carrier);
            let colour = colour(&segment.carrier, place.unwrap_or_default());
            let note = if segment.fallback {
                " (nobody was eligible)".to_owned()
            } else if segment.route == segment.carrier {
                String::new()
            } else {
                format!(" (signals through {})", segment.route)
            };
            let tip = format!(
                "{}: {}{note}, {} to {}",
                lane.traffic,
                segment.carrier,
                day_time(segment.from_ms),
                day_time(segment.until_ms)
            );
            let outline = if segment.fallback {
                format!(" stroke=\"{TROUBLE}\" stroke-width=\"1.5\"")
            } else {
                String::new()
            };
            let _ = writeln!(
                self.body,
                "<rect x=\"{x:.1}\" y=\"{:.0}\" width=\"{width:.1}\" height=\"{:.0}\" fill=\"{colour}\"{outline}>\
                 <title>{}</title></rect>",
                self.y + 3.0,
                ROW - 6.0,
                escaped(&tip)
            );
        }
        self.happened(&lane.traffic, self.y + ROW - 3.0);
        self.y += ROW;
    }

    /// What the scenario did to a carrier or a stream, as a thin line.
    fn happened(&mut self, to: &str, y: f64) {
        for one in self.report.happened.iter().filter(|one| one.to == to) {
            let (x, width) = self.span(one.from_ms, one.until_ms);
            let tip = format!(
                "{to}: {}, {} to {}",
                one.what,
                day_time(one.from_ms),
                day_time(one.until_ms)
            );
            let _ = writeln!(
                self.body,
                "<rect x=\"{x:.1}\" y=\"{y:.0}\" width=\"{width:.1}\" height=\"3\" fill=\"{HAPPENED}\">\
                 <title>{}</title></rect>",
                escaped(&tip)
            );
        }
    }

    fn carriers(&mut self) {
        self.y += 14.0;
        self.text(20.0, self.y, "start", "font-weight=\"600\"", "Carriers");
        self.y += 6.0;
        for (index, carrier) in self.report.carriers.iter().enumerate() {
            let middle = self.y + THIN_ROW / 2.0;
            self.text(LEFT - 10.0, middle + 4.0, "end", "", &cut(&carrier.id, 30));
            let _ = writeln!(
                self.body,
                "<line x1=\"{LEFT}\" y1=\"{middle:.0}\" x2=\"{:.0}\" y2=\"{middle:.0}\" stroke=\"{}\" stroke-width=\"2\"/>",
                LEFT + PLOT,
                colour(&carrier.id, index)
            );
            for span in &carrier.unavailable {
                let until_ms = span.until_ms.unwrap_or(self.report.end_ms);
                let (x, width) = self.span(span.from_ms, until_ms);
                let tip = format!("{}, {} to {}", span.reason, day_time(span.from_ms), day_time(until_ms));
                let _ = writeln!(
                    self.body,
                    "<rect x=\"{x:.1}\" y=\"{:.0}\" width=\"{width:.1}\" height=\"10\" fill=\"url(#trouble)\">\
                     <title>{}</title></rect>",
                    middle - 5.0,
                    escaped(&tip)
                );
            }
            self.happened(&carrier.id, middle + 4.0);
            self.y += THIN_ROW;
        }
    }

    fn cost(&mut self) {
        self.y += 24.0;
        let top = self.y;
        let base = top + COST_HEIGHT;
        let most = self.report.cost.iter().map(|point| point.cost_usd).fold(0.0, f64::max);
        self.text(20.0, top + 4.0, "start", "font-weight=\"600\"", "Cost");
        self.text(LEFT - 10.0, top + 4.0, "end", "", &usd(most));
        self.text(LEFT - 10.0, base + 4.0, "end", "", "$0");
        let _ = writeln!(
            self.body,
            "<line x1=\"{LEFT}\" y1=\"{base:.0}\" x2=\"{:.0}\" y2=\"{base:.0}\" stroke=\"#cbd5e1\"/>",
            LEFT + PLOT
        );
        let mut points = String::new();
        for point in &self.report.cost {
            let share = if most > 0.0 { point.cost_usd / most } else { 0.0 };
            let _ = write!(points, "{:.1},{:.1} ", self.x(point.at_ms), base - share * COST_HEIGHT);
        }
        let _ = writeln!(
            self.body,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{INK}\" stroke-width=\"1.8\"/>",
            points.trim_end()
        );
        self.y = base + 8.0;
    }

    /// The axis of time, and a thin line through everything at each of its marks.
    fn times(&mut self, top: f64) {
        let bottom = self.y;
        let step_ms = tick_ms(self.report.end_ms - self.report.start_ms);
        let mut at_ms = self.report.start_ms.div_euclid(step_ms) * step_ms;
        while at_ms <= self.report.end_ms {
            if at_ms >= self.report.start_ms {
                let x = self.x(at_ms);
                let _ = writeln!(
                    self.body,
                    "<line x1=\"{x:.1}\" y1=\"{top:.0}\" x2=\"{x:.1}\" y2=\"{bottom:.0}\" stroke=\"#0f172a\" \
                     stroke-opacity=\"0.08\"/>"
                );
                let label = tick_label(at_ms, step_ms);
                self.text(x, bottom + 14.0, "middle", &format!("fill=\"{FAINT}\""), &label);
            }
            at_ms += step_ms;
        }
        self.y = bottom + 16.0;
    }

    /// What was wrong with a carrier, behind everything that was carried meanwhile.
    fn bands(&self, top: f64, bottom: f64) -> String {
        let mut bands = String::new();
        for span in self.report.carriers.iter().flat_map(|carrier| &carrier.unavailable) {
            let (x, width) = self.span(span.from_ms, span.until_ms.unwrap_or(self.report.end_ms));
            let _ = writeln!(
                bands,
                "<rect x=\"{x:.1}\" y=\"{top:.0}\" width=\"{width:.1}\" height=\"{:.0}\" fill=\"#fee2e2\" \
                 fill-opacity=\"0.7\"/>",
                bottom - top
            );
        }
        bands
    }

    fn text(&mut self, x: f64, y: f64, anchor: &str, style: &str, text: &str) {
        let text = escaped(&cut(text, LINE_CHARS));
        let _ = writeln!(
            self.body,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" {style}>{text}</text>"
        );
    }

    #[expect(clippy::cast_precision_loss, reason = "a run is far shorter than 2^53 ms")]
    fn x(&self, at_ms: i64) -> f64 {
        let whole = (self.report.end_ms - self.report.start_ms).max(1) as f64;
        LEFT + PLOT * (at_ms - self.report.start_ms) as f64 / whole
    }

    /// Left edge and width; nothing is too short to be seen.
    fn span(&self, from_ms: i64, until_ms: i64) -> (f64, f64) {
        let x = self.x(from_ms);
        (x, (self.x(until_ms) - x).max(0.8))
    }
}

fn colour(carrier: &str, place: usize) -> &'static str {
    const OTHERS: [&str; 6] = ["#a16207", "#1d4ed8", "#4d7c0f", "#be185d", "#0f766e", "#7e22ce"];
    match carrier {
        "pg-v1" => "#94a3b8",
        "valkey-v1" => "#7c3aed",
        "nats-v1" => "#0ea5e9",
        "nats-js-v1" => "#059669",
        "cloud-v1" => "#7c2d12",
        _ => OTHERS[place % OTHERS.len()],
    }
}

/// Text as XML has it. It knows few control characters, and none is worth a place in a picture.
fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for own in text.chars().filter(|own| !own.is_control()) {
        match own {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            // No part of XML either.
            '\u{fffe}' | '\u{ffff}' => {}
            other => safe.push(other),
        }
    }
    safe
}

fn cut(text: &str, chars_max: usize) -> String {
    match text.char_indices().nth(chars_max) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

fn usd(value: f64) -> String {
    if value == 0.0 {
        "$0".to_owned()
    } else if value < 0.01 {
        format!("${value:.6}")
    } else {
        format!("${value:.2}")
    }
}

/// The distance of the marks of time, so that there are at most about ten.
fn tick_ms(whole_ms: i64) -> i64 {
    const MINUTE: i64 = 60_000;
    const HOUR: i64 = 60 * MINUTE;
    const DAY: i64 = 24 * HOUR;
    let steps = [
        10_000,
        30_000,
        MINUTE,
        5 * MINUTE,
        10 * MINUTE,
        15 * MINUTE,
        30 * MINUTE,
        HOUR,
        2 * HOUR,
        3 * HOUR,
        6 * HOUR,
        12 * HOUR,
        DAY,
        2 * DAY,
        5 * DAY,
        10 * DAY,
        20 * DAY,
    ];
    steps.into_iter().find(|step| whole_ms / step <= 10).unwrap_or(50 * DAY)
}

fn tick_label(at_ms: i64, step_ms: i64) -> String {
    let Some(at) = instant(at_ms) else { return String::new() };
    let day = format!("{} {}", &at.month().to_string()[..3], at.day());
    let time = format!("{:02}:{:02}", at.hour(), at.minute());
    if step_ms >= 86_400_000 {
        day
    } else if step_ms < 60_000 {
        format!("{time}:{:02}", at.second())
    } else if at.hour() == 0 && at.minute() == 0 {
        format!("{day} {time}")
    } else {
        time
    }
}

fn day_time(at_ms: i64) -> String {
    crate::moment::iso(at_ms).map_or_else(String::new, |iso| iso[..19].replace('T', " "))
}
