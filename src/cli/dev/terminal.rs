//! What the development commands say: headings, calls, checks and progress; colour only where somebody looks.

use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::pin::pin;
use std::time::Duration;

use tokio::time::Instant;

/// Wait between two pictures of the progress line.
const PICTURE_EVERY: Duration = Duration::from_millis(120);

/// Wait between two lines of progress where no line can be redrawn.
const LINE_EVERY: Duration = Duration::from_secs(5);

const SPINNER: [&str; 10] = ["⠋", "⠙", "⠹", "⠸", "⠼", "⠴", "⠦", "⠧", "⠇", "⠏"];

/// Standard output. Failing to write to it is not our failure: whoever reads may have left.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terminal {
    colour: bool,
    /// A line can be drawn again.
    live: bool,
}

/// How a piece of text is meant.
#[derive(Debug, Clone, Copy)]
enum Ink {
    Bold,
    Dim,
    Good,
    Bad,
    Call,
}

impl Terminal {
    /// Standard output as it is. `no_color` is the variable `NO_COLOR`.
    pub(super) fn new(no_color: Option<&str>) -> Self {
        let live = io::stdout().is_terminal();
        Self {
            colour: live && no_color.is_none_or(str::is_empty),
            live,
        }
    }

    /// A plain line.
    pub(super) fn line(self, text: impl Display) {
        writeln!(io::stdout().lock(), "{text}").ok();
    }

    /// The heading of a step.
    pub(super) fn step(self, number: usize, title: &str) {
        self.line(format_args!(
            "\n{}",
            self.ink(Ink::Bold, format_args!("{number}. {title}"))
        ));
    }

    /// A heading without a number.
    pub(super) fn heading(self, title: &str) {
        self.line(format_args!("\n{}", self.ink(Ink::Bold, title)));
    }

    /// A request and its answer.
    pub(super) fn call(self, method: &str, path: &str, status: impl Display, part: impl Display) {
        let request = self.ink(Ink::Call, format_args!("{method} {path}"));
        self.line(format_args!("   {request} → {status}  {part}"));
    }

    /// Something that was seen.
    pub(super) fn seen(self, text: impl Display) {
        self.line(format_args!("     {}", self.ink(Ink::Dim, text)));
    }

    /// Something that was verified.
    pub(super) fn good(self, text: impl Display) {
        self.line(format_args!("   {} {text}", self.ink(Ink::Good, "✓")));
    }

    /// Something that is not as it must be.
    pub(super) fn bad(self, text: impl Display) {
        self.line(format_args!("   {} {text}", self.ink(Ink::Bad, "✗")));
    }

    /// Awaits `work`, showing for how long, and answers what it answers; `None` after `longest`.
    pub(super) async fn waiting<T>(self, what: &str, longest: Duration, work: impl Future<Output = T>) -> Option<T> {
        self.progress(what, tokio::time::timeout(longest, work)).await.ok()
    }

    /// Awaits `work`, showing for how long, and answers what it answers.
    pub(super) async fn progress<T>(self, what: &str, work: impl Future<Output = T>) -> T {
        let (mut work, started) = (pin!(work), Instant::now());
        let every = if self.live { PICTURE_EVERY } else { LINE_EVERY };
        let mut pictures = tokio::time::interval_at(started + every, every);
        let mut drawn = 0;
        let outcome = loop {
            tokio::select! {
                biased;
                done = &mut work => break done,
                _ = pictures.tick() => {
                    self.picture(drawn, what, started.elapsed());
                    drawn += 1;
                }
            }
        };
        if self.live && drawn > 0 {
            let mut out = io::stdout().lock();
            write!(out, "\r\x1b[K").and_then(|()| out.flush()).ok();
        }
        outcome
    }

    fn picture(self, drawn: usize, what: &str, elapsed: Duration) {
        let seconds = elapsed.as_secs_f32();
        if self.live {
            let spinner = SPINNER[drawn % SPINNER.len()];
            let text = self.ink(Ink::Dim, format_args!("{spinner} {what} ({seconds:.1} s)"));
            let mut out = io::stdout().lock();
            write!(out, "\r\x1b[K   {text}").and_then(|()| out.flush()).ok();
        } else {
            self.line(format_args!("   … {what} ({seconds:.0} s)"));
        }
    }

    fn ink(self, ink: Ink, text: impl Display) -> String {
        if !self.colour {
            return text.to_string();
        }
        let code = match ink {
            Ink::Bold => "1",
            Ink::Dim => "2",
            Ink::Good => "32",
            Ink::Bad => "31",
            Ink::Call => "36",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colour_is_only_for_those_who_see_it() {
        let text = |colour| Terminal { colour, live: true }.ink(Ink::Good, "fine");
        assert_eq!(
            (text(false).as_str(), text(true).as_str()),
            ("fine", "\x1b[32mfine\x1b[0m")
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_ends_with_its_work_or_at_its_limit() {
        let terminal = Terminal {
            colour: false,
            live: false,
        };
        let work = async {
            tokio::time::sleep(Duration::from_secs(2)).await;
            7
        };
        assert_eq!(
            terminal.waiting("the work", Duration::from_secs(3), work).await,
            Some(7)
        );
        let never = std::future::pending::<()>();
        assert_eq!(terminal.waiting("nothing", Duration::from_secs(3), never).await, None);
    }
}
