//! Regions that a [`LayerSource`] holds.
//!
//! The layer's tensors keep their shapes, but have the memory of one NaN ([`set_placeholder`]). Those that have it before, because the
//! model was made without values, are read by the source.

use std::sync::Arc;

use runtime::device;
use tch::{Device, Kind, Tensor};
use training::layer_source::{LayerRegion, LayerSource, is_placeholder, set_placeholder};

use super::{Gradients, Layer, Placement};
use crate::error::{Error, Result, refused};
use crate::layout::{piece, view};

/// A region in a source.
#[derive(Debug, Clone)]
pub(crate) struct InSource {
    source: Arc<dyn LayerSource>,
    /// The source's number of it.
    number: usize,
}

impl InSource {
    pub(super) fn load(&self, target: &Tensor) -> runtime::Result<()> {
        self.source.load(self.number, target)
    }
}

/// Gradients for a source.
pub(crate) struct Delivery {
    region: InSource,
    gradients: Gradients,
}

impl Delivery {
    pub(crate) fn deliver(self, last: bool) -> Result<()> {
        let InSource { source, number } = self.region;
        Ok(source.deliver(number, self.gradients, last)?)
    }
}

impl Layer {
    /// Returns memory for the layer if a source takes every region and keeps it there.
    pub(super) fn memory_in_source(&self, placement: &Placement) -> Result<Option<Tensor>> {
        let keeps = |source: &Arc<dyn LayerSource>| {
            let mut regions = self.layout.regions.iter();
            source.keeps_memory() && regions.all(|region| source.takes(region.trained))
        };
        if !placement.source.as_ref().is_some_and(keeps) {
            return Ok(None);
        }
        // Of libtorch's allocator, as shards are, so that it is counted.
        Ok(Some(Tensor::f_zeros([self.layout.bytes as i64], (Kind::Uint8, Device::Cpu))?))
    }

    /// Gives a region to a source. Returns its bytes.
    pub(super) fn give_to(&mut self, source: &Arc<dyn LayerSource>, region: usize) -> Result<Tensor> {
        let _no_grad = tch::no_grad_guard();
        let (range, kind) = (self.layout.regions[region].range.clone(), self.layout.regions[region].kind);
        let width = kind.elt_size_in_bytes();
        let flat = match &self.in_place {
            Some(memory) => piece(memory, range.clone())?,
            None => {
                let mut flat = device::pinned_empty(&[range.len() as i64], Kind::Uint8, Device::Cpu)?;
                let _ = flat.f_zero_()?;
                flat
            }
        };
        let members = self.members(region);
        let mut tensors = Vec::new();
        for &index in &members {
            let (extent, tensor) = (&self.layout.extents[index], &self.tensors[index]);
            let mut values = view(&flat, range.start, extent)?;
            if !is_placeholder(tensor) {
                values.f_copy_(tensor)?;
            } else if !source.read(&self.tensor_name(index), &values)? {
                return Err(self.without_values(index));
            }
            let start = ((extent.range.start - range.start) / width) as i64;
            tensors.push((
                self.tensor_name(index),
                tensor.shallow_clone(),
                start..start + tensor.numel() as i64,
            ));
        }
        let region_of_layer = LayerRegion {
            layer: &self.name,
            trained: self.layout.regions[region].trained,
            values: &flat.f_view_dtype(kind)?,
            tensors,
        };
        let number = source.take(&region_of_layer)?;
        for &index in &members {
            set_placeholder(&self.tensors[index])?;
        }
        self.sources[region] = Some(InSource { source: source.clone(), number });
        Ok(flat)
    }

    /// The error of a tensor whose values nobody has.
    pub(super) fn without_values(&self, index: usize) -> Error {
        let reason =
            format!("`{}` has no values in memory, and no source reads them", self.tensor_name(index));
        refused("layers", reason)
    }

    /// Whether a source holds any of its tensors.
    pub(crate) fn is_in_source(&self) -> bool {
        self.sources.iter().any(Option::is_some)
    }

    /// Refuses a tensor that was given other memory although a source holds its values.
    pub(super) fn check_source(&self, index: usize) -> Result<()> {
        if self.sources[self.layout.extents[index].region].is_none() {
            return Ok(());
        }
        let reason = format!(
            "`{}` was given other memory, but its values are in shards; load weights, merge and install adapters before the model \
             is divided",
            self.tensor_name(index)
        );
        Err(refused("layers", reason))
    }

    /// Separates the gradients of regions that a source holds. Every trained region is among the deliveries, also without gradients.
    ///
    /// # Errors
    /// A gradient of a tensor that was frozen when a source took it: nobody would step it.
    pub(crate) fn deliveries(&self, gradients: Gradients) -> Result<(Gradients, Vec<Delivery>)> {
        let mut unsourced = Vec::new();
        let mut by_region: Vec<Gradients> = self.sources.iter().map(|_| Vec::new()).collect();
        for (index, gradient) in gradients {
            let region = self.layout.extents[index].region;
            match self.sources[region] {
                None => unsourced.push((index, gradient)),
                Some(_) if !self.layout.regions[region].trained => {
                    let reason = format!(
                        "`{}` is trained, but was frozen when its layer was divided; unfreeze it before the model is divided",
                        self.tensor_name(index)
                    );
                    return Err(refused("layers", reason));
                }
                Some(_) => {
                    let before = self.layout.extents[..index].iter().filter(|extent| extent.region == region);
                    by_region[region].push((before.count(), gradient));
                }
            }
        }
        let deliveries = self.sources.iter().zip(&self.layout.regions).zip(by_region);
        let deliveries = deliveries
            .filter(|((_, region), _)| region.trained)
            .filter_map(|((source, _), gradients)| Some(Delivery { region: source.clone()?, gradients }));
        Ok((unsourced, deliveries.collect()))
    }
}
