//! Detects exchanged memory and changed values.

use runtime::precision::identity;
use tch::{Device, Tensor};

use super::Layer;
use crate::error::{Result, refused};

/// The memory and versions of tensors at a moment.
#[derive(Debug)]
pub(crate) struct TensorVersions {
    /// Each tensor's memory, kept alive so that other memory has another address, and its version.
    tensors: Vec<(Tensor, i64)>,
    /// Steps of the engine's own optimizer.
    steps: u64,
}

impl TensorVersions {
    /// Records tensors that the engine's optimizer does not step.
    pub(crate) fn of(named: &[(String, Tensor)]) -> Result<Self> {
        let each = |(_, tensor): &(String, Tensor)| Ok((tensor.f_detach()?, tensor.internal_version()));
        Ok(Self { tensors: named.iter().map(each).collect::<Result<_>>()?, steps: 0 })
    }

    /// Checks that `tensors` have not changed.
    fn check(
        &self,
        layer: &str,
        name: &dyn Fn(usize) -> String,
        (tensors, versions): (&[Tensor], &[i64]),
        steps: u64,
    ) -> Result<()> {
        let same = |((tensor, now), (then, version)): ((&Tensor, &i64), &(Tensor, i64))| {
            now == version && same_memory(tensor, then)
        };
        let mut each = tensors.iter().zip(versions).zip(&self.tensors);
        let what = match each.position(|pair| !same(pair)) {
            Some(index) => format!("`{layer}.{}` was written, or given other memory,", name(index)),
            None if tensors.len() != self.tensors.len() => format!("`{layer}` was given other tensors"),
            None if steps != self.steps => format!("`{layer}` was updated by its optimizer"),
            None => return Ok(()),
        };
        let reason = format!(
            "{what} between a forward and its backward, which would compute with other values; run backward before weights are changed, \
             merged or updated, or run the forward again"
        );
        Err(refused("graph", reason))
    }
}

/// Checks that tensors that the engine's optimizer does not step have not changed.
pub(crate) fn unchanged(
    versions_at_forward: &TensorVersions,
    layer: &str,
    named: &[(String, Tensor)],
) -> Result<()> {
    let tensors: Vec<Tensor> = named.iter().map(|(_, tensor)| tensor.shallow_clone()).collect();
    let versions: Vec<i64> = tensors.iter().map(Tensor::internal_version).collect();
    versions_at_forward.check(layer, &|index| named[index].0.clone(), (&tensors, &versions), 0)
}

impl Layer {
    /// Reads which memory the tensors refer to now. Copies values that are on a device to the host.
    ///
    /// # Errors
    /// A tensor with another dtype or shape than before; a tensor in a file whose values differ from the file's.
    pub(crate) fn look(&mut self, pinned_for: Device) -> Result<()> {
        if let Some(reason) = &self.lost {
            return Err(refused("layers", reason.clone()));
        }
        for index in 0..self.tensors.len() {
            if same_memory(&self.tensors[index], &self.seen[index]) {
                continue;
            }
            self.check_source(index)?;
            let (tensor, place) = (&self.tensors[index], &self.layout.extents[index]);
            if tensor.kind() != place.kind || tensor.size() != place.shape || !tensor.is_contiguous() {
                let reason = format!(
                    "`{}.{}` was given other memory, {:?} {:?} with strides {:?}; expected {:?} {:?}, contiguous, as it was when the \
                     model was offloaded. Change dtypes and shapes before",
                    self.name,
                    self.names[index],
                    tensor.kind(),
                    tensor.size(),
                    tensor.stride(),
                    place.kind,
                    place.shape
                );
                return Err(refused("layers", reason));
            }
            if tensor.device() != Device::Cpu {
                self.copy_to_host(index, pinned_for)?;
            }
            self.seen[index] = self.tensors[index].f_detach()?;
            self.generation += 1;
        }
        self.check_files()
    }

    /// Whether the tensors refer to the same memory as at the last check.
    pub(crate) fn is_as_seen(&self) -> bool {
        self.tensors.iter().zip(&self.seen).all(|(tensor, seen)| same_memory(tensor, seen))
    }

    /// The tensors' versions: changes by others than the engine.
    pub(crate) fn versions(&self) -> Vec<i64> {
        let each = self.tensors.iter().zip(&self.own_versions);
        each.map(|(tensor, own)| tensor.internal_version() - own).collect()
    }

    /// Takes over which changes of its tensors were steps of the engine's own optimizer.
    pub(crate) fn keep_versions(&mut self, old: &Self) -> Result<()> {
        for (tensor, own) in self.tensors.iter().zip(&mut self.own_versions) {
            for (before, versions) in old.tensors.iter().zip(&old.own_versions) {
                if identity(before)? == identity(tensor)? {
                    *own = *versions;
                }
            }
        }
        Ok(())
    }

    /// Counts a step of a tensor by the engine's own optimizer, which is about to write it.
    pub(crate) fn count_step(&mut self, index: usize) -> Result<()> {
        runtime::autograd::mark_written(&self.tensors[index])?;
        self.own_versions[index] += 1;
        Ok(())
    }

    /// Records the layer's current values, for a graph whose backward uses them.
    pub(crate) fn versions_at_forward(&self) -> TensorVersions {
        let seen = self.seen.iter().map(Tensor::shallow_clone);
        let tensors = seen.zip(self.versions()).collect();
        TensorVersions { tensors, steps: self.steps }
    }

    /// Checks that the layer has not changed.
    pub(crate) fn check_unchanged(&self, versions_at_forward: &TensorVersions) -> Result<()> {
        let now = (self.tensors.as_slice(), self.versions());
        let name = |index: usize| self.names[index].clone();
        versions_at_forward.check(&self.name, &name, (now.0, &now.1), self.steps)
    }

    /// Whether a tensor's memory is still that of its region.
    pub(super) fn is_in_region(&self, index: usize) -> bool {
        let (tensor, place) = (&self.tensors[index], &self.layout.extents[index]);
        let Some(flat) = &self.flats[place.region] else { return false };
        let origin = self.layout.regions[place.region].range.start;
        place.range.is_empty()
            || tensor.data_ptr() as usize == flat.data_ptr() as usize + place.range.start - origin
    }

    /// Describes a tensor of the layer that is on a device, if there is one.
    pub(crate) fn misplaced(&self) -> Option<String> {
        let index = self.tensors.iter().position(|tensor| tensor.device() != Device::Cpu)?;
        Some(format!(
            "`{}.{}` is on {:?} instead of the host; the layer's next use copies it there",
            self.name,
            self.names[index],
            self.tensors[index].device()
        ))
    }
}

fn same_memory(a: &Tensor, b: &Tensor) -> bool {
    a.data_ptr() == b.data_ptr() && a.kind() == b.kind() && a.size() == b.size() && a.stride() == b.stride()
}
