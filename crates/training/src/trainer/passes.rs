//! The passes over the micro-batches of a step, by what is learned.

use models::RouterBalance;
use models::module::LossOutput;
use runtime::collectives::Group;
use runtime::ops::TryScalar;
use runtime::precision::{self, PolicyGuard};
use runtime::random::begin_step_part;
use tch::{Kind, Tensor};

use super::ranks::{Owner, Share};
use super::{Timings, Trainer, timed};
use crate::accumulation::{MicroBatches, balance_of, fetch, forward_over};
use crate::batches::Batches;
use crate::distillation;
use crate::error::{Error, Result};
use crate::policy::PolicySums;
use crate::preference::{self, Preference};

/// The results of a forward.
pub(super) struct Passed {
    /// The summed loss, and the number of correct predictions or of examples that are right.
    pub(super) output: LossOutput,
    /// [`PreferenceSums::rewards`](crate::preference::PreferenceSums::rewards).
    pub(super) rewards: Option<Tensor>,
    /// [`PolicySums::figures`](crate::policy::PolicySums::figures).
    pub(super) policy: Option<Tensor>,
    /// The divergence from a teacher, and the loss of the labels `[2]`.
    pub(super) distilled: Option<Tensor>,
}

impl Trainer {
    /// Computes the summed loss of a micro-batch of a step.
    pub(super) fn forward(
        &self,
        (number, step): (usize, &MicroBatches),
        (balance, sequence): (Option<&RouterBalance>, Option<&Group>),
        reference_point: Option<&Tensor>,
    ) -> Result<Passed> {
        let (model, batch) = (self.model.as_ref(), &step.batches[number]);
        let noise = Some(self.options.embedding_noise).filter(|alpha| *alpha > 0.0);
        if let (Some(policy), Some(rollout)) = (&self.policy, &step.rollout) {
            let PolicySums { loss: sum, figures } = policy.forward(model, batch, &rollout.samples[number])?;
            let output = LossOutput { sum, correct: None };
            return Ok(Passed { output, rewards: None, policy: Some(figures), distilled: None });
        }
        if let Some(distillation) = &self.distillation {
            if sequence.is_some() {
                let reason = "ranks divide a row, and a teacher reads whole ones";
                return Err(Error::config("distillation", reason));
            }
            let loss = distillation.forward(model, batch, (true, self.options.accuracy), (balance, noise))?;
            let distilled = Some(distillation::parts(&loss)?);
            let output = LossOutput { sum: loss.sum, correct: loss.correct };
            return Ok(Passed { output, rewards: None, policy: None, distilled });
        }
        let Some(preference) = &self.preference else {
            let mode = (true, self.options.accuracy);
            let output = forward_over(model, batch, mode, (balance, sequence), noise)?;
            return Ok(Passed { output, rewards: None, policy: None, distilled: None });
        };
        let sums = preference.forward_with_noise(model, batch, reference_point, noise)?;
        let sum = sums.total(&preference.objective, step)?;
        let output = LossOutput { sum, correct: Some(sums.correct) };
        Ok(Passed { output, rewards: Some(sums.rewards), policy: None, distilled: None })
    }

    /// Fetches the micro-batches of a step, or has the model answer its prompts; `None` at the end of the data.
    pub(super) fn fetched(&mut self, train: &mut dyn Batches) -> Result<Option<MicroBatches>> {
        let ranks = self.optimizer.ranks();
        if let Some(policy) = &mut self.policy {
            let _precision = self.precision.clone().map(|policy| precision::enter(Some(policy)));
            return match policy.held().filter(|_| policy.is_between(self.step)) {
                Some(held) => Ok(Some(held)),
                None => {
                    let prompts = train.prompts()?;
                    policy.roll_out(self.model.as_ref(), &prompts, self.step, ranks.as_ref()).map(Some)
                }
            };
        }
        match (fetch(train, self.options.accumulation)?, self.options.rows) {
            (Some(micro), Some(rows)) => micro.split(rows).map(Some),
            (micro, _) => Ok(micro),
        }
    }

    /// Computes z₀ of a step over rated answers.
    pub(super) fn reference_point(
        &self,
        preference: &Preference,
        step: &MicroBatches,
        share: Option<&Share>,
    ) -> Result<Tensor> {
        let mut all = Vec::new();
        for (number, batch) in step.batches.iter().enumerate() {
            let owner = share.map_or(Owner::Own, |share| share.owner(number));
            let own = match owner {
                Owner::Other => None,
                Owner::Own | Owner::Idle => preference.divergence(self.model.as_ref(), batch)?,
            };
            let none = || Tensor::f_zeros([], (Kind::Float, batch.tokens.device()));
            all.push(own.filter(|_| owner == Owner::Own).map_or_else(none, Ok)?);
        }
        let mut all = Tensor::f_stack(&all, 0)?;
        if let Some(share) = share {
            all = share.sum(&all, "reference point")?;
        }
        let sum = all.f_sum(Kind::Double)?;
        preference::reference_point(&sum, step.examples().unwrap_or(0))
    }

    /// Runs forward and backward of all micro-batches. Returns for each, fp64, the sums of [`Pending::sums`], and z₀ of an objective over rated
    /// answers.
    ///
    /// `denominator`, an fp64 scalar on the device, is that of the loss.
    pub(super) fn gradients(
        &mut self,
        micro: &MicroBatches,
        denominator: &Tensor,
        timings: &mut Timings,
    ) -> Result<(Vec<Tensor>, Option<Tensor>)> {
        let (mut sums, accuracy) = (Vec::new(), self.counts_correct());
        let coefficient = self.options.router_aux_loss;
        let of_each = 1.0 / micro.batches.len() as f64;
        // Over all micro-batches, so that a weight is cast once for all of them.
        let _precision = self.enter_precision();
        let share = self.share(micro.batches.len())?;
        let rated = self.preference.as_ref().filter(|own| own.objective.is_rated());
        let point = rated.map(|preference| {
            let ask = || self.reference_point(preference, micro, share.as_ref());
            timed("forward", &mut timings.forward, ask)
        });
        let point = point.transpose()?;
        for (number, batch) in micro.batches.iter().enumerate() {
            let owner = share.as_ref().map_or(Ok(Owner::Own), |share| share.begin(number))?;
            if owner != Owner::Own {
                let further = [self.preference.is_some(), self.policy.is_some(), self.distillation.is_some()];
                let further = if further.contains(&true) { 2 } else { 0 };
                let correct = accuracy && self.policy.is_none();
                let parts = 1 + i64::from(correct) + i64::from(coefficient > 0.0) + further;
                sums.push(Tensor::f_zeros([parts], (Kind::Double, batch.tokens.device()))?);
            }
            if owner == Owner::Other {
                self.reduce(share.as_ref(), number, micro, timings)?;
                continue;
            }
            if share.is_none() {
                begin_step_part(number as u64);
            }
            self.optimizer.set_idle(owner == Owner::Idle);
            let balance = (coefficient > 0.0).then(|| balance_of(batch)).transpose()?;
            let Passed { output, rewards, policy, distilled } =
                timed("forward", &mut timings.forward, || {
                    let sequence = share.as_ref().and_then(Share::sequence);
                    self.forward((number, micro), (balance.as_ref(), sequence), point.as_ref())
                })?;
            let aux = timed("backward", &mut timings.backward, || {
                let mut mean = output.sum.f_div(&denominator.f_to_kind(output.sum.kind())?)?;
                let mut aux = None;
                if let Some(balance) = &balance {
                    let [total, own] = balance.add_to(&mean, coefficient * of_each)?;
                    (mean, aux) = (total, Some(own.try_mul_scalar(of_each)?));
                }
                let loss = self.scaler.scale(&mean)?;
                runtime::autograd::backward(&[&loss])?;
                Ok(aux)
            })?;
            if owner == Owner::Own {
                let parts = std::iter::once(&output.sum)
                    .chain(&output.correct)
                    .chain(&aux)
                    .chain(&rewards)
                    .chain(&policy)
                    .chain(&distilled);
                let parts = parts.map(|t| t.f_detach()?.f_to_kind(Kind::Double)?.f_reshape([-1]));
                sums.push(Tensor::f_cat(&parts.collect::<Result<Vec<_>, _>>()?, 0)?);
            }
            self.reduce(share.as_ref(), number, micro, timings)?;
        }
        let sums = match share {
            Some(share) => share.end(&sums)?,
            None => sums,
        };
        Ok((sums, point))
    }

    /// Whether a step counts correct predictions.
    pub(super) fn counts_correct(&self) -> bool {
        self.options.accuracy || self.preference.is_some()
    }

    pub(crate) fn enter_precision(&self) -> Option<PolicyGuard> {
        self.precision.clone().map(|policy| precision::enter(Some(policy)))
    }
}
