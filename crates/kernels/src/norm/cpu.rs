//! Normalisations of rows in one pass over memory: the checks that make the passes sound.

use half::{bf16, f16};
use runtime::profile::{Flops, is_counting, kernel, record_external};
use runtime::tensor_layout::TensorLayout;
use runtime::tensor_memory::{Dense, bump_version, dense};
use runtime::{Error, Result};
use smallvec::SmallVec;
use tch::{Device, Kind, Tensor};

use super::{Gradients, Inputs, Keep, Norm, NormPass, Normalized, Requested, Saved};
use crate::operands::{Access, Operands};

mod backward;
mod forward;

const NAME: &str = "fused norm";

/// Returns whether the passes support rows of dtype `x` with normalised rows of dtype `y`.
pub(crate) fn takes(x: Kind, y: Kind) -> bool {
    match x {
        Kind::Float | Kind::Double => y == x,
        Kind::BFloat16 | Kind::Half => y == x || y == Kind::Float,
        _ => false,
    }
}

/// Returns the dtype of the computation, the statistics and the parameters.
pub(crate) fn compute_kind(x: Kind) -> Kind {
    if x == Kind::Double { Kind::Double } else { Kind::Float }
}

/// One pass over memory, vectorized for the processor, on libtorch's threads.
pub(super) struct Cpu;

impl NormPass for Cpu {
    fn forward(&self, inputs: &Inputs<'_>) -> Result<Normalized> {
        let &Inputs { norm, x, residual, weight, bias, options, mean } = inputs;
        let layout = TensorLayout::of(x)?;
        let (kind, output) = (layout.kind(), options.output.unwrap_or(layout.kind()));
        let (shape, compute) = (Shape::new(&layout, kind, output)?, compute_kind(kind));
        // Dense inputs, and outputs of their shape.
        let (x, residual) = (dense(x)?, residual.map(dense).transpose()?);
        let (weight, bias) = (parameter(weight, compute)?, parameter(bias, compute)?);
        let empty = |size: &[i64], kind| Tensor::f_empty(size, (kind, Device::Cpu));
        let y = empty(layout.size(), output)?;
        let sum = residual.as_ref().map(|_| empty(layout.size(), kind)).transpose()?;
        let statistics = || empty(&[shape.rows as i64], compute);
        let mean = (mean && norm == Norm::Layer).then(statistics).transpose()?;
        let rstd = statistics()?;
        let scope = kernel("runtime::norm", [&*x]);
        let mut operands = Operands::new(NAME, Device::Cpu);
        let pass = forward::Pass {
            rows: shape.rows,
            columns: shape.columns,
            eps: options.eps,
            x: operands.read("x", &*x, kind, shape.matrix())?,
            residual: operands.read("residual", residual.as_deref(), kind, shape.matrix())?,
            sum: operands.write("sum", sum.as_ref(), kind, shape.matrix())?,
            weight: operands.read("weight", weight.as_deref(), compute, shape.columns)?,
            bias: operands.read("bias", bias.as_deref(), compute, shape.columns)?,
            y: operands.write("y", &y, output, shape.matrix())?,
            mean: operands.write("mean", mean.as_ref(), compute, shape.rows)?,
            rstd: operands.write("rstd", &rstd, compute, shape.rows)?,
        };
        operands.check()?;
        // SAFETY: `Operands` has checked every size and dtype, and that written memory overlaps nothing else.
        unsafe { run_forward(pass, norm, (kind, output)) }?;
        drop(scope);
        record("runtime::norm", &[Some(&x), residual.as_deref(), Some(&y), sum.as_ref()])?;
        Ok(Normalized { y, sum, mean, rstd })
    }

    fn backward(&self, saved: &Saved<'_>, upstream: Tensor, requested: Requested<'_>) -> Result<Gradients> {
        let Requested { norm, added, wanted, .. } = requested;
        let layout = TensorLayout::of(&upstream)?;
        let (kind, output, compute) = (saved.kind, layout.kind(), compute_kind(saved.kind));
        let shape = Shape::new(&layout, kind, output)?;
        // Dense inputs. A saved output is turned into x̂ by the bias and 1/weight.
        let is_output = saved.keep == Keep::Output;
        let is_plain = layout.is_contiguous() && !layout.is_neg();
        let in_place = is_plain && kind == output && layout.is_sole_owner();
        let upstream = if is_plain { upstream } else { dense(&upstream)?.into_tensor() };
        let (kept, added) = (dense(saved.kept)?, added.map(dense).transpose()?);
        let (weight, bias) = (parameter(saved.weight, compute)?, parameter(saved.bias, compute)?);
        let bias = bias.filter(|_| is_output);
        let inverse = weight.as_deref().filter(|_| is_output).map(Tensor::f_reciprocal).transpose()?;
        let mean = saved.mean.filter(|_| !is_output);
        // The gradients: that of x in the upstream gradient's memory if nothing else uses it, those of the parameters as parts.
        let grad = match wanted.x {
            false => None,
            true if in_place => Some(upstream.shallow_clone()),
            true => Some(Tensor::f_empty(layout.size(), (kind, Device::Cpu))?),
        };
        let parts = backward::parts(shape.rows);
        let empty = |wanted: bool, size: &[usize]| {
            let size: SmallVec<[i64; 2]> = size.iter().map(|length| *length as i64).collect();
            wanted.then(|| Tensor::f_empty(&size[..], (compute, Device::Cpu))).transpose()
        };
        let vectors = [empty(wanted.weight, &[shape.columns])?, empty(wanted.bias, &[shape.columns])?];
        let [weight_parts, bias_parts] =
            [empty(wanted.weight, &[parts, shape.columns])?, empty(wanted.bias, &[parts, shape.columns])?];
        let scope = kernel("runtime::norm_backward", [&*kept, &upstream]);
        let mut operands = Operands::new(NAME, Device::Cpu);
        let pass = backward::Pass {
            rows: shape.rows,
            columns: shape.columns,
            kept: operands.read("kept", &*kept, if is_output { output } else { kind }, shape.matrix())?,
            upstream: operands.read("upstream", &upstream, output, shape.matrix())?,
            grad: operands.contiguous(
                Access::Overwrite(&["upstream"]),
                "grad",
                grad.as_ref(),
                kind,
                shape.matrix(),
            )?,
            added: operands.read("added", added.as_deref(), kind, shape.matrix())?,
            weight: operands.read("weight", weight.as_deref(), compute, shape.columns)?,
            inverse: operands.read("inverse", inverse.as_ref(), compute, shape.columns)?,
            bias: operands.read("bias", bias.as_deref(), compute, shape.columns)?,
            mean: operands.read("mean", mean, compute, shape.rows)?,
            rstd: operands.read("rstd", saved.rstd, compute, shape.rows)?,
            weight_parts: operands.write(
                "weight parts",
                weight_parts.as_ref(),
                compute,
                parts * shape.columns,
            )?,
            bias_parts: operands.write("bias parts", bias_parts.as_ref(), compute, parts * shape.columns)?,
        };
        let sums = [
            operands.write("weight gradient", vectors[0].as_ref(), compute, shape.columns)?,
            operands.write("bias gradient", vectors[1].as_ref(), compute, shape.columns)?,
        ];
        operands.check()?;
        // SAFETY: `Operands` has checked every size and dtype, and that written memory overlaps nothing else.
        unsafe { run_backward(pass, norm, is_output, (kind, output), sums) }?;
        drop(scope);
        grad.iter().filter(|_| in_place).try_for_each(bump_version)?;
        record("runtime::norm_backward", &[Some(&kept), Some(&upstream), added.as_deref(), grad.as_ref()])?;
        let [weight, bias] = vectors;
        Ok(Gradients { x: grad, weight, bias })
    }
}

/// # Safety
/// As [`forward::run`], for rows of dtype `x` and normalized rows of dtype `y`.
unsafe fn run_forward(pass: forward::Pass, norm: Norm, (x, y): (Kind, Kind)) -> Result<()> {
    if pass.rows * pass.columns == 0 {
        return Ok(());
    }
    macro_rules! run {
        ($x:ty, $y:ty) => {
            // SAFETY: by this function's contract.
            unsafe {
                match norm {
                    Norm::Layer => forward::run::<$x, $y, true>(pass),
                    Norm::Rms => forward::run::<$x, $y, false>(pass),
                }
            }
        };
    }
    match (x, y) {
        (Kind::Double, _) => run!(f64, f64),
        (Kind::BFloat16, Kind::BFloat16) => run!(bf16, bf16),
        (Kind::BFloat16, _) => run!(bf16, f32),
        (Kind::Half, Kind::Half) => run!(f16, f16),
        (Kind::Half, _) => run!(f16, f32),
        _ => run!(f32, f32),
    }
}

/// Runs the pass, and adds up the parts of the parameters' gradients in `sums`.
///
/// # Safety
/// As [`backward::run`] and [`backward::combine`], for an input of dtype `x` and an upstream gradient of dtype `y`.
unsafe fn run_backward(
    pass: backward::Pass,
    norm: Norm,
    is_output: bool,
    (x, y): (Kind, Kind),
    sums: [usize; 2],
) -> Result<()> {
    macro_rules! run {
        ($x:ty, $y:ty) => {
            // SAFETY: by this function's contract.
            unsafe {
                match (norm, is_output) {
                    (Norm::Layer, true) => backward::run::<$y, $y, $x, true, true>(pass),
                    (Norm::Layer, false) => backward::run::<$x, $y, $x, true, false>(pass),
                    (Norm::Rms, true) => backward::run::<$y, $y, $x, false, true>(pass),
                    (Norm::Rms, false) => backward::run::<$x, $y, $x, false, false>(pass),
                }
            }
        };
    }
    if pass.rows * pass.columns > 0 {
        match (x, y) {
            (Kind::Double, _) => run!(f64, f64),
            (Kind::BFloat16, Kind::BFloat16) => run!(bf16, bf16),
            (Kind::BFloat16, _) => run!(bf16, f32),
            (Kind::Half, Kind::Half) => run!(f16, f16),
            (Kind::Half, _) => run!(f16, f32),
            _ => run!(f32, f32),
        }?;
    }
    let parts = backward::parts(pass.rows);
    for (addends, sum) in
        [pass.weight_parts, pass.bias_parts].into_iter().zip(sums).filter(|(_, sum)| *sum != 0)
    {
        // SAFETY: as above; without rows there are no parts.
        unsafe {
            match compute_kind(x) {
                Kind::Double => backward::combine::<f64>(parts, pass.columns, addends, sum),
                _ => backward::combine::<f32>(parts, pass.columns, addends, sum),
            }
        }
    }
    Ok(())
}

/// Converts a parameter for the passes.
fn parameter(parameter: Option<&Tensor>, kind: Kind) -> Result<Option<Dense<'_>>> {
    let converted = |parameter| {
        if Tensor::kind(parameter) == kind {
            return dense(parameter);
        }
        Ok(Dense::Copy(dense(&parameter.f_detach()?.f_to_kind(kind)?)?.into_tensor()))
    };
    parameter.map(converted).transpose()
}

/// Returns the elements of a vector; waits for a device other than the CPU.
pub(super) fn values(vector: &Tensor) -> Result<Vec<f64>> {
    let layout = TensorLayout::of(vector)?;
    let plain = layout.device() == Device::Cpu && layout.is_contiguous() && !layout.is_neg();
    let (at, count) = (layout.range()?.start, layout.numel());
    if !plain || count == 0 {
        return Ok(Vec::<f64>::try_from(vector.f_detach()?.f_to_kind(Kind::Double)?.f_reshape([-1])?)?);
    }
    macro_rules! widened {
        ($element:ty) => {{
            // SAFETY: a contiguous CPU tensor of this dtype, which the caller keeps and nothing writes meanwhile.
            let elements = unsafe { std::slice::from_raw_parts(at as *const $element, count) };
            elements.iter().map(|element| f64::from(*element)).collect()
        }};
    }
    Ok(match layout.kind() {
        Kind::Float => widened!(f32),
        Kind::Double => widened!(f64),
        Kind::BFloat16 => widened!(bf16),
        Kind::Half => widened!(f16),
        _ => Vec::<f64>::try_from(vector.f_detach()?.f_to_kind(Kind::Double)?.f_reshape([-1])?)?,
    })
}

/// Reports a pass over these matrices to running counters. Elementwise work counts no FLOPs.
fn record(name: &str, matrices: &[Option<&Tensor>]) -> Result<()> {
    if !is_counting() {
        return Ok(());
    }
    let bytes = |matrix: &Tensor| matrix.numel() * matrix.kind().elt_size_in_bytes();
    record_external(name, Flops::default(), matrices.iter().flatten().map(|m| bytes(m) as u64).sum())
}

/// A matrix of rows, whatever the dimensions before the last.
#[derive(Clone, Copy)]
struct Shape {
    rows: usize,
    columns: usize,
}

impl Shape {
    fn new(tensor: &TensorLayout, x: Kind, y: Kind) -> Result<Self> {
        if !takes(x, y) {
            let reason = format!("from {x:?} to {y:?}; expected one dtype, or Float from BFloat16 or Half");
            return Err(Error::invalid(NAME, reason));
        }
        let size = tensor.size();
        let columns = size.last().copied().unwrap_or(0);
        if columns < 1 {
            let reason = format!("{size:?} has no rows to normalize; expected […, width] of width from 1 on");
            return Err(Error::invalid(NAME, reason));
        }
        let columns = columns as usize;
        Ok(Self { rows: tensor.numel() / columns, columns })
    }

    fn matrix(self) -> usize {
        self.rows * self.columns
    }
}
