//! Optimizers by hand: one [`Rule`] with one mathematics each, over parameter groups.
//!
//! With parameter θ, gradient g, learning rate η, weight decay λ, step number t from 1:
//!
//! | rule | update |
//! |---|---|
//! | [`Sgd`] | θ ← θ − η·g |
//! | [`Momentum`] | m ← μ·m + g; θ ← θ − η·m |
//! | [`Nesterov`] | m ← μ·m + g; θ ← θ − η·(g + μ·m) |
//! | [`AdaGrad`] | s ← s + g²; θ ← θ − η·g / (√s + ε) |
//! | [`RmsProp`] | s ← α·s + (1−α)·g²; θ ← θ − η·g / (√s + ε) |
//! | [`Adam`] | m ← β₁·m + (1−β₁)·g; v ← β₂·v + (1−β₂)·g²; θ ← θ − η·m̂ / (√v̂ + ε) |
//! | [`AdamW`] | θ ← (1 − η·λ)·θ, then Adam's |
//!
//! In all but AdamW the weight decay is the gradient of an L2 penalty: g ← g + λ·θ. All follow PyTorch's conventions. What
//! differs: state and arithmetic of a half-precision parameter are fp32, rounded once into the parameter (PyTorch keeps
//! the state in the parameter's own dtype); with [`Optimizer::with_master_weights`] the unrounded parameter is kept too.
//!
//! ```
//! use tch::{Kind, Tensor, kind};
//! use training::optimizer::{AdamW, Group, Optimizer, ZeroGrad};
//!
//! let w = Tensor::randn([4], kind::FLOAT_CPU).set_requires_grad(true);
//! let group = Group { weight_decay: 0.1, ..Group::new(vec![("w".into(), w.shallow_clone())], 0.05) };
//! let mut optimizer = Optimizer::new(AdamW::default(), vec![group])?;
//! for _ in 0..200 {
//!     runtime::autograd::backward(&[&(&w - 1.0).square().sum(Kind::Float)])?;
//!     optimizer.step()?;
//!     optimizer.zero_grad(ZeroGrad::ToNone)?;
//! }
//! assert!((w.mean(Kind::Float).double_value(&[]) - 1.0).abs() < 0.1);
//! # Ok::<(), training::Error>(())
//! ```

mod adagrad;
mod adam;
mod adam_w;
mod bucket;
mod group;
mod momentum;
mod nesterov;
mod rms_prop;
mod rule;
mod sgd;
mod state;

use std::collections::BTreeSet;

use runtime::ops::foreach;
use tch::{Kind, Tensor};

pub use adagrad::AdaGrad;
pub use adam::Adam;
pub use adam_w::AdamW;
pub use group::Group;
pub use momentum::Momentum;
pub use nesterov::Nesterov;
pub use rms_prop::RmsProp;
pub use rule::{Hyper, Rule, Tensors};
pub use sgd::Sgd;

use crate::error::{Error, Result};
use bucket::How;
use group::Held;
use state::ParameterState;

/// How a step runs over the parameters. The results agree to rounding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Implementation {
    /// One parameter after the other: the least temporary memory, the most calls.
    ForLoop,
    /// Each operation over all parameters at once: few kernels on CUDA, temporaries as large as the parameters.
    Foreach,
    /// The whole update in one kernel, without temporaries, where the rule has one ([`Adam`], [`AdamW`]); else `Foreach`.
    #[default]
    Fused,
}

/// What becomes of the gradients between steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum ZeroGrad {
    /// Their memory is freed; the next backward stores instead of adding.
    #[default]
    ToNone,
    /// They are filled with zeros, which costs a pass over memory now and another at the next backward. A parameter without
    /// a gradient stays without.
    ToZeros,
}

/// A rule with the parameters it changes and its state.
#[derive(Debug)]
pub struct Optimizer {
    rule: Box<dyn Rule>,
    groups: Vec<Group>,
    held: Vec<Held>,
    factor: f64,
    implementation: Implementation,
    master_weights: bool,
}

impl Optimizer {
    /// # Errors
    /// No group; a parameter listed twice, that is no leaf, or whose dtype is not floating; a rate, decay or coefficient
    /// outside its range.
    pub fn new(rule: impl Rule + 'static, groups: Vec<Group>) -> Result<Self> {
        Self::boxed(Box::new(rule), groups)
    }

    /// [`Optimizer::new`] for a rule chosen at run time.
    ///
    /// # Errors
    /// As [`Optimizer::new`].
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

    /// [`Optimizer::step`] where `found_inf`, a float tensor of one element on the parameters' device, is 0; where it is 1,
    /// parameters, state and step numbers stay as they are to the bit. It is the device that looks: the host reads nothing,
    /// and learns how many steps were taken when [`Optimizer::state`] is asked for.
    ///
    /// # Errors
    /// An optimizer without a fused kernel, whose step number the host would have to know: nothing is changed then; those of
    /// [`Optimizer::step`].
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

    /// Puts back what [`Optimizer::state`] gave. A parameter without any tensor in it starts anew.
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

/// The dtype that a parameter of `kind` is computed in.
fn work_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}
