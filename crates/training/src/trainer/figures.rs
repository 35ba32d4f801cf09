//! The device's decision about a step, after it was read.

use super::Trainer;
use crate::clip::{Findings, NonFinite};
use crate::error::Result;
use crate::observer::StepRecord;

/// The figures of [`StepDecision::Device`](crate::optimizer::StepDecision::Device), in that order.
pub(super) struct Figures<'a> {
    skipped: f64,
    overflow: f64,
    norm: f64,
    /// The scale of the step.
    scale: f64,
    /// The scaler's state after the step.
    state: &'a [f64],
}

impl<'a> Figures<'a> {
    pub(super) fn of(values: &'a [f64]) -> Option<Self> {
        let (&[skipped, overflow, norm, scale], state) = values.split_first_chunk()?;
        Some(Self { skipped, overflow, norm, scale, state })
    }
}

impl Trainer {
    /// Adds what was read to a record, and passes the scaler its state.
    pub(super) fn read_figures(&mut self, figures: &Figures<'_>, record: &mut StepRecord) -> Result<()> {
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
