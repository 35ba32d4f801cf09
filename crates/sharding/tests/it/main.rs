//! Trainings in processes: this binary starts itself as the ranks.

mod bits;
mod kill;
mod training_case;

use std::time::Duration;

use runtime::collectives::{Group, GroupOptions, Store};
use test_ranks::Ranks;
use training_case::Case;

/// Trainings, each with the number of ranks that run it, and what each printed.
type Runs = [(Case, usize)];

/// A rank's process runs this test alone.
#[test]
fn a_rank() {
    test_ranks::rank(|runs: Vec<(Case, usize)>, launch| {
        let store = Store::connect(launch, TIMEOUT).unwrap();
        let options = GroupOptions { timeout: TIMEOUT, ..GroupOptions::default() };
        let world = Group::new(&store, "world", options.clone()).unwrap();
        for (number, (case, count)) in runs.into_iter().enumerate() {
            if world.rank() < count {
                let ranks: Vec<usize> = (0..count).collect();
                let name = format!("training {number}");
                let group = Group::of_ranks(&store, &name, &ranks, options.clone()).unwrap();
                case.run(&group, number);
            }
        }
        world.barrier("end").unwrap();
    });
}

const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs trainings one after another, in the same processes. Returns for each what its ranks printed.
#[track_caller]
fn run(runs: &Runs) -> Vec<Vec<Vec<String>>> {
    let count = runs.iter().map(|(_, count)| *count).max().unwrap();
    let printed = Ranks::new("a_rank", count).run(&runs);
    let of = |number: usize, rank: usize| {
        let prefix = format!("training {number}: ");
        printed[rank].iter().filter_map(|line| line.strip_prefix(&prefix)).map(str::to_owned).collect()
    };
    let numbered = runs.iter().enumerate();
    numbered.map(|(number, (_, count))| (0..*count).map(|rank| of(number, rank)).collect()).collect()
}
