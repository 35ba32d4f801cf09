//! Parameter groups: parameters that share a learning rate, a weight decay and a rule.

use std::borrow::Borrow;
use std::sync::Arc;

use kernels::stochastic_rounding::Stream;
use tch::{Kind, Tensor};

use super::rule::{Rule, not_negative};
use super::state::ParameterState;
use crate::error::{Error, Result};

/// Parameters with their own settings. A clone refers to the same parameters.
#[derive(Debug)]
pub struct Group {
    /// The name, for [`DeviceOptimizer::freeze`](super::DeviceOptimizer::freeze).
    pub name: String,
    /// Parameters, which must be leaves, with their names.
    pub parameters: Vec<(String, Tensor)>,
    /// Learning rate, before the schedule's factor.
    pub lr: f64,
    /// Weight decay: decoupled or an L2 penalty, as the [module](super) says for each rule.
    pub weight_decay: f64,
    /// Whether steps skip the group.
    pub frozen: bool,
    /// A rule instead of the optimizer's: with other coefficients, or another rule, as those that [`Muon`](super::Muon) does not update have.
    pub rule: Option<Arc<dyn Rule>>,
}

impl Clone for Group {
    fn clone(&self) -> Self {
        let parameters = self.parameters.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
        let &Self { ref name, lr, weight_decay, frozen, ref rule, .. } = self;
        let (name, parameters, rule) = (name.clone(), parameters.collect(), rule.clone());
        Self { name, parameters, lr, weight_decay, frozen, rule }
    }
}

impl Group {
    /// Creates a group called `all` without weight decay, from `models::module::trainable` or other named leaves.
    pub fn new(parameters: impl IntoIterator<Item = (String, impl Borrow<Tensor>)>, lr: f64) -> Self {
        let owned = parameters.into_iter().map(|(name, tensor)| (name, tensor.borrow().shallow_clone()));
        let parameters = owned.collect();
        Self { name: "all".into(), parameters, lr, weight_decay: 0.0, frozen: false, rule: None }
    }

    /// Creates two groups, `decay` and `no_decay`: weight decay for matrices, none for biases and norm weights.
    pub fn by_dimension<'a>(
        parameters: impl IntoIterator<Item = (String, &'a Tensor)>,
        lr: f64,
        weight_decay: f64,
    ) -> Vec<Self> {
        let (matrices, vectors): (Vec<_>, Vec<_>) =
            parameters.into_iter().partition(|(_, tensor)| tensor.dim() >= 2);
        let groups = [("decay", matrices, weight_decay), ("no_decay", vectors, 0.0)];
        let of = |(name, parameters, weight_decay): (&str, Vec<(String, &Tensor)>, f64)| Self {
            name: name.into(),
            weight_decay,
            ..Self::new(parameters, lr)
        };
        groups.into_iter().map(of).filter(|group| !group.parameters.is_empty()).collect()
    }

    pub(super) fn check(&self, rule: &dyn Rule) -> Result<()> {
        not_negative("optimizer", &format!("the learning rate of group `{}`", self.name), self.lr)?;
        not_negative("optimizer", &format!("the weight decay of group `{}`", self.name), self.weight_decay)?;
        self.rule.as_deref().unwrap_or(rule).check()
    }
}

/// A parameter of an optimizer.
#[derive(Debug)]
pub(super) struct OptimizedParameter {
    pub(super) group: usize,
    pub(super) name: String,
    pub(super) tensor: Tensor,
    /// Elements of the whole parameter; the tensor may be a part of it.
    pub(super) whole: i64,
    pub(super) state: Option<ParameterState>,
    /// The random numbers of its stochastic rounding.
    pub(super) stream: Option<Stream>,
}

impl OptimizedParameter {
    pub(super) fn new(group: usize, name: &str, tensor: &Tensor) -> Result<Self> {
        let refuse = |reason: String| Err(Error::tensor("optimizer", name, reason));
        if !tensor.defined() {
            return refuse("is undefined".into());
        }
        if !matches!(tensor.kind(), Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16) {
            return refuse(format!(
                "is {:?}; expected a floating-point tensor of 16, 32 or 64 bits",
                tensor.kind()
            ));
        }
        if !tensor.is_leaf() {
            return refuse(
                "was computed from other tensors; expected a leaf, which accumulates its gradient".into(),
            );
        }
        let (whole, tensor) = (tensor.numel() as i64, tensor.shallow_clone());
        Ok(Self { group, name: name.to_owned(), tensor, whole, state: None, stream: None })
    }
}
