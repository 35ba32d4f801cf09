//! Merging adapters into the base, and removing them.

use models::Linear;
use models::module::Module;
use runtime::precision::identity;
use tch::Tensor;

use super::Adapters;
use super::slots::put_back;
use super::survey::Survey;
use super::token_rows::{self, TokenParts};
use crate::error::{Error, Result};

/// The result of [`Adapters::merge_and_unload`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "an untied head must be saved as such"]
pub struct Unloaded {
    /// Hugging Face's names of tensors that were tied and now have their own values.
    pub untied: Vec<String>,
}

impl Adapters {
    /// Merges the active adapters into the projections' weights: see [`LoraLinear::merge`](crate::LoraLinear::merge). Does nothing if they
    /// are merged.
    ///
    /// # Errors
    /// Values that are not finite, with nothing changed.
    pub fn merge(&self) -> Result<()> {
        let merged = self.merge_all();
        if merged.is_err() {
            self.unmerge()?;
        }
        merged
    }

    fn merge_all(&self) -> Result<()> {
        for site in &self.embeddings {
            site.layer.merge(&site.name)?;
        }
        for site in &self.experts {
            site.layer.merge(&site.matrices, site.is_streamed, &site.name)?;
        }
        for site in &self.sites {
            site.layer.put(site.layer.merged_weight()?, &site.name)?;
        }
        Ok(())
    }

    /// Restores the base's weights bit for bit. Does nothing if nothing is merged.
    ///
    /// # Errors
    /// Never fails; `Result` for uniformity.
    pub fn unmerge(&self) -> Result<()> {
        self.embeddings.iter().try_for_each(|site| site.layer.unmerge())?;
        self.experts.iter().try_for_each(|site| site.layer.unmerge(&site.matrices))?;
        self.sites.iter().try_for_each(|site| site.layer.unmerge())
    }

    /// Returns the names of the merged adapters.
    pub fn merged(&self) -> Vec<String> {
        let sites = self.sites.iter().map(|site| site.layer.merged());
        let embeddings = self.embeddings.iter().map(|site| site.layer.merged());
        let experts = self.experts.iter().map(|site| site.layer.merged());
        sites.chain(embeddings).chain(experts).find(|names| !names.is_empty()).unwrap_or_default()
    }

    /// Removes the adapters and leaves the active ones merged into the weights. The model stays frozen.
    ///
    /// A head that was tied to the embedding, if one of the two was changed separately or both were (adapted, or saved whole without
    /// [`LoraConfig::ensure_weight_tying`](crate::LoraConfig::ensure_weight_tying)), now has its own weights. The return value lists the
    /// changed ones: the model must be saved as untied, or its head is lost.
    ///
    /// # Errors
    /// As [`Adapters::merge`].
    pub fn merge_and_unload(self, model: &mut dyn Module) -> Result<Unloaded> {
        self.merge()?;
        let tables = token_rows::merged(&self.token_parts, &self.wholes.lock())?;
        let originals = self.originals();
        let linears: Vec<(String, Linear)> = self
            .sites
            .iter()
            .map(|site| (site.path.clone(), site.layer.shallow_clone().into_linear()))
            .collect();
        for whole in self.wholes.lock().iter() {
            let _ = whole.live.f_set_requires_grad(false)?;
        }
        put_back(model, linears, tables)?;
        Ok(Unloaded { untied: untied(&originals, &Survey::of(model)?)? })
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
        let tables =
            self.embeddings.iter().map(|site| (format!("{}.weight", site.path), clone(&site.weight)));
        put_back(model, linears.collect(), originals.chain(tables).collect())
    }

    /// Returns the tensor that each changed name had in the base.
    fn originals(&self) -> Vec<(String, Tensor)> {
        let clone = Tensor::shallow_clone;
        let sites = self.sites.iter().map(|site| (format!("{}.weight", site.name), clone(&site.weight)));
        let wholes = self.wholes.lock();
        let wholes = wholes
            .iter()
            .flat_map(|whole| whole.names.iter().map(|name| (name.clone(), clone(&whole.original))));
        let embeddings =
            self.embeddings.iter().map(|site| (format!("{}.weight", site.name), clone(&site.weight)));
        let tables = self.token_parts.iter().flat_map(TokenParts::originals).chain(embeddings);
        sites.chain(wholes).chain(tables).collect()
    }

    pub(super) fn not_merged(&self, to: &str) -> Result<()> {
        let merged = self.merged();
        if merged.is_empty() {
            return Ok(());
        }
        Err(Error::Invalid(format!(
            "{} is merged into the base; call `unmerge` before you {to}",
            merged.join(", ")
        )))
    }
}

/// Returns the names whose tensors in the base had another name, too, and are no longer the same tensor as there.
fn untied(originals: &[(String, Tensor)], merged: &Survey) -> Result<Vec<String>> {
    let mut before = Vec::new();
    for base in &merged.tensors {
        let original = originals.iter().find(|(name, _)| *name == base.name);
        let tensor = original.map_or(&base.tensor, |(_, tensor)| tensor);
        before.push((base, identity(tensor)?));
    }
    let is_untied = |name: &str| {
        let own = before.iter().find(|(base, _)| base.name == *name);
        own.is_some_and(|(own, original)| {
            let shared =
                before.iter().filter(|(other, of_other)| of_other == original && other.name != *name);
            shared.clone().any(|(other, _)| other.identity != own.identity)
        })
    };
    Ok(originals.iter().map(|(name, _)| name.clone()).filter(|name| is_untied(name)).collect())
}
