//! The models of the experiments, by scale.

use models::DecoderConfig;
use report::cli::Scale;
use tch::{Device, Kind};

use super::training::Training;

/// The dtypes that are trained in.
pub(crate) fn kinds(scale: Scale) -> &'static [Kind] {
    match scale {
        Scale::Smoke | Scale::Laptop => &[Kind::Float],
        Scale::Full | Scale::Paper => &[Kind::Float, Kind::BFloat16],
    }
}

/// A small Llama whose vocabulary is as large beside it as those of real ones.
pub(crate) fn training(scale: Scale, kind: Kind, device: Device, seed: u64) -> Training {
    let (vocabulary, hidden, inner, layers, heads, batch_size, sequence, steps) = match scale {
        Scale::Smoke => (8_000, 64, 172, 1, 4, 4, 64, 4),
        Scale::Laptop => (32_000, 256, 688, 2, 4, 4, 128, 20),
        // The head of 8192 tokens: 1 GiB of logits in fp32.
        Scale::Full => (32_000, 256, 688, 2, 4, 8, 1024, 6),
        Scale::Paper => (128_256, 1024, 2816, 12, 16, 8, 1024, 200),
    };
    let model = DecoderConfig {
        max_position_embeddings: sequence,
        ..DecoderConfig::llama(vocabulary, hidden, inner, layers, heads)
    };
    Training { model, batch_size, sequence: sequence as usize, kind, steps, lr: 1e-3, device, seed }
}
