//! How long known trainings take on known devices, by 6·N·D.

use accounting::training_time::{Run, six_n_d};
use accounting::{Error, hardware};
use report::{Case, Environment, Metric, Record};

use super::record;

/// Trainings: name, parameters, tokens, devices.
const TRAININGS: [(&str, u64, u64, u64); 4] = [
    ("70B on 15T tokens", 70_000_000_000, 15_000_000_000_000, 1024),
    ("8B on 15T tokens", 8_030_261_248, 15_000_000_000_000, 1024),
    ("Qwen2.5-0.5B on 100B tokens", 494_032_768, 100_000_000_000, 8),
    ("GPT-2 small on 10B tokens", 124_439_808, 10_000_000_000, 1),
];

/// Days of each training at an MFU of 0.5 in 16 bits, and what the rate with sparsity would promise.
pub(crate) fn times(environment: &Environment) -> Result<Vec<Record>, Error> {
    let mut rates: Vec<(&str, f64)> = Vec::new();
    for name in ["rtx4090", "a100", "h100", "b200"] {
        rates.push((name, hardware::find(name)?.bf16));
    }
    rates.push(("h100, rate with sparsity", hardware::H100_BF16_WITH_SPARSITY));
    let mut records = Vec::new();
    for (training, parameters, tokens, devices) in TRAININGS {
        let flops = six_n_d(parameters, tokens)?;
        for &(device, peak) in &rates {
            let run = Run { flops, peak, utilization: 0.5, devices };
            let case = Case::new().with("training", training).with("devices", devices).with("device", device);
            let metrics = [
                Metric::exact("training_flops", "FLOP", flops as f64),
                Metric::exact("days", "days", run.days()?),
            ];
            records.extend(metrics.map(|metric| record("accounting-time", &case, metric, environment)));
        }
    }
    Ok(records)
}
