//! One chunk of tokens: its operands, products, targets, and what its rows count for.

use runtime::fused::cross_entropy::{Statistics, Targets as TileTargets, Transform, Wanted};
use runtime::matmul::mm_into;
use runtime::{Error as RuntimeError, Result};
use tch::{Device, Kind, Tensor};

use super::{BIAS, Fused, HIDDEN, INPUTS, LOW, LOW_WEIGHT, WEIGHT};
use crate::inputs::Sizes;
use crate::options::{Empty, Gradients, LogSumExp, Reduction};
use crate::token_loss::TargetMass;
use crate::vocabulary_parallel::Reduce;

/// Inputs of one run, in a known place.
pub(super) struct Operands {
    pub(super) x: Tensor,
    pub(super) by_place: [Option<Tensor>; INPUTS],
}

impl Operands {
    pub(super) fn weight(&self) -> &Tensor {
        self.by_place[WEIGHT].as_ref().expect("the weight is always given")
    }
}

impl Fused {
    /// Whether the upstream gradient must be known before the gradients are.
    pub(super) fn waits_for_upstream(&self) -> bool {
        self.options.reduction == Reduction::None
            || self.options.log_sum_exp == LogSumExp::Differentiable
            || self.options.gradients == Gradients::Backward
    }

    pub(super) fn operands(&self, inputs: &[&Tensor]) -> Result<Operands> {
        let mut inputs = inputs.iter();
        let mut by_place = [const { None }; INPUTS];
        for (place, given) in self.given.into_iter().enumerate() {
            if given {
                by_place[place] = inputs.next().map(|tensor| tensor.shallow_clone());
            }
        }
        let x = by_place[HIDDEN].take().expect("the hidden states are always given");
        let x = x.f_reshape([self.sizes.tokens, self.sizes.hidden])?;
        Ok(Operands { x, by_place })
    }

    /// Index among the given inputs of each place.
    pub(super) fn index_of(&self, place: usize) -> Option<usize> {
        self.given[place].then(|| self.given[..place].iter().filter(|given| **given).count())
    }

    pub(super) fn options_of(&self, device: Device) -> (Kind, Device) {
        (self.plan.tile, device)
    }

    /// Rows of x, or of another tensor with one for each token. Of those without a label: zeros, since what they hold may be
    /// infinite, and 0·∞ is not 0.
    pub(super) fn gather(&self, tensor: &Tensor, start: i64, count: i64) -> Result<Tensor> {
        let rows = match &self.rows.index {
            Some(index) => tensor.f_index_select(0, &index.f_narrow(0, start, count)?)?,
            None => tensor.f_narrow(0, start, count)?,
        };
        let Some(labelled) = &self.rows.labelled else { return Ok(rows) };
        let mut shape = vec![1; tensor.dim()];
        shape[0] = count;
        let labelled = labelled.f_narrow(0, start, count)?.f_ne(0.0)?.f_reshape(shape.as_slice())?;
        Ok(rows.f_where_self(&labelled, &Tensor::f_zeros([], (rows.kind(), rows.device()))?)?)
    }

    pub(super) fn class_weights_here(&self) -> Result<Option<Tensor>> {
        let Sizes { first, columns, .. } = self.sizes;
        let weights = self.class_weights.as_ref();
        Ok(weights.map(|weights| weights.f_narrow(0, first, columns)?.f_contiguous()).transpose()?)
    }

    /// Bias in the tile's dtype.
    pub(super) fn bias(&self, operands: &Operands) -> Result<Option<Tensor>> {
        let bias = operands.by_place[BIAS].as_ref();
        Ok(bias.map(|bias| bias.f_to_kind(self.plan.tile)?.f_contiguous()).transpose()?)
    }

    pub(super) fn transform<'a>(&self, bias: Option<&'a Tensor>) -> Transform<'a> {
        Transform { bias, scale: self.options.scale, softcap: self.options.softcap }
    }

    /// X·Wᵀ (+ H·Bᵀ) of a chunk.
    pub(super) fn products(
        &self,
        operands: &Operands,
        tile: &mut Tensor,
        start: i64,
        count: i64,
    ) -> Result<()> {
        let product = self.plan.product;
        let x = self.gather(&operands.x, start, count)?.f_to_kind(product)?;
        let low = operands.by_place[LOW].as_ref();
        let low = low
            .map(|low| Ok::<_, RuntimeError>(self.gather(low, start, count)?.f_to_kind(product)?))
            .transpose()?;
        for (first, width) in self.plan.pieces(self.sizes.columns) {
            let mut piece = tile.f_narrow(1, first, width)?;
            let weight = operands.weight().f_narrow(0, first, width)?.f_to_kind(product)?;
            mm_into(&mut piece, &x, &weight.f_tr()?, false)?;
            if let (Some(low), Some(b)) = (&low, &operands.by_place[LOW_WEIGHT]) {
                let b = b.f_narrow(0, first, width)?.f_to_kind(product)?;
                mm_into(&mut piece, low, &b.f_tr()?, true)?;
            }
        }
        Ok(())
    }

    /// The target columns of a chunk, as columns of this slice of the vocabulary; or its distributions.
    pub(super) fn tile_targets(&self, start: i64, count: i64) -> Result<Tensor> {
        match (&self.rows.classes, &self.distributions) {
            (Some(classes), _) => {
                let classes = classes.f_narrow(0, start, count)?;
                Ok(if self.sizes.first == 0 { classes } else { classes.f_sub_scalar(self.sizes.first)? })
            }
            (None, Some(distributions)) => Ok(distributions.f_narrow(0, start, count)?),
            (None, None) => Err(RuntimeError::invalid("linear cross-entropy", "there are no targets")),
        }
    }

    pub(super) fn as_targets<'a>(&self, tensor: &'a Tensor) -> TileTargets<'a> {
        if self.rows.classes.is_some() { TileTargets::Columns(tensor) } else { TileTargets::Dense(tensor) }
    }

    /// w_y, or the mass of the distributions.
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

    /// The factor of each row's loss, `[count]`: its token's weight, and 0 where it has no label. `None` for 1.
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

    /// What a mean divides by: one element.
    pub(super) fn divisor(&self, factors: Option<&Tensor>, device: Device) -> Result<Option<Tensor>> {
        if self.options.reduction != Reduction::Mean {
            return Ok(None);
        }
        let kind = self.plan.tile;
        let divisor = match &self.denominator {
            Some(given) => given.f_to_kind(kind)?.f_reshape([0i64; 0])?,
            None => {
                let mass = match &self.rows.classes {
                    Some(_) => self.mass(0, self.rows.count, None)?.mass,
                    None => None,
                };
                match (factors, mass) {
                    (Some(factors), Some(mass)) => factors.f_mul(&mass)?.f_sum(kind)?,
                    (Some(factors), None) => factors.f_sum(kind)?,
                    (None, Some(mass)) => mass.f_sum(kind)?,
                    (None, None) => Tensor::f_full([0i64; 0], self.rows.count as f64, (kind, device))?,
                }
            }
        };
        // Nothing over nothing is 0, unless NaN is wanted.
        Ok(Some(match self.options.empty {
            Empty::Nan => divisor,
            Empty::Zero => divisor.f_where_self(&divisor.f_ne(0.0)?, &divisor.f_ones_like()?)?,
        }))
    }

    /// Makes a chunk's statistics those of all slices of the vocabulary.
    pub(super) fn reduce(&self, known: &mut Statistics) -> Result<()> {
        let Some(shard) = &self.shard else { return Ok(()) };
        let own = known.maximum.f_detach_copy()?;
        shard.group.all_reduce(&mut known.maximum, Reduce::Maximum)?;
        if let Some(best) = &mut known.best {
            // The first class that has the largest logit: −class where this slice has it.
            let classes = best.f_neg()?;
            let absent = Tensor::f_full([0i64; 0], -self.sizes.vocabulary, (Kind::Int64, best.device()))?;
            let mut candidate = classes.f_where_self(&own.f_eq_tensor(&known.maximum)?, &absent)?;
            shard.group.all_reduce(&mut candidate, Reduce::Maximum)?;
            best.f_copy_(&candidate.f_neg()?)?;
        }
        let shrink = own.f_sub(&known.maximum)?.f_exp()?;
        let _ = known.sum.f_mul_(&shrink)?;
        if let Some(moment) = &mut known.moment {
            let _ = moment.f_mul_(&shrink)?;
        }
        let mut sums: Vec<&mut Tensor> = vec![&mut known.sum, &mut known.target];
        sums.extend([&mut known.mass, &mut known.total, &mut known.moment].into_iter().flatten());
        let mut together = Tensor::f_stack(&sums, 0)?;
        shard.group.all_reduce(&mut together, Reduce::Sum)?;
        for (index, sum) in sums.into_iter().enumerate() {
            sum.f_copy_(&together.f_select(0, index as i64)?)?;
        }
        Ok(())
    }

    pub(super) fn wanted(&self) -> Wanted {
        let options = &self.options;
        Wanted { total: options.label_smoothing > 0.0, moment: options.entropy, best: options.predictions }
    }

    /// Puts one number for each row at its token's place, `absent` elsewhere, in the targets' shape.
    pub(super) fn at_places(&self, rows: &Tensor, absent: f64) -> Result<Tensor> {
        let all = match &self.rows.index {
            Some(index) => {
                let all = Tensor::f_full([self.sizes.tokens], absent, (rows.kind(), rows.device()))?;
                // Rows that take part without a label are as absent as those that do not.
                let rows = match &self.rows.labelled {
                    Some(labelled) => rows.f_where_self(
                        &labelled.f_ne(0.0)?,
                        &Tensor::f_full([0i64; 0], absent, (rows.kind(), rows.device()))?,
                    )?,
                    None => rows.shallow_clone(),
                };
                all.f_index_copy(0, index, &rows)?
            }
            None => rows.shallow_clone(),
        };
        Ok(all.f_reshape(self.targets_shape.as_slice())?)
    }
}
