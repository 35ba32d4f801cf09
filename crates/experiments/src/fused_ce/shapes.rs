//! Shapes of an output projection with its cross-entropy (N tokens, H hidden, V vocabulary), and the time and memory of one implementation at
//! a shape.

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

/// The sizes of an output projection with its cross-entropy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Shape {
    /// Tokens.
    pub tokens: i64,
    /// Hidden size.
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

/// Shapes of a smoke run, which takes seconds.
pub(crate) const SMOKE: &[Shape] = &[shape(128, 64, 4000), shape(256, 64, 4000), shape(128, 64, 8000)];

/// Shapes of a laptop run: two numbers of tokens, and a larger vocabulary.
pub(crate) const LAPTOP: &[Shape] =
    &[shape(512, 256, 32_000), shape(2048, 256, 32_000), shape(512, 256, 128_256)];

/// Shapes of a full run: four numbers of tokens and three vocabularies, measured in two minutes on two cores.
pub(crate) const FULL: &[Shape] = &[
    shape(512, 256, 32_000),
    shape(1024, 256, 32_000),
    shape(2048, 256, 32_000),
    shape(4096, 256, 32_000),
    shape(1024, 256, 8_000),
    shape(1024, 256, 128_256),
];

/// Shapes that show the growth with tokens: the second has eight times as many.
pub(crate) const LONG: &[Shape] = &[shape(1024, 256, 32_000), shape(8192, 256, 32_000)];

/// [`LONG`] for a smoke run.
pub(crate) const LONG_SMOKE: &[Shape] = &[shape(128, 64, 4000), shape(1024, 64, 4000)];

/// Shapes for GPUs: the heads of Qwen2.5-0.5B and of Llama-3-8B at the assignment's lengths, and the latter with other vocabularies.
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
    /// Returns the number of tokens with a label.
    pub(crate) fn labelled(&self) -> i64 {
        self.tokens - (self.tokens as f64 * self.ignored).round() as i64
    }

    /// Returns the FLOPs of the three products over the labelled tokens.
    pub(crate) fn flops(&self) -> f64 {
        6.0 * self.labelled() as f64 * self.hidden as f64 * self.vocabulary as f64
    }

    /// Returns the bytes of the naive implementation's largest tensors: the logits in the operands' dtype, three tensors of their shape in
    /// fp32, the weight and its gradient.
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

    /// Parses `TOKENS,HIDDEN,VOCABULARY`, optionally followed by `,fp32|bf16|fp16` and then by `,SHARE` of ignored tokens.
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
    /// Draws the tensors from `seed`, which also seeds libtorch's generators.
    ///
    /// # Errors
    /// Too little memory, a device that does not exist.
    pub(crate) fn new(shape: &Shape, seed: u64, device: Device) -> Result<Self> {
        let mut generator = Generator::new(seed)?;
        let options = (Kind::Float, device);
        runtime::random::seed(seed)?;
        // A GPU draws its own numbers: the CPU's generator takes half a minute for a billion.
        let mut normal = |size: [i64; 2]| match device {
            Device::Cuda(_) => Ok(Tensor::f_randn(size, options)?),
            _ => generator.normal(&size, options),
        };
        let hidden = normal([shape.tokens, shape.hidden])?;
        let weight = normal([shape.vocabulary, shape.hidden])?.f_mul_scalar_(0.02)?;
        let drawn = generator.uniform(&[shape.tokens], (0.0, 1.0), (Kind::Double, device))?;
        let targets = drawn.f_mul_scalar(shape.vocabulary as f64)?.f_to_kind(Kind::Int64)?;
        // The ignored tokens come first, like a prompt's. Their positions do not affect the time.
        let _ = targets.f_narrow(0, 0, shape.tokens - shape.labelled())?.f_fill_(-100)?;
        let leaf = |tensor: Tensor| tensor.f_to_kind(shape.kind)?.f_set_requires_grad(true);
        Ok(Self { hidden: leaf(hidden)?, weight: leaf(weight)?, targets })
    }
}

/// The measurements at one shape.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Seconds of `forward`, `backward` and both, per repeat.
    pub time: Measurement,
    /// The peak of live bytes, without the inputs and their gradients.
    pub peak_above_bytes: u64,
}

/// Measures one forward and backward of a mean loss over `tensors`, on their device, which is that of `plan`.
///
/// # Errors
/// Too little memory, an option outside its range.
pub(crate) fn measure(
    shape: &Shape,
    tensors: &Tensors,
    implementation: Implementation,
    chunk: Option<Chunk>,
    plan: &MeasurementPlan,
) -> Result<Outcome> {
    let Tensors { hidden, weight, targets } = tensors;
    let input_bytes = live_bytes(plan.device)?;
    let gradients = (hidden.numel() + weight.numel()) * shape.kind.elt_size_in_bytes();
    let plan = MeasurementPlan { work: Some(Work::flops(shape.flops())), ..plan.clone() };
    let time = measure::run(&plan, |timer| {
        let operands = [hidden, weight, targets];
        let loss = implementation.loss(operands, Some(shape.labelled()), Reduction::Mean, chunk)?;
        timer.end("forward")?;
        runtime::autograd::backward(&[&loss])?;
        timer.end("backward")?;
        runtime::autograd::set_grad(hidden, None)?;
        runtime::autograd::set_grad(weight, None)
    })?;
    // Every implementation has the inputs and, at the end, their gradients: they would hide its own memory.
    let peak_above_bytes = time.memory.peak.saturating_sub(input_bytes + gradients as u64);
    Ok(Outcome { time, peak_above_bytes })
}

/// Measures the FLOP/s of a matrix product of this shape, with at most 2048 tokens and 16,384 classes; on a CPU in fp32. Returns 0 without a
/// rate.
///
/// # Errors
/// Too little memory, a device that does not exist.
pub(crate) fn product_rate(shape: &Shape, device: Device) -> Result<f64> {
    let kind = if device == Device::Cpu { Kind::Float } else { shape.kind };
    let size = [shape.tokens.min(2048), shape.vocabulary.min(16_384), shape.hidden];
    let [m, n, k] = size;
    Ok(kernels::physical::gemm_rate(device, kind, m, n, k)?.rate().unwrap_or(0.0))
}
