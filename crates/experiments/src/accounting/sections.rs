//! The records of the report's sections about accounting: one function per experiment, computed in milliseconds and
//! the same everywhere.
//!
//! | experiment | shows |
//! |---|---|
//! | [`dtypes`] | what each number format can hold |
//! | [`published`](mod@published) | our figures beside published ones |
//! | [`flops`](mod@flops) | FLOPs of models, and where 6·N·D fails |
//! | [`estimates`](mod@estimates) | series of recipes, recomputation, optimizers and ZeRO stages, part by part |
//! | [`fits`](mod@fits) | the largest batch, sequence and model on known devices |
//! | [`long_context`](mod@long_context) | which terms remain in long sequences on one card, and how long one fits |
//! | [`offload_condition`] | from how many tokens on loads hide behind compute, and plans for 10 GB |
//! | [`times`](mod@times) | how long known trainings take |
//! | [`scale`](mod@scale) | steps over many GPUs, and effective time under failures |
//! | [`divided_rows`](mod@divided_rows) | memory and time of long rows that GPUs divide |

mod divided_rows;
mod estimates;
mod fits;
mod flops;
mod long_context;
mod offload;
mod published;
mod scale;
mod times;

pub(crate) use divided_rows::divided_rows;
pub(crate) use estimates::estimates;
pub(crate) use fits::fits;
pub(crate) use flops::flops;
pub(crate) use long_context::long_context;
pub(crate) use offload::offload_condition;
pub(crate) use published::{published, training_gpt3};
pub(crate) use scale::scale;
pub(crate) use times::times;

use accounting::{Dtype, Error};
use report::{Case, Environment, Metric, Record};

use super::number_limits::Limits;

/// The limits of each number format.
pub(crate) fn dtypes(environment: &Environment) -> Result<Vec<Record>, Error> {
    let mut records = Vec::new();
    for dtype in Dtype::ALL {
        let limits = Limits::new(dtype);
        let power = |name: &str, value: Option<f64>| match value {
            // Exact: each of them is a power of two.
            Some(value) => Metric::exact(name, "", value.log2()),
            None => Metric::not_measured(name, "", "an integer has none"),
        };
        let metrics = [
            Metric::exact("storage_bits", "count", dtype.storage_bits() as f64),
            Metric::exact("max", "", limits.max),
            power("log2_min_normal", limits.min_normal),
            power("log2_min_subnormal", Some(limits.min_subnormal)),
            power("log2_epsilon", limits.epsilon),
            Metric::exact("decimal_digits", "count", f64::from(limits.decimal_digits)),
            Metric::exact("stored_1e-8", "", limits.tiny),
            Metric::exact("stored_0.1", "", limits.tenth),
            Metric::exact("error_of_0.1", "%", 100.0 * (limits.tenth / 0.1 - 1.0).abs()),
            Metric::exact("gpt3_matrix_bytes", "B", dtype.tensor_bytes(&[12288 * 4, 12288])? as f64),
        ];
        let case = Case::new().with("dtype", dtype.name());
        records.extend(metrics.map(|metric| record("accounting-dtypes", &case, metric, environment)));
    }
    Ok(records)
}

/// Creates a record.
pub(crate) fn record(experiment: &str, case: &Case, metric: Metric, environment: &Environment) -> Record {
    Record { experiment: experiment.into(), case: case.clone(), metric, environment: environment.clone() }
}
