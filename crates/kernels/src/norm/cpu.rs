//! Normalisations of rows in one pass over memory: the checks that make the passes sound.

use half::{bf16, f16};
use runtime::profile::{Flops, kernel, record_external};
use runtime::tensor_memory::{bump_version, dense, is_sole_owner};
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

use super::{Gradients, Inputs, Keep, Norm, NormPass, Normalized, Requested, Saved};
use crate::operands::{Access, Operands};

mod backward;
mod forward;

const NAME: &str = "fused norm";

/// Whether the passes support rows of dtype `x` with normalised rows of dtype `y`.
pub(crate) fn takes(x: Kind, y: Kind) -> bool {
    match x {
        Kind::Float | Kind::Double => y == x,
        Kind::BFloat16 | Kind::Half => y == x || y == Kind::Float,
        _ => false,
    }
}

/// The dtype of the computation, the statistics and the parameters.
pub(crate) fn compute_kind(x: Kind) -> Kind {
    if x == Kind::Double { Kind::Double } else { Kind::Float }
}

/// One pass over memory, vectorized for the processor, on libtorch's threads.
pub(super) struct Cpu;

impl NormPass for Cpu {
    fn forward(&self, inputs: &Inputs<'_>) -> Result<Normalized> {
        let &Inputs { norm, x, residual, weight, bias, options, mean } = inputs;
        let (size, kind) = (x.size(), x.kind());
        let compute = compute_kind(kind);
        let (x, residual) = (dense(x)?, residual.map(dense).transpose()?);
        let (weight, bias) = (parameter(weight, compute)?, parameter(bias, compute)?);
        let rows = x.numel() as i64 / size.last().copied().unwrap_or(1);
        let empty = |size: &[i64], kind| Tensor::f_empty(size, (kind, Device::Cpu));
        let y = empty(&size, options.output.unwrap_or(kind))?;
        let sum = residual.as_ref().map(|_| empty(&size, kind)).transpose()?;
        let mean = (mean && norm == Norm::Layer).then(|| empty(&[rows], compute)).transpose()?;
        let rstd = empty(&[rows], compute)?;
        let scope = kernel("runtime::norm", [&x]);
        forward(Forward {
            center: norm == Norm::Layer,
            eps: options.eps,
            x: &x,
            residual: residual.as_ref().zip(sum.as_ref()),
            weight: weight.as_ref(),
            bias: bias.as_ref(),
            y: &y,
            mean: mean.as_ref(),
            rstd: &rstd,
        })?;
        drop(scope);
        record("runtime::norm", &[Some(&x), residual.as_ref(), Some(&y), sum.as_ref()])?;
        Ok(Normalized { y, sum, mean, rstd })
    }

    fn backward(
        &self,
        norm: Norm,
        saved: &Saved<'_>,
        upstream: Tensor,
        requested: Requested<'_>,
    ) -> Result<Gradients> {
        let Requested { added, wanted, .. } = requested;
        let (size, compute) = (upstream.size(), compute_kind(saved.kind));
        let upstream =
            if upstream.is_contiguous() && !upstream.is_neg() { upstream } else { dense(&upstream)? };
        let added = added.map(dense).transpose()?;
        let kept = dense(saved.kept)?;
        let output_kept = saved.keep == Keep::Output;
        let (weight, bias) = (parameter(saved.weight, compute)?, parameter(saved.bias, compute)?);
        let inverse = weight.as_ref().filter(|_| output_kept).map(Tensor::f_reciprocal).transpose()?;
        let in_place = saved.kind == upstream.kind() && is_sole_owner(&upstream)?;
        let grad = match wanted.x {
            false => None,
            true if in_place => Some(None),
            true => Some(Some(Tensor::f_empty(&size, (saved.kind, Device::Cpu))?)),
        };
        let width = [size.last().copied().unwrap_or(0)];
        let vector =
            |wanted: bool| wanted.then(|| Tensor::f_empty(width, (compute, Device::Cpu))).transpose();
        let (of_weight, of_bias) = (vector(wanted.weight)?, vector(wanted.bias)?);
        let scope = kernel("runtime::norm_backward", [&kept, &upstream]);
        backward(Backward {
            center: norm == Norm::Layer,
            kind: saved.kind,
            kept: &kept,
            upstream: &upstream,
            grad: grad.as_ref().map(|grad| grad.as_ref().unwrap_or(&upstream)),
            added: added.as_ref(),
            weight: weight.as_ref(),
            bias: bias.as_ref().filter(|_| output_kept),
            inverse: inverse.as_ref(),
            output_kept,
            mean: saved.mean.filter(|_| !output_kept),
            rstd: saved.rstd,
            of_weight: of_weight.as_ref(),
            of_bias: of_bias.as_ref(),
        })?;
        drop(scope);
        let written = grad.as_ref().map(|grad| grad.as_ref().unwrap_or(&upstream));
        record("runtime::norm_backward", &[Some(&kept), Some(&upstream), added.as_ref(), written])?;
        let x = grad.map(|grad| grad.unwrap_or(upstream));
        Ok(Gradients { x, weight: of_weight, bias: of_bias })
    }
}

/// Converts a parameter for the passes.
fn parameter(parameter: Option<&Tensor>, kind: Kind) -> Result<Option<Tensor>> {
    parameter.map(|p| dense(&p.f_detach()?.f_to_kind(kind)?)).transpose()
}

/// Reports a pass over these matrices to running counters. Elementwise work counts no FLOPs.
fn record(name: &str, matrices: &[Option<&Tensor>]) -> Result<()> {
    let bytes = |matrix: &Tensor| matrix.numel() * matrix.kind().elt_size_in_bytes();
    record_external(name, Flops::default(), matrices.iter().flatten().map(|m| bytes(m) as u64).sum())
}

/// The tensors of a forward, all on the CPU and contiguous; `x`, `residual`, `sum` of one dtype and shape, `y` of that shape, the parameters
/// `[columns]` and the statistics `[rows]` of the compute dtype.
#[derive(Clone, Copy, Debug)]
struct Forward<'a> {
    center: bool,
    eps: f64,
    x: &'a Tensor,
    /// The residual that is added to `x`, and the output of the sum.
    residual: Option<(&'a Tensor, &'a Tensor)>,
    weight: Option<&'a Tensor>,
    bias: Option<&'a Tensor>,
    y: &'a Tensor,
    mean: Option<&'a Tensor>,
    rstd: &'a Tensor,
}

/// Writes `y`, the statistics and the sum.
fn forward(norm: Forward) -> Result<()> {
    let (x, y) = (norm.x.kind(), norm.y.kind());
    let shape = Shape::of(norm.x, x, y)?;
    let compute = compute_kind(x);
    let (residual, sum) = norm.residual.unzip();
    let mut operands = Operands::new(NAME, Device::Cpu);
    let pass = forward::Pass {
        rows: shape.rows,
        columns: shape.columns,
        eps: norm.eps,
        x: operands.read("x", norm.x, x, shape.matrix())?,
        residual: operands.read("residual", residual, x, shape.matrix())?,
        sum: operands.write("sum", sum, x, shape.matrix())?,
        weight: operands.read("weight", norm.weight, compute, shape.columns)?,
        bias: operands.read("bias", norm.bias, compute, shape.columns)?,
        y: operands.write("y", norm.y, y, shape.matrix())?,
        mean: operands.write("mean", norm.mean, compute, shape.rows)?,
        rstd: operands.write("rstd", norm.rstd, compute, shape.rows)?,
    };
    operands.check()?;
    if shape.matrix() == 0 {
        return Ok(());
    }
    macro_rules! run {
        ($x:ty, $y:ty) => {
            // SAFETY: `Operands` has checked every size and dtype, and that written memory overlaps nothing else.
            unsafe {
                if norm.center {
                    forward::run::<$x, $y, true>(pass)
                } else {
                    forward::run::<$x, $y, false>(pass)
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
    }?;
    [sum, Some(norm.y), norm.mean, Some(norm.rstd)].into_iter().flatten().try_for_each(bump_version)
}

/// The tensors of a backward, all on the CPU and contiguous. `grad` may be `upstream` itself.
#[derive(Clone, Copy, Debug)]
struct Backward<'a> {
    center: bool,
    /// The dtype of the norm's input.
    kind: Kind,
    /// The saved input, or the saved output if `inverse` is given.
    kept: &'a Tensor,
    upstream: &'a Tensor,
    /// The gradient of the input, and a gradient that is added to it.
    grad: Option<&'a Tensor>,
    added: Option<&'a Tensor>,
    weight: Option<&'a Tensor>,
    bias: Option<&'a Tensor>,
    /// 1/weight, if the output was saved.
    inverse: Option<&'a Tensor>,
    output_kept: bool,
    mean: Option<&'a Tensor>,
    rstd: &'a Tensor,
    /// The gradients of the parameters, in the compute dtype.
    of_weight: Option<&'a Tensor>,
    of_bias: Option<&'a Tensor>,
}

/// Writes the gradients that have an output tensor.
fn backward(norm: Backward) -> Result<()> {
    let (x, y) = (norm.kind, norm.upstream.kind());
    let shape = Shape::of(norm.upstream, x, y)?;
    let compute = compute_kind(x);
    let kept = if norm.output_kept { y } else { x };
    let parts = backward::parts(shape.rows);
    let sums = |wanted: Option<&Tensor>| {
        wanted
            .map(|_| Tensor::f_empty([parts as i64, shape.columns as i64], (compute, Device::Cpu)))
            .transpose()
    };
    let (weight_parts, bias_parts) = (sums(norm.of_weight)?, sums(norm.of_bias)?);
    let mut operands = Operands::new(NAME, Device::Cpu);
    let all = parts * shape.columns;
    let pass = backward::Pass {
        rows: shape.rows,
        columns: shape.columns,
        kept: operands.read("kept", norm.kept, kept, shape.matrix())?,
        upstream: operands.read("upstream", norm.upstream, y, shape.matrix())?,
        grad: operands.contiguous(Access::Overwrite(&["upstream"]), "grad", norm.grad, x, shape.matrix())?,
        added: operands.read("added", norm.added, x, shape.matrix())?,
        weight: operands.read("weight", norm.weight, compute, shape.columns)?,
        inverse: operands.read("inverse", norm.inverse, compute, shape.columns)?,
        bias: operands.read("bias", norm.bias, compute, shape.columns)?,
        mean: operands.read("mean", norm.mean, compute, shape.rows)?,
        rstd: operands.read("rstd", norm.rstd, compute, shape.rows)?,
        weight_parts: operands.write("weight parts", weight_parts.as_ref(), compute, all)?,
        bias_parts: operands.write("bias parts", bias_parts.as_ref(), compute, all)?,
    };
    let of_weight = operands.write("weight gradient", norm.of_weight, compute, shape.columns)?;
    let of_bias = operands.write("bias gradient", norm.of_bias, compute, shape.columns)?;
    operands.check()?;
    if shape.matrix() > 0 {
        macro_rules! run {
            ($x:ty, $y:ty) => {
                // SAFETY: `Operands` has checked every size and dtype, and that written memory overlaps nothing else.
                unsafe {
                    match (norm.center, norm.output_kept) {
                        (true, true) => backward::run::<$y, $y, $x, true, true>(pass),
                        (true, false) => backward::run::<$x, $y, $x, true, false>(pass),
                        (false, true) => backward::run::<$y, $y, $x, false, true>(pass),
                        (false, false) => backward::run::<$x, $y, $x, false, false>(pass),
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
        }?;
    }
    for (addends, sum) in [(pass.weight_parts, of_weight), (pass.bias_parts, of_bias)] {
        if sum != 0 {
            // SAFETY: as above; without rows there are no parts.
            unsafe {
                match compute {
                    Kind::Double => backward::combine::<f64>(parts, shape.columns, addends, sum),
                    _ => backward::combine::<f32>(parts, shape.columns, addends, sum),
                }
            }
        }
    }
    [norm.grad, norm.of_weight, norm.of_bias].into_iter().flatten().try_for_each(bump_version)
}

/// A matrix of rows, whatever the dimensions before the last.
#[derive(Clone, Copy)]
struct Shape {
    rows: usize,
    columns: usize,
}

impl Shape {
    fn of(tensor: &Tensor, x: Kind, y: Kind) -> Result<Self> {
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
