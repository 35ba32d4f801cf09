//! What a sampler and a packer need to know of a data set.

use std::ops::Range;

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

    /// Tokens of sample `index`. A sample of length 0 is passed over, after it was read once: where the length cannot be
    /// told, return 0 and let [`Samples::read`] say why.
    fn length(&self, index: usize) -> usize;

    /// Appends the tokens of sample `index` to `out`.
    ///
    /// # Errors
    /// A record that cannot be read, named by its place.
    fn read(&self, index: usize, out: &mut Vec<u32>) -> Result<()>;

    /// Appends the tokens `part` of sample `index` to `out`. A source that finds them without reading the whole sample
    /// says so here: pieces of a document that is much longer than a row are read one by one. What is beyond the sample's end
    /// is left out.
    ///
    /// # Errors
    /// As [`Samples::read`].
    fn read_part(&self, index: usize, part: Range<usize>, out: &mut Vec<u32>) -> Result<()> {
        let start = out.len();
        self.read(index, out)?;
        out.truncate(start + part.end.min(out.len() - start));
        out.drain(start..start + part.start.min(out.len() - start));
        Ok(())
    }
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

    fn read_part(&self, index: usize, part: Range<usize>, out: &mut Vec<u32>) -> Result<()> {
        let sample = &self[index];
        let end = part.end.min(sample.len());
        out.extend_from_slice(&sample[part.start.min(end)..end]);
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

    fn read_part(&self, index: usize, part: Range<usize>, out: &mut Vec<u32>) -> Result<()> {
        (**self).read_part(index, part, out)
    }
}
