//! The state in checkpoints: whole tensors, as a training without ranks has them.

use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor};
use training::Optimizer;

use super::ShardedOptimizer;
use crate::bucket::narrow;
use crate::{Result, refused};

/// The name of a master copy, as `DeviceOptimizer` has it.
const MASTER: &str = "master";
const STEP: &str = "step";

impl ShardedOptimizer {
    /// Collects the whole state on rank 0; the others send theirs, and get nothing.
    pub(super) fn gather_state(&self) -> Result<Vec<(String, Tensor)>> {
        let _no_grad = tch::no_grad_guard();
        let own: BTreeMap<String, Tensor> = self.inner.state().into_iter().collect();
        let masters: BTreeMap<usize, &Tensor> = self
            .parts
            .iter()
            .filter(|part| part.rounded.is_some())
            .map(|part| (part.parameter, &part.stepped))
            .collect();
        let mut named: Vec<Vec<(String, Tensor)>> = self
            .steps
            .iter()
            .zip(&self.names)
            .map(|(steps, name)| match steps {
                0 => Vec::new(),
                steps => vec![(format!("{name}.{STEP}"), Tensor::from(steps.cast_signed()))],
            })
            .collect();
        let slots = self.rule().slots().iter().copied();
        for (number, bucket) in self.round.lock().buckets.iter().enumerate() {
            let half = matches!(bucket.kind, Kind::Half | Kind::BFloat16);
            let master = (half && self.options.master_weights).then_some(MASTER);
            let kind = if bucket.kind == Kind::Double { Kind::Double } else { Kind::Float };
            for slot in slots.clone().chain(master) {
                let label = format!("{slot} of bucket {number}");
                // This rank's part, with zeros where nothing was stepped.
                let shard = bucket.division.range(self.ranks.rank());
                let part = Tensor::f_zeros([shard.end - shard.start], (kind, Device::Cpu))?;
                for member in &bucket.members {
                    let found = if slot == MASTER {
                        masters.get(&member.parameter).copied()
                    } else {
                        own.get(&format!("{}.{slot}", self.names[member.parameter]))
                    };
                    if let Some(found) = found {
                        let owned = bucket.owned(member, self.ranks.rank());
                        let mut place = narrow(&part, &(owned.start - shard.start..owned.end - shard.start))?;
                        place.f_copy_(found)?;
                    }
                }
                if self.ranks.rank() > 0 {
                    self.ranks.send(&part, 0, &label)?.wait()?;
                    continue;
                }
                let whole = Tensor::f_zeros([bucket.division.elements], (kind, Device::Cpu))?;
                narrow(&whole, &shard)?.f_copy_(&part)?;
                for rank in 1..self.ranks.size() {
                    let place = narrow(&whole, &bucket.division.range(rank))?;
                    self.ranks.recv(&place, rank, &label)?.wait()?;
                }
                for member in bucket.members.iter().filter(|member| self.steps[member.parameter] > 0) {
                    let tensor = narrow(&whole, &member.range)?.f_view(member.tensor.size().as_slice())?;
                    named[member.parameter]
                        .push((format!("{}.{slot}", self.names[member.parameter]), tensor));
                }
            }
        }
        Ok(if self.ranks.rank() == 0 { named.into_iter().flatten().collect() } else { Vec::new() })
    }

    /// Takes this rank's parts of a whole state.
    pub(super) fn scatter_state(&mut self, tensors: &[(String, Tensor)]) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let mut given: BTreeMap<&str, &Tensor> =
            tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let mut steps = vec![0; self.names.len()];
        let (mut own, mut masters) = (Vec::new(), Vec::new());
        let slots = self.rule().slots();
        for bucket in &self.round.lock().buckets {
            for member in &bucket.members {
                let name = &self.names[member.parameter];
                let Some(step) = given.remove(format!("{name}.{STEP}").as_str()) else { continue };
                steps[member.parameter] = u64::try_from(step.f_int64_value(&[])?)
                    .map_err(|_| refused(format!("the state's `{name}.{STEP}` is negative")))?;
                let part = self.parts.iter().position(|part| part.parameter == member.parameter);
                if part.is_some() {
                    own.push((format!("{name}.{STEP}"), step.shallow_clone()));
                }
                for slot in slots.iter().copied().chain([MASTER]) {
                    let key = format!("{name}.{slot}");
                    let Some(tensor) = given.remove(key.as_str()) else {
                        if slot == MASTER {
                            continue;
                        }
                        return Err(refused(format!(
                            "the state has no `{key}`; take a checkpoint of the same optimizer"
                        )));
                    };
                    let kind = if bucket.kind == Kind::Double { Kind::Double } else { Kind::Float };
                    if tensor.size() != member.tensor.size() || tensor.kind() != kind {
                        let (found, of) = (tensor.size(), tensor.kind());
                        let size = member.tensor.size();
                        return Err(refused(format!(
                            "the state's `{key}` is {of:?} {found:?}; expected {kind:?} {size:?}"
                        )));
                    }
                    let Some(index) = part else { continue };
                    let owned = bucket.owned(member, self.ranks.rank());
                    let range = owned.start - member.range.start..owned.end - member.range.start;
                    let slice = narrow(&tensor.f_reshape([-1])?, &range)?;
                    if slot == MASTER {
                        masters.push((index, slice));
                    } else {
                        own.push((key, slice.f_contiguous()?));
                    }
                }
            }
        }
        if let Some(unknown) = given.keys().next() {
            let known = self.names.first().map_or("none", String::as_str);
            return Err(refused(format!(
                "the state has `{unknown}`, which is of no parameter; the first is `{known}`"
            )));
        }
        self.inner.load_state(&own)?;
        self.steps = steps;
        // The model's weights may be loaded after this.
        self.parts.iter_mut().for_each(|part| part.follows = part.rounded.is_some());
        for (index, master) in masters {
            let part = &mut self.parts[index];
            if part.rounded.is_some() {
                part.stepped.f_detach()?.f_copy_(&master)?;
                part.follows = false;
            }
        }
        Ok(())
    }
}
