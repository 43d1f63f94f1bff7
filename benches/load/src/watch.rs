//! Processor time and memory of other processes, from `/proc`.

use std::fs;
use std::str::FromStr;

use crate::sheet::Sheet;

/// Clock ticks a second in `/proc`; the same on every Linux.
const TICKS_PER_S: f64 = 100.0;

/// A process to watch with all it started: `NAME=PID`.
#[derive(Debug, Clone)]
pub(crate) struct Watched {
    name: String,
    pid: u32,
}

impl Watched {
    /// A process under a name.
    pub(crate) fn new(name: &str, pid: u32) -> Self {
        Self {
            name: name.to_owned(),
            pid,
        }
    }

    /// Its resident memory in MiB.
    pub(crate) fn rss_mb(&self) -> Option<f64> {
        rss_mb(self.pid)
    }
}

impl FromStr for Watched {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, pid) = text.split_once('=').ok_or("write NAME=PID, such as service=4711")?;
        let pid = pid.parse().map_err(|_| format!("{pid} is no process id"))?;
        Ok(Self {
            name: name.to_owned(),
            pid,
        })
    }
}

/// Processor time of the watched at one moment, and the tool's own, in seconds.
#[derive(Debug)]
pub(crate) struct Watch {
    watched: Vec<Watched>,
    cpu_s: Vec<f64>,
    own_s: f64,
}

impl Watch {
    /// Reads the clocks.
    pub(crate) fn start(watched: &[Watched]) -> Self {
        Self {
            watched: watched.to_vec(),
            cpu_s: cpu_of(watched),
            own_s: own(),
        }
    }

    /// Adds what was used since the start, and how much that is for each of `events`.
    pub(crate) fn finish(&self, sheet: &mut Sheet, events: u64) {
        #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
        let each_us = |seconds: f64| seconds * 1e6 / events.max(1) as f64;
        let mut sum = 0.0;
        for ((watched, before), after) in self.watched.iter().zip(&self.cpu_s).zip(cpu_of(&self.watched)) {
            let used = after - before;
            sum += used;
            sheet.number(&format!("cpu_{}_us_per_event", watched.name), each_us(used));
        }
        if !self.watched.is_empty() {
            sheet.number("cpu_us_per_event", each_us(sum));
        }
        sheet.number("cpu_load_us_per_event", each_us(own() - self.own_s));
        for watched in &self.watched {
            if let Some(rss) = rss_mb(watched.pid) {
                sheet.number(&format!("rss_{}_mb", watched.name), rss);
            }
        }
    }
}

fn own() -> f64 {
    fs::read_to_string("/proc/self/stat")
        .ok()
        .and_then(|text| Stat::parse(&text))
        .map_or(0.0, |stat| stat.own_s)
}

fn cpu_of(watched: &[Watched]) -> Vec<f64> {
    if watched.is_empty() {
        return Vec::new();
    }
    let all = all();
    watched.iter().map(|watched| tree_s(&all, watched.pid)).collect()
}

/// What one line of `/proc/PID/stat` says.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Stat {
    pid: u32,
    parent: u32,
    own_s: f64,
    /// Of children that ended.
    ended_s: f64,
}

impl Stat {
    /// The name in parentheses may hold anything, parentheses too.
    fn parse(text: &str) -> Option<Self> {
        let (pid, rest) = text.split_once(" (")?;
        let fields: Vec<&str> = rest.rsplit_once(") ")?.1.split(' ').collect();
        let ticks = |at: usize| fields.get(at).and_then(|text| text.parse::<f64>().ok());
        Some(Self {
            pid: pid.parse().ok()?,
            parent: fields.get(1)?.parse().ok()?,
            own_s: (ticks(11)? + ticks(12)?) / TICKS_PER_S,
            ended_s: (ticks(13)? + ticks(14)?) / TICKS_PER_S,
        })
    }
}

fn all() -> Vec<Stat> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().to_string_lossy().bytes().all(|b| b.is_ascii_digit()))
        .filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok())
        .filter_map(|text| Stat::parse(&text))
        .collect()
}

/// A process, its children, theirs, and those that ended.
fn tree_s(all: &[Stat], root: u32) -> f64 {
    let own = all
        .iter()
        .find(|stat| stat.pid == root)
        .map_or(0.0, |stat| stat.own_s + stat.ended_s);
    let children = all.iter().filter(|stat| stat.parent == root);
    own + children.map(|child| tree_s(all, child.pid)).sum::<f64>()
}

fn rss_mb(pid: u32) -> Option<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kilobytes: f64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kilobytes / 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(pid: u32, name: &str, parent: u32, ticks: [u32; 4]) -> Stat {
        let [user, system, ended_user, ended_system] = ticks;
        let text =
            format!("{pid} ({name}) S {parent} 1 1 0 -1 4 5 6 7 8 {user} {system} {ended_user} {ended_system} 20 0 1");
        Stat::parse(&text).expect("a line of /proc")
    }

    #[test]
    fn a_tree_counts_children_that_live_and_those_that_ended() {
        let all = [
            stat(10, "postgres", 1, [100, 100, 300, 0]),
            stat(11, "postgres: a (b) c", 10, [50, 50, 0, 0]),
            stat(12, "other", 1, [900, 900, 0, 0]),
        ];
        assert!((tree_s(&all, 10) - 6.0).abs() < 1e-9, "{}", tree_s(&all, 10));
    }

    #[test]
    fn a_watched_process_is_named() {
        assert!("service".parse::<Watched>().is_err());
        assert!("service=x".parse::<Watched>().is_err());
        assert_eq!("service=12".parse::<Watched>().expect("one").pid, 12);
    }
}
