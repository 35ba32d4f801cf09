//! The training loop.

use serde::{Deserialize, Serialize};

use super::{Bytes, CheckpointEvery};

/// Whether a CUDA graph repeats the steps, so that the host does not launch each kernel ([`training::trainer::captured`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum CaptureMode {
    /// On CUDA, for trainings that can be captured; a note has the reason for the others.
    #[default]
    Auto,
    /// Never.
    Off,
}

/// The training loop.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainingConfig {
    /// Optimizer steps in all; absent for those of `epochs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Passes over the data; absent for 1, or for as many as `steps` needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epochs: Option<u64>,
    /// Rows per batch.
    pub batch: usize,
    /// Gradient accumulation steps: batches per optimizer step.
    pub accumulation: usize,
    /// Rows per forward and backward. Fewer than `batch` take less memory; gradients are the same up to the order of their sums. Absent
    /// for those of a batch, or fewer if a budget needs that.
    #[serde(skip_serializing_if = "Option::is_none", alias = "rows_at_once")]
    pub micro_batch_size: Option<usize>,
    /// α of the noise that embeddings get in training, uniform in ±α/√(L·d) for an example of L tokens and embeddings of d numbers (NEFTune,
    /// [`training::embedding_noise`]); absent or 0 for none. Published trainings have 5 to 15.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub neftune_noise_alpha: Option<f64>,
    /// Ranks that divide each row of tokens among them (sequence parallelism), for rows that are too long for one: the activations of each
    /// are those of its part. It divides the number of ranks and the model's attention heads.
    pub sequence_parallel_size: usize,
    /// Steps or time between checkpoints; one is written at the end in any case.
    pub checkpoint_every: CheckpointEvery,
    /// Checkpoints to keep.
    pub keep: usize,
    /// Continues when a checkpoint cannot be written.
    pub ignore_failed_checkpoints: bool,
    /// Steps between evaluations on the validation data; a fine-tuning makes one at the end in any case.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evaluate_every: Option<u64>,
    /// Evaluations in a row that may be no better than the best before the training stops; absent to make all steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patience: Option<u64>,
    /// Evaluates before the first step too, in a fine-tuning with validation data.
    pub baseline: bool,
    /// Validation rows whose answers, before and after, are shown at the end of a fine-tuning.
    pub samples: usize,
    /// Steps between reading losses from the device.
    #[serde(alias = "read_every")]
    pub log_every: u64,
    /// Whether a CUDA graph repeats the steps.
    pub capture: CaptureMode,
    /// Seed of every random choice.
    pub seed: u64,
    /// Device: `auto` (the GPU if one is usable, else the CPU), `cpu`, `cuda` or `cuda:N`. A training writes the one that
    /// it took.
    pub device: String,
    /// Bytes that may be held: of the process on a CPU, where pages of mapped files do not count, of tensors on a GPU; absent for 80 % of
    /// what is free in the program, and for no limit in the library.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<Bytes>,
}

impl Default for TrainingConfig {
    fn default() -> Self {
        Self {
            steps: None,
            epochs: None,
            batch: 4,
            accumulation: 4,
            micro_batch_size: None,
            neftune_noise_alpha: None,
            sequence_parallel_size: 1,
            checkpoint_every: CheckpointEvery::default(),
            keep: 2,
            ignore_failed_checkpoints: false,
            evaluate_every: None,
            patience: None,
            baseline: true,
            samples: 5,
            log_every: 1,
            capture: CaptureMode::Auto,
            seed: 0,
            device: "auto".to_owned(),
            budget: None,
        }
    }
}
