//! A place in the global sequence of batches.

use super::LoaderOptions;
use crate::batch_source::BatchSource;
use crate::error::{Error, Result};

/// The next batch: `position` of epoch `epoch`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Cursor {
    pub(super) epoch: u64,
    pub(super) position: u64,
}

/// One batch of the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) epoch: u64,
    pub(super) index: usize,
}

pub(super) fn no_batches(epoch: u64) -> Error {
    Error::Config {
        what: super::WHAT,
        reason: format!("epoch {epoch} has no batch; keep incomplete batches, or take smaller ones"),
    }
}

impl Cursor {
    /// The place `by` batches on.
    fn advanced(self, by: u64, source: &dyn BatchSource) -> Result<Self> {
        let beyond = |at: Self| Error::Config {
            what: super::WHAT,
            reason: format!(
                "{by} batches behind batch {} of epoch {} cannot be numbered",
                at.position, at.epoch
            ),
        };
        let position = self.position.checked_add(by).ok_or_else(|| beyond(self))?;
        let mut at = Self { position, ..self };
        loop {
            let batches = source.batches(at.epoch) as u64;
            if at.position < batches {
                return Ok(at);
            }
            if batches == 0 {
                return Err(no_batches(at.epoch));
            }
            let epoch = at.epoch.checked_add(1).ok_or_else(|| beyond(self))?;
            at = Self { epoch, position: at.position - batches };
        }
    }

    /// Moves on by a round and says which of its batches is this rank's; `None` where the round is not complete.
    pub(super) fn next_place(
        &mut self,
        options: &LoaderOptions,
        source: &dyn BatchSource,
    ) -> Result<Option<Place>> {
        let over = |cursor: &Self| options.epochs.is_some_and(|epochs| cursor.epoch >= epochs);
        // A state may stand at the very end of an epoch.
        if over(self) {
            return Ok(None);
        }
        let own = self.advanced(options.rank, source)?;
        if over(&self.advanced(options.ranks - 1, source)?) {
            return Ok(None);
        }
        *self = self.advanced(options.ranks, source)?;
        Ok(Some(Place { epoch: own.epoch, index: own.position as usize }))
    }
}
