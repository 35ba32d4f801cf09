//! The output projection and the cross-entropy as one operation that never holds all logits.

pub mod bench;
mod error;
pub mod experiment;
mod function;
mod head;
mod inputs;
pub mod ladder;
mod linear_cross_entropy;
mod options;
mod plan;
mod rows;
mod token_loss;
pub mod vocabulary_parallel;

pub use error::{Error, Result};
pub use head::{LinearCrossEntropyHead, install, install_rung};
pub use inputs::{Adapter, Denominator, Inputs, Targets};
pub use ladder::Rung;
pub use linear_cross_entropy::Output;
pub use options::{CheckTargets, Chunk, Empty, Gradients, LinearCrossEntropy, LogSumExp, Reduction};
pub use plan::default_budget;
