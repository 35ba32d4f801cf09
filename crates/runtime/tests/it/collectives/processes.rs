//! Starts this test binary as the ranks of a case.

use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use runtime::collectives::Launch;
use runtime::collectives::ranks::{Progress, Ranks, RanksOptions, ending};

/// What a rank does. A panic fails the case.
pub(crate) type Case = fn(&Launch);

const VARIABLE: &str = "FRUGAL_TEST_RANK_OF";
const PASSED: &str = "this rank has passed";
/// A rank that runs longer is killed.
const LIMIT: Duration = Duration::from_secs(60);

/// Runs the case that the environment names, if this process is a rank.
pub(crate) fn run_as_rank(cases: &[(&str, Case)]) {
    let Ok(name) = std::env::var(VARIABLE) else { return };
    let launch = Launch::from_environment().unwrap().expect("a rank has its variables");
    tch::set_num_threads(1);
    let (_, case) = cases.iter().find(|(case, _)| *case == name).expect("the case is in the table");
    case(&launch);
    // Behind the test harness's own words, which stand on the same line.
    eprintln!("\n{PASSED}");
}

/// The lines that each rank printed.
pub(crate) type Logs = Vec<String>;

/// Runs a case with `count` ranks. All must pass but those `lost`, which must fail, or run until the others have ended.
pub(crate) fn run(case: &str, count: usize, lost: &[usize]) -> Logs {
    run_with(case, count, lost, &[])
}

pub(crate) fn run_with(case: &str, count: usize, lost: &[usize], variables: &[(&str, &str)]) -> Logs {
    let logs = Arc::new(Mutex::new(vec![String::new(); count]));
    let written = logs.clone();
    let options = RanksOptions { ranks: count, ..RanksOptions::default() };
    let program = std::env::current_exe().unwrap();
    let command = |_| {
        let mut command = Command::new(&program);
        command.args(["collectives::a_rank", "--exact", "--nocapture"]).env(VARIABLE, case);
        command.env("OMP_NUM_THREADS", "1").envs(variables.iter().copied());
        command
    };
    let mut ranks = Ranks::start(&options, command, move |rank, _, line| {
        let log = &mut written.lock().unwrap()[rank];
        log.push_str(line);
        log.push('\n');
    })
    .unwrap();
    let passed = |logs: &Mutex<Vec<String>>| {
        let logs = logs.lock().unwrap();
        (0..count).all(|rank| lost.contains(&rank) || logs[rank].contains(PASSED))
    };
    let until = std::time::Instant::now() + LIMIT;
    let mut told = String::new();
    while !passed(&logs) && std::time::Instant::now() < until {
        match ranks.wait(Duration::from_millis(20)).unwrap() {
            Progress::Failed { rank, status } if !lost.contains(&rank) => {
                told = format!("rank {rank} {}", ending(status));
                break;
            }
            Progress::Done => break,
            Progress::Failed { .. } => std::thread::sleep(Duration::from_millis(20)),
            Progress::Running => {}
        }
    }
    // A rank that is lost may hang; the others have passed.
    let patience = if lost.is_empty() && told.is_empty() { LIMIT } else { Duration::from_millis(500) };
    ranks.end(patience).unwrap();
    if !passed(&logs) {
        let logs = logs.lock().unwrap();
        let each: Vec<String> =
            logs.iter().enumerate().map(|(rank, log)| format!("--- rank {rank}\n{log}")).collect();
        panic!("`{case}` with {count} ranks failed: {told}\n{}", each.concat());
    }
    let logs = logs.lock().unwrap();
    logs.clone()
}
