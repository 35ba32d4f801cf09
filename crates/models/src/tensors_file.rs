//! Named tensors in a safetensors file.
//!
//! A file is written with [`atomic_write`], so a reader sees either the old file or the new one. Its values are brought and written
//! piece by piece ([`Content`]), from memory, a device or other processes. It is read through a memory map: each tensor's bytes are
//! copied once, from the file's pages into the tensor, or not at all ([`map`]).

mod content;
mod layout;

use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use files::atomic_write;
use files::mapped::MappedFile;
use safetensors::{Dtype, SafeTensors};
use serde::de::IgnoredAny;
use tch::{Device, Kind, Tensor};

pub use content::{Content, LazyTensor, PIECE_BYTES};
pub(crate) use layout::{Layout, MXFP4_BLOCK};

use crate::error::{Error, Result};
use crate::strict_json;

/// The name that the format reserves for metadata.
const METADATA: &str = "__metadata__";

/// Writes tensors from any device, contiguous or not, piece by piece: see [`Content`].
///
/// # Errors
/// As [`Content::write_to`].
pub fn write_to(out: &mut dyn Write, tensors: &[(String, Tensor)]) -> io::Result<()> {
    write_with(out, tensors, &[])
}

/// [`write_to`], with metadata in the header; Hugging Face's readers require `("format", "pt")`.
///
/// # Errors
/// As [`write_to`].
pub fn write_with(
    out: &mut dyn Write,
    tensors: &[(String, Tensor)],
    metadata: &[(&str, &str)],
) -> io::Result<()> {
    Content::new(LazyTensor::from_tensors(tensors), metadata).write_to(out)
}

/// Writes a file atomically.
///
/// # Errors
/// Errors of [`write_to`], with the path; a folder that does not exist or is full.
pub fn write(path: &Path, tensors: &[(String, Tensor)]) -> Result<()> {
    write_content(path, &mut Content::new(LazyTensor::from_tensors(tensors), &[]))
}

/// [`write()`] of content whose values other processes may have parts of.
///
/// # Errors
/// As [`write()`]; those of the values, as they are.
pub fn write_content(path: &Path, content: &mut Content<'_>) -> Result<()> {
    let written = atomic_write::file(path, |out| content.write_to(out));
    written.map_err(|cause| match cause.downcast::<runtime::Error>() {
        Ok(error) => error,
        Err(cause) => Error::file(path, format!("cannot be written: {cause}")),
    })
}

/// Reads all tensors of a file onto `device`, in the file's order.
///
/// # Errors
/// A missing, truncated or invalid file, with its path and what is wrong; a dtype that libtorch lacks.
pub fn read(path: &Path, device: Device) -> Result<Vec<(String, Tensor)>> {
    let mapped = MappedFile::open(path).map_err(|cause| Error::file(path, cause))?;
    read_all(&mapped, entries(&mapped, |reason| Error::file(path, reason))?, device)
}

/// Returns all tensors of a file, in its order, over the file's pages ([`runtime::file::tensor_over`]): what is not touched takes no
/// memory. The file must not be shortened while they live. Values that are not aligned to their elements are read instead.
///
/// # Errors
/// As [`read`].
pub fn map(path: &Path) -> Result<Vec<(String, Tensor)>> {
    let file = TensorsFile::open(path)?;
    let map = |entry: &Entry| {
        let Entry { ref name, kind, ref shape, ref range, .. } = *entry;
        let tensor = match range.start.is_multiple_of(kind.elt_size_in_bytes()) {
            true => runtime::file::tensor_over(path, range.start as u64, shape, kind)?,
            false => Tensor::f_from_data_size(&file.mapped[range.clone()], shape, kind)?,
        };
        Ok((name.clone(), tensor))
    };
    file.entries.iter().map(map).collect()
}

/// Reads tensors from the bytes of a file.
///
/// # Errors
/// Truncated or foreign bytes; a dtype that libtorch lacks.
pub fn from_bytes(bytes: &[u8], device: Device) -> Result<Vec<(String, Tensor)>> {
    read_all(bytes, entries(bytes, |reason| Error::invalid("safetensors", reason))?, device)
}

fn read_all(bytes: &[u8], entries: Vec<Entry>, device: Device) -> Result<Vec<(String, Tensor)>> {
    let read = |entry: Entry| {
        let tensor = match &bytes[entry.range.clone()] {
            [] => Tensor::f_zeros(&entry.shape, (entry.kind, device))?,
            values => Tensor::f_from_data_size(values, &entry.shape, entry.kind)?.f_to_device(device)?,
        };
        Ok((entry.name, tensor))
    };
    entries.into_iter().map(read).collect()
}

/// A tensor's entry in the header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The tensor's name.
    pub name: String,
    /// Its dtype.
    pub kind: Kind,
    /// Its shape.
    pub shape: Vec<i64>,
    /// The byte range of its values in the file.
    range: Range<usize>,
    /// How its values lie in them.
    layout: Layout,
}

/// Names and shapes of parts of a tensor, in the order of their values.
pub(crate) type NamedShapes = Vec<(String, Vec<i64>)>;

impl Entry {
    /// Returns a part of the entry's equal parts, in this layout; `None` if its bytes do not divide.
    pub(crate) fn part(
        &self,
        name: String,
        shape: Vec<i64>,
        part: (i64, i64),
        layout: Layout,
    ) -> Option<Self> {
        let kind = if matches!(layout, Layout::Mxfp4 { .. }) { layout::MXFP4_KIND } else { self.kind };
        Some(Self { name, kind, shape, range: self.bytes_of(part)?, layout })
    }

    /// Returns the byte range of one of so many equal parts.
    pub(crate) fn bytes_of(&self, (index, count): (i64, i64)) -> Option<Range<usize>> {
        let (index, count) = (usize::try_from(index).ok()?, usize::try_from(count).ok()?);
        let bytes = self.range.len().checked_div(count)?;
        let start = self.range.start + index * bytes;
        (self.range.len().is_multiple_of(count) && index < count).then(|| start..start + bytes)
    }

    /// Returns whether its values are one after the other.
    pub(crate) fn is_dense(&self) -> bool {
        self.layout == Layout::Dense
    }

    /// Returns the parts in place of the entry, or the entry if there are none that fit.
    fn divided(self, parts: &dyn Fn(&Self) -> Option<NamedShapes>) -> Vec<Self> {
        let Some(parts) = parts(&self) else { return vec![self] };
        let size = self.kind.elt_size_in_bytes();
        let bytes = |shape: &[i64]| {
            shape.iter().try_fold(size, |product, &length| product.checked_mul(usize::try_from(length).ok()?))
        };
        let (mut start, mut divided) = (self.range.start, Vec::new());
        for (name, shape) in parts {
            let end = bytes(&shape).and_then(|length| start.checked_add(length));
            let Some(end) = end.filter(|&end| end <= self.range.end) else { return vec![self] };
            divided.push(Self { name, kind: self.kind, shape, range: start..end, layout: Layout::Dense });
            start = end;
        }
        if start == self.range.end { divided } else { vec![self] }
    }
}

/// The location of a tensor's values in a file: contiguous, little-endian.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorLocation {
    /// The file.
    pub path: PathBuf,
    /// Offset of the values, in bytes from the start of the file.
    pub offset: u64,
    /// Their dtype.
    pub kind: Kind,
    /// The tensor's shape.
    pub shape: Vec<i64>,
}

/// An open file: its header is parsed; values are read on demand.
#[derive(Debug)]
pub struct TensorsFile {
    mapped: MappedFile,
    entries: Vec<Entry>,
}

impl TensorsFile {
    /// Reads the header and checks it against the file's length.
    ///
    /// # Errors
    /// As [`read`].
    pub fn open(path: &Path) -> Result<Self> {
        let mapped = MappedFile::open(path).map_err(|cause| Error::file(path, cause))?;
        let entries = entries(&mapped, |reason| Error::file(path, reason))?;
        Ok(Self { mapped, entries })
    }

    /// Returns the file's path.
    pub fn path(&self) -> &Path {
        self.mapped.path()
    }

    /// Returns the entries, in the order of their values.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Replaces entries by consecutive parts of their values: where `parts` returns names and shapes that together have the entry's
    /// elements.
    pub(crate) fn divide(&mut self, parts: &dyn Fn(&Entry) -> Option<NamedShapes>) {
        let entries = std::mem::take(&mut self.entries);
        self.entries = entries.into_iter().flat_map(|entry| entry.divided(parts)).collect();
    }

    /// Replaces all entries.
    pub(crate) fn replace(&mut self, replace: impl FnOnce(Vec<Entry>) -> Result<Vec<Entry>>) -> Result<()> {
        self.entries = replace(std::mem::take(&mut self.entries))?;
        Ok(())
    }

    /// Returns the location of an entry's values, which are in the order of its elements.
    pub fn location(&self, entry: &Entry) -> TensorLocation {
        let Entry { kind, ref shape, ref range, .. } = *entry;
        TensorLocation {
            path: self.path().to_owned(),
            offset: range.start as u64,
            kind,
            shape: shape.clone(),
        }
    }

    /// Returns the bytes of an entry's values.
    pub(crate) fn bytes(&self, entry: &Entry) -> &[u8] {
        self.mapped.get(entry.range.clone()).unwrap_or_default()
    }

    /// Releases the pages of an entry's values.
    pub(crate) fn forget(&self, entry: &Entry) -> Result<()> {
        let forgotten = self.mapped.forget(entry.range.clone());
        forgotten.map_err(|cause| Error::file(self.path(), cause))
    }

    /// Copies an entry's values into a tensor of its shape, of any dtype and device, and releases the file's pages.
    ///
    /// # Errors
    /// Another shape; those of libtorch.
    pub fn copy(&self, entry: &Entry, destination: &Tensor) -> Result<()> {
        let Some(values) = self.mapped.get(entry.range.clone()).filter(|_| entry.shape == destination.size())
        else {
            return Err(Error::file(
                self.path(),
                format!(
                    "`{}` is {:?}; expected {:?}, the shape of the destination",
                    entry.name,
                    entry.shape,
                    destination.size()
                ),
            ));
        };
        match &entry.layout {
            Layout::Dense => runtime::file::copy_values(values, entry.kind, destination)?,
            other => other.copy(values, &self.mapped, entry, destination)?,
        }
        self.forget(entry)
    }
}

/// Parses the header; every entry is within the file. `refuse` makes the error of a reason.
fn entries(bytes: &[u8], refuse: impl Fn(String) -> Error) -> Result<Vec<Entry>> {
    let (header, metadata) = SafeTensors::read_metadata(bytes).map_err(|cause| {
        refuse(format!("not a complete safetensors file ({cause}); copy or download it again"))
    })?;
    let start = 8 + header;
    // Of two tensors with one name the format's library keeps one.
    let text = std::str::from_utf8(&bytes[8..start]).unwrap_or_default();
    strict_json::from_str::<IgnoredAny>(text)
        .map_err(|cause| refuse(format!("its header: {cause}; write the file again")))?;
    let mut entries = Vec::new();
    for name in metadata.offset_keys() {
        let Some(info) = metadata.info(&name) else { continue };
        let Some(kind) = kind_of(info.dtype) else {
            return Err(refuse(format!("`{name}` is {:?}, which libtorch does not support", info.dtype)));
        };
        let range = start + info.data_offsets.0..start + info.data_offsets.1;
        if bytes.get(range.clone()).is_none() {
            return Err(refuse(format!(
                "`{name}` ends beyond the end of the file; copy or download it again"
            )));
        }
        let shape: Option<Vec<i64>> = info.shape.iter().map(|&size| i64::try_from(size).ok()).collect();
        let Some(shape) = shape else {
            return Err(refuse(format!(
                "`{name}` has the shape {:?}, which is not a valid tensor shape",
                info.shape
            )));
        };
        entries.push(Entry { name, kind, shape, range, layout: Layout::Dense });
    }
    Ok(entries)
}

const DTYPES: [(Kind, Dtype); 10] = [
    (Kind::Float, Dtype::F32),
    (Kind::BFloat16, Dtype::BF16),
    (Kind::Half, Dtype::F16),
    (Kind::Double, Dtype::F64),
    (Kind::Int64, Dtype::I64),
    (Kind::Int, Dtype::I32),
    (Kind::Int16, Dtype::I16),
    (Kind::Int8, Dtype::I8),
    (Kind::Uint8, Dtype::U8),
    (Kind::Bool, Dtype::BOOL),
];

/// Returns PyTorch's name of a dtype, such as `bfloat16`.
pub fn dtype_name(kind: Kind) -> String {
    match kind {
        Kind::Float => "float32".to_owned(),
        Kind::BFloat16 => "bfloat16".to_owned(),
        Kind::Half => "float16".to_owned(),
        Kind::Double => "float64".to_owned(),
        Kind::Int => "int32".to_owned(),
        other => format!("{other:?}").to_lowercase(),
    }
}

fn dtype_of(kind: Kind) -> Option<Dtype> {
    DTYPES.iter().find(|(known, _)| *known == kind).map(|(_, dtype)| *dtype)
}

fn kind_of(dtype: Dtype) -> Option<Kind> {
    DTYPES.iter().find(|(_, known)| *known == dtype).map(|(kind, _)| *kind)
}
