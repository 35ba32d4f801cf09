//! Host memory that a device copies from and to without the processor.

use tch::{Device, Kind, Tensor};

use super::Stream;
use super::choice::{checked, flag};
use crate::error::{Error, Result};
use crate::sys::host_memory::{HostBlock, Plain, Usage, host_empty, host_fallback_reason, host_usage};

/// Bytes of host memory that [`pinned_empty`] and [`PinnedBuffer`] hold.
///
/// `held - live` is what rounding up to whole pages wastes, `powers_of_two - live` what libtorch's allocator for pinned
/// memory would waste, which rounds up to powers of two (and keeps freed blocks besides).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PinnedBytes {
    /// Asked for, by tensors that live.
    pub live: u64,
    /// The most that was live since the process began. Where there was `fallback`, a bound: the sum of two peaks.
    pub peak: u64,
    /// Taken from the system for it, in whole pages.
    pub held: u64,
    /// What it would take in blocks rounded up to powers of two.
    pub powers_of_two: u64,
    /// Of `held`, what lies in libtorch's allocator because pages could not be locked ([`pinned_fallback`] says why),
    /// or because libtorch's own `pin_memory` was called.
    pub fallback: u64,
}

/// An uninitialised tensor on the CPU for copies to and from `device`: page-locked for CUDA, where a copy with
/// `non_blocking` is asynchronous only from and to such memory; ordinary whole pages for the CPU. The pages are the
/// tensor's own: no more than its bytes need, and given back to the system when it is dropped.
///
/// A copy may be under way when the tensor is dropped: dropping page-locked memory waits for all work on the CUDA devices
/// that the process uses. A pipeline that must not stop there keeps its tensors, as it keeps their pages; while a step is
/// captured ([`super::graph`]) a device cannot be waited for, so drop none there. Where pages cannot be locked, the memory
/// is libtorch's own, rounded up to a power of two, and kept for reuse without a wait ([`pinned_fallback`]).
///
/// The memory is not the CPU allocator's and not in [`crate::memory`]'s figures: on the CPU those stand for the device,
/// and [`pinned_bytes`] for the host.
///
/// # Errors
/// A negative size, more bytes than there are, a device that is not there.
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

/// Host memory that pinned tensors and buffers for `device` hold.
///
/// # Errors
/// A device that is not there.
pub fn pinned_bytes(device: Device) -> Result<PinnedBytes> {
    let Usage { live, peak, held, powers_of_two, fallback } = host_usage(checked(device)?.is_some())?;
    Ok(PinnedBytes { live, peak, held, powers_of_two, fallback })
}

/// Why memory for `device` was taken from libtorch's allocator the last time that it was: the CUDA runtime's words when it
/// refused to lock pages (`ulimit -l` is the usual limit). `None` where it never was, and always for the CPU.
///
/// # Errors
/// A device that is not there.
pub fn pinned_fallback(device: Device) -> Result<Option<String>> {
    match checked(device)? {
        None => Ok(None),
        Some(_) => host_fallback_reason(),
    }
}

/// A number that a [`PinnedBuffer`] can be seen as: `u8`, `i8`, `i16`, `i32`, `i64`, `half::f16`, `half::bf16`, `f32`,
/// `f64`. Sealed.
#[expect(private_bounds, reason = "the bound seals the trait")]
pub trait Number: Plain {}

impl<T: Plain> Number for T {}

/// Bytes of host memory, zero at first, which tensors can view: page-locked for CUDA, ordinary whole pages for the CPU.
///
/// The bytes are borrowed as slices only while no tensor views them, so that a slice never changes under its reader.
/// A copy with a view may still be under way when the view is gone. So the first borrow after a view waits for all work on
/// the CUDA devices that the process uses: it costs little after a synchronise. A pipeline that must not stop there copies with
/// [`PinnedBuffer::copy_to`], after which a borrow waits for that copy alone. On the CPU there is nothing to wait for.
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
    /// A buffer for copies to and from `device`.
    ///
    /// # Errors
    /// More bytes than there are, a device that is not there.
    pub fn new(bytes: usize, device: Device) -> Result<Self> {
        Ok(Self { block: HostBlock::zeroed(bytes, checked(device)?)? })
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.block.len()
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The buffer as numbers.
    ///
    /// # Errors
    /// Tensors that still view it; a length that is not a whole number of `T`; on CUDA, an asynchronous error of a kernel.
    pub fn as_slice<T: Number>(&self) -> Result<&[T]> {
        match self.block.numbers()? {
            Some(numbers) => Ok(numbers),
            None => Err(self.refusal::<T>()),
        }
    }

    /// The buffer as numbers to write.
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

    /// Copies its first bytes to `target`, contiguous and on the stream's device, in `stream` and without waiting. The buffer may
    /// be borrowed again at once: a borrow waits until the copy is done, and for nothing else. One that is not page-locked is
    /// copied from while the caller waits, where the device is CUDA's.
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

    /// Whether a copy of [`PinnedBuffer::copy_to`] is under way, so that a borrow would wait.
    ///
    /// # Errors
    /// On CUDA, an asynchronous error of a kernel.
    pub fn is_being_copied(&self) -> Result<bool> {
        self.block.is_being_copied()
    }

    /// A tensor over the bytes from `offset` on; it keeps the memory alive. All views share a version counter: autograd
    /// takes writing through one of them for a change of all.
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
