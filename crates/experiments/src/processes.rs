//! This program again, as the ranks of a group.

use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, ensure};
use runtime::collectives::ranks::{Output, Progress, Ranks, RanksConfig};

/// Runs `count` processes of this program with these arguments, a thread each, and returns by rank what they printed.
///
/// # Errors
/// A process that fails, with what all of them wrote to standard error; the deadline.
pub(crate) fn run(
    count: usize,
    arguments: &[String],
    deadline: Duration,
) -> anyhow::Result<Vec<Vec<String>>> {
    let program = std::env::current_exe().context("finding this program to run it again")?;
    let lines = Arc::new(Mutex::new((vec![Vec::new(); count], Vec::new())));
    let written = lines.clone();
    let options = RanksConfig { ranks: count, ..RanksConfig::default() };
    let command = |_| {
        let mut command = Command::new(&program);
        command.args(arguments).env("OMP_NUM_THREADS", "1").env("MKL_NUM_THREADS", "1");
        command
    };
    let mut ranks = Ranks::start(&options, command, move |rank, output, line| {
        let Ok(mut written) = written.lock() else { return };
        match output {
            Output::Standard => written.0[rank].push(line.to_owned()),
            _ => written.1.push(line.to_owned()),
        }
    })?;
    let progress = ranks.wait(deadline)?;
    ranks.end(Duration::from_secs(5))?;
    let (lines, errors) = lines.lock().map(|lines| lines.clone()).unwrap_or_default();
    ensure!(progress == Progress::Done, "the ranks did not end well: {progress:?}\n{}", errors.join("\n"));
    Ok(lines)
}
