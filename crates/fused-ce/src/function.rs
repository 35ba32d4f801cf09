//! The projection and the loss as one function of the graph.
//!
//! For each chunk of c tokens: Z = X·Wᵀ `[c, v]` into one buffer that all chunks share; its statistics; Z ← ∂L/∂Z where it lies;
//! dX = ∂Z·W, and dW += ∂Zᵀ·X, which the first chunk writes. Between the passes the function holds dX and dW, or, where the
//! upstream gradient is needed first, two numbers for each token.

mod chunk;
mod gradient_sums;
mod second_pass;

use runtime::Result;
use runtime::autograd::{Backward, Forward, Function};
use runtime::fused::cross_entropy::{Coefficients, LogitsPass, Statistics};
use runtime::fused::gradients::scale_;
use std::sync::Arc;
use tch::{Device, Kind, Tensor};

use gradient_sums::Sums;

use crate::inputs::Sizes;
use crate::options::{LinearCrossEntropy, LogSumExp, Reduction};
use crate::plan::Plan;
use crate::rows::Rows;
use crate::token_loss::Formula;
use crate::vocabulary_parallel::Shard;

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
                let into = sums.kind_of_tile(plan);
                let gradient =
                    pass.gradient_as(&mut tile, transform, targets, weights, coefficients, into)?;
                sums.add(self, &operands, &gradient, start, count)?;
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
        let kind = self.state.kind.unwrap_or(self.plan.tile);
        let mut saved = ctx.take_saved().into_iter();
        for place in (0..INPUTS).filter(|&place| self.state.computed[place]) {
            let (Some(mut gradient), Some(index)) = (saved.next(), self.index_of(place)) else { continue };
            if !ctx.needs_input_grad(index) {
                continue;
            }
            // What is kept for another backward is never handed out: the caller may write into its gradients.
            if overwrite {
                scale_(&mut gradient, &upstream)?;
            } else {
                gradient = gradient.f_mul(&upstream)?;
            }
            result[place] = Some(gradient.f_to_kind(kind)?);
        }
        Ok(result)
    }
}
