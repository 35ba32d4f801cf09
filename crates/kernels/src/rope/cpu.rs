//! Rotation of heads in one pass over memory: the checks that make the pass sound.
//!
//! The pass over one part of the tokens: token by token, so that a position's cosines and sines are read once for all heads of q
//! and k.

use std::marker::PhantomData;
use std::ops::Range;

use half::{bf16, f16};
use pulp::{Simd, WithSimd};
use runtime::parallel;
use runtime::profile::kernel;
use runtime::tensor_layout::TensorLayout;
use runtime::tensor_memory::{Dense, bump_version};
use runtime::{Error, Result};
use smallvec::SmallVec;
use tch::{Device, Kind, Tensor};

use super::{RotaryPass, Rotation, record};
use crate::operands::{Access, Operands, has_dense_heads};
use crate::simd::{self, Element, Real, blocks, load, store};

pub(crate) const NAME: &str = "rotary embedding";

/// The input and the output of a rotation: `[b, t, heads, head]` or `[b, t, heads·head]` both, of one dtype and any strides except in
/// the last dimension, which is dense. Without an output, the input is overwritten; else they do not overlap.
type InOut<'a> = (Dense<'a>, Option<Tensor>);

/// One pass over memory, vectorized for the processor, on libtorch's threads.
pub(super) struct Cpu;

impl RotaryPass for Cpu {
    fn rotate(&self, rotation: Rotation<'_>, tensors: &[&Tensor], overwrite: bool) -> Result<Vec<Tensor>> {
        let mut pairs: SmallVec<[InOut<'_>; 2]> = SmallVec::new();
        for &x in tensors {
            let layout = TensorLayout::of(x)?;
            let in_place = overwrite && !layout.is_neg() && writes(&layout) && layout.is_sole_owner();
            let empty = || Tensor::f_empty(layout.size(), (layout.kind(), Device::Cpu));
            let output = (!in_place).then(empty).transpose()?;
            let x = match (layout.is_neg(), has_dense_heads(&layout)) {
                (false, true) => Dense::Same(x),
                (false, false) => Dense::Copy(x.f_contiguous()?),
                (true, _) => Dense::Copy(x.f_resolve_neg()?.f_contiguous()?),
            };
            pairs.push((x, output));
        }
        let positions = rotation
            .positions
            .map(|positions| Vec::<i64>::try_from(positions.f_reshape([-1])?))
            .transpose()?;
        let Some((first, _)) = pairs.first() else { return Ok(Vec::new()) };
        let _scope = kernel("runtime::rope", [first]);
        rotate(rotation.table, positions.as_deref(), &pairs, rotation.inverse)?;
        record(pairs.iter().map(|(from, _)| &**from))?;
        Ok(pairs.into_iter().map(|(from, to)| to.unwrap_or_else(|| from.into_tensor())).collect())
    }
}

/// Returns whether the pass supports this dtype.
pub(super) fn takes(kind: Kind) -> bool {
    matches!(kind, Kind::Float | Kind::Double | Kind::BFloat16 | Kind::Half)
}

/// Returns whether the pass can write heads with these strides: no two elements share an address.
fn writes(tensor: &TensorLayout) -> bool {
    let dimensions = tensor.stride().iter().copied().zip(tensor.size().iter().copied());
    let mut dimensions: SmallVec<[(i64, i64); 8]> = dimensions.filter(|(_, size)| *size != 1).collect();
    dimensions.sort_unstable();
    let mut reach = 1;
    let apart = dimensions.into_iter().all(|(stride, size)| {
        let beyond = stride >= reach;
        reach = stride * size;
        beyond
    });
    tensor.numel() == 0 || has_dense_heads(tensor) && apart
}

/// Rotates all `pairs`, by the negative angles with `inverse`. The token at `[b, t]` has the position `positions[b·T + t]`, or t without
/// `positions`; `table` is `[rows, 2, head / 2]` of fp32, contiguous: the cosines of a position, then its sines.
///
/// All are on the CPU; `pairs` share their batch, sequence, head and dtype.
fn rotate(table: &Tensor, positions: Option<&[i64]>, pairs: &[InOut<'_>], inverse: bool) -> Result<()> {
    let invalid = |reason: String| Err(Error::invalid(NAME, reason));
    // The table, and one dtype and shape for all pairs.
    let table_layout = TensorLayout::of(table)?;
    let &[known, 2, half] = table_layout.size() else {
        let size = table_layout.size();
        return invalid(format!("the table is {size:?}; expected [positions, 2, head / 2]"));
    };
    let Some((first, _)) = pairs.first() else { return Ok(()) };
    let first = TensorLayout::of(first)?;
    let kind = first.kind();
    if !takes(kind) {
        return invalid(format!("heads of {kind:?}; expected Float, Double, BFloat16 or Half"));
    }
    let (&[batch, sequence, _, _] | &[batch, sequence, _]) = first.size() else {
        return invalid(format!("heads of shape {:?}; expected [b, t, heads, head]", first.size()));
    };
    // The tensors: inputs and outputs of that shape.
    let mut operands = Operands::new(NAME, Device::Cpu);
    let table = operands.read("table", table, Kind::Float, table_layout.numel())?;
    let mut passes: SmallVec<[Heads; 2]> = SmallVec::new();
    for (from, to) in pairs {
        // A result may be its own source, element for element.
        let source = if to.is_none() { Access::Write } else { Access::Read };
        let from_layout = TensorLayout::of(from)?;
        let width = from_layout.size().get(2).copied().unwrap_or(0);
        let joint = from_layout.size().len() == 3;
        let size: SmallVec<[i64; 4]> = match joint {
            true => SmallVec::from_slice(&[batch, sequence, width / (2 * half) * 2 * half]),
            false => SmallVec::from_slice(&[batch, sequence, width, 2 * half]),
        };
        let heads = if joint { width / (2 * half) } else { width };
        let from = operands.heads(source, "heads", from, kind, &size)?;
        let to = match to {
            None => from.clone(),
            Some(to) => operands.heads(Access::Write, "result", to, kind, &size)?,
        };
        if !writes(&to) {
            let reason = format!("`result` overlaps itself: {size:?} with strides {:?}", to.stride());
            return invalid(reason);
        }
        passes.push(Heads {
            from: from.range()?.start,
            to: to.range()?.start,
            from_strides: strides(&from, half),
            to_strides: strides(&to, half),
            heads: heads as usize,
        });
    }
    operands.check()?;
    // Every position has a row in the table.
    let tokens = (batch * sequence) as usize;
    let wrong = match positions {
        None => (sequence > known).then_some(sequence - 1),
        Some(positions) if positions.len() != tokens => {
            return invalid(format!(
                "{} positions for {tokens} tokens; expected one for each",
                positions.len()
            ));
        }
        Some(positions) => positions.iter().find(|position| !(0..known).contains(position)).copied(),
    };
    if let Some(position) = wrong {
        return Err(beyond(position, known));
    }
    let pass = Pass {
        table,
        half: half as usize,
        sequence: sequence as usize,
        tokens,
        positions,
        heads: &passes,
        inverse,
    };
    // SAFETY: `from` and `to` are CPU tensors of the element type and shape in `Heads`. A result overlaps nothing that is read or
    // written, unless it is its own source, element for element; every position has a row in the table.
    unsafe {
        match kind {
            Kind::Double => run::<f64>(pass),
            Kind::BFloat16 => run::<bf16>(pass),
            Kind::Half => run::<f16>(pass),
            _ => run::<f32>(pass),
        }
    }?;
    // Nothing else has seen a new result.
    pairs.iter().filter(|(_, to)| to.is_none()).try_for_each(|(from, _)| bump_version(from))
}

/// Returns the error for a position outside the table.
pub(crate) fn beyond(position: i64, known: i64) -> Error {
    let reason = format!(
        "position {position} is outside the table's {known} positions (0 to {}); cut the rows, or make the table longer",
        known - 1
    );
    Error::invalid(NAME, reason)
}

/// Strides of batch, sequence and heads, in elements.
fn strides(tensor: &TensorLayout, half: i64) -> [usize; 3] {
    let strides = tensor.stride();
    let heads = if strides.len() == 3 { 2 * half } else { strides[2] };
    [strides[0], strides[1], heads].map(|stride| stride as usize)
}

/// Elements computed at once: two AVX-512 registers of fp32.
const BLOCK: usize = 32;
/// Elements of one task.
const TASK: usize = 32 * 1024;

/// The heads of every token, and the results. Strides are those of batch, sequence and heads, in elements.
#[derive(Clone, Copy)]
struct Heads {
    from: usize,
    to: usize,
    from_strides: [usize; 3],
    to_strides: [usize; 3],
    heads: usize,
}

#[derive(Clone, Copy)]
struct Pass<'a> {
    /// `[positions, 2, half]` of fp32.
    table: usize,
    half: usize,
    sequence: usize,
    /// Batch · sequence.
    tokens: usize,
    /// The position of each token; if missing, its index in its row.
    positions: Option<&'a [i64]>,
    heads: &'a [Heads],
    inverse: bool,
}

/// # Safety
/// The addresses are of memory of `T` with the shapes in [`Pass`] and [`Heads`]; `to` is `from` itself or does not overlap it,
/// and overlaps no other memory of the pass; every position has a row in the table.
unsafe fn run<T: Element>(pass: Pass<'_>) -> Result<()> {
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
