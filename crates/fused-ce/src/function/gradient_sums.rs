//! Gradients as they add up over chunks: those of weights in fp32, the first chunk writing.

use runtime::Result;
use runtime::matmul::mm_into;
use tch::{Device, Kind, Tensor};

use super::chunk::Operands;
use super::{BIAS, Fused, HIDDEN, INPUTS, LOW, LOW_WEIGHT, WEIGHT};
use crate::plan::Plan;
use crate::vocabulary_parallel::Reduce;

/// The gradients of one run, as they add up over chunks.
pub(super) struct Sums {
    pub(super) wanted: [bool; INPUTS],
    by_place: [Option<Tensor>; INPUTS],
    /// Dtype in which gradients for each token are held.
    kind: Kind,
}

impl Sums {
    pub(super) fn new(wanted: [bool; INPUTS], kind: Kind) -> Self {
        Self { wanted, by_place: [const { None }; INPUTS], kind }
    }

    pub(super) fn any(&self) -> bool {
        self.wanted.contains(&true)
    }

    /// The dtype in which [`add`](Self::add) wants ∂L/∂Z: that of the products, unless it is summed besides.
    pub(super) fn kind_of_tile(&self, plan: Plan) -> Kind {
        if self.wanted[BIAS] { plan.tile } else { plan.product }
    }

    /// Adds a chunk, given ∂L/∂Z in `tile`, of [`kind_of_tile`](Self::kind_of_tile).
    pub(super) fn add(
        &mut self,
        of: &Fused,
        operands: &Operands,
        tile: &Tensor,
        start: i64,
        count: i64,
    ) -> Result<()> {
        let (plan, columns, device) = (of.plan, of.sizes.columns, tile.device());
        let first_chunk = start == 0;
        if self.wanted[BIAS] {
            let sum = tile.f_sum_dim_intlist(0, false, plan.tile)?;
            match &mut self.by_place[BIAS] {
                Some(total) => {
                    let _ = total.f_add_(&sum)?;
                }
                empty => *empty = Some(sum),
            }
        }
        let gradient = tile.f_to_kind(plan.product)?;
        for [for_tokens, for_columns] in [[HIDDEN, WEIGHT], [LOW, LOW_WEIGHT]] {
            if !self.wanted[for_tokens] && !self.wanted[for_columns] {
                continue;
            }
            let place = if for_tokens == HIDDEN { WEIGHT } else { LOW_WEIGHT };
            let matrix = operands.by_place[place].as_ref().expect("a wanted gradient is of a given input");
            let rows = if for_tokens == HIDDEN {
                &operands.x
            } else {
                operands.by_place[LOW].as_ref().expect("given with B")
            };
            let width = matrix.size()[1];
            let mut into = match self.wanted[for_tokens] {
                true => Some(self.token_rows(of, for_tokens, width, start, count, device)?),
                false => None,
            };
            if self.wanted[for_columns] && self.by_place[for_columns].is_none() {
                self.by_place[for_columns] = Some(Tensor::f_empty([columns, width], (plan.tile, device))?);
            }
            let rows = match self.wanted[for_columns] {
                true => Some(of.gather(rows, start, count)?.f_to_kind(plan.product)?),
                false => None,
            };
            for (first, wide) in plan.pieces(columns) {
                let piece = gradient.f_narrow(1, first, wide)?;
                if let Some(into) = &mut into {
                    let matrix = matrix.f_narrow(0, first, wide)?.f_to_kind(plan.product)?;
                    mm_into(into, &piece, &matrix, first > 0)?;
                }
                if let (Some(sum), Some(rows)) = (&self.by_place[for_columns], &rows) {
                    mm_into(&mut sum.f_narrow(0, first, wide)?, &piece.f_tr()?, rows, !first_chunk)?;
                }
            }
            if let Some(into) = into {
                self.put_back(of, for_tokens, &into, start, count)?;
            }
        }
        Ok(())
    }

    /// Where a chunk's gradient for each of its tokens is computed: where it stays, if it can.
    pub(super) fn token_rows(
        &mut self,
        of: &Fused,
        place: usize,
        width: i64,
        start: i64,
        count: i64,
        device: Device,
    ) -> Result<Tensor> {
        let tokens = of.sizes.tokens;
        if self.by_place[place].is_none() {
            let options = (self.kind, device);
            self.by_place[place] = Some(match of.rows.index {
                Some(_) => Tensor::f_zeros([tokens, width], options)?,
                None => Tensor::f_empty([tokens, width], options)?,
            });
        }
        let all = self.by_place[place].as_ref().expect("it was just made");
        if of.rows.index.is_none() && self.kind == of.plan.tile {
            return Ok(all.f_narrow(0, start, count)?);
        }
        Ok(Tensor::f_empty([count, width], (of.plan.tile, device))?)
    }

    pub(super) fn put_back(
        &mut self,
        of: &Fused,
        place: usize,
        rows: &Tensor,
        start: i64,
        count: i64,
    ) -> Result<()> {
        let all = self.by_place[place].as_mut().expect("its rows were just computed");
        match &of.rows.index {
            Some(index) => {
                let index = index.f_narrow(0, start, count)?;
                let _ = all.f_index_copy_(0, &index, &rows.f_to_kind(self.kind)?)?;
            }
            None if self.kind == of.plan.tile => {}
            None => all.f_narrow(0, start, count)?.f_copy_(rows)?,
        }
        Ok(())
    }

    /// Zeros for what no chunk touched, sums over the ranks, and weights' gradients in `kind`.
    pub(super) fn finish(
        mut self,
        of: &Fused,
        operands: &Operands,
        kind: Kind,
    ) -> Result<[Option<Tensor>; INPUTS]> {
        let device = operands.x.device();
        for place in 0..INPUTS {
            if !self.wanted[place] {
                continue;
            }
            let sum = self.by_place[place].take();
            let mut sum = match sum {
                Some(sum) => sum,
                None => {
                    let size = match place {
                        HIDDEN => operands.x.size(),
                        _ => operands.by_place[place].as_ref().map(Tensor::size).unwrap_or_default(),
                    };
                    Tensor::f_zeros(size.as_slice(), (self.kind, device))?
                }
            };
            if let (Some(shard), HIDDEN | LOW) = (&of.shard, place) {
                shard.group.all_reduce(&mut sum, Reduce::Sum)?;
            }
            self.by_place[place] = Some(sum.f_to_kind(kind)?);
        }
        Ok(self.by_place)
    }
}
