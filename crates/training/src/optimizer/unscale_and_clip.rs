//! The standard optimizer's step: unscale, norm, clip, decide, step.
//!
//! With a scaler that decides on the host, its flag and the norm are read in one copy from the device. With one that decides on
//! the device ([`crate::scaler::DeviceGradScaler`]) nothing is read: clipping multiplies by a factor computed there, and the
//! optimizer's kernel reads the flag.

use runtime::ops;
use runtime::ops::TryScalar;
use runtime::profile::range;
use tch::{Kind, Tensor};

use super::{DeviceOptimizer, Group, Optimizer, Rule, StepDecision, StepSettings, ZeroGrad};
use crate::clip::{self, NonFinite};
use crate::error::{Error, Result};
use crate::scaler::{GradScaler, UnscaleResult};

impl Optimizer for DeviceOptimizer {
    fn begin(&mut self, settings: StepSettings) -> Result<()> {
        self.set_factor(settings.factor)?;
        (self.settings, self.changed) = (settings, false);
        Ok(())
    }

    fn unscale_and_clip(&mut self, scaler: &mut dyn GradScaler) -> Result<StepDecision> {
        let _clip = range("clip");
        let clip = self.settings.clip;
        let grads = self.gradients()?;
        let UnscaleResult { found_inf, norm } = scaler.unscale_(&grads, clip.is_some())?;
        let norm = match (clip, norm) {
            (None, _) => None,
            (Some(_), Some(norm)) => Some(norm),
            (Some(_), None) => Some(clip::norm(&grads)?),
        };
        if scaler.device_scaler().is_some() {
            let found_inf = found_inf.ok_or_else(|| {
                let reason = "it decides on the device whether to skip a step, but returned no flag";
                Error::config("gradient scaler", reason)
            })?;
            return decide_on_device(&grads, &found_inf, norm.as_ref(), self.settings, scaler);
        }
        // Both in one copy from the device.
        let wanted = [norm.as_ref().map(clip::Norm::tensor), found_inf.as_ref()];
        let wanted: Vec<Tensor> = wanted.into_iter().flatten().map(wide).collect::<Result<_>>()?;
        let read = if wanted.is_empty() { Vec::new() } else { ops::read(&Tensor::f_cat(&wanted, 0)?)? };
        let norm = norm.and(read.first().copied());
        let overflow = found_inf.is_some() && read.last().is_some_and(|flag| *flag != 0.0);
        let skip = self.settings.skips(norm, overflow, scaler)?;
        if let (Some(norm), Some(limit), false) = (norm, clip, skip) {
            clip::scale_to_known_(&grads, norm, limit)?;
        }
        Ok(StepDecision::Host { norm, skip, overflow })
    }

    fn take_step(&mut self, decision: &StepDecision) -> Result<()> {
        match decision {
            StepDecision::Host { skip: true, .. } => Ok(()),
            StepDecision::Host { skip: false, .. } => self.step(),
            StepDecision::Device { skip, .. } => self.step_unless(skip),
        }
    }

    fn zero_grad(&mut self, how: ZeroGrad) -> Result<()> {
        DeviceOptimizer::zero_grad(self, how)?;
        self.changed = false;
        Ok(())
    }

    fn abandon(&mut self, how: ZeroGrad) -> Result<bool> {
        let whole = !self.changed;
        Optimizer::zero_grad(self, how)?;
        Ok(whole)
    }

    fn groups(&self) -> &[Group] {
        DeviceOptimizer::groups(self)
    }

    fn rule(&self) -> &dyn Rule {
        DeviceOptimizer::rule(self)
    }

    fn learning_rates(&self) -> Vec<f64> {
        DeviceOptimizer::learning_rates(self)
    }

    fn state(&self) -> Result<Vec<(String, Tensor)>> {
        Ok(DeviceOptimizer::state(self))
    }

    fn load_state(&mut self, tensors: &[(String, Tensor)]) -> Result<()> {
        DeviceOptimizer::load_state(self, tensors)
    }

    fn state_bytes(&self) -> u64 {
        DeviceOptimizer::state_bytes(self)
    }
}

/// Clips and decides without synchronising. Its effect on gradients that are not finite does not matter, because the step is
/// skipped; with [`NonFinite::Ignore`] it is wanted.
fn decide_on_device(
    grads: &[Tensor],
    found_inf: &Tensor,
    norm: Option<&clip::Norm>,
    settings: StepSettings,
    scaler: &mut dyn GradScaler,
) -> Result<StepDecision> {
    let _no_grad = tch::no_grad_guard();
    let overflow = wide(found_inf)?;
    let mut skip = overflow.shallow_clone();
    if let (Some(norm), Some(limit)) = (norm, settings.clip) {
        clip::scale_to_(grads, norm, limit)?;
        if settings.non_finite != NonFinite::Ignore {
            let finite = wide(norm.tensor())?.f_isfinite()?.f_to_kind(Kind::Double)?;
            skip = skip.f_maximum(&finite.f_neg()?.try_add_scalar(1.0)?)?;
        }
    }
    let Some(scaler) = scaler.device_scaler() else {
        return Err(Error::config("gradient scaler", "it decided on the device before, but does not now"));
    };
    let before = scaler.device_state();
    scaler.update(found_inf)?;
    let norm = match norm {
        Some(norm) => wide(norm.tensor())?,
        None => skip.try_full_like(f64::NAN)?,
    };
    let device = skip.device();
    let figures = [&skip, &overflow, &norm, &before.f_narrow(0, 0, 1)?, &scaler.device_state()];
    let figures: Vec<Tensor> = figures.iter().map(|t| t.f_to_device(device)).collect::<Result<_, _>>()?;
    Ok(StepDecision::Device { skip: skip.f_to_kind(Kind::Float)?, figures: Tensor::f_cat(&figures, 0)? })
}

/// Returns one element as an fp64 vector.
fn wide(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.f_to_kind(Kind::Double)?.f_reshape([1])?)
}
