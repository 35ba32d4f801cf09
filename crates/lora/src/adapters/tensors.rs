//! The tensors of an adapter by their names in PEFT's files.

use std::collections::BTreeSet;

use tch::Tensor;

use super::{Adapters, BASE_WEIGHT};
use crate::error::Result;
use crate::experts;

impl Adapters {
    /// Returns the number of an adapter's parameters, including modules that it saves whole.
    ///
    /// # Errors
    /// An unknown adapter.
    pub fn parameter_count(&self, name: &str) -> Result<u64> {
        let mut seen = BTreeSet::new();
        let tensors = self.tensors(name)?;
        let once = tensors.iter().filter(|(_, tensor)| seen.insert(tensor.data_ptr() as usize));
        Ok(once.map(|(_, tensor)| tensor.numel() as u64).sum())
    }

    /// Returns an adapter's tensors by their names in PEFT's files without `base_model.model.`, sharing memory. A tied tensor
    /// appears under each of its names.
    ///
    /// # Errors
    /// An unknown adapter.
    pub fn tensors(&self, name: &str) -> Result<Vec<(String, Tensor)>> {
        self.handles(name)?.into_iter().map(|(key, tensor)| Ok((key, tensor.f_detach()?))).collect()
    }

    /// [`Adapters::tensors`], the model's own ones as far as the adapter is active.
    pub(crate) fn handles(&self, name: &str) -> Result<Vec<(String, Tensor)>> {
        self.config(name)?;
        let mut list = Vec::new();
        for site in &self.sites {
            for adapter in site.layer.adapters().iter().filter(|adapter| adapter.name == name) {
                for (part, tensor) in adapter.tensors() {
                    let end = if part == "lora_magnitude_vector" { "" } else { ".weight" };
                    list.push((format!("{}.{part}{end}", site.name), tensor.shallow_clone()));
                }
            }
        }
        for site in &self.embeddings {
            for adapter in site.layer.adapters().iter().filter(|adapter| adapter.name == name) {
                for (part, tensor) in adapter.tensors() {
                    list.push((format!("{}.{part}", site.name), tensor.shallow_clone()));
                }
            }
        }
        for site in &self.experts {
            let tensors = site.layer.tensors_of(name);
            for adapter in site.layer.adapters().iter().filter(|adapter| adapter.name == name) {
                let key = experts::key(&site.name, adapter.to, &tensors);
                for (part, tensor) in adapter.tensors() {
                    list.push((format!("{key}.{part}.weight"), tensor.shallow_clone()));
                }
            }
        }
        for whole in self.wholes.lock().iter() {
            if let Some(values) = whole.handle(name)? {
                list.extend(whole.keys.iter().map(|key| (key.clone(), values.shallow_clone())));
            }
        }
        Ok(list)
    }

    /// Records that an adapter's file contains the base weights of these projections.
    pub(crate) fn keep_copies(&mut self, name: &str, projections: Vec<String>) {
        self.copies.extend(projections.into_iter().map(|projection| (name.to_owned(), projection)));
    }

    /// Returns the recorded base weights of an adapter, by their names in its file.
    pub(crate) fn copies(&self, name: &str) -> Vec<(String, Tensor)> {
        let of_adapter = self.copies.iter().filter(|(adapter, _)| adapter == name);
        let site = |name: &String| self.sites.iter().find(|site| site.name == *name);
        let embedding = |name: &String| self.embeddings.iter().find(|site| site.name == *name);
        let weight = |name: &String| match site(name) {
            Some(site) => Some(site.layer.base_weight()),
            None => embedding(name).map(|site| site.layer.base_weight()),
        };
        of_adapter
            .filter_map(|(_, projection)| Some((format!("{projection}{BASE_WEIGHT}"), weight(projection)?)))
            .collect()
    }
}
