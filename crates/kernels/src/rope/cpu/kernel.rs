//! The pass over one part of the tokens: token by token, so that a position's cosines and sines are read once for all heads of q
//! and k.

use std::marker::PhantomData;
use std::ops::Range;

use pulp::{Simd, WithSimd};
use runtime::Result;
use runtime::parallel;

use crate::simd::{self, Element, Real, blocks, load, store};

/// Elements computed at once: two AVX-512 registers of fp32.
const BLOCK: usize = 32;
/// Elements of one task.
const TASK: usize = 32 * 1024;

/// The heads of every token, and the results. Strides are those of batch, sequence and heads, in elements.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) from_strides: [usize; 3],
    pub(super) to_strides: [usize; 3],
    pub(super) heads: usize,
}

#[derive(Clone, Copy)]
pub(super) struct Pass<'a> {
    /// `[positions, 2, half]` of fp32.
    pub(super) table: usize,
    pub(super) half: usize,
    pub(super) sequence: usize,
    /// Batch · sequence.
    pub(super) tokens: usize,
    /// The position of each token; if missing, its index in its row.
    pub(super) positions: Option<&'a [i64]>,
    pub(super) heads: &'a [Heads],
    pub(super) inverse: bool,
}

/// # Safety
/// The addresses are of memory of `T` with the shapes in [`Pass`] and [`Heads`]; `to` is `from` itself or does not overlap it,
/// and overlaps no other memory of the pass; every position has a row in the table.
pub(super) unsafe fn run<T: Element>(pass: Pass<'_>) -> Result<()> {
    let width = pass.heads.iter().map(|heads| heads.heads).sum::<usize>() * 2 * pass.half;
    if pass.tokens * width == 0 {
        return Ok(());
    }
    let height = (TASK / width).max(1);
    let work = |task: usize| {
        let tokens = task * height..((task + 1) * height).min(pass.tokens);
        simd::arch().dispatch(Task::<T> { pass, tokens, element: PhantomData });
    };
    let tasks = pass.tokens.div_ceil(height);
    if pass.tokens * width <= 2 * TASK {
        (0..tasks).for_each(work);
        return Ok(());
    }
    parallel::for_each(tasks, work)
}

/// The tokens of one task. A type and not a closure, so that it is inlined into the code for each set of instructions.
struct Task<'a, T> {
    pass: Pass<'a>,
    tokens: Range<usize>,
    element: PhantomData<T>,
}

impl<T: Element> WithSimd for Task<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Pass { table, half, sequence, positions, heads, inverse, .. } = self.pass;
        let sign = T::Compute::from_f64(if inverse { -1.0 } else { 1.0 });
        for token in self.tokens {
            let (row, column) = (token / sequence, token % sequence);
            let position = positions.map_or(column, |positions| positions[token] as usize);
            let cosines = (table as *const f32).wrapping_add(position * 2 * half);
            for all in heads {
                let start = |address: usize, strides: [usize; 3], head: usize| {
                    (address as *mut T)
                        .wrapping_add(row * strides[0] + column * strides[1] + head * strides[2])
                };
                for head in 0..all.heads {
                    let from = start(all.from, all.from_strides, head);
                    let to = start(all.to, all.to_strides, head);
                    // SAFETY: the head lies in its tensor, the position in the table, and `run` gives each token to one task.
                    unsafe { turn::<T>(cosines, half, sign, from, to) };
                }
            }
        }
    }
}

/// y₁ = x₁·cos − x₂·sin, y₂ = x₂·cos + x₁·sin, of a head's halves x₁ and x₂.
///
/// # Safety
/// `half` cosines and as many sines lie at `cosines`, two halves of a head at `from`, and memory for them at `to`, which is
/// `from` or does not overlap it.
#[inline(always)]
unsafe fn turn<T: Element>(cosines: *const f32, half: usize, sign: T::Compute, from: *const T, to: *mut T) {
    blocks!(BLOCK, 0, half, |at, N| {
        // SAFETY: by this function's contract; both halves of a block are read before either is written.
        unsafe {
            let (cos, sin) = (load::<f32, N>(cosines.add(at)), load::<f32, N>(cosines.add(half + at)));
            let (first, second) = (load::<T, N>(from.add(at)), load::<T, N>(from.add(half + at)));
            let (mut y1, mut y2) = ([T::Compute::default(); N], [T::Compute::default(); N]);
            for i in 0..N {
                let cos = T::Compute::from_f64(f64::from(cos[i]));
                let sin = T::Compute::from_f64(f64::from(sin[i])) * sign;
                y1[i] = first[i] * cos - second[i] * sin;
                y2[i] = second[i] * cos + first[i] * sin;
            }
            store::<T, N>(to.add(at), &y1);
            store::<T, N>(to.add(half + at), &y2);
        }
    });
}
