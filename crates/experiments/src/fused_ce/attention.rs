//! `fused-ce attention`: time and memory of attention over the length of the sequence.

use anyhow::Context;
use kernels::physical;
use models::attention::{AttentionPath, causal_attention};
use report::cli::{CommonArgs, Scale};
use report::{Case, Metric, Progress, Sink};
use runtime::autograd::{self, Keep};
use runtime::measure::{self, MeasurementPlan};
use runtime::memory::live_bytes;
use tch::{Kind, Tensor};

const EXPERIMENT: &str = "attention-length";

/// Heads of queries and of keys, and the size of each: those of Qwen2.5-0.5B.
const HEADS: [i64; 2] = [14, 2];
const HEAD: i64 = 64;

/// An implementation, by name.
type Attend = fn(&Tensor, &Tensor, &Tensor) -> runtime::Result<Tensor>;

const PATHS: [(&str, Attend); 3] = [("explicit scores", explicit), (LIBTORCH, libtorch), ("fused", fused)];
const LIBTORCH: &str = "fused, libtorch";

fn explicit(q: &Tensor, k: &Tensor, v: &Tensor) -> runtime::Result<Tensor> {
    let o = causal_attention(q, k, v, None, AttentionPath::Explicit, 0.0);
    o.map_err(|error| runtime::Error::Other(Box::new(error)))
}

fn fused(q: &Tensor, k: &Tensor, v: &Tensor) -> runtime::Result<Tensor> {
    let o = causal_attention(q, k, v, None, AttentionPath::Fused, 0.0);
    o.map_err(|error| runtime::Error::Other(Box::new(error)))
}

fn libtorch(q: &Tensor, k: &Tensor, v: &Tensor) -> runtime::Result<Tensor> {
    let [q, k, v] = [q.f_transpose(1, 2)?, k.f_transpose(1, 2)?, v.f_transpose(1, 2)?];
    let o = Tensor::f_scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.0, true, None, true)?;
    Ok(o.f_transpose(1, 2)?)
}

#[derive(clap::Args)]
pub(crate) struct Attention {
    /// Up to which length
    #[arg(long, value_enum, default_value_t)]
    scale: Scale,
}

/// Measures forward and backward of one attention over the lengths: with scores, with libtorch's fused kernel and with this project's.
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
    let mut progress = Progress::new((lengths.len() * PATHS.len()) as u64);
    let mut previous = [None::<(f64, f64)>; PATHS.len()];
    let rate =
        physical::gemm_rate(device, Kind::Float, 2048, 2048, 2048)?.rate().context("a product has a rate")?;
    for &length in lengths {
        let mut of_libtorch = None;
        for ((name, attend), previous) in PATHS.into_iter().zip(&mut previous) {
            progress.message(&format!("{name}, {length} tokens"));
            let random = |heads: i64| -> anyhow::Result<Tensor> {
                let shape = [1, length, heads, HEAD];
                Ok(Tensor::f_randn(shape, (Kind::Float, device))?.f_set_requires_grad(true)?)
            };
            let (q, k, v) = (random(HEADS[0])?, random(HEADS[1])?, random(HEADS[1])?);
            let before = live_bytes(device)?;
            let plan = MeasurementPlan {
                warmup: 1,
                repeats,
                min_repeats: 1,
                budget: Some(20.0),
                ..MeasurementPlan::new(device)
            };
            let measured = measure::run(&plan, |lap| {
                let o = attend(&q, &k, &v)?;
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
            // Two products forward and five backward, of the pairs that a causal mask keeps.
            let flops = (7 * HEADS[0] * HEAD * length * (length + 1)) as f64;
            metrics.push(Metric::exact("product_share", "ratio", flops / seconds / rate));
            match name {
                LIBTORCH => of_libtorch = Some(seconds),
                _ => metrics.extend(
                    of_libtorch.map(|theirs| Metric::exact("time_vs_libtorch", "ratio", seconds / theirs)),
                ),
            }
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
