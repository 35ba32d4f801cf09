//! Inputs of a plan: this machine's rates, a budget, and the computation of a step.
//!
//! [`accounting`] predicts steps from sizes and rates. [`KnownRates`] has the rates, which are measured once; [`Job`](accounting::candidates::Job)s
//! come from a configuration by [`job`], and [`allowed`] says which ways to run a step the configuration leaves open.
//! [`capture_refusal`] says whether a graph repeats the steps, and [`captured_memory`] what graphs keep.
//! [`Budget`] has the arithmetic of what tensors may take beside the program itself, and [`PeakUsage`] what was held in the end.

mod budget;
pub(crate) mod captured;
mod data_shape;
mod job;
mod known_rates;
mod low_rank;
mod master_weights;
mod over_ranks;
mod peak_usage;
mod rates;
mod teacher;
mod weight_format;

pub use budget::{Budget, FREE_SHARE, LEAST_RESERVE, RESERVE, default_budget, enforce};
pub use captured::{capture_refusal, captured_memory, captured_text};
pub use data_shape::{DataShape, TeacherShape};
pub use job::{NotPredicted, allowed, job, loss_chunk, with_choice};
pub use known_rates::KnownRates;
pub use low_rank::low_rank;
pub use master_weights::{SLOWER, Searched, choose_master_weights, states_fit, trains_half};
pub use over_ranks::{gather_rate, latency, network, over_ranks, ranks};
pub use peak_usage::{MemorySamples, PeakMeter, PeakUsage, note_preparation};
pub use rates::{MachineRates, file_read_rate, layer_load_rate, loopback_rate};
pub use weight_format::WeightFormat;

use accounting::memory::logits::Loss;
use accounting::memory::quantized::StoredBytes;
use accounting::memory::recipe::Recipe;
use accounting::offload::sizes::{Choices, Logits};
use accounting::recompute::NormKernel;
use kernels::nf4::Scales;
use kernels::quantized::blocks;
use tch::{Device, Kind};

/// Returns the choices of `accounting` that describe a step of this project's models: weights in `kind`, the fused loss over `loss_chunk`
/// tokens at a time, logits of the last token in inference.
pub fn choices((kind, device): (Kind, Device), rates: &MachineRates, loss_chunk: u64) -> Choices {
    Choices {
        flops: rates.flops,
        bandwidth: rates.bandwidth,
        recipe: recipe(kind),
        loss: Loss::LinearCrossEntropy { tokens: loss_chunk, whole: 0 },
        norm: NormKernel::Output,
        logits: Logits::LastToken,
        product_workspaces: rates.product_workspaces,
        attention_kernel: kernels::attention::takes(device, rates::product_kind(kind)),
        widens: widens(kind, device),
        tile_bytes: kernels::quantized::tile_bytes(device).unsigned_abs(),
        ..Choices::default()
    }
}

/// Returns whether products of weights in `kind` are computed in fp32, as those of 16 bits and of NF4 on a CPU without instructions for them.
pub fn widens(kind: Kind, device: Device) -> bool {
    let product = rates::product_kind(kind);
    kernels::matmul::compute_kind(device, product) != product
}

/// Returns the number formats of a training of all weights, with or without fp32 copies of those of 16 bits.
pub fn trained_recipe(kind: Kind, master_weights: bool) -> Recipe {
    match (recipe(kind), master_weights) {
        (Recipe::BF16_FP32_STATE, true) => Recipe::BF16_MASTER,
        (recipe, _) => recipe,
    }
}

/// Returns the number formats of a model whose weights are in `kind`. Optimizers keep their state in fp32. Of the
/// blocks of a GGUF file the bytes are not known here: [`WeightFormat::recipe`] has them.
pub fn recipe(kind: Kind) -> Recipe {
    match kind {
        Kind::Float => Recipe::FP32,
        kind if Scales::of(kind).is_some() => Recipe::NF4,
        blocks::KIND => Recipe::blocks(StoredBytes::default()),
        _ => Recipe::BF16_FP32_STATE,
    }
}
