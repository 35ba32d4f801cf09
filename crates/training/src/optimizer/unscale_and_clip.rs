//! The standard optimizer's step: unscale, norm, clip, decide, step.
//!
//! A step whose loss or a gradient is not finite is skipped, or fails, as [`NonFinite`] says. The norm and a scaler's flag answer for the
//! gradients; without either they are read once for a flag.
//!
//! Where the host decides, flags, norm and loss are read in one copy from the device. With a scaler that decides on the device
//! ([`crate::scaler::DeviceGradScaler`]) nothing is read: clipping multiplies by a factor computed there, and the optimizer's kernel reads
//! the flag. On CUDA that is so also without a scaler, where the rule has such a kernel, and on every device for a step that a graph
//! repeats ([`StepSettings::on_device`]).

use runtime::ops;
use runtime::ops::TryScalar;
use runtime::profile::range;
use tch::{Device, Kind, Tensor};

use super::{DeviceOptimizer, Group, Optimizer, Rule, StepDecision, StepSettings, ZeroGrad};
use crate::clip::{self, Findings, NonFinite};
use crate::error::{Error, Result};
use crate::scaler::{GradScaler, UnscaleResult};

impl Optimizer for DeviceOptimizer {
    fn begin(&mut self, settings: StepSettings) -> Result<()> {
        self.set_factor(settings.factor)?;
        (self.settings, self.changed, self.loss) = (settings, false, None);
        if settings.on_device { self.write_for_graph() } else { Ok(()) }
    }

    fn refuses_capture(&self) -> Option<String> {
        let reason = "steps by the fused kernel of Adam or AdamW only are decided on the device";
        (!self.skips_on_device()).then(|| format!("{reason}; the rule is {}", self.rule().name()))
    }

    fn note_replay(&mut self) -> Result<()> {
        DeviceOptimizer::note_replay(self)
    }

    fn watch_loss(&mut self, loss: &Tensor) {
        self.loss = Some(loss.detach());
    }

    fn unscale_and_clip(&mut self, scaler: &mut dyn GradScaler) -> Result<StepDecision> {
        let _clip = range("clip");
        let StepSettings { clip, non_finite, .. } = self.settings;
        let checks = non_finite != NonFinite::Ignore;
        let loss = self.loss.take().filter(|_| checks);
        let grads = self.gradients()?;
        let UnscaleResult { found_inf, norm } = scaler.unscale_(&grads, clip.is_some())?;
        let norm = match (clip, norm) {
            (None, _) => None,
            (Some(_), Some(norm)) => Some(norm),
            (Some(_), None) => Some(clip::norm(&grads)?),
        };
        let flag = match (&norm, &found_inf) {
            (None, None) if checks => Some(clip::found_non_finite(&grads)?),
            _ => None,
        };
        let on_cuda = grads.first().is_some_and(|grad| grad.device().is_cuda());
        let is_unread = found_inf.is_none() && (self.settings.on_device || on_cuda && self.skips_on_device());
        if scaler.device_scaler().is_some() || is_unread {
            let signs = Found { found_inf, norm, flag, loss };
            return decide_on_device(&grads, &signs, self.settings, scaler);
        }
        // All in one copy from the device.
        let wanted =
            [norm.as_ref().map(clip::Norm::tensor), found_inf.as_ref(), flag.as_ref(), loss.as_ref()];
        let device = wanted.iter().flatten().next().map(|wanted| wanted.device());
        let mut tensors = Vec::new();
        for tensor in wanted.into_iter().flatten() {
            tensors.push(wide(tensor)?.f_to_device(device.unwrap_or(tensor.device()))?);
        }
        let read = if tensors.is_empty() { Vec::new() } else { ops::read(&Tensor::f_cat(&tensors, 0)?)? };
        let mut read = read.into_iter();
        let [norm, found_inf, flag, loss] = wanted.map(|wanted| wanted.and_then(|_| read.next()));
        let is_set = |flag: Option<f64>| flag.is_some_and(|flag| flag != 0.0);
        let overflow = is_set(found_inf);
        let findings = Findings { loss, norm, non_finite: is_set(flag), overflow };
        let skip = self.settings.skips(&findings, scaler, || self.first_non_finite())?;
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
        let is_unchanged = !self.changed;
        Optimizer::zero_grad(self, how)?;
        Ok(is_unchanged)
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

/// The figures of a step on the device.
struct Found {
    /// A scaler's flag.
    found_inf: Option<Tensor>,
    norm: Option<clip::Norm>,
    /// Whether a gradient is not finite, where neither of the others tells.
    flag: Option<Tensor>,
    loss: Option<Tensor>,
}

/// Clips and decides without synchronising. Its effect on gradients that are not finite does not matter, because the step is
/// skipped; with [`NonFinite::Ignore`] it is wanted.
fn decide_on_device(
    grads: &[Tensor],
    found: &Found,
    settings: StepSettings,
    scaler: &mut dyn GradScaler,
) -> Result<StepDecision> {
    let _no_grad = tch::no_grad_guard();
    let Found { found_inf, norm, flag, loss } = found;
    let device = grads.first().map_or(Device::Cpu, Tensor::device);
    let overflow = match found_inf {
        Some(found_inf) => wide(found_inf)?,
        None if scaler.device_scaler().is_some() => {
            let reason = "it decides on the device whether to skip a step, but returned no flag";
            return Err(Error::config("gradient scaler", reason));
        }
        None => Tensor::f_zeros([1], (Kind::Double, device))?,
    };
    let device = overflow.device();
    let mut skip = overflow.shallow_clone();
    let is_bad = |number: &Tensor| -> Result<Tensor> {
        let finite = wide(number)?.f_to_device(device)?.f_isfinite()?.f_to_kind(Kind::Double)?;
        Ok(finite.f_neg()?.try_add_scalar(1.0)?)
    };
    if let (Some(norm), Some(limit)) = (norm, settings.clip) {
        clip::scale_to_(grads, norm, limit)?;
        if settings.non_finite != NonFinite::Ignore {
            skip = skip.f_maximum(&is_bad(norm.tensor())?)?;
        }
    }
    if let Some(flag) = flag {
        skip = skip.f_maximum(&wide(flag)?.f_to_device(device)?)?;
    }
    if let Some(loss) = loss {
        skip = skip.f_maximum(&is_bad(loss)?)?;
    }
    let norm = match norm {
        Some(norm) => wide(norm.tensor())?,
        None => skip.try_full_like(f64::NAN)?,
    };
    let mut figures = vec![skip.shallow_clone(), overflow, norm];
    match (scaler.device_scaler(), found_inf) {
        (Some(scaler), Some(found_inf)) => {
            // The update may overwrite the state.
            figures.push(scaler.device_state().f_narrow_copy(0, 0, 1)?);
            scaler.update(found_inf)?;
            figures.push(scaler.device_state());
        }
        (None, None) => {
            scaler.update(false)?;
            figures.push(skip.try_full_like(scaler.current())?);
        }
        _ => {
            return Err(Error::config(
                "gradient scaler",
                "it decided on the device before, but does not now",
            ));
        }
    }
    let figures: Vec<Tensor> = figures.iter().map(|t| t.f_to_device(device)).collect::<Result<_, _>>()?;
    Ok(StepDecision::Device { skip: skip.f_to_kind(Kind::Float)?, figures: Tensor::f_cat(&figures, 0)? })
}

/// Returns one element as an fp64 vector.
fn wide(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.f_to_kind(Kind::Double)?.f_reshape([1])?)
}
