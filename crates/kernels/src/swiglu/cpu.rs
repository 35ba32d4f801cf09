//! SwiGLU's elementwise part in one pass over memory: the checks that make the passes sound.
//!
//! The passes over one part of the elements, vectorized by the compiler for the chosen instructions.
//!
//! A block of every input is read before a block of any output is written, so that an output may be an input's memory.

use std::marker::PhantomData;

use half::{bf16, f16};
use pulp::{Simd, WithSimd};
use runtime::parallel;
use runtime::tensor_memory::bump_version;
use runtime::{Error, Result};
use tch::{Kind, Tensor};

use crate::operands::{Rows, apart, rows, same};
use crate::simd::{self, Element, Real, blocks, load, store};

pub(crate) const NAME: &str = "fused swiglu";

/// Whether the passes support this dtype.
pub(crate) fn takes(kind: Kind) -> bool {
    matches!(kind, Kind::Float | Kind::Double | Kind::BFloat16 | Kind::Half)
}

/// See [`super::forward`]; for CPU tensors of a supported dtype.
pub(crate) fn forward(gate: &Tensor, up: &Tensor, silu: Option<&Tensor>, product: &Tensor) -> Result<()> {
    let outputs = [("product", Some(product)), ("silu", silu)];
    let matrices = Matrices::new(&[("gate", Some(gate)), ("up", Some(up))], &outputs)?;
    // SAFETY: `Matrices::new` has checked that all are views of one shape and dtype on the CPU, and that each output is an input
    // itself or overlaps no other matrix.
    unsafe {
        matrices.run(ForwardPass {
            gate: matrices.of(gate)?,
            up: matrices.of(up)?,
            silu: silu.map(|silu| matrices.of(silu)).transpose()?,
            product: matrices.of(product)?,
        })
    }?;
    silu.into_iter().chain([product]).try_for_each(bump_version)
}

/// The inputs and outputs of a backward pass: CPU tensors of a supported dtype; an output may be an input's memory, element for element.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backward<'a> {
    pub(crate) gate: &'a Tensor,
    /// Read for the gradient of the gate and for the product.
    pub(crate) up: &'a Tensor,
    /// SiLU(gate), if it was saved.
    pub(crate) silu: Option<&'a Tensor>,
    pub(crate) grad: &'a Tensor,
    /// The requested outputs.
    pub(crate) gate_grad: Option<&'a Tensor>,
    pub(crate) up_grad: Option<&'a Tensor>,
    pub(crate) product: Option<&'a Tensor>,
}

/// See [`super::backward`].
pub(crate) fn backward(pass: Backward<'_>) -> Result<()> {
    let Backward { gate, up, silu, grad, gate_grad, up_grad, product } = pass;
    let inputs = [("gate", Some(gate)), ("up", Some(up)), ("grad", Some(grad)), ("silu", silu)];
    let outputs = [("gate's gradient", gate_grad), ("up's gradient", up_grad), ("product", product)];
    let matrices = Matrices::new(&inputs, &outputs)?;
    let of = |tensor: Option<&Tensor>| tensor.map(|tensor| matrices.of(tensor)).transpose();
    // SAFETY: as in `forward`.
    unsafe {
        matrices.run(BackwardPass {
            gate: matrices.of(gate)?,
            up: matrices.of(up)?,
            silu: of(silu)?,
            grad: matrices.of(grad)?,
            gate_grad: of(gate_grad)?,
            up_grad: of(up_grad)?,
            product: of(product)?,
        })
    }?;
    [gate_grad, up_grad, product].into_iter().flatten().try_for_each(bump_version)
}

type Named<'a> = (&'static str, Option<&'a Tensor>);

/// Views of one shape and dtype. Outputs do not overlap each other, and an input overlaps no output unless it is that output.
struct Matrices {
    kind: Kind,
}

impl Matrices {
    fn new(inputs: &[Named<'_>], outputs: &[Named<'_>]) -> Result<Self> {
        let given = |named: &Named<'_>| Some((named.0, named.1?.shallow_clone()));
        let inputs: Vec<(&str, Tensor)> = inputs.iter().filter_map(given).collect();
        let outputs: Vec<(&str, Tensor)> = outputs.iter().filter_map(given).collect();
        let (first_name, first) = outputs.first().unwrap_or(&inputs[0]);
        let kind = first.kind();
        for (index, (name, tensor)) in inputs.iter().chain(&outputs).enumerate() {
            let matrix = rows(NAME, name, tensor, kind)?;
            if tensor.size() != first.size() {
                let (found, expected) = (tensor.size(), first.size());
                let reason =
                    format!("`{name}` is {found:?} and `{first_name}` is {expected:?}; they must be equal");
                return Err(Error::invalid(NAME, reason));
            }
            for (other_index, (other_name, other)) in outputs.iter().enumerate() {
                let itself = index == inputs.len() + other_index;
                let other = rows(NAME, other_name, other, kind)?;
                let fits = itself
                    || apart(matrix, other, kind.elt_size_in_bytes())
                    || index < inputs.len() && same(matrix, other);
                if !fits {
                    let reason =
                        format!("`{name}` overlaps another tensor in memory; give it memory of its own");
                    return Err(Error::invalid(NAME, reason));
                }
            }
        }
        Ok(Self { kind })
    }

    fn of(&self, tensor: &Tensor) -> Result<Rows> {
        rows(NAME, "matrix", tensor, self.kind)
    }

    /// # Safety
    /// The pass is over the matrices that were checked.
    unsafe fn run(&self, pass: impl Pass) -> Result<()> {
        // SAFETY: by this function's contract; `rows` has compared each dtype with the kind.
        unsafe {
            match self.kind {
                Kind::Double => run::<f64>(pass),
                Kind::BFloat16 => run::<bf16>(pass),
                Kind::Half => run::<f16>(pass),
                _ => run::<f32>(pass),
            }
        }
    }
}

/// Elements computed at once: four AVX-512 registers of fp32.
const BLOCK: usize = 64;
/// Elements of one task: 128 KiB of each fp32 operand, which stays in the core's cache.
const TASK: usize = 32 * 1024;

/// An elementwise computation over matrices of one shape.
trait Pass: Copy + Send + Sync {
    fn matrices(&self) -> impl Iterator<Item = Rows>;

    /// # Safety
    /// `N` elements from `column` on lie in row `row` of every matrix, whose elements are `T`s, and no other code uses them meanwhile.
    unsafe fn block<T: Element, const N: usize>(&self, row: usize, column: usize);
}

/// `silu = SiLU(gate)` if requested, `product = SiLU(gate)·up`.
#[derive(Clone, Copy)]
struct ForwardPass {
    gate: Rows,
    up: Rows,
    silu: Option<Rows>,
    product: Rows,
}

impl Pass for ForwardPass {
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
#[derive(Clone, Copy)]
struct BackwardPass {
    gate: Rows,
    up: Rows,
    /// SiLU(gate), if it was saved.
    silu: Option<Rows>,
    grad: Rows,
    gate_grad: Option<Rows>,
    up_grad: Option<Rows>,
    product: Option<Rows>,
}

impl Pass for BackwardPass {
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
fn at<T>(matrix: Rows, row: usize, column: usize) -> *mut T {
    (matrix.pointer as *mut T).wrapping_add(row * matrix.row_stride + column)
}

/// Runs a pass over all elements, in parallel when there are enough of them.
///
/// # Safety
/// The matrices have one shape and elements of type `T`, and only the caller uses them during the call; each output is one
/// input's memory, element for element, or overlaps no other matrix.
unsafe fn run<T: Element>(pass: impl Pass) -> Result<()> {
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
            // SAFETY: by the contract of `run`, which gives each piece to one task.
            unsafe { pass.block::<T, N>(row, column) };
        });
    }
}
