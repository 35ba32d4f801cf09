//! Tensors whose memory moves.

use std::sync::atomic::{AtomicBool, Ordering};

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::sys::tensor as sys;

/// Bytes whose memory can be taken away and given back, elsewhere, while a graph has saved them or views of them: FSDP does the same by
/// resizing storages.
///
/// A graph that saves a weight, or its transpose, has a reference to the weight's storage. With this storage it has none to the memory,
/// so that the memory can serve other weights between forward and backward. While it has no memory, an access is an error of libtorch.
///
/// ```
/// use runtime::autograd;
/// use runtime::memory::MovableMemory;
/// use tch::{Device, Kind, Tensor};
///
/// let bytes = |value: f32| Tensor::from_slice(&[value; 4]).view_dtype(Kind::Uint8);
/// let moved = MovableMemory::new(16, Device::Cpu)?;
/// let weight = moved.bytes().view_dtype(Kind::Float).view([2, 2]);
/// let x = Tensor::from_slice2(&[[1.0f32, 2.0]]).set_requires_grad(true);
/// let attached = moved.attach(&bytes(3.0))?;
/// let y = x.matmul(&weight.tr());
/// drop(attached);
/// assert!(weight.f_sum(Kind::Float).is_err());
/// // The graph reads what is there now.
/// let attached = moved.attach(&bytes(5.0))?;
/// autograd::backward(&[&y.sum(Kind::Float)])?;
/// assert_eq!(Vec::<f32>::try_from(x.grad().view([-1]))?, [10.0, 10.0]);
/// # drop(attached);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Who attaches memory is responsible for its values: the tensors do not share its version, so that a graph does not see that
/// they changed.
#[derive(Debug)]
pub struct MovableMemory {
    bytes: Tensor,
    /// Whether a guard lives.
    attached: AtomicBool,
}

/// Memory that is attached until this is dropped.
#[derive(Debug)]
#[must_use = "the memory is detached as soon as this is dropped"]
pub struct Attached<'a>(&'a MovableMemory);

impl MovableMemory {
    /// Creates bytes on `device`, without memory.
    ///
    /// # Errors
    /// A device that does not exist.
    pub fn new(bytes: usize, device: Device) -> Result<Self> {
        let prototype = Tensor::f_empty([0], (Kind::Uint8, device))?;
        Ok(Self { bytes: sys::movable(bytes, &prototype)?, attached: AtomicBool::new(false) })
    }

    /// The bytes, `[bytes]`, for views.
    pub fn bytes(&self) -> &Tensor {
        &self.bytes
    }

    /// Attaches memory: the bytes of a contiguous tensor, which live until the guard is dropped.
    ///
    /// # Errors
    /// Memory of another size or dtype, or on another device; memory that is attached already.
    pub fn attach(&self, memory: &Tensor) -> Result<Attached<'_>> {
        let fits = memory.kind() == Kind::Uint8
            && memory.numel() == self.bytes.numel()
            && memory.is_contiguous()
            && memory.device() == self.bytes.device();
        if !fits {
            let of =
                |tensor: &Tensor| format!("{:?} {:?} on {:?}", tensor.kind(), tensor.size(), tensor.device());
            let reason = format!("the memory is {}; expected {}, contiguous", of(memory), of(&self.bytes));
            return Err(Error::invalid("MovableMemory::attach", reason));
        }
        if self.attached.swap(true, Ordering::AcqRel) {
            let reason = "memory is attached already; drop its guard first";
            return Err(Error::invalid("MovableMemory::attach", reason));
        }
        let attached = Attached(self);
        sys::set_movable(&self.bytes, Some(memory))?;
        Ok(attached)
    }
}

impl Drop for Attached<'_> {
    fn drop(&mut self) {
        // Fails for an undefined tensor alone.
        let _ = sys::set_movable(&self.0.bytes, None);
        self.0.attached.store(false, Ordering::Release);
    }
}
