//! `lora parameters`: the assignment's counts, of an installed model of Qwen2.5-0.5B's shape.

use lora::LoraConfig;
use models::module::parameter_count;
use report::{Case, Metric};
use tch::Kind;

use crate::driver::Bench;
use crate::shape::Shape;

/// Builds the model with random weights in bf16, installs the assignment's adapters, and counts.
pub(crate) fn run(bench: &mut Bench) -> anyhow::Result<()> {
    let mut model = Shape::Small.model(Kind::BFloat16, bench.device)?;
    let base = parameter_count(&model).total;
    let adapters = LoraConfig {
        seed: bench.seed,
        r: 8,
        lora_alpha: 16.0,
        lora_dropout: 0.05,
        target_modules: Some(["q_proj", "k_proj", "v_proj", "o_proj"].into()),
        ..LoraConfig::default()
    };
    let _adapters = adapters.install(&mut model)?;
    let count = parameter_count(&model);
    let rows = [
        ("base model", base, 494_032_768),
        ("with adapters", count.total, 495_114_112),
        ("trainable", count.trainable, 1_081_344),
    ];
    for (what, counted, expected) in rows {
        let metrics = vec![
            Metric::exact("parameters", "count", counted as f64),
            Metric::exact("expected_parameters", "count", f64::from(expected)),
            Metric::exact("difference", "count", counted as f64 - f64::from(expected)),
        ];
        bench.put(&Case::new().with("parameters_of", what), metrics)?;
    }
    let share = 100.0 * count.trainable as f64 / count.total as f64;
    let metric = Metric::exact("trainable_share", "%", (share * 100.0).round() / 100.0);
    bench.put(&Case::new().with("parameters_of", "share"), vec![metric])
}
