//! Describes the ranks of a training to `accounting`, for predictions.

use std::time::Instant;

use accounting::candidates::{Allowed, Job, Layers, Ranks};
use accounting::memory::zero;
use accounting::scale::Network;
use kernels::nf4::Scales;
use kernels::quantized::blocks;
use runtime::collectives::{Division, Group};
use runtime::measure::Samples;
use tch::{Device, Kind, Tensor};
use training::activations::LayerPlan;

use super::job::{NotPredicted, refused};
use crate::config::{
    ActivationPlan, Config, FrozenPlace, OffloadConfig, OffloadTier, OptimizerPlace, OptimizerRule, ZeroStage,
};
use crate::error::Result;
use crate::recipe::stages;

/// Seconds of a message between processes over TCP, and of one step of a tree between GPUs.
const LATENCY: [f64; 2] = [100e-6, 10e-6];

/// Returns the latency of a network between devices, in seconds.
pub fn latency(device: Device) -> f64 {
    LATENCY[usize::from(device.is_cuda())]
}

/// Measures the network between the ranks of a group; `node` of them run on this machine. All of them call it.
///
/// # Errors
/// A rank that does not come.
pub fn network(group: &Group, node: usize) -> Result<Network> {
    let rate = gather_rate(group)?;
    let latency = latency(group.device());
    let direct = group.device() == Device::Cpu;
    Ok(Network { node: node as u64, local: rate, between: rate, latency, direct })
}

/// Returns the bytes per second that each rank of a group sends while they gather a tensor of 16 MiB. All of them call it.
///
/// # Errors
/// A rank that does not come.
pub fn gather_rate(group: &Group) -> runtime::Result<f64> {
    const ELEMENTS: i64 = 4 << 20;
    const ROUNDS: usize = 5;
    let division = Division::even(ELEMENTS, group.size());
    let all = Tensor::f_zeros([ELEMENTS], (Kind::Float, group.device()))?;
    let own = all.f_narrow(0, division.range(group.rank()).start, division.len(group.rank()))?;
    let mut samples = Vec::new();
    for round in 0..=ROUNDS {
        group.barrier("before a gather")?;
        runtime::device::synchronize(group.device())?;
        let (began, sent) = (Instant::now(), group.bytes().sent);
        group.all_gather(&all, division, &own, "the rate of a gather")?.wait()?;
        runtime::device::synchronize(group.device())?;
        // The first one makes connections and buffers.
        if round > 0 {
            samples.push((group.bytes().sent - sent) as f64 / began.elapsed().as_secs_f64());
        }
    }
    Ok(Samples { samples }.median())
}

/// Returns the ranks of a training whose number is `ranks`, at the least stage of ZeRO.
pub fn ranks(config: &Config, ranks: usize, network: Network) -> Ranks {
    Ranks {
        stage: config.optimizer.zero_stage.decided().unwrap_or(zero::ZeroStage::One),
        ranks: ranks as u64,
        replicas: config.optimizer.replicas as u64,
        slots: config.offload.as_ref().map_or_else(|| OffloadConfig::default().ring, |own| own.ring) as u64,
        in_files: config.offload.as_ref().is_some_and(|offload| offload.tier == OffloadTier::File),
        network,
    }
}

/// Makes a job, and what is allowed of it, those of one of several ranks.
///
/// # Errors
/// Techniques that ranks do not allow, or whose division `accounting` does not predict.
pub fn over_ranks(
    (job, allowed): (Job, Allowed),
    config: &Config,
    ranks: Ranks,
    (kind, device): (Kind, Device),
) -> Result<(Job, Allowed), NotPredicted> {
    let layers = job.model.layers as usize;
    if job.lora.is_some_and(|lora| lora.token_rows.trained > 0) {
        return Err(refused("trained rows of tokens over several ranks"));
    }
    if config.offload.as_ref().is_some_and(|offload| !offload.resident.is_empty()) {
        return Err(refused("resident layers beside those that ranks divide"));
    }
    let kept = config.kept_layers(layers)?;
    let mut stages = stages(config, ranks.ranks as usize, device)?;
    let is_quantized = Scales::of(kind).is_some() || kind == blocks::KIND;
    // What a divided layer keeps is as open as that of others, or the stage was named.
    let is_open = |stage: ZeroStage| {
        let differs = kept.is_some() && config.activations.plan == ActivationPlan::Auto;
        stage != ZeroStage::Three || !is_quantized && !differs
    };
    if config.optimizer.zero_stage == ZeroStage::Auto && stages.iter().any(|stage| is_open(*stage)) {
        stages.retain(|stage| is_open(*stage));
    }
    let divides = stages.contains(&ZeroStage::Three);
    if divides && job.lora.is_some() && config.optimizer.frozen_weights == FrozenPlace::Whole {
        return Err(refused("`optimizer.frozen_weights = \"whole\"` in stage 3"));
    }
    let layers = match (&kept, divides) {
        (Some(kept), true) => {
            let plan = |layer: usize| match kept.contains(&layer) {
                true => LayerPlan::KeepAll,
                false => LayerPlan::RecomputeAll,
            };
            Some(Layers::Only((0..layers).map(plan).collect()))
        }
        (None, true) => Some(Layers::Any),
        (_, false) => allowed.layers,
    };
    let stages = stages.into_iter().filter_map(ZeroStage::decided).collect();
    // As layers of one process: in files where nothing was named and nothing else is as fast.
    let is_open = config.activations.plan == ActivationPlan::Auto && config.offload.is_none();
    // Trained layers in files have their optimizer on the host, which computes AdamW only.
    let is_stepped = config.adapter.is_some() || config.optimizer.rule == OptimizerRule::AdamW;
    let shards_in_files = is_open && is_stepped && device == Device::Cpu;
    let allowed = Allowed { layers, offloaded: None, stages, shards_in_files, ..allowed };
    Ok((Job { ranks: Some(ranks), ..job }, allowed))
}

/// Sets what ranks divide, where that is, and which divided layers keep their activations where that is open.
pub(super) fn divided(config: &mut Config, ranks: &Ranks, plan: &[LayerPlan]) {
    config.optimizer.zero_stage = ranks.stage.into();
    config.optimizer.replicas = usize::try_from(ranks.replicas).unwrap_or(usize::MAX);
    if ranks.keeps_files() {
        config.offload.get_or_insert_default().tier = OffloadTier::File;
        if config.adapter.is_none() {
            config.optimizer.place = OptimizerPlace::Host;
        }
    }
    if ranks.stage != zero::ZeroStage::Three || config.activations.plan != ActivationPlan::Auto {
        return;
    }
    let keep: Vec<usize> = (0..plan.len()).filter(|&layer| plan[layer] == LayerPlan::KeepAll).collect();
    match keep.len() {
        0 => {}
        all if all == plan.len() => config.activations.plan = ActivationPlan::Keep,
        _ => config.offload.get_or_insert_default().keep = Some(keep),
    }
}
