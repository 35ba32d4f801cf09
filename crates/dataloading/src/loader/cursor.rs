//! A position in the global sequence of batches.

use super::LoaderConfig;
use crate::batch_source::BatchSource;
use crate::error::{Error, Result};

/// The next batch: batch `position` of epoch `epoch`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Cursor {
    pub(super) epoch: u64,
    pub(super) position: u64,
}

/// A batch of the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BatchId {
    pub(super) epoch: u64,
    pub(super) index: usize,
}

/// The maximum number of consecutive epochs without a batch. A balanced sampler that drops short batches may have such
/// epochs; at least one of its window offsets gives a batch.
const MOST_EMPTY_EPOCHS: u64 = 1 << 16;

pub(super) fn no_batches(first: u64, epochs: u64) -> Error {
    let which = match epochs {
        1 => format!("epoch {first} has"),
        _ => format!("epochs {first} to {} have", first.saturating_add(epochs - 1)),
    };
    Error::Config {
        what: super::WHAT,
        reason: format!("{which} no batch; keep incomplete batches, or use smaller ones"),
    }
}

impl Cursor {
    /// Returns the position `by` batches ahead, which is never the end of an epoch; `None` if it is beyond the last of
    /// `epochs`, which is determined without asking for an epoch beyond it.
    pub(super) fn advanced(
        self,
        by: u64,
        epochs: Option<u64>,
        source: &dyn BatchSource,
    ) -> Result<Option<Self>> {
        let beyond = |at: Self| Error::Config {
            what: super::WHAT,
            reason: format!(
                "{by} batches after batch {} of epoch {} exceed the range of batch numbers",
                at.position, at.epoch
            ),
        };
        let position = self.position.checked_add(by).ok_or_else(|| beyond(self))?;
        let mut at = Self { position, ..self };
        let mut empty = 0;
        loop {
            if epochs.is_some_and(|epochs| at.epoch >= epochs) {
                return Ok(None);
            }
            let batches = source.batches(at.epoch) as u64;
            if at.position < batches {
                return Ok(Some(at));
            }
            empty = if batches == 0 { empty + 1 } else { 0 };
            if empty == MOST_EMPTY_EPOCHS {
                return Err(no_batches(at.epoch - (empty - 1), empty));
            }
            let epoch = at.epoch.checked_add(1).ok_or_else(|| beyond(self))?;
            at = Self { epoch, position: at.position - batches };
        }
    }

    /// Advances by one round and returns the batch of this rank; `None` if the round is incomplete. The cursor is then
    /// after the last batch of the round: at the end of an epoch rather than at the start of the next, which may not exist.
    pub(super) fn next_batch(
        &mut self,
        options: &LoaderConfig,
        source: &dyn BatchSource,
    ) -> Result<Option<BatchId>> {
        let Some(next) = self.advanced(options.rank, options.epochs, source)? else { return Ok(None) };
        let Some(last) = self.advanced(options.ranks - 1, options.epochs, source)? else { return Ok(None) };
        *self = Self { position: last.position + 1, ..last };
        Ok(Some(BatchId { epoch: next.epoch, index: next.position as usize }))
    }
}
