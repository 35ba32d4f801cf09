//! Devices, streams, events and pinned host memory, for CPU and CUDA behind the same types.
//!
//! CUDA is reached through libtorch's device-generic interface: no CUDA toolkit is needed to build. This module opens
//! libtorch's CUDA library when it is first needed. A program that may use CUDA calls [`select`] first: libtorch
//! decides once, at the first `tch::Cuda` call or backward pass, which devices exist.
//!
//! A CPU stream is a thread with a queue, and an event is a condition variable, so that a schedule for a GPU can be run and tested
//! on a machine without one:
//!
//! ```
//! use std::sync::{Arc, Mutex};
//!
//! use runtime::device::{Event, Stream, select};
//!
//! let device = select("cpu")?;
//! let (compute, copy) = (Stream::new(device)?, Stream::new(device)?);
//! let ready = Event::new(device)?;
//! let log = Arc::new(Mutex::new(Vec::new()));
//!
//! let of_copy = log.clone();
//! copy.submit(move || Ok(of_copy.lock().unwrap().push("copied")))?;
//! copy.record(&ready)?;
//! compute.wait(&ready)?;
//! let of_compute = log.clone();
//! compute.submit(move || Ok(of_compute.lock().unwrap().push("computed")))?;
//! compute.synchronize()?;
//! assert_eq!(*log.lock().unwrap(), ["copied", "computed"]);
//! # Ok::<(), runtime::Error>(())
//! ```

mod bytes;
mod choice;
mod control_group;
mod cuda;
mod event;
pub mod graph;
mod pinned;
mod stream;
mod worker;

use tch::{Device, Tensor};

pub use bytes::{
    MemoryInfo, ResidentMemory, memory_info, product_workspaces, reset_resident_peak, resident_memory,
};
pub use choice::{Choice, checked, choose, cuda_count, driver_version, flag, name, select};
pub use control_group::{ControlGroup, control_group};
pub use event::Event;
pub use pinned::{Number, PinnedBuffer, PinnedBytes, pinned_bytes, pinned_empty, pinned_fallback};
pub use stream::{Stream, StreamGuard};

pub use crate::sys::stream::{CudaStream, CudaStreamGuard};

use crate::error::{Error, Result};
use crate::sys::{device as sys, stream as sys_stream};

/// Blocks the calling thread until the work of all streams of the device is done.
///
/// # Errors
/// A device that does not exist; the CPU within the work of a CPU stream, for which another stream may wait; on CUDA, an asynchronous error
/// of a kernel. On the CPU, the failure of a stream; the stream's own [`Stream::synchronize`] returns it again, because only the stream's
/// owner knows what was not computed.
pub fn synchronize(device: Device) -> Result<()> {
    match checked(device)? {
        None => worker::synchronize_all(),
        Some(index) => sys::cuda_synchronize(index),
    }
}

/// Makes a CUDA device this thread's current one, on which libtorch allocates what names no device, such as its workspaces and page-locked
/// memory. One of several processes on a machine calls it before its first allocation, so that it takes no memory of another's GPU. The CPU
/// needs nothing.
///
/// # Errors
/// A device that does not exist.
pub fn make_current(device: Device) -> Result<()> {
    checked(device)?.map_or(Ok(()), sys::cuda_make_current)
}

/// Copies `source` into `target`, with conversion and broadcasting, on the current stream of the CUDA device involved. To and from
/// pinned memory ([`pinned_empty`]) it returns before the copy is done: the host must wait for an event or synchronise before it
/// reads the target. `tch`'s own `copy_` waits. Between two CPU tensors it is `copy_`.
///
/// # Errors
/// An undefined tensor, shapes that do not broadcast, a target that autograd does not allow to change.
pub fn copy_async(target: &mut Tensor, source: &Tensor) -> Result<()> {
    if !target.defined() || !source.defined() {
        return Err(Error::invalid("copy_async", "a tensor is undefined"));
    }
    sys_stream::copy_async(target, source)
}

/// Copies `source` into `target` on the calling thread alone; `copy_` would use all of libtorch's threads and delay what computes
/// there. For the CPU streams of a schedule. To autograd it is an in-place change.
///
/// # Errors
/// Tensors that are not contiguous, not on the CPU, or not of one dtype and number of elements.
pub fn copy_on_this_thread(target: &Tensor, source: &Tensor) -> Result<()> {
    let plain = |tensor: &Tensor| {
        tensor.defined() && tensor.device() == Device::Cpu && tensor.is_contiguous() && !tensor.is_neg()
    };
    if !plain(target) || !plain(source) || target.kind() != source.kind() || target.numel() != source.numel()
    {
        let device_of = |tensor: &Tensor| match tensor.defined() {
            true => format!("{:?} {:?} on {}", tensor.kind(), tensor.size(), flag(tensor.device())),
            false => "undefined".to_owned(),
        };
        let reason = format!(
            "{} into {}; expected contiguous CPU tensors of one dtype and number of elements",
            device_of(source),
            device_of(target)
        );
        return Err(Error::invalid("copy_on_this_thread", reason));
    }
    crate::sys::tensor::copy_bytes(target, source)
}

/// Prevents the memory of `tensor` from being freed or reused before the work now in `stream` is done. Needed on CUDA if a tensor
/// is used on another stream than the one it was allocated on and then dropped. A CPU stream holds a reference. Ordinary CPU
/// memory, and page-locked memory of [`pinned_empty`], which is freed only after a wait for the devices, need nothing on a CUDA
/// stream; libtorch's own pinned memory is kept from reuse. This does not protect against writes: wait for an event before
/// refilling a buffer.
///
/// # Errors
/// A tensor without memory; a tensor of another CUDA device than the stream's.
pub fn record_stream(tensor: &Tensor, stream: &Stream) -> Result<()> {
    let invalid = |reason: String| Err(Error::invalid("record_stream", reason));
    if !tensor.defined() {
        return invalid("the tensor is undefined".into());
    }
    if let (Device::Cuda(_), of_stream @ Device::Cuda(_)) = (tensor.device(), stream.device())
        && tensor.device() != of_stream
    {
        let (of_tensor, of_stream) = (flag(tensor.device()), flag(of_stream));
        return invalid(format!("the tensor is on {of_tensor} and the stream on {of_stream}"));
    }
    stream.keep(tensor)
}
