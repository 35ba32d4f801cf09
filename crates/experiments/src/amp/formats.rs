//! `amp formats`: rounding of small numbers and long sums in each number format.

use report::{Case, Metric};

use super::demonstration::{Format, repeated_sum};
use crate::driver::Bench;

pub(crate) fn run(bench: &mut Bench) -> anyhow::Result<()> {
    for format in Format::ALL {
        let case = Case::new().with("number", 1e-8).with("format", format.name());
        let stored = format.round(1e-8);
        let metrics = vec![
            Metric::exact("stored", "exact", stored),
            Metric::exact("relative_error", "exact", (stored / 1e-8 - 1.0).abs()),
        ];
        bench.put(&case, metrics)?;
    }
    for operand in Format::ALL {
        for accumulator in Format::ALL {
            let sum = repeated_sum(0.01, 1000, operand, accumulator);
            let case = Case::new().with("operand", operand.name()).with("accumulator", accumulator.name());
            let metrics = vec![
                Metric::exact("sum", "exact", sum),
                Metric::exact("relative_error", "exact", (sum / 10.0 - 1.0).abs()),
            ];
            bench.put(&case, metrics)?;
        }
    }
    Ok(())
}
