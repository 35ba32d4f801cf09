//! Runs a program as a child process: passes its progress on and logs everything else that it prints.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use report::progress::{PROGRESS_VARIABLE, Step};
use report::turns::Turn;

use crate::interrupt::Interrupt;

/// How a child ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Ending {
    Done,
    /// Why, in one line.
    Failed(String),
    /// The user stopped it.
    Interrupted,
}

/// A line by which a child says how far it is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Line {
    Step(Step),
    /// It waits for its turn.
    Turn(Turn),
}

/// Time that a child has to exit by itself after Ctrl-C, which it receives too.
const GRACE: Duration = Duration::from_secs(2);
pub(crate) const TICK: Duration = Duration::from_millis(50);

/// Runs `command` to its end. What it prints is appended to `log`.
pub(crate) fn run(
    mut command: Command,
    log: &Path,
    interrupt: &Interrupt,
    mut on_step: impl FnMut(Step),
) -> Result<(Ending, Duration)> {
    let open = || {
        let file = OpenOptions::new().create(true).append(true).open(log);
        file.with_context(|| format!("cannot write the log {}", log.display()))
    };
    let program = command.get_program().to_owned();
    command.env(PROGRESS_VARIABLE, "lines").stdin(Stdio::null()).stdout(open()?).stderr(Stdio::piped());
    let start = Instant::now();
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            let why = format!("cannot run {}: {error}", program.display());
            writeln!(open()?, "{why}").ok();
            return Ok((Ending::Failed(why), start.elapsed()));
        }
    };
    let (steps, received) = mpsc::channel();
    let stderr = child.stderr.take().expect("standard error is piped");
    let mut file = open()?;
    let reader = thread::spawn(move || read(stderr, &mut file, &steps));
    let mut interrupted_at = None;
    let status = loop {
        match received.recv_timeout(TICK) {
            Ok(Line::Step(step)) => on_step(step),
            Ok(Line::Turn(_)) => {}
            Err(RecvTimeoutError::Disconnected) => thread::sleep(TICK),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if interrupt.wanted() {
            let since = *interrupted_at.get_or_insert_with(Instant::now);
            if since.elapsed() > GRACE {
                child.kill().ok();
            }
        }
        if let Some(status) = finished(&mut child)? {
            break status;
        }
    };
    // The child's last output may still be in the pipe. A grandchild that outlives it may keep the pipe open for ever.
    let patience = Instant::now() + GRACE;
    while !reader.is_finished() && Instant::now() < patience {
        thread::sleep(Duration::from_millis(1));
    }
    for line in received.try_iter() {
        if let Line::Step(step) = line {
            on_step(step);
        }
    }
    let ending = if interrupt.wanted() {
        Ending::Interrupted
    } else if status.success() {
        Ending::Done
    } else {
        Ending::Failed(why(status, &tail(log, 50)))
    };
    Ok((ending, start.elapsed()))
}

fn finished(child: &mut Child) -> Result<Option<ExitStatus>> {
    child.try_wait().context("cannot wait for a program")
}

/// Passes steps and turns on and writes every other line to the log, so that the log has the last output of a crash.
pub(crate) fn read(stderr: ChildStderr, log: &mut File, lines: &mpsc::Sender<Line>) {
    for line in BufReader::new(stderr).split(b'\n') {
        let Ok(line) = line else { return };
        let text = std::str::from_utf8(&line).ok();
        let known = text
            .and_then(|text| Step::parse(text).map(Line::Step).or_else(|| Turn::parse(text).map(Line::Turn)));
        match known {
            Some(known) => drop(lines.send(known)),
            None => drop(log.write_all(&[&line[..], b"\n"].concat())),
        }
    }
}

/// The last lines of a log.
pub(crate) fn tail(log: &Path, lines: usize) -> Vec<String> {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].iter().map(|&line| line.to_owned()).collect()
}

/// Describes a failure in a line: the program's own error if it printed one, and how it ended.
pub(crate) fn why(status: ExitStatus, log: &[String]) -> String {
    if let Some(signal) = status.signal() {
        return format!("ended by {}", signal_name(signal));
    }
    let error = log.iter().rev().find_map(|line| line.strip_prefix("error: "));
    let code = status.code().unwrap_or(-1);
    error.map_or_else(|| format!("ended with exit status {code}"), str::to_owned)
}

/// The signals that end programs, in words that help.
pub(crate) fn signal_name(signal: i32) -> String {
    let name = match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL (an instruction that this processor does not have)",
        6 => "SIGABRT (an abort; the log has its reason)",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL (on Linux most often the kernel, out of memory)",
        11 => "SIGSEGV (a crash in native code)",
        13 => "SIGPIPE",
        15 => "SIGTERM",
        24 => "SIGXCPU",
        25 => "SIGXFSZ",
        other => return format!("signal {other}"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> (Ending, Vec<Step>, Vec<String>) {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let mut steps = Vec::new();
        let (ending, _) = run(command, &log, &Interrupt::default(), |step| steps.push(step)).unwrap();
        (ending, steps, tail(&log, 10))
    }

    #[test]
    fn steps_are_passed_on_and_the_rest_is_logged() {
        let (ending, steps, log) = shell(
            "echo \"mode $FRUGAL_PROGRESS\"; echo '@progress 1 2 half' >&2; echo warning >&2; printf last >&2",
        );
        assert_eq!(ending, Ending::Done);
        assert_eq!(steps, [Step { done: 1, total: 2, message: "half".into() }]);
        assert_eq!(log, ["mode lines", "warning", "last"]);
    }

    #[test]
    fn a_failure_says_why() {
        assert_eq!(
            shell("echo 'error: no such file: x' >&2; exit 1").0,
            Ending::Failed("no such file: x".into())
        );
        assert_eq!(shell("exit 7").0, Ending::Failed("ended with exit status 7".into()));
        let killed = Ending::Failed("ended by SIGSEGV (a crash in native code)".into());
        assert_eq!(shell("kill -SEGV $$").0, killed);
    }

    #[test]
    fn a_program_that_is_missing_is_a_failure_like_any_other() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let (ending, _) =
            run(Command::new("/nonexistent/program"), &log, &Interrupt::default(), |_| {}).unwrap();
        assert!(
            matches!(&ending, Ending::Failed(why) if why.starts_with("cannot run /nonexistent/program")),
            "{ending:?}"
        );
        assert_eq!(tail(&log, 5).len(), 1);
    }
}
