//! The projection and the loss as one autograd function.
//!
//! For each chunk of c tokens: Z = X·Wᵀ `[c, v]` into a buffer shared by all chunks; the row statistics of Z; Z ← ∂L/∂Z in
//! place; dX = ∂Z·W, and dW += ∂Zᵀ·X (the first chunk overwrites). Where rows R of W are replaced for some classes, their columns of Z
//! become X·Rᵀ, and those of ∂Z go to dX and dR instead. Between forward and backward the function saves dX and dW,
//! or two numbers per token if the gradients need the upstream gradient first. A row of dX is a multiple of the upstream gradient of its
//! token's loss, so per-token losses need it first only for the gradients that sum over tokens.

mod chunk;
mod gradient_sums;
mod row_outputs;
mod second_pass;
mod taught;

use kernels::cross_entropy::{Coefficients, LogitsPass, Statistics, TileInputs};
use kernels::gradients::scale_;
use runtime::Result;
use runtime::autograd::{Backward, Forward, Function};
use std::sync::Arc;
use tch::{Device, Kind, Tensor};

use gradient_sums::GradientSums;
use row_outputs::RowOutputs;
pub use taught::tiles;
pub(crate) use taught::{Source, Taught};

use crate::chunk_plan::ChunkPlan;
use crate::inputs::Sizes;
use crate::options::{LinearCrossEntropy, Reduction};
use crate::rows::Rows;
use crate::token_loss::Formula;
use crate::vocabulary_parallel::Shard;

/// Slots of the differentiable inputs.
const HIDDEN: usize = 0;
const WEIGHT: usize = 1;
const BIAS: usize = 2;
/// scale·X·Aᵀ `[n, r]` of the adapter.
const LOW_RANK: usize = 3;
const ADAPTER_B: usize = 4;
/// Rows `[k, h]` in place of the weight's.
const REPLACED_ROWS: usize = 5;
const INPUTS: usize = 6;

/// The differentiable inputs by slot.
pub(crate) type Differentiable<'a> = [Option<&'a Tensor>; INPUTS];

pub(crate) struct Fused {
    pub(crate) options: LinearCrossEntropy,
    pub(crate) sizes: Sizes,
    pub(crate) plan: ChunkPlan,
    pub(crate) pass: &'static dyn LogitsPass,
    pub(crate) rows: Rows,
    /// `[n, v]`, if the targets are distributions.
    pub(crate) distributions: Option<Tensor>,
    /// `[n]`, for all tokens.
    pub(crate) token_weights: Option<Tensor>,
    /// `[v]`, for all classes.
    pub(crate) class_weights: Option<Tensor>,
    /// `[k]`, the classes of the replaced rows.
    pub(crate) replaced_classes: Option<Tensor>,
    /// One element.
    pub(crate) denominator: Option<Tensor>,
    pub(crate) shard: Option<Arc<Shard>>,
    /// A teacher, whose distributions are learned besides.
    pub(crate) taught: Option<Taught>,
    pub(crate) targets_shape: Vec<i64>,
    pub(crate) hidden_shape: Vec<i64>,
    /// Which differentiable inputs are given.
    pub(crate) given: [bool; INPUTS],
    pub(crate) state: State,
}

/// State that backward needs from forward besides saved tensors.
#[derive(Default)]
pub(crate) struct State {
    /// Whether forward computed the gradients.
    in_forward: bool,
    /// Those that it computed.
    computed: [bool; INPUTS],
    kind: Option<Kind>,
}

impl Function for Fused {
    fn name(&self) -> &'static str {
        "linear cross-entropy"
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let operands = self.operands(inputs)?;
        let device = operands.x.device();
        let kind = operands.x.kind();
        let (plan, rows) = (self.plan, self.rows.count);
        let options = self.options_of(device);
        let pass = self.pass;

        let wanted: [bool; INPUTS] =
            std::array::from_fn(|slot| self.index_of(slot).is_some_and(|index| ctx.needs_input_grad(index)));
        let in_forward = ctx.will_run_backward() && !self.needs_upstream(wanted);
        let wanted = wanted.map(|is_wanted| is_wanted && in_forward);
        // The loss scale is applied in backward; fp16 gradients would underflow before that.
        let saved_kind = if kind == Kind::Half { plan.compute } else { kind };
        let mut sums = GradientSums::new(wanted, saved_kind, plan.is_one(rows));

        // Factors of each row, and the loss as a function of a row's statistics.
        let factors = self.factors()?;
        let divisor = self.divisor(factors.as_ref(), device)?;
        let upstream = self.upstream(factors.as_ref(), divisor.as_ref(), None, device)?;
        let formula = Formula::new(&self.options, self.sizes.vocabulary, self.class_weights.as_ref())?;
        let class_weights = self.shard_class_weights()?;
        let bias = self.bias(&operands)?;
        let transform = self.transform(bias.as_ref());

        // Without gradients in forward, backward computes the logits again and needs the rows' statistics.
        let saves_statistics = ctx.will_run_backward() && !in_forward;
        let mut row_outputs = RowOutputs::new(self, &operands.x, saves_statistics)?;

        let scratch = plan.tile(rows, self.sizes.columns, device, pass)?;
        for (start, count) in plan.chunks(rows) {
            // Logits [c, v] of the chunk, and their statistics.
            let mut tile = scratch.f_narrow(0, 0, count)?;
            let x = self.gather(&operands.x, start, count)?;
            self.products(&operands, &x, &mut tile, start, count)?;
            let mut row = Statistics::new(count, self.distributions.is_some(), self.wanted(), options)?;
            let targets = self.tile_targets(start, count)?;
            let inputs = TileInputs {
                first: self.sizes.first,
                transform,
                targets: self.as_targets(&targets),
                class_weights: class_weights.as_ref(),
            };
            pass.statistics(&mut tile, inputs, &mut row)?;
            self.all_reduce(&mut row)?;

            let mass = self.mass(start, count, row.mass.as_ref())?;
            let losses = formula.losses(&row, &mass)?;
            let of_teacher = self.taught.as_ref().map(|taught| {
                let of_chunk = self.of_teacher(taught, &tile, (start, count), sums.any())?;
                Ok::<_, runtime::Error>((taught.options.label_weight, of_chunk))
            });
            let of_teacher = of_teacher.transpose()?;
            match &of_teacher {
                Some((weight, taught)) => {
                    row_outputs.store_taught(start, (*weight, &losses), &taught.divergence, &row)?;
                }
                None => row_outputs.store(start, &losses, &row)?,
            }
            // The tile becomes the gradient of the logits, which the gradients of the inputs are products with.
            if sums.any() {
                let upstream = upstream.f_narrow(0, start, count)?;
                let (upstream, of_teacher) = self.divided(upstream, of_teacher, &tile)?;
                let terms = formula.coefficients(&row.maximum, &row.sum, &mass, &upstream, None)?;
                let coefficients = Coefficients {
                    maximum: &row.maximum,
                    powers: &terms.powers,
                    target: &terms.target,
                    constant: terms.constant.as_ref(),
                };
                let gradient =
                    self.gradient_of(&mut tile, (inputs, coefficients), of_teacher, sums.tile_kind(plan))?;
                sums.add(self, &operands, x, &gradient, start, count)?;
            }
        }
        drop(scratch);

        (self.state.kind, self.state.in_forward) = (Some(kind), in_forward);
        if in_forward {
            self.state.computed = sums.wanted;
            for gradient in sums.finish(self, &operands, saved_kind)?.iter().flatten() {
                ctx.save(gradient);
            }
        } else if ctx.will_run_backward() {
            let [maximum, sum, mass] = row_outputs.take_statistics();
            // The caller's tensors are saved only so that an in-place change of them is an error.
            let callers = [&self.distributions, &self.class_weights, &self.token_weights, &self.denominator];
            let statistics = [&maximum, &sum, &mass];
            for tensor in inputs.iter().copied().chain(callers.into_iter().chain(statistics).flatten()) {
                ctx.save(tensor);
            }
        }

        if in_forward {
            // Its hidden states are not needed until backward.
            self.taught = None;
        }
        row_outputs.finish(self, ctx, factors.as_ref(), divisor.as_ref())
    }

    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let count = self.given.iter().filter(|given| **given).count();
        let mut result: Vec<Option<Tensor>> = std::iter::repeat_with(|| None).take(count).collect();
        let gradients = match self.state.in_forward {
            true => self.scale(ctx, grads.into_iter().next().flatten())?,
            false => self.recompute(ctx, &grads)?,
        };
        for (slot, gradient) in gradients.into_iter().enumerate() {
            let (Some(index), Some(gradient)) = (self.index_of(slot), gradient) else { continue };
            result[index] = Some(match slot {
                HIDDEN => gradient.f_reshape(self.hidden_shape.as_slice())?,
                _ => gradient,
            });
        }
        Ok(result)
    }
}

impl Fused {
    /// Returns u of each row: its factor times the gradient of the loss, divided by the denominator of a mean.
    fn upstream(
        &self,
        factors: Option<&Tensor>,
        divisor: Option<&Tensor>,
        loss_grad: Option<&Tensor>,
        device: Device,
    ) -> Result<Tensor> {
        let rows = self.rows.count;
        let mut upstream = match loss_grad {
            Some(grad) if self.options.reduction == Reduction::None => {
                self.gather(&grad.f_reshape([-1])?, 0, rows)?
            }
            Some(grad) => grad.f_reshape([1])?.f_expand([rows], false)?,
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

    /// Returns the gradients computed in forward, times the upstream gradient: a number, or one for each token.
    fn scale(&self, ctx: &mut Backward, upstream: Option<Tensor>) -> Result<[Option<Tensor>; INPUTS]> {
        let mut result = [const { None }; INPUTS];
        let Some(mut upstream) = upstream else { return Ok(result) };
        if self.options.reduction == Reduction::None {
            // Of ignored tokens, whose rows are 0, it may be anything.
            let of_rows = self.gather(&upstream.f_reshape([-1])?, 0, self.rows.count)?;
            upstream = self.scatter(&of_rows, 0.0)?.f_reshape([-1, 1])?;
        }
        let overwrite = ctx.may_overwrite_saved();
        let kind = self.state.kind.unwrap_or(self.plan.compute);
        let mut saved = ctx.take_saved().into_iter();
        for slot in (0..INPUTS).filter(|&slot| self.state.computed[slot]) {
            let (Some(mut gradient), Some(index)) = (saved.next(), self.index_of(slot)) else { continue };
            if !ctx.needs_input_grad(index) {
                continue;
            }
            // A tensor saved for another backward is never returned: the caller may write into its gradients.
            if overwrite && upstream.dim() > 0 {
                // By chunks, whose product in the dtype of the loss is a copy.
                for (start, count) in self.plan.chunks(self.sizes.tokens) {
                    let part = |tensor: &Tensor| tensor.f_narrow(0, start, count);
                    let _ = part(&gradient)?.f_mul_(&part(&upstream)?)?;
                }
            } else if overwrite {
                scale_(&mut gradient, &upstream)?;
            } else {
                gradient = gradient.f_mul(&upstream)?;
            }
            result[slot] = Some(gradient.f_to_kind(kind)?);
        }
        Ok(result)
    }
}
