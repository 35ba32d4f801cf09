//! Adapters of a whole model.

mod merge;
mod modules_to_save;
pub(crate) mod plan;
mod slots;
pub(crate) mod survey;
mod tensors;
pub(crate) mod token_rows;

use std::sync::Arc;

use models::module::{Module, parameters};
use parking_lot::Mutex;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use crate::adapter::Adapter;
use crate::config::LoraConfig;
use crate::embedding::{EmbeddingAdapter, LoraEmbedding};
use crate::error::{Error, Result, listed};
use crate::experts::{self, ExpertAdapter, LoraExperts};
use crate::linear::{DEFAULT, LoraLinear};
use crate::switch::{Setting, Switch};
pub use merge::Unloaded;
use modules_to_save::Whole;
use plan::{AdapterPlan, PlannedExperts, PlannedWhole};
use slots::put_in;
use survey::{Survey, refuse_foreign};
use token_rows::TokenParts;

/// A handle on a model's adapters.
///
/// [`LoraConfig::install`] freezes the model, replaces every target projection by a [`LoraLinear`], and returns this handle,
/// which switches, merges and saves. Methods that add or remove tensors also need the model. Names are Hugging Face's:
/// `model.layers.0.self_attn.q_proj`.
///
/// ```
/// use lora::LoraConfig;
/// use models::module::{Input, LanguageModel, trainable};
/// use models::{Llama, DecoderConfig};
/// use tch::{Device, Kind, Tensor};
///
/// let mut model = Llama::new(&DecoderConfig::llama(100, 16, 40, 2, 4), (Kind::Float, Device::Cpu))?;
/// let target_modules = Some(["q_proj", "v_proj"].into());
/// let adapters = LoraConfig { target_modules, seed: 42, ..LoraConfig::default() }.install(&mut model)?;
/// assert_eq!(trainable(&model).len(), 2 * 2 * 2);
///
/// let tokens = Tensor::from_slice(&[3i64, 1, 4]).view([1, 3]);
/// let adapted = model.logits(&Input::new(&tokens))?;
/// let base = {
///     let _off = adapters.disable()?;
///     model.logits(&Input::new(&tokens))?
/// };
/// assert_eq!(adapted, base, "a new adapter changes nothing");
/// # Ok::<(), lora::Error>(())
/// ```
#[derive(Debug)]
pub struct Adapters {
    switch: Arc<Switch>,
    sites: Vec<Site>,
    embeddings: Vec<EmbeddingSite>,
    experts: Vec<ExpertSite>,
    wholes: Arc<Mutex<Vec<Whole>>>,
    /// Embedding and head whose rows of some tokens are trained; the rows are among `wholes`.
    token_parts: Vec<TokenParts>,
    configs: Vec<(String, LoraConfig)>,
    /// Base weights that an adapter's file contains, by adapter and projection; they are saved with it again.
    copies: Vec<(String, String)>,
}

/// PEFT's suffix of an adapted projection's base weight; files contain it if the targets include the head.
pub(crate) const BASE_WEIGHT: &str = ".base_layer.weight";

/// An adapted projection.
#[derive(Debug)]
struct Site {
    path: String,
    name: String,
    /// The original weight.
    weight: Tensor,
    bias: Option<Tensor>,
    /// Shares all tensors with the layer in the model.
    layer: LoraLinear,
}

/// An adapted embedding.
#[derive(Debug)]
struct EmbeddingSite {
    path: String,
    name: String,
    /// The original weight.
    weight: Tensor,
    /// Shares all tensors with the change in the model.
    layer: LoraEmbedding,
}

/// The adapted experts of a layer.
#[derive(Debug)]
struct ExpertSite {
    path: String,
    name: String,
    /// The model's own matrices.
    matrices: Vec<[Tensor; 3]>,
    /// Whether they were streamed from files when the adapters were installed.
    is_streamed: bool,
    /// Shares all tensors with the change in the model.
    layer: LoraExperts,
}

impl LoraConfig {
    /// Freezes `model` and installs an adapter called `default`, initialised from [`LoraConfig::seed`].
    ///
    /// # Errors
    /// An invalid configuration; targets that match nothing, or that are not projections, with a list of existing ones. Then
    /// nothing is changed.
    pub fn install(&self, model: &mut dyn Module) -> Result<Adapters> {
        let survey = Survey::of(model)?;
        refuse_foreign(&survey, &[])?;
        let plan = AdapterPlan::new(&survey, self)?;
        drop(survey);
        for (_, tensor) in parameters(model) {
            let _ = tensor.f_set_requires_grad(false)?;
        }
        let mut adapters = Adapters {
            switch: Arc::default(),
            sites: Vec::new(),
            embeddings: Vec::new(),
            experts: Vec::new(),
            wholes: Arc::default(),
            token_parts: Vec::new(),
            configs: Vec::new(),
            copies: Vec::new(),
        };
        adapters.place(model, DEFAULT, self, plan)?;
        adapters.set_active(&[DEFAULT])?;
        Ok(adapters)
    }
}

impl Adapters {
    /// Adds an adapter, which is not active yet.
    ///
    /// # Errors
    /// A name that exists or is empty, or contains a dot or a path separator; as [`LoraConfig::install`].
    pub fn add(&mut self, model: &mut dyn Module, name: &str, config: &LoraConfig) -> Result<()> {
        let plan = self.plan(model, name, config)?;
        self.place(model, name, config, plan)
    }

    /// Plans an adapter with this name and configuration.
    pub(crate) fn plan(
        &self,
        model: &mut dyn Module,
        name: &str,
        config: &LoraConfig,
    ) -> Result<AdapterPlan> {
        let refuse = |reason| Err(Error::Invalid(format!("an adapter cannot be called `{name}`: {reason}")));
        if self.configs.iter().any(|(known, _)| known == name) {
            return refuse("it exists; delete it first, or choose another name");
        }
        if name.is_empty() || name.contains(['.', '/', '\\']) {
            return refuse(
                "the name becomes part of tensor names and a folder name; leave out dots and slashes",
            );
        }
        self.not_merged("add an adapter")?;
        let survey = Survey::of(model)?;
        let known = self.sites.iter().map(|site| &*site.path);
        let known = known.chain(self.embeddings.iter().map(|site| &*site.path));
        let known: Vec<&str> = known.chain(self.experts.iter().map(|site| &*site.path)).collect();
        refuse_foreign(&survey, &known)?;
        let plan = AdapterPlan::new(&survey, config)?;
        token_rows::refuse_other_tokens(&self.token_parts, &plan.token_parts)?;
        self.refuse_other_experts(&plan)?;
        for whole in self.wholes.lock().iter() {
            let overlaps = |planned: &PlannedWhole| {
                planned.paths != whole.paths && planned.paths.iter().any(|path| whole.paths.contains(path))
            };
            if plan.wholes.iter().any(overlaps) {
                return Err(Error::Invalid(format!(
                    "{} are tied for one adapter and separate for another; give both the same `ensure_weight_tying`",
                    whole.names.join(" and ")
                )));
            }
        }
        Ok(plan)
    }

    /// Refuses adapters of experts beside those of other tensors, as PEFT does: their names in a file depend on what is adapted.
    fn refuse_other_experts(&self, plan: &AdapterPlan) -> Result<()> {
        for planned in &plan.experts {
            let Some(site) = self.experts.iter().find(|site| site.path == planned.path) else { continue };
            if let Some(first) = site.layer.adapters().first()
                && site.layer.tensors_of(&first.name) != planned.tensors()
            {
                return Err(Error::Invalid(format!(
                    "adapters of the experts `{}` adapt the same tensors of them; give each the same `target_parameters` as `{}` has",
                    site.name, first.name
                )));
            }
        }
        Ok(())
    }

    pub(crate) fn place(
        &mut self,
        model: &mut dyn Module,
        name: &str,
        config: &LoraConfig,
        plan: AdapterPlan,
    ) -> Result<()> {
        let mut generator = Generator::new(config.seed)?;
        let mut placed = Vec::new();
        for site in &plan.sites {
            let base = match self.sites.iter().find(|known| known.path == site.path) {
                Some(known) => known.layer.base_weight(),
                None => site.weight.f_detach()?,
            };
            placed.push(Adapter::new(name, &base, &site.options, &mut generator)?);
        }
        for planned in plan.embeddings {
            let at = match self.embeddings.iter().position(|known| known.path == planned.path) {
                Some(at) => at,
                None => {
                    let layer = LoraEmbedding::over(&planned.weight, self.switch.clone())?;
                    let (path, name, weight) = (planned.path, planned.name, planned.weight);
                    self.embeddings.push(EmbeddingSite { path, name, weight, layer });
                    self.embeddings.len() - 1
                }
            };
            let layer = &mut self.embeddings[at].layer;
            layer.push(EmbeddingAdapter::new(name, &layer.base_weight(), &planned.options, &mut generator)?);
        }
        for planned in plan.experts {
            let shape = experts::shape_of(&planned.matrices);
            let options = planned.matrices.first().map(|[gate, ..]| (gate.kind(), gate.device()));
            let at = match self.experts.iter().position(|known| known.path == planned.path) {
                Some(at) => at,
                None => {
                    let layer = LoraExperts::new(planned.in_turns, self.switch.clone());
                    let PlannedExperts { path, name, matrices, is_streamed, .. } = planned;
                    self.experts.push(ExpertSite { path, name, matrices, is_streamed, layer });
                    self.experts.len() - 1
                }
            };
            let layer = &mut self.experts[at].layer;
            for (of, of_tensor) in planned.adapted {
                let place = (shape, options.unwrap_or((Kind::Float, Device::Cpu)));
                layer.push(ExpertAdapter::new(name, of, place, &of_tensor, &mut generator)?);
            }
        }
        for parts in plan.token_parts {
            if !self.token_parts.contains(&parts) {
                self.token_parts.push(parts);
            }
        }
        for planned in plan.wholes {
            let mut wholes = self.wholes.lock();
            // One that an earlier adapter trains already has its own handle.
            let at = match wholes.iter().position(|whole| whole.paths == planned.paths) {
                Some(at) => at,
                None => {
                    wholes.push(Whole::new(planned)?);
                    wholes.len() - 1
                }
            };
            wholes[at].push(name)?;
        }
        for (planned, adapter) in plan.sites.into_iter().zip(placed) {
            let at = match self.sites.iter().position(|known| known.path == planned.path) {
                Some(at) => at,
                None => {
                    let bias = planned.bias.as_ref().map(Tensor::shallow_clone);
                    let layer = LoraLinear::over(&planned.weight, bias, self.switch.clone())?;
                    let (path, name) = (planned.path, planned.name);
                    self.sites.push(Site { path, name, weight: planned.weight, bias: planned.bias, layer });
                    self.sites.len() - 1
                }
            };
            self.sites[at].layer.push(adapter)?;
        }
        self.configs.push((name.to_owned(), config.clone()));
        put_in(
            model,
            &self.sites,
            &self.wholes.lock(),
            &self.token_parts,
            (&self.embeddings, &self.experts),
        )?;
        self.applied()
    }

    /// Returns the adapters' names, in order of installation.
    pub fn names(&self) -> Vec<String> {
        self.configs.iter().map(|(name, _)| name.clone()).collect()
    }

    /// Returns an adapter's configuration.
    ///
    /// # Errors
    /// An unknown adapter.
    pub fn config(&self, name: &str) -> Result<&LoraConfig> {
        let config = self.configs.iter().find(|(known, _)| known == name).map(|(_, config)| config);
        config.ok_or_else(|| {
            let known = listed(&self.names());
            Error::Invalid(format!("there is no adapter `{name}`; expected one of: {known}"))
        })
    }

    /// Returns Hugging Face's names of the adapted projections.
    pub fn targets(&self) -> Vec<String> {
        let embeddings = self.embeddings.iter().map(|site| site.name.clone());
        let experts = self.experts.iter().flat_map(|site| {
            let first = site.layer.adapters().first();
            let tensors = first.map(|first| site.layer.tensors_of(&first.name)).unwrap_or_default();
            tensors.into_iter().map(|of| format!("{}.{}", site.name, of.name()))
        });
        self.sites.iter().map(|site| site.name.clone()).chain(embeddings).chain(experts).collect()
    }

    /// Returns the names of the active adapters.
    pub fn active(&self) -> Vec<String> {
        self.switch.read(|setting| setting.active.clone())
    }

    /// Makes these adapters active: their changes are added and they are trained; other adapters are frozen. For modules that
    /// are saved whole, the last adapter that has them applies.
    ///
    /// # Errors
    /// An unknown adapter; several adapters including DoRA, whose magnitudes depend on the base and itself only; a
    /// merged model.
    pub fn set_active(&self, names: &[&str]) -> Result<()> {
        self.not_merged("switch adapters")?;
        let mut dora = false;
        for name in names {
            dora |= self.config(name)?.use_dora;
        }
        if dora && names.len() > 1 {
            return Err(Error::Invalid(
                "a DoRA adapter computes alone: it learns the length of the base's rows with its own change; activate one at a \
                 time, or merge one and unload it first"
                    .to_owned(),
            ));
        }
        self.switch.set(|setting| setting.active = names.iter().map(|name| (*name).to_owned()).collect());
        self.applied()
    }

    /// Applies the switch to tensors that are not read in every forward.
    fn applied(&self) -> Result<()> {
        let setting = self.switch.read(Setting::clone);
        for adapter in self.sites.iter().flat_map(|site| site.layer.adapters()) {
            let trained = setting.active.contains(&adapter.name);
            for (_, tensor) in adapter.tensors() {
                let _ = tensor.f_set_requires_grad(trained)?;
            }
        }
        for adapter in self.embeddings.iter().flat_map(|site| site.layer.adapters()) {
            let trained = setting.active.contains(&adapter.name);
            for (_, tensor) in adapter.tensors() {
                let _ = tensor.f_set_requires_grad(trained)?;
            }
        }
        for adapter in self.experts.iter().flat_map(|site| site.layer.adapters()) {
            let trained = setting.active.contains(&adapter.name);
            for (_, tensor) in adapter.tensors() {
                let _ = tensor.f_set_requires_grad(trained)?;
            }
        }
        self.wholes.lock().iter_mut().try_for_each(|whole| whole.show(&setting))
    }

    /// Disables all adapters while the guard lives, merged or not: the model computes as the base.
    ///
    /// # Errors
    /// Never fails; `Result` for uniformity.
    pub fn disable(&self) -> Result<Disabled> {
        self.switch().disable()
    }

    /// Returns what disables the adapters without owning them.
    pub fn switch(&self) -> AdapterSwitch {
        AdapterSwitch { switch: self.switch.clone(), wholes: self.wholes.clone() }
    }

    /// Deletes an adapter, active or not.
    ///
    /// # Errors
    /// An unknown adapter; a merged model.
    pub fn delete(&mut self, model: &mut dyn Module, name: &str) -> Result<()> {
        self.config(name)?;
        self.not_merged("delete an adapter")?;
        self.switch.set(|setting| setting.active.retain(|active| active != name));
        self.applied()?;
        for site in &mut self.sites {
            site.layer.remove(name);
        }
        for site in &mut self.embeddings {
            site.layer.remove(name);
        }
        for site in &mut self.experts {
            site.layer.remove(name);
        }
        self.wholes.lock().iter_mut().for_each(|whole| whole.remove(name));
        self.configs.retain(|(known, _)| known != name);
        self.copies.retain(|(known, _)| known != name);
        put_in(model, &self.sites, &self.wholes.lock(), &self.token_parts, (&self.embeddings, &self.experts))
    }
}

/// Disables the adapters of a model, as [`Adapters::disable`] does.
#[derive(Debug, Clone)]
pub struct AdapterSwitch {
    switch: Arc<Switch>,
    wholes: Arc<Mutex<Vec<Whole>>>,
}

impl AdapterSwitch {
    /// Disables all adapters while the guard lives, merged or not: the model computes as the base.
    ///
    /// # Errors
    /// Never fails; `Result` for uniformity.
    pub fn disable(&self) -> Result<Disabled> {
        let guard = Disabled { switch: self.switch.clone(), wholes: self.wholes.clone() };
        guard.change(1)?;
        Ok(guard)
    }
}

/// Disables the adapters until it is dropped.
#[derive(Debug)]
#[must_use = "the adapters are active again when the guard is dropped"]
pub struct Disabled {
    switch: Arc<Switch>,
    wholes: Arc<Mutex<Vec<Whole>>>,
}

impl Disabled {
    fn change(&self, by: isize) -> Result<()> {
        let setting = self.switch.set(|setting| {
            setting.disabled = setting.disabled.saturating_add_signed(by);
            setting.clone()
        });
        self.wholes.lock().iter_mut().try_for_each(|whole| whole.show(&setting))
    }
}

impl Drop for Disabled {
    fn drop(&mut self) {
        // A drop cannot report errors; sharing the memory of a tensor of the same shape does not fail.
        let _ = self.change(-1);
    }
}
