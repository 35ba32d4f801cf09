//! A step of Adam or AdamW in one pass over memory: of one tensor on the CPU, of many tensors on CUDA.
//!
//! With the gradient g (`φ·g` if a factor φ is given), the parameter p, the moments m and v, and step number t (Kingma & Ba,
//! arXiv:1412.6980; decoupled decay λ: Loshchilov & Hutter, arXiv:1711.05101):
//!
//! - decoupled: p ← (1 − lr·λ)·p, else g ← g + λ·p
//! - m ← m + (1 − β₁)·(g − m) and v ← β₂·v + (1 − β₂)·g²
//! - p ← p − lr/(1 − β₁ᵗ) · m / (√v/√(1 − β₂ᵗ) + ε)
//!
//! All have one shape; p, m and v are fp32. In mixed precision g is bf16 or fp16, p is the master copy, and the same pass writes
//! the model's weight, which is p rounded once. Bytes moved per parameter: 28 in fp32 (g, p, m, v in; p, m, v out), 28 with a bf16
//! gradient and weight (2 + 12 in, 12 + 2 out). libtorch's fused kernel refuses mixed dtypes: casting, stepping and casting again
//! moves 40, and keeps the gradient in fp32.
//!
//! On a processor with AVX2 the result equals that of libtorch's `_fused_adamw_` or `_fused_adam_` bit for bit,
//! including the casts around it (except for the payload of a NaN). On other processors, and on CUDA, libtorch's
//! kernels round differently, by an ulp.

mod cpu;
pub(crate) mod cuda;

use std::borrow::Borrow;

use runtime::ops::foreach;
use runtime::ops::optimizer::AdamW;
use runtime::profile::{Flops, kernel, record_external};
use runtime::{Error, Result};
use tch::Tensor;

/// The hyperparameters of a step. The defaults are PyTorch's for AdamW, for the first step.
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
    /// λ, the weight decay.
    pub weight_decay: f64,
    /// AdamW: the parameter shrinks by `lr · weight_decay`. Else Adam: `weight_decay · parameter` is added to the gradient.
    pub decoupled: bool,
    /// The step number, from 1.
    pub step: u64,
    /// Factor of the gradient, for clipping, with the rounding of an in-place product: the factor is rounded to the gradient's
    /// dtype, and so is the product. The gradient itself is not written.
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

/// The tensors of a step: of one shape, contiguous, on one device, without overlap. They may be views of flat buffers.
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

/// Runs one step on the CPU, in place and without a graph, on any thread, in parallel on libtorch's threads. It increments the
/// version counters of the tensors that it writes, so that autograd detects the change of a saved tensor.
///
/// ```
/// use kernels::adam::{AdamStep, AdamTensors, adam};
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
            cpu::NAME,
            "step 0; the first step is 1, as it corrects the bias by 1 − βᵗ",
        ));
    }
    for (name, beta) in [("beta1", step.beta1), ("beta2", step.beta2)] {
        if !(0.0..1.0).contains(&beta) {
            return Err(Error::invalid(cpu::NAME, format!("{name} is {beta}; expected one in [0, 1)")));
        }
    }
    let _scope = kernel("runtime::adam", []);
    cpu::step(tensors, step)?;
    record_external("runtime::adam", Flops::default(), bytes_moved(tensors))
}

/// Steps many tensors on CUDA in one kernel (a launch for each 60 tensors), in place and without a graph; AdamW if `decoupled`,
/// else Adam. Returns false, with nothing changed, if the kernel cannot run: on other devices, without NVRTC, below compute
/// capability 8.0, and for [`AdamW::maximize`].
///
/// `steps` has each tensor's number of completed steps, an fp32 scalar on the device, and is incremented. If `skip`, an fp32 scalar
/// on the device, is 1, nothing changes. If `rate`, an fp64 scalar on the device, is given, it is the learning rate instead of
/// [`AdamW::lr`]. The host reads none of them. It increments the version counters of the tensors that it writes.
///
/// # Errors
/// [`Error::Invalid`] for lists of different lengths, and for tensors that [`adam`] refuses.
pub fn adam_many(
    tensors: &[AdamTensors<'_>],
    steps: &[impl Borrow<Tensor>],
    options: AdamW,
    decoupled: bool,
    rate: Option<&Tensor>,
    skip: Option<&Tensor>,
) -> Result<bool> {
    if tensors.len() != steps.len() {
        let reason =
            format!("{} tensors and {} numbers of steps; expected one for each", tensors.len(), steps.len());
        return Err(Error::invalid(cpu::NAME, reason));
    }
    let steps: &[&Tensor] = &steps.iter().map(Borrow::borrow).collect::<Vec<_>>();
    let _no_grad = tch::no_grad_guard();
    // The bias is corrected by 1 − βᵗ with this step in t.
    foreach::add_scalar_(steps, 1.0)?;
    let done = cuda::adam(tensors, steps, &options, decoupled, rate, skip);
    match (&done, skip) {
        (Ok(true), Some(skip)) => {
            let skip = skip.f_reshape([] as [i64; 0])?;
            foreach::sub_(steps, &vec![&skip; steps.len()])?;
        }
        (Ok(true), None) => {}
        _ => foreach::add_scalar_(steps, -1.0)?,
    }
    if matches!(done, Ok(true)) {
        let bytes = tensors.iter().map(bytes_moved).sum();
        record_external("runtime::adam", Flops::default(), bytes)?;
    }
    done
}

/// Returns the least bytes that a step reads and writes.
pub fn bytes_moved(tensors: &AdamTensors<'_>) -> u64 {
    let bytes = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
    bytes(tensors.gradient) + 6 * bytes(tensors.master) + tensors.weight.map_or(0, bytes)
}
