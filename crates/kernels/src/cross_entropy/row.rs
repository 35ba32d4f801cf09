//! The passes over one row, vectorized by the compiler for the chosen vector instructions.

use half::bf16;
use pulp::{Simd, WithSimd};

use crate::simd::{self, Real, blocks, load, store};

/// Elements computed at once: four AVX-512 registers of fp32.
const BLOCK: usize = 64;
/// Elements between two updates of the maximum: they stay in the L1 cache between two reads.
const PANEL: usize = 1024;

/// The transform of a row's products, and the class weights.
#[derive(Clone, Copy)]
pub(super) struct Formula<'a, R> {
    pub(super) bias: Option<&'a [R]>,
    pub(super) scale: R,
    pub(super) softcap: Option<R>,
    pub(super) class_weights: Option<&'a [R]>,
}

/// The target of a row.
#[derive(Clone, Copy)]
pub(super) enum RowTarget<'a, R> {
    /// A column of this tile, or `None`.
    Column(Option<usize>),
    /// A distribution.
    Dense(&'a [R]),
}

/// The statistics of a row. Sums are in f64 for every dtype.
pub(super) struct RowStatistics<R> {
    pub(super) maximum: R,
    pub(super) sum: f64,
    pub(super) target: f64,
    pub(super) mass: Option<f64>,
    pub(super) total: Option<f64>,
    pub(super) moment: Option<f64>,
    pub(super) best: Option<i64>,
}

#[derive(Clone, Copy)]
pub(super) struct RowCoefficients<R> {
    pub(super) maximum: R,
    pub(super) powers: R,
    pub(super) target: R,
    pub(super) constant: Option<R>,
}

/// Turns products into logits, and accumulates the row's statistics. The row begins at column `first` of the
/// vocabulary.
pub(super) fn statistics<R: Real>(
    row: &mut [R],
    first: usize,
    formula: Formula<'_, R>,
    target: RowTarget<'_, R>,
    known: &mut RowStatistics<R>,
) {
    simd::arch().dispatch(StatisticsOf { row, first, formula, target, known });
}

/// Turns products into logits.
pub(super) fn logits<R: Real>(row: &mut [R], formula: Formula<'_, R>) {
    simd::arch().dispatch(LogitsOf { row, formula });
}

/// Turns logits into the gradient of the products.
pub(super) fn gradient<R: Real>(
    row: &mut [R],
    formula: Formula<'_, R>,
    target: RowTarget<'_, R>,
    by: RowCoefficients<R>,
) {
    simd::arch().dispatch(GradientOf { row, formula, target, by });
}

/// Rounds a row to bf16, in the first half of its memory.
pub(super) fn narrow(row: &mut [f32]) {
    let (at, length) = (row.as_mut_ptr(), row.len());
    let (from, to) = (at.cast_const(), at.cast::<bf16>());
    simd::arch().dispatch(
        #[inline(always)]
        || {
            blocks!(64, 0, length, |index, N| {
                // SAFETY: a block is read before its result is written, to memory that was read before it or with it.
                unsafe { store::<bf16, N>(to.add(index), &load::<f32, N>(from.add(index))) };
            });
        },
    );
}

/// A pass over a row. A type and not a closure, so that it is inlined into the code for each processor.
struct StatisticsOf<'a, 'k, R> {
    row: &'a mut [R],
    first: usize,
    formula: Formula<'a, R>,
    target: RowTarget<'a, R>,
    known: &'k mut RowStatistics<R>,
}

impl<R: Real> WithSimd for StatisticsOf<'_, '_, R> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { row, first, formula, target, known } = self;
        let mut start = 0;
        while start < row.len() {
            let end = row.len().min(start + PANEL);
            panel(&mut row[start..end], start, first, formula, target, known);
            start = end;
        }
        if let RowTarget::Column(Some(column)) = target {
            known.target += row[column].to_f64();
        }
    }
}

struct LogitsOf<'a, R> {
    row: &'a mut [R],
    formula: Formula<'a, R>,
}

impl<R: Real> WithSimd for LogitsOf<'_, R> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let columns = self.row.len();
        transform(self.row, self.formula, 0..columns);
    }
}

struct GradientOf<'a, R> {
    row: &'a mut [R],
    formula: Formula<'a, R>,
    target: RowTarget<'a, R>,
    by: RowCoefficients<R>,
}

#[inline(always)]
fn panel<R: Real>(
    panel: &mut [R],
    start: usize,
    first: usize,
    formula: Formula<'_, R>,
    target: RowTarget<'_, R>,
    known: &mut RowStatistics<R>,
) {
    let part = start..start + panel.len();
    transform(panel, formula, part.clone());
    let largest = maximum(panel);
    let before = known.maximum;
    if largest > before {
        known.maximum = largest;
        if let Some(best) = &mut known.best {
            let place = panel.iter().position(|&z| z == largest).unwrap_or(0);
            *best = i64::try_from(first + start + place).unwrap_or(i64::MAX);
        }
    }
    // While every class is impossible, exponentials are of z itself: −∞ − (−∞) is NaN.
    let lowest = -(R::ONE / R::ZERO);
    let reference = if known.maximum == lowest { R::ZERO } else { known.maximum };
    if largest > before {
        let shrink = if before == lowest { 0.0 } else { (before - reference).exp_of_negative().to_f64() };
        known.sum *= shrink;
        if let Some(moment) = &mut known.moment {
            *moment *= shrink;
        }
    }
    let (sum, moment) = powers(panel, reference, known.moment.is_some());
    known.sum += sum;
    if let Some(known) = &mut known.moment {
        *known += moment;
    }
    let weights = formula.class_weights.map(|weights| &weights[part.clone()]);
    if let Some(total) = &mut known.total {
        *total += dot(panel, weights);
    }
    if let RowTarget::Dense(distribution) = target {
        let (expected, mass) = expectation(panel, &distribution[part], weights);
        known.target += expected;
        if let Some(known) = &mut known.mass {
            *known += mass;
        }
    }
}

#[inline(always)]
fn transform<R: Real>(panel: &mut [R], formula: Formula<'_, R>, part: std::ops::Range<usize>) {
    if let Some(bias) = formula.bias {
        for (z, &b) in panel.iter_mut().zip(&bias[part]) {
            *z += b;
        }
    }
    match formula.softcap {
        Some(cap) => {
            let inner = formula.scale / cap;
            for z in panel.iter_mut() {
                *z = (*z * inner).tanh() * cap;
            }
        }
        None if formula.scale != R::ONE => {
            for z in panel.iter_mut() {
                *z = *z * formula.scale;
            }
        }
        None => {}
    }
}

/// Ignores NaN, which the sum of exponentials propagates.
#[inline(always)]
fn maximum<R: Real>(panel: &[R]) -> R {
    let lowest = -(R::ONE / R::ZERO);
    let (blocks, rest) = panel.as_chunks::<BLOCK>();
    let mut lanes = [lowest; BLOCK];
    for block in blocks {
        for i in 0..BLOCK {
            lanes[i] = if block[i] > lanes[i] { block[i] } else { lanes[i] };
        }
    }
    lanes.iter().chain(rest).fold(lowest, |most, &z| if z > most { z } else { most })
}

/// Returns Σ e^(z − reference), and Σ e^(z − reference)·z if requested.
#[inline(always)]
fn powers<R: Real>(panel: &[R], reference: R, moment: bool) -> (f64, f64) {
    let (blocks, rest) = panel.as_chunks::<BLOCK>();
    let (mut sums, mut moments) = ([R::ZERO; BLOCK], [R::ZERO; BLOCK]);
    for block in blocks {
        for i in 0..BLOCK {
            let power = (block[i] - reference).exp_of_negative();
            sums[i] += power;
            if moment {
                // An impossible class adds nothing, although it is −∞.
                moments[i] += if power == R::ZERO { R::ZERO } else { power * block[i] };
            }
        }
    }
    let (mut sum, mut weighted) = (0.0, 0.0);
    for i in 0..BLOCK {
        sum += sums[i].to_f64();
        weighted += moments[i].to_f64();
    }
    for &z in rest {
        let power = (z - reference).exp_of_negative();
        sum += power.to_f64();
        if moment && power != R::ZERO {
            weighted += (power * z).to_f64();
        }
    }
    (sum, weighted)
}

/// Σ w·z, or Σ z.
#[inline(always)]
fn dot<R: Real>(panel: &[R], weights: Option<&[R]>) -> f64 {
    let Some(weights) = weights else {
        let (blocks, rest) = panel.as_chunks::<BLOCK>();
        let mut lanes = [R::ZERO; BLOCK];
        for block in blocks {
            for i in 0..BLOCK {
                lanes[i] += block[i];
            }
        }
        return lanes.iter().chain(rest).map(|z| z.to_f64()).sum();
    };
    let ((blocks, rest), (w_blocks, w_rest)) = (panel.as_chunks::<BLOCK>(), weights.as_chunks::<BLOCK>());
    let mut lanes = [R::ZERO; BLOCK];
    for (block, w) in blocks.iter().zip(w_blocks) {
        for i in 0..BLOCK {
            lanes[i] += block[i] * w[i];
        }
    }
    let tail: f64 = rest.iter().zip(w_rest).map(|(z, w)| (*z * *w).to_f64()).sum();
    lanes.iter().map(|z| z.to_f64()).sum::<f64>() + tail
}

/// Returns Σ t·z and Σ t with t = w·q. An impossible class without target weight adds nothing.
#[inline(always)]
fn expectation<R: Real>(panel: &[R], distribution: &[R], weights: Option<&[R]>) -> (f64, f64) {
    let (mut expected, mut mass) = (0.0, 0.0);
    for (i, (&z, &q)) in panel.iter().zip(distribution).enumerate() {
        let t = weights.map_or(q, |weights| weights[i] * q);
        mass += t.to_f64();
        expected += if t == R::ZERO { 0.0 } else { t.to_f64() * z.to_f64() };
    }
    (expected, mass)
}

impl<R: Real> WithSimd for GradientOf<'_, R> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { row, formula, target, by } = self;
        let at_target = match target {
            RowTarget::Column(Some(column)) => Some((column, by.target * slope(row[column], formula))),
            _ => None,
        };
        let dense = match target {
            RowTarget::Dense(distribution) => Some(distribution),
            RowTarget::Column(_) => None,
        };
        if by.constant.is_none() && dense.is_none() && formula.softcap.is_none() {
            let factor = by.powers * formula.scale;
            let (blocks, rest) = row.as_chunks_mut::<BLOCK>();
            for block in blocks {
                for z in block {
                    *z = (*z - by.maximum).exp_of_negative() * factor;
                }
            }
            for z in rest {
                *z = (*z - by.maximum).exp_of_negative() * factor;
            }
        } else {
            let mut start = 0;
            while start < row.len() {
                let end = row.len().min(start + PANEL);
                let part = start..end;
                let weights = formula.class_weights.map(|weights| &weights[part.clone()]);
                let dense = dense.map(|dense| &dense[part.clone()]);
                general(&mut row[part], formula, weights, dense, by);
                start = end;
            }
        }
        if let Some((column, amount)) = at_target {
            row[column] = row[column] - amount;
        }
    }
}

/// ∂z/∂r at the logit z.
#[inline(always)]
fn slope<R: Real>(z: R, formula: Formula<'_, R>) -> R {
    match formula.softcap {
        Some(cap) => {
            let share = z / cap;
            formula.scale * (R::ONE - share * share)
        }
        None => formula.scale,
    }
}

#[inline(always)]
fn general<R: Real>(
    panel: &mut [R],
    formula: Formula<'_, R>,
    weights: Option<&[R]>,
    dense: Option<&[R]>,
    by: RowCoefficients<R>,
) {
    let constant = by.constant.unwrap_or(R::ZERO);
    for (i, z) in panel.iter_mut().enumerate() {
        let slope = slope(*z, formula);
        let weight = weights.map_or(R::ONE, |weights| weights[i]);
        let mut gradient = (*z - by.maximum).exp_of_negative() * by.powers;
        gradient = gradient - constant * weight;
        if let Some(dense) = dense {
            gradient = gradient - by.target * (weight * dense[i]);
        }
        *z = gradient * slope;
    }
}
