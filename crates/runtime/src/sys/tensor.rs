//! The memory behind a tensor, for kernels that read and write it themselves (`cpp/tensor.cpp`).

use std::ffi::c_int;
use std::ops::{Deref, Range};

use tch::Tensor;
use torch_sys::C_tensor;

use super::layout::TensorLayout;
use super::{Status, check, take};
use crate::error::{Error, Result};

unsafe extern "C" {
    fn rt_movable_new(bytes: usize, prototype: *const C_tensor, out: *mut *mut C_tensor) -> Status;
    fn rt_movable_set(movable: *const C_tensor, memory: *const C_tensor) -> Status;
    fn rt_mm(out: *const C_tensor, a: *const C_tensor, b: *const C_tensor, accumulate: c_int) -> Status;
    fn rt_mm_of_rows(
        out: *const C_tensor,
        a: *const C_tensor,
        a_transposed: c_int,
        b: *const C_tensor,
        b_transposed: c_int,
        accumulate: c_int,
    ) -> Status;
    fn rt_scale(tensor: *const C_tensor, factor: f64, as_operator: c_int) -> Status;
    fn rt_fill_rows(target: *const C_tensor, row: *const C_tensor, as_operator: c_int) -> Status;
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

/// See [`crate::ops::mm_out`].
pub(crate) fn mm(out: &mut Tensor, a: &Tensor, b: &Tensor, accumulate: bool) -> Result<()> {
    // SAFETY: the tensors outlive the call; `out` is borrowed mutably.
    unsafe { check(rt_mm(out.as_ptr(), a.as_ptr(), b.as_ptr(), accumulate.into())) }
}

/// See [`crate::ops::mm_of_rows`], which has checked the tensors.
pub(crate) fn mm_of_rows(
    out: &mut Tensor,
    (a, a_transposed): (&Tensor, bool),
    (b, b_transposed): (&Tensor, bool),
    accumulate: bool,
) -> Result<()> {
    let (out, a, b) = (out.as_ptr(), a.as_ptr(), b.as_ptr());
    // SAFETY: the tensors outlive the call; `out` is borrowed mutably.
    unsafe { check(rt_mm_of_rows(out, a, a_transposed.into(), b, b_transposed.into(), accumulate.into())) }
}

/// See [`crate::ops::scale_`].
pub(crate) fn scale(tensor: &mut Tensor, factor: f64, as_operator: bool) -> Result<()> {
    // SAFETY: the tensor outlives the call, and is borrowed mutably.
    unsafe { check(rt_scale(tensor.as_ptr(), factor, as_operator.into())) }
}

/// See [`crate::ops::fill_rows_`].
pub(crate) fn fill_rows(target: &mut Tensor, row: &Tensor, as_operator: bool) -> Result<()> {
    // SAFETY: the tensors outlive the call; the target is borrowed mutably.
    unsafe { check(rt_fill_rows(target.as_ptr(), row.as_ptr(), as_operator.into())) }
}

/// Records in libtorch that the tensor's values were changed.
///
/// # Errors
/// A tensor that counts no versions, as one of inference mode.
pub fn bump_version(tensor: &Tensor) -> Result<()> {
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
///
/// # Errors
/// A tensor that is not defined.
pub fn identity(tensor: &Tensor) -> Result<usize> {
    let mut identity = 0;
    // SAFETY: the tensor and the out-parameter outlive the call.
    unsafe { check(rt_identity(tensor.as_ptr(), &mut identity)) }?;
    Ok(identity)
}

/// Returns whether no other code can access the tensor's memory: this handle is the only one, and the storage has no other tensor.
///
/// # Errors
/// A tensor without a storage.
pub fn is_sole_owner(tensor: &Tensor) -> Result<bool> {
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
///
/// # Errors
/// A tensor whose memory is detached, or that has no storage.
pub fn memory_range(tensor: &Tensor) -> Result<Range<usize>> {
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
/// A tensor whose memory is detached ([`MovableMemory`](crate::memory::MovableMemory)), for which `data_ptr` panics or returns null.
pub fn address(tensor: &Tensor) -> Result<usize> {
    let range = memory_range(tensor)?;
    Ok(if range.is_empty() { 0 } else { tensor.data_ptr() as usize })
}

/// A tensor that kernels read: the caller's, or a copy of it.
#[derive(Debug)]
pub enum Dense<'a> {
    /// The caller's, which needs no change.
    Same(&'a Tensor),
    /// A copy.
    Copy(Tensor),
}

impl Deref for Dense<'_> {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        match self {
            Self::Same(tensor) => tensor,
            Self::Copy(tensor) => tensor,
        }
    }
}

impl Dense<'_> {
    /// Returns a handle of its own.
    pub fn into_tensor(self) -> Tensor {
        match self {
            Self::Same(tensor) => tensor.shallow_clone(),
            Self::Copy(tensor) => tensor,
        }
    }
}

/// Returns the tensor with the sign and the strides that kernels read: itself, or a copy. libtorch negates lazily, and calls any strides
/// of a tensor without elements contiguous.
///
/// # Errors
/// Errors of libtorch.
pub fn dense(tensor: &Tensor) -> Result<Dense<'_>> {
    let layout = TensorLayout::of(tensor)?;
    let (empty, neg) = (layout.numel() == 0, layout.is_neg());
    if empty && layout.stride().last().is_some_and(|stride| *stride != 1) {
        return Ok(Dense::Copy(tensor.f_empty_like()?));
    }
    if layout.is_contiguous() && !neg {
        return Ok(Dense::Same(tensor));
    }
    Ok(Dense::Copy(tensor.f_resolve_neg()?.f_contiguous()?))
}
