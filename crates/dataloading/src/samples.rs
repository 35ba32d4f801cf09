//! What a sampler and a packer need to know of a data set.

use crate::error::Result;

/// A numbered collection of token sequences, readable from any thread in any order.
///
/// Lengths are asked for every sample when a sampler is made, so they must not need the sample itself.
pub trait Samples: Send + Sync {
    /// How many there are.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens of sample `index`.
    fn length(&self, index: usize) -> usize;

    /// Appends the tokens of sample `index` to `out`.
    ///
    /// # Errors
    /// A record that cannot be read, named by its place.
    fn read(&self, index: usize, out: &mut Vec<u32>) -> Result<()>;
}

/// Sequences in memory.
impl Samples for Vec<Vec<u32>> {
    fn len(&self) -> usize {
        Vec::len(self)
    }

    fn length(&self, index: usize) -> usize {
        self[index].len()
    }

    fn read(&self, index: usize, out: &mut Vec<u32>) -> Result<()> {
        out.extend_from_slice(&self[index]);
        Ok(())
    }
}

impl<S: Samples + ?Sized> Samples for std::sync::Arc<S> {
    fn len(&self) -> usize {
        (**self).len()
    }

    fn length(&self, index: usize) -> usize {
        (**self).length(index)
    }

    fn read(&self, index: usize, out: &mut Vec<u32>) -> Result<()> {
        (**self).read(index, out)
    }
}
