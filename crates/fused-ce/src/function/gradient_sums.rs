//! Accumulation of gradients over chunks: weight gradients in fp32, overwritten by the first chunk, or on a GPU in their own dtype if it is
//! the only one.

use kernels::matmul::mm_into;
use kernels::quantized::{is_quantized, matrix_shape, mm_transposed_into};
use runtime::Result;
use tch::{Device, Kind, Tensor};

use super::chunk::Operands;
use super::{ADAPTER_B, BIAS, Fused, HIDDEN, INPUTS, LOW_RANK, REPLACED_ROWS, WEIGHT};
use crate::chunk_plan::{ChunkPlan, WHOLE};
use crate::vocabulary_parallel::ReduceOp;

/// The gradients of one run, accumulated over chunks.
pub(super) struct GradientSums {
    pub(super) wanted: [bool; INPUTS],
    by_slot: [Option<Tensor>; INPUTS],
    /// Dtype of the gradients, per-token gradients included.
    kind: Kind,
    /// Whether one chunk has all rows.
    is_one_chunk: bool,
}

impl GradientSums {
    pub(super) fn new(wanted: [bool; INPUTS], kind: Kind, is_one_chunk: bool) -> Self {
        Self { wanted, by_slot: [const { None }; INPUTS], kind, is_one_chunk }
    }

    pub(super) fn any(&self) -> bool {
        self.wanted.contains(&true)
    }

    /// Returns the dtype of ∂L/∂Z that [`add`](Self::add) needs: that of an operand, or that of the logits to sum the gradient of the bias
    /// before it is rounded.
    pub(super) fn tile_kind(&self, plan: ChunkPlan) -> Kind {
        if self.wanted[BIAS] { plan.logits } else { plan.gradient }
    }

    /// Adds the gradients of a chunk, with its rows of X in `x`, freed before rows of its gradient are made, and its ∂L/∂Z in `tile`, of dtype
    /// [`tile_kind`](Self::tile_kind).
    pub(super) fn add(
        &mut self,
        of: &Fused,
        operands: &Operands,
        x: Tensor,
        tile: &Tensor,
        start: i64,
        count: i64,
    ) -> Result<()> {
        let (plan, columns, device) = (of.plan, of.sizes.columns, tile.device());
        let first_chunk = start == 0;
        if self.wanted[BIAS] {
            let sum = tile.f_sum_dim_intlist(0, false, plan.compute)?;
            match &mut self.by_slot[BIAS] {
                Some(total) => {
                    let _ = total.f_add_(&sum)?;
                }
                empty => *empty = Some(sum),
            }
        }
        // Products on the CPU take an operand in fp32 beside one in another dtype.
        let gradient =
            if device == Device::Cpu { tile.shallow_clone() } else { tile.f_to_kind(plan.gradient)? };
        let of_replaced = self.take_replaced(of, &gradient, &x, first_chunk)?;
        let mut x = Some(x);
        for [for_tokens, for_columns] in [[HIDDEN, WEIGHT], [LOW_RANK, ADAPTER_B]] {
            if !self.wanted[for_tokens] && !self.wanted[for_columns] {
                continue;
            }
            let matrix = operands.by_slot[for_columns].as_ref().expect("a wanted gradient has a given input");
            let [_, width] = matrix_shape(matrix).unwrap_or_default();
            let x = x.take().filter(|_| for_tokens == HIDDEN);
            if self.wanted[for_columns] {
                let rows = match x {
                    Some(x) => x,
                    None => {
                        let all = operands.by_slot[LOW_RANK].as_ref().expect("given with B");
                        of.gather(all, start, count)?
                    }
                };
                let rounds = self.is_one_chunk && device != Device::Cpu && columns * width >= WHOLE;
                let kind = if rounds { self.kind } else { plan.compute };
                let sum = match &mut self.by_slot[for_columns] {
                    Some(sum) => sum,
                    empty => empty.insert(Tensor::f_empty([columns, width], (kind, device))?),
                };
                mm_into(sum, &gradient.f_tr()?, &rows, !first_chunk)?;
            } else {
                drop(x);
            }
            if self.wanted[for_tokens] {
                let mut into = self.token_rows(of, for_tokens, width, start, count, device)?;
                match is_quantized(matrix) {
                    true => mm_transposed_into(&mut into, &gradient, matrix, false)?,
                    false => mm_into(&mut into, &gradient, matrix, false)?,
                }
                if let (HIDDEN, Some(part)) = (for_tokens, &of_replaced) {
                    let rows = operands.by_slot[REPLACED_ROWS].as_ref().expect("given with their classes");
                    mm_into(&mut into, part, rows, true)?;
                }
                self.store_token_rows(of, for_tokens, &into, start, count)?;
            }
        }
        Ok(())
    }

    /// Takes the columns of replaced rows out of ∂L/∂Z, where the weight's own get zeros, and adds to the rows' gradient.
    fn take_replaced(
        &mut self,
        of: &Fused,
        gradient: &Tensor,
        x: &Tensor,
        first_chunk: bool,
    ) -> Result<Option<Tensor>> {
        let Some(classes) = &of.replaced_classes else { return Ok(None) };
        let part = gradient.f_index_select(1, classes)?;
        let _ = gradient.shallow_clone().f_index_fill_(1, classes, 0.0)?;
        if self.wanted[REPLACED_ROWS] {
            let size = [classes.size()[0], of.sizes.hidden];
            let sum = match &mut self.by_slot[REPLACED_ROWS] {
                Some(sum) => sum,
                empty => empty.insert(Tensor::f_empty(size, (of.plan.compute, gradient.device()))?),
            };
            mm_into(sum, &part.f_tr()?, x, !first_chunk)?;
        }
        Ok(Some(part))
    }

    /// Returns the buffer for the per-token gradient of a chunk: a view of the result if the layout and dtype allow it.
    pub(super) fn token_rows(
        &mut self,
        of: &Fused,
        slot: usize,
        width: i64,
        start: i64,
        count: i64,
        device: Device,
    ) -> Result<Tensor> {
        let tokens = of.sizes.tokens;
        if self.by_slot[slot].is_none() {
            let options = (self.kind, device);
            self.by_slot[slot] = Some(match of.rows.index {
                Some(_) => Tensor::f_zeros([tokens, width], options)?,
                None => Tensor::f_empty([tokens, width], options)?,
            });
        }
        let all = self.by_slot[slot].as_ref().expect("it was just made");
        if of.rows.index.is_none() && self.kind == of.plan.compute {
            return Ok(all.f_narrow(0, start, count)?);
        }
        Ok(Tensor::f_empty([count, width], (of.plan.compute, device))?)
    }

    /// Copies the per-token gradient of a chunk into the result, unless [`token_rows`](Self::token_rows) was a view of it.
    pub(super) fn store_token_rows(
        &mut self,
        of: &Fused,
        slot: usize,
        rows: &Tensor,
        start: i64,
        count: i64,
    ) -> Result<()> {
        let all = self.by_slot[slot].as_mut().expect("its rows were just computed");
        match &of.rows.index {
            Some(index) => {
                let index = index.f_narrow(0, start, count)?;
                let _ = all.f_index_copy_(0, &index, &rows.f_to_kind(self.kind)?)?;
            }
            None if self.kind == of.plan.compute => {}
            None => all.f_narrow(0, start, count)?.f_copy_(rows)?,
        }
        Ok(())
    }

    /// Returns the gradients in `kind`, summed over the ranks; zeros if there was no chunk.
    pub(super) fn finish(
        mut self,
        of: &Fused,
        operands: &Operands,
        kind: Kind,
    ) -> Result<[Option<Tensor>; INPUTS]> {
        let device = operands.x.device();
        for slot in 0..INPUTS {
            if !self.wanted[slot] {
                continue;
            }
            let sum = self.by_slot[slot].take();
            let mut sum = match sum {
                Some(sum) => sum,
                None => {
                    let size = match slot {
                        HIDDEN => operands.x.size(),
                        _ => operands.by_slot[slot].as_ref().map(Tensor::size).unwrap_or_default(),
                    };
                    Tensor::f_zeros(size.as_slice(), (self.kind, device))?
                }
            };
            if let (Some(shard), HIDDEN | LOW_RANK) = (&of.shard, slot) {
                shard.group.all_reduce(&mut sum, ReduceOp::Sum)?;
            }
            self.by_slot[slot] = Some(sum.f_to_kind(kind)?);
        }
        Ok(self.by_slot)
    }
}
