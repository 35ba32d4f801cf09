//! Backward with recomputed logits, for gradients that need the upstream gradient first.

use kernels::cross_entropy::{Coefficients, TileInputs};
use runtime::Result;
use runtime::autograd::Backward;
use tch::Tensor;

use super::gradient_sums::GradientSums;
use super::{Fused, INPUTS};
use crate::options::LogSumExp;
use crate::token_loss::Formula;

impl Fused {
    /// Recomputes the logits and returns the gradients.
    pub(super) fn recompute(
        &self,
        ctx: &mut Backward,
        grads: &[Option<Tensor>],
    ) -> Result<[Option<Tensor>; INPUTS]> {
        // The saved inputs in their slots, and the rows' statistics behind them.
        let count = self.given.iter().filter(|given| **given).count();
        let mut saved = ctx.take_saved();
        let mut statistics = saved.split_off(saved.len() - if self.distributions.is_some() { 3 } else { 2 });
        let saved_mass = if self.distributions.is_some() { statistics.pop() } else { None };
        let [maximum, sum] = [statistics.remove(0), statistics.remove(0)];
        saved.truncate(count);
        let inputs: Vec<&Tensor> = saved.iter().collect();
        let operands = self.operands(&inputs)?;
        let device = operands.x.device();
        // Gradients of the outputs that depend on the inputs.
        let loss_grad = grads.first().and_then(Option::as_ref);
        let log_sum_exp_grad = match self.options.log_sum_exp {
            LogSumExp::Differentiable => grads.get(1).and_then(Option::as_ref),
            _ => None,
        };
        let wanted =
            std::array::from_fn(|slot| self.index_of(slot).is_some_and(|index| ctx.needs_input_grad(index)));
        if loss_grad.is_none() && log_sum_exp_grad.is_none() {
            return Ok([const { None }; INPUTS]);
        }

        // The gradient of each row's loss, and of its log-sum-exp.
        let (rows, pass) = (self.rows.count, self.pass);
        let upstream = match loss_grad {
            Some(grad) => {
                let factors = self.factors()?;
                let divisor = self.divisor(factors.as_ref(), device)?;
                self.upstream(factors.as_ref(), divisor.as_ref(), Some(grad), device)?
            }
            None => Tensor::f_zeros([rows], self.options_of(device))?,
        };
        let log_sum_exp_grad = match log_sum_exp_grad {
            Some(grad) => Some(self.gather(&grad.f_reshape([-1])?, 0, rows)?),
            None => None,
        };
        let formula = Formula::new(&self.options, self.sizes.vocabulary, self.class_weights.as_ref())?;
        let class_weights = self.shard_class_weights()?;
        let bias = self.bias(&operands)?;
        let transform = self.transform(bias.as_ref());
        let kind = operands.x.kind();
        let mut sums = GradientSums::new(wanted, kind, self.plan.is_one(rows));
        let scratch = self.plan.tile(rows, self.sizes.columns, device, pass)?;
        for (start, count) in self.plan.chunks(rows) {
            // The logits [c, v] again.
            let mut tile = scratch.f_narrow(0, 0, count)?;
            let x = self.gather(&operands.x, start, count)?;
            {
                let _recompute = runtime::profile::recompute();
                self.products(&operands, &x, &mut tile, start, count)?;
            }
            pass.logits(&mut tile, transform)?;
            // Their gradient, from the statistics that forward saved.
            let part = |tensor: &Tensor| tensor.f_narrow(0, start, count);
            let mass = self.mass(start, count, saved_mass.as_ref().map(part).transpose()?.as_ref())?;
            let log_sum_exp_grad = log_sum_exp_grad.as_ref().map(part).transpose()?;
            let (maximum, sum, upstream) = (part(&maximum)?, part(&sum)?, part(&upstream)?);
            let of_teacher = self.taught.as_ref().map(|taught| {
                let _recompute = runtime::profile::recompute();
                let of_chunk = self.of_teacher(taught, &tile, (start, count), true)?;
                Ok::<_, runtime::Error>((taught.options.label_weight, of_chunk))
            });
            let (upstream, of_teacher) = self.divided(upstream, of_teacher.transpose()?, &tile)?;
            let terms = formula.coefficients(&maximum, &sum, &mass, &upstream, log_sum_exp_grad.as_ref())?;
            let coefficients = Coefficients {
                maximum: &maximum,
                powers: &terms.powers,
                target: &terms.target,
                constant: terms.constant.as_ref(),
            };
            let targets = self.tile_targets(start, count)?;
            let inputs = TileInputs {
                first: self.sizes.first,
                transform,
                targets: self.as_targets(&targets),
                class_weights: class_weights.as_ref(),
            };
            let kind = sums.tile_kind(self.plan);
            let gradient = self.gradient_of(&mut tile, (inputs, coefficients), of_teacher, kind)?;
            sums.add(self, &operands, x, &gradient, start, count)?;
        }
        drop(scratch);
        sums.finish(self, &operands, kind)
    }
}
