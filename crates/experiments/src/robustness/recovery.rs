//! Files that a command leaves when it is stopped or fails, and its run after that, counted over all tries.

use report::Metric;

use super::work::{Results, Sandbox, Work};

/// Counts over the tries of one command.
#[derive(Debug, Default)]
pub(super) struct Recovery {
    different: usize,
    damaged: usize,
    failed: usize,
    left: usize,
}

impl Recovery {
    /// Inspects an output right after its command was stopped.
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

    /// The counts, and their sum as `lost`.
    pub(super) fn metrics(&self) -> Vec<Metric> {
        let Self { different, damaged, failed, left } = *self;
        let all = [
            ("different_results", different),
            ("damaged_files", damaged),
            ("failed_restarts", failed),
            ("files_left", left),
            ("lost", different + damaged + failed + left),
        ];
        all.into_iter().map(|(name, count)| Metric::exact(name, "", count as f64)).collect()
    }
}
