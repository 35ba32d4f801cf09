//! Memory that others exchange under the model's handles, and values that they change.

use tch::{Device, Tensor};

use super::Layer;
use crate::error::{Error, Result};

/// What tensors were at a moment.
#[derive(Debug)]
pub(crate) struct Stamp {
    /// Each one's memory, held so that other memory has another address, and version.
    tensors: Vec<(Tensor, i64)>,
    /// Steps of the engine's own optimizer.
    steps: u64,
}

impl Stamp {
    /// Of tensors that no optimizer of the engine's steps.
    pub(crate) fn of(named: &[(String, Tensor)]) -> Result<Self> {
        let each = |(_, tensor): &(String, Tensor)| Ok((tensor.f_detach()?, tensor.internal_version()));
        Ok(Self { tensors: named.iter().map(each).collect::<Result<_>>()?, steps: 0 })
    }

    /// That `tensors` are what they were.
    fn check(
        &self,
        layer: &str,
        name: &dyn Fn(usize) -> String,
        tensors: &[Tensor],
        steps: u64,
    ) -> Result<()> {
        let same = |(tensor, (then, version)): (&Tensor, &(Tensor, i64))| {
            tensor.internal_version() == *version && same_memory(tensor, then)
        };
        let what = match tensors.iter().zip(&self.tensors).position(|pair| !same(pair)) {
            Some(index) => format!("`{layer}.{}` was written, or given other memory,", name(index)),
            None if tensors.len() != self.tensors.len() => format!("`{layer}` was given other tensors"),
            None if steps != self.steps => format!("`{layer}` was stepped by its optimizer"),
            None => return Ok(()),
        };
        let reason = format!(
            "{what} between a forward and its backward, which would run with other values; run backward before weights are changed, \
             merged or stepped, or run the forward again"
        );
        Err(Error::config("graph", reason))
    }
}

/// That tensors which no optimizer of the engine's steps are what they were.
pub(crate) fn unchanged(stamp: &Stamp, layer: &str, named: &[(String, Tensor)]) -> Result<()> {
    let tensors: Vec<Tensor> = named.iter().map(|(_, tensor)| tensor.shallow_clone()).collect();
    stamp.check(layer, &|index| named[index].0.clone(), &tensors, 0)
}

impl Layer {
    /// Sees whose memory the handles show. What is not on the host is taken there.
    ///
    /// # Errors
    /// A tensor that became one of another dtype or shape; a tensor in a file whose values are others there.
    pub(crate) fn look(&mut self, pinned_for: Device) -> Result<()> {
        if let Some(reason) = &self.lost {
            return Err(Error::config("layers", reason.clone()));
        }
        for index in 0..self.tensors.len() {
            if same_memory(&self.tensors[index], &self.seen[index]) {
                continue;
            }
            let (tensor, place) = (&self.tensors[index], &self.layout.places[index]);
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
                return Err(Error::config("layers", reason));
            }
            if tensor.device() != Device::Cpu {
                self.take_alone(index, pinned_for)?;
            }
            self.seen[index] = self.tensors[index].f_detach()?;
            self.generation += 1;
        }
        self.check_files()
    }

    /// Whether the handles show the memory that they did at the last look.
    pub(crate) fn is_as_seen(&self) -> bool {
        self.tensors.iter().zip(&self.seen).all(|(tensor, seen)| same_memory(tensor, seen))
    }

    /// How often the tensors were changed by others than the engine.
    pub(crate) fn versions(&self) -> Vec<i64> {
        self.tensors.iter().map(Tensor::internal_version).collect()
    }

    /// What the layer is now, for a graph whose backward runs it again.
    pub(crate) fn stamp(&self) -> Stamp {
        let each = self.seen.iter().zip(&self.tensors);
        let tensors = each.map(|(seen, tensor)| (seen.shallow_clone(), tensor.internal_version())).collect();
        Stamp { tensors, steps: self.steps }
    }

    /// That the layer is what it was.
    pub(crate) fn check_unchanged(&self, stamp: &Stamp) -> Result<()> {
        stamp.check(&self.name, &|index| self.names[index].clone(), &self.tensors, self.steps)
    }

    /// Whether a tensor's memory is its place in the region's.
    pub(super) fn is_at_its_place(&self, index: usize) -> bool {
        let (tensor, place) = (&self.tensors[index], &self.layout.places[index]);
        let Some(flat) = &self.flats[place.region] else { return false };
        let origin = self.layout.regions[place.region].range.start;
        place.range.is_empty()
            || tensor.data_ptr() as usize == flat.data_ptr() as usize + place.range.start - origin
    }

    /// The layer's own tensor that is on a device, if there is one.
    pub(crate) fn astray(&self) -> Option<String> {
        let index = self.tensors.iter().position(|tensor| tensor.device() != Device::Cpu)?;
        Some(format!(
            "`{}.{}` is on {:?}, not at home; the layer's next use takes it there",
            self.name,
            self.names[index],
            self.tensors[index].device()
        ))
    }
}

fn same_memory(a: &Tensor, b: &Tensor) -> bool {
    a.data_ptr() == b.data_ptr() && a.kind() == b.kind() && a.size() == b.size() && a.stride() == b.stride()
}
