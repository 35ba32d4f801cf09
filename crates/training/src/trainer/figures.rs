//! The losses of steps and the device's decisions about them, which are read from the device several steps at a time.

use tch::Tensor;

use super::Trainer;
use crate::clip::{Findings, NonFinite};
use crate::error::Result;
use crate::observer::StepRecord;

/// A step whose loss is still on the device.
pub(super) struct Pending {
    pub(super) record: StepRecord,
    pub(super) denominator: f64,
    /// Fp64: the summed loss; the number of correct predictions, if requested; the load-balancing loss, if there is one; the device's decision ([`Figures`]), if it
    /// decided.
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
        for Pending { mut record, denominator, sums, parts } in std::mem::take(&mut self.pending) {
            let (own, rest) = values.split_at(sums.numel());
            values = rest;
            let (sums, figures) = own.split_at(parts);
            record.loss = sums[0] / denominator;
            let (has_accuracy, has_aux) = (self.options.accuracy, self.options.router_aux_loss > 0.0);
            record.accuracy = sums.get(1).filter(|_| has_accuracy).map(|right| right / denominator);
            record.router_aux_loss = sums.last().filter(|_| has_aux).copied();
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
