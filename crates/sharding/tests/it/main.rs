//! Trainings in processes: this binary starts itself as the ranks.

mod bits;
mod kill;
mod processes;
mod training_case;

use training_case::Case;

/// A rank's process runs this test alone, with its training in the environment.
#[test]
fn a_rank() {
    if let Some(case) = Case::of_this_rank() {
        case.run();
    }
}
