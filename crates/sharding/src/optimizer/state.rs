//! The state in checkpoints: whole tensors, as a training without ranks has them.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use runtime::collectives::Division;
use tch::{Kind, Tensor};
use training::Optimizer;
use training::checkpoint::LazyTensor;
use training::optimizer::{Extent, Slot};

use super::ShardedOptimizer;
use super::part::Part;
use crate::bucket::narrow;
use crate::divided::Divided;
use crate::{Result, refused};

/// The name of a master copy, as `DeviceOptimizer` has it.
const MASTER: &str = "master";
const STEP: &str = "step";

/// Returns the elements of a slot for those of its parameter, which begin at a block.
fn values_of(slot: &Slot, elements: &Range<i64>) -> Range<i64> {
    let each = slot.elements_per_value;
    elements.start / each..(elements.end + each - 1) / each
}

/// Returns how ranks divide the values of a slot whose parameters they divide so.
fn division_of(slot: &Slot, division: Division) -> Division {
    let Division { elements, per_rank } = division;
    let each = slot.elements_per_value;
    Division { elements: (elements + each - 1) / each, per_rank: per_rank / each }
}

impl ShardedOptimizer {
    /// Returns the state tensors of a whole parameter.
    fn slots(&self, shape: &[i64]) -> Vec<Slot> {
        self.rule().slots(Extent::of(shape))
    }

    /// Returns the tensors of the whole state, which are gathered on rank 0 as they are written.
    pub(super) fn divided_state(&self) -> Result<Vec<LazyTensor<'_>>> {
        let part_state: HashMap<String, Tensor> = self.inner.state().into_iter().collect();
        let parts: HashMap<usize, &Part> = self.parts.iter().map(|part| (part.parameter, part)).collect();
        let mut named: Vec<Vec<LazyTensor<'_>>> = self.names.iter().map(|_| Vec::new()).collect();
        for bucket in &self.round.lock().buckets {
            let half = matches!(bucket.kind, Kind::Half | Kind::BFloat16);
            let kind = if bucket.kind == Kind::Double { Kind::Double } else { Kind::Float };
            for member in bucket.members.iter().filter(|member| self.steps[member.parameter] > 0) {
                let has_master = half && self.options.master_weights;
                let master = has_master.then(|| Slot::of(MASTER, member.tensor.size()));
                let (name, part) = (&self.names[member.parameter], parts.get(&member.parameter));
                let step = Tensor::from(self.steps[member.parameter].cast_signed());
                let named = &mut named[member.parameter];
                named.push(LazyTensor::from_tensor(format!("{name}.{STEP}"), &step));
                for slot in self.slots(&member.tensor.size()).into_iter().chain(master) {
                    let name = format!("{name}.{}", slot.name);
                    let values = match (part, slot.name) {
                        (None, _) => None,
                        (Some(part), MASTER) => Some(part.stepped.f_detach()?),
                        (Some(_), _) => match part_state.get(&name) {
                            Some(values) => Some(values.f_detach()?),
                            None => return Err(refused(format!("this rank has no `{name}` of its part"))),
                        },
                    };
                    let divided = Divided {
                        mesh: self.mesh.clone(),
                        label: name.clone(),
                        kind: slot.kind_or(kind),
                        division: division_of(&slot, bucket.division),
                        range: values_of(&slot, &member.range),
                        own: values.map(|values| values.f_view([-1])).transpose()?,
                    };
                    named.push(divided.into_lazy(name, &slot.shape));
                }
            }
        }
        Ok(named.into_iter().flatten().collect())
    }

    /// Collects the whole state on rank 0; other ranks send their parts and receive nothing.
    pub(super) fn gather_state(&self) -> Result<Vec<(String, Tensor)>> {
        let mut state = Vec::new();
        for tensor in self.divided_state()? {
            let values = tensor.whole()?.filter(|_| self.mesh.control().rank() == 0);
            state.extend(values.map(|values| (tensor.name().to_owned(), values)));
        }
        Ok(state)
    }

    /// Takes this rank's parts of a whole state.
    pub(super) fn scatter_state(&mut self, tensors: &[(String, Tensor)]) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let mut given: BTreeMap<&str, &Tensor> =
            tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let mut steps = vec![0; self.names.len()];
        let (mut part_state, mut masters) = (Vec::new(), Vec::new());
        // Collect the slices of this rank, and check every tensor, before anything is changed.
        for bucket in &self.round.lock().buckets {
            for member in &bucket.members {
                let name = &self.names[member.parameter];
                let Some(step) = given.remove(format!("{name}.{STEP}").as_str()) else { continue };
                steps[member.parameter] = u64::try_from(step.f_int64_value(&[])?)
                    .map_err(|_| refused(format!("the state's `{name}.{STEP}` is negative")))?;
                let part = self.parts.iter().position(|part| part.parameter == member.parameter);
                if part.is_some() {
                    part_state.push((format!("{name}.{STEP}"), step.shallow_clone()));
                }
                let master = Slot::of(MASTER, member.tensor.size());
                for slot in self.slots(&member.tensor.size()).into_iter().chain([master]) {
                    let key = format!("{name}.{}", slot.name);
                    let Some(tensor) = given.remove(key.as_str()) else {
                        if slot.name == MASTER {
                            continue;
                        }
                        return Err(refused(format!(
                            "the state has no `{key}`; take a checkpoint of the same optimizer"
                        )));
                    };
                    let kind = if bucket.kind == Kind::Double { Kind::Double } else { Kind::Float };
                    let kind = slot.kind_or(kind);
                    if tensor.size() != slot.shape || tensor.kind() != kind {
                        return Err(refused(format!(
                            "the state's `{key}` is {:?} {:?}; expected {kind:?} {:?}",
                            tensor.kind(),
                            tensor.size(),
                            slot.shape
                        )));
                    }
                    let Some(index) = part else { continue };
                    let owned = bucket.owned(member, self.mesh.shard.rank());
                    let range = owned.start - member.range.start..owned.end - member.range.start;
                    let range = values_of(&slot, &range);
                    let slice = narrow(&tensor.f_reshape([-1])?, &range)?;
                    if slot.name == MASTER {
                        masters.push((index, slice));
                    } else {
                        part_state.push((key, slice.f_contiguous()?));
                    }
                }
            }
        }
        // A name that is left belongs to no parameter.
        if let Some(unknown) = given.keys().next() {
            let first = self.names.first().map_or("none", String::as_str);
            return Err(refused(format!(
                "the state has `{unknown}`, which is of no parameter; the first is `{first}`"
            )));
        }
        // Load the slices, then the master copies, which the inner optimizer does not have.
        self.inner.load_state(&part_state)?;
        self.steps = steps;
        // The model's weights may be loaded after this.
        for part in &mut self.parts {
            (part.follows, part.written) = (part.rounded.is_some(), None);
        }
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
