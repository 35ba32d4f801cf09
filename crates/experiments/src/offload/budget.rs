//! A budget, planned for and held to.

use accounting::lora::LowRank;
use accounting::offload::sizes;
use accounting::offload::{Budget, Job, Plan, Setup, Start, Step, plan, simulate};
use accounting::quantity::bytes_text;
use accounting::{decoder_flops::Workload, memory::recipe::Recipe};
use anyhow::{Context, bail};
use models::LlamaConfig;
use runtime::device::{product_workspaces, reset_resident_peak, resident_memory};
use runtime::memory::{Limit, Region, RegionUsage};
use tch::{Device, Kind};

use super::predicted::{self, Speed, choices};
use super::rates::Measured;
use super::subject::HEAD_TOKENS;

/// What a plan leaves free: a moment's garbage, and what the libraries take as they go.
const SLACK: f64 = 0.03;

/// Work to plan for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aim {
    /// Reading tokens.
    Inference,
    /// Reading a prompt and generating so many tokens, one at a time.
    Generation { new: u64 },
    /// A step of adapters of this rank on q, k, v and o.
    Lora(u64),
    /// A step of all weights.
    Training,
}

/// Bytes of the device that tensors may take, of a budget that on the CPU is the whole process's.
///
/// # Errors
/// A budget that the process is beyond before it has begun.
pub(crate) fn for_tensors(budget: u64, device: Device) -> anyhow::Result<u64> {
    let taken = match device {
        Device::Cpu => resident_memory()?.current,
        _ => product_workspaces(device)?,
    };
    let free = budget.saturating_sub(taken).saturating_sub((budget as f64 * SLACK) as u64);
    if free == 0 {
        bail!(
            "a budget of {} is less than the program takes by itself ({}); give a larger --budget",
            bytes_text(budget),
            bytes_text(taken)
        );
    }
    Ok(free)
}

/// The step on paper.
///
/// # Errors
/// A shape that is not modelled.
pub(crate) fn job(
    config: &LlamaConfig,
    (kind, device): (Kind, Device),
    tokens: i64,
    aim: Aim,
    speed: Speed,
) -> anyhow::Result<Job> {
    let work = Workload { batch: 1, sequence: u64::try_from(tokens).context("tokens below 0")? };
    let choices = choices(kind, speed, HEAD_TOKENS.min(tokens));
    let rank = match aim {
        Aim::Generation { new } => {
            return Ok(sizes::generation(&::training::predicted::decoder(config)?, work, new, &choices)?);
        }
        Aim::Inference => return predicted::job(config, (kind, speed), tokens, predicted::Step::Inference),
        Aim::Training => return predicted::job(config, (kind, speed), tokens, predicted::Step::Training),
        Aim::Lora(rank) => rank,
    };
    let lora = LowRank { rank, on_cpu: device == Device::Cpu, ..LowRank::default() };
    Ok(sizes::adapters(&::training::predicted::decoder(config)?, &lora, work, None, &choices)?)
}

/// The fastest plan for `aim` within `budget`, of tensors on the device.
///
/// # Errors
/// Nothing fits: what is needed is said.
pub(crate) fn planned(job: &Job, measured: &Measured, budget: u64) -> anyhow::Result<Plan> {
    Ok(plan(job, &measured.rates, Budget { device: budget, host: None })?)
}

/// What a plan that was made for one step says of another.
///
/// # Errors
/// Those of the simulation.
pub(crate) fn by(setup: &Setup, job: &Job, measured: &Measured) -> anyhow::Result<Step> {
    Ok(simulate(job, &measured.rates, setup, Start::Warm)?)
}

/// Watches the bytes of a stretch of work.
pub(crate) struct Watch {
    region: Region,
}

/// What it saw.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    /// Of the device's allocator.
    pub(crate) tensors: RegionUsage,
    /// The most that the process held in RAM.
    pub(crate) process: u64,
}

impl Watch {
    /// Begins.
    ///
    /// # Errors
    /// A system that does not count.
    pub(crate) fn start(device: Device) -> anyhow::Result<Self> {
        reset_resident_peak()?;
        Ok(Self { region: Region::start(device)? })
    }

    /// Ends.
    ///
    /// # Errors
    /// A system that does not count.
    pub(crate) fn finish(self) -> anyhow::Result<Seen> {
        Ok(Seen { tensors: self.region.finish()?, process: resident_memory()?.peak })
    }
}

/// Lets the allocator refuse what goes beyond the budget. `None` on a GPU, where the environment alone can do that.
///
/// # Errors
/// More is live already.
pub(crate) fn enforce(device: Device, budget: u64) -> anyhow::Result<Option<Limit>> {
    match device {
        Device::Cpu => Ok(Some(runtime::memory::limit(device, budget)?)),
        _ => Ok(None),
    }
}

impl Seen {
    /// The bytes that the budget is for: the process's on the CPU, the device's otherwise.
    pub(crate) fn counted(&self, device: Device) -> u64 {
        if device == Device::Cpu { self.process.max(self.tensors.peak) } else { self.tensors.peak }
    }
}

/// Bytes of the whole model.
///
/// # Errors
/// A shape that is none.
pub(crate) fn model_bytes(config: &LlamaConfig, kind: Kind) -> anyhow::Result<u64> {
    let recipe = if kind == Kind::Float { Recipe::FP32 } else { Recipe::BF16 };
    Ok(recipe.parameters.bytes(::training::predicted::decoder(config)?.parameters()?)?)
}
