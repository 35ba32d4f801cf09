//! `fused-ce attention`: time and memory of attention over the length of the sequence.

use models::attention::{AttentionPath, causal_attention};
use report::cli::{CommonArgs, Scale};
use report::{Case, Metric, Progress, Sink};
use runtime::autograd::{self, Keep};
use runtime::measure::{self, MeasurementPlan};
use runtime::memory::live_bytes;
use tch::{Kind, Tensor};

const EXPERIMENT: &str = "attention-length";

/// Heads and the size of each: those of Qwen2.5-0.5B.
const HEADS: i64 = 14;
const HEAD: i64 = 64;

#[derive(clap::Args)]
pub(crate) struct Attention {
    /// Up to which length
    #[arg(long, value_enum, default_value_t)]
    scale: Scale,
}

/// Measures forward and backward of one attention, with scores and with libtorch's fused kernel, over the lengths.
pub(crate) fn run(common: &CommonArgs, arguments: &Attention) -> anyhow::Result<()> {
    let device = runtime::device::select(&common.device)?;
    runtime::memory::track_cpu()?;
    runtime::random::seed(common.seed)?;
    let (lengths, repeats): (&[i64], usize) = match arguments.scale {
        Scale::Smoke => (&[64, 128], 1),
        Scale::Laptop => (&[128, 256, 512, 1024, 2048], 3),
        Scale::Full => (&[128, 256, 512, 1024, 2048, 4096, 8192], 5),
        Scale::Paper => (&[512, 1024, 2048, 4096, 8192, 16_384], 5),
    };
    let mut sink = Sink::new(common, crate::environment::of(device)?, arguments.scale)?;
    let paths = [("explicit scores", AttentionPath::Explicit), ("fused", AttentionPath::Fused)];
    let mut progress = Progress::new((lengths.len() * paths.len()) as u64);
    let mut previous = [None::<(f64, f64)>; 2];
    for &length in lengths {
        for ((name, path), previous) in paths.into_iter().zip(&mut previous) {
            progress.message(&format!("{name}, {length} tokens"));
            let random = || -> anyhow::Result<Tensor> {
                let shape = [1, length, HEADS, HEAD];
                Ok(Tensor::f_randn(shape, (Kind::Float, device))?.f_set_requires_grad(true)?)
            };
            let (q, k, v) = (random()?, random()?, random()?);
            let before = live_bytes(device)?;
            let plan = MeasurementPlan {
                warmup: 1,
                repeats,
                min_repeats: 1,
                budget: Some(20.0),
                ..MeasurementPlan::new(device)
            };
            let measured = measure::run(&plan, |lap| {
                let o = causal_attention(&q, &k, &v, None, path, 0.0)
                    .map_err(|error| runtime::Error::Other(Box::new(error)))?;
                lap.end("forward")?;
                let sum = o.f_sum(Kind::Float)?;
                drop(autograd::grad(&[&sum], &[None], &[&q, &k, &v], Keep::default())?);
                lap.end("backward")
            })?;
            let (seconds, bytes) = (measured.time.median(), (measured.memory.peak - before) as f64);
            let mut metrics = vec![
                Metric::of_samples("step_seconds", "s", &measured.time.samples),
                Metric::exact("peak_above_bytes", "B", bytes),
            ];
            // Doubling the length multiplies by 2 to this power.
            if let Some((earlier, fewer)) = previous.replace((seconds, bytes)) {
                metrics.push(Metric::exact("time_exponent", "ratio", (seconds / earlier).log2()));
                metrics.push(Metric::exact("memory_exponent", "ratio", (bytes / fewer).log2()));
            }
            let case = Case::new().with("attention", name).with("length", length);
            sink.put(EXPERIMENT, &case, metrics)?;
            progress.step();
        }
    }
    Ok(())
}
