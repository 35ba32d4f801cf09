//! Starts this test binary as the ranks of a training.

use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use runtime::collectives::ranks::{Progress, Ranks, RanksOptions, ending};

use crate::training_case::{Case, VARIABLE};

/// A training that takes longer is ended.
const LIMIT: Duration = Duration::from_secs(120);

/// Runs a training with `count` ranks, and returns the lines that begin with `result `, by rank.
#[track_caller]
pub(crate) fn run(case: &Case, count: usize) -> Vec<Vec<String>> {
    let (logs, failed) = start(case, count);
    if let Some(failed) = failed {
        let logs: Vec<String> = logs
            .iter()
            .enumerate()
            .map(|(rank, log)| format!("--- rank {rank}\n{}", log.join("\n")))
            .collect();
        panic!("{case:?} with {count} ranks: {failed}\n{}", logs.join("\n"));
    }
    let results = |log: Vec<String>| log.into_iter().filter(|line| line.starts_with("result ")).collect();
    logs.into_iter().map(results).collect()
}

/// Runs the ranks of a training, and ends all when one has failed. Returns what each printed, and the failure.
pub(crate) fn start(case: &Case, count: usize) -> (Vec<Vec<String>>, Option<String>) {
    let logs = Arc::new(Mutex::new(vec![Vec::new(); count]));
    let written = logs.clone();
    let program = std::env::current_exe().unwrap();
    let command = |_| {
        let mut command = Command::new(&program);
        command
            .args(["a_rank", "--exact", "--nocapture"])
            .env(VARIABLE, case.to_string())
            .env("OMP_NUM_THREADS", "1");
        command
    };
    let options = RanksOptions { ranks: count, ..RanksOptions::default() };
    let mut ranks = Ranks::start(&options, command, move |rank, _, line| {
        written.lock().unwrap()[rank].push(line.to_owned())
    })
    .unwrap();
    let (until, mut failed) = (Instant::now() + LIMIT, None);
    loop {
        match ranks.wait(Duration::from_millis(5)).unwrap() {
            Progress::Done => break,
            Progress::Failed { rank, status } => {
                failed = Some(format!("rank {rank} {}", ending(status)));
                break;
            }
            Progress::Running if Instant::now() > until => {
                failed = Some("it takes too long".to_owned());
                break;
            }
            Progress::Running => {}
        }
    }
    // The others may say what they saw.
    ranks.end(Duration::from_secs(5)).unwrap();
    let logs = logs.lock().unwrap().clone();
    (logs, failed)
}
