//! The tensors of a folder, read row by row: one `model.safetensors`, or shards with an index.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use half::{bf16, f16};
use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use crate::error::{Result, file_error, io_error};
use crate::experts;
use crate::folder;
use crate::json;
use crate::model_file::{FileTensor, ModelFile};

/// The most bytes of a header that the format's own library reads.
const MAX_HEADER: u64 = 100_000_000;

/// The dtypes that can be converted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dtype {
    F64,
    F32,
    F16,
    BF16,
    /// A tensor of a GGUF file.
    Gguf,
}

impl Dtype {
    fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "F64" => Self::F64,
            "F32" => Self::F32,
            "F16" => Self::F16,
            "BF16" => Self::BF16,
            _ => return None,
        })
    }

    fn bytes(self) -> u64 {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            // Its values are not read as bytes.
            Self::Gguf => 0,
        }
    }
}

/// A tensor of a file.
#[derive(Debug, Clone)]
pub(crate) struct Location {
    file: usize,
    dtype: Dtype,
    /// Offset of the values from the start of the file, in bytes.
    start: u64,
    /// The shape, outermost size first.
    pub(crate) shape: Vec<u64>,
    /// How its rows lie in the file, if not one after the other.
    pub(crate) turns: Option<Turns>,
}

/// Rows of a matrix that is stored transposed, `[columns, rows]` from the location's start on: those at `first`, `first + step`, …
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Turns {
    pub(crate) rows: u64,
    pub(crate) columns: u64,
    pub(crate) first: u64,
    pub(crate) step: u64,
}

impl Location {
    /// Returns the location of a part from an element on.
    pub(crate) fn part(&self, element: u64, shape: Vec<u64>, turns: Option<Turns>) -> Self {
        Self { start: self.start + element * self.dtype.bytes(), shape, turns, ..*self }
    }
}

/// Open files, and their tensors by name.
#[derive(Debug)]
pub(crate) struct Tensors {
    files: Vec<(PathBuf, File)>,
    tensors: BTreeMap<String, Location>,
    /// The file of a folder whose weights stay in GGUF; a location's `file` is the number of the tensor in it.
    model: Option<ModelFile>,
    /// The last matrix that was read from where it is transposed, with the number of its file and its start.
    transposed: Mutex<Option<Transposed>>,
}

type Transposed = ((usize, u64), Vec<f32>);

impl Tensors {
    /// Opens a model's folder.
    pub(crate) fn of_model(folder: &Path) -> Result<Self> {
        if let Some(model) = folder::open(folder)? {
            return Ok(Self::of_gguf(model));
        }
        let mut all = Self::of_files(folder)?;
        all.tensors = experts::divide(all.tensors);
        Ok(all)
    }

    fn of_files(folder: &Path) -> Result<Self> {
        let index = folder.join("model.safetensors.index.json");
        if !index.is_file() {
            return Self::of_file(&folder.join("model.safetensors"));
        }
        let fields = json::read(&index)?;
        let refuse = |reason: String| file_error(&index, reason);
        let Some(map) =
            fields.get("weight_map").and_then(|map| map.as_object()).filter(|map| !map.is_empty())
        else {
            return Err(refuse(
                "`weight_map` is missing or empty; expected the shard of every tensor".to_owned(),
            ));
        };
        let mut shards = BTreeMap::new();
        for (tensor, shard) in map {
            let Some(shard) =
                shard.as_str().filter(|name| Path::new(name).file_name().is_some_and(|file| file == *name))
            else {
                return Err(refuse(format!("the shard of `{tensor}` is {shard}; expected a file name")));
            };
            shards.entry(shard.to_owned()).or_insert_with(Vec::new).push(tensor);
        }
        let mut all = Self::new(Vec::new(), BTreeMap::new(), None);
        for (shard, names) in shards {
            let one = Self::of_file(&folder.join(&shard))?;
            if let Some(missing) = names.iter().find(|name| !one.tensors.contains_key(**name)) {
                return Err(refuse(format!("`{missing}` is not in {shard}; download the model again")));
            }
            let file = all.files.len();
            all.files.extend(one.files);
            all.tensors.extend(one.tensors.into_iter().map(|(name, at)| (name, Location { file, ..at })));
        }
        Ok(all)
    }

    /// Opens one file.
    pub(crate) fn of_file(path: &Path) -> Result<Self> {
        let mut file = File::open(path).map_err(|cause| io_error(path, cause))?;
        let length = file.metadata().map_err(|cause| io_error(path, cause))?.len();
        let incomplete = || file_error(path, "not a complete safetensors file; copy or download it again");
        let mut size = [0; 8];
        file.read_exact(&mut size).map_err(|_| incomplete())?;
        let header = u64::from_le_bytes(size);
        let start = header.checked_add(8).filter(|start| *start <= length && header <= MAX_HEADER);
        let start = start.ok_or_else(incomplete)?;
        let mut text = vec![0; header as usize];
        file.read_exact(&mut text).map_err(|cause| io_error(path, cause))?;
        let entries: Entries = serde_json::from_slice(&text)
            .map_err(|cause| file_error(path, format!("its header: {cause}; write the file again")))?;
        let mut tensors = BTreeMap::new();
        for (name, entry) in entries.0 {
            let Some(dtype) = Dtype::parse(&entry.dtype) else {
                // Such as positions; it is an error only if the model needs it.
                continue;
            };
            let [from, to] = entry.data_offsets;
            let numel = entry.shape.iter().try_fold(1u64, |all, size| all.checked_mul(*size));
            let bytes = numel.and_then(|numel| numel.checked_mul(dtype.bytes()));
            let end = start.checked_add(to).filter(|end| *end <= length);
            if end.is_none() || bytes != to.checked_sub(from) {
                return Err(file_error(
                    path,
                    format!(
                        "`{name}`, {:?} in {}, takes other bytes than {from}..{to} of the file",
                        entry.shape, entry.dtype
                    ),
                ));
            }
            tensors.insert(
                name,
                Location { file: 0, dtype, start: start + from, shape: entry.shape, turns: None },
            );
        }
        Ok(Self::new(vec![(path.to_owned(), file)], tensors, None))
    }

    fn new(
        files: Vec<(PathBuf, File)>,
        tensors: BTreeMap<String, Location>,
        model: Option<ModelFile>,
    ) -> Self {
        Self { files, tensors, model, transposed: Mutex::new(None) }
    }

    fn of_gguf(model: ModelFile) -> Self {
        let location = |(file, tensor): (usize, &FileTensor)| {
            let location =
                Location { file, dtype: Dtype::Gguf, start: 0, shape: tensor.shape.clone(), turns: None };
            (tensor.name.clone(), location)
        };
        let tensors = model.tensors().iter().enumerate().map(location).collect();
        Self::new(Vec::new(), tensors, Some(model))
    }

    /// The names of all tensors.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Location> {
        self.tensors.get(name)
    }

    /// Keeps the text model of one that also reads images, under its usual names, and returns the parts that are left out.
    pub(crate) fn keep_text_model(&mut self) -> Vec<&'static str> {
        let left_out = decoder::parts_not_read(self.names());
        self.tensors.retain(|name, _| decoder::part_not_read(name).is_none());
        let tensors = std::mem::take(&mut self.tensors).into_iter();
        let renamed = |name: String| match name.strip_prefix("model.language_model.") {
            Some(rest) => format!("model.{rest}"),
            None => name,
        };
        self.tensors = tensors.map(|(name, location)| (renamed(name), location)).collect();
        left_out
    }

    /// Gives a tensor another name, if there is one of the first.
    pub(crate) fn rename(&mut self, name: &str, new: &str) {
        if let Some(location) = self.tensors.remove(name) {
            self.tensors.insert(new.to_owned(), location);
        }
    }

    /// Leaves a tensor out.
    pub(crate) fn remove(&mut self, name: &str) {
        self.tensors.remove(name);
    }

    /// Whether a tensor is absent, or has the dtype, the shape and the bytes of another one.
    ///
    /// # Errors
    /// Errors of the files.
    pub(crate) fn is_copy(&self, name: &str, of: &str) -> Result<bool> {
        const PIECE: u64 = 1 << 20;
        let Some(copy) = self.get(name) else { return Ok(true) };
        let Some(other) = self.get(of).filter(|of| of.dtype == copy.dtype && of.shape == copy.shape) else {
            return Ok(false);
        };
        let elements: u64 = copy.shape.iter().product();
        for start in (0..elements).step_by(PIECE as usize) {
            let range = start..elements.min(start + PIECE);
            if self.bytes(copy, range.clone())? != self.bytes(other, range)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads a range of a tensor's values, in their order in memory.
    ///
    /// # Errors
    /// Errors of the file.
    pub(crate) fn values(&self, location: &Location, range: Range<u64>) -> Result<Vec<f32>> {
        if let Some(model) = &self.model {
            return values_of(model, &model.tensors()[location.file], range);
        }
        if let Some(turns) = location.turns {
            return self.by_turns(location, turns, range);
        }
        let bytes = self.bytes(location, range)?;
        Ok(match location.dtype {
            Dtype::F64 => bytes.as_chunks().0.iter().map(|x| f64::from_le_bytes(*x) as f32).collect(),
            Dtype::F32 => bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
            Dtype::F16 => bytes.as_chunks().0.iter().map(|x| f16::from_le_bytes(*x).to_f32()).collect(),
            Dtype::BF16 => bytes.as_chunks().0.iter().map(|x| bf16::from_le_bytes(*x).to_f32()).collect(),
            Dtype::Gguf => Vec::new(),
        })
    }

    /// The values of rows that lie in turns with others, in a matrix that is stored transposed, which is read once for consecutive calls.
    fn by_turns(&self, location: &Location, turns: Turns, range: Range<u64>) -> Result<Vec<f32>> {
        let Turns { rows, columns, first, step } = turns;
        let value = |stored: &[f32], at: u64| {
            let (row, column) = (at / columns, at % columns);
            stored.get((column * rows + first + step * row) as usize).copied().unwrap_or_default()
        };
        let mut values = Vec::new();
        self.transposed(location, turns, |stored| values.extend(range.map(|at| value(stored, at))))?;
        Ok(values)
    }

    /// Reads the whole matrix, `[columns, rows]`, where a location has some of its rows.
    ///
    /// # Errors
    /// Errors of the file.
    pub(crate) fn transposed(
        &self,
        location: &Location,
        turns: Turns,
        read: impl FnOnce(&[f32]),
    ) -> Result<()> {
        let mut last = self.transposed.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (location.file, location.start);
        let stored = match last.take().filter(|(known, _)| *known == key) {
            Some((_, stored)) => stored,
            None => {
                let whole = Location { turns: None, ..location.clone() };
                self.values(&whole, 0..turns.rows * turns.columns)?
            }
        };
        read(&stored);
        *last = Some((key, stored));
        Ok(())
    }

    fn bytes(&self, location: &Location, range: Range<u64>) -> Result<Vec<u8>> {
        let (path, file) = &self.files[location.file];
        let size = location.dtype.bytes();
        let mut bytes = vec![0; ((range.end - range.start) * size) as usize];
        let mut file = file;
        file.seek(SeekFrom::Start(location.start + range.start * size))
            .and_then(|_| file.read_exact(&mut bytes))
            .map_err(|cause| io_error(path, cause))?;
        Ok(bytes)
    }
}

/// A range of a tensor's values, from the rows that it touches.
fn values_of(model: &ModelFile, tensor: &FileTensor, range: Range<u64>) -> Result<Vec<f32>> {
    let columns = tensor.shape.last().copied().unwrap_or(1).max(1);
    let rows = range.start / columns..range.end.div_ceil(columns);
    let skipped = (range.start - rows.start * columns) as usize;
    let mut values = Vec::new();
    model.rows(tensor, rows, &mut values)?;
    values.truncate(skipped + (range.end - range.start) as usize);
    values.drain(..skipped);
    Ok(values)
}

#[derive(serde::Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The header without its metadata. Duplicate names are refused; a JSON reader would keep the last.
struct Entries(BTreeMap<String, Entry>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;

        impl<'de> Visitor<'de> for Collect {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from tensors to their dtype, shape and offsets")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    let twice = format!("`{name}` occurs twice");
                    if entries.insert(name, map.next_value()?).is_some() {
                        return Err(A::Error::custom(twice));
                    }
                }
                Ok(Entries(entries))
            }
        }

        deserializer.deserialize_map(Collect)
    }
}
