//! Between backward and the optimizer: gradients are unscaled and clipped, and it is decided whether the step is taken.

use runtime::ops;
use runtime::profile::range;
use tch::{Kind, Tensor};

use super::Trainer;
use crate::clip::{self, NonFinite};
use crate::error::{Error, Result};
use crate::observer::StepRecord;
use crate::scaler::Checked;

/// What came of a step's gradients, and where that is known.
pub(super) enum Settled {
    /// Here: the gradients' norm, where it was wanted, whether the step is left out, and whether for the scaler's sake.
    Host { norm: Option<f64>, skipped: bool, overflow: bool },
    /// On the device.
    Device {
        /// A float scalar: 1 where the step is left out.
        skip: Tensor,
        /// For the record: [`Figures`].
        figures: Tensor,
    },
}

/// What a device decided of a step, once it is read: fp64, in this order.
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
    /// Unscales and clips the gradients, and moves the scale.
    pub(super) fn settle_gradients(&mut self) -> Result<Settled> {
        let _clip = range("clip");
        let grads = self.optimizer.gradients()?;
        let Checked { found_inf, norm } = self.scaler.unscale_(&grads, self.options.clip.is_some())?;
        let norm = match (self.options.clip, norm) {
            (None, _) => None,
            (Some(_), Some(norm)) => Some(norm),
            (Some(_), None) => Some(clip::norm(&grads)?),
        };
        if self.scaler.device_side().is_some() {
            let found_inf = found_inf.ok_or_else(|| {
                let reason =
                    "it decides on the device whether a step is taken, and gave no flag to decide by";
                Error::config("gradient scaler", reason)
            })?;
            return self.settle_on_device(&grads, &found_inf, norm.as_ref());
        }
        // Both in one copy from the device.
        let wanted = [norm.as_ref().map(clip::Norm::tensor), found_inf.as_ref()];
        let wanted: Vec<Tensor> = wanted.into_iter().flatten().map(wide).collect::<Result<_>>()?;
        let read = if wanted.is_empty() { Vec::new() } else { ops::read(&Tensor::f_cat(&wanted, 0)?)? };
        let norm = norm.and(read.first().copied());
        let overflow = found_inf.is_some() && read.last().is_some_and(|flag| *flag != 0.0);
        self.scaler.update(overflow)?;
        let skipped = match (norm, self.options.clip) {
            _ if overflow => true,
            (Some(norm), _) if !norm.is_finite() && self.options.non_finite == NonFinite::Fail => {
                return Err(clip::not_finite(norm));
            }
            (Some(norm), _) if !norm.is_finite() && self.options.non_finite == NonFinite::Skip => true,
            (Some(norm), Some(limit)) => {
                clip::scale_to_known_(&grads, norm, limit)?;
                false
            }
            _ => false,
        };
        Ok(Settled::Host { norm, skipped, overflow })
    }

    /// The same without a word to the host. What it does to gradients that are not finite does not matter: the step is left
    /// out, unless [`NonFinite::Ignore`] wants them.
    fn settle_on_device(
        &mut self,
        grads: &[Tensor],
        found_inf: &Tensor,
        norm: Option<&clip::Norm>,
    ) -> Result<Settled> {
        let _no_grad = tch::no_grad_guard();
        let overflow = wide(found_inf)?;
        let mut skip = overflow.shallow_clone();
        if let (Some(norm), Some(limit)) = (norm, self.options.clip) {
            clip::scale_to_(grads, norm, limit)?;
            if self.options.non_finite != NonFinite::Ignore {
                let finite = wide(norm.tensor())?.f_isfinite()?.f_to_kind(Kind::Double)?;
                skip = skip.f_maximum(&finite.f_neg()?.f_add_scalar(1.0)?)?;
            }
        }
        let Some(scaler) = self.scaler.device_side() else {
            return Err(Error::config("gradient scaler", "it decided on the device, and does so no more"));
        };
        let before = scaler.position();
        scaler.update(found_inf)?;
        let norm = match norm {
            Some(norm) => wide(norm.tensor())?,
            None => skip.f_full_like(f64::NAN)?,
        };
        let device = skip.device();
        let figures = [&skip, &overflow, &norm, &before.f_narrow(0, 0, 1)?, &scaler.position()];
        let figures: Vec<Tensor> = figures.iter().map(|t| t.f_to_device(device)).collect::<Result<_, _>>()?;
        Ok(Settled::Device { skip: skip.f_to_kind(Kind::Float)?, figures: Tensor::f_cat(&figures, 0)? })
    }

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

/// One element, as an fp64 vector.
fn wide(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.f_to_kind(Kind::Double)?.f_reshape([1])?)
}
