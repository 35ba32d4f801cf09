//! Slices of a large 16-bit parameter: an update that copies it in fp32 copies a slice at a time.
//!
//! The embedding of Qwen2.5-0.5B has 136 million elements: copies of its values and of its gradient would take 1.1 GB beside a model of
//! 1 GB. A rule that updates each element by itself, or each block of elements, gives a slice the bits of the whole.

use kernels::stochastic_rounding::Stream;
use runtime::tensor_layout::TensorLayout;
use tch::Tensor;

use super::Part;
use crate::error::Result;
use crate::optimizer::rule::{Extent, Rule};

/// Bytes of the copies of a slice.
pub(super) const BYTES: u64 = 32 << 20;

/// Slices start at multiples of this many elements, so that vectorized kernels treat an element as in the whole.
const UNIT: i64 = 1 << 16;

/// A [`Part`] that has its tensors.
#[derive(Debug)]
pub(super) struct Slice {
    values: Tensor,
    grad: Tensor,
    master: Option<Tensor>,
    slots: Vec<Tensor>,
    step: Option<Tensor>,
    stream: Option<Stream>,
}

impl Slice {
    pub(super) fn part(&self) -> Result<Part<'_>> {
        Ok(Part {
            values: &self.values,
            layout: TensorLayout::of(&self.values)?,
            grad: &self.grad,
            layout_of_grad: TensorLayout::of(&self.grad)?,
            master: self.master.as_ref(),
            slots: self.slots.iter().collect(),
            step: self.step.as_ref(),
            stream: self.stream,
        })
    }
}

/// Returns the slices of a parameter of `whole` elements, or of a part of one; `None` if its update takes less memory, or cannot be divided.
pub(super) fn of(part: &Part<'_>, rule: &dyn Rule, whole: i64) -> Result<Option<Vec<Slice>>> {
    let elements = part.layout.numel() as i64;
    let bytes = part.copies() * super::work_kind(part.layout.kind()).elt_size_in_bytes() as u64;
    let divides = |granularity| UNIT % granularity == 0;
    if bytes * elements.unsigned_abs() <= BYTES || !rule.granularity().is_some_and(divides) {
        return Ok(None);
    }
    if !part.layout.is_contiguous() || !part.layout_of_grad.is_contiguous() {
        return Ok(None);
    }
    let shape = part.values.size();
    let extent = Extent { shape: &shape, whole };
    let length = ((BYTES / bytes) as i64 / UNIT * UNIT).max(UNIT);
    let per_value: Vec<i64> = rule.slots(extent).iter().map(|slot| slot.elements_per_value).collect();
    let mut slices = Vec::new();
    for from in (0..elements).step_by(length as usize) {
        let count = length.min(elements - from);
        let flat = |tensor: &Tensor, per_value: i64| {
            let tensor = tensor.f_detach()?.f_view([-1])?;
            tensor.f_narrow(0, from / per_value, (count + per_value - 1) / per_value)
        };
        let slots = part.slots.iter().zip(&per_value);
        let is_last = from + count == elements;
        slices.push(Slice {
            values: flat(part.values, 1)?,
            grad: flat(part.grad, 1)?,
            master: part.master.map(|master| flat(master, 1)).transpose()?,
            slots: slots.map(|(slot, per_value)| flat(slot, *per_value)).collect::<Result<_, _>>()?,
            // The kernel increments it: the last slice's is that of the parameter.
            step: match part.step {
                Some(step) if !is_last => Some(step.f_detach_copy()?),
                own => own.map(Tensor::shallow_clone),
            },
            stream: part.stream.map(|stream| stream.from_element(stream.first() + from.unsigned_abs())),
        });
    }
    Ok(Some(slices))
}
