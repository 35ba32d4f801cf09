//! Reading a GGUF file, which is memory-mapped. It may be truncated, damaged or hostile: every count is compared with what is left of the
//! file before memory is taken for it, so that the heap stays proportional to the header.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::ops::Range;
use std::path::Path;

use files::mapped::MappedFile;

use crate::error::{Error, Result, file_error, io_error};
use crate::tensor_type::{TensorType, unreadable_type};
use crate::value::{ARRAY, Array, Value};
use crate::writer::{ALIGNMENT, Header, MAGIC, MAX_DIMENSIONS, TensorInfo, VERSION};

/// An open file: its header is read, values are read on demand.
#[derive(Debug)]
pub struct Reader {
    mapped: MappedFile,
    header: Header,
    /// Where each tensor's values start, in bytes from the start of the file.
    starts: Vec<u64>,
}

impl Reader {
    /// Reads the header and checks that all values are in the file.
    ///
    /// # Errors
    /// A missing, truncated or invalid file; a version other than 2 and 3, which differ only in that 3 may be big-endian; a big-endian
    /// file; a type of tensor that this crate does not read; overlapping tensors.
    pub fn open(path: &Path) -> Result<Self> {
        let mapped = MappedFile::open(path).map_err(|cause| io_error(path, cause))?;
        let length = mapped.len() as u64;
        let mut source = Source { input: &mapped[..], left: length };
        let parsed = source.header().and_then(|parsed| {
            let start = (length - source.left).next_multiple_of(alignment(&parsed.header)?);
            let starts = starts(&parsed, start, length)?;
            Ok((parsed.header, starts))
        });
        let (header, starts) = parsed.map_err(|fault| match fault {
            Fault::Io(cause) if cause.kind() == io::ErrorKind::UnexpectedEof => truncated(path),
            Fault::Io(cause) => io_error(path, cause),
            Fault::Truncated => truncated(path),
            Fault::Invalid(reason) => file_error(path, reason),
        })?;
        Ok(Self { mapped, header, starts })
    }

    /// Returns the metadata and the tensors.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Returns the file's path.
    pub fn path(&self) -> &Path {
        self.mapped.path()
    }

    /// Returns the index of a tensor among [`Header::tensors`].
    pub fn position(&self, name: &str) -> Option<usize> {
        self.header.tensors.iter().position(|tensor| tensor.name == name)
    }

    /// Returns the bytes of a tensor's rows as they are in the file, a vector being one row.
    ///
    /// # Errors
    /// Rows that the tensor does not have.
    pub fn raw(&self, position: usize, rows: Range<u64>) -> Result<&[u8]> {
        let refuse = || file_error(self.path(), format!("no rows {rows:?} in tensor {position}"));
        let info = self.header.tensors.get(position).ok_or_else(refuse)?;
        let (all, columns) = info.rows_and_columns().ok_or_else(refuse)?;
        let row = info.kind.row_bytes(columns).ok_or_else(refuse)?;
        if rows.start > rows.end || rows.end > all {
            return Err(refuse());
        }
        let start = self.starts[position];
        let bytes = (start + rows.start * row) as usize..(start + rows.end * row) as usize;
        self.mapped.get(bytes).ok_or_else(refuse)
    }

    /// Reads rows of a tensor, a vector being one row, and decodes them to fp32.
    ///
    /// # Errors
    /// As [`Reader::raw`].
    pub fn rows(&self, position: usize, rows: Range<u64>) -> Result<Vec<f32>> {
        let bytes = self.raw(position, rows.clone())?;
        let info = &self.header.tensors[position];
        let columns = info.rows_and_columns().map_or(0, |(_, columns)| columns);
        let mut values = Vec::with_capacity(((rows.end - rows.start) * columns) as usize);
        info.kind.decode(bytes, &mut values);
        Ok(values)
    }

    /// Releases the memory of a tensor's pages, which are read again when they are used again.
    ///
    /// # Errors
    /// A system that refuses.
    pub fn forget(&self, position: usize) -> Result<()> {
        let (Some(start), Some(bytes)) =
            (self.starts.get(position), self.header.tensors.get(position).and_then(TensorInfo::bytes))
        else {
            return Ok(());
        };
        let range = *start as usize..(start + bytes) as usize;
        self.mapped.forget(range).map_err(|cause| io_error(self.path(), cause))
    }
}

fn truncated(path: &Path) -> Error {
    file_error(path, "the file ends within its header or its tensors; copy or export it again")
}

enum Fault {
    Io(io::Error),
    Truncated,
    Invalid(String),
}

impl From<io::Error> for Fault {
    fn from(cause: io::Error) -> Self {
        Self::Io(cause)
    }
}

fn invalid<T>(reason: impl Into<String>) -> Result<T, Fault> {
    Err(Fault::Invalid(reason.into()))
}

/// A header, and where each tensor's values start, relative to the first.
struct Parsed {
    header: Header,
    offsets: Vec<u64>,
}

fn alignment(header: &Header) -> Result<u64, Fault> {
    match header.get("general.alignment") {
        None => Ok(ALIGNMENT),
        Some(Value::U32(bytes)) if bytes.is_power_of_two() => Ok(u64::from(*bytes)),
        Some(other) => invalid(format!("`general.alignment` is {other:?}; expected a power of two")),
    }
}

/// Returns where tensors start in the file; they are in the file and do not overlap.
fn starts(parsed: &Parsed, start: u64, length: u64) -> Result<Vec<u64>, Fault> {
    let align = alignment(&parsed.header)?;
    let mut starts = Vec::with_capacity(parsed.offsets.len());
    let mut spans = Vec::with_capacity(parsed.offsets.len());
    for (tensor, offset) in parsed.header.tensors.iter().zip(&parsed.offsets) {
        let Some(bytes) = tensor.bytes() else {
            return invalid(format!("`{}` has the shape {:?} in {}", tensor.name, tensor.shape, tensor.kind));
        };
        let span = start.checked_add(*offset).and_then(|start| Some((start, start.checked_add(bytes)?)));
        let Some((from, to)) = span.filter(|(_, to)| *to <= length) else { return Err(Fault::Truncated) };
        if !offset.is_multiple_of(align) {
            return invalid(format!("`{}` starts at {offset}, not at a multiple of {align}", tensor.name));
        }
        starts.push(from);
        spans.push((from, to, &tensor.name));
    }
    spans.sort_unstable();
    match spans.windows(2).find(|pair| pair[1].0 < pair[0].1) {
        Some(pair) => invalid(format!("`{}` and `{}` overlap", pair[0].2, pair[1].2)),
        None => Ok(starts),
    }
}

struct Source<R> {
    input: R,
    left: u64,
}

impl<R: Read> Source<R> {
    fn header(&mut self) -> Result<Parsed, Fault> {
        if self.array::<4>()? != MAGIC {
            return invalid("not a GGUF file: it does not start with `GGUF`");
        }
        match self.u32()? {
            2 | VERSION => {}
            version if (1..=VERSION).contains(&version.swap_bytes()) => {
                return invalid(
                    "a big-endian file; convert it to little-endian with `gguf_convert_endian.py` of llama.cpp",
                );
            }
            version => {
                return invalid(format!(
                    "version {version} of GGUF; expected 2 or {VERSION}: convert the model again with llama.cpp"
                ));
            }
        }
        // A tensor takes at least 24 bytes of header, an entry 13.
        let (tensors, entries) = (self.count(24)?, self.count(13)?);
        let (mut metadata, mut keys) = (Vec::new(), BTreeSet::new());
        for _ in 0..entries {
            let key = self.string()?;
            let kind = self.u32()?;
            let value = self.value(kind)?;
            if !keys.insert(key.clone()) {
                return invalid(format!("the metadata key `{key}` occurs twice"));
            }
            metadata.push((key, value));
        }
        let (mut infos, mut offsets, mut names) = (Vec::new(), Vec::new(), BTreeSet::new());
        for _ in 0..tensors {
            let name = self.string()?;
            let dimensions = self.u32()? as usize;
            if dimensions == 0 || dimensions > MAX_DIMENSIONS {
                return invalid(format!("`{name}` has {dimensions} sizes; expected one to {MAX_DIMENSIONS}"));
            }
            let mut shape = (0..dimensions).map(|_| self.u64()).collect::<Result<Vec<u64>, Fault>>()?;
            shape.reverse();
            let number = self.u32()?;
            let Some(kind) = TensorType::ALL.into_iter().find(|kind| kind.number() == number) else {
                return invalid(unreadable_type(&name, number));
            };
            offsets.push(self.u64()?);
            if !names.insert(name.clone()) {
                return invalid(format!("the tensor `{name}` occurs twice"));
            }
            infos.push(TensorInfo { name, shape, kind });
        }
        Ok(Parsed { header: Header { metadata, tensors: infos }, offsets })
    }

    fn value(&mut self, kind: u32) -> Result<Value, Fault> {
        Ok(match kind {
            0 => Value::U8(u8::from_le_bytes(self.array()?)),
            1 => Value::I8(i8::from_le_bytes(self.array()?)),
            2 => Value::U16(u16::from_le_bytes(self.array()?)),
            3 => Value::I16(i16::from_le_bytes(self.array()?)),
            4 => Value::U32(self.u32()?),
            5 => Value::I32(i32::from_le_bytes(self.array()?)),
            6 => Value::F32(f32::from_le_bytes(self.array()?)),
            7 => Value::Bool(self.flag()?),
            8 => Value::String(self.string()?),
            ARRAY => Value::Array(self.elements()?),
            10 => Value::U64(self.u64()?),
            11 => Value::I64(i64::from_le_bytes(self.array()?)),
            12 => Value::F64(f64::from_le_bytes(self.array()?)),
            other => return invalid(format!("a metadata value has the unknown type {other}")),
        })
    }

    fn elements(&mut self) -> Result<Array, Fault> {
        Ok(match self.u32()? {
            0 => Array::U8(self.all(1, |source| Ok(u8::from_le_bytes(source.array()?)))?),
            1 => Array::I8(self.all(1, |source| Ok(i8::from_le_bytes(source.array()?)))?),
            2 => Array::U16(self.all(2, |source| Ok(u16::from_le_bytes(source.array()?)))?),
            3 => Array::I16(self.all(2, |source| Ok(i16::from_le_bytes(source.array()?)))?),
            4 => Array::U32(self.all(4, Self::u32)?),
            5 => Array::I32(self.all(4, |source| Ok(i32::from_le_bytes(source.array()?)))?),
            6 => Array::F32(self.all(4, |source| Ok(f32::from_le_bytes(source.array()?)))?),
            7 => Array::Bool(self.all(1, Self::flag)?),
            8 => Array::String(self.all(8, Self::string)?),
            10 => Array::U64(self.all(8, Self::u64)?),
            11 => Array::I64(self.all(8, |source| Ok(i64::from_le_bytes(source.array()?)))?),
            12 => Array::F64(self.all(8, |source| Ok(f64::from_le_bytes(source.array()?)))?),
            other => return invalid(format!("a metadata array has elements of the type {other}")),
        })
    }

    fn all<T>(
        &mut self,
        smallest: u64,
        mut read: impl FnMut(&mut Self) -> Result<T, Fault>,
    ) -> Result<Vec<T>, Fault> {
        let count = self.count(smallest)?;
        (0..count).map(|_| read(self)).collect()
    }

    /// Reads a number of things that take at least `smallest` bytes each.
    fn count(&mut self, smallest: u64) -> Result<u64, Fault> {
        let count = self.u64()?;
        if count > self.left / smallest { Err(Fault::Truncated) } else { Ok(count) }
    }

    fn string(&mut self) -> Result<String, Fault> {
        let length = self.count(1)?;
        let mut bytes = vec![0; length as usize];
        self.take(&mut bytes)?;
        match String::from_utf8(bytes) {
            Ok(text) => Ok(text),
            Err(_) => invalid("a text is not UTF-8"),
        }
    }

    fn flag(&mut self) -> Result<bool, Fault> {
        match self.array::<1>()?[0] {
            0 => Ok(false),
            1 => Ok(true),
            other => invalid(format!("a Boolean is {other}; expected 0 or 1")),
        }
    }

    fn u32(&mut self) -> Result<u32, Fault> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, Fault> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let mut bytes = [0; N];
        self.take(&mut bytes)?;
        Ok(bytes)
    }

    fn take(&mut self, bytes: &mut [u8]) -> Result<(), Fault> {
        self.input.read_exact(bytes)?;
        self.left -= bytes.len() as u64;
        Ok(())
    }
}
