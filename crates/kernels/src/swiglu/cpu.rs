//! SwiGLU's elementwise part in one pass over memory, vectorized by the compiler for the chosen instructions.
//!
//! A block of every input is read before a block of any output is written, so that an output may be an input's memory.

use std::marker::PhantomData;

use half::{bf16, f16};
use pulp::{Simd, WithSimd};
use runtime::Result;
use runtime::parallel;
use runtime::profile::kernel;
use runtime::tensor_memory::bump_version;
use tch::{Kind, Tensor};

use super::tensors::{Backward, BackwardRows, Forward, ForwardRows};
use super::{Gradients, SwigluPass, record};
use crate::operands::Rows;
use crate::simd::{self, Element, Real, blocks, load, store};

/// Returns whether the passes support this dtype.
pub(super) fn takes(kind: Kind) -> bool {
    matches!(kind, Kind::Float | Kind::Double | Kind::BFloat16 | Kind::Half)
}

/// One pass over memory, vectorized for the processor, on libtorch's threads.
pub(super) struct Cpu;

impl SwigluPass for Cpu {
    fn forward(&self, tensors: &Forward<'_>) -> Result<()> {
        let _scope = kernel("runtime::swiglu", [tensors.gate, tensors.up]);
        forward(tensors)?;
        record("runtime::swiglu", tensors.product, tensors.tensors().count())
    }

    fn backward(&self, gate: Tensor, up: Tensor, silu: Option<&Tensor>, grad: Tensor) -> Result<Gradients> {
        let _scope = kernel("runtime::swiglu_backward", [&gate, &up, &grad]);
        let outputs = [Some(&gate), Some(&up), Some(&grad)];
        let [gate_grad, up_grad, product] = outputs;
        let tensors = Backward { gate: &gate, up: &up, silu, grad: &grad, gate_grad, up_grad, product };
        backward(&tensors)?;
        record("runtime::swiglu_backward", &grad, tensors.tensors().count())?;
        Ok(Gradients { gate, up, product: grad })
    }
}

/// See [`super::forward`].
pub(super) fn forward(tensors: &Forward<'_>) -> Result<()> {
    // SAFETY: `rows` has checked that all are matrices of one shape and dtype, and that each output is an input itself or overlaps no
    // other matrix; the CPU's tensors alone come here.
    unsafe { run(tensors.product.kind(), tensors.rows()?) }?;
    tensors.silu.into_iter().chain([tensors.product]).try_for_each(bump_version)
}

/// See [`super::backward`].
pub(super) fn backward(tensors: &Backward<'_>) -> Result<()> {
    // SAFETY: as in `forward`.
    unsafe { run(tensors.grad.kind(), tensors.rows()?) }?;
    tensors.outputs().try_for_each(bump_version)
}

/// # Safety
/// As [`run_typed`], with elements of this dtype, one of those that [`takes`] names.
pub(super) unsafe fn run(kind: Kind, pass: impl Pass) -> Result<()> {
    // SAFETY: by this function's contract.
    unsafe {
        match kind {
            Kind::Double => run_typed::<f64>(pass),
            Kind::BFloat16 => run_typed::<bf16>(pass),
            Kind::Half => run_typed::<f16>(pass),
            _ => run_typed::<f32>(pass),
        }
    }
}

/// Elements computed at once: four AVX-512 registers of fp32.
const BLOCK: usize = 64;
/// Elements of one task: 128 KiB of each fp32 operand, which stays in the core's cache.
const TASK: usize = 32 * 1024;

/// An elementwise computation over matrices of one shape.
pub(super) trait Pass: Copy + Send + Sync {
    fn matrices(&self) -> impl Iterator<Item = Rows>;

    /// # Safety
    /// `N` elements from `column` on lie in row `row` of every matrix, whose elements are `T`s, and no other code uses them meanwhile.
    unsafe fn block<T: Element, const N: usize>(&self, row: usize, column: usize);
}

/// `silu = SiLU(gate)` if requested, `product = SiLU(gate)·up`.
impl Pass for ForwardRows {
    fn matrices(&self) -> impl Iterator<Item = Rows> {
        [self.gate, self.up, self.product].into_iter().chain(self.silu)
    }

    /// # Safety
    /// As [`Pass::block`].
    #[inline(always)]
    unsafe fn block<T: Element, const N: usize>(&self, row: usize, column: usize) {
        // SAFETY: by this function's contract.
        unsafe {
            let mut g = load::<T, N>(at(self.gate, row, column));
            let mut u = load::<T, N>(at(self.up, row, column));
            for i in 0..N {
                g[i] = g[i] * g[i].sigmoid().0;
                u[i] = g[i] * u[i];
            }
            if let Some(silu) = self.silu {
                store::<T, N>(at(silu, row, column), &g);
            }
            store::<T, N>(at(self.product, row, column), &u);
        }
    }
}

/// From the gradient `d` of the product, with σ = sigmoid(gate) and s = SiLU(gate), the requested ones of
/// gate_grad = d·up·σ·(1 + gate·(1 − σ)), up_grad = d·s and product = s·up.
impl Pass for BackwardRows {
    fn matrices(&self) -> impl Iterator<Item = Rows> {
        let optional = [self.silu, self.gate_grad, self.up_grad, self.product];
        [self.gate, self.up, self.grad].into_iter().chain(optional.into_iter().flatten())
    }

    /// # Safety
    /// As [`Pass::block`].
    #[inline(always)]
    unsafe fn block<T: Element, const N: usize>(&self, row: usize, column: usize) {
        // SAFETY: by this function's contract.
        unsafe {
            let mut g = load::<T, N>(at(self.gate, row, column));
            let mut u = load::<T, N>(at(self.up, row, column));
            let mut d = load::<T, N>(at(self.grad, row, column));
            let mut s = [T::Compute::ZERO; N];
            let mut slope = [T::Compute::ZERO; N];
            for i in 0..N {
                let (sigmoid, rest) = g[i].sigmoid();
                s[i] = g[i] * sigmoid;
                slope[i] = sigmoid * (T::Compute::ONE + g[i] * rest);
            }
            if let Some(silu) = self.silu {
                s = load::<T, N>(at(silu, row, column));
            }
            for i in 0..N {
                g[i] = d[i] * u[i] * slope[i];
                u[i] = s[i] * u[i];
                d[i] = d[i] * s[i];
            }
            if let Some(gate_grad) = self.gate_grad {
                store::<T, N>(at(gate_grad, row, column), &g);
            }
            if let Some(up_grad) = self.up_grad {
                store::<T, N>(at(up_grad, row, column), &d);
            }
            if let Some(product) = self.product {
                store::<T, N>(at(product, row, column), &u);
            }
        }
    }
}

#[inline(always)]
pub(super) fn at<T>(matrix: Rows, row: usize, column: usize) -> *mut T {
    (matrix.pointer as *mut T).wrapping_add(row * matrix.row_stride + column)
}

/// Runs a pass over all elements, in parallel when there are enough of them.
///
/// # Safety
/// The matrices have one shape and elements of type `T`, and only the caller uses them during the call; each output is one
/// input's memory, element for element, or overlaps no other matrix.
unsafe fn run_typed<T: Element>(pass: impl Pass) -> Result<()> {
    let Some(Rows { rows, columns, .. }) = pass.matrices().next() else { return Ok(()) };
    let dense = pass.matrices().all(|m| m.row_stride == m.columns || m.rows == 1);
    let (rows, columns) = if dense { (1, rows * columns) } else { (rows, columns) };
    let pieces = columns.div_ceil(TASK);
    let run = |index: usize| {
        let (row, from) = (index / pieces, index % pieces * TASK);
        let to = columns.min(from + TASK);
        simd::arch().dispatch(Piece { pass, row, from, to, element: PhantomData::<T> });
    };
    let total = rows * pieces;
    // A task has so many pieces that the cost of its start is small.
    let least = if rows * columns > 2 * TASK { (TASK / columns.clamp(1, TASK)).max(1) } else { total.max(1) };
    parallel::for_each(total.div_ceil(least), |task| {
        (task * least..total.min((task + 1) * least)).for_each(run)
    })
}

/// The part of a row of one task. A type and not a closure, so that it is inlined into the code for each set of instructions.
struct Piece<P, T> {
    pass: P,
    row: usize,
    from: usize,
    to: usize,
    element: PhantomData<T>,
}

impl<P: Pass, T: Element> WithSimd for Piece<P, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { pass, row, from, to, .. } = self;
        blocks!(BLOCK, from, to, |column, N| {
            // SAFETY: by the contract of `run_typed`, which gives each piece to one task.
            unsafe { pass.block::<T, N>(row, column) };
        });
    }
}
