//! Options, and the division of parameters into buckets.

use std::collections::HashMap;

use runtime::precision::identity;
use tch::{Kind, Tensor};
use training::optimizer::{Group, Rule};

use crate::mesh::{Mesh, Reduction};
use crate::shards::Shards;
use crate::{Result, refused};

/// The parts that are divided among ranks, and when gradients are reduced.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Optimizer state; gradients are reduced after backward (ZeRO-1).
    #[default]
    One,
    /// Optimizer state and gradients: each bucket is reduced and freed during backward (ZeRO-2).
    Two,
    /// Optimizer state, gradients, and the weights of layers, which are gathered for each use (ZeRO-3). Takes [`ShardingConfig::shards`].
    Three,
}

/// Options of [`ShardedOptimizer`](super::ShardedOptimizer).
#[derive(Debug, Clone)]
pub struct ShardingConfig {
    /// The parts that are divided.
    pub stage: Stage,
    /// How gradients are summed over ranks.
    pub reduction: Reduction,
    /// Keeps an fp32 copy of bf16 and fp16 weights, divided among ranks.
    pub master_weights: bool,
    /// The seed of stochastic rounding, for bf16 and fp16 weights without fp32 copies: the bits are those of one process
    /// ([`DeviceOptimizer::with_stochastic_rounding`](training::optimizer::DeviceOptimizer::with_stochastic_rounding)).
    pub stochastic_rounding: Option<u64>,
    /// Bytes of weights that are reduced and gathered together, at least. A bucket has whole parameters.
    pub bucket_bytes: usize,
    /// Names of the trained parameters in the order in which the model has them, so that a bucket's gradients arrive together; empty for
    /// the groups' order.
    pub order: Vec<String>,
    /// The layers of [`Stage::Three`], divided before.
    pub shards: Option<Shards>,
    /// Whether a backward adds to each parameter once, because no two recomputed segments use one parameter: then buckets are reduced and
    /// freed from the first backward on, which otherwise counts the additions first.
    pub one_addition: bool,
}

impl Default for ShardingConfig {
    fn default() -> Self {
        Self {
            stage: Stage::default(),
            reduction: Reduction::default(),
            master_weights: false,
            stochastic_rounding: None,
            bucket_bytes: 16 << 20,
            order: Vec::new(),
            shards: None,
            one_addition: false,
        }
    }
}

impl ShardingConfig {
    pub(super) fn check(&self, mesh: &Mesh) -> Result<()> {
        if self.bucket_bytes == 0 {
            return Err(refused("buckets of 0 bytes; expected at least 1"));
        }
        if self.master_weights && self.stochastic_rounding.is_some() {
            return Err(refused(
                "both ShardingConfig::master_weights and ShardingConfig::stochastic_rounding; a weight with an fp32 copy needs no random rounding, \
                 so give one of them",
            ));
        }
        match (&self.shards, self.stage) {
            (None, Stage::Three) => Err(refused(
                "Stage::Three without shards of layers; divide them by `Shards` and `offload::OffloadConfig::install`, and give ShardingConfig::shards",
            )),
            (Some(_), Stage::One | Stage::Two) => {
                Err(refused(format!("shards of layers with Stage::{:?}; take Stage::Three", self.stage)))
            }
            (Some(shards), _) if !shards.is_of(mesh) => Err(refused(
                "the shards of layers are of other ranks or replicas; make them over the optimizer's mesh",
            )),
            _ => Ok(()),
        }
    }
}

/// Returns the elements at whose multiples parameters of this rule may be divided; refuses a rule whose parameters may not be divided so.
pub(super) fn granularity(rule: &dyn Rule, stage: Stage) -> Result<i64> {
    match (rule.granularity(), stage) {
        (None, _) => Err(refused(format!(
            "the update of the rule {} depends on whole tensors, which are divided among ranks; take AdamW, AdamW8bit or Lion, or train in one \
             process",
            rule.name()
        ))),
        (Some(elements), Stage::Three) if elements > 1 => Err(refused(format!(
            "the state of the rule {} is in blocks of {elements} elements, and Stage::Three divides layers within blocks; take Stage::Two",
            rule.name()
        ))),
        (Some(elements), _) => Ok(elements),
    }
}

/// A parameter: its number, name and tensor.
pub(super) type Parameter<'a> = (usize, &'a str, &'a Tensor);

/// Refuses a tensor that is listed twice: it would be updated twice in each step.
pub(super) fn distinct(groups: &[Group]) -> Result<()> {
    let mut tensors = HashMap::new();
    for (name, tensor) in groups.iter().flat_map(|group| &group.parameters) {
        if let Some(other) = tensors.insert(identity(tensor)?, name) {
            let reason = format!(
                "`{other}` and `{name}` are one tensor, which would be updated twice in each step; list it once"
            );
            return Err(refused(reason));
        }
    }
    Ok(())
}

/// Puts the parameters into the order of [`ShardingConfig::order`].
pub(super) fn sort(parameters: &mut [Parameter<'_>], order: &[String]) -> Result<()> {
    if order.is_empty() {
        return Ok(());
    }
    let places: HashMap<&str, usize> = order.iter().map(String::as_str).zip(0..).collect();
    if let Some((_, name, _)) = parameters.iter().find(|(_, name, _)| !places.contains_key(name)) {
        let reason =
            format!("`{name}` is not in ShardingConfig::order; give the names of all trained parameters");
        return Err(refused(reason));
    }
    parameters.sort_by_key(|(_, name, _)| places[name]);
    Ok(())
}

/// Divides the parameters into buckets of one dtype, of consecutive ones: a bucket is reduced when all of its gradients are there, so it
/// should have those that backward computes together.
pub(super) fn divide<'a>(parameters: &[Parameter<'a>], bucket_bytes: usize) -> Vec<Vec<Parameter<'a>>> {
    let mut kinds: Vec<Kind> = Vec::new();
    for (_, _, tensor) in parameters {
        if !kinds.contains(&tensor.kind()) {
            kinds.push(tensor.kind());
        }
    }
    let mut buckets = Vec::new();
    for kind in kinds {
        let (mut bucket, mut size) = (Vec::new(), 0);
        for &parameter in parameters.iter().filter(|(_, _, tensor)| tensor.kind() == kind) {
            bucket.push(parameter);
            size += parameter.2.numel() * kind.elt_size_in_bytes();
            if size >= bucket_bytes {
                buckets.push(std::mem::take(&mut bucket));
                size = 0;
            }
        }
        if !bucket.is_empty() {
            buckets.push(bucket);
        }
    }
    buckets
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;

    #[test]
    fn buckets_have_whole_parameters_of_one_dtype() {
        let tensors = [
            Tensor::zeros([100], (Kind::Float, Device::Cpu)),
            Tensor::zeros([100], (Kind::BFloat16, Device::Cpu)),
            Tensor::zeros([1], (Kind::Float, Device::Cpu)),
            Tensor::zeros([50], (Kind::Float, Device::Cpu)),
        ];
        let parameters: Vec<Parameter<'_>> =
            tensors.iter().enumerate().map(|(number, tensor)| (number, "w", tensor)).collect();
        let numbers = |bytes| -> Vec<Vec<usize>> {
            let buckets = divide(&parameters, bytes);
            buckets.iter().map(|bucket| bucket.iter().map(|parameter| parameter.0).collect()).collect()
        };
        assert_eq!(numbers(400), [vec![0], vec![2, 3], vec![1]]);
        assert_eq!(numbers(404), [vec![0, 2], vec![3], vec![1]]);
        assert_eq!(numbers(usize::MAX), [vec![0, 2, 3], vec![1]]);
    }

    #[test]
    fn buckets_follow_the_model_whatever_groups_parameters_are_in() {
        let tensor = Tensor::zeros([100], (Kind::Float, Device::Cpu));
        let order =
            ["embed", "first.up", "first.norm", "second.up", "second.norm", "norm"].map(str::to_owned);
        // Matrices first, then vectors, as `Group::by_dimension` has them.
        let names = ["embed", "first.up", "second.up", "first.norm", "second.norm", "norm"];
        let mut parameters: Vec<Parameter<'_>> =
            names.iter().enumerate().map(|(number, name)| (number, *name, &tensor)).collect();
        sort(&mut parameters, &order).unwrap();
        let buckets: Vec<Vec<usize>> = divide(&parameters, 800)
            .iter()
            .map(|bucket| bucket.iter().map(|parameter| parameter.0).collect())
            .collect();
        assert_eq!(buckets, [[0, 1], [3, 2], [4, 5]]);
        let missing = sort(&mut parameters, &order[1..]).unwrap_err().to_string();
        assert!(missing.contains("`embed` is not in ShardingConfig::order"), "{missing}");
    }
}
