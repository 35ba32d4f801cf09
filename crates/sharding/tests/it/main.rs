//! Trainings in processes: this binary starts itself as the ranks.

mod bits;
mod example;
mod faults;
mod faulty;
mod gpu;
mod kill;
mod one_rank;
mod reduction;
mod saving;
mod training_case;
mod trainings;

use training_case::Case;

/// A rank's process runs this test alone.
#[test]
fn a_rank() {
    trainings::rank(|case: &Case| case.timeout, Case::run);
}

/// Runs trainings, each with a number of ranks. Returns for each what its ranks printed.
#[track_caller]
fn run(runs: &[(Case, usize)]) -> Vec<Vec<Vec<String>>> {
    trainings::run("a_rank", runs)
}
