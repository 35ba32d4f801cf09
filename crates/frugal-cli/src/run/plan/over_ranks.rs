//! What the ranks of a training agree on before each of them makes the same plan.

use frugal::Config;
use frugal::planning::{self, Budget, KnownRates};
use runtime::collectives::{ReduceConfig, ReduceOp};
use tch::{Device, Tensor};

use crate::run::rank_group::Ranks;

impl Ranks {
    /// The processes that share the device: on a CPU those of this machine.
    pub(super) fn sharing(&self, device: Device) -> usize {
        if device == Device::Cpu { self.launch.local_world_size } else { 1 }
    }

    /// The budget for the bytes that every rank has.
    pub(super) fn least(&self, budget: Budget) -> anyhow::Result<Budget> {
        let tensors = i64::try_from(budget.tensors()).unwrap_or(i64::MAX);
        let largest = Tensor::f_from_slice(&[-tensors])?;
        let options = ReduceConfig { op: ReduceOp::Max, ..ReduceConfig::default() };
        self.preparation.all_reduce(&largest, options, "the least budget")?;
        Ok(budget.for_at_most(largest.f_int64_value(&[0])?.unsigned_abs()))
    }

    /// The rates of rank 0, if it has any.
    pub(super) fn rates_of_first(&self, own: Option<KnownRates>) -> anyhow::Result<Option<KnownRates>> {
        let text = self.preparation.broadcast_text(&serde_json::to_string(&own)?, 0, "rates")?;
        Ok(serde_json::from_str(&text)?)
    }

    /// The ranks as a plan has them, whose network is measured.
    pub(super) fn planned(&self, config: &Config) -> anyhow::Result<accounting::candidates::Ranks> {
        let network = planning::network(self.mesh.world(), self.launch.local_world_size)?;
        // Times that differ from rank to rank would make different plans.
        let of_first =
            self.preparation.broadcast_text(&network.local.to_string(), 0, "the rate of a gather")?;
        let rate: f64 = of_first.parse()?;
        let network = accounting::scale::Network { local: rate, between: rate, ..network };
        Ok(planning::ranks(config, self.launch.world_size, network))
    }
}
