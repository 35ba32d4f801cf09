//! The table of shapes, and the measurement of one of them.

use std::fmt;
use std::str::FromStr;

use anyhow::Result;
use fused_ce::{Chunk, Reduction};
use runtime::measure::{self, Measurement, MeasurementPlan, Work};
use runtime::memory::live_bytes;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use super::baselines::Implementation;
use crate::dtype;

/// Sizes of one forward and backward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Shape {
    /// Tokens.
    pub tokens: i64,
    /// Width.
    pub hidden: i64,
    /// Number of classes.
    pub vocabulary: i64,
    /// Dtype of the hidden states and the weight.
    pub kind: Kind,
    /// Share of the tokens that are ignored, in [0, 1).
    pub ignored: f64,
}

const fn shape(tokens: i64, hidden: i64, vocabulary: i64) -> Shape {
    Shape { tokens, hidden, vocabulary, kind: Kind::Float, ignored: 0.0 }
}

/// A glance.
pub(crate) const SMOKE: &[Shape] = &[shape(128, 64, 4000), shape(256, 64, 4000), shape(128, 64, 8000)];

/// Two lengths and another vocabulary.
pub(crate) const LAPTOP: &[Shape] =
    &[shape(512, 256, 32_000), shape(2048, 256, 32_000), shape(512, 256, 128_256)];

/// Sequences and vocabularies that two cores get through in two minutes.
pub(crate) const FULL: &[Shape] = &[
    shape(512, 256, 32_000),
    shape(1024, 256, 32_000),
    shape(2048, 256, 32_000),
    shape(4096, 256, 32_000),
    shape(1024, 256, 8_000),
    shape(1024, 256, 128_256),
];

/// A length, and eight times as many tokens.
pub(crate) const LONG: &[Shape] = &[shape(1024, 256, 32_000), shape(8192, 256, 32_000)];

/// A small [`LONG`].
pub(crate) const LONG_SMOKE: &[Shape] = &[shape(128, 64, 4000), shape(1024, 64, 4000)];

/// The sizes of GPUs: Qwen2.5-0.5B's head, and Llama-3-8B's, whose sequence is the assignment's.
pub(crate) const PAPER: &[Shape] = &[
    shape(2048, 896, 151_936),
    shape(8192, 896, 151_936),
    Shape { kind: Kind::BFloat16, ..shape(4096, 4096, 128_256) },
    Shape { kind: Kind::BFloat16, ..shape(8192, 4096, 128_256) },
    Shape { kind: Kind::BFloat16, ..shape(16_384, 4096, 128_256) },
    Shape { kind: Kind::BFloat16, ..shape(32_768, 4096, 128_256) },
    Shape { kind: Kind::BFloat16, ..shape(8192, 4096, 32_000) },
    Shape { kind: Kind::BFloat16, ..shape(8192, 4096, 256_000) },
];

impl Shape {
    /// Tokens that have a label.
    pub(crate) fn labelled(&self) -> i64 {
        self.tokens - (self.tokens as f64 * self.ignored).round() as i64
    }

    /// FLOPs of the three products over the labelled tokens.
    pub(crate) fn flops(&self) -> f64 {
        6.0 * self.labelled() as f64 * self.hidden as f64 * self.vocabulary as f64
    }

    /// Bytes of the largest tensors: the naive implementation's logits, log-probabilities and their two gradients in fp32, the weight and
    /// its gradient.
    pub(crate) fn naive_bytes(&self) -> u64 {
        let element = self.kind.elt_size_in_bytes() as i64;
        (self.vocabulary * (self.tokens * (12 + element) + 2 * self.hidden * element)).unsigned_abs()
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "N{} H{} V{}", self.tokens, self.hidden, self.vocabulary)
    }
}

impl FromStr for Shape {
    type Err = String;

    /// `TOKENS,HIDDEN,VOCABULARY`, then `,fp32|bf16|fp16`, then `,SHARE` of tokens that are ignored.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let help = || {
            format!(
                "`{text}`; expected TOKENS,HIDDEN,VOCABULARY[,fp32|bf16|fp16[,SHARE IGNORED]], for example 2048,896,151936,fp32,0.5"
            )
        };
        let parts: Vec<&str> = text.split(',').map(str::trim).collect();
        let size = |index: usize| -> std::result::Result<i64, String> {
            let size = parts.get(index).and_then(|part| part.parse().ok());
            size.filter(|size| *size > 0).ok_or_else(help)
        };
        let kind = parts.get(3).map_or(Ok(Kind::Float), |name| dtype::parse(name)).map_err(|_| help())?;
        let ignored: f64 = match parts.get(4) {
            None => 0.0,
            Some(share) => share.parse().ok().filter(|share| (0.0..1.0).contains(share)).ok_or_else(help)?,
        };
        if parts.len() > 5 {
            return Err(help());
        }
        Ok(Self { tokens: size(0)?, hidden: size(1)?, vocabulary: size(2)?, kind, ignored })
    }
}

/// The tensors of one shape, like a trained model's: hidden states of variance 1, a weight of σ = 0.02.
#[derive(Debug)]
pub(crate) struct Tensors {
    /// `[tokens, hidden]`, with a gradient.
    pub hidden: Tensor,
    /// `[vocabulary, hidden]`, with a gradient.
    pub weight: Tensor,
    /// `[tokens]`.
    pub targets: Tensor,
}

impl Tensors {
    /// Drawn from `seed`.
    ///
    /// # Errors
    /// Too little memory, a device that is not there.
    pub(crate) fn new(shape: &Shape, seed: u64, device: Device) -> Result<Self> {
        let mut generator = Generator::new(seed)?;
        let options = (Kind::Float, device);
        runtime::random::seed(seed)?;
        // A billion numbers of one generator of the CPU would keep a GPU waiting for half a minute.
        let mut normal = |size: [i64; 2]| match device {
            Device::Cuda(_) => Ok(Tensor::f_randn(size, options)?),
            _ => generator.normal(&size, options),
        };
        let hidden = normal([shape.tokens, shape.hidden])?;
        let weight = normal([shape.vocabulary, shape.hidden])?.f_mul_scalar_(0.02)?;
        let drawn = generator.uniform(&[shape.tokens], (0.0, 1.0), (Kind::Double, device))?;
        let targets = drawn.f_mul_scalar(shape.vocabulary as f64)?.f_to_kind(Kind::Int64)?;
        // Prompts are ignored at the beginning of a sequence; where does not matter here.
        let _ = targets.f_narrow(0, 0, shape.tokens - shape.labelled())?.f_fill_(-100)?;
        let leaf = |tensor: Tensor| tensor.f_to_kind(shape.kind)?.f_set_requires_grad(true);
        Ok(Self { hidden: leaf(hidden)?, weight: leaf(weight)?, targets })
    }
}

/// The result of a shape.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Seconds of `forward`, `backward` and both, per repeat.
    pub time: Measurement,
    /// The most bytes that were live beyond the inputs and their gradients.
    pub peak_above_bytes: u64,
}

/// Measures one forward and backward of a mean loss, on the device of `plan`, as often as it plans.
///
/// # Errors
/// Too little memory, a device that is not there, an option outside its range.
pub(crate) fn measure(
    shape: &Shape,
    implementation: Implementation,
    chunk: Option<Chunk>,
    seed: u64,
    plan: &MeasurementPlan,
) -> Result<Outcome> {
    let tensors = Tensors::new(shape, seed, plan.device)?;
    let Tensors { hidden, weight, targets } = &tensors;
    let before = live_bytes(plan.device)?;
    let gradients = (hidden.numel() + weight.numel()) * shape.kind.elt_size_in_bytes();
    let plan = MeasurementPlan { work: Some(Work::flops(shape.flops())), ..plan.clone() };
    let time = measure::run(&plan, |timer| {
        let operands = [hidden, weight, targets];
        let loss = implementation.loss(operands, Some(shape.labelled()), Reduction::Mean, chunk);
        let loss = loss?;
        timer.end("forward")?;
        runtime::autograd::backward(&[&loss])?;
        timer.end("backward")?;
        runtime::autograd::set_grad(hidden, None)?;
        runtime::autograd::set_grad(weight, None)
    })?;
    let peak_above_bytes = time.memory.peak.saturating_sub(before + gradients as u64);
    Ok(Outcome { time, peak_above_bytes })
}

/// The device's rate for a product of this shape's width in FLOP/s.
///
/// # Errors
/// Same as [`measure()`].
pub(crate) fn product_rate(shape: &Shape, device: Device) -> Result<f64> {
    let kind = if device == Device::Cpu { Kind::Float } else { shape.kind };
    let size = [shape.tokens.min(2048), shape.vocabulary.min(16_384), shape.hidden];
    let [m, n, k] = size;
    Ok(kernels::physical::gemm_rate(device, kind, m, n, k)?.rate().unwrap_or(0.0))
}
