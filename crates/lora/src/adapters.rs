//! Adapters of a whole model.

pub(crate) mod plan;
mod slots;
pub(crate) mod survey;
mod whole;

use std::collections::BTreeSet;
use std::sync::Arc;

use models::Linear;
use models::module::{Module, parameters};
use parking_lot::Mutex;
use runtime::random::Generator;
use tch::Tensor;

use crate::adapter::Adapter;
use crate::config::LoraConfig;
use crate::error::{Error, Result};
use crate::linear::{DEFAULT, LoraLinear};
use crate::switch::{Setting, Switch};
use plan::{Plan, PlannedWhole};
use slots::{put_back, put_in};
use survey::{Survey, refuse_foreign};
use whole::Whole;

/// The adapters of a model: a handle on what lies in it.
///
/// [`Adapters::install`] freezes the model, puts a [`LoraLinear`] in the place of every targeted projection, and gives this handle,
/// which switches, merges and saves. What adds or takes away tensors wants the model as well. Names are Hugging Face's:
/// `model.layers.0.self_attn.q_proj`.
///
/// ```
/// use lora::{Adapters, LoraConfig};
/// use models::module::{Input, LanguageModel, trainable};
/// use models::{Llama, LlamaConfig};
/// use tch::{Device, Kind, Tensor};
///
/// let mut model = Llama::new(&LlamaConfig::llama(100, 16, 40, 2, 4), (Kind::Float, Device::Cpu))?;
/// let config = LoraConfig { target_modules: Some(["q_proj", "v_proj"].into()), ..LoraConfig::default() };
/// let adapters = Adapters::install(&mut model, &config, 42)?;
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
    wholes: Arc<Mutex<Vec<Whole>>>,
    configs: Vec<(String, LoraConfig)>,
    /// Base weights that came with an adapter's file, by adapter and projection: they are written with it again.
    copies: Vec<(String, String)>,
}

/// What PEFT calls the weight of an adapted projection; it is in files whose targets name the head.
pub(crate) const BASE_WEIGHT: &str = ".base_layer.weight";

/// An adapted projection.
#[derive(Debug)]
struct Site {
    path: String,
    name: String,
    /// What stood there.
    weight: Tensor,
    bias: Option<Tensor>,
    /// Shares all of its tensors with the one in the model.
    layer: LoraLinear,
}

impl Adapters {
    /// Freezes `model` and gives it an adapter called `default`, drawn from `seed`.
    ///
    /// # Errors
    /// A configuration that makes no adapter, targets that match nothing or no projection: what exists is named. Nothing is
    /// changed then.
    pub fn install(model: &mut dyn Module, config: &LoraConfig, seed: u64) -> Result<Self> {
        let survey = Survey::of(model)?;
        refuse_foreign(&survey, &[])?;
        let plan = Plan::new(&survey, config)?;
        drop(survey);
        for (_, tensor) in parameters(model) {
            let _ = tensor.f_set_requires_grad(false)?;
        }
        let mut adapters = Self {
            switch: Arc::default(),
            sites: Vec::new(),
            wholes: Arc::default(),
            configs: Vec::new(),
            copies: Vec::new(),
        };
        adapters.place(model, DEFAULT, config, plan, seed)?;
        adapters.set_active(&[DEFAULT])?;
        Ok(adapters)
    }

    /// Adds an adapter, which is not active yet.
    ///
    /// # Errors
    /// A name that is taken or empty, or has a dot or a separator of paths in it; as [`Adapters::install`].
    pub fn add(&mut self, model: &mut dyn Module, name: &str, config: &LoraConfig, seed: u64) -> Result<()> {
        let plan = self.plan(model, name, config)?;
        self.place(model, name, config, plan, seed)
    }

    /// What an adapter of this name and configuration would be.
    pub(crate) fn plan(&self, model: &mut dyn Module, name: &str, config: &LoraConfig) -> Result<Plan> {
        let refuse = |reason| Err(Error::AdapterName { name: name.to_owned(), reason });
        if self.configs.iter().any(|(known, _)| known == name) {
            return refuse("there is one of that name; delete it first, or take another name");
        }
        if name.is_empty() || name.contains(['.', '/', '\\']) {
            return refuse(
                "the name becomes a part of tensors' names and a folder; leave out dots and slashes",
            );
        }
        self.not_merged("add an adapter")?;
        let survey = Survey::of(model)?;
        let known: Vec<&str> = self.sites.iter().map(|site| &*site.path).collect();
        refuse_foreign(&survey, &known)?;
        let plan = Plan::new(&survey, config)?;
        for whole in self.wholes.lock().iter() {
            let overlaps = |planned: &PlannedWhole| {
                planned.paths != whole.paths && planned.paths.iter().any(|path| whole.paths.contains(path))
            };
            if plan.wholes.iter().any(overlaps) {
                return Err(Error::State(format!(
                    "{} are tied for one adapter and apart for another; give both the same `ensure_weight_tying`",
                    whole.names.join(" and ")
                )));
            }
        }
        Ok(plan)
    }

    pub(crate) fn place(
        &mut self,
        model: &mut dyn Module,
        name: &str,
        config: &LoraConfig,
        plan: Plan,
        seed: u64,
    ) -> Result<()> {
        let mut generator = Generator::new(seed)?;
        let mut placed = Vec::new();
        for site in &plan.sites {
            let base = match self.sites.iter().find(|known| known.path == site.path) {
                Some(known) => known.layer.base_weight(),
                None => site.weight.f_detach()?,
            };
            placed.push(Adapter::new(name, &base, &site.options, &mut generator)?);
        }
        for planned in plan.wholes {
            let mut wholes = self.wholes.lock();
            // One that an earlier adapter trains has a handle of its own already.
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
        put_in(model, &self.sites, &self.wholes.lock())?;
        self.applied()
    }

    /// Names, in the order in which they came.
    pub fn names(&self) -> Vec<String> {
        self.configs.iter().map(|(name, _)| name.clone()).collect()
    }

    /// An adapter's configuration.
    ///
    /// # Errors
    /// [`Error::UnknownAdapter`].
    pub fn config(&self, name: &str) -> Result<&LoraConfig> {
        let found = self.configs.iter().find(|(known, _)| known == name).map(|(_, config)| config);
        found.ok_or_else(|| Error::UnknownAdapter { name: name.to_owned(), known: self.names() })
    }

    /// Hugging Face's names of the adapted projections.
    pub fn targets(&self) -> Vec<String> {
        self.sites.iter().map(|site| site.name.clone()).collect()
    }

    /// Names of the adapters that compute.
    pub fn active(&self) -> Vec<String> {
        self.switch.read(|setting| setting.active.clone())
    }

    /// Lets these compute, their changes added together, and be trained; the others rest, and require no gradient. Of modules that
    /// are saved whole, the last adapter that has them decides.
    ///
    /// # Errors
    /// [`Error::UnknownAdapter`]; several of which one is DoRA, whose lengths are of the base and itself alone; a merged model.
    pub fn set_active(&self, names: &[&str]) -> Result<()> {
        self.not_merged("switch adapters")?;
        let mut dora = false;
        for name in names {
            dora |= self.config(name)?.use_dora;
        }
        if dora && names.len() > 1 {
            return Err(Error::State(
                "a DoRA adapter computes alone: it learns the length of the base's rows with its own change; activate one at a \
                 time, or merge one and unload it first"
                    .to_owned(),
            ));
        }
        self.switch.set(|setting| setting.active = names.iter().map(|name| (*name).to_owned()).collect());
        self.applied()
    }

    /// Shows the switch's setting in what is not read with every forward.
    fn applied(&self) -> Result<()> {
        let setting = self.switch.read(Setting::clone);
        for adapter in self.sites.iter().flat_map(|site| site.layer.adapters()) {
            let trained = setting.active.contains(&adapter.name);
            for (_, tensor) in adapter.tensors() {
                let _ = tensor.f_set_requires_grad(trained)?;
            }
        }
        self.wholes.lock().iter_mut().try_for_each(|whole| whole.show(&setting))
    }

    /// The base model computes while the guard lives, merged or not.
    ///
    /// # Errors
    /// None in practice; the border's type.
    pub fn disable(&self) -> Result<Disabled> {
        let guard = Disabled { switch: self.switch.clone(), wholes: self.wholes.clone() };
        guard.change(1)?;
        Ok(guard)
    }

    /// Takes an adapter away. One that computes no longer does.
    ///
    /// # Errors
    /// [`Error::UnknownAdapter`]; a merged model.
    pub fn delete(&mut self, model: &mut dyn Module, name: &str) -> Result<()> {
        self.config(name)?;
        self.not_merged("delete an adapter")?;
        self.switch.set(|setting| setting.active.retain(|active| active != name));
        self.applied()?;
        for site in &mut self.sites {
            site.layer.remove(name);
        }
        self.wholes.lock().iter_mut().for_each(|whole| whole.remove(name));
        self.configs.retain(|(known, _)| known != name);
        self.copies.retain(|(known, _)| known != name);
        put_in(model, &self.sites, &self.wholes.lock())
    }

    /// How many numbers an adapter has, modules that it saves whole included.
    ///
    /// # Errors
    /// [`Error::UnknownAdapter`].
    pub fn parameter_count(&self, name: &str) -> Result<u64> {
        let mut seen = BTreeSet::new();
        let tensors = self.tensors(name)?;
        let once = tensors.iter().filter(|(_, tensor)| seen.insert(tensor.data_ptr() as usize));
        Ok(once.map(|(_, tensor)| tensor.numel() as u64).sum())
    }

    /// An adapter's tensors as PEFT's files call them without `base_model.model.`, sharing memory with it. One that is tied comes
    /// under each of its names.
    ///
    /// # Errors
    /// [`Error::UnknownAdapter`].
    pub fn tensors(&self, name: &str) -> Result<Vec<(String, Tensor)>> {
        self.config(name)?;
        let mut list = Vec::new();
        for site in &self.sites {
            for adapter in site.layer.adapters().iter().filter(|adapter| adapter.name == name) {
                for (part, tensor) in adapter.tensors() {
                    let end = if part == "lora_magnitude_vector" { "" } else { ".weight" };
                    list.push((format!("{}.{part}{end}", site.name), tensor.f_detach()?));
                }
            }
        }
        for whole in self.wholes.lock().iter() {
            if let Some(values) = whole.of(name)? {
                let shared = |key: &String| Ok((key.clone(), values.shallow_clone()));
                list.extend(whole.keys.iter().map(shared).collect::<Result<Vec<_>>>()?);
            }
        }
        Ok(list)
    }

    /// Writes the active adapters into the projections' weights: see [`LoraLinear::merge`]. Nothing happens if they are merged.
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

    /// Brings the base's weights back bit for bit. Nothing happens if nothing is merged.
    ///
    /// # Errors
    /// None in practice; the border's type.
    pub fn unmerge(&self) -> Result<()> {
        self.sites.iter().try_for_each(|site| site.layer.unmerge())
    }

    /// Names of the adapters that are merged.
    pub fn merged(&self) -> Vec<String> {
        self.sites.iter().map(|site| site.layer.merged()).find(|names| !names.is_empty()).unwrap_or_default()
    }

    /// Leaves a plain model with the active adapters in its weights. It stays frozen.
    ///
    /// A head that was tied to the embedding and was changed apart from it (adapted, or saved whole without
    /// [`LoraConfig::ensure_weight_tying`]) is one of its own then, which the return value says: such a model must be saved
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

    /// Leaves the model as it was, but frozen.
    ///
    /// # Errors
    /// None in practice; the border's type.
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

    /// Names of tensors that were tied to others and are not any more.
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

    /// Notes that an adapter's file has the base weight of these projections.
    pub(crate) fn keep_copies(&mut self, name: &str, projections: Vec<String>) {
        self.copies.extend(projections.into_iter().map(|projection| (name.to_owned(), projection)));
    }

    /// The base weights that were noted for an adapter, as its file calls them.
    pub(crate) fn copies(&self, name: &str) -> Vec<(String, Tensor)> {
        let of_adapter = self.copies.iter().filter(|(adapter, _)| adapter == name);
        let site = |projection: &String| self.sites.iter().find(|site| site.name == *projection);
        of_adapter
            .filter_map(|(_, projection)| {
                Some((format!("{projection}{BASE_WEIGHT}"), site(projection)?.layer.base_weight()))
            })
            .collect()
    }

    fn not_merged(&self, to: &str) -> Result<()> {
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

/// What [`Adapters::merge_and_unload`] left.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a head that is untied must be saved as such"]
pub struct Unloaded {
    /// Hugging Face's names of tensors that were tied to others and have values of their own now.
    pub untied: Vec<String>,
}

/// The base model computes until this is dropped.
#[derive(Debug)]
#[must_use = "the adapters compute again as soon as the guard is dropped"]
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
        // A drop has nobody to tell; to show another memory cannot fail for tensors of one shape.
        let _ = self.change(-1);
    }
}
