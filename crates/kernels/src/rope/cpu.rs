//! Rotation of heads in one pass over memory: the checks that make the pass sound.

use half::{bf16, f16};
use runtime::tensor_memory::{bump_version, memory_range};
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

mod kernel;

pub(crate) const NAME: &str = "rotary embedding";

/// The input and the output of a rotation: `[b, t, heads, head]` both, of one dtype and any strides except in the last
/// dimension, which is dense. They are the same tensor, or do not overlap.
pub(crate) type Turn<'a> = (&'a Tensor, &'a Tensor);

/// Whether the pass supports this dtype.
pub(crate) fn takes(kind: Kind) -> bool {
    matches!(kind, Kind::Float | Kind::Double | Kind::BFloat16 | Kind::Half)
}

/// Whether the pass can read heads with these strides. An empty tensor counts as contiguous, as in libtorch.
pub(crate) fn reads(tensor: &Tensor) -> bool {
    tensor.numel() == 0
        || tensor.stride().last() == Some(&1) && tensor.stride().iter().all(|stride| *stride >= 0)
}

/// Whether the pass can write heads with these strides: no two elements share an address.
pub(crate) fn writes(tensor: &Tensor) -> bool {
    let mut dimensions: Vec<(i64, i64)> =
        tensor.stride().into_iter().zip(tensor.size()).filter(|(_, size)| *size != 1).collect();
    dimensions.sort_unstable();
    let mut reach = 1;
    let apart = dimensions.into_iter().all(|(stride, size)| {
        let beyond = stride >= reach;
        reach = stride * size;
        beyond
    });
    tensor.numel() == 0 || reads(tensor) && apart
}

/// Rotates all of `turns`, by the negative angles with `inverse`. The token at `[b, t]` has the position `positions[b·T + t]`, or t without
/// `positions`; `table` is `[rows, 2, head / 2]` of fp32, contiguous: the cosines of a position, then its sines.
///
/// All are on the CPU; `turns` share their batch, sequence, head and dtype.
pub(crate) fn rotate(
    table: &Tensor,
    positions: Option<&[i64]>,
    turns: &[Turn<'_>],
    inverse: bool,
) -> Result<()> {
    let invalid = |reason: String| Err(Error::invalid(NAME, reason));
    let &[known, 2, half] = &table.size()[..] else {
        return invalid(format!("the table is {:?}; expected [positions, 2, head / 2]", table.size()));
    };
    if table.kind() != Kind::Float || table.device() != Device::Cpu || !table.is_contiguous() {
        return invalid("the table is not contiguous fp32 on the CPU".to_owned());
    }
    let Some(first) = turns.first().map(|(from, _)| *from) else { return Ok(()) };
    let kind = first.kind();
    let (batch, sequence, _, _) = first.size4()?;
    let mut passes = Vec::with_capacity(turns.len());
    for (from, to) in turns {
        let (b, t, heads, head) = from.size4()?;
        let fits = (b, t, head) == (batch, sequence, 2 * half)
            && to.size() == from.size()
            && [from, to]
                .iter()
                .all(|x| x.kind() == kind && x.device() == Device::Cpu && !x.is_sparse() && !x.is_neg());
        if !fits || !takes(kind) || !reads(from) || !writes(to) {
            return invalid(format!(
                "heads of {:?} {:?} with strides {:?} to {:?} with strides {:?}; expected [{batch}, {sequence}, heads, {}] on \
                 the CPU, dense in the last dimension",
                from.kind(),
                from.size(),
                from.stride(),
                to.size(),
                to.stride(),
                2 * half
            ));
        }
        let (read, written) = (memory_range(from)?, memory_range(to)?);
        let same = from.data_ptr() == to.data_ptr() && from.stride() == to.stride();
        if !same && read.start < written.end && written.start < read.end {
            return invalid("the result overlaps what is rotated; give it memory of its own".to_owned());
        }
        passes.push(kernel::Heads {
            from: from.data_ptr() as usize,
            to: to.data_ptr() as usize,
            from_strides: strides(from),
            to_strides: strides(to),
            heads: heads as usize,
        });
    }
    for (index, (_, to)) in turns.iter().enumerate() {
        let written = memory_range(to)?;
        for (other, (from, to)) in turns.iter().enumerate().filter(|(other, _)| *other != index) {
            for range in [memory_range(from)?, memory_range(to)?] {
                // Interleaved windows of one joint projection are never written.
                if range.start < written.end && written.start < range.end {
                    return invalid(format!(
                        "result {index} overlaps tensor {other} in memory; give it memory of its own"
                    ));
                }
            }
        }
    }
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
    let pass = kernel::Pass {
        table: table.data_ptr() as usize,
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
            Kind::Double => kernel::run::<f64>(pass),
            Kind::BFloat16 => kernel::run::<bf16>(pass),
            Kind::Half => kernel::run::<f16>(pass),
            _ => kernel::run::<f32>(pass),
        }
    }?;
    turns.iter().try_for_each(|(_, to)| bump_version(to))
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
fn strides(tensor: &Tensor) -> [usize; 3] {
    let strides = tensor.stride();
    std::array::from_fn(|dimension| strides[dimension] as usize)
}
