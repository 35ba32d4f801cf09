//! Pinned host memory, for asynchronous copies to and from a device.

use tch::{Device, Kind, Tensor};

use super::Stream;
use super::choice::{checked, flag};
use crate::error::{Error, Result};
use crate::sys::host_memory::{HostBlock, Plain, Usage, host_empty, host_fallback_reason, host_usage};

/// Bytes of host memory that [`pinned_empty`] and [`PinnedBuffer`] hold.
///
/// `held - live` is the waste of rounding up to whole pages, `powers_of_two - live` the waste of libtorch's allocator
/// for pinned memory, which rounds up to powers of two (and also keeps freed blocks).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PinnedBytes {
    /// Requested by live tensors.
    pub live: u64,
    /// The maximum of `live` since the process started. With `fallback`, an upper bound: the sum of two peaks.
    pub peak: u64,
    /// Allocated for it, in whole pages.
    pub held: u64,
    /// The size in blocks rounded up to powers of two.
    pub powers_of_two: u64,
    /// The part of `held` in libtorch's allocator, because pages could not be locked ([`pinned_fallback`] says why), or
    /// because libtorch's own `pin_memory` was called.
    pub fallback: u64,
}

/// Creates an uninitialised CPU tensor for copies to and from `device`: page-locked for CUDA, where a `non_blocking`
/// copy is asynchronous only to and from such memory; ordinary pages for the CPU. It uses only the pages that its bytes
/// need, and frees them when it is dropped.
///
/// A copy may still be running when the tensor is dropped, so dropping page-locked memory waits for all work on the CUDA devices
/// that the process uses. A pipeline that must not wait keeps its tensors. While a step is captured ([`super::graph`]) waiting is
/// impossible, so drop none there. If pages cannot be locked, the memory is libtorch's own, rounded up to a power of two and reused
/// without a wait ([`pinned_fallback`]).
///
/// The memory does not come from the CPU allocator and is not in the figures of [`crate::memory`], which on the CPU
/// stand for the device; [`pinned_bytes`] counts the host's.
///
/// # Errors
/// A negative size, too little memory, a device that does not exist.
///
/// ```
/// use runtime::device;
/// use tch::{Device, Kind};
///
/// let staging = device::pinned_empty(&[2, 3], Kind::BFloat16, Device::Cpu)?;
/// assert_eq!(staging.size(), [2, 3]);
/// assert_eq!(staging.data_ptr() as usize % 4096, 0);
/// # Ok::<(), runtime::Error>(())
/// ```
pub fn pinned_empty(shape: &[i64], kind: Kind, device: Device) -> Result<Tensor> {
    const OPERATION: &str = "pinned tensor";
    let cuda = checked(device)?;
    let unsized_kinds = [Kind::QInt8, Kind::QUInt8, Kind::QInt32];
    if unsized_kinds.contains(&kind) {
        return Err(Error::invalid(
            OPERATION,
            format!("{kind:?} tensors carry scales; use the integer kind of its size"),
        ));
    }
    if let Some(size) = shape.iter().find(|size| **size < 0) {
        return Err(Error::invalid(OPERATION, format!("the shape {shape:?} has a negative size, {size}")));
    }
    let elements = shape.iter().try_fold(1_i64, |product, size| product.checked_mul(*size));
    let bytes = elements.and_then(|elements| elements.checked_mul(kind.elt_size_in_bytes() as i64));
    if bytes.is_none() {
        return Err(Error::invalid(
            OPERATION,
            format!("the shape {shape:?} of {kind:?} has more than 2^63 bytes"),
        ));
    }
    host_empty(shape, kind, cuda)
}

/// Returns the host memory that pinned tensors and buffers for `device` hold.
///
/// # Errors
/// A device that does not exist.
pub fn pinned_bytes(device: Device) -> Result<PinnedBytes> {
    let Usage { live, peak, held, powers_of_two, fallback } = host_usage(checked(device)?.is_some())?;
    Ok(PinnedBytes { live, peak, held, powers_of_two, fallback })
}

/// Returns why memory for `device` was taken from libtorch's allocator the last time that it was: the CUDA runtime's words when it
/// refused to lock pages (`ulimit -l` is the usual limit). `None` where it never was, and always for the CPU.
///
/// # Errors
/// A device that does not exist.
pub fn pinned_fallback(device: Device) -> Result<Option<String>> {
    match checked(device)? {
        None => Ok(None),
        Some(_) => host_fallback_reason(),
    }
}

/// An element type of a [`PinnedBuffer`]: `u8`, `i8`, `i16`, `i32`, `i64`, `half::f16`, `half::bf16`, `f32`, `f64`.
/// Sealed.
#[expect(private_bounds, reason = "the bound seals the trait")]
pub trait Number: Plain {}

impl<T: Plain> Number for T {}

/// Zero-initialised host memory that tensors can view: page-locked for CUDA, ordinary pages for the CPU.
///
/// It can be borrowed as a slice only while no tensor views it, so that a slice never changes while it is read. A copy from a view
/// may outlast the view. So the first borrow after a view waits for all work on the CUDA devices that the process uses, which costs
/// little after a synchronise. A pipeline that must not wait copies with [`PinnedBuffer::copy_to`], after which a borrow waits for
/// that copy alone. On the CPU nothing waits.
///
/// ```
/// use runtime::device::PinnedBuffer;
/// use tch::{Device, Kind};
///
/// let mut buffer = PinnedBuffer::new(32, Device::Cpu)?;
/// buffer.as_mut_slice::<f32>()?[2] = 0.5;
/// let tensor = buffer.view(8, &[3], Kind::Float)?;
/// assert_eq!(Vec::<f32>::try_from(&tensor)?, [0.5, 0.0, 0.0]);
///
/// assert!(buffer.as_slice::<f32>().is_err());
/// drop(tensor);
/// assert_eq!(buffer.as_slice::<f32>()?.len(), 8);
/// # Ok::<(), runtime::Error>(())
/// ```
#[derive(Debug)]
pub struct PinnedBuffer {
    block: HostBlock,
}

impl PinnedBuffer {
    /// Creates a buffer for copies to and from `device`.
    ///
    /// # Errors
    /// Too little memory, a device that does not exist.
    pub fn new(bytes: usize, device: Device) -> Result<Self> {
        Ok(Self { block: HostBlock::zeroed(bytes, checked(device)?)? })
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.block.len()
    }

    /// Returns whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Borrows the buffer as numbers.
    ///
    /// # Errors
    /// Tensors that still view it; a length that is not a whole number of `T`; on CUDA, an asynchronous error of a kernel.
    pub fn as_slice<T: Number>(&self) -> Result<&[T]> {
        match self.block.numbers()? {
            Some(numbers) => Ok(numbers),
            None => Err(self.refusal::<T>()),
        }
    }

    /// Borrows the buffer as mutable numbers.
    ///
    /// # Errors
    /// As [`PinnedBuffer::as_slice`].
    pub fn as_mut_slice<T: Number>(&mut self) -> Result<&mut [T]> {
        let refusal = self.refusal::<T>();
        self.block.numbers_mut()?.ok_or(refusal)
    }

    fn refusal<T: Number>(&self) -> Error {
        let reason = match self.block.views() {
            Ok(0) => format!("{} bytes are not a whole number of {:?}", self.len(), T::KIND),
            Ok(_) => "tensors still view it; drop them first".into(),
            Err(error) => return error,
        };
        Error::invalid("pinned buffer", reason)
    }

    /// Copies the buffer's first bytes to `target`, which is contiguous and on the stream's device, in `stream` without waiting. A
    /// later borrow waits for this copy alone. If the device is CUDA and the buffer is not page-locked, the call waits for the
    /// copy.
    ///
    /// ```
    /// use runtime::device::{PinnedBuffer, Stream};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let mut buffer = PinnedBuffer::new(8, Device::Cpu)?;
    /// buffer.as_mut_slice::<f32>()?.copy_from_slice(&[0.5, 2.0]);
    /// let stream = Stream::new(Device::Cpu)?;
    /// let target = Tensor::zeros([2], (Kind::Float, Device::Cpu));
    /// buffer.copy_to(&target, &stream)?;
    /// buffer.as_mut_slice::<f32>()?.fill(0.0);
    /// stream.synchronize()?;
    /// assert_eq!(Vec::<f32>::try_from(&target)?, [0.5, 2.0]);
    /// # Ok::<(), runtime::Error>(())
    /// ```
    ///
    /// # Errors
    /// A target that is not contiguous, on another device than the stream, or larger than the buffer; those of the copy.
    pub fn copy_to(&mut self, target: &Tensor, stream: &Stream) -> Result<()> {
        let invalid = |reason: String| Err(Error::invalid("pinned buffer copy", reason));
        let bytes = target.numel() * target.kind().elt_size_in_bytes();
        if target.device() != stream.device() {
            return invalid(format!(
                "the target is on {} and the stream of {}; give it a stream of the target's device",
                flag(target.device()),
                flag(stream.device())
            ));
        }
        if !target.is_contiguous() {
            return invalid(format!("the target has strides {:?}; make it contiguous", target.stride()));
        }
        if bytes > self.len() {
            return invalid(format!("the target has {bytes} bytes and the buffer {}", self.len()));
        }
        self.block.copy_to(target, stream)
    }

    /// Returns whether a copy of [`PinnedBuffer::copy_to`] is running, so that a borrow would wait.
    ///
    /// # Errors
    /// On CUDA, an asynchronous error of a kernel.
    pub fn is_being_copied(&self) -> Result<bool> {
        self.block.is_being_copied()
    }

    /// Returns a tensor over the bytes from `offset`, which keeps the memory alive. All views share a version counter:
    /// to autograd, writing through one of them changes all.
    ///
    /// # Errors
    /// A negative size, an offset that is not a multiple of the kind's size, an end beyond the buffer's.
    pub fn view(&mut self, offset: usize, shape: &[i64], kind: Kind) -> Result<Tensor> {
        let invalid = |reason: String| Err(Error::invalid("pinned buffer view", reason));
        let element = kind.elt_size_in_bytes();
        let size =
            shape.iter().try_fold(element, |bytes, size| bytes.checked_mul(usize::try_from(*size).ok()?));
        let Some(size) = size else {
            return invalid(format!("the shape {shape:?} of {kind:?} is not one of a tensor"));
        };
        if !offset.is_multiple_of(element) {
            return invalid(format!("the offset {offset} is not a multiple of {kind:?}'s {element} bytes"));
        }
        if offset.checked_add(size).is_none_or(|end| end > self.len()) {
            return invalid(format!(
                "{size} bytes from {offset} on reach beyond the buffer's {}",
                self.len()
            ));
        }
        Ok(self.block.view(offset, size)?.f_view_dtype(kind)?.f_view(shape)?)
    }
}
