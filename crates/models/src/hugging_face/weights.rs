//! The tensors of one or several weight files, under the model's names.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use decoder::{is_kept_wide, part_not_read, parts_not_read};
use files::atomic_write;
use kernels::nf4::{self, Scales};
use kernels::quantized::{self, blocks};
use tch::{Device, Kind, Tensor};

use super::bitsandbytes::{self, Locations, Quantized};
use super::clamped_experts;
use super::experts;
use super::gguf_weights::GgufWeights;
use super::index::Index;
use super::{INDEX, PREFIX, SINGLE, contents};
use crate::error::{Error, Result};
use crate::llama::{DecoderConfig, EMBEDDING, LM_HEAD, Llama};
use crate::module::tensors;
use crate::state_dict::check_fit;
use crate::tensors_file::{Entry, TensorLocation, TensorsFile, dtype_name};
use crate::token_rows::mean_row;

/// Memory-mapped weight files and their contents.
#[derive(Debug)]
pub(crate) struct Weights {
    /// The path that was opened: a file or a folder.
    path: PathBuf,
    pub(super) files: Vec<TensorsFile>,
    /// By the model's tensor name: the index of its file, and of its entry in that file.
    pub(super) locations: Locations,
    /// By the model's tensor name: weights in NF4.
    quantized: BTreeMap<String, Quantized>,
    /// By name: what belongs to them.
    pub(super) beside: Locations,
    /// The weights of a folder whose weights stay in a GGUF file; all else here is empty then.
    pub(super) gguf: Option<GgufWeights>,
    /// Rows of the embedding and of the head, where they are more than the files'.
    pub(super) vocabulary: Option<i64>,
}

impl Weights {
    /// Opens a file, or a folder with `model.safetensors` or else with shards and their index.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        if !path.is_dir() {
            return Self::collect(path, vec![TensorsFile::open(path)?]);
        }
        atomic_write::read(path, || Self::open_folder(path))
    }

    fn open_folder(path: &Path) -> Result<Self> {
        if let Some(gguf) = GgufWeights::open(path)? {
            return Ok(Self { gguf: Some(gguf), ..Self::collect(path, Vec::new())? });
        }
        if path.join(SINGLE).is_file() {
            return Self::collect(path, vec![TensorsFile::open(&path.join(SINGLE))?]);
        }
        let index_path = path.join(INDEX);
        if !index_path.is_file() {
            let reason = format!("neither {SINGLE} nor {INDEX} exists; {}", contents(path));
            return Err(Error::file(path, reason));
        }
        let index = Index::read(&index_path, path)?;
        let names = index.shards();
        let files: Vec<TensorsFile> =
            names.iter().map(|name| TensorsFile::open(&path.join(name))).collect::<Result<_>>()?;
        let numbers: BTreeMap<&str, usize> = names.into_iter().zip(0..).collect();
        let weights = Self::collect(path, files)?;
        for (tensor, shard) in index.locations() {
            let first = clamped_experts::first_part(tensor);
            let index = model_name(&first)
                .and_then(|name| weights.locations.get(name).or_else(|| weights.beside.get(name)));
            if model_name(tensor).is_some() && index.map(|index| index.0) != numbers.get(shard).copied() {
                let reason = format!("`{tensor}` should be in {shard}, which does not contain it");
                return Err(Error::file(&index_path, format!("{reason}; copy or download both again")));
            }
        }
        Ok(weights)
    }

    fn collect(path: &Path, mut files: Vec<TensorsFile>) -> Result<Self> {
        if clamped_experts::have_layout(&files) {
            files.iter_mut().try_for_each(clamped_experts::divide)?;
        } else {
            files.iter_mut().for_each(experts::divide);
        }
        let (mut locations, mut beside) = (Locations::new(), Locations::new());
        let names =
            || files.iter().flat_map(|file| file.entries()).filter_map(|entry| model_name(&entry.name));
        let in_nf4: BTreeSet<&str> =
            names().filter_map(|name| name.strip_suffix(bitsandbytes::STATE)).collect();
        for (number, file) in files.iter().enumerate() {
            for (index, entry) in file.entries().iter().enumerate() {
                let Some(name) = model_name(&entry.name) else { continue };
                let is_beside = bitsandbytes::of_weight(name).is_some_and(|weight| in_nf4.contains(weight));
                if !is_floating(entry.kind) && !is_beside && !in_nf4.contains(name) {
                    let reason = format!(
                        "`{}` is {}; expected a floating dtype (of quantized weights, those of bitsandbytes in NF4 are supported)",
                        entry.name,
                        dtype_name(entry.kind)
                    );
                    return Err(Error::file(file.path(), reason));
                }
                let places = if is_beside { &mut beside } else { &mut locations };
                if let Some(&(other, at)) = places.get(name) {
                    let (file_of_other, other) = (files[other].path(), &files[other].entries()[at].name);
                    let reason = format!(
                        "`{}` exists twice: it is also `{other}` of {}",
                        entry.name,
                        file_of_other.display()
                    );
                    return Err(Error::file(file.path(), reason));
                }
                places.insert(name.to_owned(), (number, index));
            }
        }
        let mut quantized = BTreeMap::new();
        for name in in_nf4 {
            let Some(&codes) = locations.get(name) else {
                return Err(Error::file(
                    path,
                    format!("`{name}` is missing, but its quantization state exists"),
                ));
            };
            quantized.insert(name.to_owned(), bitsandbytes::read(&files, &beside, codes, name)?);
        }
        Ok(Self { path: path.to_owned(), files, locations, quantized, beside, gguf: None, vocabulary: None })
    }

    /// Leaves out the projections of keys and values, and their norms, that files have for layers which attend to the keys of another.
    pub(super) fn leave_out_shared_keys(&mut self, config: &DecoderConfig) {
        self.locations.retain(|name, _| config.uses_tensor(name));
        self.quantized.retain(|name, _| config.uses_tensor(name));
        self.beside.retain(|name, _| config.uses_tensor(name));
    }

    /// Decides whether the head is the embedding, as transformers 5 does: a configuration that ties them is followed unless the files have
    /// both with different values. A copy of the embedding under the head's name is left out, and a single matrix under the head's name is
    /// the embedding.
    ///
    /// # Errors
    /// Errors of releasing pages.
    pub(super) fn ties(&mut self, by_config: bool) -> Result<bool> {
        let Some(head) = self.locations.get(LM_HEAD).copied().filter(|_| by_config) else {
            return Ok(by_config);
        };
        let quantized = [EMBEDDING, LM_HEAD].iter().any(|name| self.quantized.contains_key(*name));
        match self.locations.get(EMBEDDING).copied() {
            _ if quantized => return Ok(false),
            Some(embedding) if !self.same_values(embedding, head)? => return Ok(false),
            Some(_) => {}
            None => {
                self.locations.insert(EMBEDDING.to_owned(), head);
            }
        }
        self.locations.remove(LM_HEAD);
        Ok(true)
    }

    /// Whether two tensors have the same dtype, shape and bytes. Their pages are released.
    fn same_values(&self, one: (usize, usize), other: (usize, usize)) -> Result<bool> {
        let [(first_file, first), (second_file, second)] = [one, other].map(|at| self.entry(at));
        let is_same_form = first.kind == second.kind && first.shape == second.shape;
        if !is_same_form {
            return Ok(false);
        }
        let same = first_file.bytes(first) == second_file.bytes(second);
        first_file.forget(first)?;
        second_file.forget(second)?;
        Ok(same)
    }

    /// Returns the parts of the model that the files have and that are not read.
    pub(super) fn parts_not_read(&self) -> Vec<&'static str> {
        let entries = self.files.iter().flat_map(TensorsFile::entries);
        parts_not_read(entries.map(|entry| &*entry.name))
    }

    /// Compares names and shapes with those that a configuration requires.
    pub(super) fn check_against(&self, config: &DecoderConfig, config_path: &Path) -> Result<()> {
        // A layer has several tensors, so this bounds the list of expected ones. A GGUF file is compared as it is opened.
        if self.gguf.is_none()
            && usize::try_from(config.num_hidden_layers).is_ok_and(|layers| layers > self.locations.len())
        {
            let (layers, found) = (config.num_hidden_layers, self.locations.len());
            let reason = format!(
                "`num_hidden_layers` is {layers}, but the weights are {found} tensors; these files belong to different models"
            );
            return Err(Error::file(config_path, reason));
        }
        self.check(&config.shapes())
    }

    /// Returns the dtype that all tensors share; that of the quantized ones if there are any.
    pub(super) fn kind(&self) -> Result<Kind> {
        if let Some(gguf) = &self.gguf {
            return Ok(gguf.kind());
        }
        if let Some(first) = self.quantized.values().next() {
            if self.quantized.values().all(|other| other.scales == first.scales) {
                return Ok(first.scales.kind());
            }
            let reason = "some weights in NF4 have nested scales and some have not; quantize the model again";
            return Err(Error::file(&self.path, reason));
        }
        let mut kinds: BTreeMap<String, (Kind, usize)> = BTreeMap::new();
        for (number, index) in self.locations.iter().filter(|(name, _)| !is_kept_wide(name)).map(|(_, at)| at)
        {
            let kind = self.files[*number].entries()[*index].kind;
            kinds.entry(dtype_name(kind)).or_insert((kind, 0)).1 += 1;
        }
        match &kinds.values().collect::<Vec<_>>()[..] {
            [(kind, _)] => Ok(*kind),
            _ => {
                let list: Vec<_> =
                    kinds.iter().map(|(name, (_, number))| format!("{number} in {name}")).collect();
                let reason = format!(
                    "the tensors have several dtypes ({}); choose one as the model's dtype",
                    list.join(", ")
                );
                Err(Error::file(&self.path, reason))
            }
        }
    }

    /// Returns the location of a tensor's values, by the model's name; `None` for one in NF4, whose parts are several tensors.
    pub(super) fn location(&self, name: &str) -> Option<TensorLocation> {
        if self.quantized.contains_key(name) {
            return None;
        }
        let (file, entry) = self.entry(*self.locations.get(name)?);
        entry.is_dense().then(|| file.location(entry))
    }

    /// Whether every tensor's values are in a file one after the other.
    pub(super) fn have_locations(&self) -> bool {
        self.gguf.is_none() && self.locations.keys().all(|name| self.location(name).is_some())
    }

    /// Copies all tensors into a model, after checking that all match.
    pub(crate) fn copy_into(&self, model: &Llama) -> Result<()> {
        self.copy_some(model, &|_| true)
    }

    /// Copies the wanted tensors, after checking that the whole model matches.
    pub(super) fn copy_some(&self, model: &Llama, is_wanted: &dyn Fn(&str) -> bool) -> Result<()> {
        let targets = tensors(model);
        let shape = |tensor: &Tensor| match quantized::matrix_shape(tensor) {
            Some(shape) => shape.to_vec(),
            None => tensor.size(),
        };
        let shapes: Vec<_> = targets.iter().map(|named| (named.name.clone(), shape(named.tensor))).collect();
        self.check(&shapes)?;
        for named in targets.into_iter().filter(|named| is_wanted(&named.name)) {
            let _ = self.copy_one(&named.name, named.tensor)?;
        }
        Ok(())
    }

    /// Copies one tensor, by the model's name, quantizing or dequantizing it if the target and the files differ in that; returns whether
    /// there is one of that name.
    pub(super) fn copy_one(&self, name: &str, target: &Tensor) -> Result<bool> {
        let Some(shape) = self.stored_shape(name) else { return Ok(false) };
        if let Some(rows) = self.more_rows(name, &shape) {
            // The head, which bitsandbytes may have quantized, is dense here as the embedding is.
            let _no_grad = tch::no_grad_guard();
            let [stored, further] = [(0, shape[0]), (shape[0], rows - shape[0])]
                .map(|(start, count)| target.f_detach()?.f_narrow(0, start, count));
            let (stored, further) = (stored?, further?);
            let is_copied = self.copy_stored(name, &stored, &shape)?;
            further.shallow_clone().f_copy_(&mean_row(&stored, shape[0])?)?;
            return Ok(is_copied);
        }
        self.copy_stored(name, target, &shape)
    }

    /// Returns the rows of a matrix that has more than the files' `shape`.
    fn more_rows(&self, name: &str, shape: &[i64]) -> Option<i64> {
        let more = self.vocabulary.filter(|rows| shape.first().is_some_and(|stored| rows > stored));
        more.filter(|_| [EMBEDDING, LM_HEAD].contains(&name))
    }

    /// [`Weights::copy_one`] of a tensor in the files' `shape`.
    fn copy_stored(&self, name: &str, target: &Tensor, shape: &[i64]) -> Result<bool> {
        let values = match (self.quantized.get(name), nf4::is_nf4(target)) {
            (None, false) => return self.copy_values(name, target).map(|()| true),
            (Some(quantized), true) => self.packed(name, quantized)?,
            (Some(quantized), false) => quantized::dequantize(&self.packed(name, quantized)?, target.kind())?,
            (None, true) => {
                // From the values that a model in bf16 has.
                let dense = Tensor::f_empty(shape, (Kind::BFloat16, Device::Cpu))?;
                self.copy_values(name, &dense)?;
                nf4::quantize(&dense, Scales::of(target.kind()).unwrap_or(Scales::Nested))?
            }
        };
        if (values.kind(), values.size()) != (target.kind(), target.size()) {
            let (shape, expected) = (values.size(), target.size());
            return Err(Error::file(
                &self.path,
                format!(
                    "`{name}` is {:?} {shape:?}; expected {:?} {expected:?}",
                    values.kind(),
                    target.kind()
                ),
            ));
        }
        let _no_grad = tch::no_grad_guard();
        target.shallow_clone().f_copy_(&values)?;
        Ok(true)
    }

    /// Copies values that are not in NF4 into a tensor.
    fn copy_values(&self, name: &str, target: &Tensor) -> Result<()> {
        match (&self.gguf, self.locations.get(name)) {
            (Some(gguf), _) => gguf.copy(name, target),
            (None, Some(location)) => {
                let (file, entry) = self.entry(*location);
                file.copy(entry, target)
            }
            (None, None) => Err(Error::file(&self.path, format!("`{name}` is missing"))),
        }
    }

    /// The shape of a tensor in the model; `None` for a name that the files do not contain.
    fn shape(&self, name: &str) -> Option<Vec<i64>> {
        let mut shape = self.stored_shape(name)?;
        if let Some(rows) = self.more_rows(name, &shape) {
            shape[0] = rows;
        }
        Some(shape)
    }

    /// The shape of a tensor's values in the files.
    fn stored_shape(&self, name: &str) -> Option<Vec<i64>> {
        match (&self.gguf, self.quantized.get(name)) {
            (Some(gguf), _) => gguf.shape(name),
            (None, Some(quantized)) => Some(quantized.shape.to_vec()),
            (None, None) => Some(self.entry(*self.locations.get(name)?).1.shape.clone()),
        }
    }

    fn check(&self, targets: &[(String, Vec<i64>)]) -> Result<()> {
        let names: Vec<&str> = match &self.gguf {
            Some(gguf) => gguf.names().collect(),
            None => self.locations.keys().map(String::as_str).collect(),
        };
        let given = names.into_iter().map(|name| (name, self.shape(name).unwrap_or_default())).collect();
        check_fit(targets, &given, &self.path.display().to_string())
    }

    fn entry(&self, (file, index): (usize, usize)) -> (&TensorsFile, &Entry) {
        (&self.files[file], &self.files[file].entries()[index])
    }
}

/// Returns the model's name of a file's tensor. `None` for parts that are not read, and for rotary frequencies, which older files store for
/// each layer and the configuration defines.
fn model_name(name: &str) -> Option<&str> {
    if name.ends_with("rotary_emb.inv_freq") || part_not_read(name).is_some() {
        return None;
    }
    let name = name.strip_prefix(PREFIX).unwrap_or(name);
    Some(name.strip_prefix("language_model.").unwrap_or(name))
}

fn is_floating(kind: Kind) -> bool {
    matches!(kind, Kind::Float | Kind::BFloat16 | Kind::Half | Kind::Double)
}

/// The error of a model in [`blocks::KIND`] whose folder is not over a GGUF file.
pub(super) fn no_blocks() -> Error {
    let reason = "the blocks of a GGUF file, and the model is a folder of safetensors; give the GGUF file, or another dtype";
    Error::invalid("hugging_face", reason)
}

/// Refuses dtypes that models do not have.
pub(super) fn check_kind(kind: Kind) -> Result<()> {
    if is_floating(kind) || Scales::of(kind).is_some() {
        return Ok(());
    }
    if kind == blocks::KIND {
        return Err(no_blocks());
    }
    let reason =
        format!("a model in {}; expected float32, bfloat16, float16, float64 or NF4", dtype_name(kind));
    Err(Error::invalid("hugging_face", reason))
}
