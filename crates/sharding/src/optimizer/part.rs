//! This rank's parts of the parameters, as parameters of a [`DeviceOptimizer`](training::optimizer::DeviceOptimizer).

use std::ops::Range;

use runtime::collectives::Group as Ranks;
use runtime::file_memory;
use tch::{Kind, Tensor};
use training::optimizer::{Group, WeightVersion, follow_weight};

use crate::Result;
use crate::bucket::Bucket;

/// This rank's part of a parameter.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) parameter: usize,
    /// Its bucket and its number there.
    member: (usize, usize),
    /// Its elements in the rank's shard of the bucket.
    range: Range<i64>,
    /// The index of its first element in the whole parameter.
    pub(super) first: i64,
    /// The tensors that the inner optimizer steps: the weights themselves, or their fp32 master copy.
    pub(super) stepped: Tensor,
    /// The weights that a master copy is rounded into.
    pub(super) rounded: Option<Tensor>,
    /// Whether the master copy is the weights' from the next step on, and not from a checkpoint or an earlier step.
    pub(super) follows: bool,
    /// The parameter as the last step has left it; `None` where that is not known.
    pub(super) written: Option<WeightVersion>,
}

impl Part {
    /// The parameter, whose version others change when they write it.
    fn parameter<'a>(&self, buckets: &'a [Bucket]) -> &'a Tensor {
        let (bucket, member) = self.member;
        &buckets[bucket].members[member].tensor
    }

    /// Takes the master copy from the weights, as far as others have written them since the last step.
    pub(super) fn follow(&mut self, buckets: &[Bucket]) -> Result<()> {
        let Some(weights) = &self.rounded else { return Ok(()) };
        let version = WeightVersion::of(self.parameter(buckets))?;
        if self.follows {
            let _no_grad = tch::no_grad_guard();
            self.stepped.f_detach()?.f_copy_(weights)?;
        } else if self.written != Some(version) {
            follow_weight(&self.stepped, weights)?;
        }
        (self.follows, self.written) = (false, Some(version));
        Ok(())
    }

    /// Notes that a step has written the parameter.
    pub(super) fn wrote(&mut self, buckets: &[Bucket]) -> Result<()> {
        self.written = Some(WeightVersion::of(self.parameter(buckets))?);
        Ok(())
    }

    /// Returns the sum of its gradients; `None` where none has arrived.
    pub(super) fn gradient(&self, buckets: &[Bucket]) -> Result<Option<Tensor>> {
        let (bucket, member) = self.member;
        buckets[bucket].sums.of(member, &self.range)
    }
}

/// Returns this rank's parts of all parameters, in the parameters' order.
pub(super) fn parts(
    buckets: &[Bucket],
    ranks: &Ranks,
    parameters: usize,
    master_weights: bool,
) -> Result<Vec<Part>> {
    let _no_grad = tch::no_grad_guard();
    let mut parts: Vec<Option<Part>> = (0..parameters).map(|_| None).collect();
    for (bucket_number, bucket) in buckets.iter().enumerate() {
        let shard = bucket.division.range(ranks.rank());
        for (number, member) in bucket.members.iter().enumerate() {
            let owned = bucket.owned(member, ranks.rank());
            if owned.is_empty() {
                continue;
            }
            let weights = bucket.own_weights(&owned, ranks.rank())?.f_detach()?;
            let half = matches!(bucket.kind, Kind::Half | Kind::BFloat16);
            let (stepped, rounded) = if half && master_weights {
                let mut copy = file_memory::zeros_beside(&weights, &weights.size(), Kind::Float)?;
                copy.f_copy_(&weights)?;
                file_memory::release(&copy)?;
                (copy, Some(weights))
            } else {
                (weights, None)
            };
            parts[member.parameter] = Some(Part {
                parameter: member.parameter,
                member: (bucket_number, number),
                range: owned.start - shard.start..owned.end - shard.start,
                first: owned.start - member.range.start,
                stepped: stepped.f_set_requires_grad(true)?,
                follows: rounded.is_some(),
                written: None,
                rounded,
            });
        }
    }
    Ok(parts.into_iter().flatten().collect())
}

/// Returns the groups with this rank's parts instead of the parameters.
pub(super) fn inner_groups(groups: &[Group], names: &[String], parts: &[Part]) -> Result<Vec<Group>> {
    let (mut start, mut inner) = (0, Vec::new());
    for group in groups {
        let numbers = start..start + group.parameters.len();
        start = numbers.end;
        let named = parts.iter().filter(|part| numbers.contains(&part.parameter));
        let named = named.map(|part| (names[part.parameter].clone(), part.stepped.shallow_clone())).collect();
        inner.push(Group {
            name: group.name.clone(),
            parameters: named,
            lr: group.lr,
            weight_decay: group.weight_decay,
            frozen: group.frozen,
            rule: None,
        });
    }
    Ok(inner)
}
