//! Options, the division of parameters into buckets, and what all ranks must agree on.

use std::collections::HashMap;

use runtime::collectives::Group as Ranks;
use tch::{Kind, Tensor};
use training::optimizer::{Group, Rule};

use crate::shards::Shards;
use crate::{Result, refused};

/// What is divided among ranks, and when gradients are reduced.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Optimizer state; gradients are reduced after backward (ZeRO-1).
    #[default]
    One,
    /// Optimizer state and gradients: each bucket is reduced and freed during backward (ZeRO-2).
    Two,
    /// Optimizer state, gradients, and the weights of layers, which are gathered for each use (ZeRO-3). Takes [`Options::shards`].
    Three,
}

/// Options of [`ShardedOptimizer`](super::ShardedOptimizer).
#[derive(Debug, Clone)]
pub struct Options {
    /// What is divided.
    pub stage: Stage,
    /// Keeps an fp32 copy of bf16 and fp16 weights, divided among ranks.
    pub master_weights: bool,
    /// Bytes of weights that are reduced and gathered together, at least. A bucket has whole parameters.
    pub bucket_bytes: usize,
    /// The layers of [`Stage::Three`], divided before.
    pub shards: Option<Shards>,
}

impl Default for Options {
    fn default() -> Self {
        Self { stage: Stage::default(), master_weights: false, bucket_bytes: 16 << 20, shards: None }
    }
}

impl Options {
    pub(super) fn check(&self, ranks: &Ranks) -> Result<()> {
        if self.bucket_bytes == 0 {
            return Err(refused("buckets of 0 bytes; expected at least 1"));
        }
        match (&self.shards, self.stage) {
            (None, Stage::Three) => Err(refused(
                "Stage::Three without shards of layers; divide them by `Shards` and `offload::Offload::apply`, and give Options::shards",
            )),
            (Some(_), Stage::One | Stage::Two) => {
                Err(refused(format!("shards of layers with Stage::{:?}; take Stage::Three", self.stage)))
            }
            (Some(shards), _) if !shards.is_of(ranks) => {
                Err(refused("the shards of layers are of other ranks; make them over the optimizer's"))
            }
            _ => Ok(()),
        }
    }
}

/// A parameter: its number, name and tensor.
pub(super) type Parameter<'a> = (usize, &'a str, &'a Tensor);

/// Divides the parameters into buckets of one dtype, block by block of the model, whatever groups they are in: a bucket is reduced
/// when all of its gradients are there, so it should have those that backward computes together.
pub(super) fn divide<'a>(parameters: &[Parameter<'a>], bucket_bytes: usize) -> Vec<Vec<Parameter<'a>>> {
    let mut first = HashMap::new();
    for (place, (_, name, _)) in parameters.iter().enumerate() {
        first.entry(block(name)).or_insert(place);
    }
    let mut parameters = parameters.to_vec();
    parameters.sort_by_key(|(_, name, _)| first[block(name)]);
    let mut kinds: Vec<Kind> = Vec::new();
    for (_, _, tensor) in &parameters {
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

/// The block that a parameter is in: its name up to the first number, such as `layers.3`; its whole name where there is none.
fn block(name: &str) -> &str {
    let mut end = 0;
    for part in name.split('.') {
        end += part.len();
        if part.parse::<u32>().is_ok() {
            return &name[..end];
        }
        end += 1;
    }
    name
}

/// Makes sure that all ranks have the same optimizer, parameters and values.
pub(super) fn agree(rule: &dyn Rule, groups: &[Group], ranks: &Ranks, options: &Options) -> Result<()> {
    let mut fields = vec![
        ("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ("optimizer".to_owned(), format!("{rule:?}")),
        ("options".to_owned(), format!("{options:?}")),
        ("threads".to_owned(), tch::get_num_threads().to_string()),
    ];
    for group in groups {
        let Group { name, lr, weight_decay, frozen, .. } = group;
        fields.push((
            format!("group {name}"),
            format!("lr {lr}, weight decay {weight_decay}, frozen {frozen}"),
        ));
        for (name, tensor) in &group.parameters {
            if options.shards.as_ref().map_or(Ok(false), |shards| shards.holds(tensor))? {
                continue;
            }
            let shape = format!("{:?} {:?}", tensor.kind(), tensor.size());
            // Not a hash: equal bits give an equal sum, and a difference is what a wrong seed or checkpoint makes.
            let sum = tensor.f_detach()?.f_sum(Kind::Double)?.f_double_value(&[])?;
            fields.push((format!("parameter {name}"), format!("{shape}, sum {:016x}", sum.to_bits())));
        }
    }
    fields.extend(options.shards.iter().flat_map(Shards::descriptions));
    let fields: Vec<(&str, &str)> =
        fields.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    Ok(ranks.agree(&fields)?)
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
    fn a_block_is_in_one_bucket_whatever_groups_its_parameters_are_in() {
        let tensor = Tensor::zeros([100], (Kind::Float, Device::Cpu));
        // Matrices first, then vectors, as `Group::by_dimension` has them.
        let names = [
            "embed.weight",
            "layers.0.up.weight",
            "layers.1.up.weight",
            "layers.0.norm.weight",
            "layers.1.norm.weight",
            "norm.weight",
        ];
        let parameters: Vec<Parameter<'_>> =
            names.iter().enumerate().map(|(number, name)| (number, *name, &tensor)).collect();
        let found: Vec<Vec<&str>> = divide(&parameters, 800)
            .iter()
            .map(|bucket| bucket.iter().map(|parameter| parameter.1).collect())
            .collect();
        let expected = [vec![names[0], names[1]], vec![names[3], names[2]], vec![names[4], names[5]]];
        assert_eq!(found, expected);
    }
}
