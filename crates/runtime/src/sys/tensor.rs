//! The memory behind a tensor, for kernels written in Rust (`cpp/tensor.cpp`).

use std::ffi::c_int;
use std::ops::Range;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::{Status, check, take};
use crate::error::{Error, Result};

unsafe extern "C" {
    fn rt_movable_new(bytes: usize, prototype: *const C_tensor, out: *mut *mut C_tensor) -> Status;
    fn rt_movable_set(movable: *const C_tensor, memory: *const C_tensor) -> Status;
    fn rt_bump_version(tensor: *const C_tensor) -> Status;
    fn rt_identity(tensor: *const C_tensor, identity: *mut usize) -> Status;
    fn rt_is_sole_owner(tensor: *const C_tensor, sole: *mut c_int) -> Status;
    fn rt_use_count(tensor: *const C_tensor, count: *mut usize) -> Status;
    fn rt_memory_range(tensor: *const C_tensor, begin: *mut usize, end: *mut usize) -> Status;
}

/// Returns bytes without memory, where `prototype` is.
pub(crate) fn movable(bytes: usize, prototype: &Tensor) -> Result<Tensor> {
    let mut out = std::ptr::null_mut();
    // SAFETY: the prototype and the out-parameter outlive the call.
    unsafe { check(rt_movable_new(bytes, prototype.as_ptr(), &mut out)) }?;
    // SAFETY: on success it is a tensor that is ours.
    Ok(unsafe { take(out) }.unwrap_or_default())
}

/// Gives the storage of a tensor of [`movable`] the memory of another, or none. The caller has checked that both have as many bytes, are
/// on one device, and that `memory` is contiguous.
pub(crate) fn set_movable(movable: &Tensor, memory: Option<&Tensor>) -> Result<()> {
    let memory = memory.map_or(std::ptr::null(), Tensor::as_ptr);
    // SAFETY: both tensors outlive the call; the storage keeps a reference to the memory, and has its size.
    unsafe { check(rt_movable_set(movable.as_ptr(), memory)) }
}

/// Tells libtorch that the tensor's values were changed.
pub(crate) fn bump_version(tensor: &Tensor) -> Result<()> {
    // SAFETY: the tensor outlives the call.
    unsafe { check(rt_bump_version(tensor.as_ptr())) }
}

/// Copies the bytes of `source` into `target`, on this thread only. The caller has checked that both are contiguous, on the CPU, and
/// of one size in bytes.
pub(crate) fn copy_bytes(target: &Tensor, source: &Tensor) -> Result<()> {
    let bytes = target.numel() * target.kind().elt_size_in_bytes();
    if bytes == 0 {
        return Ok(());
    }
    let (from, to) = (address(source)?, address(target)?);
    bump_version(target)?;
    // SAFETY: the tensors are contiguous and have this many bytes; `copy` permits an overlap. As with every in-place operation of
    // libtorch, the caller ensures that no thread uses them meanwhile.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
    Ok(())
}

/// Returns the address of the tensor, which all its handles share.
pub(crate) fn identity(tensor: &Tensor) -> Result<usize> {
    let mut identity = 0;
    // SAFETY: the tensor and the out-parameter outlive the call.
    unsafe { check(rt_identity(tensor.as_ptr(), &mut identity)) }?;
    Ok(identity)
}

/// Whether no other code can access the tensor's memory: this handle is the only one, and the storage has no other tensor.
pub(crate) fn is_sole_owner(tensor: &Tensor) -> Result<bool> {
    let mut sole = 0;
    // SAFETY: the tensor and the out-parameter outlive the call.
    unsafe { check(rt_is_sole_owner(tensor.as_ptr(), &mut sole)) }?;
    Ok(sole != 0)
}

/// Returns the number of the tensor's handles, those of graphs included.
pub(crate) fn use_count(tensor: &Tensor) -> Result<usize> {
    let mut count = 0;
    // SAFETY: the tensor and the out-parameter outlive the call.
    unsafe { check(rt_use_count(tensor.as_ptr(), &mut count)) }?;
    Ok(count)
}

/// Returns the address range of the tensor's elements.
pub(crate) fn memory_range(tensor: &Tensor) -> Result<Range<usize>> {
    let (mut begin, mut end) = (0, 0);
    // SAFETY: the tensor and the out-parameters outlive the call.
    unsafe { check(rt_memory_range(tensor.as_ptr(), &mut begin, &mut end)) }?;
    // libtorch 2.11 returns null for a storage whose memory is detached; later versions throw.
    if begin == 0 && tensor.numel() > 0 {
        return Err(Error::Torch("the tensor has elements, but no memory".to_owned()));
    }
    Ok(begin..end)
}

/// Returns the address of a tensor's first element, for kernels that also write there; null without elements.
///
/// # Errors
/// A tensor whose memory is detached ([`movable`]), for which `data_ptr` panics or returns null.
pub(crate) fn address(tensor: &Tensor) -> Result<usize> {
    let range = memory_range(tensor)?;
    Ok(if range.is_empty() { 0 } else { tensor.data_ptr() as usize })
}

/// Returns the tensor with the sign and the strides that kernels read: itself, or a copy. libtorch negates lazily, and calls any strides
/// of a tensor without elements contiguous.
pub(crate) fn dense(tensor: &Tensor) -> Result<Tensor> {
    let tensor = tensor.f_resolve_neg()?;
    if tensor.numel() == 0 && tensor.dim() > 0 && tensor.stride().last() != Some(&1) {
        return Ok(tensor.f_empty_like()?);
    }
    Ok(tensor.f_contiguous()?)
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
