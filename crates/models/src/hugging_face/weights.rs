//! Tensors of one file or of several, under the model's own names.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use runtime::atomic_write;
use tch::Kind;

use super::index::Index;
use super::{INDEX, SINGLE, contents};
use crate::error::{Error, Result};
use crate::llama::{Llama, LlamaConfig, PREFIX, TIED};
use crate::module::tensors;
use crate::state_dict::check_fit;
use crate::tensors_file::{Entry, Stored, TensorsFile, file_error};

/// Files of weights, mapped, with what they hold.
#[derive(Debug)]
pub(crate) struct Weights {
    /// What was opened: a file or a folder.
    path: PathBuf,
    files: Vec<TensorsFile>,
    /// By the model's name of a tensor: its file, and its place among that file's entries.
    places: BTreeMap<String, (usize, usize)>,
}

impl Weights {
    /// Opens one file, or what a folder has: `model.safetensors`, or else shards with their index.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        if !path.is_dir() {
            return Self::collect(path, vec![TensorsFile::open(path)?]);
        }
        atomic_write::read(path, || Self::open_folder(path))
    }

    fn open_folder(path: &Path) -> Result<Self> {
        if path.join(SINGLE).is_file() {
            return Self::collect(path, vec![TensorsFile::open(&path.join(SINGLE))?]);
        }
        let index_path = path.join(INDEX);
        if !index_path.is_file() {
            let reason = format!("neither {SINGLE} nor {INDEX} is there; {}", contents(path));
            return Err(file_error(path, reason));
        }
        let index = Index::read(&index_path, path)?;
        let names = index.shards();
        let files: Vec<TensorsFile> =
            names.iter().map(|name| TensorsFile::open(&path.join(name))).collect::<Result<_>>()?;
        let numbers: BTreeMap<&str, usize> = names.into_iter().zip(0..).collect();
        let weights = Self::collect(path, files)?;
        for (tensor, shard) in index.places() {
            let place = model_name(tensor).and_then(|name| weights.places.get(name));
            if model_name(tensor).is_some() && place.map(|place| place.0) != numbers.get(shard).copied() {
                let reason = format!("`{tensor}` should be in {shard}, which does not have it");
                return Err(file_error(&index_path, format!("{reason}; copy or download both again")));
            }
        }
        Ok(weights)
    }

    fn collect(path: &Path, files: Vec<TensorsFile>) -> Result<Self> {
        let mut places: BTreeMap<String, (usize, usize)> = BTreeMap::new();
        for (number, file) in files.iter().enumerate() {
            for (place, entry) in file.entries().iter().enumerate() {
                let Some(name) = model_name(&entry.name) else { continue };
                if !is_floating(entry.kind) {
                    let reason = format!(
                        "`{}` is {:?}; expected a floating dtype (quantised weights are not computed here)",
                        entry.name, entry.kind
                    );
                    return Err(file_error(file.path(), reason));
                }
                if let Some(&(other, at)) = places.get(name) {
                    let (file_of_other, other) = (files[other].path(), &files[other].entries()[at].name);
                    let reason = format!(
                        "`{}` is there twice: it is `{other}` of {} too",
                        entry.name,
                        file_of_other.display()
                    );
                    return Err(file_error(file.path(), reason));
                }
                places.insert(name.to_owned(), (number, place));
            }
        }
        Ok(Self { path: path.to_owned(), files, places })
    }

    /// Compares names and shapes with those that a configuration asks for.
    pub(super) fn check_against(&self, config: &LlamaConfig, config_path: &Path) -> Result<()> {
        // A layer has several tensors, so this bounds the list of those that are expected.
        if usize::try_from(config.num_hidden_layers).is_ok_and(|layers| layers > self.places.len()) {
            let (layers, found) = (config.num_hidden_layers, self.places.len());
            let reason = format!(
                "`num_hidden_layers` is {layers}, but the weights are {found} tensors; the files do not belong together"
            );
            return Err(file_error(config_path, reason));
        }
        self.check(&config.shapes(), config.tie_word_embeddings)
    }

    /// The one dtype of all tensors.
    pub(super) fn kind(&self) -> Result<Kind> {
        let mut kinds: BTreeMap<String, (Kind, usize)> = BTreeMap::new();
        for (number, place) in self.places.values() {
            let kind = self.files[*number].entries()[*place].kind;
            kinds.entry(format!("{kind:?}")).or_insert((kind, 0)).1 += 1;
        }
        match &kinds.values().collect::<Vec<_>>()[..] {
            [(kind, _)] => Ok(*kind),
            _ => {
                let list: Vec<_> =
                    kinds.iter().map(|(name, (_, number))| format!("{number} in {name}")).collect();
                let reason =
                    format!("the tensors have several dtypes ({}); say which one is wanted", list.join(", "));
                Err(file_error(&self.path, reason))
            }
        }
    }

    /// Where a tensor's values lie, by the model's name of it.
    pub(super) fn stored(&self, name: &str) -> Option<Stored> {
        let (file, entry) = self.entry(*self.places.get(name)?);
        Some(file.stored(entry))
    }

    /// Copies everything into a model's tensors, once all of it fits.
    pub(crate) fn copy_into(&self, model: &Llama) -> Result<()> {
        self.copy_some(model, &|_| true)
    }

    /// Copies the tensors whose names are wanted, once all of the model fits.
    pub(super) fn copy_some(&self, model: &Llama, is_wanted: &dyn Fn(&str) -> bool) -> Result<()> {
        let wanted = tensors(model);
        let shapes: Vec<_> = wanted.iter().map(|named| (named.name.clone(), named.tensor.size())).collect();
        self.check(&shapes, model.llama_config().tie_word_embeddings)?;
        for named in wanted.into_iter().filter(|named| is_wanted(&named.name)) {
            let (file, entry) = self.entry(self.places[&named.name]);
            file.copy(entry, named.tensor)?;
        }
        Ok(())
    }

    /// A tied head is the embedding: one that the files repeat is left out.
    fn check(&self, wanted: &[(String, Vec<i64>)], tied: bool) -> Result<()> {
        let given = self.places.iter().filter(|(name, _)| !(tied && *name == TIED));
        let given = given.map(|(name, place)| (&**name, self.entry(*place).1.shape.clone())).collect();
        check_fit(wanted, &given, &self.path.display().to_string())
    }

    fn entry(&self, (file, place): (usize, usize)) -> (&TensorsFile, &Entry) {
        (&self.files[file], &self.files[file].entries()[place])
    }
}

/// The model's name of a file's tensor. `None` for the frequencies of the rotary embedding, which older files keep for each layer
/// and the configuration says.
fn model_name(name: &str) -> Option<&str> {
    (!name.ends_with("rotary_emb.inv_freq")).then(|| name.strip_prefix(PREFIX).unwrap_or(name))
}

fn is_floating(kind: Kind) -> bool {
    matches!(kind, Kind::Float | Kind::BFloat16 | Kind::Half | Kind::Double)
}

/// Refuses dtypes that no model computes in.
pub(super) fn check_kind(kind: Kind) -> Result<()> {
    if is_floating(kind) {
        return Ok(());
    }
    let reason = format!("a model in {kind:?}; expected Float, BFloat16, Half or Double");
    Err(Error::Config { what: "hugging_face", reason })
}
