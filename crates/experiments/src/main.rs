//! `experiments`: every measurement behind the reports, `experiments CRATE VERB`.

use std::process::ExitCode;

fn main() -> ExitCode {
    experiments::run()
}
