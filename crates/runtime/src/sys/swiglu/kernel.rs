//! The passes themselves, vectorized by the compiler for the processor at hand.
//!
//! Elements are copied in blocks to the stack, computed there, and copied back, so that an output may be the very memory
//! of an input, and so that the compiler sees plain arrays.

use half::bf16;

use crate::error::Result;
use crate::sys::parallel;
use crate::sys::simd;
use crate::sys::tensor::Rows;

/// Elements computed at once: four AVX-512 registers of fp32.
const BLOCK: usize = 64;
/// Elements that one task works on: 128 KiB of each fp32 operand, which stays in a core's own cache.
const TASK: usize = 32 * 1024;

/// An element type of a matrix.
pub(super) trait Element: Copy + Default + Send + Sync + 'static {
    type Compute: Real;
    fn widen(self) -> Self::Compute;
    fn round(value: Self::Compute) -> Self;
}

/// A type that is computed in.
pub(super) trait Real: Copy + Default {
    /// 1 / (1 + e⁻ˣ) and 1 minus it.
    fn sigmoid(self) -> (Self, Self);
    fn mul(self, other: Self) -> Self;
    /// self·(1 + a·b)
    fn mul_one_plus(self, a: Self, b: Self) -> Self;
}

impl Element for f32 {
    type Compute = f32;
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn round(value: f32) -> f32 {
        value
    }
}

impl Element for f64 {
    type Compute = f64;
    #[inline(always)]
    fn widen(self) -> f64 {
        self
    }
    #[inline(always)]
    fn round(value: f64) -> f64 {
        value
    }
}

impl Element for bf16 {
    type Compute = f32;
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    fn round(value: f32) -> bf16 {
        bf16::from_f32(value)
    }
}

impl Real for f32 {
    #[inline(always)]
    fn sigmoid(self) -> (f32, f32) {
        let decay = exp(-self);
        // Beyond the range of `exp` the quotient would stop falling while its factor grows.
        let sigmoid = if self < -87.0 { 0.0 } else { 1.0 / (1.0 + decay) };
        (sigmoid, if self < -87.0 { 1.0 } else { decay * sigmoid })
    }
    #[inline(always)]
    fn mul(self, other: f32) -> f32 {
        self * other
    }
    #[inline(always)]
    fn mul_one_plus(self, a: f32, b: f32) -> f32 {
        self * (1.0 + a * b)
    }
}

impl Real for f64 {
    #[inline(always)]
    fn sigmoid(self) -> (f64, f64) {
        let sigmoid = 1.0 / (1.0 + (-self).exp());
        (sigmoid, 1.0 - sigmoid)
    }
    #[inline(always)]
    fn mul(self, other: f64) -> f64 {
        self * other
    }
    #[inline(always)]
    fn mul_one_plus(self, a: f64, b: f64) -> f64 {
        self * (1.0 + a * b)
    }
}

/// eˣ in fp32 within two units in the last place, for x between −88 and 88, and the nearer end's value beyond.
///
/// x = n·ln 2 + r with |r| ≤ ln 2 / 2; eʳ is a polynomial of degree 6 (Cephes' `expf`), 2ⁿ is set into the exponent.
#[inline(always)]
#[allow(clippy::excessive_precision, reason = "the constants are those of the source")]
fn exp(x: f32) -> f32 {
    /// Adding 1.5·2²³ rounds to an integer, which then stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * 0.693_359_375 - n * -2.121_944_4e-4;
    let p = 1.987_569_15e-4;
    let p = p * r + 1.398_199_950_7e-3;
    let p = p * r + 8.333_451_907_3e-3;
    let p = p * r + 4.166_579_589_4e-2;
    let p = p * r + 1.666_666_545_9e-1;
    let p = p * r + 5.000_000_120_1e-1;
    let power = f32::from_bits(shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23);
    (p * r * r + r + 1.0) * power
}

/// `silu = SiLU(gate)` where given, `product = SiLU(gate)·up`.
///
/// # Safety
/// All have one shape and element type `T`; each output is one input's very memory, or apart from every other argument.
pub(super) unsafe fn forward<T: Element>(
    gate: Rows,
    up: Rows,
    silu: Option<Rows>,
    product: Rows,
) -> Result<()> {
    let all = [Some(gate), Some(up), silu, Some(product)];
    for_each_piece(&all, |row, column, count| {
        // SAFETY: the piece lies in every matrix, and no other task has it.
        unsafe {
            for offset in (column..column + count).step_by(BLOCK) {
                let n = BLOCK.min(column + count - offset);
                let (mut g, mut u) = (load::<T>(gate, row, offset, n), load::<T>(up, row, offset, n));
                for i in 0..BLOCK {
                    g[i] = g[i].mul(g[i].sigmoid().0);
                    u[i] = u[i].mul(g[i]);
                }
                if let Some(silu) = silu {
                    store::<T>(silu, row, offset, n, &g);
                }
                store::<T>(product, row, offset, n, &u);
            }
        }
    })
}

/// In place, from the gradient `d` of the product, with σ = sigmoid(gate) and s = SiLU(gate):
/// gate ← d·up·σ·(1 + gate·(1 − σ)), up ← d·s, d ← s·up.
///
/// # Safety
/// All have one shape and element type `T`, and are apart from each other.
pub(super) unsafe fn backward<T: Element>(
    gate: Rows,
    up: Rows,
    silu: Option<Rows>,
    grad: Rows,
) -> Result<()> {
    let all = [Some(gate), Some(up), silu, Some(grad)];
    for_each_piece(&all, |row, column, count| {
        // SAFETY: the piece lies in every matrix, and no other task has it.
        unsafe {
            for offset in (column..column + count).step_by(BLOCK) {
                let n = BLOCK.min(column + count - offset);
                let (mut g, mut u) = (load::<T>(gate, row, offset, n), load::<T>(up, row, offset, n));
                let mut d = load::<T>(grad, row, offset, n);
                let kept = silu.map(|silu| load::<T>(silu, row, offset, n));
                let mut s = [T::Compute::default(); BLOCK];
                let mut slope = [T::Compute::default(); BLOCK];
                for i in 0..BLOCK {
                    let (sigmoid, rest) = g[i].sigmoid();
                    s[i] = g[i].mul(sigmoid);
                    slope[i] = sigmoid.mul_one_plus(g[i], rest);
                }
                if let Some(kept) = kept {
                    s = kept;
                }
                for i in 0..BLOCK {
                    g[i] = d[i].mul(u[i]).mul(slope[i]);
                    let product = s[i].mul(u[i]);
                    u[i] = d[i].mul(s[i]);
                    d[i] = product;
                }
                store::<T>(gate, row, offset, n, &g);
                store::<T>(up, row, offset, n, &u);
                store::<T>(grad, row, offset, n, &d);
            }
        }
    })
}

/// Runs `work(row, first column, count)` over pieces that cover a matrix, in parallel when there is enough of it.
fn for_each_piece(matrices: &[Option<Rows>], work: impl Fn(usize, usize, usize) + Sync) -> Result<()> {
    let first = matrices[0].expect("the first matrix is always given");
    let dense = matrices.iter().flatten().all(|m| m.row_stride == m.columns || m.rows == 1);
    let (rows, columns) = if dense { (1, first.rows * first.columns) } else { (first.rows, first.columns) };
    let pieces = columns.div_ceil(TASK);
    let run = |index: usize| {
        let (row, column) = (index / pieces, index % pieces * TASK);
        simd::arch().dispatch(|| work(row, column, TASK.min(columns - column)));
    };
    let total = rows * pieces;
    // A task has so many pieces that it is worth its start.
    let least = if rows * columns > 2 * TASK { (TASK / columns.clamp(1, TASK)).max(1) } else { total.max(1) };
    parallel::for_each(total.div_ceil(least), |task| {
        (task * least..total.min((task + 1) * least)).for_each(run)
    })
}

/// # Safety
/// `columns` from `column` on lie in row `row` of a matrix of `T`.
#[inline(always)]
unsafe fn load<T: Element>(matrix: Rows, row: usize, column: usize, count: usize) -> [T::Compute; BLOCK] {
    let mut raw = [T::default(); BLOCK];
    let start = (matrix.pointer as *const T).wrapping_add(row * matrix.row_stride + column);
    // SAFETY: the caller says that the elements are there; the block is this function's own.
    unsafe {
        if count == BLOCK {
            // A constant length, so that the copy is a few vector moves and no call.
            std::ptr::copy_nonoverlapping(start, raw.as_mut_ptr(), BLOCK);
        } else {
            std::ptr::copy_nonoverlapping(start, raw.as_mut_ptr(), count);
        }
    }
    let mut wide = [T::Compute::default(); BLOCK];
    for i in 0..BLOCK {
        wide[i] = raw[i].widen();
    }
    wide
}

/// # Safety
/// As [`load`]; nobody else reads or writes these elements now.
#[inline(always)]
unsafe fn store<T: Element>(
    matrix: Rows,
    row: usize,
    column: usize,
    count: usize,
    values: &[T::Compute; BLOCK],
) {
    let mut raw = [T::default(); BLOCK];
    for i in 0..BLOCK {
        raw[i] = T::round(values[i]);
    }
    let start = (matrix.pointer as *mut T).wrapping_add(row * matrix.row_stride + column);
    // SAFETY: the caller says that the elements are there and nobody else's now.
    unsafe {
        if count == BLOCK {
            std::ptr::copy_nonoverlapping(raw.as_ptr(), start, BLOCK);
        } else {
            std::ptr::copy_nonoverlapping(raw.as_ptr(), start, count);
        }
    }
}
