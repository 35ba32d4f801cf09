//! Layer norm and RMS norm, with one pass over memory for forward and one for backward.
//!
//! For a row x of width n, with optional weight w and bias b:
//!
//! - layer norm (Ba, Kiros & Hinton, arXiv:1607.06450): μ = mean(x), r = 1/√(mean((x − μ)²) + eps), x̂ = (x − μ)·r
//! - RMS norm (Zhang & Sennrich, arXiv:1910.07467): r = 1/√(mean(x²) + eps), x̂ = x·r
//! - y = x̂·w + b
//!
//! With an upstream gradient d of y, and g = d·w:
//!
//! - ∂L/∂x = r·(g − mean(g) − x̂·mean(g·x̂)), without mean(g) for the RMS norm
//! - ∂L/∂w = Σ d·x̂ and ∂L/∂b = Σ d, over rows
//!
//! # What is saved
//!
//! One number r per row, and a matrix ([`Keep`]): the input x (with μ, for the layer norm), or the output y, from which backward
//! recovers x̂ = (y − b)/w. A norm is usually followed by a product, which saves y in any case; then the input is freed, and the
//! norm saves 4 bytes per row. This is Apex's `memory_efficient`. The weight must allow it: x̂ has the rounding error of y,
//! multiplied by 1 + |b|/|w·x̂|, and with a weight of 0, x̂ is lost. Apex divides by a weight that is clamped away from 0, which
//! silently gives a wrong gradient there; here forward checks the weights, and saves the input if one of them does not allow
//! recovery ([`recoverable`]).
//!
//! # How it computes
//!
//! Statistics are fp32 (f64 for f64). The variance is computed from deviations from the mean, never from squares of x, with
//! compensation for the mean's own rounding error, so that a mean of 10⁴ with a variance of 1 is exact. bf16 and fp16 are read
//! directly, and the output may be fp32 ([`Options::output`]): in mixed precision a norm needs no fp32 copy of its input. The order
//! of sums over rows depends on their number alone: the same bits in every run, with any number of threads.
//!
//! Forward reads x and writes y: 8 bytes per element in fp32. Backward reads the saved matrix and the upstream gradient, and writes
//! ∂L/∂x into the upstream gradient's memory if nothing else uses it: 12 bytes per element and no allocation.
//!
//! # On CUDA
//!
//! A kernel forward and one backward (and one that adds up the parameters' gradients), for fp32, bf16 and fp16; libtorch's fused
//! operators for f64, for rows of more than 32 768 numbers and without NVRTC. The input is always saved: checking the weights would
//! wait for the device.
//!
//! # How it differs from PyTorch's
//!
//! `layer_norm` has one kernel on a CPU, which keeps the input; `rms_norm` is composed of five operators there, which keep the
//! input and the normalized input. PyTorch's can be differentiated twice; these return an error for a second derivative.
//!
//! ```
//! use kernels::norm::{self, Keep, Options};
//! use tch::{Kind, Tensor, kind};
//!
//! let x = Tensor::from_slice(&[3.0f32, -4.0]).view([1, 2]).set_requires_grad(true);
//! let options = Options { keep: Keep::Output, ..Options::default() };
//! let y = norm::rms_norm(&x, None, options)?;
//! // √((9 + 16)/2) = 3.5355…
//! assert!((y.double_value(&[0, 0]) - 3.0 / 12.5f64.sqrt()).abs() < 1e-6);
//! # Ok::<(), runtime::Error>(())
//! ```

mod cpu;
pub(crate) mod cuda;
mod function;
mod reference;

use crate::processor::computes_on;
use function::FusedNorm;
use runtime::autograd::{self, GradMode};
use runtime::tensor_layout::TensorLayout;
use runtime::{Error, Result};
use smallvec::SmallVec;
use tch::{Device, Kind, Tensor};

const NAME: &str = "fused norm";

/// The matrix that is saved for backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keep {
    /// The input (with a residual, the sum), and for the layer norm the means.
    #[default]
    Input,
    /// The output if the weight allows it ([`recoverable`]), else the input. On the CPU only.
    Output,
}

/// Options of a norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Added to the variance, or to the mean square.
    pub eps: f64,
    /// The matrix that is saved for backward.
    pub keep: Keep,
    /// The dtype of the output: the input's (`None`), or [`Kind::Float`] from bf16 or fp16.
    pub output: Option<Kind>,
}

impl Default for Options {
    /// Returns eps 10⁻⁵, saving the input, and the input's dtype for the output.
    fn default() -> Self {
        Self { eps: 1e-5, keep: Keep::Input, output: None }
    }
}

/// The kind of norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// Layer norm.
    Layer,
    /// RMS norm.
    Rms,
}

/// Computes the layer norm of the last dimension. x `[…, width]`; weight and bias `[width]`, of any floating-point dtype, are
/// converted to fp32 (f64 for an f64 input).
///
/// # Errors
/// Shapes, dtypes or devices that do not fit; errors of libtorch.
pub fn layer_norm(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    options: Options,
) -> Result<Tensor> {
    let [y] = apply(&Inputs { norm: Norm::Layer, x, residual: None, weight, bias, options, mean: false })?;
    Ok(y)
}

/// Computes the RMS norm of the last dimension. See [`layer_norm`].
///
/// # Errors
/// As [`layer_norm`].
pub fn rms_norm(x: &Tensor, weight: Option<&Tensor>, options: Options) -> Result<Tensor> {
    let inputs = Inputs { norm: Norm::Rms, x, residual: None, weight, bias: None, options, mean: false };
    let [y] = apply(&inputs)?;
    Ok(y)
}

/// Returns `(y, s)` with s = x + residual and y = norm(s), in one pass; backward adds the gradient of s in the same pass.
/// `residual` has the shape, dtype and device of x.
///
/// # Errors
/// As [`layer_norm`].
pub fn add_norm(
    norm: Norm,
    x: &Tensor,
    residual: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    options: Options,
) -> Result<(Tensor, Tensor)> {
    let inputs = Inputs { norm, x, residual: Some(residual), weight, bias, options, mean: false };
    let [y, sum] = apply(&inputs)?;
    Ok((y, sum))
}

fn apply<const OUTPUTS: usize>(inputs: &Inputs<'_>) -> Result<[Tensor; OUTPUTS]> {
    let dtypes = check(inputs)?;
    let tensors: SmallVec<[&Tensor; 4]> = inputs.tensors().into_iter().flatten().collect();
    autograd::apply(FusedNorm::new(inputs, dtypes), &tensors)
}

/// The device and the dtypes of checked inputs.
#[derive(Clone, Copy)]
struct Dtypes {
    device: Device,
    x: Kind,
    /// Of weight and bias; x's without one.
    parameters: [Kind; 2],
}

fn check(&Inputs { x, residual, weight, bias, options, .. }: &Inputs<'_>) -> Result<Dtypes> {
    let invalid = |reason: String| Err(Error::invalid(NAME, reason));
    let x = TensorLayout::of(x)?;
    let (size, kind, device) = (x.size(), x.kind(), x.device());
    let mut parameters = [kind; 2];
    let Some(&width) = size.last().filter(|width| **width > 0) else {
        return invalid(format!("x is {size:?}; expected […, width] of width from 1 on"));
    };
    let output = options.output.unwrap_or(kind);
    if !cpu::takes(kind, output) {
        return invalid(format!(
            "from {kind:?} to {output:?}; expected Float, Double, BFloat16 or Half to itself, or BFloat16 or Half to Float"
        ));
    }
    if !(options.eps >= 0.0 && options.eps.is_finite()) {
        return invalid(format!("eps is {}; expected a finite number from 0 on", options.eps));
    }
    if let Some(residual) = residual.map(TensorLayout::of).transpose()?
        && (residual.size() != size || residual.kind() != kind || residual.device() != device)
    {
        let actual = format!("{:?} {:?} on {:?}", residual.kind(), residual.size(), residual.device());
        return invalid(format!("residual is {actual}; expected x's {kind:?} {size:?} on {device:?}"));
    }
    for ((name, vector), kind) in [("weight", weight), ("bias", bias)].into_iter().zip(&mut parameters) {
        let Some(vector) = vector.map(TensorLayout::of).transpose()? else { continue };
        if vector.size() != [width] || vector.device() != device || !vector.is_floating_point() {
            let actual = format!("{:?} {:?} on {:?}", vector.kind(), vector.size(), vector.device());
            return invalid(format!("{name} is {actual}; expected floating-point [{width}] on {device:?}"));
        }
        *kind = vector.kind();
    }
    Ok(Dtypes { device, x: kind, parameters })
}

/// Returns whether x̂ = (y − bias)/weight can be recovered from a y of dtype `output` with at most nine times its rounding
/// error: every |bias| ≤ 8·|weight|, and no weight so small (2⁻⁶ for fp16, 2⁻⁶⁰ for others) that products with it leave the
/// dtype's normal range. Always true without weight and bias.
///
/// Reads the weights, which waits for a device other than the CPU.
///
/// # Errors
/// Errors of libtorch.
pub fn recoverable(weight: Option<&Tensor>, bias: Option<&Tensor>, output: Kind) -> Result<bool> {
    const MOST: f64 = 8.0;
    let smallest = 2f64.powi(if output == Kind::Half { -6 } else { -60 });
    Ok(match (weight.map(cpu::values).transpose()?, bias.map(cpu::values).transpose()?) {
        (None, None) => true,
        (Some(weight), None) => weight.iter().all(|w| w.abs() >= smallest),
        (None, Some(bias)) => bias.iter().all(|b| b.abs() <= MOST),
        (Some(weight), Some(bias)) => {
            weight.iter().zip(&bias).all(|(w, b)| w.abs() >= smallest && b.abs() <= MOST * w.abs())
        }
    })
}

/// The results of [`forward`].
#[derive(Debug)]
pub struct Normalized {
    /// The output, in x's shape and the output dtype.
    pub y: Tensor,
    /// x + residual in x's dtype, if a residual was given.
    pub sum: Option<Tensor>,
    /// μ of each row, `[rows]` in fp32 (f64 for f64), if requested.
    pub mean: Option<Tensor>,
    /// r of each row, `[rows]` in the same dtype.
    pub rstd: Tensor,
}

/// Runs the forward pass without a graph, on CPU tensors; `mean` requests the means (of the layer norm).
///
/// # Errors
/// As [`layer_norm`]; a tensor on another device; one that requires a gradient while gradients are recorded.
pub fn forward(
    norm: Norm,
    x: &Tensor,
    residual: Option<&Tensor>,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    options: Options,
    mean: bool,
) -> Result<Normalized> {
    let inputs = Inputs { norm, x, residual, weight, bias, options, mean };
    check(&inputs)?;
    not_recorded(&inputs.tensors())?;
    cpu::Cpu.forward(&inputs)
}

/// The saved tensors for [`backward`].
#[derive(Debug)]
pub struct Saved<'a> {
    /// The norm's input (with a residual, the sum), or its output, by [`keep`](Self::keep).
    pub kept: &'a Tensor,
    /// Which of the two was saved.
    pub keep: Keep,
    /// The dtype of the input.
    pub kind: Kind,
    /// The means; not needed with [`Keep::Output`].
    pub mean: Option<&'a Tensor>,
    /// 1/σ of each row.
    pub rstd: &'a Tensor,
    /// The weight.
    pub weight: Option<&'a Tensor>,
    /// The bias; needed with [`Keep::Output`] only.
    pub bias: Option<&'a Tensor>,
}

/// Which gradients to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Of the input.
    pub x: bool,
    /// Of the weight.
    pub weight: bool,
    /// Of the bias.
    pub bias: bool,
}

/// The requested gradients of [`backward`]: of the input in its dtype, of the parameters in fp32 (f64 for f64).
#[derive(Debug)]
pub struct Gradients {
    /// Of the input, of the upstream gradient's shape.
    pub x: Option<Tensor>,
    /// `[width]`.
    pub weight: Option<Tensor>,
    /// `[width]`.
    pub bias: Option<Tensor>,
}

/// Runs the backward pass without a graph, on CPU tensors. `upstream` is consumed: if nothing else uses its memory, it becomes the input's
/// gradient. `added`, of the input's shape and dtype, is added to the input's gradient.
///
/// # Errors
/// Shapes, dtypes or devices that do not fit; errors of libtorch.
pub fn backward(
    norm: Norm,
    saved: &Saved,
    upstream: Tensor,
    added: Option<&Tensor>,
    wanted: Wanted,
) -> Result<Gradients> {
    not_recorded(&[Some(&upstream), added, Some(saved.kept), saved.weight, saved.bias])?;
    let compute = cpu::compute_kind(saved.kind);
    cpu::Cpu.backward(saved, upstream, Requested { norm, added, wanted, kinds: [compute; 2] })
}

/// The inputs of a forward pass, checked.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    norm: Norm,
    x: &'a Tensor,
    residual: Option<&'a Tensor>,
    weight: Option<&'a Tensor>,
    bias: Option<&'a Tensor>,
    options: Options,
    /// Whether the means of a layer norm are needed.
    mean: bool,
}

impl<'a> Inputs<'a> {
    fn tensors(&self) -> [Option<&'a Tensor>; 4] {
        [Some(self.x), self.residual, self.weight, self.bias]
    }
}

/// The gradients that a backward pass computes from the upstream gradient.
#[derive(Clone, Copy)]
struct Requested<'a> {
    norm: Norm,
    /// A gradient that is added to the input's.
    added: Option<&'a Tensor>,
    wanted: Wanted,
    /// The dtypes of weight and bias, whose gradients may have them.
    kinds: [Kind; 2],
}

/// The passes on one kind of device.
trait NormPass {
    /// See [`forward`].
    fn forward(&self, inputs: &Inputs<'_>) -> Result<Normalized>;

    /// See [`backward`].
    fn backward(&self, saved: &Saved<'_>, upstream: Tensor, requested: Requested<'_>) -> Result<Gradients>;
}

/// Returns the fastest passes for tensors on `device`.
fn pass_for(device: Device) -> &'static dyn NormPass {
    if computes_on(device) { &cpu::Cpu } else { &cuda::Cuda }
}

fn not_recorded(tensors: &[Option<&Tensor>]) -> Result<()> {
    if tensors.iter().flatten().any(|tensor| tensor.requires_grad()) && GradMode::enabled() {
        let reason =
            "a tensor requires a gradient, which is not recorded here; use `layer_norm` or `rms_norm`";
        return Err(Error::invalid(NAME, reason));
    }
    Ok(())
}
