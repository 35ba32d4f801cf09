//! The data of small trainings.

use tch::Device;
use training::batches::Synthetic;

/// Rows of 16 of 32 tokens, without an end.
pub(crate) const DATA: Synthetic = Synthetic {
    seed: 1,
    vocabulary: 32,
    rows: 4,
    length: 16,
    noise: 1,
    batches: None,
    device: Device::Cpu,
    position: 0,
};
