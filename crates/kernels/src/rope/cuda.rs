//! The rotary embedding as a CUDA kernel.

use runtime::tensor_memory::bump_version;
use runtime::{Error, Result};
use tch::{Kind, Tensor};

use super::cpu::NAME;
use crate::cuda::{
    Argument, Source, are_ready, expect, float, int, launch, optional, pointer, type_of, width,
};

pub(crate) const SOURCE: Source = Source(include_str!("rope.cuh"));

/// Returns whether the kernel supports the tensor.
pub(crate) fn takes(x: &Tensor) -> bool {
    type_of(x.kind()).is_some() && are_ready(x.device())
}

/// Rotates each `x` `[batch, sequence, heads, head]` into its place, which may be `x`, in one launch for two of one dtype and the same
/// tokens. `table` `[positions, 2, head / 2]` in fp32; `positions` `[batch, sequence]`, contiguous.
pub(crate) fn rotate(
    table: &Tensor,
    positions: Option<&Tensor>,
    turns: &[(&Tensor, &Tensor)],
    inverse: bool,
) -> Result<()> {
    let mut rest = turns;
    while let Some((&first, others)) = rest.split_first() {
        let alike = |(x, _): &&(&Tensor, &Tensor)| {
            x.kind() == first.0.kind() && x.size().get(..2) == first.0.size().get(..2)
        };
        let second = others.first().filter(alike).copied();
        queue(table, positions, first, second, inverse)?;
        rest = &others[usize::from(second.is_some())..];
    }
    Ok(())
}

fn queue(
    table: &Tensor,
    positions: Option<&Tensor>,
    first: (&Tensor, &Tensor),
    second: Option<(&Tensor, &Tensor)>,
    inverse: bool,
) -> Result<()> {
    let (size, kind, device) = (first.0.size(), first.0.kind(), first.0.device());
    let [batch, sequence, _, head] = size[..] else {
        return Err(Error::invalid(NAME, format!("x is {size:?}; expected [batch, sequence, heads, head]")));
    };
    let half = head / 2;
    let rows = table.size().first().copied().unwrap_or(0);
    expect(NAME, "table", table, &[rows, 2, half], (Kind::Float, device))?;
    if let Some(positions) = positions {
        expect(NAME, "positions", positions, &[batch, sequence], (Kind::Int64, device))?;
    }
    let of_x = type_of(kind).ok_or_else(|| Error::invalid(NAME, format!("{kind:?} has no CUDA kernel")))?;
    let (mut all, mut multiples, mut heads) = (vec![table], vec![half], 0);
    let mut turned = Vec::new();
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
                "x and its place have not one shape, dtype and device, or heads that are not dense",
            ));
        }
        if x.numel() > 0 {
            all.extend([x, out]);
            multiples.extend(from[..3].iter().chain(&to[..3]));
            heads += x.size()[2];
            turned.push((x, out));
        }
    }
    if turned.is_empty() {
        return Ok(());
    }
    let width = width(&[kind], &all, &multiples);
    let of = |index: usize| heads_argument(turned.get(index).copied());
    let arguments = [
        of(0),
        of(1),
        pointer(table),
        optional(positions),
        int(NAME, "the sequence", sequence)?,
        int(NAME, "half of the head", half)?,
        Argument::I64(rows),
        float(if inverse { -1.0 } else { 1.0 }),
    ];
    int(NAME, "the number of pairs of a token", heads * half)?;
    let threads = threads(heads * half / width);
    launch(SOURCE, &format!("rotate<{of_x}, {width}>"), device, (batch * sequence, threads), &arguments)?;
    turned.iter().try_for_each(|(_, out)| bump_version(out))
}

/// Returns the threads of a block that has this many packs of a token: whole warps that have the same number of packs each, as nearly as
/// possible.
fn threads(packs: i64) -> u32 {
    const MOST: i64 = 256;
    let of_thread = ((packs + MOST - 1) / MOST).max(1);
    let threads = ((packs + of_thread - 1) / of_thread).clamp(1, MOST) as u32;
    threads.next_multiple_of(32)
}

/// The kernel's structure for a tensor and its place; no heads without one.
fn heads_argument(turn: Option<(&Tensor, &Tensor)>) -> Argument {
    let of = |tensor: &Tensor| {
        let stride = tensor.stride();
        [tensor.data_ptr() as u64, stride[0] as u64, stride[1] as u64, stride[2] as u64]
    };
    let words = turn.map_or_else(
        || vec![0; 9],
        |(x, out)| of(x).into_iter().chain(of(out)).chain([x.size()[2] as u64]).collect(),
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
