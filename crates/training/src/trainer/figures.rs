//! What a device decided of a step, once it is read.

use super::Trainer;
use crate::clip::{self, NonFinite};
use crate::error::Result;
use crate::observer::StepRecord;

/// The figures of [`StepDecision::Device`](crate::optimizer::StepDecision::Device), in that order.
pub(super) struct Figures<'a> {
    skipped: f64,
    overflow: f64,
    norm: f64,
    /// The scale that the step had.
    scale: f64,
    /// Where the scaler stands after the step.
    position: &'a [f64],
}

impl<'a> Figures<'a> {
    pub(super) fn of(values: &'a [f64]) -> Option<Self> {
        let (&[skipped, overflow, norm, scale], position) = values.split_first_chunk()?;
        Some(Self { skipped, overflow, norm, scale, position })
    }
}

impl Trainer {
    /// Completes a record by what was read, and tells the scaler where it stands.
    pub(super) fn learn(&mut self, figures: &Figures<'_>, record: &mut StepRecord) -> Result<()> {
        record.skipped = figures.skipped != 0.0;
        record.scale = figures.scale;
        record.gradient_norm = self.options.clip.map(|_| figures.norm);
        if let Some(scaler) = self.scaler.device_side() {
            scaler.learn(figures.position)?;
        }
        let Some(norm) = record.gradient_norm else { return Ok(()) };
        if figures.overflow == 0.0 && !norm.is_finite() && self.options.non_finite == NonFinite::Fail {
            return Err(clip::not_finite(norm));
        }
        Ok(())
    }
}
