//! Operands of kernels: checks the shape, dtype, device and layout of each operand when it is added, and at the end that no output overlaps
//! another operand.

use std::ops::Range;

use runtime::tensor_memory::{address, memory_range};
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

/// The operands of one pass on one device.
///
/// ```text
/// let mut operands = Operands::new("fused norm", Device::Cpu);
/// let x = operands.read("x", x, kind, rows * columns)?;
/// let y = operands.write("y", y, kind, rows * columns)?;
/// operands.check()?;
/// ```
pub(crate) struct Operands {
    operation: &'static str,
    device: Device,
    read: Vec<Named>,
    written: Vec<Named>,
}

type Named = (&'static str, Range<usize>);

/// How many elements an operand has.
#[derive(Clone, Copy)]
pub(crate) enum Extent<'a> {
    /// As many, in any dimensions.
    Elements(usize),
    /// The elements of a tensor of this size.
    Size(&'a [i64]),
}

impl From<usize> for Extent<'_> {
    fn from(elements: usize) -> Self {
        Self::Elements(elements)
    }
}

impl<'a> From<&'a [i64]> for Extent<'a> {
    fn from(size: &'a [i64]) -> Self {
        Self::Size(size)
    }
}

impl Operands {
    pub(crate) fn new(operation: &'static str, device: Device) -> Self {
        Self { operation, device, read: Vec::new(), written: Vec::new() }
    }

    /// Adds contiguous memory that the pass reads. Returns its address; 0 without a tensor.
    pub(crate) fn read<'a, 'b>(
        &mut self,
        name: &'static str,
        tensor: impl Into<Option<&'a Tensor>>,
        kind: Kind,
        extent: impl Into<Extent<'b>>,
    ) -> Result<usize> {
        let Some(tensor) = tensor.into() else { return Ok(0) };
        let range = contiguous(self.operation, name, tensor, extent, (kind, self.device))?;
        Ok(self.read_range(name, range))
    }

    /// Adds contiguous memory that the pass writes. Returns its address; 0 without a tensor.
    pub(crate) fn write<'a, 'b>(
        &mut self,
        name: &'static str,
        tensor: impl Into<Option<&'a Tensor>>,
        kind: Kind,
        extent: impl Into<Extent<'b>>,
    ) -> Result<usize> {
        let Some(tensor) = tensor.into() else { return Ok(0) };
        let range = contiguous(self.operation, name, tensor, extent, (kind, self.device))?;
        Ok(self.write_range(name, range))
    }

    /// Adds memory that the pass reads, of a layout that the caller has checked. Returns its address.
    pub(crate) fn read_range(&mut self, name: &'static str, range: Range<usize>) -> usize {
        let start = range.start;
        self.read.push((name, range));
        start
    }

    /// Adds memory that the pass writes, of a layout that the caller has checked. Returns its address.
    pub(crate) fn write_range(&mut self, name: &'static str, range: Range<usize>) -> usize {
        let start = range.start;
        self.written.push((name, range));
        start
    }

    /// Refuses memory that is written and overlaps another operand.
    pub(crate) fn check(&self) -> Result<()> {
        for (index, (name, range)) in self.written.iter().enumerate() {
            let mut others = self.written[..index].iter().chain(&self.read);
            if let Some((other, _)) = others.find(|(_, other)| overlap(range, other)) {
                let reason = format!("`{name}` overlaps `{other}` in memory; give it memory of its own");
                return Err(Error::invalid(self.operation, reason));
            }
        }
        Ok(())
    }
}

/// Returns whether two ranges of addresses share one.
pub(crate) fn overlap(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}

/// Returns the addresses of a tensor, checked to be contiguous, of this dtype and extent, and on this device.
pub(crate) fn contiguous<'a>(
    operation: &'static str,
    name: &str,
    tensor: &Tensor,
    extent: impl Into<Extent<'a>>,
    (kind, device): (Kind, Device),
) -> Result<Range<usize>> {
    if !tensor.defined() {
        return Err(Error::invalid(operation, format!("`{name}` is undefined")));
    }
    let extent = extent.into();
    let size = tensor.size();
    let has_extent = match extent {
        Extent::Elements(count) => tensor.numel() == count,
        Extent::Size(expected) => size == expected,
    };
    let layout = if tensor.is_sparse() {
        ", sparse"
    } else if tensor.is_neg() {
        ", lazily negated (`resolve_neg`)"
    } else if !tensor.is_contiguous() {
        ", not contiguous"
    } else {
        ""
    };
    if has_extent && layout.is_empty() && (tensor.kind(), tensor.device()) == (kind, device) {
        return memory_range(tensor);
    }
    let expected = match extent {
        Extent::Elements(count) => format!("{count} contiguous elements of {kind:?}"),
        Extent::Size(size) => format!("contiguous {kind:?} {size:?}"),
    };
    let (found, place) = (tensor.kind(), tensor.device());
    let reason =
        format!("`{name}` is {found:?} {size:?} on {place:?}{layout}; expected {expected} on {device:?}");
    Err(Error::invalid(operation, reason))
}

/// A matrix for kernels: rows of `columns` elements at a distance of `row_stride`, each row dense.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub(crate) pointer: usize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) row_stride: usize,
}

impl Rows {
    /// Whether the matrix is empty, so that `pointer` may be null.
    pub(crate) fn is_empty(self) -> bool {
        self.rows == 0 || self.columns == 0
    }
}

/// Views a dense-rowed CPU tensor `[rows, columns]` of the given kind.
pub(crate) fn rows(operation: &'static str, name: &str, tensor: &Tensor, kind: Kind) -> Result<Rows> {
    rows_on(operation, name, tensor, (kind, Device::Cpu))
}

/// The same for a tensor on the given device, whose memory the host must not read.
pub(crate) fn rows_on(
    operation: &'static str,
    name: &str,
    tensor: &Tensor,
    (kind, device): (Kind, Device),
) -> Result<Rows> {
    let refuse = |what: String| Err(Error::invalid(operation, format!("`{name}` {what}")));
    if tensor.device() != device || tensor.kind() != kind {
        let place = if device == Device::Cpu { "the CPU".to_owned() } else { format!("{device:?}") };
        return refuse(format!(
            "is {:?} on {:?}; expected {kind:?} on {place}",
            tensor.kind(),
            tensor.device()
        ));
    }
    if tensor.is_sparse() || tensor.is_neg() {
        return refuse(
            "is sparse or a negated view; make it dense with `resolve_neg` or `to_dense`".to_owned(),
        );
    }
    let (size, stride) = (tensor.size(), tensor.stride());
    let (&[rows, columns], &[row_stride, column_stride]) = (&size[..], &stride[..]) else {
        return refuse(format!("has shape {size:?}; expected [rows, columns]"));
    };
    if rows > 0 && columns > 1 && column_stride != 1 || rows > 1 && row_stride < columns {
        return refuse(format!("has strides {stride:?}; expected dense rows"));
    }
    let pointer = address(tensor)?;
    let as_usize = |value: i64| usize::try_from(value).unwrap_or(0);
    Ok(Rows { pointer, rows: as_usize(rows), columns: as_usize(columns), row_stride: as_usize(row_stride) })
}

/// Whether two matrices of one shape and element size share no element.
pub(crate) fn apart(a: Rows, b: Rows, element_size: usize) -> bool {
    let end = |m: Rows| m.pointer + (m.rows.saturating_sub(1) * m.row_stride + m.columns) * element_size;
    if a.rows * a.columns == 0 || end(a) <= b.pointer || end(b) <= a.pointer {
        return true;
    }
    // Two windows of columns of one larger matrix.
    let shift = a.pointer.abs_diff(b.pointer) / element_size;
    a.row_stride == b.row_stride && a.columns <= shift && shift + a.columns <= a.row_stride
}

/// Whether two matrices of one shape have the same elements in memory.
pub(crate) fn same(a: Rows, b: Rows) -> bool {
    a.rows * a.columns > 0 && a.pointer == b.pointer && (a.row_stride == b.row_stride || a.rows <= 1)
}
