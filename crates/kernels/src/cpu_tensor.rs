//! The memory of contiguous tensors on the CPU.

use std::marker::PhantomData;
use std::ops::Range;

use tch::Tensor;

/// Returns the bytes of a contiguous CPU tensor.
pub(crate) fn bytes(tensor: &Tensor) -> &[u8] {
    let length = tensor.numel() * tensor.kind().elt_size_in_bytes();
    if length == 0 {
        return &[];
    }
    // SAFETY: callers pass contiguous CPU tensors, so these are exactly its bytes, which live as long as the tensor; bytes have no
    // invalid value. As with every operation of libtorch that reads a tensor, the caller ensures that no thread writes it meanwhile.
    unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<u8>(), length) }
}

/// Writes elements of a contiguous CPU tensor from several threads, each its own.
#[derive(Clone, Copy)]
pub(crate) struct Output<T> {
    at: usize,
    elements: usize,
    of: PhantomData<T>,
}

impl<T> Output<T> {
    /// The caller has checked that the tensor is contiguous, on the CPU, and of elements T.
    pub(crate) fn new(tensor: &Tensor) -> Self {
        Self { at: tensor.data_ptr() as usize, elements: tensor.numel(), of: PhantomData }
    }

    /// # Safety
    /// The tensor lives, nothing else uses the range meanwhile.
    #[allow(clippy::mut_from_ref, reason = "threads write disjoint ranges of one tensor")]
    pub(crate) unsafe fn range(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.elements);
        // SAFETY: within the tensor (checked), and by this function's contract.
        unsafe { std::slice::from_raw_parts_mut((self.at as *mut T).add(range.start), range.len()) }
    }
}
