//! The standard optimizer: state and step are on the parameters' device.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use kernels::stochastic_rounding::Stream;
use runtime::autograd::{clear_gradients, gradients, set_grad};
use runtime::ops::TryScalar;
use runtime::ops::foreach;
use runtime::precision::identity;
use tch::{Device, Kind, Tensor};

use super::bucket::{self, Live, StepArguments};
use super::group::{Group, OptimizedParameter};
use super::rule::Rule;
use super::state::{self, ParameterState};
use super::{Implementation, StepSettings, ZeroGrad};
use crate::clip::{self, Findings};
use crate::error::{Error, Result};

/// A rule with its parameters and their state.
///
/// Its own methods are for hand-written loops; a [`Trainer`](crate::Trainer) uses those of [`Optimizer`](super::Optimizer).
#[derive(Debug)]
pub struct DeviceOptimizer {
    rule: Arc<dyn Rule>,
    groups: Vec<Group>,
    parameter: Vec<OptimizedParameter>,
    factor: f64,
    implementation: Implementation,
    master_weights: bool,
    pub(super) settings: StepSettings,
    /// The learning rate of each group in an fp64 scalar on its device, while steps are [`StepSettings::on_device`].
    rates: Option<Vec<Tensor>>,
    /// The loss of the step, if it is watched.
    pub(super) loss: Option<Tensor>,
    /// Whether the step that is running, or failed last, has changed parameters or state.
    pub(super) changed: bool,
}

impl DeviceOptimizer {
    /// # Errors
    /// No group; a parameter that is listed twice, also under two names, is not a leaf or not of a floating dtype; a rate, decay or
    /// coefficient outside its range.
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
        let (mut parameter, mut names, mut tensors) = (Vec::new(), BTreeSet::new(), HashMap::new());
        for (index, group) in groups.iter().enumerate() {
            group.check(rule.as_ref())?;
            let own = group.rule.as_deref().unwrap_or(rule.as_ref());
            for (name, tensor) in &group.parameters {
                if !names.insert(name.clone()) {
                    let reason = format!("the parameter `{name}` is listed twice; put it in one group, once");
                    return Err(Error::config("optimizer", reason));
                }
                if let Some(other) = tensors.insert(identity(tensor)?, name) {
                    let reason = format!(
                        "`{other}` and `{name}` are one tensor, which would be updated twice in each step; list it once"
                    );
                    return Err(Error::config("optimizer", reason));
                }
                parameter.push(OptimizedParameter::new(index, name, tensor)?);
                own.check_parameter(name, tensor)?;
            }
        }
        Ok(Self {
            rule: rule.into(),
            groups,
            parameter,
            factor: 1.0,
            implementation: Implementation::default(),
            master_weights: false,
            settings: StepSettings::default(),
            rates: None,
            loss: None,
            changed: false,
        })
    }

    /// Sets how steps are executed.
    #[must_use]
    pub fn with_implementation(mut self, implementation: Implementation) -> Self {
        self.implementation = implementation;
        self
    }

    /// Keeps an fp32 copy of each bf16 or fp16 parameter (4 B each) from its first step on, so that updates smaller than the
    /// parameter's last digit accumulate instead of being rounded away.
    #[must_use]
    pub fn with_master_weights(mut self) -> Self {
        self.master_weights = true;
        self
    }

    /// Rounds each updated bf16 or fp16 parameter stochastically
    /// ([`kernels::stochastic_rounding`]), so that updates smaller than its last digit have their effect on average instead of
    /// being rounded away; it takes no memory. The random numbers are a function of `seed`, the parameter's name, its step number and the
    /// element's index: the bits depend on neither threads nor [`Implementation`]'s order, and go on after
    /// [`DeviceOptimizer::load_state`]. A parameter with an fp32 copy is rounded to nearest.
    #[must_use]
    pub fn with_stochastic_rounding(self, seed: u64) -> Self {
        self.with_stochastic_rounding_of_parts(seed, |_| 0)
    }

    /// The same for parameters that are parts of larger ones, as ranks have them: `first` returns the index that the first element of the
    /// named parameter has in the whole, so that the parts have the bits of the whole.
    #[must_use]
    pub fn with_stochastic_rounding_of_parts(mut self, seed: u64, first: impl Fn(&str) -> u64) -> Self {
        for parameter in &mut self.parameter {
            let name = &parameter.name;
            parameter.stream = Some(Stream::new(seed, name).from_element(first(name)));
        }
        self
    }

    /// Makes each parameter a part of a larger one, as ranks have them: `whole` returns the elements of the named one. The state of a part is
    /// the part of the whole's state, where the rule allows such parts ([`Rule::granularity`]).
    #[must_use]
    pub fn with_parts(mut self, whole: impl Fn(&str) -> i64) -> Self {
        for parameter in &mut self.parameter {
            parameter.whole = whole(&parameter.name);
        }
        self
    }

    /// Sets the factor of every group's learning rate, from an [`LrSchedule`](crate::LrSchedule).
    ///
    /// # Errors
    /// A factor that is negative or not finite.
    pub fn set_factor(&mut self, factor: f64) -> Result<()> {
        if !(factor.is_finite() && factor >= 0.0) {
            let reason =
                format!("the learning-rate factor is {factor}; expected a finite number of at least 0");
            return Err(Error::config("optimizer", reason));
        }
        self.factor = factor;
        Ok(())
    }

    /// Returns the learning rate of each group's next step.
    pub fn learning_rates(&self) -> Vec<f64> {
        self.groups.iter().map(|group| group.lr * self.factor).collect()
    }

    /// Returns the parameter groups.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Returns the optimizer's rule.
    pub fn rule(&self) -> &dyn Rule {
        self.rule.as_ref()
    }

    /// Freezes, or with `frozen` false unfreezes, the group `name`: its parameters and state do not change.
    /// (`models::module::freeze` also saves computing their gradients.)
    ///
    /// # Errors
    /// A name that no group has.
    pub fn freeze(&mut self, name: &str, frozen: bool) -> Result<()> {
        let known: Vec<String> = self.groups.iter().map(|group| group.name.clone()).collect();
        let group = self.groups.iter_mut().find(|group| group.name == name).ok_or_else(|| {
            Error::config(
                "optimizer",
                format!("no group is called `{name}`; expected one of {}", known.join(", ")),
            )
        })?;
        group.frozen = frozen;
        Ok(())
    }

    /// Returns the gradients that the next step uses, in order, sharing memory with the parameters' own, so that clipping and
    /// unscaling can change them in place.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn gradients(&self) -> Result<Vec<Tensor>> {
        let live = self.parameter.iter().filter(|parameter| !self.groups[parameter.group].frozen);
        let tensors: Vec<&Tensor> = live.map(|parameter| &parameter.tensor).collect();
        Ok(gradients(&tensors)?.into_iter().flatten().collect())
    }

    /// Returns the first parameter whose gradient, of those that the next step uses, has an infinity or a NaN; waits for the device.
    pub(super) fn first_non_finite(&self) -> Result<Option<String>> {
        let live = self.parameter.iter().filter(|parameter| !self.groups[parameter.group].frozen);
        let named = live.map(|parameter| Ok((parameter.name.as_str(), parameter.tensor.f_grad()?)));
        let named: Vec<(&str, Tensor)> = named.collect::<Result<_>>()?;
        let named = named.into_iter().filter(|(_, grad)| grad.defined());
        Ok(clip::first_non_finite(named)?.map(str::to_owned))
    }

    /// Returns whether the device can decide to skip a step: [`DeviceOptimizer::step_unless`].
    pub(super) fn skips_on_device(&self) -> bool {
        let mut rules = self.groups.iter().map(|group| group.rule.as_deref().unwrap_or(self.rule.as_ref()));
        self.implementation == Implementation::Fused && rules.all(Rule::has_fused)
    }

    /// Clears all gradients.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn zero_grad(&self, how: ZeroGrad) -> Result<()> {
        let tensors: Vec<&Tensor> = self.parameter.iter().map(|parameter| &parameter.tensor).collect();
        if how == ZeroGrad::ToNone {
            return Ok(clear_gradients(&tensors)?);
        }
        let grads = gradients(&tensors)?.into_iter().flatten();
        let grads: Vec<Tensor> = grads.map(|grad| grad.f_detach()).collect::<Result<_, _>>()?;
        let _no_grad = tch::no_grad_guard();
        Ok(foreach::zero_(&grads)?)
    }

    /// Updates every parameter that has a gradient. A parameter without one, and its state, do not change.
    ///
    /// # Errors
    /// A sparse gradient; those of libtorch.
    pub fn step(&mut self) -> Result<()> {
        self.learn_steps()?;
        self.advance(None)
    }

    /// [`DeviceOptimizer::step`] if `found_inf`, a float tensor of one element on the parameters' device, is 0; if it is 1,
    /// parameters, state and step numbers do not change. The device decides without synchronising; the host reads the number of
    /// steps taken when [`DeviceOptimizer::state`] is called.
    ///
    /// # Errors
    /// An optimizer without a fused kernel, because the host would need the step number: then nothing is changed. Those of
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

    /// Prepares what a step that a graph repeats reads from the device: the learning rates, and master copies whose weights others have
    /// written.
    pub(super) fn write_for_graph(&mut self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let rates = self.learning_rates();
        match &mut self.rates {
            Some(tensors) => {
                for (tensor, rate) in tensors.iter_mut().zip(rates) {
                    let _ = tensor.try_fill_(rate)?;
                }
            }
            None => {
                let device = |group: &Group| {
                    group.parameters.first().map_or(Device::Cpu, |(_, tensor)| tensor.device())
                };
                let scalar = |(group, rate)| {
                    Ok(Tensor::try_full([] as [i64; 0], rate, (Kind::Double, device(group)))?)
                };
                self.rates = Some(self.groups.iter().zip(rates).map(scalar).collect::<Result<_>>()?);
            }
        }
        for parameter in &mut self.parameter {
            if let Some(state) = parameter.state.as_mut().filter(|state| state.master.is_some()) {
                state.keep_master(&parameter.tensor)?;
            }
        }
        Ok(())
    }

    /// Notes that a graph has repeated the last step, which the host's counters and the versions of tensors do not show.
    pub(super) fn note_replay(&mut self) -> Result<()> {
        for OptimizedParameter { group, tensor, state, .. } in &mut self.parameter {
            let Some(state) = state.as_mut().filter(|_| !self.groups[*group].frozen) else { continue };
            state.uncertain |= state.device_step.is_some();
            for written in [&*tensor].into_iter().chain(state.tensors()) {
                runtime::tensor_memory::bump_version(written)?;
            }
            state.wrote(tensor);
        }
        Ok(())
    }

    /// Reads the step numbers that only the device knows, in one copy.
    fn learn_steps(&mut self) -> Result<()> {
        let states = self.parameter.iter_mut().filter_map(|parameter| parameter.state.as_mut());
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

    /// Returns the parameters, in the order of their groups.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.parameter.iter().map(|parameter| &parameter.tensor)
    }

    pub(super) fn parameter_name(&self, index: usize) -> &str {
        &self.parameter[index].name
    }

    pub(super) fn shared_rule(&self) -> Arc<dyn Rule> {
        self.rule.clone()
    }

    /// Updates one parameter, and frees its gradient.
    ///
    /// # Errors
    /// A gradient that is not finite, if that is checked; those of [`DeviceOptimizer::step`].
    pub(super) fn update_one(&mut self, index: usize, is_checked: bool) -> Result<()> {
        self.changed = false;
        if self.groups[self.parameter[index].group].frozen {
            return Ok(());
        }
        let parameter = &mut self.parameter[index];
        let grad = parameter.tensor.f_grad()?;
        if is_checked && clip::found_non_finite(&[&grad])?.f_double_value(&[0])? != 0.0 {
            let findings = Findings { non_finite: true, ..Findings::default() };
            return Err(findings.error(Some(&parameter.name)));
        }
        self.learn_steps()?;
        self.advance_those(None, index..index + 1)?;
        Ok(set_grad(&self.parameter[index].tensor, None)?)
    }

    fn advance(&mut self, skip: Option<&Tensor>) -> Result<()> {
        self.advance_those(skip, 0..self.parameter.len())
    }

    fn advance_those(&mut self, skip: Option<&Tensor>, indices: Range<usize>) -> Result<()> {
        let _range = runtime::profile::range("optimizer.step");
        let _no_grad = tch::no_grad_guard();
        let &mut Self { ref rule, ref groups, ref rates, factor, implementation, master_weights, .. } = self;
        let parameters = &mut self.parameter[indices];
        let tensors: Vec<&Tensor> = parameters.iter().map(|parameter| &parameter.tensor).collect();
        let grads = gradients(&tensors)?;
        let mut live = Vec::with_capacity(grads.len());
        for (parameter, grad) in parameters.iter_mut().zip(grads) {
            let Some(grad) = grad.filter(|_| !groups[parameter.group].frozen) else { continue };
            if grad.is_sparse() {
                let reason =
                    "has a sparse gradient; use a dense one, for example an embedding without `sparse`";
                return Err(Error::tensor("optimizer", &parameter.name, reason));
            }
            let is_new = parameter.state.is_none();
            live.push(Live { parameter, grad, is_new });
        }
        let (rule, rates) = (rule.as_ref(), rates.as_deref().filter(|_| self.settings.on_device));
        self.changed = false;
        let arguments = StepArguments { rule, factor, implementation, rates, skip, master_weights };
        bucket::step(&mut live, groups, arguments, &mut self.changed)
    }

    /// Returns the state as named tensors, sharing memory: `NAME.step` (int64 scalar) and one `NAME.SLOT` per slot of the rule,
    /// for every parameter that was stepped.
    pub fn state(&self) -> Vec<(String, Tensor)> {
        let states =
            self.parameter.iter().filter_map(|parameter| Some((&parameter.name, parameter.state.as_ref()?)));
        states.flat_map(|(name, state)| state.named(name)).collect()
    }

    /// Loads a state from [`DeviceOptimizer::state`]. The state of a parameter without any tensor in it is reset.
    ///
    /// # Errors
    /// All names that are missing, unknown, or of another shape or dtype; then nothing is changed.
    pub fn load_state(&mut self, tensors: &[(String, Tensor)]) -> Result<()> {
        let rule = |parameter: &OptimizedParameter| {
            self.groups[parameter.group].rule.as_deref().unwrap_or(self.rule.as_ref())
        };
        let parameters = self.parameter.iter().map(|parameter| (parameter, rule(parameter)));
        let states = state::read(parameters, tensors)?;
        for (parameter, state) in self.parameter.iter_mut().zip(states) {
            parameter.state = state;
        }
        Ok(())
    }

    /// Returns the bytes of the state.
    pub fn state_bytes(&self) -> u64 {
        let bytes = |tensor: &Tensor| tensor.numel() as u64 * tensor.kind().elt_size_in_bytes() as u64;
        self.parameter
            .iter()
            .filter_map(|parameter| parameter.state.as_ref())
            .map(|state| state.tensors().map(bytes).sum::<u64>())
            .sum()
    }
}
