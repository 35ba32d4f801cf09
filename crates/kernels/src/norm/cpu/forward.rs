//! y and the statistics of rows. A row is read from memory once: the sweeps after the first find it in the cache.

use std::marker::PhantomData;
use std::ops::Range;

use pulp::{Simd, WithSimd};
use runtime::Result;
use runtime::parallel;

use crate::simd::{self, Element, Real};

/// Elements that are summed in the compute type before the sum is added in f64, so that the error does not grow with the width.
pub(super) const STRETCH: usize = 4096;
/// Elements of one task.
const TASK: usize = 32 * 1024;

/// Addresses and sizes; 0 for a missing matrix.
#[derive(Clone, Copy)]
pub(super) struct Pass {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) eps: f64,
    /// `[rows, columns]` of X.
    pub(super) x: usize,
    /// The residual that is added to x, and the output of the sum, in X.
    pub(super) residual: usize,
    pub(super) sum: usize,
    /// `[columns]` of the compute type.
    pub(super) weight: usize,
    pub(super) bias: usize,
    /// `[rows, columns]` of Y.
    pub(super) y: usize,
    /// `[rows]` of the compute type.
    pub(super) mean: usize,
    pub(super) rstd: usize,
}

/// # Safety
/// The addresses are of memory with the sizes and types in [`Pass`]; written memory overlaps nothing else.
pub(super) unsafe fn run<X, Y, const CENTER: bool>(mut pass: Pass) -> Result<()>
where
    X: Element,
    Y: Element<Compute = X::Compute>,
{
    // One code path: a missing factor is 1, a missing summand 0.
    let absent = |address: usize, value| if address == 0 { vec![value; pass.columns] } else { Vec::new() };
    let ones = absent(pass.weight, X::Compute::ONE);
    let zeros = absent(pass.bias, X::Compute::default());
    if pass.weight == 0 {
        pass.weight = ones.as_ptr() as usize;
    }
    if pass.bias == 0 {
        pass.bias = zeros.as_ptr() as usize;
    }
    let height = (TASK / pass.columns).max(1);
    let work = |task: usize| {
        let rows = task * height..((task + 1) * height).min(pass.rows);
        simd::arch().dispatch(Task::<X, Y, CENTER> { pass, rows, types: PhantomData });
    };
    let tasks = pass.rows.div_ceil(height);
    if pass.rows * pass.columns <= 2 * TASK {
        (0..tasks).for_each(work);
        return Ok(());
    }
    parallel::for_each(tasks, work)
}

/// The rows of one task. A type and not a closure, so that it is inlined into the code for each set of instructions.
struct Task<X, Y, const CENTER: bool> {
    pass: Pass,
    rows: Range<usize>,
    types: PhantomData<(X, Y)>,
}

impl<X, Y, const CENTER: bool> WithSimd for Task<X, Y, CENTER>
where
    X: Element,
    Y: Element<Compute = X::Compute>,
{
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let low = X::as_compute(&[]).is_none() || Y::as_compute(&[]).is_none();
        let mut scratch = vec![X::Compute::default(); if low { self.pass.columns } else { 0 }];
        for row in self.rows {
            // SAFETY: by the contract of `run`, which gives each row to one task.
            unsafe { normalize::<S, X, Y, CENTER>(simd, self.pass, row, &mut scratch) };
        }
    }
}

/// # Safety
/// As [`run`]; no other task has this row. `scratch` is as long as the row, if X or Y is not the compute type.
#[inline(always)]
unsafe fn normalize<S, X, Y, const CENTER: bool>(simd: S, pass: Pass, row: usize, scratch: &mut [X::Compute])
where
    S: Simd,
    X: Element,
    Y: Element<Compute = X::Compute>,
{
    // The row, after the sum with the residual, in the compute type.
    let columns = pass.columns;
    // SAFETY: the rows lie in their matrices, the statistics have one element for each row, and written memory overlaps nothing
    // else.
    let (x, weight, bias, y, rstd) = unsafe {
        if pass.residual != 0 {
            add::<X>(
                at_row::<X>(pass.x, row, columns),
                at_row::<X>(pass.residual, row, columns),
                at_row_mut::<X>(pass.sum, row, columns),
            );
        }
        (
            at_row::<X>(if pass.residual == 0 { pass.x } else { pass.sum }, row, columns),
            at_row::<X::Compute>(pass.weight, 0, columns),
            at_row::<X::Compute>(pass.bias, 0, columns),
            at_row_mut::<Y>(pass.y, row, columns),
            at_row_mut::<X::Compute>(pass.rstd, row, 1),
        )
    };
    let values = match X::as_compute(x) {
        Some(values) => values,
        None => {
            for (wide, value) in scratch.iter_mut().zip(x) {
                *wide = value.widen();
            }
            &*scratch
        }
    };
    let n = columns as f64;
    // The mean rounded to the compute type, and the rounding error: for a mean of 10⁴ and a variance of 1, it is a thousandth of
    // the result.
    let (mut center, mut rest, mut variance);
    if CENTER {
        center = X::Compute::from_f64(sum(simd, values) / n);
        let (deviations, squares) = deviations(simd, values, center);
        rest = deviations / n;
        // `max` would turn a NaN into zero.
        variance = if squares.is_finite() { (squares / n - rest * rest).max(0.0) } else { squares };
    } else {
        (center, rest) = (X::Compute::default(), 0.0);
        variance = deviations(simd, values, center).1 / n;
    }
    // Squares that overflow the compute type are summed again in f64.
    if !variance.is_finite() {
        let (mean, wide) = in_f64::<X::Compute, CENTER>(values);
        center = X::Compute::from_f64(mean);
        rest = mean - center.to_f64();
        variance = wide;
    }
    // The statistics, and y from them.
    let scale = 1.0 / (variance + pass.eps).sqrt();
    let affine = Affine {
        center,
        scale: X::Compute::from_f64(scale),
        shift: X::Compute::from_f64(-rest * scale),
        weight,
        bias,
    };
    rstd[0] = affine.scale;
    if pass.mean != 0 {
        // SAFETY: as above.
        let mean = unsafe { at_row_mut::<X::Compute>(pass.mean, row, 1) };
        mean[0] = X::Compute::from_f64(center.to_f64() + rest);
    }
    match (X::as_compute(x), Y::as_compute_mut(y)) {
        (Some(values), Some(y)) => affine.map(simd, values, y),
        (None, Some(y)) => affine.map(simd, scratch, y),
        (_, None) => {
            affine.replace(simd, scratch);
            for (narrow, value) in y.iter_mut().zip(&*scratch) {
                *narrow = Y::round(*value);
            }
        }
    }
}

/// # Safety
/// The row lies in a matrix of `T` at the address, and no other code writes it meanwhile.
#[inline(always)]
unsafe fn at_row<'a, T>(address: usize, row: usize, columns: usize) -> &'a [T] {
    // SAFETY: by this function's contract.
    unsafe { std::slice::from_raw_parts((address as *const T).add(row * columns), columns) }
}

/// # Safety
/// As [`at_row`], and no other code reads it meanwhile.
#[inline(always)]
unsafe fn at_row_mut<'a, T>(address: usize, row: usize, columns: usize) -> &'a mut [T] {
    // SAFETY: by this function's contract.
    unsafe { std::slice::from_raw_parts_mut((address as *mut T).add(row * columns), columns) }
}

#[inline(always)]
fn add<X: Element>(x: &[X], residual: &[X], sum: &mut [X]) {
    for ((sum, x), residual) in sum.iter_mut().zip(x).zip(residual) {
        *sum = X::round(x.widen() + residual.widen());
    }
}

/// [`STRETCH`], or less if a vector has one lane, so that a lane sums at most a few hundred elements.
#[inline(always)]
fn stretch<S: Simd, C: Real>() -> usize {
    STRETCH.min(1024 * size_of::<C::Vector<S>>() / size_of::<C>())
}

/// Σ v.
#[inline(always)]
fn sum<S: Simd, C: Real>(simd: S, values: &[C]) -> f64 {
    let mut result = 0.0;
    for stretch in values.chunks(stretch::<S, C>()) {
        let (vectors, tail) = C::split::<S>(stretch);
        let (fours, rest) = vectors.as_chunks::<4>();
        let mut lanes = [C::splat(simd, C::default()); 4];
        for four in fours {
            for k in 0..4 {
                lanes[k] = C::plus(simd, lanes[k], four[k]);
            }
        }
        for vector in rest {
            lanes[0] = C::plus(simd, lanes[0], *vector);
        }
        result += together(simd, lanes, tail.iter().copied());
    }
    result
}

/// Σ (v − center) and Σ (v − center)².
#[inline(always)]
fn deviations<S: Simd, C: Real>(simd: S, values: &[C], center: C) -> (f64, f64) {
    let (mut first, mut second) = (0.0, 0.0);
    for stretch in values.chunks(stretch::<S, C>()) {
        let (vectors, tail) = C::split::<S>(stretch);
        let (fours, rest) = vectors.as_chunks::<4>();
        let centers = C::splat(simd, center);
        let mut lanes = [C::splat(simd, C::default()); 4];
        let mut squares = lanes;
        for four in fours {
            for k in 0..4 {
                let d = C::minus(simd, four[k], centers);
                lanes[k] = C::plus(simd, lanes[k], d);
                squares[k] = C::mul_add(simd, d, d, squares[k]);
            }
        }
        for vector in rest {
            let d = C::minus(simd, *vector, centers);
            lanes[0] = C::plus(simd, lanes[0], d);
            squares[0] = C::mul_add(simd, d, d, squares[0]);
        }
        let tail = tail.iter().map(|v| *v - center);
        first += together(simd, lanes, tail.clone());
        second += together(simd, squares, tail.map(|d| d * d));
    }
    (first, second)
}

#[inline(always)]
fn together<S: Simd, C: Real>(simd: S, lanes: [C::Vector<S>; 4], tail: impl Iterator<Item = C>) -> f64 {
    let [a, b, c, d] = lanes;
    let lanes: C = C::sum(simd, C::plus(simd, C::plus(simd, a, b), C::plus(simd, c, d)));
    tail.fold(lanes, |sum, value| sum + value).to_f64()
}

/// y = ((v − center)·scale + shift)·weight + bias.
struct Affine<'a, C> {
    center: C,
    scale: C,
    shift: C,
    weight: &'a [C],
    bias: &'a [C],
}

impl<C: Real> Affine<'_, C> {
    #[inline(always)]
    fn vector<S: Simd>(
        &self,
        simd: S,
        v: C::Vector<S>,
        weight: C::Vector<S>,
        bias: C::Vector<S>,
    ) -> C::Vector<S> {
        let d = C::minus(simd, v, C::splat(simd, self.center));
        let normalized = C::mul_add(simd, d, C::splat(simd, self.scale), C::splat(simd, self.shift));
        C::mul_add(simd, normalized, weight, bias)
    }

    #[inline(always)]
    fn element(&self, v: C, weight: C, bias: C) -> C {
        ((v - self.center) * self.scale + self.shift) * weight + bias
    }

    #[inline(always)]
    fn map<S: Simd>(&self, simd: S, values: &[C], y: &mut [C]) {
        let (values, values_tail) = C::split::<S>(values);
        let (y, y_tail) = C::split_mut::<S>(y);
        let (weight, weight_tail) = C::split::<S>(self.weight);
        let (bias, bias_tail) = C::split::<S>(self.bias);
        for (((y, v), weight), bias) in y.iter_mut().zip(values).zip(weight).zip(bias) {
            *y = self.vector(simd, *v, *weight, *bias);
        }
        for (((y, v), weight), bias) in y_tail.iter_mut().zip(values_tail).zip(weight_tail).zip(bias_tail) {
            *y = self.element(*v, *weight, *bias);
        }
    }

    #[inline(always)]
    fn replace<S: Simd>(&self, simd: S, values: &mut [C]) {
        let (values, values_tail) = C::split_mut::<S>(values);
        let (weight, weight_tail) = C::split::<S>(self.weight);
        let (bias, bias_tail) = C::split::<S>(self.bias);
        for ((v, weight), bias) in values.iter_mut().zip(weight).zip(bias) {
            *v = self.vector(simd, *v, *weight, *bias);
        }
        for ((v, weight), bias) in values_tail.iter_mut().zip(weight_tail).zip(bias_tail) {
            *v = self.element(*v, *weight, *bias);
        }
    }
}

/// Returns mean and variance (or 0 and mean square) of a row whose squares overflow the compute type.
#[cold]
fn in_f64<C: Real, const CENTER: bool>(values: &[C]) -> (f64, f64) {
    let n = values.len() as f64;
    let wide = || values.iter().map(|value| value.to_f64());
    let mean = if CENTER { wide().sum::<f64>() / n } else { 0.0 };
    (mean, wide().map(|value| (value - mean).powi(2)).sum::<f64>() / n)
}
