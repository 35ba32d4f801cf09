//! `fused-ce attention`: time and memory of attention over the length of the sequence.

use anyhow::Context;
use kernels::physical;
use models::attention::{AttentionPath, causal_attention};
use report::{Case, Metric};
use runtime::autograd::{self, Keep};
use runtime::measure::{self, MeasurementPlan};
use runtime::memory::live_bytes;
use tch::{Kind, Tensor};

use crate::driver::Bench;

/// Heads of queries and of keys, and the size of each: those of Qwen2.5-0.5B.
const HEADS: [i64; 2] = [14, 2];
const HEAD: i64 = 64;

/// An implementation, by name.
type Attend = fn(&Tensor, &Tensor, &Tensor) -> runtime::Result<Tensor>;

const PATHS: [(&str, Attend); 3] = [("explicit scores", explicit), (LIBTORCH, libtorch), ("fused", fused)];
const LIBTORCH: &str = "fused, libtorch";

fn explicit(q: &Tensor, k: &Tensor, v: &Tensor) -> runtime::Result<Tensor> {
    causal_attention(q, k, v, None, AttentionPath::Explicit, 0.0)
}

fn fused(q: &Tensor, k: &Tensor, v: &Tensor) -> runtime::Result<Tensor> {
    causal_attention(q, k, v, None, AttentionPath::Fused, 0.0)
}

fn libtorch(q: &Tensor, k: &Tensor, v: &Tensor) -> runtime::Result<Tensor> {
    let [q, k, v] = [q.f_transpose(1, 2)?, k.f_transpose(1, 2)?, v.f_transpose(1, 2)?];
    let o = Tensor::f_scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.0, true, None, true)?;
    Ok(o.f_transpose(1, 2)?)
}

/// Measures forward and backward of one attention over the lengths: with scores, with libtorch's fused kernel and with this project's.
pub(crate) fn run(bench: &mut Bench) -> anyhow::Result<()> {
    let device = bench.device;
    runtime::memory::track_cpu()?;
    let (lengths, repeats): (&[i64], usize) = bench.sized([
        (&[64, 128], 1),
        (&[128, 256, 512, 1024, 2048], 3),
        (&[128, 256, 512, 1024, 2048, 4096, 8192], 5),
        (&[512, 1024, 2048, 4096, 8192, 16_384], 5),
    ]);
    let mut previous = [None::<(f64, f64)>; PATHS.len()];
    let rate =
        physical::gemm_rate(device, Kind::Float, 2048, 2048, 2048)?.rate().context("a product has a rate")?;
    let mut libtorch = f64::NAN;
    let cases = lengths.iter().flat_map(|&length| (0..PATHS.len()).map(move |path| (length, path)));
    let label = |&(length, path): &(i64, usize)| format!("{}, {length} tokens", PATHS[path].0);
    bench.each(cases, label, |bench, (length, path)| {
        let (name, attend) = PATHS[path];
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
        if name == LIBTORCH {
            libtorch = seconds;
        } else if path > 0 {
            metrics.push(Metric::exact("time_vs_libtorch", "ratio", seconds / libtorch));
        }
        // Doubling the length multiplies by 2 to this power.
        if let Some((earlier, fewer)) = previous[path].replace((seconds, bytes)) {
            metrics.push(Metric::exact("time_exponent", "ratio", (seconds / earlier).log2()));
            metrics.push(Metric::exact("memory_exponent", "ratio", (bytes / fewer).log2()));
        }
        let case = Case::new().with("attention", name).with("length", length);
        bench.put(&case, metrics)
    })
}
