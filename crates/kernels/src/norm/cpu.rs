//! Normalisations of rows in one pass over memory: the checks that make the passes sound.

use half::{bf16, f16};
use runtime::tensor_memory::{bump_version, memory_range};
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

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

/// The tensors of a forward, all on the CPU and contiguous; `x`, `residual`, `sum` of one dtype and shape, `y` of that shape, the parameters
/// `[columns]` and the statistics `[rows]` of the compute dtype.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Forward<'a> {
    pub(crate) center: bool,
    pub(crate) eps: f64,
    pub(crate) x: &'a Tensor,
    /// The residual that is added to `x`, and the output of the sum.
    pub(crate) residual: Option<(&'a Tensor, &'a Tensor)>,
    pub(crate) weight: Option<&'a Tensor>,
    pub(crate) bias: Option<&'a Tensor>,
    pub(crate) y: &'a Tensor,
    pub(crate) mean: Option<&'a Tensor>,
    pub(crate) rstd: &'a Tensor,
}

/// Writes `y`, the statistics and the sum.
pub(crate) fn forward(norm: Forward) -> Result<()> {
    let (x, y) = (norm.x.kind(), norm.y.kind());
    let shape = Shape::of(norm.x, x, y)?;
    let compute = compute_kind(x);
    let (residual, sum) = norm.residual.unzip();
    let mut memory = Memory::default();
    let pass = forward::Pass {
        rows: shape.rows,
        columns: shape.columns,
        eps: norm.eps,
        x: memory.read("x", Some(norm.x), x, shape.matrix())?,
        residual: memory.read("residual", residual, x, shape.matrix())?,
        sum: memory.write("sum", sum, x, shape.matrix())?,
        weight: memory.read("weight", norm.weight, compute, shape.columns)?,
        bias: memory.read("bias", norm.bias, compute, shape.columns)?,
        y: memory.write("y", Some(norm.y), y, shape.matrix())?,
        mean: memory.write("mean", norm.mean, compute, shape.rows)?,
        rstd: memory.write("rstd", Some(norm.rstd), compute, shape.rows)?,
    };
    memory.check()?;
    if shape.matrix() == 0 {
        return Ok(());
    }
    macro_rules! run {
        ($x:ty, $y:ty) => {
            // SAFETY: `Memory` has checked every size and dtype, and that written memory overlaps nothing else.
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
pub(crate) struct Backward<'a> {
    pub(crate) center: bool,
    /// The dtype of the norm's input.
    pub(crate) kind: Kind,
    /// The saved input, or the saved output if `inverse` is given.
    pub(crate) kept: &'a Tensor,
    pub(crate) upstream: &'a Tensor,
    /// The gradient of the input, and a gradient that is added to it.
    pub(crate) grad: Option<&'a Tensor>,
    pub(crate) added: Option<&'a Tensor>,
    pub(crate) weight: Option<&'a Tensor>,
    pub(crate) bias: Option<&'a Tensor>,
    /// 1/weight, if the output was saved.
    pub(crate) inverse: Option<&'a Tensor>,
    pub(crate) output_kept: bool,
    pub(crate) mean: Option<&'a Tensor>,
    pub(crate) rstd: &'a Tensor,
    /// The gradients of the parameters, in the compute dtype.
    pub(crate) of_weight: Option<&'a Tensor>,
    pub(crate) of_bias: Option<&'a Tensor>,
}

/// Writes the gradients that have an output tensor.
pub(crate) fn backward(norm: Backward) -> Result<()> {
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
    let mut memory = Memory::default();
    let in_place = norm.grad.is_some_and(|grad| grad.data_ptr() == norm.upstream.data_ptr() && x == y);
    let upstream = memory.read("upstream", Some(norm.upstream), y, shape.matrix())?;
    if in_place {
        memory.read.pop();
    }
    let all = parts * shape.columns;
    let pass = backward::Pass {
        rows: shape.rows,
        columns: shape.columns,
        kept: memory.read("kept", Some(norm.kept), kept, shape.matrix())?,
        upstream,
        grad: memory.write("grad", norm.grad, x, shape.matrix())?,
        added: memory.read("added", norm.added, x, shape.matrix())?,
        weight: memory.read("weight", norm.weight, compute, shape.columns)?,
        inverse: memory.read("inverse", norm.inverse, compute, shape.columns)?,
        bias: memory.read("bias", norm.bias, compute, shape.columns)?,
        mean: memory.read("mean", norm.mean, compute, shape.rows)?,
        rstd: memory.read("rstd", Some(norm.rstd), compute, shape.rows)?,
        weight_parts: memory.write("weight parts", weight_parts.as_ref(), compute, all)?,
        bias_parts: memory.write("bias parts", bias_parts.as_ref(), compute, all)?,
    };
    let of_weight = memory.write("weight gradient", norm.of_weight, compute, shape.columns)?;
    let of_bias = memory.write("bias gradient", norm.of_bias, compute, shape.columns)?;
    memory.check()?;
    if shape.matrix() > 0 {
        macro_rules! run {
            ($x:ty, $y:ty) => {
                // SAFETY: `Memory` has checked every size and dtype, and that written memory overlaps nothing else.
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

/// The memory of a pass: written memory overlaps nothing else.
#[derive(Default)]
struct Memory {
    read: Vec<(&'static str, std::ops::Range<usize>)>,
    written: Vec<(&'static str, std::ops::Range<usize>)>,
}

impl Memory {
    fn read(
        &mut self,
        name: &'static str,
        tensor: Option<&Tensor>,
        kind: Kind,
        count: usize,
    ) -> Result<usize> {
        let Some(tensor) = tensor else { return Ok(0) };
        self.read.push((name, memory(name, tensor, kind, count)?));
        Ok(tensor.data_ptr() as usize)
    }

    fn write(
        &mut self,
        name: &'static str,
        tensor: Option<&Tensor>,
        kind: Kind,
        count: usize,
    ) -> Result<usize> {
        let Some(tensor) = tensor else { return Ok(0) };
        self.written.push((name, memory(name, tensor, kind, count)?));
        Ok(tensor.data_ptr() as usize)
    }

    fn check(&self) -> Result<()> {
        for (index, (name, range)) in self.written.iter().enumerate() {
            let others = self.written[..index].iter().chain(&self.read);
            if let Some((other, _)) =
                others.into_iter().find(|(_, o)| o.start < range.end && range.start < o.end)
            {
                let reason = format!("`{name}` overlaps `{other}` in memory; give it memory of its own");
                return Err(Error::invalid(NAME, reason));
            }
        }
        Ok(())
    }
}

fn memory(name: &str, tensor: &Tensor, kind: Kind, count: usize) -> Result<std::ops::Range<usize>> {
    let dense = tensor.device() == Device::Cpu && !tensor.is_sparse() && !tensor.is_neg();
    if dense && tensor.kind() == kind && tensor.numel() == count && tensor.is_contiguous() {
        return memory_range(tensor);
    }
    let found = format!("{:?} {:?} on {:?}", tensor.kind(), tensor.size(), tensor.device());
    let reason = format!("`{name}` is {found}; expected {count} contiguous elements of {kind:?} on the CPU");
    Err(Error::invalid(NAME, reason))
}
