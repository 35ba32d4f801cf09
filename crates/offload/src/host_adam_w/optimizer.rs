//! [`HostAdamW`] as the [`Optimizer`] of a [`training::Trainer`].

use runtime::ops::foreach;
use tch::{Device, Tensor};
use training::clip::{self, Findings, NonFinite};
use training::optimizer::{Group, Optimizer, Rule, StepDecision, StepSettings, ZeroGrad};
use training::scaler::GradScaler;

use super::{HostAdamW, StateBytes};
use crate::error::refused;

type Result<T> = training::Result<T>;

impl HostAdamW {
    /// Whether gradients of layers may still be on their way to the host.
    fn waits_for_gradients(&self) -> bool {
        self.shared.state.lock().layers.iter().any(|layer| layer.begun && !layer.stepped)
    }
}

impl Optimizer for HostAdamW {
    /// Refuses loss scalers: layers are updated during backward, before all gradients are known to be finite.
    fn check(&self, scaler: &mut dyn GradScaler) -> Result<()> {
        if !scaler.is_enabled() {
            return Ok(());
        }
        let reason = "HostAdamW cannot use a loss scaler: it updates layers during backward, before every gradient is known to be finite. \
                      Train in bf16 or fp32, which need no scaler, or use DeviceOptimizer, whose state is on the device";
        Err(refused("optimizer", reason).into())
    }

    fn begin(&mut self, settings: StepSettings) -> Result<()> {
        let refuse = |reason: String| Err(refused("optimizer", reason).into());
        let StepSettings { micro_batches, factor, clip, .. } = settings;
        if micro_batches == 0 {
            return refuse("a step of 0 micro-batches; expected at least 1".to_owned());
        }
        if !(factor.is_finite() && factor >= 0.0) {
            return refuse(format!(
                "the learning-rate factor is {factor}; expected a finite number of at least 0"
            ));
        }
        clip.map_or(Ok(()), clip::check)?;
        let mut state = self.shared.state.lock();
        if state.layers.iter().any(|layer| layer.begun) {
            return refuse("the current step already has gradients; end it with `step` first".to_owned());
        }
        state.settings = settings;
        self.loss = None;
        self.rest.as_mut().map_or(Ok(()), |rest| rest.begin(settings))
    }

    fn watch_loss(&mut self, loss: &Tensor) {
        self.loss = Some(loss.detach());
    }

    fn unscale_and_clip(&mut self, scaler: &mut dyn GradScaler) -> Result<StepDecision> {
        self.check(scaler)?;
        let settings = self.shared.state.lock().settings;
        let StepSettings { clip, non_finite, .. } = settings;
        let loss = self.loss.take();
        if clip.is_none() && non_finite == NonFinite::Ignore {
            return Ok(StepDecision::Host { norm: None, skip: false, overflow: false });
        }
        let loss = loss.filter(|_| non_finite != NonFinite::Ignore);
        let loss = loss.map(|loss| loss.f_double_value(&[0])).transpose()?;
        let mut named = Vec::new();
        for (name, tensor) in &self.parameters {
            let gradient = tensor.f_grad()?;
            named.extend(gradient.defined().then_some((name.as_str(), gradient)));
        }
        // What was updated within backward has none any more, and its updates may go on.
        let on_host = named.iter().any(|(_, gradient)| gradient.device() == Device::Cpu);
        if clip.is_some() || on_host && self.waits_for_gradients() {
            self.engine.synchronize().map_err(training::Error::from)?;
        }
        let gradients: Vec<&Tensor> = named.iter().map(|(_, gradient)| gradient).collect();
        let norm = clip.map(|_| clip::norm(&gradients)?.read()).transpose()?;
        let flag =
            || Ok::<_, training::Error>(clip::found_non_finite(&gradients)?.f_double_value(&[0])? != 0.0);
        let non_finite = if norm.is_none() { flag()? } else { false };
        let findings = Findings { loss, norm, non_finite, overflow: false };
        let culprit = || {
            let named = named.iter().map(|(name, gradient)| (*name, gradient.shallow_clone()));
            Ok(clip::first_non_finite(named)?.map(str::to_owned))
        };
        let skip = settings.skips(&findings, scaler, culprit)?;
        Ok(StepDecision::Host { norm, skip, overflow: false })
    }

    fn take_step(&mut self, decision: &StepDecision) -> Result<()> {
        let &StepDecision::Host { norm, skip, .. } = decision else {
            let reason =
                "HostAdamW does not support steps that are decided on the device; use DeviceOptimizer";
            return Err(refused("optimizer", reason).into());
        };
        if skip {
            return Ok(());
        }
        let clip = self.shared.state.lock().settings.clip;
        let factor = norm.zip(clip).and_then(|(norm, limit)| clip::factor(norm, limit));
        // What allocates comes before the first update, so that a refusal leaves everything as it was.
        self.shared.state.lock().create(&self.engine)?;
        if let Some(rest) = &mut self.rest {
            if let Some(factor) = factor {
                let _no_grad = tch::no_grad_guard();
                foreach::mul_scalar_(&rest.gradients()?, factor)?;
            }
            rest.step()?;
        }
        self.step_layers(factor)?;
        if !self.options.overlap {
            self.engine.synchronize()?;
        }
        self.end();
        if self.options.overlap {
            self.engine.send_ahead()?;
        }
        Ok(())
    }

    fn zero_grad(&mut self, how: ZeroGrad) -> Result<()> {
        self.forget_gradients()?;
        for (_, tensor) in self.groups.iter().filter(|group| group.frozen).flat_map(|group| &group.parameters)
        {
            if tensor.f_grad()?.defined() {
                runtime::autograd::set_grad(tensor, None)?;
            }
        }
        if let Some(rest) = &mut self.rest {
            Optimizer::zero_grad(rest, how)?;
        }
        self.end();
        Ok(())
    }

    fn abandon(&mut self, how: ZeroGrad) -> Result<bool> {
        let failed = self.engine.update_has_failed();
        let mut state = self.shared.state.lock();
        let mut is_restored = !failed && !state.updating;
        if is_restored {
            let new = state.parameters.iter_mut().filter(|parameter| parameter.step == 0);
            new.for_each(|parameter| (parameter.moments, parameter.master) = (None, None));
        }
        drop(state);
        if let Some(rest) = &mut self.rest {
            is_restored &= rest.abandon(how)?;
        }
        self.zero_grad(how)?;
        Ok(is_restored)
    }

    fn synchronize(&self) -> Result<()> {
        Ok(self.engine.synchronize()?)
    }

    fn groups(&self) -> &[Group] {
        &self.groups
    }

    fn rule(&self) -> &dyn Rule {
        &self.rule
    }

    fn learning_rates(&self) -> Vec<f64> {
        let factor = self.shared.state.lock().settings.factor;
        self.groups.iter().map(|group| group.lr * factor).collect()
    }

    fn state(&self) -> Result<Vec<(String, Tensor)>> {
        Ok(self.named_state()?)
    }

    fn load_state(&mut self, tensors: &[(String, Tensor)]) -> Result<()> {
        Ok(self.load_named_state(tensors)?)
    }

    fn state_bytes(&self) -> u64 {
        let StateBytes { host, device } = HostAdamW::state_bytes(self);
        host + device
    }
}
