//! The interface of data sets to samplers and packers.

use std::ops::Range;

use crate::error::Result;
use crate::fingerprint::Fingerprint;

/// An indexed collection of token sequences, readable from any thread in any order.
///
/// Samplers ask for all lengths when they are created, so lengths must be available without reading the samples.
pub trait Samples: Send + Sync {
    /// Returns the number of samples.
    fn len(&self) -> usize;

    /// Returns whether there are no samples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of tokens of sample `index`. Samples of length 0 are skipped after being read once: if the length
    /// is unknown, return 0 and return the error from [`Samples::read`].
    fn length(&self, index: usize) -> usize;

    /// Appends the tokens of sample `index` to `out`.
    ///
    /// # Errors
    /// The record cannot be read; the error names its position.
    fn read(&self, index: usize, out: &mut Vec<u32>) -> Result<()>;

    /// Appends the tokens `part` of sample `index` to `out`; tokens beyond its end are ignored. Override it if a part can
    /// be found without reading the whole sample: pieces of a document much longer than a row are read one by one.
    ///
    /// # Errors
    /// Same as [`Samples::read`].
    fn read_part(&self, index: usize, part: Range<usize>, out: &mut Vec<u32>) -> Result<()> {
        let start = out.len();
        self.read(index, out)?;
        out.truncate(start + part.end.min(out.len() - start));
        out.drain(start..start + part.start.min(out.len() - start));
        Ok(())
    }

    /// Returns a fingerprint of the content, by which a resumed run recognises its data. Called once when a data set is
    /// created; must be the same in every process. The default covers the lengths in order; override it if the tokens can
    /// be covered without reading all of them.
    fn fingerprint(&self) -> u64 {
        let lengths = (0..self.len()).map(|index| self.length(index) as u64);
        Fingerprint::new("lengths").numbers(lengths).finish()
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

    /// Covers the lengths and the tokens.
    fn fingerprint(&self) -> u64 {
        let all = Fingerprint::new("sequences").number(self.len() as u64);
        let sequence = |all: Fingerprint, tokens: &Vec<u32>| {
            let pair =
                |pair: &[u32]| u64::from(pair[0]) | pair.get(1).map_or(0, |&token| u64::from(token) << 32);
            all.number(tokens.len() as u64).numbers(tokens.chunks(2).map(pair))
        };
        self.iter().fold(all, sequence).finish()
    }
}

macro_rules! samples_behind {
    ($($pointer:ty),*) => {$(
        impl<S: Samples + ?Sized> Samples for $pointer {
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

            fn fingerprint(&self) -> u64 {
                (**self).fingerprint()
            }
        }
    )*};
}

samples_behind!(&S, Box<S>, std::sync::Arc<S>);

#[cfg(test)]
mod tests {
    use super::*;

    /// Samples with the default fingerprint.
    struct Lengths(Vec<usize>);

    impl Samples for Lengths {
        fn len(&self) -> usize {
            self.0.len()
        }

        fn length(&self, index: usize) -> usize {
            self.0[index]
        }

        fn read(&self, index: usize, out: &mut Vec<u32>) -> Result<()> {
            out.extend(0..self.0[index] as u32);
            Ok(())
        }
    }

    #[test]
    fn a_pointer_to_samples_is_samples() {
        fn check<S: Samples>(samples: S) {
            let mut out = Vec::new();
            samples.read(0, &mut out).unwrap();
            samples.read_part(1, 1..9, &mut out).unwrap();
            assert_eq!((samples.len(), samples.length(1), out), (2, 3, vec![5, 7, 8]));
            assert_eq!(samples.fingerprint(), vec![vec![5], vec![6, 7, 8]].fingerprint());
        }
        let samples = || vec![vec![5_u32], vec![6, 7, 8]];
        check(samples());
        let rows = samples();
        check::<&Vec<Vec<u32>>>(&rows);
        check(std::sync::Arc::new(samples()));
        check(Box::new(samples()) as Box<dyn Samples>);
    }

    #[test]
    fn other_content_has_another_fingerprint() {
        let all = [
            vec![vec![1, 2], vec![3]].fingerprint(),
            vec![vec![1], vec![2, 3]].fingerprint(),
            vec![vec![1, 2], vec![4]].fingerprint(),
            vec![vec![1, 2, 0], vec![3]].fingerprint(),
            vec![vec![3], vec![1, 2]].fingerprint(),
            Lengths(vec![2, 1]).fingerprint(),
            Lengths(vec![1, 2]).fingerprint(),
            Lengths(vec![2, 1, 0]).fingerprint(),
        ];
        let different: std::collections::BTreeSet<u64> = all.into_iter().collect();
        assert_eq!(different.len(), all.len());
    }
}
