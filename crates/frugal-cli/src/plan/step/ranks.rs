//! The ranks that a step is planned for.

use accounting::candidates::Ranks;
use accounting::scale::Network;
use anyhow::bail;
use clap::Args;
use frugal::planning;
use tch::Device;

use super::{PlannedStep, StepArgs};

const RANKS: &str = "Ranks";

#[derive(Args)]
pub(super) struct RanksArgs {
    /// Ranks that train together: as many GPUs, or processes on CPUs (`frugal launch -n`)
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..), help_heading = RANKS)]
    pub(super) ranks: u64,
    /// Machines among which the ranks are divided evenly
    #[arg(long, default_value_t = 1, requires = "network", value_parser = clap::value_parser!(u64).range(1..), help_heading = RANKS)]
    nodes: u64,
    /// Bytes per second between machines, of all the links of one together, such as 12.5GB
    #[arg(long, value_name = "BYTES", value_parser = accounting::quantity::parse_bytes, help_heading = RANKS)]
    network: Option<u64>,
}

/// Flags of a training over several ranks.
const OF_RANKS: [&str; 3] = ["--zero-stage", "--replicas", "--sequence-parallel-size"];

impl StepArgs {
    /// Whether several ranks train together.
    pub(super) fn has_ranks(&self) -> bool {
        self.ranks.ranks > 1
    }

    pub(super) fn check_ranks(&self) -> anyhow::Result<()> {
        let &RanksArgs { ranks, nodes, .. } = &self.ranks;
        if !ranks.is_multiple_of(nodes) {
            bail!("--ranks {ranks} are not a multiple of --nodes {nodes}; give as many ranks to each");
        }
        if ranks > 1 && self.is_inference() {
            bail!("--ranks applies to training only; give --method lora or full");
        }
        if ranks == 1
            && let Some(flag) = OF_RANKS.into_iter().find(|flag| self.flags.has(&[flag]))
        {
            bail!("{flag} is for several ranks; give their number as --ranks");
        }
        Ok(())
    }

    /// Refuses numbers of ranks that do not divide all of them.
    pub(super) fn check_division(&self, planned: &PlannedStep) -> anyhow::Result<()> {
        let ranks = self.ranks.ranks;
        let (parts, replicas) = (planned.sequence_ranks(), planned.config.optimizer.replicas as u64);
        for (flag, number) in [("--sequence-parallel-size", parts), ("--replicas", replicas)] {
            if !ranks.is_multiple_of(number.max(1)) {
                bail!(
                    "--ranks {ranks} are not a multiple of {flag} {number}; give a number that divides them"
                );
            }
        }
        Ok(())
    }

    /// The ranks, which divide least; `None` for one process.
    pub(super) fn planned_ranks(&self, planned: &PlannedStep) -> anyhow::Result<Option<Ranks>> {
        if !self.has_ranks() {
            return Ok(None);
        }
        let ranks = usize::try_from(self.ranks.ranks)?;
        Ok(Some(planning::ranks(&planned.config, ranks, self.network()?)))
    }

    /// Numbers of replicas that are compared: also one on each machine.
    pub(super) fn compared_replicas(&self, planned: &PlannedStep) -> Vec<u64> {
        let given = planned.config.optimizer.replicas as u64;
        match self.ranks.nodes {
            nodes if nodes > 1 && given == 1 => vec![1, nodes],
            _ => vec![given],
        }
    }

    fn network(&self) -> anyhow::Result<Network> {
        // Processes on CPUs send each other what they need; between GPUs NCCL passes it on in rings.
        let (local, latency, direct) = match self.hardware {
            Some(gpu) => (gpu.between_gpus(), planning::latency(Device::Cuda(0)), false),
            None => (planning::loopback_rate()?, planning::latency(Device::Cpu), true),
        };
        let between = self.ranks.network.map_or(local, |rate| rate as f64);
        Ok(Network { node: self.ranks.ranks / self.ranks.nodes, local, between, latency, direct })
    }
}

impl RanksArgs {
    /// Ranks that share a machine's processor and memory.
    pub(super) fn sharing(&self, on_cpu: bool) -> u64 {
        if on_cpu { self.ranks / self.nodes } else { 1 }
    }
}
