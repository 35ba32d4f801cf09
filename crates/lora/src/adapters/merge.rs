//! Merging adapters into the base, and removing them.

use models::Linear;
use models::module::Module;
use tch::Tensor;

use super::Adapters;
use super::slots::put_back;
use super::survey::Survey;
use crate::error::{Error, Result};

/// The result of [`Adapters::merge_and_unload`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "an untied head must be saved as such"]
pub struct Unloaded {
    /// Hugging Face's names of tensors that were tied and now have their own values.
    pub untied: Vec<String>,
}

impl Adapters {
    /// Merges the active adapters into the projections' weights: see [`LoraLinear::merge`](crate::LoraLinear::merge). Does nothing if they are merged.
    ///
    /// # Errors
    /// [`Error::NotFinite`], with nothing changed.
    pub fn merge(&self) -> Result<()> {
        for (done, site) in self.sites.iter().enumerate() {
            let merged = site.layer.merged_weight().and_then(|merged| site.layer.put(merged, &site.name));
            if let Err(error) = merged {
                self.sites[..done].iter().try_for_each(|site| site.layer.unmerge())?;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Restores the base's weights bit for bit. Does nothing if nothing is merged.
    ///
    /// # Errors
    /// Never fails; `Result` for uniformity.
    pub fn unmerge(&self) -> Result<()> {
        self.sites.iter().try_for_each(|site| site.layer.unmerge())
    }

    /// Returns the names of the merged adapters.
    pub fn merged(&self) -> Vec<String> {
        self.sites.iter().map(|site| site.layer.merged()).find(|names| !names.is_empty()).unwrap_or_default()
    }

    /// Removes the adapters and leaves the active ones merged into the weights. The model stays frozen.
    ///
    /// A head that was tied to the embedding and was changed separately (adapted, or saved whole without
    /// [`LoraConfig::ensure_weight_tying`](crate::LoraConfig::ensure_weight_tying)) now has its own weights. The return value lists such heads: the model must be saved
    /// as untied, or its head is lost.
    ///
    /// # Errors
    /// As [`Adapters::merge`].
    pub fn merge_and_unload(self, model: &mut dyn Module) -> Result<Unloaded> {
        self.merge()?;
        let tied = Survey::of(model)?;
        let linears: Vec<(String, Linear)> = self
            .sites
            .iter()
            .map(|site| (site.path.clone(), site.layer.shallow_clone().into_linear()))
            .collect();
        let untied = self.untied(&tied)?;
        for whole in self.wholes.lock().iter() {
            let _ = whole.live.f_set_requires_grad(false)?;
        }
        put_back(model, linears, Vec::new())?;
        Ok(Unloaded { untied })
    }

    /// Removes the adapters. The base stays frozen.
    ///
    /// # Errors
    /// Never fails; `Result` for uniformity.
    pub fn unload(self, model: &mut dyn Module) -> Result<()> {
        self.unmerge()?;
        self.switch.set(|setting| setting.active.clear());
        self.applied()?;
        let clone = Tensor::shallow_clone;
        let linears = self.sites.iter().map(|site| {
            let linear = Linear { weight: clone(&site.weight), bias: site.bias.as_ref().map(clone) };
            (site.path.clone(), linear)
        });
        let wholes = self.wholes.lock();
        let originals = wholes
            .iter()
            .flat_map(|whole| whole.paths.iter().map(|path| (path.clone(), clone(&whole.original))));
        put_back(model, linears.collect(), originals.collect())
    }

    /// Returns the names of tensors that were tied and no longer are.
    fn untied(&self, survey: &Survey) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for whole in self.wholes.lock().iter() {
            if whole.original.data_ptr() != whole.live.data_ptr() && whole.names.len() == 1 {
                let shares = |name: &str| name != whole.names[0];
                let shared = whole.base()?.data_ptr();
                let same =
                    survey.tensors.iter().any(|base| shares(&base.name) && base.tensor.data_ptr() == shared);
                names.extend(same.then(|| whole.names[0].clone()));
            }
        }
        for site in &self.sites {
            let weight = site.weight.data_ptr();
            let own = format!("{}.weight", site.name);
            let shared =
                survey.tensors.iter().any(|base| base.name != own && base.tensor.data_ptr() == weight);
            names.extend(shared.then_some(own));
        }
        Ok(names)
    }

    pub(super) fn not_merged(&self, to: &str) -> Result<()> {
        let merged = self.merged();
        if merged.is_empty() {
            return Ok(());
        }
        Err(Error::State(format!(
            "{} is merged into the base; call `unmerge` before you {to}",
            merged.join(", ")
        )))
    }
}
