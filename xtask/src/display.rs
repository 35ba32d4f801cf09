//! Progress display: one bar for the whole run and one for each running program, or plain lines without a terminal.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use report::progress::Step;

/// Resolution of one program's share of the overall bar.
const PARTS: u64 = 1000;
/// Refresh interval of the bars.
const TICK: Duration = Duration::from_millis(250);
/// Minimum interval between progress lines without a terminal.
const QUIET: Duration = Duration::from_secs(15);

/// Shows the progress of several programs, one after the other or beside each other.
pub(crate) struct Display {
    bars: Option<Bars>,
    started: AtomicU64,
    count: u64,
}

/// A running program.
pub(crate) struct Running<'a> {
    display: &'a Display,
    name: String,
    /// `of about 3 min 05 s`, or empty.
    about: String,
    bar: Option<ProgressBar>,
    /// Its contribution to the overall bar, of [`PARTS`].
    share: u64,
    /// When its last progress line was printed.
    printed: Instant,
}

struct Bars {
    all: MultiProgress,
    total: ProgressBar,
}

impl Display {
    pub(crate) fn new(count: usize) -> Self {
        let count = count as u64;
        let bars = std::io::stderr().is_terminal().then(|| {
            let all = MultiProgress::new();
            let total = ProgressBar::new(count * PARTS)
                .with_style(style("{msg:16} {bar:30} {percent:>3} % [{elapsed}]"));
            let total = all.add(total);
            total.enable_steady_tick(TICK);
            Bars { all, total }
        });
        Self { bars, started: AtomicU64::new(0), count }
    }

    /// Starts a program; `estimate` is its last duration in seconds.
    pub(crate) fn start(&self, name: &str, estimate: Option<f64>) -> Running<'_> {
        let about = estimate.map_or(String::new(), |seconds| format!("of about {}", duration(seconds)));
        let which = format!("{}/{}", self.started.fetch_add(1, Ordering::Relaxed) + 1, self.count);
        let bar = self.bars.as_ref().map(|bars| {
            bars.total.set_message(format!("{which} total"));
            let bar = ProgressBar::new(1)
                .with_style(style("{prefix:16} {bar:30} {pos}/{len} [{elapsed}] {wide_msg}"))
                .with_prefix(name.to_owned())
                .with_message(about.clone());
            let bar = bars.all.add(bar);
            bar.enable_steady_tick(TICK);
            bar
        });
        match &bar {
            Some(_) => {}
            None if about.is_empty() => eprintln!("[{which}] {name}"),
            None => eprintln!("[{which}] {name} ({})", about.trim_start_matches("of ")),
        }
        Running { display: self, name: name.to_owned(), about, bar, share: 0, printed: Instant::now() }
    }
}

impl Running<'_> {
    /// Updates the progress.
    pub(crate) fn step(&mut self, step: &Step) {
        let total = step.total.max(1);
        let done = step.done.min(total);
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(done);
            if !step.message.is_empty() {
                let between = if self.about.is_empty() { "" } else { ": " };
                bar.set_message(format!("{}{between}{}", self.about, step.message));
            }
            self.advance(done * PARTS / total);
        } else if self.printed.elapsed() >= QUIET {
            eprintln!("      {} {done}/{total} {}", self.name, step.message);
            self.printed = Instant::now();
        }
    }

    /// Prints `line` above the bars; the program's own bar ends.
    pub(crate) fn finish(mut self, line: &str) {
        self.advance(PARTS);
        match &self.display.bars {
            Some(bars) => drop(bars.all.println(line)),
            None => eprintln!("{line}"),
        }
    }

    /// Moves the bar of the whole; a program that counts a second time from the start does not move it back.
    fn advance(&mut self, share: u64) {
        if let Some(bars) = &self.display.bars {
            bars.total.inc(share.saturating_sub(self.share));
            self.share = self.share.max(share);
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        if let Some(bars) = &self.bars {
            bars.total.finish_and_clear();
        }
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the templates are constants").progress_chars("━━╌")
}

/// `42 s` or `3 min 05 s`.
pub(crate) fn duration(seconds: f64) -> String {
    let rounded = seconds.max(0.0).round() as u64;
    match (rounded / 60, rounded % 60) {
        (0, _) if seconds < 10.0 => format!("{seconds:.1} s"),
        (0, seconds) => format!("{seconds} s"),
        (minutes, seconds) => format!("{minutes} min {seconds:02} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_short() {
        let shown: Vec<String> = [0.04, 9.94, 42.3, 59.6, 185.0, 3600.0].map(duration).into();
        assert_eq!(shown, ["0.0 s", "9.9 s", "42 s", "1 min 00 s", "3 min 05 s", "60 min 00 s"]);
    }
}
