//! `experiments`: every measurement behind the reports, `experiments CRATE VERB`.

use std::process::ExitCode;

// Threads wait as those of `frugal`, which this program measures.
runtime::bound_spinning!();

fn main() -> ExitCode {
    experiments::run()
}
