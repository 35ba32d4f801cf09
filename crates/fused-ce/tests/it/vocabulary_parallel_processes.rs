//! Shards of the vocabulary in processes, over `runtime::collectives`, against the whole vocabulary.

use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fused_ce::vocabulary_parallel::Shard;
use runtime::collectives::ranks::{Progress, Ranks, RanksOptions};
use runtime::collectives::{Group, GroupOptions, Launch, Store};

use crate::vocabulary_parallel::{VOCABULARY, Whole, cases, run, same};

/// Set in a process that is a rank.
const VARIABLE: &str = "FRUGAL_TEST_RANK_OF";
const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn ranks_compute_the_loss_of_the_whole_vocabulary() {
    if std::env::var_os(VARIABLE).is_some() {
        return rank();
    }
    let program = std::env::current_exe().unwrap();
    for ranks in 2..=4 {
        let log = Arc::new(Mutex::new(String::new()));
        let written = log.clone();
        let options = RanksOptions { ranks, ..RanksOptions::default() };
        let command = |_| {
            let mut command = Command::new(&program);
            let name = "vocabulary_parallel_processes::ranks_compute_the_loss_of_the_whole_vocabulary";
            command.args([name, "--exact", "--nocapture"]).env(VARIABLE, "loss").env("OMP_NUM_THREADS", "1");
            command
        };
        let line = move |rank: usize, _, line: &str| {
            written.lock().unwrap().push_str(&format!("[{rank}] {line}\n"));
        };
        let mut processes = Ranks::start(&options, command, line).unwrap();
        let progress = processes.wait(LIMIT).unwrap();
        processes.end(Duration::from_secs(2)).unwrap();
        assert_eq!(progress, Progress::Done, "{ranks} ranks:\n{}", log.lock().unwrap());
    }
}

fn rank() {
    let launch = Launch::from_environment().unwrap().expect("a rank has its variables");
    let store = Store::connect(&launch, LIMIT).unwrap();
    let group = Group::new(&store, "vocabulary", GroupOptions::default()).unwrap();
    // The last rank of three and of four has few classes.
    let slices: &[i64] = match group.size() {
        2 => &[10, 13],
        3 => &[1, 20, 2],
        _ => &[5, 8, 9, 1],
    };
    let (rows, first) = (slices[group.rank()], slices[..group.rank()].iter().sum::<i64>());
    let widest = slices.iter().copied().max().unwrap();
    let whole = Whole::new(6);
    for case in cases() {
        let shard = Shard { first, vocabulary: VOCABULARY, widest, group: Box::new(group.clone()) };
        let (found, of_rank) = run(&case, &whole, Some((first, rows, shard))).unwrap();
        let (outputs, gradients) = run(&case, &whole, None).unwrap();
        assert_eq!(found.len(), outputs.len());
        for (slot, (found, expected)) in found.iter().zip(&outputs).enumerate() {
            same(&format!("{case:?} output {slot}"), found, expected);
        }
        for (slot, found) in of_rank.iter().enumerate() {
            let expected = match slot {
                1 | 2 | 4 => gradients[slot].narrow(0, first, rows),
                _ => gradients[slot].shallow_clone(),
            };
            same(&format!("{case:?} gradient {slot}"), found, &expected);
        }
    }
    group.barrier("end").unwrap();
}
