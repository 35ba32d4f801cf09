//! `experiments`: every measurement behind the reports, `experiments CRATE VERB`.

use std::process::ExitCode;

// As `frugal` waits, which it measures.
runtime::bound_spinning!();

fn main() -> ExitCode {
    experiments::run()
}
