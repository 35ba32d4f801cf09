//! `training activation-offload`: from which size of tensor on it pays to put a layer's input into host memory.

use report::cli::{CommonArgs, Scale};
use report::{Case, Metric, Progress, Sink};
use training::activations::LayerPlan;

use super::activation_plan::{NamedPlan, Stack};

const EXPERIMENT: &str = "activation-offload";
const LAYERS: i64 = 4;

#[derive(clap::Args)]
pub(crate) struct ActivationOffload {
    /// Up to which size
    #[arg(long, value_enum, default_value_t)]
    scale: Scale,
}

/// Steps that recompute every layer from its input, with the inputs on the device and in host memory, over the tokens.
pub(crate) fn run(common: &CommonArgs, arguments: &ActivationOffload) -> anyhow::Result<()> {
    let device = runtime::device::select(&common.device)?;
    runtime::memory::track_cpu()?;
    let mut sink = Sink::new(common, crate::environment::of(device)?, arguments.scale)?;
    let (hidden, tokens, rounds): (i64, &[i64], usize) = match arguments.scale {
        Scale::Smoke => (64, &[16, 64], 1),
        Scale::Laptop => (256, &[2, 8, 32, 128, 1024], 3),
        Scale::Full => (512, &[2, 8, 32, 128, 1024, 4096], 5),
        Scale::Paper => (2048, &[2, 8, 32, 128, 1024, 4096, 16_384], 9),
    };
    let mut progress = Progress::new(tokens.len() as u64);
    let mut pays_from = None;
    for &length in tokens {
        progress.message(&format!("{length} tokens"));
        let stack = Stack {
            rows: 1,
            length,
            hidden,
            heads: hidden / 64,
            layers: LAYERS,
            vocabulary: 256,
            dropout: 0.0,
            device,
            seed: common.seed,
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
        sink.put(EXPERIMENT, &Case::new().with("tokens", length), metrics)?;
        progress.step();
    }
    let smallest = (tokens[0] * hidden * 4) as f64;
    let from = match pays_from {
        Some(bytes) => vec![
            Metric::exact("pays_from_bytes", "B", bytes),
            Metric::exact("pays_from_vs_smallest", "ratio", bytes / smallest),
        ],
        None => {
            let why = "no measured size costs less than 5 % more time";
            vec![
                Metric::not_measured("pays_from_bytes", "B", why),
                Metric::not_measured("pays_from_vs_smallest", "ratio", why),
            ]
        }
    };
    sink.put(EXPERIMENT, &Case::new().with("shows", "threshold"), from)
}
