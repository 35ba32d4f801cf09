//! The ways to run a step over several ranks.

use accounting::memory::optimizer::Optimizer;
use accounting::memory::recipe::Recipe;
use accounting::memory::zero::ZeroStage;
use accounting::offload::{Method, OptimizerPlace, Rates, Setup, Start, StepCosts, simulate};
use accounting::scale::{Division, Exchange, Network, Work, step};
use accounting::sequence_parallel;
use accounting::sharding::Layout;
use anyhow::bail;
use clap::Args;
use frugal::config::OffloadConfig;
use frugal::planning::{self, MachineRates};
use tch::Device;

use super::variants::{OverRanks, Variant};
use super::{PlannedStep, StepArgs};

const RANKS: &str = "Ranks";

#[derive(Args)]
pub(super) struct RanksArgs {
    /// Ranks that train together: as many GPUs, or processes on CPUs (`frugal launch -n`)
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..), help_heading = RANKS)]
    pub(super) ranks: u64,
    /// Ranks that divide each row of tokens among them; all of them take one micro-batch
    #[arg(long, alias = "sp-size", default_value_t = 1, value_name = "RANKS", value_parser = clap::value_parser!(u64).range(1..), help_heading = RANKS)]
    pub(super) sequence_parallel_size: u64,
    /// Machines among which the ranks are divided evenly
    #[arg(long, default_value_t = 1, requires = "network", value_parser = clap::value_parser!(u64).range(1..), help_heading = RANKS)]
    nodes: u64,
    /// Bytes per second between machines, of all the links of one together, such as 12.5GB
    #[arg(long, value_name = "BYTES", value_parser = accounting::quantity::parse_bytes, help_heading = RANKS)]
    network: Option<u64>,
}

impl RanksArgs {
    pub(super) fn check(&self, planned: &StepArgs) -> anyhow::Result<()> {
        if !self.ranks.is_multiple_of(self.nodes) {
            bail!(
                "--ranks {} are not a multiple of --nodes {}; give as many ranks to each",
                self.ranks,
                self.nodes
            );
        }
        if !self.ranks.is_multiple_of(self.sequence_parallel_size) {
            bail!(
                "--ranks {} are not a multiple of --sequence-parallel-size {}; give a number that divides them",
                self.ranks,
                self.sequence_parallel_size
            );
        }
        if self.ranks > 1 && planned.is_inference() {
            bail!("--ranks applies to training only; give --method lora or full");
        }
        Ok(())
    }

    /// Ranks that share a machine's processor and memory.
    pub(super) fn sharing(&self, on_cpu: bool) -> u64 {
        if on_cpu { self.ranks / self.nodes } else { 1 }
    }

    fn network(&self, planned: &StepArgs) -> anyhow::Result<Network> {
        // Processes on CPUs send each other what they need; between GPUs NCCL passes it on in rings.
        let (local, latency, direct) = match planned.hardware {
            Some(gpu) => (gpu.between_gpus(), planning::latency(Device::Cuda(0)), false),
            None => (planning::loopback_rate()?, planning::latency(Device::Cpu), true),
        };
        let between = self.network.map_or(local, |rate| rate as f64);
        Ok(Network { node: self.ranks / self.nodes, local, between, latency, direct })
    }
}

/// The ways to run a step over the ranks: the ZeRO stages, with activations kept or recomputed.
pub(super) fn variants(
    arguments: &StepArgs,
    planned: &PlannedStep,
    machine: &MachineRates,
) -> anyhow::Result<Vec<Variant>> {
    let ranks = &arguments.ranks;
    let (kept, recomputed) = (false, true);
    let mut ways = Vec::new();
    for stage in [ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
        ways.extend([(stage, 1, kept), (stage, 1, recomputed)]);
    }
    // A replica on each machine.
    if ranks.nodes > 1 {
        ways.extend([(ZeroStage::Three, ranks.nodes, kept), (ZeroStage::Three, ranks.nodes, recomputed)]);
    }
    let network = ranks.network(arguments)?;
    let costs = &arguments.costs(planned, machine, ranks.sequence_parallel_size)?;
    let mut all = Vec::new();
    for way in ways {
        all.push(variant(arguments, planned, costs, &machine.transfers, way, &network)?);
    }
    Ok(all)
}

fn variant(
    arguments: &StepArgs,
    planned: &PlannedStep,
    costs: &StepCosts,
    rates: &Rates,
    (stage, replicas, recompute): (ZeroStage, u64, bool),
    network: &Network,
) -> anyhow::Result<Variant> {
    let ranks = arguments.ranks.ranks;
    let (layout, recipe) = layout(arguments, planned, (stage, replicas))?;
    // Those of a training without flags for them.
    let slots = OffloadConfig::default().ring as u64;
    let sharded = layout.costs(costs.clone(), &recipe, Optimizer::AdamW, slots)?;
    let setup = Setup {
        method: Method::Resident { recompute },
        resident: Vec::new(),
        optimizer: OptimizerPlace::Device,
    };
    let mut simulated = simulate(&sharded, rates, &setup, Start::Warm)?;
    let passes = if recompute { 3 } else { 2 };
    let parts = arguments.ranks.sequence_parallel_size;
    let dtype = arguments.recipe(planned).compute;
    let exchanged = sequence_parallel::sent_bytes(&planned.model, planned.work, dtype, parts)?;
    let times = step(
        &Work {
            exchange: Exchange { ranks: parts, bytes: exchanged as f64, passes: passes as f64 },
            ..work(costs, &sharded, rates, stage, recompute)
        },
        Division { stage, shard: ranks / replicas, replicas },
        network,
    );
    simulated.seconds = times.seconds();
    simulated.idle_seconds = times.exposed();
    let number = stage.number();
    // Without a flag, the divided layers of stage 3 run again.
    let (what, flag) = match (stage, recompute) {
        (ZeroStage::Three, false) => ("", " --activations keep"),
        (ZeroStage::Three, true) => (", recomputed", ""),
        (_, false) => ("", ""),
        (_, true) => (", recomputed", " --activations recompute"),
    };
    let (in_replicas, of_replicas) = match replicas {
        1 => (String::new(), String::new()),
        _ => (format!(" in {replicas} replicas"), format!(" --replicas {replicas}")),
    };
    let (of_rows, flag_of_rows) = match parts {
        1 => (String::new(), String::new()),
        _ => (format!(", rows over {parts}"), format!(" --sequence-parallel-size {parts}")),
    };
    Ok(Variant {
        name: format!("ZeRO-{number} over {ranks} ranks{in_replicas}{of_rows}{what}"),
        // Ranks on GPUs have never run.
        flags: if arguments.hardware.is_some() || planned.device != Device::Cpu {
            String::new()
        } else {
            format!("--zero-stage {number}{of_replicas}{flag_of_rows}{flag}")
        },
        peak: simulated.device.total,
        step: simulated,
        plan: None,
        ranks: Some(OverRanks {
            stage,
            bound: times.bound(1.0),
            exposed: times.exposed(),
            sent_bytes: layout.sent_bytes(0, 1, slots)? + planned.model.layers * passes * exchanged,
        }),
    })
}

/// The division of what is trained, and in stage 3 of the layers; and the formats of what is stepped. Adapters are in fp32.
fn layout(
    arguments: &StepArgs,
    planned: &PlannedStep,
    (stage, replicas): (ZeroStage, u64),
) -> anyhow::Result<(Layout, Recipe)> {
    let (ranks, recipe) = (arguments.ranks.ranks / replicas, arguments.recipe(planned));
    let (layout, recipe) = match &planned.lora {
        Some(lora) => {
            let layout = Layout::of_adapters(&planned.model, lora, recipe.parameters, stage, ranks)?;
            (layout, Recipe::FP32)
        }
        None => (Layout::of_decoder(&planned.model, &recipe, stage, ranks)?, recipe),
    };
    Ok((layout.with_replicas(replicas)?, recipe))
}

/// The work of a rank: `sharded` has this rank's part of the optimizer, `costs` the whole model's bytes.
fn work(costs: &StepCosts, sharded: &StepCosts, rates: &Rates, stage: ZeroStage, recompute: bool) -> Work {
    let layers = costs.layers.len() as u64;
    let layer = costs.layers.first().copied().unwrap_or_default();
    let stepped: u64 = sharded.layers.iter().map(|layer| layer.trainable).sum();
    let fixed = costs.fixed;
    let trained = |bytes: u64, parameters: u64| if parameters > 0 { bytes as f64 } else { 0.0 };
    Work {
        exchange: Exchange::default(),
        layers,
        forward: layer.forward_seconds,
        backward: layer.backward_seconds - if recompute { 0.0 } else { layer.forward_seconds },
        outside: fixed.seconds,
        optimizer: (stepped + sharded.fixed.trainable) as f64 / rates.device_optimizer,
        weights: if stage == ZeroStage::Three {
            layer.slot_bytes as f64
        } else {
            layer.trainable_bytes as f64
        },
        gradients: layer.gradient_bytes as f64,
        outside_weights: trained(fixed.weight_bytes, fixed.trainable),
        outside_gradients: fixed.gradient_bytes as f64,
    }
}
