//! Writing a GGUF file, version 3, little-endian, from start to end: the header names every tensor before the first value.
//!
//! ```text
//! "GGUF"  version u32 = 3  tensors u64  metadata entries u64
//! key string, type u32, value …                       for each metadata entry
//! name string, dimensions u32, sizes u64 …, type u32, offset u64      for each tensor; the innermost size comes first
//! zeros to a multiple of 32; then the values of each tensor, padded alike
//! ```

use std::collections::BTreeSet;
use std::io::{self, Write};

use crate::tensor_type::TensorType;
use crate::value::{Value, write_string};

/// The first bytes of a file.
pub(crate) const MAGIC: [u8; 4] = *b"GGUF";
/// The version of the format.
pub(crate) const VERSION: u32 = 3;
/// Alignment of the offsets of values, in bytes.
pub(crate) const ALIGNMENT: u64 = 32;
/// The most dimensions that a tensor has in ggml.
pub(crate) const MAX_DIMENSIONS: usize = 4;
/// The most bytes of a tensor's name in ggml, without the final zero.
pub(crate) const MAX_NAME: usize = 63;

/// The description of a tensor in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name, at most 63 bytes.
    pub name: String,
    /// The shape as in PyTorch, `[rows, columns]`: the innermost size is the last. At most four sizes.
    pub shape: Vec<u64>,
    /// How values are stored.
    pub kind: TensorType,
}

impl TensorInfo {
    /// Returns the number of rows and the length of a row: a vector is one row.
    pub(crate) fn rows_and_columns(&self) -> Option<(u64, u64)> {
        let (columns, rest) = self.shape.split_last()?;
        let rows = rest.iter().try_fold(1u64, |rows, size| rows.checked_mul(*size))?;
        Some((rows, *columns))
    }

    /// Returns the bytes of the values; `None` for rows that are not whole blocks of the type, and for an overflow.
    pub fn bytes(&self) -> Option<u64> {
        let (rows, columns) = self.rows_and_columns()?;
        self.kind.row_bytes(columns)?.checked_mul(rows)
    }
}

/// Metadata and tensors of a file, in the order of the file.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Header {
    /// Keys and values. `general.architecture` comes first by convention.
    pub metadata: Vec<(String, Value)>,
    /// Tensors, in the order of their values.
    pub tensors: Vec<TensorInfo>,
}

impl Header {
    /// Returns the value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// Returns what the format does not permit, in words.
    fn fault(&self) -> Option<String> {
        let mut keys = BTreeSet::new();
        if let Some((key, _)) = self.metadata.iter().find(|(key, _)| !keys.insert(key)) {
            return Some(format!("the metadata key `{key}` occurs twice"));
        }
        let mut names = BTreeSet::new();
        for tensor in &self.tensors {
            let TensorInfo { name, shape, kind } = tensor;
            if !names.insert(name) {
                return Some(format!("the tensor `{name}` occurs twice"));
            }
            if name.len() > MAX_NAME {
                return Some(format!(
                    "the name `{name}` has {} bytes; ggml reads at most {MAX_NAME}",
                    name.len()
                ));
            }
            if shape.is_empty() || shape.len() > MAX_DIMENSIONS {
                return Some(format!(
                    "`{name}` has the shape {shape:?}; ggml has one to {MAX_DIMENSIONS} sizes"
                ));
            }
            if tensor.bytes().is_none() {
                return Some(format!("`{name}`, of shape {shape:?}, cannot be stored as {kind}"));
            }
        }
        None
    }
}

/// Writes the values of the tensors, in the header's order and in parts of any size.
pub struct Writer<'a> {
    out: &'a mut dyn Write,
    /// The name of each tensor, and the bytes that it takes.
    tensors: Vec<(String, u64)>,
    /// How many tensors are written.
    done: usize,
    /// Bytes of the next one that are written.
    written: u64,
}

impl<'a> Writer<'a> {
    /// Writes the header.
    ///
    /// # Errors
    /// A duplicate key or name, a name or a shape that ggml does not permit, as [`io::ErrorKind::InvalidInput`]; those of `out`.
    pub fn new(out: &'a mut dyn Write, header: &Header) -> io::Result<Self> {
        if let Some(fault) = header.fault() {
            return Err(refuse(fault));
        }
        let mut bytes = Vec::new();
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((header.tensors.len() as u64).to_le_bytes());
        bytes.extend((header.metadata.len() as u64).to_le_bytes());
        for (key, value) in &header.metadata {
            write_string(&mut bytes, key)?;
            bytes.extend(value.type_number().to_le_bytes());
            value.write(&mut bytes)?;
        }
        let (mut offset, mut tensors) = (0u64, Vec::new());
        for tensor in &header.tensors {
            write_string(&mut bytes, &tensor.name)?;
            bytes.extend((tensor.shape.len() as u32).to_le_bytes());
            bytes.extend(tensor.shape.iter().rev().flat_map(|size| size.to_le_bytes()));
            bytes.extend(tensor.kind.number().to_le_bytes());
            bytes.extend(offset.to_le_bytes());
            let size = tensor.bytes().unwrap_or(0);
            offset += size.next_multiple_of(ALIGNMENT);
            tensors.push((tensor.name.clone(), size));
        }
        bytes.resize((bytes.len() as u64).next_multiple_of(ALIGNMENT) as usize, 0);
        out.write_all(&bytes)?;
        Ok(Self { out, tensors, done: 0, written: 0 })
    }

    /// Writes a part of the next tensor's values.
    ///
    /// # Errors
    /// More bytes than the tensor takes, or no tensor left, as [`io::ErrorKind::InvalidInput`]; those of the output.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let left = self.tensors.get(self.done).map_or(0, |(_, size)| size - self.written);
        if bytes.len() as u64 > left {
            return Err(refuse(format!("{} bytes for a tensor that takes {left} more", bytes.len())));
        }
        self.written += bytes.len() as u64;
        self.out.write_all(bytes)
    }

    /// Ends a tensor whose values are all written.
    ///
    /// # Errors
    /// Values that are missing, as [`io::ErrorKind::InvalidInput`]; those of the output.
    pub fn end_tensor(&mut self) -> io::Result<()> {
        let Some((name, size)) = self.tensors.get(self.done) else {
            return Err(refuse("all tensors are written".to_owned()));
        };
        if self.written != *size {
            return Err(refuse(format!("`{name}` takes {size} bytes; {} were written", self.written)));
        }
        self.out.write_all(&[0; ALIGNMENT as usize][..(size.next_multiple_of(ALIGNMENT) - size) as usize])?;
        (self.done, self.written) = (self.done + 1, 0);
        Ok(())
    }

    /// Ends the file.
    ///
    /// # Errors
    /// A tensor without values, as [`io::ErrorKind::InvalidInput`].
    pub fn finish(self) -> io::Result<()> {
        match self.tensors.get(self.done) {
            Some((name, _)) => Err(refuse(format!("`{name}` has no values yet"))),
            None => Ok(()),
        }
    }
}

fn refuse(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, reason)
}
