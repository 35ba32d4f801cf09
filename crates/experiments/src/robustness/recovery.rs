//! Counts failures of recovery. A command is stopped or made to fail, and runs again: its files must be undamaged, its results as expected,
//! and no temporary file may remain.

use report::Metric;

use super::work::{Results, Sandbox, Work};

/// Counts over the tries of one command.
#[derive(Debug, Default)]
pub(super) struct Recovery {
    /// Second runs with results other than the expected ones.
    different: usize,
    /// Outputs with a damaged file after the stop.
    damaged: usize,
    /// Second runs that failed.
    failed: usize,
    /// Temporary files that remained after the second run.
    left: usize,
}

impl Recovery {
    /// Checks an output for damage right after its command was stopped; `note` gets a description.
    pub(super) fn inspect(
        &mut self,
        (sandbox, work): (&Sandbox, &Work),
        out: &str,
        expected: &Results,
        note: &dyn Fn(&str),
    ) {
        if let Some(damage) = sandbox.damage(work, out, expected) {
            self.damaged += 1;
            note(&damage);
        }
    }

    /// Runs the command again without a failure, compares its results, looks for temporary files, and removes the output.
    ///
    /// # Errors
    /// Results that cannot be read; a file that cannot be removed.
    pub(super) fn run_again(
        &mut self,
        (sandbox, work): (&Sandbox, &Work),
        out: &str,
        expected: &Results,
        note: &dyn Fn(&str),
    ) -> anyhow::Result<()> {
        match sandbox.succeed(sandbox.command(work, out)) {
            Err(error) => {
                self.failed += 1;
                note(&format!("{error:#}"));
            }
            Ok(_) if sandbox.results(work, out)? != *expected => {
                self.different += 1;
                note("the results differ");
            }
            Ok(_) => {}
        }
        let left = sandbox.left(out);
        if !left.is_empty() {
            note(&format!("left: {left:?}"));
        }
        self.left += left.len();
        sandbox.remove(out)
    }

    /// Returns the counts, and their sum as `lost`.
    pub(super) fn metrics(&self) -> Vec<Metric> {
        let Self { different, damaged, failed, left } = *self;
        let counts = [
            ("different_results", different),
            ("damaged_files", damaged),
            ("failed_restarts", failed),
            ("files_left", left),
            ("lost", different + damaged + failed + left),
        ];
        counts.into_iter().map(|(name, count)| Metric::exact(name, "", count as f64)).collect()
    }
}
