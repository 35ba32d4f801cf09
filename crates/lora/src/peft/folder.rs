//! Reading and writing an adapter's folder.

use std::collections::BTreeMap;
use std::path::Path;

use files::atomic_write;
use models::module::Module;
use models::tensors_file::{self, Content, LazyTensor};
use tch::{Device, Tensor};

use super::{CONFIG_FILE, TENSORS_FILE, tensors};
use crate::adapters::plan::AdapterPlan;
use crate::adapters::{Adapters, BASE_WEIGHT, survey::Survey, token_rows};
use crate::config::LoraConfig;
use crate::error::{Error, Result, foreign_adapter};
use crate::linear::DEFAULT;

/// PEFT's prefix of all names in its files.
pub const PREFIX: &str = "base_model.model.";

/// Returns one of the model's tensors, under a name, as it is brought when it is written.
pub type LazyTensors<'a> = dyn Fn(String, &Tensor) -> LazyTensor<'a> + 'a;

impl Adapters {
    /// Installs ([`LoraConfig::install`]) the adapter in `folder`, written by PEFT or [`Adapters::save`]. It is active and can be
    /// trained.
    ///
    /// # Errors
    /// Errors of [`LoraConfig::read`] and [`LoraConfig::install`]; a missing, truncated or invalid tensors file;
    /// An adapter of another base. Then nothing is changed.
    pub fn load(model: &mut dyn Module, folder: &Path) -> Result<Self> {
        let survey = Survey::of(model)?;
        let (config, read) = atomic_write::read(folder, || {
            let config = LoraConfig::read(&folder.join(CONFIG_FILE))?;
            let read = fitting(folder, &AdapterPlan::new(&survey, &config)?)?;
            Ok::<_, Error>((config, read))
        })?;
        let mut adapters = config.install(model)?;
        adapters.fill(DEFAULT, read)?;
        Ok(adapters)
    }

    /// Adds ([`Adapters::add`]) the adapter in `folder`.
    ///
    /// # Errors
    /// As [`Adapters::load`] and [`Adapters::add`].
    pub fn add_from(&mut self, model: &mut dyn Module, name: &str, folder: &Path) -> Result<()> {
        let (config, plan, read) = atomic_write::read(folder, || {
            let config = LoraConfig::read(&folder.join(CONFIG_FILE))?;
            let plan = self.plan(model, name, &config)?;
            let read = fitting(folder, &plan)?;
            Ok::<_, Error>((config, plan, read))
        })?;
        self.place(model, name, &config, plan)?;
        self.fill(name, read)
    }

    /// Writes every adapter as PEFT does: `default` to `folder`, others to subfolders of their names.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub fn save(&self, folder: &Path) -> Result<()> {
        self.save_lazily(Some(folder), &|name, tensor| LazyTensor::from_tensor(name, tensor))
    }

    /// [`Adapters::save`] where other processes have parts of the tensors: `lazy` returns each of the model's tensors under a name, as it
    /// is brought when it is written. All processes call it; those without a folder only give their parts.
    ///
    /// # Errors
    /// A folder that cannot be written; then no process waits for this one. Those of the values.
    pub fn save_lazily(&self, folder: Option<&Path>, lazy: &LazyTensors<'_>) -> Result<()> {
        let mut saved = Ok(());
        for name in self.names() {
            let of_adapter = |folder: &Path| match &*name {
                DEFAULT => folder.to_owned(),
                _ => folder.join(&name),
            };
            let folder = folder.filter(|_| saved.is_ok()).map(of_adapter);
            let one = self.save_one_lazily(&name, folder.as_deref(), lazy);
            saved = saved.and(one);
        }
        saved
    }

    /// Writes one adapter's two files to `folder`, both or neither: see [`write_folder`].
    ///
    /// # Errors
    /// An unknown adapter; a folder that cannot be written.
    pub fn save_one(&self, name: &str, folder: &Path) -> Result<()> {
        self.save_one_lazily(name, Some(folder), &|name, tensor| LazyTensor::from_tensor(name, tensor))
    }

    fn save_one_lazily(&self, name: &str, folder: Option<&Path>, lazy: &LazyTensors<'_>) -> Result<()> {
        let all = self.handles(name)?.into_iter().chain(self.copies(name));
        let tensors = all.map(|(key, tensor)| lazy(format!("{PREFIX}{key}"), &tensor)).collect();
        let mut content = tensors::content(folder.unwrap_or(Path::new("")), tensors)?;
        let Some(folder) = folder else { return content.give() };
        let saved = write_content(folder, self.config(name)?, &mut content);
        if saved.is_err() {
            // The first error is the one to report.
            let _ = content.give();
        }
        saved
    }

    /// Copies values, which match, into an adapter.
    fn fill(&mut self, name: &str, Read { values, copies }: Read) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for (key, tensor) in self.tensors(name)? {
            if let Some(values) = values.get(&key) {
                tensor.shallow_clone().f_copy_(values)?;
            }
        }
        self.keep_copies(name, copies);
        Ok(())
    }
}

/// Writes an adapter's two files to `folder`, from tensors named as in files: [`PREFIX`] and the names of
/// [`Adapters::tensors`]. For an adapter that is not in a model; otherwise use [`Adapters::save`]. Both files become visible
/// together ([`atomic_write::Folder`]): a reader, also after a crash, finds either the former adapter or this one. Other
/// entries of the folder stay.
///
/// # Errors
/// A folder that cannot be written.
pub fn write_folder(folder: &Path, config: &LoraConfig, tensors: &[(String, Tensor)]) -> Result<()> {
    let content = tensors::content(&folder.join(TENSORS_FILE), LazyTensor::from_tensors(tensors));
    write_content(folder, config, &mut content?)
}

fn write_content(folder: &Path, config: &LoraConfig, content: &mut Content<'_>) -> Result<()> {
    let failed = |cause: std::io::Error| Error::file(folder, format!("cannot be written: {cause}"));
    let new = atomic_write::Folder::beside(folder).map_err(failed)?;
    tensors_file::write_content(&new.path().join(TENSORS_FILE), content)?;
    let text = config.to_json();
    atomic_write::file(&new.path().join(CONFIG_FILE), |out| out.write_all(text.as_bytes()))
        .map_err(failed)?;
    new.publish(&[CONFIG_FILE], &|_| false).map_err(failed)
}

/// Reads the tensors of a folder by name without the prefix, and checks them against `plan`.
fn fitting(folder: &Path, plan: &AdapterPlan) -> Result<Read> {
    let path = folder.join(TENSORS_FILE);
    let mut values = BTreeMap::new();
    for (name, tensor) in tensors_file::read(&path, Device::Cpu)? {
        let name = name.strip_prefix(PREFIX).unwrap_or(&name);
        // Some versions wrote DoRA's magnitudes as a module's weight.
        let name = match name.strip_suffix(".weight") {
            Some(rest) if rest.ends_with("lora_magnitude_vector") => rest,
            _ => name,
        };
        if values.insert(name.to_owned(), tensor).is_some() {
            let reason = format!("`{name}` exists twice, with and without `{PREFIX}`; write the file again");
            return Err(Error::file(path, reason));
        }
    }
    let (mut missing, mut mismatched) = (Vec::new(), Vec::new());
    let expected = plan.expected();
    for (names, shape) in &expected {
        let found: Vec<_> = names.iter().filter_map(|name| Some((name, values.get(name)?))).collect();
        if found.is_empty() {
            missing.push(names[0].clone());
        }
        for (name, tensor) in found.into_iter().filter(|(_, tensor)| tensor.size() != *shape) {
            mismatched.push(format!("{name} {:?} (expected {shape:?})", tensor.size()));
        }
    }
    let (mut unexpected, mut copies) = (Vec::new(), Vec::new());
    for (name, tensor) in &values {
        if expected.iter().any(|(names, _)| names.contains(name)) {
            continue;
        }
        match token_rows::is_table(name, tensor, &plan.token_parts)? {
            Some(true) => continue,
            Some(false) => {
                mismatched.push(format!("{name} (its values are not the base's)"));
                continue;
            }
            None => {}
        }
        let projection = name.strip_suffix(BASE_WEIGHT);
        let sites = || plan.sites.iter().chain(&plan.embeddings);
        match projection.and_then(|projection| sites().find(|site| site.name == projection)) {
            None => unexpected.push(name.clone()),
            Some(site) if same_values(&site.weight, tensor)? => copies.push(site.name.clone()),
            Some(_) => mismatched.push(format!("{name} (its values are not the base's)")),
        }
    }
    if missing.is_empty() && unexpected.is_empty() && mismatched.is_empty() {
        return Ok(Read { values, copies });
    }
    Err(foreign_adapter(path.display(), &missing, &unexpected, &mismatched))
}

/// The contents of a folder.
struct Read {
    /// Tensors by name without the prefix.
    values: BTreeMap<String, Tensor>,
    /// Projections whose base weight is also in the file.
    copies: Vec<String>,
}

fn same_values(base: &Tensor, read: &Tensor) -> Result<bool> {
    let base = base.f_detach()?.f_to_device(Device::Cpu)?;
    Ok(base.size() == read.size() && base.f_equal(&read.f_to_kind(base.kind())?)?)
}
