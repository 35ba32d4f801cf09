//! The losses of steps and the device's decisions about them, which are read from the device several steps at a time.

use tch::Tensor;

use super::Trainer;
use crate::clip::{Findings, NonFinite};
use crate::distillation::DistillationFigures;
use crate::error::Result;
use crate::observer::{PolicyRecord, StepRecord};
use crate::policy::RolloutFigures;

/// A step whose loss is still on the device.
pub(super) struct Pending {
    pub(super) record: StepRecord,
    pub(super) denominator: f64,
    /// What the number of correct ones is a part of ([`MicroBatches::predictions`](crate::accumulation::MicroBatches::predictions)).
    pub(super) predictions: usize,
    /// Chosen or desirable sequences, and the others.
    pub(super) rewarded: [usize; 2],
    /// Of an objective over rewards, the figures of its answers, and their tokens.
    pub(super) rollout: Option<(RolloutFigures, usize)>,
    /// Fp64: the summed loss; the number of correct predictions, if requested; the load-balancing loss, if there is one; the rewards of an
    /// objective over sequences, and its z₀ if it has one; the divergence from a teacher and the loss of the labels, if there is one; the figures of an objective over rewards; the device's decision ([`Figures`]), if it decided.
    pub(super) sums: Tensor,
    /// How many of them are sums.
    pub(super) parts: usize,
}

/// The figures of [`StepDecision::Device`](crate::optimizer::StepDecision::Device), in that order.
struct Figures<'a> {
    skipped: f64,
    overflow: f64,
    norm: f64,
    /// The scale of the step.
    scale: f64,
    /// The scaler's state after the step.
    state: &'a [f64],
}

impl<'a> Figures<'a> {
    fn of(values: &'a [f64]) -> Option<Self> {
        let (&[skipped, overflow, norm, scale], state) = values.split_first_chunk()?;
        Some(Self { skipped, overflow, norm, scale, state })
    }
}

impl Trainer {
    /// Reads the losses that are still on the device, in one copy, and reports them.
    pub(super) fn read_losses(&mut self) -> Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let sums: Vec<&Tensor> = self.pending.iter().map(|step| &step.sums).collect();
        let values = runtime::ops::read(&Tensor::f_cat(&sums, 0)?)?;
        let mut values = values.as_slice();
        // What fails at one step must not keep the later ones, which are not read again, from the observers.
        let mut failed = Ok(());
        for Pending { mut record, denominator, predictions, rewarded, rollout, sums, parts } in
            std::mem::take(&mut self.pending)
        {
            let (own, rest) = values.split_at(sums.numel());
            values = rest;
            let (sums, figures) = own.split_at(parts);
            record.loss = sums[0] / denominator;
            let (has_accuracy, has_aux) = (self.counts_correct(), self.options.router_aux_loss > 0.0);
            let has_rewards = self.preference.is_some();
            let is_rated = self.preference.as_ref().is_some_and(|own| own.objective.is_rated());
            let mut more = sums[1..].iter().copied();
            let mut next = |is_there: bool| if is_there { more.next() } else { None };
            record.accuracy = next(has_accuracy).map(|right| right / predictions.max(1) as f64);
            record.router_aux_loss = next(has_aux);
            let rewards = [next(has_rewards), next(has_rewards)];
            record.rewards = rewards[0]
                .zip(rewards[1])
                .map(|(chosen, rejected)| [chosen / rewarded[0] as f64, rejected / rewarded[1] as f64]);
            record.reference_point = next(is_rated);
            let is_distilled = self.distillation.is_some();
            record.distilled =
                next(is_distilled).zip(next(is_distilled)).map(|(divergence, cross_entropy)| {
                    DistillationFigures {
                        divergence: divergence / denominator,
                        cross_entropy: cross_entropy / denominator,
                    }
                });
            record.policy = rollout.and_then(|(rollout, tokens)| {
                let of_tokens = |sum: f64| sum / tokens.max(1) as f64;
                let (divergence, clipped) = (of_tokens(next(true)?), of_tokens(next(true)?));
                Some(PolicyRecord { rollout, divergence, clipped })
            });
            let learned = match Figures::of(figures) {
                Some(figures) => self.read_figures(&figures, &mut record),
                None => Ok(()),
            };
            let observed = self.tell(|observer| observer.on_step(&record));
            self.trouble.observe(&record);
            let explained = self.explain_first(&record);
            let seen = self.watch.observe(record.step, record.loss, self.options.divergence);
            let seen = seen.map_err(|error| self.with_last_checkpoint(error));
            failed = failed.and(observed).and(learned).and(explained).and(seen);
        }
        failed
    }

    /// Adds what was read to a record, and passes the scaler its state.
    fn read_figures(&mut self, figures: &Figures<'_>, record: &mut StepRecord) -> Result<()> {
        record.skipped = figures.skipped != 0.0;
        record.scale = figures.scale;
        record.gradient_norm = self.options.clip.map(|_| figures.norm);
        if let Some(scaler) = self.scaler.device_scaler() {
            scaler.load_device_state(figures.state)?;
        }
        if figures.overflow == 0.0 && record.skipped && self.options.non_finite == NonFinite::Fail {
            let (loss, norm) = (Some(record.loss), record.gradient_norm);
            let non_finite = norm.is_none() && record.loss.is_finite();
            return Err(Findings { loss, norm, non_finite, overflow: false }.error(None));
        }
        Ok(())
    }
}
