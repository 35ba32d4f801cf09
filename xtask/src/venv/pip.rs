//! A run of pip: its progress, and the remedy when it fails.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};

use super::Recipe;

/// Runs one command of the installation. Its output goes to `log`; the latest line is shown.
pub(super) fn run(mut command: Command, lock: &File, log: &Path, recipe: &Recipe, first: &str) -> Result<()> {
    let open = || OpenOptions::new().create(true).append(true).open(log);
    let mut file = open().with_context(|| format!("cannot write {}", log.display()))?;
    let bar = std::io::stderr().is_terminal().then(|| {
        let style = ProgressStyle::with_template("{spinner} [{elapsed}] {wide_msg}");
        let bar = ProgressBar::new_spinner().with_style(style.expect("the template is a constant"));
        bar.enable_steady_tick(Duration::from_millis(120));
        bar.with_message(first.to_owned())
    });
    command.stdin(lock.try_clone()?).stdout(Stdio::piped()).stderr(open()?);
    command
        .env_remove("PYTHONHOME")
        .env_remove("PYTHONPATH")
        .env_remove("PIP_TARGET")
        .env_remove("PIP_PREFIX");
    let mut child =
        command.spawn().with_context(|| format!("cannot run {}", command.get_program().display()))?;
    let output = child.stdout.take().expect("standard output is piped");
    for line in BufReader::new(output).split(b'\n') {
        let line = line.context("cannot read pip's output")?;
        let line = String::from_utf8_lossy(&line);
        writeln!(file, "{line}").with_context(|| format!("cannot write {}", log.display()))?;
        match &bar {
            Some(bar) => bar.set_message(line.trim().to_owned()),
            None if line.starts_with("Installing") => eprintln!("setup: {line}"),
            None => {}
        }
    }
    let status = child.wait().context("cannot wait for pip")?;
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    if !status.success() {
        let text = std::fs::read_to_string(log).unwrap_or_default();
        bail!(
            "{} could not be installed ({status}): {}; {} (the whole output is in {})",
            recipe.what,
            last_error(&text),
            remedy(&text, recipe),
            log.display()
        );
    }
    Ok(())
}

/// The line of pip's output that names the failure.
fn last_error(log: &str) -> &str {
    let lines = || log.lines().map(str::trim).filter(|line| !line.is_empty());
    let error = lines().rev().find(|line| line.starts_with("ERROR:") || line.starts_with("Error:"));
    error.or_else(|| lines().next_back()).unwrap_or("no output")
}

/// Returns the remedy for a failure of pip, chosen by its error message.
fn remedy(log: &str, recipe: &Recipe) -> String {
    let wheels: Vec<&str> =
        recipe.packages.iter().map(String::as_str).filter(|package| !package.starts_with('-')).collect();
    let wheels = wheels.join(", ");
    let says = |words: &[&str]| words.iter().any(|word| log.contains(word));
    if says(&["No space left on device"]) {
        format!(
            "{} are needed: free some space, or set FRUGAL_CACHE to a folder on another disk",
            recipe.size
        )
    } else if says(&[
        "NewConnectionError",
        "Temporary failure in name resolution",
        "Name or service not known",
        "Network is unreachable",
        "ConnectTimeoutError",
        "ReadTimeoutError",
        "ProxyError",
        "Failed to establish a new connection",
    ]) {
        format!(
            "the network was not reached: connect and run this again, or put the wheels of {wheels} in a folder and set \
             PIP_NO_INDEX=1 and PIP_FIND_LINKS to it, or set LIBTORCH"
        )
    } else if says(&["(from versions: none)"]) {
        // pip prints this both without an index and where no wheel fits the platform.
        format!(
            "no wheel was found at all: see that the network and pip's index are reached, and use Linux on x86-64 or \
             aarch64; or put the wheels of {wheels} in a folder and set PIP_NO_INDEX=1 and PIP_FIND_LINKS to it; or set \
             LIBTORCH"
        )
    } else if says(&["No matching distribution"]) {
        "there is no wheel for this platform and Python; use Linux on x86-64 or aarch64 with Python 3.10 to 3.14, or \
         set LIBTORCH"
            .into()
    } else {
        "fix the reported problem and run this again, or set LIBTORCH".into()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::recipe;
    use super::*;

    #[test]
    fn failures_of_pip_come_with_their_remedy() {
        let check = |log: &str, error: &str, way_out: &str| {
            assert_eq!(last_error(log), error);
            let remedy = remedy(log, &recipe());
            assert!(remedy.contains(way_out), "{remedy}");
        };
        check(
            "Collecting torch\nERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n\n",
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "1 GB are needed",
        );
        check(
            "WARNING: Retrying after NewConnectionError('Network is unreachable')\n\
             ERROR: No matching distribution found for torch==2.11.0",
            "ERROR: No matching distribution found for torch==2.11.0",
            "the network was not reached",
        );
        check(
            "ERROR: No matching distribution found for torch==2.11.0",
            "ERROR: No matching distribution found for torch==2.11.0",
            "no wheel for this platform",
        );
        check(
            "ERROR: Could not find a version that satisfies the requirement torch==2.11.0 (from versions: none)",
            "ERROR: Could not find a version that satisfies the requirement torch==2.11.0 (from versions: none)",
            "the wheels of torch==2.11.0 in a folder",
        );
        check("", "no output", "run this again");
    }
}
