//! A step of Adam or AdamW on the CPU, in one pass over memory.
//!
//! With the gradient g (`φ·g` where a factor φ is given), the parameter p, the moments m and v, and t steps done with this
//! one (Kingma & Ba, arXiv:1412.6980; decoupled decay λ: Loshchilov & Hutter, arXiv:1711.05101):
//!
//! - decoupled: p ← (1 − lr·λ)·p, else g ← g + λ·p
//! - m ← m + (1 − β₁)·(g − m) and v ← β₂·v + (1 − β₂)·g²
//! - p ← p − lr/(1 − β₁ᵗ) · m / (√v/√(1 − β₂ᵗ) + ε)
//!
//! All of one shape; p, m and v in fp32. In mixed precision g is in bf16 or fp16, p is the master copy, and the weight that
//! the model computes with is p rounded once, in the same pass. Bytes moved per parameter: 28 in fp32 (g, p, m, v in; p, m,
//! v out), 28 with a bf16 gradient and weight (2 + 12 in, 12 + 2 out). libtorch's fused kernel refuses mixed dtypes: to
//! cast, to step and to cast again moves 40, and holds the gradient in fp32.
//!
//! On a processor with AVX2 the result is libtorch's `_fused_adamw_` or `_fused_adam_` to the bit, the casts around it
//! included (but for which NaN a NaN is). Elsewhere libtorch's kernel rounds in other places, by an ulp.

use tch::Tensor;

use crate::error::{Error, Result};
use crate::profile::{Flops, record_external};
use crate::sys::adam as sys;

/// What a step needs besides the tensors; the defaults are those of PyTorch's AdamW, of the first step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamStep {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment, in [0, 1).
    pub beta1: f64,
    /// Decay of the second moment, in [0, 1).
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// λ.
    pub weight_decay: f64,
    /// AdamW: the parameter shrinks by `lr · weight_decay`. Else Adam: `weight_decay · parameter` is added to the gradient.
    pub decoupled: bool,
    /// Which step this is, from 1.
    pub step: u64,
    /// Multiplied into the gradient, for clipping, as an in-place product with a number would be: the factor is rounded to
    /// the gradient's dtype, and so is the product. The gradient itself is not written.
    pub gradient_factor: Option<f64>,
}

impl Default for AdamStep {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 1e-2,
            decoupled: true,
            step: 1,
            gradient_factor: None,
        }
    }
}

/// The tensors of a step: of one shape, contiguous, on the CPU, apart from each other in memory. They may be views of flat
/// buffers.
#[derive(Clone, Copy, Debug)]
pub struct AdamTensors<'a> {
    /// The gradient, in fp32, bf16 or fp16; read.
    pub gradient: &'a Tensor,
    /// The parameter, in fp32; updated.
    pub master: &'a Tensor,
    /// The first moment, in fp32; updated.
    pub exp_avg: &'a Tensor,
    /// The second moment, in fp32; updated.
    pub exp_avg_sq: &'a Tensor,
    /// The parameter in bf16 or fp16, rounded to nearest, ties to even; written.
    pub weight: Option<&'a Tensor>,
}

/// One step, in place and without a graph, on any thread; libtorch's threads share the work. Versions of what is written go
/// up, so that a graph that kept one of them for backward says so.
///
/// ```
/// use runtime::fused::adam::{AdamStep, AdamTensors, adam};
/// use tch::{Device, Kind, Tensor};
///
/// let gradient = Tensor::full([3], 0.5, (Kind::BFloat16, Device::Cpu));
/// let master = Tensor::ones([3], (Kind::Float, Device::Cpu));
/// let (exp_avg, exp_avg_sq) = (master.zeros_like(), master.zeros_like());
/// let weight = master.to_kind(Kind::BFloat16);
/// let tensors = AdamTensors {
///     gradient: &gradient,
///     master: &master,
///     exp_avg: &exp_avg,
///     exp_avg_sq: &exp_avg_sq,
///     weight: Some(&weight),
/// };
/// adam(&tensors, &AdamStep { lr: 0.25, weight_decay: 0.0, ..AdamStep::default() })?;
/// // The first step is the learning rate long, whatever the gradient.
/// assert_eq!(weight.double_value(&[0]), 0.75);
/// # Ok::<(), runtime::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] for another device, shape, dtype or layout, for tensors that overlap, for step 0, and for decays
/// outside [0, 1).
pub fn adam(tensors: &AdamTensors<'_>, step: &AdamStep) -> Result<()> {
    if step.step == 0 {
        return Err(Error::invalid(
            sys::NAME,
            "step 0; the first step is 1, as it corrects the bias by 1 − βᵗ",
        ));
    }
    for (name, beta) in [("beta1", step.beta1), ("beta2", step.beta2)] {
        if !(0.0..1.0).contains(&beta) {
            return Err(Error::invalid(sys::NAME, format!("{name} is {beta}; expected one in [0, 1)")));
        }
    }
    sys::step(tensors, step)?;
    record_external("runtime::adam", Flops::default(), bytes_moved(tensors))
}

/// Bytes that a step reads and writes at least.
pub fn bytes_moved(tensors: &AdamTensors<'_>) -> u64 {
    let of = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
    of(tensors.gradient) + 6 * of(tensors.master) + tensors.weight.map_or(0, of)
}
