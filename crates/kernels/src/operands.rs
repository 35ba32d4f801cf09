//! Operands of kernels: checks the shape, dtype, device and layout of each operand when it is added, and at the end that no output overlaps
//! another operand.

mod layout;

use std::fmt;
use std::ops::Range;

use runtime::tensor_layout::TensorLayout;
use runtime::{Error, Result};
use smallvec::SmallVec;
use tch::{Device, Kind, Tensor};

use layout::{Layout, row_stride};
pub(crate) use layout::{has_dense_heads, has_flat_rows, has_no_gaps};

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
    operands: SmallVec<[Operand; FEW]>,
}

/// Operands that are stored without an allocation, and compared in pairs.
const FEW: usize = 16;

struct Operand {
    name: Name,
    access: Access,
    memory: Memory,
}

/// How a pass uses an operand.
#[derive(Clone, Copy)]
pub(crate) enum Access {
    Read,
    Write,
    /// Written, and may be the memory of one of these operands that are read, element for element.
    Overwrite(&'static [&'static str]),
}

/// The name of an operand, with its index in a list of operands.
#[derive(Clone, Copy)]
pub(crate) struct Name(&'static str, Option<usize>);

impl From<&'static str> for Name {
    fn from(name: &'static str) -> Self {
        Self(name, None)
    }
}

impl From<(&'static str, usize)> for Name {
    fn from((name, index): (&'static str, usize)) -> Self {
        Self(name, Some(index))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.1 {
            Some(index) => write!(f, "`{} {index}`", self.0),
            None => write!(f, "`{}`", self.0),
        }
    }
}

/// The shape of an operand.
#[derive(Clone, Copy)]
pub(crate) enum Extent<'a> {
    /// Any shape.
    Any,
    /// Any shape of so many elements.
    Elements(usize),
    /// This shape.
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
        Self { operation, device, operands: SmallVec::new() }
    }

    /// Adds contiguous memory that the pass reads. Returns its address; 0 without a tensor.
    pub(crate) fn read<'a, 'b>(
        &mut self,
        name: impl Into<Name>,
        tensor: impl Into<Option<&'a Tensor>>,
        kind: Kind,
        extent: impl Into<Extent<'b>>,
    ) -> Result<usize> {
        self.contiguous(Access::Read, name, tensor, kind, extent)
    }

    /// Adds contiguous memory that the pass writes. Returns its address; 0 without a tensor.
    pub(crate) fn write<'a, 'b>(
        &mut self,
        name: impl Into<Name>,
        tensor: impl Into<Option<&'a Tensor>>,
        kind: Kind,
        extent: impl Into<Extent<'b>>,
    ) -> Result<usize> {
        self.contiguous(Access::Write, name, tensor, kind, extent)
    }

    /// Adds contiguous memory. Returns its address; 0 without a tensor.
    pub(crate) fn contiguous<'a, 'b>(
        &mut self,
        access: Access,
        name: impl Into<Name>,
        tensor: impl Into<Option<&'a Tensor>>,
        kind: Kind,
        extent: impl Into<Extent<'b>>,
    ) -> Result<usize> {
        let Some(tensor) = tensor.into() else { return Ok(0) };
        self.add(access, name.into(), tensor, kind, extent.into(), Layout::Contiguous)
    }

    /// Adds a matrix of dense rows.
    pub(crate) fn rows<'a>(
        &mut self,
        access: Access,
        name: impl Into<Name>,
        tensor: &Tensor,
        kind: Kind,
        extent: impl Into<Extent<'a>>,
    ) -> Result<Rows> {
        self.matrix(access, name.into(), tensor, kind, extent.into(), Layout::DenseRows)
    }

    /// Adds a tensor `[…, columns]` whose rows are those of such a matrix.
    pub(crate) fn flat_rows<'a>(
        &mut self,
        access: Access,
        name: impl Into<Name>,
        tensor: &Tensor,
        kind: Kind,
        extent: impl Into<Extent<'a>>,
    ) -> Result<Rows> {
        self.matrix(access, name.into(), tensor, kind, extent.into(), Layout::FlatRows)
    }

    fn matrix(
        &mut self,
        access: Access,
        name: Name,
        tensor: &Tensor,
        kind: Kind,
        extent: Extent<'_>,
        layout: Layout,
    ) -> Result<Rows> {
        let tensor = check_view(self.operation, name, tensor, (kind, self.device), extent, layout)?;
        let rows = Rows::new(&tensor)?;
        let (range, bytes) = (tensor.range()?, kind.elt_size_in_bytes());
        let row = rows.columns * bytes;
        let stride = if rows.rows > 1 { rows.row_stride * bytes } else { row };
        self.operands.push(Operand { name, access, memory: Memory { range, row, stride } });
        Ok(rows)
    }

    /// Adds heads: a tensor of any strides whose last dimension is dense. Returns its layout.
    pub(crate) fn heads(
        &mut self,
        access: Access,
        name: impl Into<Name>,
        tensor: &Tensor,
        kind: Kind,
        size: &[i64],
    ) -> Result<TensorLayout> {
        let (name, options) = (name.into(), (kind, self.device));
        let layout = check_view(self.operation, name, tensor, options, size.into(), Layout::DenseHeads)?;
        self.push(access, name, &layout)?;
        Ok(layout)
    }

    /// Adds memory that is contiguous in some order of the dimensions. Returns its address.
    pub(crate) fn without_gaps(
        &mut self,
        access: Access,
        name: impl Into<Name>,
        tensor: &Tensor,
        kind: Kind,
    ) -> Result<usize> {
        self.add(access, name.into(), tensor, kind, Extent::Any, Layout::WithoutGaps)
    }

    /// Adds a tensor of a layout that the caller has checked.
    pub(crate) fn unchecked(
        &mut self,
        access: Access,
        name: impl Into<Name>,
        tensor: &TensorLayout,
    ) -> Result<()> {
        self.push(access, name.into(), tensor).map(drop)
    }

    fn add(
        &mut self,
        access: Access,
        name: Name,
        tensor: &Tensor,
        kind: Kind,
        extent: Extent<'_>,
        layout: Layout,
    ) -> Result<usize> {
        let tensor = check_view(self.operation, name, tensor, (kind, self.device), extent, layout)?;
        self.push(access, name, &tensor)
    }

    fn push(&mut self, access: Access, name: Name, tensor: &TensorLayout) -> Result<usize> {
        let range = tensor.range()?;
        let (start, row) = (range.start, range.len());
        self.operands.push(Operand { name, access, memory: Memory { range, row, stride: row } });
        Ok(start)
    }

    /// Refuses memory that is written and overlaps another operand.
    pub(crate) fn check(&self) -> Result<()> {
        let Some((later, earlier)) = self.conflict() else { return Ok(()) };
        let (later, earlier) = (&self.operands[later], &self.operands[earlier]);
        let (written, other) =
            if matches!(later.access, Access::Read) { (earlier, later) } else { (later, earlier) };
        let reason = format!("{} overlaps {} in memory; give it memory of its own", written.name, other.name);
        Err(Error::invalid(self.operation, reason))
    }

    /// Returns the first two operands that overlap where one of them is written, the later one first.
    fn conflict(&self) -> Option<(usize, usize)> {
        let conflicts =
            |&(later, earlier): &(usize, usize)| self.operands[later].conflicts_with(&self.operands[earlier]);
        let count = self.operands.len();
        if count <= FEW {
            return (0..count)
                .flat_map(|later| (0..later).map(move |earlier| (later, earlier)))
                .find(conflicts);
        }
        let start = |index: usize| self.operands[index].memory.range.start;
        let mut order: Vec<usize> = (0..count).collect();
        order.sort_unstable_by_key(|index| start(*index));
        let neighbours = order.iter().enumerate().flat_map(|(position, &first)| {
            let end = self.operands[first].memory.range.end;
            let candidates = order[position + 1..].iter().take_while(move |second| start(**second) < end);
            candidates.map(move |&second| (first.max(second), first.min(second)))
        });
        neighbours.filter(conflicts).min()
    }
}

impl Operand {
    fn conflicts_with(&self, other: &Self) -> bool {
        let is_in_place = match (self.access, other.access) {
            (Access::Read, Access::Read) => return false,
            (Access::Read, Access::Overwrite(inputs)) => inputs.contains(&self.name.0),
            (Access::Overwrite(inputs), Access::Read) => inputs.contains(&other.name.0),
            _ => false,
        };
        self.memory.overlaps(&other.memory) && !(is_in_place && self.memory == other.memory)
    }
}

/// Addresses of an operand: dense rows at a distance, in bytes; contiguous memory is one row.
#[derive(PartialEq, Eq)]
struct Memory {
    range: Range<usize>,
    row: usize,
    stride: usize,
}

impl Memory {
    fn overlaps(&self, other: &Self) -> bool {
        let (first, second) =
            if self.range.start <= other.range.start { (self, other) } else { (other, self) };
        if self.range.is_empty() || other.range.is_empty() || first.range.end <= second.range.start {
            return false;
        }
        // Two windows of columns of one larger matrix do not overlap.
        let shift = second.range.start - first.range.start;
        first.stride != second.stride || shift < first.row || first.stride < shift + second.row
    }
}

/// Refuses a tensor that is not contiguous or not of this dtype, device and shape.
pub(crate) fn check_contiguous<'a>(
    operation: &'static str,
    name: &'static str,
    tensor: &Tensor,
    extent: impl Into<Extent<'a>>,
    options: (Kind, Device),
) -> Result<()> {
    check_view(operation, name.into(), tensor, options, extent.into(), Layout::Contiguous).map(drop)
}

/// Describes a tensor, or refuses it if it is not of this dtype, device, shape and layout.
fn check_view(
    operation: &'static str,
    name: Name,
    tensor: &Tensor,
    (kind, device): (Kind, Device),
    extent: Extent<'_>,
    layout: Layout,
) -> Result<TensorLayout> {
    let actual = match TensorLayout::of(tensor) {
        Err(_) if !tensor.defined() => {
            return Err(Error::invalid(operation, format!("{name} is undefined")));
        }
        described => described?,
    };
    let size = actual.size();
    let has_extent = match extent {
        Extent::Any => true,
        Extent::Elements(count) => actual.numel() == count,
        Extent::Size(expected) => size == expected,
    };
    let fault = if !actual.is_strided() {
        ", sparse (`to_dense`)".to_owned()
    } else if actual.is_neg() {
        ", lazily negated (`resolve_neg`)".to_owned()
    } else if layout.fits(&actual) {
        String::new()
    } else if matches!(layout, Layout::Contiguous) {
        ", not contiguous".to_owned()
    } else {
        format!(", with strides {:?}", actual.stride())
    };
    if has_extent && fault.is_empty() && (actual.kind(), actual.device()) == (kind, device) {
        return Ok(actual);
    }
    let shape = match extent {
        Extent::Size(size) => format!("{kind:?} {size:?}"),
        Extent::Any if matches!(layout, Layout::DenseRows) => format!("{kind:?} [rows, columns]"),
        Extent::Any | Extent::Elements(_) => format!("{kind:?}"),
    };
    let expected = match (layout, extent) {
        (Layout::Contiguous, Extent::Elements(count)) => format!("{count} contiguous elements of {kind:?}"),
        (Layout::Contiguous, _) => format!("contiguous {shape}"),
        (Layout::DenseRows | Layout::FlatRows, _) => format!("{shape} with dense rows"),
        (Layout::DenseHeads, _) => format!("{shape} with a dense last dimension"),
        (Layout::WithoutGaps, _) => format!("{shape} without gaps or overlaps in memory"),
    };
    let (dtype, place) = (actual.kind(), actual.device());
    let reason =
        format!("{name} is {dtype:?} {size:?} on {place:?}{fault}; expected {expected} on {device:?}");
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
    /// Returns whether the matrix is empty, so that `pointer` may be null.
    pub(crate) fn is_empty(self) -> bool {
        self.rows == 0 || self.columns == 0
    }

    /// Of a tensor `[…, columns]` that has such rows.
    fn new(tensor: &TensorLayout) -> Result<Self> {
        let as_usize = |value: i64| usize::try_from(value).unwrap_or(0);
        let (columns, leading) = tensor.size().split_last().unwrap_or((&1, &[]));
        let rows = as_usize(leading.iter().product());
        let row_stride = as_usize(row_stride(tensor.size(), tensor.stride()));
        Ok(Self { pointer: tensor.range()?.start, rows, columns: as_usize(*columns), row_stride })
    }
}

/// Views a dense-rowed tensor `[rows, columns]` of this dtype and device.
pub(crate) fn rows(
    operation: &'static str,
    name: &'static str,
    tensor: &Tensor,
    options: (Kind, Device),
) -> Result<Rows> {
    Rows::new(&check_view(operation, name.into(), tensor, options, Extent::Any, Layout::DenseRows)?)
}

#[cfg(test)]
mod tests {
    use tch::kind;

    use super::*;

    #[test]
    fn written_memory_overlaps_no_other_operand_except_by_name() {
        let buffer = Tensor::zeros([4, 12], kind::FLOAT_CPU);
        let window = |start: i64, columns: i64| buffer.narrow(1, start, columns);
        let check = |uses: &[(Access, &'static str, Tensor)]| {
            let mut operands = Operands::new("a pass", Device::Cpu);
            for (access, name, tensor) in uses {
                operands.rows(*access, *name, tensor, Kind::Float, Extent::Any).unwrap();
            }
            operands.check().err().map(|error| error.to_string())
        };
        let (read, write, over_x) = (Access::Read, Access::Write, Access::Overwrite(&["x"]));
        let x = || (read, "x", window(0, 6));
        for accepted in [
            vec![x(), (read, "y", window(3, 6))],
            vec![x(), (write, "y", window(6, 6))],
            vec![(write, "y", window(6, 6)), (read, "x", window(0, 1)), (write, "z", window(1, 5))],
            vec![x(), (over_x, "y", window(0, 6))],
            vec![x(), (write, "y", window(2, 0)), (write, "z", window(6, 6))],
        ] {
            assert_eq!(check(&accepted), None);
        }
        let message = |written, other| {
            Some(format!("a pass: `{written}` overlaps `{other}` in memory; give it memory of its own"))
        };
        for (refused, written, other) in [
            (vec![x(), (write, "y", window(0, 6))], "y", "x"),
            (vec![(write, "y", window(5, 6)), x()], "y", "x"),
            (vec![x(), (over_x, "y", window(3, 6))], "y", "x"),
            (vec![x(), (over_x, "y", window(0, 5))], "y", "x"),
            (vec![(read, "w", window(0, 6)), (over_x, "y", window(0, 6))], "y", "w"),
            (vec![x(), (over_x, "y", window(0, 6)), (over_x, "z", window(0, 6))], "z", "y"),
            (vec![(write, "y", window(0, 1)), (read, "row", buffer.narrow(0, 2, 1))], "y", "row"),
        ] {
            assert_eq!(check(&refused), message(written, other));
        }
    }
}
