//! The projection and the loss as one function of the graph.
//!
//! For each chunk of c tokens: Z = X·Wᵀ `[c, v]` into one buffer that all chunks share; its statistics; Z ← ∂L/∂Z where it lies;
//! dX = ∂Z·W, and dW += ∂Zᵀ·X, which the first chunk writes. Between the passes the function holds dX and dW, or, where the
//! upstream gradient is needed first, two numbers for each token.

use runtime::autograd::{Backward, Forward, Function};
use runtime::fused::cross_entropy::{
    Coefficients, LogitsPass, Statistics, Targets as TileTargets, Transform, Wanted,
};
use runtime::matmul::mm_into;
use runtime::{Error as RuntimeError, Result};
use std::sync::Arc;
use tch::{Device, Kind, Tensor};

use crate::inputs::Sizes;
use crate::options::{Empty, Gradients, LinearCrossEntropy, LogSumExp, Reduction};
use crate::plan::Plan;
use crate::rows::Rows;
use crate::token_loss::{Formula, TargetMass};
use crate::vocabulary_parallel::{Reduce, Shard};

/// Places of the differentiable inputs.
const HIDDEN: usize = 0;
const WEIGHT: usize = 1;
const BIAS: usize = 2;
const LOW: usize = 3;
const LOW_WEIGHT: usize = 4;
const INPUTS: usize = 5;

/// The function's inputs, by place; what is absent is an undefined tensor.
pub(crate) type Differentiable<'a> = [Option<&'a Tensor>; INPUTS];

pub(crate) struct Fused {
    pub(crate) options: LinearCrossEntropy,
    pub(crate) sizes: Sizes,
    pub(crate) plan: Plan,
    pub(crate) pass: &'static dyn LogitsPass,
    pub(crate) rows: Rows,
    /// `[n, v]`, where distributions are given.
    pub(crate) distributions: Option<Tensor>,
    /// `[n]`, of all tokens.
    pub(crate) token_weights: Option<Tensor>,
    /// `[v]`, of all classes.
    pub(crate) class_weights: Option<Tensor>,
    /// A number of one element, where the caller gave one.
    pub(crate) denominator: Option<Tensor>,
    pub(crate) shard: Option<Arc<Shard>>,
    pub(crate) targets_shape: Vec<i64>,
    pub(crate) hidden_shape: Vec<i64>,
    /// Which inputs there are.
    pub(crate) given: [bool; INPUTS],
    pub(crate) state: State,
}

/// What forward leaves for backward besides saved tensors.
#[derive(Default)]
pub(crate) struct State {
    /// Which gradients were computed in forward.
    computed: [bool; INPUTS],
    kind: Option<Kind>,
}

/// Inputs of one run, in a known place.
struct Operands {
    x: Tensor,
    by_place: [Option<Tensor>; INPUTS],
}

impl Operands {
    fn weight(&self) -> &Tensor {
        self.by_place[WEIGHT].as_ref().expect("the weight is always given")
    }
}

impl Fused {
    /// Whether the upstream gradient must be known before the gradients are.
    fn waits_for_upstream(&self) -> bool {
        self.options.reduction == Reduction::None
            || self.options.log_sum_exp == LogSumExp::Differentiable
            || self.options.gradients == Gradients::Backward
    }

    fn operands(&self, inputs: &[&Tensor]) -> Result<Operands> {
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
    fn index_of(&self, place: usize) -> Option<usize> {
        self.given[place].then(|| self.given[..place].iter().filter(|given| **given).count())
    }

    fn options_of(&self, device: Device) -> (Kind, Device) {
        (self.plan.tile, device)
    }

    /// Rows of x, or of another tensor with one for each token, in the dtype of the products.
    fn gather(&self, tensor: &Tensor, start: i64, count: i64) -> Result<Tensor> {
        let rows = match &self.rows.index {
            Some(index) => tensor.f_index_select(0, &index.f_narrow(0, start, count)?)?,
            None => tensor.f_narrow(0, start, count)?,
        };
        Ok(rows)
    }

    fn class_weights_here(&self) -> Result<Option<Tensor>> {
        let Sizes { first, columns, .. } = self.sizes;
        let weights = self.class_weights.as_ref();
        Ok(weights.map(|weights| weights.f_narrow(0, first, columns)?.f_contiguous()).transpose()?)
    }

    /// Bias in the tile's dtype.
    fn bias(&self, operands: &Operands) -> Result<Option<Tensor>> {
        let bias = operands.by_place[BIAS].as_ref();
        Ok(bias.map(|bias| bias.f_to_kind(self.plan.tile)?.f_contiguous()).transpose()?)
    }

    fn transform<'a>(&self, bias: Option<&'a Tensor>) -> Transform<'a> {
        Transform { bias, scale: self.options.scale, softcap: self.options.softcap }
    }

    /// X·Wᵀ (+ H·Bᵀ) of a chunk.
    fn products(&self, operands: &Operands, tile: &mut Tensor, start: i64, count: i64) -> Result<()> {
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
    fn tile_targets(&self, start: i64, count: i64) -> Result<Tensor> {
        match (&self.rows.classes, &self.distributions) {
            (Some(classes), _) => {
                let classes = classes.f_narrow(0, start, count)?;
                Ok(if self.sizes.first == 0 { classes } else { classes.f_sub_scalar(self.sizes.first)? })
            }
            (None, Some(distributions)) => Ok(distributions.f_narrow(0, start, count)?),
            (None, None) => Err(RuntimeError::invalid("linear cross-entropy", "there are no targets")),
        }
    }

    fn as_targets<'a>(&self, tensor: &'a Tensor) -> TileTargets<'a> {
        if self.rows.classes.is_some() { TileTargets::Columns(tensor) } else { TileTargets::Dense(tensor) }
    }

    /// w_y, or the mass of the distributions.
    fn mass(&self, start: i64, count: i64, statistics_mass: Option<&Tensor>) -> Result<TargetMass> {
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
    fn factors(&self) -> Result<Option<Tensor>> {
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
    fn divisor(&self, factors: Option<&Tensor>, device: Device) -> Result<Option<Tensor>> {
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
    fn reduce(&self, known: &mut Statistics) -> Result<()> {
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

    fn wanted(&self) -> Wanted {
        let options = &self.options;
        Wanted { total: options.label_smoothing > 0.0, moment: options.entropy, best: options.predictions }
    }

    /// Puts one number for each row at its token's place, `absent` elsewhere, in the targets' shape.
    fn at_places(&self, rows: &Tensor, absent: f64) -> Result<Tensor> {
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

/// The gradients of one run, as they add up over chunks.
struct Sums {
    wanted: [bool; INPUTS],
    by_place: [Option<Tensor>; INPUTS],
    /// Dtype in which gradients for each token are held.
    kind: Kind,
}

impl Sums {
    fn new(wanted: [bool; INPUTS], kind: Kind) -> Self {
        Self { wanted, by_place: [const { None }; INPUTS], kind }
    }

    fn any(&self) -> bool {
        self.wanted.contains(&true)
    }

    /// Adds a chunk, given ∂L/∂Z in `tile`.
    fn add(&mut self, of: &Fused, operands: &Operands, tile: &Tensor, start: i64, count: i64) -> Result<()> {
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
    fn token_rows(
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

    fn put_back(&mut self, of: &Fused, place: usize, rows: &Tensor, start: i64, count: i64) -> Result<()> {
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
    fn finish(mut self, of: &Fused, operands: &Operands, kind: Kind) -> Result<[Option<Tensor>; INPUTS]> {
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

impl Function for Fused {
    fn name(&self) -> String {
        "linear cross-entropy".to_owned()
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let operands = self.operands(inputs)?;
        let device = operands.x.device();
        let kind = operands.x.kind();
        let (plan, rows) = (self.plan, self.rows.count);
        let options = self.options_of(device);
        let pass = self.pass;

        let in_forward = ctx.will_run_backward() && !self.waits_for_upstream();
        let wanted = std::array::from_fn(|place| {
            in_forward && self.index_of(place).is_some_and(|index| ctx.needs_input_grad(index))
        });
        // A loss scale is applied in backward: until then fp16 would lose what it is there to save.
        let held_kind = if kind == Kind::Half { plan.tile } else { kind };
        let mut sums = Sums::new(wanted, held_kind);

        let factors = self.factors()?;
        let divisor = self.divisor(factors.as_ref(), device)?;
        let upstream = self.upstream(factors.as_ref(), divisor.as_ref(), None, device)?;
        let formula = Formula::new(&self.options, self.sizes.vocabulary, self.class_weights.as_ref())?;
        let class_weights = self.class_weights_here()?;
        let bias = self.bias(&operands)?;
        let transform = self.transform(bias.as_ref());

        let one_each = |kind: Kind| Tensor::f_empty([rows], (kind, device));
        let losses = one_each(plan.tile)?;
        let keeps = ctx.will_run_backward() && !in_forward;
        let log_sum_exp = self.options.log_sum_exp != LogSumExp::No;
        let mut statistics_kept = [
            (keeps, one_each(plan.tile)?),
            (keeps, one_each(plan.tile)?),
            (keeps && self.distributions.is_some(), one_each(plan.tile)?),
        ];
        let mut out_log_sum_exp = log_sum_exp.then(|| one_each(plan.tile)).transpose()?;
        let mut out_best = self.options.predictions.then(|| one_each(Kind::Int64)).transpose()?;
        let mut out_entropy = self.options.entropy.then(|| one_each(plan.tile)).transpose()?;

        let scratch = Tensor::f_empty([plan.largest(rows), self.sizes.columns], options)?;
        for (start, count) in plan.chunks(rows) {
            let mut tile = scratch.f_narrow(0, 0, count)?;
            self.products(&operands, &mut tile, start, count)?;
            let mut known = Statistics::new(count, self.distributions.is_some(), self.wanted(), options)?;
            let targets = self.tile_targets(start, count)?;
            let (targets, weights) = (self.as_targets(&targets), class_weights.as_ref());
            pass.statistics(&mut tile, self.sizes.first, transform, targets, weights, &mut known)?;
            self.reduce(&mut known)?;

            let mass = self.mass(start, count, known.mass.as_ref())?;
            let part = |tensor: &Tensor| tensor.f_narrow(0, start, count);
            part(&losses)?.f_copy_(&formula.losses(&known, &mass)?)?;
            if let Some(out) = &mut out_log_sum_exp {
                part(out)?.f_copy_(&known.log_sum_exp()?)?;
            }
            if let Some(out) = &mut out_entropy {
                part(out)?.f_copy_(&known.entropy()?)?;
            }
            if let (Some(out), Some(best)) = (&mut out_best, &known.best) {
                part(out)?.f_copy_(best)?;
            }
            let values = [Some(&known.maximum), Some(&known.sum), known.mass.as_ref()];
            for ((kept, into), value) in statistics_kept.iter_mut().zip(values) {
                if let (true, Some(value)) = (*kept, value) {
                    part(into)?.f_copy_(value)?;
                }
            }
            if sums.any() {
                let upstream = part(&upstream)?;
                let numbers = formula.coefficients(&known.maximum, &known.sum, &mass, &upstream, None)?;
                let coefficients = Coefficients {
                    maximum: &known.maximum,
                    powers: &numbers.powers,
                    target: &numbers.target,
                    constant: numbers.constant.as_ref(),
                };
                pass.gradient(&mut tile, transform, targets, weights, coefficients)?;
                sums.add(self, &operands, &tile, start, count)?;
            }
        }
        drop(scratch);

        self.state.kind = Some(kind);
        if in_forward {
            self.state.computed = sums.wanted;
            for gradient in sums.finish(self, &operands, held_kind)?.iter().flatten() {
                ctx.save(gradient);
            }
        } else if ctx.will_run_backward() {
            let [maximum, sum, mass] = statistics_kept.map(|(kept, tensor)| kept.then_some(tensor));
            // What is the caller's is saved only so that a change of it is an error.
            let theirs = [&self.distributions, &self.class_weights, &self.token_weights, &self.denominator];
            let ours = [&maximum, &sum, &mass];
            for tensor in inputs.iter().copied().chain(theirs.into_iter().chain(ours).flatten()) {
                ctx.save(tensor);
            }
        }

        let weighted = match &factors {
            // NaN where there is no label is not the loss's.
            Some(factors) => {
                losses.f_mul(factors)?.f_where_self(&factors.f_ne(0.0)?, &losses.f_zeros_like()?)?
            }
            None => losses,
        };
        let loss = match (self.options.reduction, &divisor) {
            (Reduction::None, _) => self.at_places(&weighted, 0.0)?,
            (_, Some(divisor)) => weighted.f_sum(plan.tile)?.f_div(divisor)?,
            (_, None) => weighted.f_sum(plan.tile)?,
        };
        let mut outputs = vec![loss];
        if let Some(values) = out_log_sum_exp {
            if self.options.log_sum_exp == LogSumExp::Value {
                ctx.mark_non_differentiable(outputs.len());
            }
            outputs.push(self.at_places(&values, 0.0)?);
        }
        if let Some(best) = out_best {
            let right = match &self.rows.classes {
                Some(classes) => {
                    let right = best.f_eq_tensor(classes)?;
                    match &self.rows.labelled {
                        Some(labelled) => right.f_logical_and(&labelled.f_ne(0.0)?)?,
                        None => right,
                    }
                    .f_sum(Kind::Int64)?
                }
                None => Tensor::f_zeros([0i64; 0], (Kind::Int64, device))?,
            };
            for tensor in [self.at_places(&best, -1.0)?, right] {
                ctx.mark_non_differentiable(outputs.len());
                outputs.push(tensor);
            }
        }
        if let Some(entropy) = out_entropy {
            ctx.mark_non_differentiable(outputs.len());
            outputs.push(self.at_places(&entropy, 0.0)?);
        }
        Ok(outputs)
    }

    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let count = self.given.iter().filter(|given| **given).count();
        let mut result: Vec<Option<Tensor>> = std::iter::repeat_with(|| None).take(count).collect();
        let gradients = if self.waits_for_upstream() {
            self.compute_again(ctx, &grads)?
        } else {
            self.scale(ctx, grads.into_iter().next().flatten())?
        };
        for (place, gradient) in gradients.into_iter().enumerate() {
            let (Some(index), Some(gradient)) = (self.index_of(place), gradient) else { continue };
            result[index] = Some(match place {
                HIDDEN => gradient.f_reshape(self.hidden_shape.as_slice())?,
                _ => gradient,
            });
        }
        Ok(result)
    }
}

impl Fused {
    /// u of each row: its factor times what arrived for its loss, over what a mean divides by.
    fn upstream(
        &self,
        factors: Option<&Tensor>,
        divisor: Option<&Tensor>,
        arrived: Option<&Tensor>,
        device: Device,
    ) -> Result<Tensor> {
        let rows = self.rows.count;
        let mut upstream = match arrived {
            Some(arrived) if self.options.reduction == Reduction::None => {
                self.gather(&arrived.f_reshape([-1])?, 0, rows)?
            }
            Some(arrived) => arrived.f_reshape([1])?.f_expand([rows], false)?,
            None => Tensor::f_ones([rows], self.options_of(device))?,
        };
        if let Some(factors) = factors {
            upstream = upstream.f_mul(factors)?;
        }
        if let Some(divisor) = divisor {
            upstream = upstream.f_div(divisor)?;
        }
        Ok(upstream.f_contiguous()?)
    }

    /// The gradients of forward, times what arrived.
    fn scale(&self, ctx: &mut Backward, upstream: Option<Tensor>) -> Result<[Option<Tensor>; INPUTS]> {
        let mut result = [const { None }; INPUTS];
        let Some(upstream) = upstream else { return Ok(result) };
        let overwrite = ctx.may_overwrite_saved();
        // To look at the number costs nothing on the CPU, and a pass over the weight's gradient if it is not 1.
        let is_one = upstream.device() == Device::Cpu && upstream.double_value(&[]) == 1.0;
        let kind = self.state.kind.unwrap_or(self.plan.tile);
        let mut saved = ctx.take_saved().into_iter();
        for place in (0..INPUTS).filter(|&place| self.state.computed[place]) {
            let (Some(mut gradient), Some(index)) = (saved.next(), self.index_of(place)) else { continue };
            if !ctx.needs_input_grad(index) {
                continue;
            }
            // What is kept for another backward is never handed out: the caller may write into its gradients.
            if !overwrite {
                gradient = gradient.f_mul(&upstream)?;
            } else if !is_one {
                gradient = gradient.f_mul_(&upstream)?;
            }
            result[place] = Some(gradient.f_to_kind(kind)?);
        }
        Ok(result)
    }

    /// The gradients from logits computed a second time.
    fn compute_again(
        &self,
        ctx: &mut Backward,
        grads: &[Option<Tensor>],
    ) -> Result<[Option<Tensor>; INPUTS]> {
        let count = self.given.iter().filter(|given| **given).count();
        let mut saved = ctx.take_saved();
        let mut ours = saved.split_off(saved.len() - if self.distributions.is_some() { 3 } else { 2 });
        let mass_kept = if self.distributions.is_some() { ours.pop() } else { None };
        let [maximum, sum] = [ours.remove(0), ours.remove(0)];
        saved.truncate(count);
        let inputs: Vec<&Tensor> = saved.iter().collect();
        let operands = self.operands(&inputs)?;
        let device = operands.x.device();
        let of_loss = grads.first().and_then(Option::as_ref);
        let of_log_sum_exp = match self.options.log_sum_exp {
            LogSumExp::Differentiable => grads.get(1).and_then(Option::as_ref),
            _ => None,
        };
        let wanted = std::array::from_fn(|place| {
            self.index_of(place).is_some_and(|index| ctx.needs_input_grad(index))
        });
        if of_loss.is_none() && of_log_sum_exp.is_none() {
            return Ok([const { None }; INPUTS]);
        }

        let (rows, pass) = (self.rows.count, self.pass);
        let upstream = match of_loss {
            Some(arrived) => {
                let factors = self.factors()?;
                let divisor = self.divisor(factors.as_ref(), device)?;
                self.upstream(factors.as_ref(), divisor.as_ref(), Some(arrived), device)?
            }
            None => Tensor::f_zeros([rows], self.options_of(device))?,
        };
        let of_log_sum_exp = match of_log_sum_exp {
            Some(arrived) => {
                let arrived = self.gather(&arrived.f_reshape([-1])?, 0, rows)?;
                Some(match &self.rows.labelled {
                    Some(labelled) => arrived.f_mul(labelled)?,
                    None => arrived,
                })
            }
            None => None,
        };
        let formula = Formula::new(&self.options, self.sizes.vocabulary, self.class_weights.as_ref())?;
        let class_weights = self.class_weights_here()?;
        let bias = self.bias(&operands)?;
        let transform = self.transform(bias.as_ref());
        let kind = operands.x.kind();
        let mut sums = Sums::new(wanted, kind);
        let scratch =
            Tensor::f_empty([self.plan.largest(rows), self.sizes.columns], self.options_of(device))?;
        for (start, count) in self.plan.chunks(rows) {
            let mut tile = scratch.f_narrow(0, 0, count)?;
            {
                let _recompute = runtime::profile::recompute();
                self.products(&operands, &mut tile, start, count)?;
            }
            pass.logits(&mut tile, transform)?;
            let part = |tensor: &Tensor| tensor.f_narrow(0, start, count);
            let mass = self.mass(start, count, mass_kept.as_ref().map(part).transpose()?.as_ref())?;
            let of_log_sum_exp = of_log_sum_exp.as_ref().map(part).transpose()?;
            let (maximum, sum, upstream) = (part(&maximum)?, part(&sum)?, part(&upstream)?);
            let numbers = formula.coefficients(&maximum, &sum, &mass, &upstream, of_log_sum_exp.as_ref())?;
            let coefficients = Coefficients {
                maximum: &maximum,
                powers: &numbers.powers,
                target: &numbers.target,
                constant: numbers.constant.as_ref(),
            };
            let targets = self.tile_targets(start, count)?;
            pass.gradient(
                &mut tile,
                transform,
                self.as_targets(&targets),
                class_weights.as_ref(),
                coefficients,
            )?;
            sums.add(self, &operands, &tile, start, count)?;
        }
        drop(scratch);
        sums.finish(self, &operands, kind)
    }
}
