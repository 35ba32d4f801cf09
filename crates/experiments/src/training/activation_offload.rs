//! `training activation-offload`: from which size of tensor on it pays to put a layer's input into host memory.

use report::{Case, Metric};
use training::activations::LayerPlan;

use super::activation_plan::{NamedPlan, Stack};
use crate::driver::Bench;

const LAYERS: i64 = 4;

/// Steps that recompute every layer from its input, with the inputs on the device and in host memory, over the tokens.
pub(crate) fn run(bench: &mut Bench) -> anyhow::Result<()> {
    let device = bench.device;
    runtime::memory::track_cpu()?;
    let (hidden, tokens, rounds): (i64, &[i64], usize) = bench.sized([
        (64, &[16, 64], 1),
        (256, &[2, 8, 32, 128, 1024], 3),
        (512, &[2, 8, 32, 128, 1024, 4096], 5),
        (2048, &[2, 8, 32, 128, 1024, 4096, 16_384], 9),
    ]);
    let mut pays_from = None;
    let label = |length: &&i64| format!("{length} tokens");
    bench.each(tokens, label, |bench, &length| {
        let stack = Stack {
            rows: 1,
            length,
            hidden,
            heads: hidden / 64,
            layers: LAYERS,
            vocabulary: 256,
            dropout: 0.0,
            device,
            seed: bench.seed,
        };
        let plans = [LayerPlan::RecomputeAll, LayerPlan::Offload].map(|plan| NamedPlan {
            name: plan.to_string(),
            plan: vec![plan; LAYERS as usize],
            budget: None,
        });
        let predictor = stack.step_predictor(1)?;
        // Short steps are disturbed more, and take less.
        let rounds = if length < 256 { 5 * rounds } else { rounds };
        let outcomes = stack.bench(LAYERS)?.run(&stack, &predictor, plans.into(), [rounds, 1], |_| ())?;
        let [kept, offloaded] = &outcomes[..] else { anyhow::bail!("two plans give two outcomes") };
        let ratios: Vec<f64> =
            offloaded.seconds.iter().zip(&kept.seconds).map(|(with, without)| with / without).collect();
        let input = (length * hidden * 4) as f64;
        let ratio = Metric::of_samples("offloaded_time", "ratio", &ratios);
        if ratio.value.is_some_and(|ratio| ratio <= 1.05) {
            pays_from.get_or_insert(input);
        } else {
            pays_from = None;
        }
        let metrics = vec![
            Metric::exact("input_bytes", "B", input),
            Metric::of_samples("step_seconds", "s", &kept.seconds),
            Metric::of_samples("offloaded_step_seconds", "s", &offloaded.seconds),
            ratio,
            Metric::exact("peak_bytes", "B", kept.peak_bytes as f64),
            Metric::exact("offloaded_peak_bytes", "B", offloaded.peak_bytes as f64),
        ];
        bench.put(&Case::new().with("tokens", length), metrics)
    })?;
    let smallest = (tokens[0] * hidden * 4) as f64;
    let metric = |name: &str, unit: &str, value: Option<f64>| match value {
        Some(value) => Metric::exact(name, unit, value),
        None => Metric::not_measured(name, unit, "no measured size costs less than 5 % more time"),
    };
    let metrics = vec![
        metric("pays_from_bytes", "B", pays_from),
        metric("pays_from_vs_smallest", "ratio", pays_from.map(|bytes| bytes / smallest)),
    ];
    bench.put(&Case::new().with("shows", "threshold"), metrics)
}
