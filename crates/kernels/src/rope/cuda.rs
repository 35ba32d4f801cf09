//! The rotary embedding as a CUDA kernel.

use runtime::tensor_layout::TensorLayout;
use runtime::tensor_memory::{Dense, bump_version, dense};
use runtime::{Error, Result};
use smallvec::SmallVec;
use tch::{Kind, Tensor};

use super::cpu::NAME;
use super::reference::Reference;
use super::{RotaryPass, Rotation, record};
use crate::cuda::{
    Argument, Source, are_ready, expect, float, int, launch, optional, pointer, type_of, width,
};

pub(crate) const SOURCE: Source = Source(include_str!("rope.cuh"));

/// The kernel in CUDA C++, q and k in one launch, and [`Reference`] for f64 and without NVRTC.
pub(super) struct Cuda;

impl RotaryPass for Cuda {
    fn rotate(&self, rotation: Rotation<'_>, tensors: &[&Tensor], overwrite: bool) -> Result<Vec<Tensor>> {
        if let Some(results) = super::by_heads(self, rotation, tensors)? {
            return Ok(results);
        }
        let layouts = tensors.iter().map(|x| TensorLayout::of(x)).collect::<Result<SmallVec<[_; 2]>>>()?;
        if !layouts.iter().all(takes) {
            return Reference.rotate(rotation, tensors, overwrite);
        }
        let mut pairs: SmallVec<[(Dense<'_>, Tensor); 2]> = SmallVec::new();
        for (&x, layout) in tensors.iter().zip(&layouts) {
            let has_dense_heads = layout.stride().last() == Some(&1) && !layout.is_neg();
            let output = match overwrite && has_dense_heads && layout.is_sole_owner() {
                true => x.shallow_clone(),
                false => Tensor::f_empty(layout.size(), (layout.kind(), layout.device()))?,
            };
            pairs.push((if has_dense_heads { Dense::Same(x) } else { dense(x)? }, output));
        }
        {
            let views = pairs.iter().map(|(x, output)| (&**x, output));
            rotate(rotation, &views.collect::<SmallVec<[(&Tensor, &Tensor); 2]>>())?;
        }
        record(pairs.iter().map(|(x, _)| &**x))?;
        Ok(pairs.into_iter().map(|(_, output)| output).collect())
    }
}

/// Returns whether the kernel supports the tensor.
fn takes(x: &TensorLayout) -> bool {
    type_of(x.kind()).is_some() && are_ready(x.device())
}

/// Rotates each input `[batch, sequence, heads, head]` into its output, which may be the input, in one launch for two of one dtype and
/// the same tokens.
fn rotate(rotation: Rotation<'_>, pairs: &[(&Tensor, &Tensor)]) -> Result<()> {
    let mut rest = pairs;
    while let Some((&first, others)) = rest.split_first() {
        let alike = |(x, _): &&(&Tensor, &Tensor)| {
            x.kind() == first.0.kind() && x.size().get(..2) == first.0.size().get(..2)
        };
        let second = others.first().filter(alike).copied();
        queue(rotation, first, second)?;
        rest = &others[usize::from(second.is_some())..];
    }
    Ok(())
}

fn queue(
    Rotation { table, positions, inverse }: Rotation<'_>,
    first: (&Tensor, &Tensor),
    second: Option<(&Tensor, &Tensor)>,
) -> Result<()> {
    let (size, kind, device) = (first.0.size(), first.0.kind(), first.0.device());
    let [batch, sequence, _, head] = size[..] else {
        return Err(Error::invalid(NAME, format!("x is {size:?}; expected [batch, sequence, heads, head]")));
    };
    let half = head / 2;
    let rows = table.size().first().copied().unwrap_or(0);
    expect(NAME, "table", table, &[rows, 2, half], (Kind::Float, device))?;
    expect(NAME, "positions", positions, &[batch, sequence], (Kind::Int64, device))?;
    let element =
        type_of(kind).ok_or_else(|| Error::invalid(NAME, format!("{kind:?} has no CUDA kernel")))?;
    let (mut all, mut multiples, mut heads) = (vec![table], vec![half], 0);
    let mut rotated = Vec::new();
    for (x, out) in [Some(first), second].into_iter().flatten() {
        let (from, to) = (x.stride(), out.stride());
        let alike = x.dim() == 4 && x.size()[3] == head && (x.kind(), x.device()) == (kind, device);
        if !alike
            || (out.size(), out.kind(), out.device()) != (x.size(), kind, device)
            || from[3] != 1
            || to[3] != 1
        {
            return Err(Error::invalid(
                NAME,
                "an input and its output differ in shape, dtype or device, or their heads are not dense",
            ));
        }
        if x.numel() > 0 {
            all.extend([x, out]);
            multiples.extend(from[..3].iter().chain(&to[..3]));
            heads += x.size()[2];
            rotated.push((x, out));
        }
    }
    if rotated.is_empty() {
        return Ok(());
    }
    let width = width(&[kind], &all, &multiples);
    let heads_of = |index: usize| heads_argument(rotated.get(index).copied());
    let arguments = [
        heads_of(0),
        heads_of(1),
        pointer(table),
        optional(positions),
        int(NAME, "the sequence", sequence)?,
        int(NAME, "half of the head", half)?,
        Argument::I64(rows),
        float(if inverse { -1.0 } else { 1.0 }),
    ];
    int(NAME, "the number of pairs of a token", heads * half)?;
    let threads = threads(heads * half / width);
    launch(SOURCE, &format!("rotate<{element}, {width}>"), device, (batch * sequence, threads), &arguments)?;
    rotated.iter().try_for_each(|(_, out)| bump_version(out))
}

/// Returns the threads of a block that has this many packs of a token: whole warps that have the same number of packs each, as nearly as
/// possible.
fn threads(packs: i64) -> u32 {
    const MOST: i64 = 256;
    let thread_packs = ((packs + MOST - 1) / MOST).max(1);
    let threads = ((packs + thread_packs - 1) / thread_packs).clamp(1, MOST) as u32;
    threads.next_multiple_of(32)
}

/// Returns the kernel's structure for an input and its output; no heads without them.
fn heads_argument(pair: Option<(&Tensor, &Tensor)>) -> Argument {
    let address_and_strides = |tensor: &Tensor| {
        let stride = tensor.stride();
        [tensor.data_ptr() as u64, stride[0] as u64, stride[1] as u64, stride[2] as u64]
    };
    let words = pair.map_or_else(
        || vec![0; 9],
        |(x, out)| {
            address_and_strides(x)
                .into_iter()
                .chain(address_and_strides(out))
                .chain([x.size()[2] as u64])
                .collect()
        },
    );
    Argument::Words(words.into())
}

#[cfg(test)]
mod tests {
    use super::threads;

    #[test]
    fn packs_are_divided_evenly_among_threads() {
        assert_eq!([1, 32, 33, 64, 256, 320, 512, 600].map(threads), [32, 32, 64, 64, 256, 160, 256, 224]);
    }
}
