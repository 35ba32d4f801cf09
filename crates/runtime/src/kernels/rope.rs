//! The rotary embedding as a CUDA kernel.

use tch::{Kind, Tensor};

use super::{Argument, Source, are_ready, expect, float, int, launch, optional, pointer, type_of, width};
use crate::error::{Error, Result};
use crate::sys::rope::NAME;
use crate::sys::tensor::bump_version;

pub(super) const SOURCE: Source = Source(include_str!("../../cpp/cuda/rope.cuh"));

/// Returns whether the kernel supports the tensor.
pub(crate) fn takes(x: &Tensor) -> bool {
    type_of(x.kind()).is_some() && are_ready(x.device())
}

/// Rotates `x` `[batch, sequence, heads, head]` into `out`, which may be `x`. `table` `[positions, 2, head / 2]` in fp32;
/// `positions` `[batch, sequence]`, contiguous.
pub(crate) fn rotate(
    table: &Tensor,
    positions: Option<&Tensor>,
    x: &Tensor,
    out: &Tensor,
    inverse: bool,
) -> Result<()> {
    let (size, kind, device) = (x.size(), x.kind(), x.device());
    let [batch, sequence, heads, head] = size[..] else {
        return Err(Error::invalid(NAME, format!("x is {size:?}; expected [batch, sequence, heads, head]")));
    };
    let half = head / 2;
    let rows = table.size().first().copied().unwrap_or(0);
    expect(NAME, "table", table, &[rows, 2, half], (Kind::Float, device))?;
    if let Some(positions) = positions {
        expect(NAME, "positions", positions, &[batch, sequence], (Kind::Int64, device))?;
    }
    let (from, to) = (x.stride(), out.stride());
    if (out.size(), out.kind(), out.device()) != (size.clone(), kind, device) || from[3] != 1 || to[3] != 1 {
        return Err(Error::invalid(
            NAME,
            "x and its place have not one shape, dtype and device, or heads that are not dense",
        ));
    }
    let of_x = type_of(kind).ok_or_else(|| Error::invalid(NAME, format!("{kind:?} has no CUDA kernel")))?;
    if x.numel() == 0 {
        return Ok(());
    }
    let multiples: Vec<i64> = from[..3].iter().chain(&to[..3]).copied().chain([half]).collect();
    let width = width(&[kind], &[x, out, table], &multiples);
    let arguments = [
        pointer(x),
        Argument::I64(from[0]),
        Argument::I64(from[1]),
        Argument::I64(from[2]),
        pointer(out),
        Argument::I64(to[0]),
        Argument::I64(to[1]),
        Argument::I64(to[2]),
        pointer(table),
        optional(positions),
        int(NAME, "the sequence", sequence)?,
        int(NAME, "the number of heads", heads)?,
        int(NAME, "half of the head", half)?,
        Argument::I64(rows),
        float(if inverse { -1.0 } else { 1.0 }),
    ];
    let threads = (heads * half / width).clamp(1, 256) as u32;
    let threads = threads.next_multiple_of(32);
    launch(SOURCE, &format!("rotate<{of_x}, {width}>"), device, (batch * sequence, threads), &arguments)?;
    bump_version(out)
}
