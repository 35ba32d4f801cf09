//! Updates during backward: each parameter is updated as soon as its gradient is complete, and the gradient is freed.
//!
//! ```text
//! backward of layer 5 │ update of 5 │ backward of layer 4 │ update of 4 │ …
//! ```
//!
//! So the gradients of a whole model are never in memory at once, which for bf16 weights saves 2 bytes per parameter. The bits are those of
//! [`DeviceOptimizer`]. What needs all gradients before the first update is refused: a maximum gradient norm, a loss scaler, and
//! [`NonFinite::Skip`]. With [`NonFinite::Fail`] each gradient is checked before its update; parameters behind one that is not finite are updated
//! by then, and the error says that the step cannot be undone. A loss that is not finite makes the first gradient so, before any update. With
//! several micro-batches a gradient is complete in the last one, so all gradients are in memory until then.
//!
//! A parameter whose gradient arrives in several parts during one backward, as of a weight that several recomputed layers share, is
//! refused in its first step.
//!
//! Sources: LOMO (Lv et al., arXiv:2306.09782); `torch.Tensor.register_post_accumulate_grad_hook`.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use runtime::autograd::GradientHook;
use runtime::precision::identity;
use tch::Tensor;

use super::{DeviceOptimizer, Group, Optimizer, Rule, StepDecision, StepSettings, ZeroGrad};
use crate::clip::NonFinite;
use crate::error::{Error, Result};
use crate::scaler::{GradScaler, NoScaler};

/// A [`DeviceOptimizer`] whose updates run during backward. See the [module](self).
pub struct OptimizerInBackward {
    state: Arc<Mutex<State>>,
    groups: Vec<Group>,
    rule: Arc<dyn Rule>,
    _hooks: Vec<GradientHook>,
}

/// A step under way.
struct State {
    optimizer: DeviceOptimizer,
    settings: StepSettings,
    /// For each parameter of the optimizer.
    progress: Vec<Progress>,
    /// Whether the step has changed parameters or state.
    changed: bool,
}

#[derive(Clone, Copy, Default)]
struct Progress {
    /// Additions to the gradient.
    additions: u64,
    updated: bool,
}

impl OptimizerInBackward {
    /// Sets a hook at each parameter, which has at most one: none of them may be offloaded or sharded.
    ///
    /// # Errors
    /// A parameter that needs no gradient.
    pub fn new(optimizer: DeviceOptimizer) -> Result<Self> {
        let (groups, rule) = (optimizer.groups().to_vec(), optimizer.shared_rule());
        let parameters: Vec<Tensor> = optimizer.tensors().map(Tensor::shallow_clone).collect();
        let progress = vec![Progress::default(); parameters.len()];
        let settings = StepSettings::default();
        let state = Arc::new(Mutex::new(State { optimizer, settings, progress, changed: false }));
        let hooks = parameters.iter().enumerate().map(|(index, parameter)| {
            let state = state.clone();
            let added = move || state.lock().add(index).map_err(runtime::Error::from);
            Ok(GradientHook::new(parameter, added)?)
        });
        let hooks = hooks.collect::<Result<_>>()?;
        Ok(Self { state, groups, rule, _hooks: hooks })
    }
}

impl State {
    /// Updates a parameter if the addition to its gradient was the step's last.
    fn add(&mut self, index: usize) -> Result<()> {
        let Progress { additions, updated } = &mut self.progress[index];
        if *updated {
            let reason = "got another gradient after its update: it is used by several layers that are recomputed, or in another backward; \
                          update after backward, without `OptimizerInBackward`";
            return Err(Error::tensor("optimizer", self.optimizer.parameter_name(index), reason));
        }
        *additions += 1;
        if *additions < self.settings.micro_batches {
            return Ok(());
        }
        *updated = true;
        let done = self.optimizer.update_one(index, self.settings.non_finite == NonFinite::Fail);
        self.changed |= self.optimizer.changed;
        done
    }
}

fn refuse<T>(reason: &str) -> Result<T> {
    Err(Error::config("optimizer", format!("updates during backward do not work with {reason}")))
}

impl Optimizer for OptimizerInBackward {
    fn check(&self, scaler: &mut dyn GradScaler) -> Result<()> {
        if !scaler.is_enabled() {
            return Ok(());
        }
        refuse(
            "a loss scaler, since weights are updated before it is known whether a gradient overflows; train in bf16 or fp32, which need \
             no scaler",
        )
    }

    /// # Errors
    /// A maximum gradient norm; [`NonFinite::Skip`].
    fn begin(&mut self, settings: StepSettings) -> Result<()> {
        if settings.clip.is_some() {
            return refuse("a maximum gradient norm, which needs all gradients before the first update");
        }
        if settings.non_finite == NonFinite::Skip {
            return refuse("steps that are skipped, which needs all gradients before the first update");
        }
        let mut state = self.state.lock();
        Optimizer::begin(&mut state.optimizer, settings)?;
        (state.settings, state.changed) = (settings, false);
        state.progress.fill(Progress::default());
        Ok(())
    }

    fn refuses_capture(&self) -> Option<String> {
        Some("weights are updated during backward".to_owned())
    }

    fn watch_loss(&mut self, loss: &Tensor) {
        self.state.lock().optimizer.watch_loss(loss);
    }

    fn unscale_and_clip(&mut self, scaler: &mut dyn GradScaler) -> Result<StepDecision> {
        self.check(scaler)?;
        self.state.lock().optimizer.unscale_and_clip(&mut NoScaler)
    }

    /// Updates the parameters whose gradient had fewer parts than micro-batches.
    fn take_step(&mut self, decision: &StepDecision) -> Result<()> {
        let mut state = self.state.lock();
        let done = Optimizer::take_step(&mut state.optimizer, decision);
        state.changed |= state.optimizer.changed;
        done
    }

    fn zero_grad(&mut self, how: ZeroGrad) -> Result<()> {
        let mut state = self.state.lock();
        Optimizer::zero_grad(&mut state.optimizer, how)?;
        state.changed = false;
        state.progress.fill(Progress::default());
        Ok(())
    }

    fn abandon(&mut self, how: ZeroGrad) -> Result<bool> {
        let is_unchanged = !self.state.lock().changed;
        self.zero_grad(how)?;
        Ok(is_unchanged)
    }

    fn has_gradient(&self, tensor: &Tensor) -> Result<bool> {
        let state = self.state.lock();
        for (parameter, progress) in state.optimizer.tensors().zip(&state.progress) {
            if identity(parameter)? == identity(tensor)? {
                return Ok(progress.additions > 0);
            }
        }
        Ok(tensor.f_grad()?.defined())
    }

    fn groups(&self) -> &[Group] {
        &self.groups
    }

    fn rule(&self) -> &dyn Rule {
        self.rule.as_ref()
    }

    fn learning_rates(&self) -> Vec<f64> {
        self.state.lock().optimizer.learning_rates()
    }

    fn state(&self) -> Result<Vec<(String, Tensor)>> {
        Ok(self.state.lock().optimizer.state())
    }

    fn load_state(&mut self, tensors: &[(String, Tensor)]) -> Result<()> {
        self.state.lock().optimizer.load_state(tensors)
    }

    fn state_bytes(&self) -> u64 {
        self.state.lock().optimizer.state_bytes()
    }
}

impl fmt::Debug for OptimizerInBackward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OptimizerInBackward")
            .field("optimizer", &self.state.lock().optimizer)
            .finish_non_exhaustive()
    }
}
