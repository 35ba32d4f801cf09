//! Predictions of `accounting`.

use accounting::decoder_flops::Workload;
use accounting::lora::LowRank;
use accounting::offload::sizes::Choices;
use accounting::offload::{Method, OptimizerPlace, Setup, Start, StepCosts, simulate, sizes};
use anyhow::Context;
use frugal::planning::{MachineRates, choices, widens};
use models::DecoderConfig;
use tch::{Device, Kind};

use super::measured_model::HEAD_TOKENS;

/// A step that is planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// A forward, up to the last token's logits.
    Inference,
    /// Forward, backward and optimizer over adapters of this rank on q, k, v and o.
    Lora(u64),
    /// Forward, backward and optimizer over all weights.
    Training,
}

/// The step of a model that reads one row.
///
/// # Errors
/// An invalid shape.
pub(crate) fn costs(
    config: &DecoderConfig,
    (kind, device): (Kind, Device),
    tokens: i64,
    step: Step,
    rates: &MachineRates,
) -> anyhow::Result<StepCosts> {
    let model = accounting::Decoder::from_config(config)?;
    let work = Workload { batch: 1, sequence: u64::try_from(tokens).context("tokens below 0")? };
    let choices = Choices {
        widens: widens(kind, device),
        tile_bytes: kernels::quantized::tile_bytes(device).unsigned_abs(),
        ..choices((kind, device), rates, HEAD_TOKENS.min(tokens).unsigned_abs())
    };
    Ok(match step {
        Step::Training => sizes::training(&model, work, &choices)?,
        Step::Inference => sizes::inference(&model, work, &choices)?,
        Step::Lora(rank) => {
            let lora = LowRank { rank, on_cpu: device == Device::Cpu, ..LowRank::default() };
            sizes::adapters(&model, &lora, work, None, &choices)?
        }
    })
}

/// Bytes of the device at the peak of a step, with or without the optimizer, which is on the host for the layers that are there. The
/// gradients that the host takes are not in it.
///
/// # Errors
/// Errors of the simulation.
pub(crate) fn peak(costs: &StepCosts, method: Method, with_optimizer: bool) -> anyhow::Result<u64> {
    let setup = Setup { method, resident: Vec::new(), optimizer: OptimizerPlace::Host };
    let mut costs = costs.clone();
    if !with_optimizer {
        costs.fixed.state_bytes = 0;
        costs.layers.iter_mut().for_each(|layer| layer.state_bytes = 0);
    }
    Ok(simulate(&costs, &MachineRates::NOMINAL.transfers, &setup, Start::Warm)?.device.total)
}
