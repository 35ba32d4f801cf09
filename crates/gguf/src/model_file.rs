//! A GGUF file read as if it were a model's folder in Hugging Face's layout: the inverse of [`Model::convert`](crate::Model::convert).
//!
//! Names, shapes and the order of rows follow from the table that the writer uses (`model::names`): for each tensor that the
//! configuration asks for, the table gives the tensor of the file. Nothing is copied when a file is opened: it is mapped, and rows are
//! decoded as they are asked for.

mod config;
mod gemma4;
mod metadata;
mod rope;
mod splits;
mod tied;
mod tokenizer;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;

use decoder::{DecoderConfig, LM_HEAD};
use serde_json::{Map, Value as Json};

use crate::conversion::Rows;
use crate::error::{Result, file_error, unsupported};
use crate::model::{Family, TensorName, gguf_name, stored_shape};
use crate::reader::Reader;
use crate::tensor_type::TensorType;
use crate::value::Value;
use crate::writer::TensorInfo;
use config::Tensors;
use metadata::Metadata;
use tied::Place;

/// Tensors that a configuration has instead, or that no computation needs.
const WITHOUT_NAME: [&str; 3] =
    ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];
const EMBEDDING: &str = "token_embd.weight";
const HEAD: &str = "output.weight";
/// Hugging Face's prefix of a decoder's tensors.
const PREFIX: &str = "model.";

/// How a file is read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReadOptions {
    /// Keep an output head that is the embedding again, in another type, as a matrix of its own.
    pub untied: bool,
}

/// A tensor of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct FileTensor {
    /// Hugging Face's name, such as `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// The shape, `[rows, columns]` or `[elements]`.
    pub shape: Vec<u64>,
    /// How its values are stored.
    pub kind: TensorType,
    place: Place,
    rows: Rows,
    /// Rows of the file's tensor before its own: those of the experts before.
    skipped: u64,
}

impl FileTensor {
    /// Returns whether rows of Hugging Face are rows of the file: not for a vector, for a tensor whose values change, as a Gemma's norms, and
    /// for one whose columns have another order, as the output of linear attention.
    pub fn has_blocks(&self) -> bool {
        self.shape.len() == 2 && self.rows.keeps_rows()
    }
}

/// An open file, or all files of a model that is split, as a model of Hugging Face.
///
/// ```no_run
/// use std::path::Path;
///
/// use gguf::{ModelFile, ReadOptions};
///
/// let model = ModelFile::open(Path::new("qwen.gguf"), ReadOptions::default())?;
/// assert_eq!(model.config()["model_type"], "qwen2");
/// let tensor = model.tensor("model.embed_tokens.weight").unwrap();
/// let mut first = Vec::new();
/// model.rows(tensor, 0..1, &mut first)?;
/// assert_eq!(first.len() as u64, tensor.shape[1]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ModelFile {
    files: Vec<Reader>,
    config: Map<String, Json>,
    tensors: Vec<FileTensor>,
    /// The index of each tensor by its name.
    numbers: HashMap<String, usize>,
    notes: Vec<String>,
}

impl ModelFile {
    /// Opens a file: reads its header, and compares its tensors with those that its configuration asks for.
    ///
    /// # Errors
    /// A truncated or invalid file; an unknown architecture; a missing key or tensor, tensors of another shape, and tensors that the family
    /// does not have, by name; a file of something else than a language model.
    pub fn open(path: &Path, options: ReadOptions) -> Result<Self> {
        let files = splits::open(path)?;
        let Some(first) = files.first() else { return Err(file_error(path, "it has no tensors")) };
        let metadata = Metadata::new(first)?;
        let Some(family) = Family::from_architecture(metadata.architecture) else {
            return Err(unsupported(
                format!("the architecture of {}", path.display()),
                format!("`{}`", metadata.architecture),
                format!("those that can be read are {}", Family::architectures().join(", ")),
            ));
        };
        let contents = Contents::new(&files);
        let mut notes = Vec::new();
        let mut head = contents.places.get(HEAD).copied();
        let mut shared = None;
        if let (Some(head_place), Some(embedding), false) =
            (head, contents.places.get(EMBEDDING), options.untied)
            && let Some(finer) = tied::finer(&files, *embedding, head_place)?
        {
            notes.push(contents.tied_note(*embedding, head_place, finer));
            (head, shared) = (None, Some(finer));
        }
        let config = config::config(&metadata, family, &contents, head.is_none())?;
        let decoder: DecoderConfig = serde_json::from_value(Json::Object(config.clone()))
            .map_err(|cause| file_error(path, format!("its metadata: {cause}")))?;
        let tensors = contents.tensors(path, family, &decoder, shared)?;
        let numbers = tensors.iter().map(|tensor| tensor.name.clone()).zip(0..).collect();
        Ok(Self { files, config, tensors, numbers, notes })
    }

    /// Returns the path of the file that was opened, or of the first one of a model that is split.
    pub fn path(&self) -> &Path {
        self.files[0].path()
    }

    /// Returns the paths of all files.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(Reader::path)
    }

    /// Returns the metadata's value of a key, such as `general.architecture`.
    pub fn metadata(&self, key: &str) -> Option<&Value> {
        self.files[0].header().get(key)
    }

    /// Returns the tensors as the files have them, also those that the model has no tensor for.
    pub fn stored(&self) -> impl Iterator<Item = &TensorInfo> {
        self.files.iter().flat_map(|file| &file.header().tensors)
    }

    /// Returns the fields of a `config.json`.
    pub fn config(&self) -> &Map<String, Json> {
        &self.config
    }

    /// Returns the tensors, in the order of a state dict.
    pub fn tensors(&self) -> &[FileTensor] {
        &self.tensors
    }

    /// Returns a tensor by Hugging Face's name.
    pub fn tensor(&self, name: &str) -> Option<&FileTensor> {
        self.numbers.get(name).map(|number| &self.tensors[*number])
    }

    /// Returns what the user should know.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the other files of a model's folder by name, with their texts: `tokenizer.json`, `tokenizer_config.json`,
    /// `generation_config.json`, and `chat_template.jinja` if the file has a template.
    ///
    /// # Errors
    /// A missing key; a tokenizer or a pre-tokenizer that is not known, by name.
    pub fn companion_files(&self) -> Result<Vec<(&'static str, String)>> {
        tokenizer::files(&Metadata::new(&self.files[0])?)
    }

    /// Decodes rows of a tensor in Hugging Face's order, a vector being one row, and appends the values.
    ///
    /// # Errors
    /// Rows that the tensor does not have.
    pub fn rows(&self, tensor: &FileTensor, rows: Range<u64>, values: &mut Vec<f32>) -> Result<()> {
        self.check_rows(tensor, &rows)?;
        let (file, start) = (&self.files[tensor.place.file], values.len());
        let order = &tensor.rows;
        let rows = rows.start + tensor.skipped..rows.end + tensor.skipped;
        match (order.is_reordered(), &tensor.shape[..]) {
            (false, _) => tensor.kind.decode(file.raw(tensor.place.position, rows)?, values),
            (true, [_]) => {
                let stored = file.rows(tensor.place.position, rows)?;
                values.extend((0..stored.len() as u64).map(|at| stored[order.stored(at) as usize]));
            }
            (true, _) => {
                for row in rows {
                    let row = order.stored(row);
                    tensor.kind.decode(file.raw(tensor.place.position, row..row + 1)?, values);
                }
            }
        }
        if let (Some(heads), Some(columns)) = (order.value_columns, tensor.shape.last()) {
            heads.reorder_columns(&mut values[start..], *columns as usize, true);
        }
        if order.is_decay || order.add != 0.0 || order.scale != 1.0 {
            values[start..].iter_mut().for_each(|value| *value = order.undo(*value));
        }
        Ok(())
    }

    /// Returns the blocks of a matrix's rows as the file has them, rows in Hugging Face's order; `None` where a tensor
    /// [has none](FileTensor::has_blocks).
    ///
    /// # Errors
    /// As [`ModelFile::rows`].
    pub fn blocks(&self, tensor: &FileTensor, rows: Range<u64>) -> Result<Option<Cow<'_, [u8]>>> {
        if !tensor.has_blocks() {
            return Ok(None);
        }
        self.check_rows(tensor, &rows)?;
        let (file, position) = (&self.files[tensor.place.file], tensor.place.position);
        let rows = rows.start + tensor.skipped..rows.end + tensor.skipped;
        if !tensor.rows.is_reordered() {
            return file.raw(position, rows).map(|bytes| Some(bytes.into()));
        }
        let mut blocks = Vec::new();
        for row in rows {
            let row = tensor.rows.stored(row);
            blocks.extend_from_slice(file.raw(position, row..row + 1)?);
        }
        Ok(Some(blocks.into()))
    }

    /// Refuses rows that a tensor does not have, since another order would take others for them.
    fn check_rows(&self, tensor: &FileTensor, rows: &Range<u64>) -> Result<()> {
        let count = if tensor.shape.len() == 1 { 1 } else { tensor.shape[0] };
        if rows.start <= rows.end && rows.end <= count {
            return Ok(());
        }
        Err(file_error(self.path(), format!("no rows {rows:?} in `{}`, which has {count}", tensor.name)))
    }

    /// Releases the memory of a tensor's pages.
    ///
    /// # Errors
    /// A system that refuses.
    pub fn forget(&self, tensor: &FileTensor) -> Result<()> {
        self.files[tensor.place.file].forget(tensor.place.position)
    }
}

/// Whether a tensor of a file is used, by its name there: not the keys and values of a layer that attends to those of another.
fn uses_stored(decoder: &DecoderConfig, name: &str) -> bool {
    let of_layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    let Some((layer, part)) = of_layer else { return true };
    let of_keys = ["attn_k.", "attn_v.", "attn_k_norm."].iter().any(|start| part.starts_with(start));
    !(of_keys && layer.parse().is_ok_and(|layer: usize| decoder.key_layer(layer) != layer))
}

/// The tensors of all files by name.
struct Contents<'a> {
    files: &'a [Reader],
    places: BTreeMap<&'a str, Place>,
}

impl<'a> Contents<'a> {
    fn new(files: &'a [Reader]) -> Self {
        let of_file = |(file, reader): (usize, &'a Reader)| {
            let tensors = reader.header().tensors.iter().enumerate();
            tensors.map(move |(position, tensor)| (&*tensor.name, Place { file, position }))
        };
        Self { files, places: files.iter().enumerate().flat_map(of_file).collect() }
    }

    fn info(&self, place: Place) -> &'a TensorInfo {
        &self.files[place.file].header().tensors[place.position]
    }

    fn tied_note(&self, embedding: Place, head: Place, finer: Place) -> String {
        let [first, second] = [embedding, head].map(|place| self.info(place));
        let numbers: u64 = first.shape.iter().product();
        format!(
            "{} holds one matrix twice, as {EMBEDDING} ({}) and as {HEAD} ({}), equal within the error of their types: the head is tied to the \
             embedding, with the values of {}, and the model has {numbers} parameters less (--untied keeps both)",
            self.files[0].path().display(),
            first.kind,
            second.kind,
            self.info(finer).name
        )
    }

    /// The tensors that a configuration asks for; those of the embedding are at `shared`, if there.
    fn tensors(
        &self,
        path: &Path,
        family: &Family,
        decoder: &DecoderConfig,
        shared: Option<Place>,
    ) -> Result<Vec<FileTensor>> {
        let sizes = decoder.sizes();
        let mut unknown = self.places.clone();
        let (mut tensors, mut missing) = (Vec::new(), Vec::new());
        for (name, shape) in decoder.shapes() {
            let name = if name == LM_HEAD { name } else { format!("{PREFIX}{name}") };
            let Some(TensorName { name: stored, transform, expert }) = gguf_name(family, &sizes, &name)
            else {
                missing.push(name);
                continue;
            };
            unknown.remove(&*stored);
            let place = shared.filter(|_| stored == EMBEDDING).or(self.places.get(&*stored).copied());
            let Some(place) = place else {
                missing.push(stored);
                continue;
            };
            let info = self.info(place);
            let expected: Vec<u64> = shape.iter().map(|size| size.unsigned_abs()).collect();
            let mut in_file = stored_shape(&stored, &expected);
            let rows = if in_file.len() == 1 { 1 } else { in_file[0] };
            if let (Some(_), Some(experts)) = (expert, sizes.experts) {
                in_file.insert(0, experts.count);
            }
            if info.shape != in_file {
                let reason = format!(
                    "`{stored}` has the shape {:?}; its metadata give {in_file:?}: get the file again",
                    info.shape
                );
                return Err(file_error(path, reason));
            }
            let skipped = expert.unwrap_or(0) * rows;
            tensors.push(FileTensor {
                name,
                shape: expected,
                kind: info.kind,
                place,
                rows: transform,
                skipped,
            });
        }
        if let [first, ..] = missing.as_slice() {
            let reason =
                format!("{} tensors are missing, such as `{first}`; get the file again", missing.len());
            return Err(file_error(path, reason));
        }
        let is_used = |name: &str| uses_stored(decoder, name);
        unknown.retain(|name, _| {
            !WITHOUT_NAME.contains(name)
                && is_used(name)
                && !name.ends_with("attn_rot_embd.weight")
                && (shared.is_none() || *name != HEAD)
        });
        match unknown.keys().next() {
            None => Ok(tensors),
            Some(first) => Err(unsupported(
                format!("a tensor of {}", path.display()),
                format!("`{first}`"),
                format!(
                    "a `{}` has none of this name ({} such tensors), so the model would compute something else",
                    family.model_type,
                    unknown.len()
                ),
            )),
        }
    }
}

impl Tensors for Contents<'_> {
    fn count(&self) -> u64 {
        self.places.len() as u64
    }

    fn shape(&self, name: &str) -> Option<&[u64]> {
        self.places.get(name).map(|place| &*self.info(*place).shape)
    }

    fn vector(&self, name: &str) -> Result<Option<Vec<f32>>> {
        let Some(place) = self.places.get(name) else { return Ok(None) };
        self.files[place.file].rows(place.position, 0..1).map(Some)
    }
}
