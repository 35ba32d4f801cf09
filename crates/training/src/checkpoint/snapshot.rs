//! The content of a checkpoint, before it is written.

use models::tensors_file::{Content, LazyTensor};
use runtime::random::RandomState;
use serde_json::Value;

use crate::error::Result;

/// The contents of a checkpoint to write.
#[derive(Debug)]
pub struct Snapshot<'a> {
    pub(super) step: u64,
    pub(super) model: Content<'a>,
    pub(super) optimizer: Content<'a>,
    pub(super) random: RandomState,
    pub(super) state: Value,
}

impl<'a> Snapshot<'a> {
    /// Collects what is saved after `step` completed steps: the tensors of the model and of the optimizer, the random generators, and
    /// further state of the training.
    pub fn new(
        step: u64,
        model: Vec<LazyTensor<'a>>,
        optimizer: Vec<LazyTensor<'a>>,
        random: RandomState,
        state: Value,
    ) -> Self {
        Self { step, model: Content::new(model, &[]), optimizer: Content::new(optimizer, &[]), random, state }
    }

    /// Gives this rank's parts of the tensors to rank 0, which writes them. Brings what was not brought yet.
    ///
    /// # Errors
    /// A rank that failed.
    pub fn give(&mut self) -> Result<()> {
        self.model.give()?;
        Ok(self.optimizer.give()?)
    }
}
