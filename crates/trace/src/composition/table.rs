//! Formats a composition as text.

use std::fmt::{self, Display, Formatter};

use super::{Composition, Phase};
use crate::quantity::human;

/// Number of operators in the table.
const LISTED: usize = 10;

impl Display for Composition {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let median = &self.median;
        let share = |seconds: f64| 100.0 * seconds / median.seconds.max(f64::MIN_POSITIVE);
        let steps = if self.steps.len() == 1 { "one step" } else { "median of the steps" };
        writeln!(
            f,
            "step {} ({steps}, {} of them): {} operators, {} allocated, {} copies",
            human(median.seconds, "s"),
            self.steps.len(),
            self.calls(),
            human(median.allocated_bytes, "B"),
            median.copies.count,
        )?;
        let mut line = |name: &str, seconds: f64, note: &str| {
            writeln!(f, "  {name:<10} {:>9}  {:>5.1} %{note}", human(seconds, "s"), share(seconds))
        };
        for phase in Phase::ALL {
            let time = self.phase(phase);
            if time.seconds > 0.0 {
                line(phase.name(), time.seconds, &format!("  {} operators", time.calls))?;
            }
        }
        line("idle", median.idle_seconds, "  no operator ran")?;
        line("host", median.host_seconds, "  in operators that compute nothing")?;
        if let Some(device) = median.device {
            let idle = median.seconds * device.idle_share;
            line("device", idle, &format!("  idle; {} kernels, {} copies", device.kernels, device.copies))?;
        }
        let width = self.operators.iter().take(LISTED).map(|operator| operator.name.len()).max().unwrap_or(0);
        for operator in self.operators.iter().take(LISTED) {
            let time = human(operator.seconds, "s");
            let (name, percent, calls) = (&operator.name, 100.0 * operator.share, operator.calls);
            writeln!(f, "  {name:<width$}  {time:>9}  {percent:>5.1} %  {calls} ×")?;
        }
        Ok(())
    }
}
