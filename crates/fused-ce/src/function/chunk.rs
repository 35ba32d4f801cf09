//! One chunk of tokens: operands, products, targets and the weights of its rows.

use kernels::cross_entropy::{Statistics, Targets as TileTargets, Transform, Wanted};
use kernels::low_rank::base_product_into;
use kernels::matmul::mm_into;
use runtime::ops::TryScalar;
use runtime::{Error as RuntimeError, Result};
use tch::{Device, Kind, Tensor};

use super::{ADAPTER_B, BIAS, Fused, HIDDEN, INPUTS, LOW_RANK, REPLACED_ROWS, WEIGHT};
use crate::inputs::Sizes;
use crate::options::{EmptyMean, Gradients, LogSumExp, Reduction};
use crate::token_loss::TargetMass;
use crate::vocabulary_parallel::ReduceOp;

/// The inputs of one run: x as a matrix, the others by slot.
pub(super) struct Operands {
    pub(super) x: Tensor,
    pub(super) by_slot: [Option<Tensor>; INPUTS],
}

impl Operands {
    pub(super) fn weight(&self) -> &Tensor {
        self.by_slot[WEIGHT].as_ref().expect("the weight is always given")
    }
}

impl Fused {
    /// Returns whether the `wanted` gradients need the upstream gradient, so that backward computes them.
    pub(super) fn needs_upstream(&self, wanted: [bool; INPUTS]) -> bool {
        let sum_over_tokens = [WEIGHT, BIAS, ADAPTER_B, REPLACED_ROWS];
        self.options.reduction == Reduction::None && sum_over_tokens.iter().any(|slot| wanted[*slot])
            || self.options.log_sum_exp == LogSumExp::Differentiable
            || self.options.gradients == Gradients::Backward
    }

    pub(super) fn operands(&self, inputs: &[&Tensor]) -> Result<Operands> {
        let mut inputs = inputs.iter();
        let mut by_slot = [const { None }; INPUTS];
        for (slot, given) in self.given.into_iter().enumerate() {
            if given {
                by_slot[slot] = inputs.next().map(|tensor| tensor.shallow_clone());
            }
        }
        let x = by_slot[HIDDEN].take().expect("the hidden states are always given");
        let x = x.f_reshape([self.sizes.tokens, self.sizes.hidden])?;
        Ok(Operands { x, by_slot })
    }

    /// Returns the index of a slot among the given inputs.
    pub(super) fn index_of(&self, slot: usize) -> Option<usize> {
        self.given[slot].then(|| self.given[..slot].iter().filter(|given| **given).count())
    }

    pub(super) fn options_of(&self, device: Device) -> (Kind, Device) {
        (self.plan.compute, device)
    }

    /// Gathers rows of x, or of another per-token tensor. Rows of ignored tokens are zeros: they may hold infinities, and 0·∞
    /// is not 0.
    pub(super) fn gather(&self, tensor: &Tensor, start: i64, count: i64) -> Result<Tensor> {
        let rows = match &self.rows.index {
            Some(index) => tensor.f_index_select(0, &index.f_narrow(0, start, count)?)?,
            None => tensor.f_narrow(0, start, count)?,
        };
        let Some(labelled) = &self.rows.labelled else { return Ok(rows) };
        let mut shape = vec![1; tensor.dim()];
        shape[0] = count;
        let labelled = labelled.f_narrow(0, start, count)?.try_ne(0.0)?.f_reshape(shape.as_slice())?;
        Ok(rows.f_where_self(&labelled, &Tensor::f_zeros([], (rows.kind(), rows.device()))?)?)
    }

    /// Returns the class weights of this shard of the vocabulary.
    pub(super) fn shard_class_weights(&self) -> Result<Option<Tensor>> {
        let Sizes { first, columns, .. } = self.sizes;
        let weights = self.class_weights.as_ref();
        Ok(weights.map(|weights| weights.f_narrow(0, first, columns)?.f_contiguous()).transpose()?)
    }

    /// Returns the bias in the dtype of the statistics.
    pub(super) fn bias(&self, operands: &Operands) -> Result<Option<Tensor>> {
        let bias = operands.by_slot[BIAS].as_ref();
        Ok(bias.map(|bias| bias.f_to_kind(self.plan.compute)?.f_contiguous()).transpose()?)
    }

    pub(super) fn transform<'a>(&self, bias: Option<&'a Tensor>) -> Transform<'a> {
        Transform { bias, scale: self.options.scale, softcap: self.options.softcap }
    }

    /// Writes X·Wᵀ (+ scale·X·Aᵀ·Bᵀ), and X·Rᵀ in the columns of replaced rows, of a chunk into `tile`; `x` are the chunk's rows of X.
    pub(super) fn products(
        &self,
        operands: &Operands,
        x: &Tensor,
        tile: &mut Tensor,
        start: i64,
        count: i64,
    ) -> Result<()> {
        base_product_into(tile, x, operands.weight(), false)?;
        if let (Some(low_rank), Some(b)) = (&operands.by_slot[LOW_RANK], &operands.by_slot[ADAPTER_B]) {
            mm_into(tile, &self.gather(low_rank, start, count)?, &b.f_tr()?, true)?;
        }
        if let (Some(classes), Some(rows)) = (&self.replaced_classes, &operands.by_slot[REPLACED_ROWS]) {
            let mut columns = Tensor::f_empty([count, rows.size()[0]], (tile.kind(), tile.device()))?;
            base_product_into(&mut columns, x, rows, false)?;
            let _ = tile.f_index_copy_(1, classes, &columns)?;
        }
        Ok(())
    }

    /// Returns the targets of a chunk: columns relative to this shard of the vocabulary, or distributions.
    pub(super) fn tile_targets(&self, start: i64, count: i64) -> Result<Tensor> {
        match (&self.rows.classes, &self.distributions) {
            (Some(classes), _) => {
                let classes = classes.f_narrow(0, start, count)?;
                Ok(if self.sizes.first == 0 { classes } else { classes.try_sub_scalar(self.sizes.first)? })
            }
            (None, Some(distributions)) => Ok(distributions.f_narrow(0, start, count)?),
            (None, None) => Err(RuntimeError::invalid("linear cross-entropy", "there are no targets")),
        }
    }

    pub(super) fn as_targets<'a>(&self, tensor: &'a Tensor) -> TileTargets<'a> {
        if self.rows.classes.is_some() { TileTargets::Columns(tensor) } else { TileTargets::Dense(tensor) }
    }

    /// Returns w_y, or the mass of the distributions.
    pub(super) fn mass(
        &self,
        start: i64,
        count: i64,
        statistics_mass: Option<&Tensor>,
    ) -> Result<TargetMass> {
        match (&self.rows.classes, &self.class_weights) {
            (Some(classes), Some(weights)) => {
                let mass = weights.f_index_select(0, &classes.f_narrow(0, start, count)?)?;
                Ok(TargetMass { mass: Some(mass), weighted: false })
            }
            (Some(_), None) => Ok(TargetMass::default()),
            (None, _) => Ok(TargetMass { mass: statistics_mass.map(Tensor::shallow_clone), weighted: true }),
        }
    }

    /// Returns the factor of the loss of each row, `[count]`: the token weight, 0 for ignored tokens. `None` means 1.
    pub(super) fn factors(&self) -> Result<Option<Tensor>> {
        let weights = match &self.token_weights {
            Some(weights) => Some(self.gather(weights, 0, self.rows.count)?),
            None => None,
        };
        Ok(match (weights, &self.rows.labelled) {
            (Some(weights), Some(labelled)) => Some(weights.f_mul(labelled)?),
            (Some(weights), None) => Some(weights),
            (None, labelled) => labelled.as_ref().map(Tensor::shallow_clone),
        })
    }

    /// Returns the denominator of a mean: one element.
    pub(super) fn divisor(&self, factors: Option<&Tensor>, device: Device) -> Result<Option<Tensor>> {
        if self.options.reduction != Reduction::Mean {
            return Ok(None);
        }
        let kind = self.plan.compute;
        let (divisor, counted) = match &self.denominator {
            Some(given) => {
                let given = given.f_to_kind(kind)?.f_reshape([0i64; 0])?;
                let counted = given.try_ne(0.0)?;
                (given, counted)
            }
            None => {
                let mass = match &self.rows.classes {
                    Some(_) => self.mass(0, self.rows.count, None)?.mass,
                    None => None,
                };
                let weights = match (factors, mass) {
                    (Some(factors), Some(mass)) => Some(factors.f_mul(&mass)?),
                    (Some(factors), None) => Some(factors.shallow_clone()),
                    (None, mass) => mass,
                };
                match weights {
                    Some(weights) => (weights.f_sum(kind)?, weights.try_ne(0.0)?.f_any()?),
                    None => {
                        let count = Tensor::try_full([0i64; 0], self.rows.count as f64, (kind, device))?;
                        let counted = count.try_ne(0.0)?;
                        (count, counted)
                    }
                }
            }
        };
        // The mean of nothing is 0, unless the options ask for NaN. Weights that cancel out are something.
        Ok(Some(match self.options.empty_mean {
            EmptyMean::Nan => divisor,
            EmptyMean::Zero => divisor.f_where_self(&counted, &divisor.f_ones_like()?)?,
        }))
    }

    /// Reduces the statistics of a chunk over all shards of the vocabulary.
    pub(super) fn all_reduce(&self, row: &mut Statistics) -> Result<()> {
        let Some(shard) = &self.shard else { return Ok(()) };
        let local_maximum = row.maximum.f_detach_copy()?;
        shard.group.all_reduce(&mut row.maximum, ReduceOp::Max)?;
        if let Some(best) = &mut row.best {
            // The lowest class with the largest logit is the maximum of −class over the shards that have it.
            let classes = best.f_neg()?;
            let absent = Tensor::try_full([0i64; 0], -self.sizes.vocabulary, (Kind::Int64, best.device()))?;
            let mut candidate = classes.f_where_self(&local_maximum.f_eq_tensor(&row.maximum)?, &absent)?;
            shard.group.all_reduce(&mut candidate, ReduceOp::Max)?;
            best.f_copy_(&candidate.f_neg()?)?;
        }
        let rescale = local_maximum.f_sub(&row.maximum)?.f_exp()?;
        let _ = row.sum.f_mul_(&rescale)?;
        if let Some(moment) = &mut row.moment {
            let _ = moment.f_mul_(&rescale)?;
        }
        let mut sums: Vec<&mut Tensor> = vec![&mut row.sum, &mut row.target];
        sums.extend([&mut row.mass, &mut row.total, &mut row.moment].into_iter().flatten());
        let mut stacked = Tensor::f_stack(&sums, 0)?;
        shard.group.all_reduce(&mut stacked, ReduceOp::Sum)?;
        for (index, sum) in sums.into_iter().enumerate() {
            sum.f_copy_(&stacked.f_select(0, index as i64)?)?;
        }
        Ok(())
    }

    pub(super) fn wanted(&self) -> Wanted {
        let options = &self.options;
        Wanted { total: options.label_smoothing > 0.0, moment: options.entropy, best: options.predictions }
    }

    /// Scatters one number per row to the positions of its token, in the shape of the targets; ignored tokens get `absent`.
    pub(super) fn scatter(&self, rows: &Tensor, absent: f64) -> Result<Tensor> {
        let options = (rows.kind(), rows.device());
        // Rows of ignored tokens that were computed get `absent` too.
        let rows = match &self.rows.labelled {
            Some(labelled) => {
                rows.f_where_self(&labelled.try_ne(0.0)?, &Tensor::try_full([0i64; 0], absent, options)?)?
            }
            None => rows.shallow_clone(),
        };
        let all = match &self.rows.index {
            Some(index) => {
                Tensor::try_full([self.sizes.tokens], absent, options)?.f_index_copy(0, index, &rows)?
            }
            None => rows,
        };
        Ok(all.f_reshape(self.targets_shape.as_slice())?)
    }
}
