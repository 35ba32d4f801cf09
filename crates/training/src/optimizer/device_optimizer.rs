//! The ordinary optimizer: state and step where the parameters are.

use std::collections::BTreeSet;

use runtime::ops::foreach;
use tch::Tensor;

use super::bucket::{self, How};
use super::group::{Group, Held};
use super::rule::Rule;
use super::state::{self, ParameterState};
use super::{Implementation, StepSettings, ZeroGrad};
use crate::error::{Error, Result};

/// A rule with the parameters that it changes, and its state beside them.
///
/// Its own methods are for loops written by hand; a [`Trainer`](crate::Trainer) uses those of [`Optimizer`](super::Optimizer).
#[derive(Debug)]
pub struct DeviceOptimizer {
    rule: Box<dyn Rule>,
    groups: Vec<Group>,
    held: Vec<Held>,
    factor: f64,
    implementation: Implementation,
    master_weights: bool,
    pub(super) settings: StepSettings,
}

impl DeviceOptimizer {
    /// # Errors
    /// No group; a parameter listed twice, that is no leaf, or whose dtype is not floating; a rate, decay or coefficient
    /// outside its range.
    pub fn new(rule: impl Rule + 'static, groups: Vec<Group>) -> Result<Self> {
        Self::boxed(Box::new(rule), groups)
    }

    /// [`DeviceOptimizer::new`] for a rule chosen at run time.
    ///
    /// # Errors
    /// As [`DeviceOptimizer::new`].
    pub fn boxed(rule: Box<dyn Rule>, groups: Vec<Group>) -> Result<Self> {
        rule.check()?;
        if groups.is_empty() {
            return Err(Error::config("optimizer", "no parameter group; give at least one"));
        }
        let (mut held, mut names) = (Vec::new(), BTreeSet::new());
        for (index, group) in groups.iter().enumerate() {
            group.check(rule.as_ref())?;
            for (name, tensor) in &group.parameters {
                if !names.insert(name.clone()) {
                    let reason = format!("the parameter `{name}` is listed twice; put it in one group, once");
                    return Err(Error::config("optimizer", reason));
                }
                held.push(Held::new(index, name, tensor)?);
            }
        }
        Ok(Self {
            rule,
            groups,
            held,
            factor: 1.0,
            implementation: Implementation::default(),
            master_weights: false,
            settings: StepSettings::default(),
        })
    }

    /// Chooses how a step runs.
    #[must_use]
    pub fn with_implementation(mut self, implementation: Implementation) -> Self {
        self.implementation = implementation;
        self
    }

    /// Keeps an fp32 copy of each bf16 or fp16 parameter (4 B each) from its first step on, so that updates smaller than
    /// the parameter's last digit add up instead of being rounded away.
    #[must_use]
    pub fn with_master_weights(mut self) -> Self {
        self.master_weights = true;
        self
    }

    /// What multiplies every group's learning rate from now on: a [`Schedule`](crate::Schedule)'s factor.
    ///
    /// # Errors
    /// A factor that is negative or not finite.
    pub fn set_factor(&mut self, factor: f64) -> Result<()> {
        if !(factor.is_finite() && factor >= 0.0) {
            let reason =
                format!("the learning rate's factor is {factor}; expected a finite number from 0 on");
            return Err(Error::config("optimizer", reason));
        }
        self.factor = factor;
        Ok(())
    }

    /// The learning rate of each group's next step.
    pub fn learning_rates(&self) -> Vec<f64> {
        self.groups.iter().map(|group| group.lr * self.factor).collect()
    }

    /// The groups.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// The rule.
    pub fn rule(&self) -> &dyn Rule {
        self.rule.as_ref()
    }

    /// Freezes, or with `frozen` false unfreezes, the group called `name`: its parameters are not changed, and their state
    /// waits. (To save their gradients' computation too, `models::module::freeze` them.)
    ///
    /// # Errors
    /// A name that no group has.
    pub fn freeze(&mut self, name: &str, frozen: bool) -> Result<()> {
        let known: Vec<String> = self.groups.iter().map(|group| group.name.clone()).collect();
        let group = self.groups.iter_mut().find(|group| group.name == name).ok_or_else(|| {
            Error::config("optimizer", format!("no group is called `{name}`; there are {}", known.join(", ")))
        })?;
        group.frozen = frozen;
        Ok(())
    }

    /// The gradients that the next step will use, in order, sharing memory with the parameters' own: what clipping and
    /// unscaling change in place.
    ///
    /// # Errors
    /// Those of libtorch.
    pub fn gradients(&self) -> Result<Vec<Tensor>> {
        let live = self.held.iter().filter(|held| !self.groups[held.group].frozen);
        let grads = live.map(|held| Ok(held.tensor.f_grad()?)).collect::<Result<Vec<_>>>()?;
        Ok(grads.into_iter().filter(Tensor::defined).collect())
    }

    /// Removes or clears all gradients.
    ///
    /// # Errors
    /// Those of libtorch.
    pub fn zero_grad(&self, how: ZeroGrad) -> Result<()> {
        let mut grads = Vec::new();
        for held in &self.held {
            let grad = held.tensor.f_grad()?;
            match how {
                _ if !grad.defined() => {}
                ZeroGrad::ToNone => runtime::autograd::set_grad(&held.tensor, None)?,
                ZeroGrad::ToZeros => grads.push(grad.f_detach()?),
            }
        }
        let _no_grad = tch::no_grad_guard();
        Ok(foreach::zero_(&grads)?)
    }

    /// Changes every parameter that has a gradient; one without, and its state, stay as they are.
    ///
    /// # Errors
    /// A sparse gradient; those of libtorch.
    pub fn step(&mut self) -> Result<()> {
        self.learn_steps()?;
        self.advance(None)
    }

    /// [`DeviceOptimizer::step`] where `found_inf`, a float tensor of one element on the parameters' device, is 0; where it is 1,
    /// parameters, state and step numbers stay as they are to the bit. It is the device that looks: the host reads nothing,
    /// and learns how many steps were taken when [`DeviceOptimizer::state`] is asked for.
    ///
    /// # Errors
    /// An optimizer without a fused kernel, whose step number the host would have to know: nothing is changed then; those of
    /// [`DeviceOptimizer::step`].
    pub fn step_unless(&mut self, found_inf: &Tensor) -> Result<()> {
        let rules = self.groups.iter().map(|group| group.rule.as_deref().unwrap_or(self.rule.as_ref()));
        if let Some(rule) = rules.into_iter().find(|rule| !rule.has_fused()) {
            let reason = format!(
                "{} has no fused kernel, so that it cannot leave a step out on the device; take Adam or AdamW, or a scaler \
                 that decides on the host",
                rule.name()
            );
            return Err(Error::config("optimizer", reason));
        }
        if self.implementation != Implementation::Fused {
            let reason = format!(
                "Implementation::{:?} cannot leave a step out on the device; take Implementation::Fused, or a scaler that \
                 decides on the host",
                self.implementation
            );
            return Err(Error::config("optimizer", reason));
        }
        self.advance(Some(found_inf))
    }

    /// Reads the step numbers that only the device knows, in one copy.
    fn learn_steps(&mut self) -> Result<()> {
        let states = self.held.iter_mut().filter_map(|held| held.state.as_mut());
        let uncertain: Vec<&mut ParameterState> = states.filter(|state| state.uncertain).collect();
        let steps: Vec<&Tensor> = uncertain.iter().filter_map(|state| state.device_step.as_ref()).collect();
        let Some(device) = steps.first().map(|step| step.device()) else { return Ok(()) };
        let steps: Vec<Tensor> =
            steps.iter().map(|step| step.f_to_device(device)).collect::<Result<_, _>>()?;
        let steps = runtime::ops::read(&Tensor::f_stack(&steps, 0)?)?;
        for (state, step) in uncertain.into_iter().zip(steps) {
            (state.step, state.uncertain) = (step as u64, false);
        }
        Ok(())
    }

    fn advance(&mut self, skip: Option<&Tensor>) -> Result<()> {
        let _range = runtime::profile::range("optimizer.step");
        let _no_grad = tch::no_grad_guard();
        let mut live = Vec::new();
        for held in &mut self.held {
            if self.groups[held.group].frozen {
                continue;
            }
            let grad = held.tensor.f_grad()?;
            if !grad.defined() {
                continue;
            }
            if grad.is_sparse() {
                let reason =
                    "has a sparse gradient; make it dense, for example an embedding without `sparse`".into();
                return Err(Error::Tensor { operation: "optimizer", name: held.name.clone(), reason });
            }
            let rule = self.groups[held.group].rule.as_deref().unwrap_or(self.rule.as_ref());
            match &mut held.state {
                None => held.state = Some(ParameterState::new(rule, &held.tensor, self.master_weights)?),
                // A state that was loaded may be from a run without.
                Some(state) if self.master_weights => state.keep_master(&held.tensor)?,
                Some(_) => {}
            }
            live.push((held, grad));
        }
        let &mut Self { ref rule, factor, implementation, .. } = self;
        bucket::step(live, &self.groups, How { rule: rule.as_ref(), factor, implementation, skip })
    }

    /// The state as named tensors: `NAME.step` (int64 scalar) and one `NAME.SLOT` for each of the rule's slots, for every
    /// parameter that has been stepped. They share memory with the optimizer's own.
    pub fn state(&self) -> Vec<(String, Tensor)> {
        let states = self.held.iter().filter_map(|held| Some((&held.name, held.state.as_ref()?)));
        states.flat_map(|(name, state)| state.named(name)).collect()
    }

    /// Puts back what [`DeviceOptimizer::state`] gave. A parameter without any tensor in it starts anew.
    ///
    /// # Errors
    /// [`Error::State`] with all names that are missing, not known, or of another shape or dtype; nothing is changed then.
    pub fn load_state(&mut self, tensors: &[(String, Tensor)]) -> Result<()> {
        let rule = |held: &Held| self.groups[held.group].rule.as_deref().unwrap_or(self.rule.as_ref());
        let states =
            state::read(self.held.iter().map(|held| (&held.name, &held.tensor, rule(held))), tensors)?;
        for (held, state) in self.held.iter_mut().zip(states) {
            held.state = state;
        }
        Ok(())
    }

    /// Bytes that the state takes.
    pub fn state_bytes(&self) -> u64 {
        let of = |tensor: &Tensor| tensor.numel() as u64 * tensor.kind().elt_size_in_bytes() as u64;
        self.held
            .iter()
            .filter_map(|held| held.state.as_ref())
            .map(|state| state.tensors().map(of).sum::<u64>())
            .sum()
    }
}
