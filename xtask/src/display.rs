//! Progress display: one bar for the whole run and one for the current step, or plain lines without a terminal.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use report::progress::Step;

/// Resolution of one program's share of the overall bar.
const PARTS: u64 = 1000;
/// Refresh interval of the bars.
const TICK: Duration = Duration::from_millis(250);
/// Minimum interval between progress lines without a terminal.
const QUIET: Duration = Duration::from_secs(15);

/// Shows the progress of several programs that run one after the other.
pub(crate) struct Display {
    bars: Option<Bars>,
    /// How many are done.
    done: u64,
    count: u64,
    current: Option<Current>,
}

/// The running program.
struct Current {
    name: String,
    /// `of about 3 min 05 s`, or empty.
    about: String,
    /// When its last progress line was printed.
    printed: Instant,
}

struct Bars {
    all: MultiProgress,
    whole: ProgressBar,
    step: ProgressBar,
}

impl Display {
    pub(crate) fn new(count: usize) -> Self {
        let count = count as u64;
        let bars = std::io::stderr().is_terminal().then(|| {
            let all = MultiProgress::new();
            let whole = ProgressBar::new(count * PARTS)
                .with_style(style("{msg:16} {bar:30} {percent:>3} % [{elapsed}]"));
            let step = ProgressBar::new(1)
                .with_style(style("{prefix:16} {bar:30} {pos}/{len} [{elapsed}] {wide_msg}"));
            let (whole, step) = (all.add(whole), all.add(step));
            whole.enable_steady_tick(TICK);
            Bars { all, whole, step }
        });
        Self { bars, done: 0, count, current: None }
    }

    /// Starts a program; `estimate` is its last duration in seconds.
    pub(crate) fn start(&mut self, name: &str, estimate: Option<f64>) {
        let about = estimate.map_or(String::new(), |seconds| format!("of about {}", duration(seconds)));
        let which = format!("{}/{}", self.done + 1, self.count);
        match &self.bars {
            Some(bars) => {
                bars.whole.set_message(format!("{which} total"));
                bars.step.reset();
                bars.step.set_length(1);
                bars.step.set_prefix(name.to_owned());
                bars.step.set_message(about.clone());
                bars.step.enable_steady_tick(TICK);
            }
            None if about.is_empty() => eprintln!("[{which}] {name}"),
            None => eprintln!("[{which}] {name} ({})", about.trim_start_matches("of ")),
        }
        self.current = Some(Current { name: name.to_owned(), about, printed: Instant::now() });
    }

    /// Updates the progress of the running program.
    pub(crate) fn step(&mut self, step: &Step) {
        let total = step.total.max(1);
        let done = step.done.min(total);
        let Some(current) = &mut self.current else { return };
        if let Some(bars) = &self.bars {
            bars.step.set_length(total);
            bars.step.set_position(done);
            if !step.message.is_empty() {
                let between = if current.about.is_empty() { "" } else { ": " };
                bars.step.set_message(format!("{}{between}{}", current.about, step.message));
            }
            bars.whole.set_position(self.done * PARTS + done * PARTS / total);
        } else if current.printed.elapsed() >= QUIET {
            eprintln!("      {} {done}/{total} {}", current.name, step.message);
            current.printed = Instant::now();
        }
    }

    /// Ends the running program and prints `line`.
    pub(crate) fn finish(&mut self, line: &str) {
        self.done += 1;
        self.current = None;
        if let Some(bars) = &self.bars {
            bars.whole.set_position(self.done * PARTS);
        }
        self.say(line);
    }

    /// Prints a line above the bars.
    pub(crate) fn say(&self, line: &str) {
        match &self.bars {
            Some(bars) => drop(bars.all.println(line)),
            None => eprintln!("{line}"),
        }
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        if let Some(bars) = &self.bars {
            bars.step.finish_and_clear();
            bars.whole.finish_and_clear();
        }
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the templates are constants").progress_chars("━━╌")
}

/// `42 s` or `3 min 05 s`.
pub(crate) fn duration(seconds: f64) -> String {
    let whole = seconds.max(0.0).round() as u64;
    match (whole / 60, whole % 60) {
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
