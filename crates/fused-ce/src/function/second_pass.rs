//! The backward that computes the logits a second time, for upstream gradients that had to be known first.

use runtime::Result;
use runtime::autograd::Backward;
use runtime::fused::cross_entropy::Coefficients;
use tch::Tensor;

use super::gradient_sums::Sums;
use super::{Fused, INPUTS};
use crate::options::LogSumExp;
use crate::token_loss::Formula;

impl Fused {
    /// The gradients from logits computed a second time.
    pub(super) fn compute_again(
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
            Some(arrived) => Some(self.gather(&arrived.f_reshape([-1])?, 0, rows)?),
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
            let gradient = pass.gradient_as(
                &mut tile,
                transform,
                self.as_targets(&targets),
                class_weights.as_ref(),
                coefficients,
                sums.kind_of_tile(self.plan),
            )?;
            sums.add(self, &operands, &gradient, start, count)?;
        }
        drop(scratch);
        sums.finish(self, &operands, kind)
    }
}
