//! Options of a training.

use std::time::Duration;

use super::{Frozen, Overflow};
use crate::clip::{self, NonFinite};
use crate::divergence::Divergence;
use crate::error::{Error, Result};
use crate::optimizer::ZeroGrad;

#[cfg(doc)]
use crate::accumulation::MicroBatches;
#[cfg(doc)]
use models::RouterBalance;

/// The reaction to a checkpoint that cannot be written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FailedCheckpoint {
    /// End with the error.
    #[default]
    Stop,
    /// Warn and continue.
    Continue,
}

/// Whether a CUDA graph repeats the steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Capture {
    /// Wherever it can: see [`captured`](super::captured).
    #[default]
    Auto,
    /// Never.
    Off,
}

/// Options of a training.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainerConfig {
    /// Total steps, including those before a resume.
    pub steps: u64,
    /// Gradient accumulation steps.
    pub accumulation: usize,
    /// Rows that go through the model at a time; `None` for those of a batch ([`MicroBatches::split`]).
    pub rows: Option<usize>,
    /// Maximum gradient norm.
    pub clip: Option<f64>,
    /// The reaction to a loss or gradient that is not finite.
    pub non_finite: NonFinite,
    /// The reaction to gradients that overflow under a scaler.
    pub overflow: Overflow,
    /// How gradients are cleared.
    pub zero_grad: ZeroGrad,
    /// Whether to count correct predictions in each step: a pass over the logits.
    pub accuracy: bool,
    /// The coefficient of the load-balancing loss ([`RouterBalance`]), for a model with a mixture of experts; 0 for none.
    pub router_aux_loss: f64,
    /// α of the noise that embeddings get in training (NEFTune, [`embedding_noise`](crate::embedding_noise)); 0 for none.
    pub embedding_noise: f64,
    /// Steps between reading losses from the device.
    pub log_every: u64,
    /// Steps between evaluations.
    pub evaluate_every: Option<u64>,
    /// Evaluations in a row that may be no better than the best before the training stops; `None` never stops it.
    pub patience: Option<u64>,
    /// Steps between checkpoints; one is always written at the end. None is written while losses are bad ([`Divergence`]), nor
    /// with weights that are not finite: the last good one stays the newest.
    pub checkpoint_every: Option<u64>,
    /// Time after which a checkpoint is written, counted from the last one or from the start: at the end of the first step that begins
    /// after it. Over ranks, rank 0's clock decides.
    pub checkpoint_interval: Option<Duration>,
    /// The reaction to a checkpoint that cannot be written.
    pub failed_checkpoint: FailedCheckpoint,
    /// Which frozen parameters checkpoints contain.
    pub frozen: Frozen,
    /// When to stop a diverging run.
    pub divergence: Divergence,
    /// Whether a CUDA graph repeats the steps.
    pub capture: Capture,
}

impl Default for TrainerConfig {
    fn default() -> Self {
        Self {
            steps: 100,
            accumulation: 1,
            rows: None,
            clip: None,
            non_finite: NonFinite::default(),
            overflow: Overflow::default(),
            zero_grad: ZeroGrad::default(),
            accuracy: false,
            router_aux_loss: 0.0,
            embedding_noise: 0.0,
            log_every: 10,
            evaluate_every: None,
            patience: None,
            checkpoint_every: None,
            checkpoint_interval: None,
            failed_checkpoint: FailedCheckpoint::default(),
            frozen: Frozen::default(),
            divergence: Divergence::default(),
            capture: Capture::default(),
        }
    }
}

impl TrainerConfig {
    pub(super) fn check(&self) -> Result<()> {
        let every = [Some(self.log_every), self.evaluate_every, self.checkpoint_every];
        if self.accumulation == 0 || every.contains(&Some(0)) {
            let reason = "0 gradient accumulation steps, or 0 steps between loss readings, evaluations or checkpoints; expected at least 1";
            return Err(Error::config("training", reason));
        }
        if self.patience == Some(0) {
            let reason = "a patience of 0 evaluations; expected at least 1";
            return Err(Error::config("training", reason));
        }
        if !(self.embedding_noise.is_finite() && self.embedding_noise >= 0.0) {
            let reason =
                format!("noise of embeddings with the α {}; expected 0 or more", self.embedding_noise);
            return Err(Error::config("training", reason));
        }
        if !(self.router_aux_loss.is_finite() && self.router_aux_loss >= 0.0) {
            let reason = format!(
                "a coefficient of the load-balancing loss of {}; expected 0 or more",
                self.router_aux_loss
            );
            return Err(Error::config("training", reason));
        }
        self.clip.map_or(Ok(()), clip::check)
    }
}
