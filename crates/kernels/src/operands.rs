//! Operands of kernels as memory.

use runtime::tensor_memory::address;
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

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
