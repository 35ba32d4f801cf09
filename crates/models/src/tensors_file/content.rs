//! The content of a file: tensors whose values are produced piece by piece.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::fmt;
use std::io::{self, Write};
use std::ops::Range;

use serde_json::json;
use tch::{Device, Kind, Tensor};

use super::{METADATA, dtype_of};

/// The largest piece of a tensor that is brought at a time, in bytes: the memory that writing a file takes, whatever is in it.
pub const PIECE_BYTES: usize = 4 << 20;

/// Brings elements of a tensor; see [`LazyTensor::new`].
type Values<'a> = Box<dyn Fn(Range<i64>) -> runtime::Result<Option<Tensor>> + 'a>;

/// A tensor to write: its name, dtype and shape are known, its values are brought when they are written.
pub struct LazyTensor<'a> {
    name: String,
    kind: Kind,
    shape: Vec<i64>,
    values: Values<'a>,
}

impl<'a> LazyTensor<'a> {
    /// Creates a tensor from `values`, which returns a range of its elements, in the order of memory: contiguous, `[elements]`, on the CPU,
    /// and of this dtype. It is called once for each piece, from the first to the last.
    ///
    /// Where several processes have parts of the tensor, all of them call it, for the same pieces in the same order. It returns `None`
    /// on those that give their parts to the one that writes.
    pub fn new(
        name: impl Into<String>,
        kind: Kind,
        shape: &[i64],
        values: impl Fn(Range<i64>) -> runtime::Result<Option<Tensor>> + 'a,
    ) -> Self {
        Self { name: name.into(), kind, shape: shape.to_vec(), values: Box::new(values) }
    }

    /// Creates a tensor whose values this process has, on any device. It shares memory with `tensor`.
    ///
    /// ```
    /// use models::tensors_file::{self, Content, LazyTensor};
    /// use tch::{Device, Tensor};
    ///
    /// let mut bytes = Vec::new();
    /// let tensors = vec![LazyTensor::from_tensor("x", &Tensor::from_slice(&[1.0f32, 2.0]))];
    /// Content::new(tensors, &[("format", "pt")]).write_to(&mut bytes)?;
    /// assert_eq!(tensors_file::from_bytes(&bytes, Device::Cpu)?[0].1, Tensor::from_slice(&[1.0f32, 2.0]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn from_tensor(name: impl Into<String>, tensor: &Tensor) -> Self {
        let (shared, elements) = (tensor.shallow_clone(), elements(&tensor.size()));
        // Of a tensor that is not contiguous this is a copy, which is made once.
        let flat = RefCell::new(None);
        Self::new(name, tensor.kind(), &tensor.size(), move |range| {
            let _no_grad = tch::no_grad_guard();
            let mut copy = flat.borrow_mut();
            let contiguous = copy.take().map_or_else(|| shared.f_detach()?.f_reshape([-1]), Ok)?;
            let piece =
                contiguous.f_narrow(0, range.start, range.end - range.start)?.f_to_device(Device::Cpu)?;
            *copy = (range.end < elements).then_some(contiguous);
            Ok(Some(piece))
        })
    }

    /// [`LazyTensor::from_tensor`] for each.
    pub fn from_tensors(tensors: &[(String, Tensor)]) -> Vec<Self> {
        tensors.iter().map(|(name, tensor)| Self::from_tensor(name, tensor)).collect()
    }

    /// Returns the tensor's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its dtype.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns its shape.
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// Returns the bytes of its values.
    pub fn bytes(&self) -> u64 {
        elements(&self.shape).unsigned_abs() * self.kind.elt_size_in_bytes() as u64
    }

    /// Returns the tensor under another name.
    #[must_use]
    pub fn renamed(self, name: impl Into<String>) -> Self {
        Self { name: name.into(), ..self }
    }

    /// Brings a range of elements: see [`LazyTensor::new`].
    ///
    /// # Errors
    /// Errors of the values.
    pub fn piece(&self, range: Range<i64>) -> runtime::Result<Option<Tensor>> {
        (self.values)(range)
    }

    /// Brings the whole tensor; `None` on a process that only gives its part.
    ///
    /// # Errors
    /// Errors of the values.
    pub fn whole(&self) -> runtime::Result<Option<Tensor>> {
        let (elements, mut start, mut pieces) = (elements(&self.shape), 0, Vec::new());
        // All of them on every process.
        while start < elements {
            let end = elements.min(start + piece_elements(self.kind));
            pieces.push(self.piece(start..end)?);
            start = end;
        }
        let Some(pieces) = pieces.into_iter().collect::<Option<Vec<Tensor>>>() else { return Ok(None) };
        let flat = match pieces.len() {
            0 => Tensor::f_empty([0], (self.kind, Device::Cpu))?,
            _ => Tensor::f_cat(&pieces, 0)?,
        };
        Ok(Some(flat.f_view(self.shape.as_slice())?))
    }
}

impl fmt::Debug for LazyTensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?} {:?}", self.name, self.kind, self.shape)
    }
}

/// The tensors of a file, in its order, as they are written or given.
#[derive(Debug)]
pub struct Content<'a> {
    tensors: Vec<LazyTensor<'a>>,
    metadata: Vec<(String, String)>,
    /// The next piece: the index of its tensor, and its first element.
    next: (usize, i64),
}

impl<'a> Content<'a> {
    /// Orders the tensors: wide dtypes come first, as the format requires, so that every tensor is aligned to its element size.
    /// Hugging Face's readers require the metadata `("format", "pt")`.
    pub fn new(mut tensors: Vec<LazyTensor<'a>>, metadata: &[(&str, &str)]) -> Self {
        tensors.sort_by_key(|tensor| Reverse(tensor.kind.elt_size_in_bytes()));
        let text = |&(name, text): &(&str, &str)| (name.to_owned(), text.to_owned());
        Self { tensors, metadata: metadata.iter().map(text).collect(), next: (0, 0) }
    }

    /// Returns the tensors, in the file's order.
    pub fn tensors(&self) -> &[LazyTensor<'a>] {
        &self.tensors
    }

    /// Writes the header, and each piece as soon as it is there. Takes [`PIECE_BYTES`] at most. After an error of `out`, and where other
    /// processes have parts, [`Content::give`] brings what is left, so that they do not wait for this one.
    ///
    /// # Errors
    /// Errors of `out`. As [`io::ErrorKind::InvalidInput`]: a dtype that the format lacks (complex numbers, quantised), a duplicate or
    /// reserved name. A [`runtime::Error`] of the values, to which [`io::Error::downcast`] leads.
    pub fn write_to(&mut self, out: &mut dyn Write) -> io::Result<()> {
        let header = self.header()?;
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        while let Some((index, range)) = self.advance() {
            let tensor = &self.tensors[index];
            let LazyTensor { name, kind, .. } = tensor;
            let expected = range.end - range.start;
            let piece = tensor.piece(range).map_err(io::Error::other)?;
            let piece = piece.filter(|piece| piece.kind() == *kind && piece.size() == [expected]);
            let piece = piece.ok_or_else(|| {
                let reason =
                    format!("`{name}`: expected {expected} elements of {kind:?} on the process that writes");
                io::Error::new(io::ErrorKind::InvalidInput, reason)
            })?;
            runtime::file::write_values(out, &piece)?;
        }
        Ok(())
    }

    /// Brings all values that were not brought yet, and discards them. This is all that a process does whose part another one writes.
    ///
    /// # Errors
    /// Errors of the values.
    pub fn give(&mut self) -> runtime::Result<()> {
        while let Some((index, range)) = self.advance() {
            self.tensors[index].piece(range)?;
        }
        Ok(())
    }

    /// Returns the next piece: the index of its tensor, and its elements.
    fn advance(&mut self) -> Option<(usize, Range<i64>)> {
        loop {
            let (index, start) = self.next;
            let tensor = self.tensors.get(index)?;
            let end = elements(&tensor.shape).min(start + piece_elements(tensor.kind));
            if start < end {
                self.next.1 = end;
                return Some((index, start..end));
            }
            self.next = (index + 1, 0);
        }
    }

    /// The header's text, with spaces up to a multiple of 8 bytes.
    fn header(&self) -> io::Result<Vec<u8>> {
        let refuse = |reason: String| Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        let (mut header, mut end) = (serde_json::Map::new(), 0);
        if !self.metadata.is_empty() {
            let texts: serde_json::Map<_, _> =
                self.metadata.iter().map(|(name, text)| (name.clone(), json!(text))).collect();
            header.insert(METADATA.to_owned(), texts.into());
        }
        for tensor in &self.tensors {
            let LazyTensor { name, kind, shape, .. } = tensor;
            let Some(dtype) = dtype_of(*kind) else {
                return refuse(format!(
                    "`{name}` is {kind:?}, which the format does not support; convert it first"
                ));
            };
            let start = end;
            end += tensor.bytes();
            let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, end] });
            if name == METADATA || header.insert(name.clone(), entry).is_some() {
                return refuse(format!("the name `{name}` is a duplicate or reserved by the format"));
            }
        }
        let mut text = serde_json::to_vec(&header)?;
        text.resize(text.len().next_multiple_of(8), b' ');
        Ok(text)
    }
}

fn elements(shape: &[i64]) -> i64 {
    shape.iter().product()
}

fn piece_elements(kind: Kind) -> i64 {
    (PIECE_BYTES / kind.elt_size_in_bytes()).max(1) as i64
}
