//! What a plan of offloading needs of this machine: its measured rates, and how much of a budget is left for tensors.
//!
//! [`accounting::offload`] predicts steps from sizes and rates. [`MachineRates::measure`] gives the rates, [`tensor_budget`] what
//! remains of a budget beside the program itself, and [`PeakUsage`] what was held in the end.

mod budget;
mod rates;

pub use budget::{PeakMeter, PeakUsage, enforce, tensor_budget};
pub use rates::{MachineRates, file_read_rate, layer_load_rate, loopback_rate};

use accounting::memory::logits::Loss;
use accounting::memory::recipe::Recipe;
use accounting::offload::sizes::{Choices, Logits};
use accounting::recompute::NormKernel;
use tch::Kind;

/// The choices of `accounting` that describe a step of this project's models: weights in `kind`, the fused loss over `loss_chunk`
/// tokens at a time, logits of the last token in inference.
pub fn choices(kind: Kind, rates: &MachineRates, loss_chunk: u64) -> Choices {
    Choices {
        flops: rates.flops,
        bandwidth: rates.bandwidth,
        recipe: recipe(kind),
        loss: Loss::LinearCrossEntropy { tokens: loss_chunk },
        norm: NormKernel::Output,
        logits: Logits::LastToken,
        product_workspaces: rates.product_workspaces,
        ..Choices::default()
    }
}

/// The number formats of a model whose weights are in `kind`.
pub fn recipe(kind: Kind) -> Recipe {
    if kind == Kind::Float { Recipe::FP32 } else { Recipe::BF16 }
}
