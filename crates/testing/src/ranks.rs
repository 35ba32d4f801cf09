//! Tests over ranks: a test executable starts itself as the processes.
//!
//! Each rank's process runs one test, which calls [`rank`] and does nothing otherwise. The other tests call [`Ranks::run`] with a case,
//! which each rank gets as JSON. A rank that returns has passed, one that panics has failed.
//!
//! Processes take time to start, so many small cases are best given to the same ranks, in groups of some of them
//! ([`Group::of_ranks`](runtime::collectives::Group::of_ranks)).
//!
//! ```no_run
//! use runtime::collectives::{Group, GroupConfig, Store};
//! use testing::ranks::{self, Ranks};
//!
//! // #[test]
//! fn a_rank() {
//!     ranks::rank(|steps: usize, launch| {
//!         let store = Store::connect(launch, ranks::LIMIT).unwrap();
//!         let group = Group::new(&store, "world", GroupConfig::default()).unwrap();
//!         for step in 0..steps {
//!             println!("step {step} of rank {}", group.rank());
//!         }
//!         group.barrier("end").unwrap();
//!     });
//! }
//!
//! // #[test]
//! fn every_rank_takes_every_step() {
//!     let printed = Ranks::new("a_rank", 2).run(&3);
//!     assert_eq!(printed[1], ["step 0 of rank 1", "step 1 of rank 1", "step 2 of rank 1"]);
//! }
//! ```

use std::fmt::Debug;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use runtime::collectives::Launch;
use runtime::collectives::ranks::{Progress, Ranks as Processes, RanksConfig, ending};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Ranks that run longer are killed, and the test fails.
pub const LIMIT: Duration = Duration::from_secs(360);

/// The environment variable with a rank's case.
const VARIABLE: &str = "FRUGAL_TEST_CASE";
/// Lines around what a rank prints: the test harness prints too.
const BEGINS: &str = "this rank begins";
const PASSED: &str = "this rank has passed";
/// Time in which the other ranks may still print after one has failed.
const PATIENCE: Duration = Duration::from_secs(5);

/// Runs `run` with the case and this process's rank if this process is a rank, on one thread.
///
/// # Panics
/// If `run` does; if the case is not the one of [`Ranks::run`].
#[allow(clippy::print_stdout, reason = "what a rank prints is its result")]
pub fn rank<T: DeserializeOwned>(run: impl FnOnce(T, &Launch)) {
    let Ok(case) = std::env::var(VARIABLE) else { return };
    let case = serde_json::from_str(&case).expect("the case of `Ranks::run`");
    let launch = Launch::from_environment().expect("valid variables").expect("a rank has its variables");
    tch::set_num_threads(1);
    println!("\n{BEGINS}");
    run(case, &launch);
    println!("{PASSED}");
}

/// Ranks to run a case with.
#[derive(Clone, Debug)]
pub struct Ranks<'a> {
    /// The path of the test that calls [`rank`].
    pub test: &'a str,
    /// Number of processes.
    pub count: usize,
    /// Ranks that must fail; all others must pass.
    pub lost: &'a [usize],
    /// Further environment variables.
    pub variables: &'a [(&'a str, &'a str)],
    /// Further environment variables of one rank.
    pub variables_of: fn(usize) -> Vec<(&'static str, String)>,
}

impl<'a> Ranks<'a> {
    /// Creates `count` ranks that must pass.
    pub fn new(test: &'a str, count: usize) -> Self {
        Self { test, count, lost: &[], variables: &[], variables_of: |_| Vec::new() }
    }

    /// Runs a case, and returns the lines that each rank printed.
    ///
    /// # Panics
    /// With all lines of all ranks, if a rank fails, if a rank passes that must fail, or if they take longer than [`LIMIT`].
    #[track_caller]
    pub fn run<T: Serialize + Debug>(&self, case: &T) -> Vec<Vec<String>> {
        let text = serde_json::to_string(case).expect("a case that JSON can express");
        let program = std::env::current_exe().expect("the path of this executable");
        let command = |rank| {
            let mut command = Command::new(&program);
            command.args([self.test, "--exact", "--nocapture"]).env(VARIABLE, &text);
            command.env("OMP_NUM_THREADS", "1").envs(self.variables.iter().copied());
            command.envs((self.variables_of)(rank));
            command
        };
        let logs = Arc::new(Mutex::new(vec![Vec::new(); self.count]));
        let written = logs.clone();
        let line = move |rank: usize, _, line: &str| {
            written.lock().unwrap_or_else(PoisonError::into_inner)[rank].push(line.to_owned());
        };
        let options = RanksConfig { ranks: self.count, ..RanksConfig::default() };
        let mut processes = Processes::start(&options, command, line).expect("processes");
        let (until, mut problem) = (Instant::now() + LIMIT, String::new());
        while !processes.have_ended() && problem.is_empty() {
            match processes.wait(Duration::from_millis(5)).expect("the status of processes") {
                Progress::Failed { rank, status } if !self.lost.contains(&rank) => {
                    problem = format!("rank {rank} {}", ending(status));
                }
                _ if Instant::now() > until => problem = format!("no end after {LIMIT:?}"),
                // It does not wait any more.
                Progress::Failed { .. } => std::thread::sleep(Duration::from_millis(5)),
                _ => {}
            }
        }
        processes.end(PATIENCE).expect("the status of processes");
        let logs = logs.lock().unwrap_or_else(PoisonError::into_inner);
        for (rank, log) in logs.iter().enumerate() {
            let passed = log.iter().any(|line| line == PASSED);
            if passed == self.lost.contains(&rank) && problem.is_empty() {
                problem = format!("rank {rank} has {}", if passed { "passed" } else { "not passed" });
            }
        }
        if !problem.is_empty() {
            let each =
                logs.iter().enumerate().map(|(rank, log)| format!("--- rank {rank}\n{}", log.join("\n")));
            panic!("{} ranks: {problem}; {case:?}\n{}", self.count, each.collect::<Vec<_>>().join("\n"));
        }
        logs.iter().map(|log| printed(log)).collect()
    }
}

/// Variables ([`Ranks::variables_of`]) with which ranks over NCCL share one GPU. NCCL refuses two ranks on one GPU of one machine; with a
/// machine's name of their own they count as ranks on several, which it connects by sockets.
pub fn on_one_gpu(rank: usize) -> Vec<(&'static str, String)> {
    let settings = [("NCCL_NET", "Socket"), ("NCCL_SOCKET_IFNAME", "lo"), ("NCCL_P2P_DISABLE", "1")];
    let settings = settings.map(|(name, value)| (name, value.to_owned()));
    settings.into_iter().chain([("NCCL_HOSTID", format!("rank-{rank}"))]).collect()
}

/// Returns the lines that the rank's case printed.
fn printed(log: &[String]) -> Vec<String> {
    let lines = log.iter().skip_while(|line| *line != BEGINS).skip(1);
    lines.take_while(|line| *line != PASSED).cloned().collect()
}
