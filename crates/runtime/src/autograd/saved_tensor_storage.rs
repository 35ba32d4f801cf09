//! Storage for saved inputs outside device memory.

use tch::Tensor;

use crate::error::Result;

/// Stores a segment's inputs between forward and backward, in host memory or a file; like PyTorch's saved-tensor hooks. See
/// [`Checkpoint::run_with_storage`](super::Checkpoint::run_with_storage).
pub trait SavedTensorStorage: Send + Sync + 'static {
    /// Starts to store `input`. The segment's forward reads it at the same time, so it must not change.
    ///
    /// # Errors
    /// Not enough space.
    fn pack(&self, input: &Tensor) -> Result<Box<dyn StoredTensor>>;
}

/// A tensor in a [`SavedTensorStorage`]. Dropped when no backward can need it any more.
pub trait StoredTensor: Send {
    /// Waits until the tensor is stored; its device memory may then be freed. Called when the segment's forward is done.
    ///
    /// # Errors
    /// A failed copy or write.
    fn wait(&self) -> Result<()>;

    /// Returns the tensor on its device, ready for work that the calling thread submits next. Called once for each backward.
    ///
    /// # Errors
    /// A failed copy or read.
    fn unpack(&self) -> Result<Tensor>;
}
