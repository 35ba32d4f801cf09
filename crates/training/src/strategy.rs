//! Batching strategies.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use dataloading::datasets::{BaseDataset, PackedConfig, PackedDataset, SequencedDataset, StandardDataset};
use dataloading::packing::PackingConfig;
use dataloading::{BalancedConfig, BatchConfig, BatchSize, BatchSource, Samples};

use crate::error::{Error, Result};

/// How samples are batched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// Every row is padded to the maximum length (`BaseDataset`).
    Base,
    /// Every row is padded to the longest of its batch (`StandardDataset`).
    Standard,
    /// Rows of similar length, at most `k` apart (`BalancedBatchSampler`).
    Balanced {
        /// Tokens.
        k: usize,
    },
    /// All samples of a batch in one long row (`SequencedDataset`).
    Sequenced,
    /// Rows of the maximum length, filled by best-fit decreasing over the whole data set.
    Packed,
}

impl Strategy {
    /// All strategies that the experiment compares.
    pub const ALL: [Self; 7] = [
        Self::Base,
        Self::Standard,
        Self::Balanced { k: 64 },
        Self::Balanced { k: 20 },
        Self::Balanced { k: 5 },
        Self::Sequenced,
        Self::Packed,
    ];

    /// Returns the source of batches over `samples`.
    ///
    /// # Errors
    /// Samples without tokens, a batch size of 0.
    pub fn source(self, samples: Arc<dyn Samples>, options: &BatchConfig) -> Result<Arc<dyn BatchSource>> {
        let &BatchConfig { batch_size, max_length, pad, seed, .. } = options;
        Ok(match self {
            Self::Base => Arc::new(BaseDataset::new(samples, options)?),
            Self::Standard => Arc::new(StandardDataset::new(samples, options)?),
            Self::Balanced { k } => {
                let batch_size = BatchSize::Samples(batch_size);
                let balanced = BalancedConfig { batch_size, k, max_length, seed, ..Default::default() };
                Arc::new(StandardDataset::balanced(samples, &balanced, pad)?)
            }
            Self::Sequenced => Arc::new(SequencedDataset::new(samples, options, None)?),
            Self::Packed => {
                let plan = PackingConfig { capacity: max_length, ..Default::default() };
                let rows = packed_rows(&samples, batch_size, max_length);
                Arc::new(PackedDataset::new(
                    samples,
                    &PackedConfig { rows, plan, pad, seed, ..Default::default() },
                )?)
            }
        })
    }
}

/// Returns how many full rows hold as many tokens as `batch_size` average samples, so that steps of all strategies train on
/// about as many tokens.
fn packed_rows(samples: &dyn Samples, batch_size: usize, max_length: usize) -> usize {
    let tokens: usize = (0..samples.len()).map(|index| samples.length(index).min(max_length)).sum();
    let per_batch = tokens as f64 / samples.len().max(1) as f64 * batch_size as f64;
    (per_batch / max_length as f64).round().max(1.0) as usize
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Base => f.write_str("base"),
            Self::Standard => f.write_str("standard"),
            Self::Balanced { k } => write!(f, "balanced k={k}"),
            Self::Sequenced => f.write_str("sequenced"),
            Self::Packed => f.write_str("packed"),
        }
    }
}

impl FromStr for Strategy {
    type Err = Error;

    /// Parses a command-line value: `base`, `standard`, `balanced:20`, `sequenced`, `packed`.
    fn from_str(text: &str) -> Result<Self> {
        let refuse = || {
            let reason = format!(
                "`{text}` is unknown; expected base, standard, balanced:K (as in balanced:20), sequenced or packed"
            );
            Error::config("loading strategy", reason)
        };
        match text.split_once(':') {
            None => match text {
                "base" => Ok(Self::Base),
                "standard" => Ok(Self::Standard),
                "sequenced" => Ok(Self::Sequenced),
                "packed" => Ok(Self::Packed),
                _ => Err(refuse()),
            },
            Some(("balanced", k)) => {
                let k: i64 = k.parse().map_err(|_| refuse())?;
                Ok(Self::Balanced { k: dataloading::balanced_batch_sampler::k_from_flag(k)? })
            }
            Some(_) => Err(refuse()),
        }
    }
}
