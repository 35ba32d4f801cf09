//! `amp gradient`: the time and memory of one gradient in each precision.

use report::{Case, Metric};

use super::gradient_time::{Cost, Gradient};
use super::setup::Setup;
use super::sizes::{Sizes, wide};
use crate::driver::Bench;

const SETUPS: [Setup; 8] = [
    Setup::Fp32,
    Setup::Bf16,
    Setup::PureFp16,
    Setup::Fp16Weights,
    Setup::Unscaled,
    Setup::Static,
    Setup::Dynamic,
    Setup::Fp8,
];

#[derive(clap::Args)]
pub(crate) struct GradientArgs {
    /// Gradients in each set-up, in turns [default: 3 at smoke and laptop, else 11]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    repeats: Option<u64>,
}

pub(crate) fn run(bench: &mut Bench, arguments: &GradientArgs) -> anyhow::Result<()> {
    let device = bench.device;
    runtime::memory::track_cpu()?;
    let scales = Sizes::new(bench.scale, device, bench.seed).training.scales;
    let sizes = wide(bench.scale, device, bench.seed);
    let mut gradients: Vec<Gradient> =
        SETUPS.iter().map(|setup| Gradient::new(*setup, &sizes, &scales)).collect::<Result<_, _>>()?;
    let rounds = arguments.repeats.unwrap_or(bench.sized([3, 3, 11, 11])) as usize;
    let all: [usize; SETUPS.len()] = std::array::from_fn(|index| index);
    let label = |index: &usize| format!("one gradient, {}", SETUPS[*index]);
    let mut costs = bench.in_turns(rounds + 1, &all, label, |_, index| gradients[*index].compute())?;
    // The first of each sets libtorch up and lets the allocator grow.
    for costs in &mut costs {
        costs.remove(0);
    }
    let scratch = tempfile::tempdir()?;
    let total = |cost: &Cost| cost.forward + cost.backward + cost.unscale;
    for ((setup, of_setup), gradient) in SETUPS.iter().zip(&costs).zip(&mut gradients) {
        let each = |name: &str, unit: &str, value: &dyn Fn(&Cost) -> f64| {
            Metric::of_samples(name, unit, &of_setup.iter().map(value).collect::<Vec<f64>>())
        };
        let ratios: Vec<f64> =
            of_setup.iter().zip(&costs[0]).map(|(low, full)| total(low) / total(full)).collect();
        let mut seconds = each("gradient_seconds", "s", &total);
        // What multiplied is counted: an operand that no kernel of its dtype takes is multiplied by another one.
        seconds.note =
            Some(format!("products: {}; FLOPs by {}", setup.products(device), gradient.multiplied()?));
        let mut ratio = Metric::of_samples("time_vs_fp32", "ratio", &ratios);
        ratio.note = Some(setup.reason(device));
        let mut metrics = vec![
            seconds,
            each("forward_seconds", "s", &|cost| cost.forward),
            each("backward_seconds", "s", &|cost| cost.backward),
            each("unscale_seconds", "s", &|cost| cost.unscale),
            ratio,
            each("peak_bytes", "B", &|cost| cost.peak_bytes as f64),
        ];
        // On CUDA an operator's time is that of its launch.
        if !device.is_cuda() {
            let parts = gradient.profile(&scratch.path().join("trace.json"))?;
            metrics.push(Metric::exact("product_seconds", "s", parts.products));
            metrics.push(Metric::exact("copy_seconds", "s", parts.copies));
            metrics.push(Metric::exact("other_seconds", "s", parts.rest));
        }
        bench.put(&Case::new().with("setup", setup.to_string()), metrics)?;
    }
    Ok(())
}
