//! All gradients in one pass over memory.
//!
//! A few rows at a time: the first sweep computes the sums that each row's gradient needs; the second goes column by column over
//! these rows, which are in the cache by then, and loads each sum of the parameters' gradients once for all of them.

use std::marker::PhantomData;
use std::ops::Range;

use pulp::{Simd, WithSimd};
use runtime::Result;
use runtime::parallel;

use super::forward::STRETCH;
use crate::simd::{self, Element, Real, blocks, load, store};

/// Elements computed at once: two AVX-512 registers of fp32, few enough for three sums and their operands to stay in
/// registers.
const BLOCK: usize = 32;
/// Rows worked on together.
const GROUP: usize = 4;
/// Fewer elements than this are not divided among threads.
const TASK: usize = 32 * 1024;
/// Maximum rows of a part: a parameter's gradients are summed in the compute type within a part, and in f64 over the parts.
const PART: usize = 256;

/// Addresses and sizes; 0 for a missing matrix.
#[derive(Clone, Copy)]
pub(super) struct Pass {
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// `[rows, columns]`: the saved x or y in S, the upstream gradient in Y, and in X the result (which may be the upstream's
    /// memory if Y is X) and the gradient that is added to it.
    pub(super) kept: usize,
    pub(super) upstream: usize,
    pub(super) grad: usize,
    pub(super) added: usize,
    /// `[columns]` of the compute type; `inverse` is 1/weight, if y was saved.
    pub(super) weight: usize,
    pub(super) inverse: usize,
    pub(super) bias: usize,
    /// `[rows]` of the compute type.
    pub(super) mean: usize,
    pub(super) rstd: usize,
    /// `[parts, columns]` of the compute type, see [`parts`].
    pub(super) weight_parts: usize,
    pub(super) bias_parts: usize,
}

/// Returns the number of parts of the rows. It depends on the number of rows only, so that the sums do not depend on the threads.
pub(super) fn parts(rows: usize) -> usize {
    rows.div_ceil(part(rows))
}

fn part(rows: usize) -> usize {
    rows.div_ceil(32).clamp(32, PART)
}

/// # Safety
/// The addresses are of memory with the sizes and types in [`Pass`]; written memory overlaps nothing else, except that `grad` may
/// be `upstream`.
pub(super) unsafe fn run<S, Y, X, const CENTER: bool, const OUTPUT: bool>(pass: Pass) -> Result<()>
where
    S: Element<Compute = X::Compute>,
    Y: Element<Compute = X::Compute>,
    X: Element,
{
    let height = part(pass.rows);
    let work = |index: usize| {
        let rows = index * height..((index + 1) * height).min(pass.rows);
        simd::arch().dispatch(Part::<S, Y, X, CENTER, OUTPUT> { pass, index, rows, types: PhantomData });
    };
    let tasks = parts(pass.rows);
    if pass.rows * pass.columns <= 2 * TASK {
        (0..tasks).for_each(work);
        return Ok(());
    }
    parallel::for_each(tasks, work)
}

/// The rows and sums of one task. A type and not a closure, so that it is inlined into the code for each set of instructions.
///
/// `CENTER` and `OUTPUT` are constant parameters, although they triple the compiled variants: as fields of the pass, with branches
/// outside the innermost loops, forward and backward took 1.3 to 1.5 times as long in bf16 on an AMD Zen 4.
struct Part<S, Y, X, const CENTER: bool, const OUTPUT: bool> {
    pass: Pass,
    index: usize,
    rows: Range<usize>,
    types: PhantomData<(S, Y, X)>,
}

impl<S, Y, X, const CENTER: bool, const OUTPUT: bool> WithSimd for Part<S, Y, X, CENTER, OUTPUT>
where
    S: Element<Compute = X::Compute>,
    Y: Element<Compute = X::Compute>,
    X: Element,
{
    type Output = ();

    #[inline(always)]
    fn with_simd<A: Simd>(self, _: A) {
        let Self { pass, index, rows, .. } = self;
        let sums = |address: usize| {
            let place = (address as *mut X::Compute).wrapping_add(index * pass.columns);
            if address != 0 {
                // SAFETY: the part lies in the sums, and no other task has it (`run`).
                unsafe { place.write_bytes(0, pass.columns) };
            }
            place
        };
        let sums = (sums(pass.weight_parts), sums(pass.bias_parts));
        let mut row = rows.start;
        // SAFETY: by the contract of `run`, which gives each row to one task.
        unsafe {
            while row < rows.end {
                let count = if row + GROUP <= rows.end { GROUP } else { 1 };
                group::<S, Y, X, CENTER, OUTPUT>(pass, row, count, sums);
                row += count;
            }
        }
    }
}

/// The sums over a row that its gradient needs.
#[derive(Clone, Copy, Default)]
struct Row<C> {
    mean: C,
    rstd: C,
    /// Mean of x̂: the rounding error of the saved mean.
    rest: C,
    /// Means of g and of g·x̂.
    slope: C,
    curve: C,
}

/// Processes `count` rows from `first` on, at most [`GROUP`]. The number is not a constant parameter: that would multiply the
/// compiled variants without a gain in speed.
///
/// # Safety
/// As [`run`]; no other task has these rows or sums.
#[inline(always)]
unsafe fn group<S, Y, X, const CENTER: bool, const OUTPUT: bool>(
    pass: Pass,
    first: usize,
    count: usize,
    (weight_sums, bias_sums): (*mut X::Compute, *mut X::Compute),
) where
    S: Element<Compute = X::Compute>,
    Y: Element<Compute = X::Compute>,
    X: Element,
{
    // First sweep: the statistics of each row, which leave the rows in the cache.
    let mut rows = [Row::<X::Compute>::default(); GROUP];
    let rows = &mut rows[..count];
    for (k, row) in rows.iter_mut().enumerate() {
        // SAFETY: the rows exist, by this function's contract.
        *row = unsafe { row_statistics::<S, Y, X, CENTER, OUTPUT>(pass, first + k) };
    }
    // Second sweep, column by column: the gradients of the rows and their part of the parameters' gradients.
    let columns = pass.columns;
    let kept = (pass.kept as *const S).wrapping_add(first * columns);
    let upstream = (pass.upstream as *const Y).wrapping_add(first * columns);
    let grad = (pass.grad as *mut X).wrapping_add(first * columns);
    let added = (pass.added as *const X).wrapping_add(first * columns);
    blocks!(BLOCK, 0, columns, |at, N| {
        // SAFETY: the block lies in every row, and in the vectors. A row's upstream is read before its gradient is
        // written, which may be in the same place.
        unsafe {
            let weight = vector::<X::Compute, N>(pass.weight, at, X::Compute::ONE);
            let inverse = vector::<X::Compute, N>(pass.inverse, at, X::Compute::ONE);
            let bias = vector::<X::Compute, N>(pass.bias, at, X::Compute::default());
            let mut weight_sum = [X::Compute::default(); N];
            let mut bias_sum = [X::Compute::default(); N];
            for (k, row) in rows.iter().enumerate() {
                let place = k * columns + at;
                let d = load::<Y, N>(upstream.add(place));
                // x̂, and its part of ∂L/∂w = Σ d·x̂ and ∂L/∂b = Σ d.
                let mut x = load::<S, N>(kept.add(place));
                for i in 0..N {
                    x[i] = if OUTPUT { (x[i] - bias[i]) * inverse[i] } else { (x[i] - row.mean) * row.rstd };
                    if CENTER && !OUTPUT {
                        x[i] = x[i] - row.rest;
                    }
                    weight_sum[i] += d[i] * x[i];
                    bias_sum[i] += d[i];
                }
                // ∂L/∂x = r·(g − mean(g) − x̂·mean(g·x̂)).
                if pass.grad != 0 {
                    for i in 0..N {
                        let g = d[i] * weight[i];
                        let inner = if CENTER { g - row.slope } else { g };
                        x[i] = (inner - x[i] * row.curve) * row.rstd;
                    }
                    if pass.added != 0 {
                        let added = load::<X, N>(added.add(place));
                        for i in 0..N {
                            x[i] += added[i];
                        }
                    }
                    store::<X, N>(grad.add(place), &x);
                }
            }
            if pass.weight_parts != 0 {
                add::<X::Compute, N>(weight_sums.add(at), &weight_sum);
            }
            if pass.bias_parts != 0 {
                add::<X::Compute, N>(bias_sums.add(at), &bias_sum);
            }
        }
    });
}

/// Returns the statistics of a row: those that forward saved, and the means of g, x̂ and g·x̂.
///
/// # Safety
/// As [`group`], for one row.
#[inline(always)]
unsafe fn row_statistics<S, Y, X, const CENTER: bool, const OUTPUT: bool>(
    pass: Pass,
    row: usize,
) -> Row<X::Compute>
where
    S: Element<Compute = X::Compute>,
    Y: Element<Compute = X::Compute>,
    X: Element,
{
    let columns = pass.columns;
    let mut statistics = Row::default();
    // SAFETY: the statistics have one element for each row.
    unsafe {
        statistics.rstd = (pass.rstd as *const X::Compute).add(row).read();
        if pass.mean != 0 {
            statistics.mean = (pass.mean as *const X::Compute).add(row).read();
        }
    }
    if pass.grad == 0 && (OUTPUT || !CENTER) {
        return statistics;
    }
    let kept = (pass.kept as *const S).wrapping_add(row * columns);
    let upstream = (pass.upstream as *const Y).wrapping_add(row * columns);
    // Sums of at most `STRETCH` numbers in the compute type, added up in f64.
    let (mut slope, mut curve, mut rest) = (0.0, 0.0, 0.0);
    for from in (0..columns).step_by(STRETCH) {
        let mut g_sums = [X::Compute::default(); BLOCK];
        let mut gx_sums = [X::Compute::default(); BLOCK];
        let mut x_sums = [X::Compute::default(); BLOCK];
        blocks!(BLOCK, from, columns.min(from + STRETCH), |at, N| {
            // SAFETY: the block lies in the row, and in the vectors.
            unsafe {
                let weight = vector::<X::Compute, N>(pass.weight, at, X::Compute::ONE);
                let d = load::<Y, N>(upstream.add(at));
                let mut x = load::<S, N>(kept.add(at));
                if OUTPUT {
                    let inverse = vector::<X::Compute, N>(pass.inverse, at, X::Compute::ONE);
                    let bias = vector::<X::Compute, N>(pass.bias, at, X::Compute::default());
                    for i in 0..N {
                        x[i] = (x[i] - bias[i]) * inverse[i];
                    }
                } else {
                    for x in &mut x {
                        *x = (*x - statistics.mean) * statistics.rstd;
                    }
                }
                for i in 0..N {
                    let g = d[i] * weight[i];
                    gx_sums[i] += g * x[i];
                    if CENTER {
                        g_sums[i] += g;
                        x_sums[i] += x[i];
                    }
                }
            }
        });
        curve += total(gx_sums);
        if CENTER {
            slope += total(g_sums);
            rest += if OUTPUT { 0.0 } else { total(x_sums) };
        }
    }
    // Σ g·x̂ is corrected for the mean of x̂, which rounding leaves above or below 0.
    let n = columns as f64;
    (slope, rest) = (slope / n, rest / n);
    statistics.slope = X::Compute::from_f64(slope);
    statistics.rest = X::Compute::from_f64(rest);
    statistics.curve = X::Compute::from_f64(curve / n - rest * slope);
    statistics
}

/// Returns the sum of all lanes, added pairwise by halves.
#[inline(always)]
fn total<C: Real>(lanes: [C; BLOCK]) -> f64 {
    let mut half = [C::default(); BLOCK / 2];
    for i in 0..BLOCK / 2 {
        half[i] = lanes[i] + lanes[i + BLOCK / 2];
    }
    let mut quarter = [C::default(); BLOCK / 4];
    for i in 0..BLOCK / 4 {
        quarter[i] = half[i] + half[i + BLOCK / 4];
    }
    let q = quarter;
    (((q[0] + q[4]) + (q[1] + q[5])) + ((q[2] + q[6]) + (q[3] + q[7]))).to_f64()
}

/// Loads a block of a vector, or a constant if there is no vector.
///
/// # Safety
/// The block lies in the vector.
#[inline(always)]
unsafe fn vector<C: Real, const N: usize>(address: usize, at: usize, other: C) -> [C; N] {
    if address == 0 {
        return [other; N];
    }
    // SAFETY: by this function's contract.
    unsafe { load::<C, N>((address as *const C).add(at)) }
}

/// # Safety
/// `N` sums lie at `sums`, and no other code uses them meanwhile.
#[inline(always)]
unsafe fn add<C: Real, const N: usize>(sums: *mut C, values: &[C; N]) {
    // SAFETY: by this function's contract.
    unsafe {
        let mut sum = load::<C, N>(sums);
        for i in 0..N {
            sum[i] += values[i];
        }
        store::<C, N>(sums, &sum);
    }
}

/// `sum[column] = Σ parts[·, column]`, added in f64 in their order.
///
/// # Safety
/// The addresses are of `[parts, columns]` and `[columns]` elements of `C`, which do not overlap and which no other code uses
/// meanwhile.
pub(super) unsafe fn combine<C: Real>(parts: usize, columns: usize, addends: usize, sum: usize) {
    let (addends, sum) = (addends as *const C, sum as *mut C);
    simd::arch().dispatch(|| {
        for from in (0..columns).step_by(BLOCK) {
            let count = BLOCK.min(columns - from);
            let mut wide = [0.0f64; BLOCK];
            for part in 0..parts {
                for (i, wide) in wide.iter_mut().enumerate().take(count) {
                    // SAFETY: the element lies in the matrix.
                    *wide += unsafe { addends.add(part * columns + from + i).read() }.to_f64();
                }
            }
            for (i, wide) in wide.into_iter().enumerate().take(count) {
                // SAFETY: the element lies in the vector.
                unsafe { sum.add(from + i).write(C::from_f64(wide)) };
            }
        }
    });
}
