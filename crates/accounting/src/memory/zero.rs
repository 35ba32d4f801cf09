//! ZeRO: what each of `N` data-parallel devices keeps of the parameters, gradients and optimizer state.
//!
//! | stage | optimizer state and master weights | gradients | parameters | 16 B per parameter become |
//! |---|---|---|---|---|
//! | 0 | whole | whole | whole | 16 |
//! | 1 | 1/N | whole | whole | 4 + 12/N |
//! | 2 | 1/N | 1/N | whole | 2 + 14/N |
//! | 3 | 1/N | 1/N | 1/N | 16/N |
//!
//! Each is divided **once**, by the data-parallel degree, and rounded up to whole elements. (EleutherAI's calculator divides
//! ZeRO-3's parameters by the tensor- and pipeline-parallel degrees and then by all devices, which counts these degrees twice.)
//! Batches are per device, so activations are not divided.
//!
//! Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, figure 1.

use crate::exact::positive;
use crate::memory::optimizer::Optimizer;
use crate::memory::recipe::Recipe;
use crate::model::Decoder;
use crate::{Dtype, Error};

/// What is sharded over data-parallel devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum ZeroStage {
    /// Nothing: plain data parallelism.
    #[default]
    Zero,
    /// Optimizer state and master weights.
    One,
    /// Gradients too.
    Two,
    /// Parameters too.
    Three,
}

impl ZeroStage {
    /// All stages.
    pub const ALL: [Self; 4] = [Self::Zero, Self::One, Self::Two, Self::Three];

    /// Returns the stage of that number.
    pub fn from_number(number: u64) -> Result<Self, Error> {
        usize::try_from(number)
            .ok()
            .and_then(|index| Self::ALL.get(index).copied())
            .ok_or(Error::ZeroStage { given: number })
    }

    /// Returns its number.
    pub const fn number(self) -> u64 {
        self as u64
    }
}

/// A stage, and the number of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharding {
    /// What is divided.
    pub stage: ZeroStage,
    /// The data-parallel degree.
    pub devices: u64,
}

impl Default for Sharding {
    fn default() -> Self {
        Self { stage: ZeroStage::Zero, devices: 1 }
    }
}

impl Sharding {
    /// Checks that there is a device.
    pub fn new(stage: ZeroStage, devices: u64) -> Result<Self, Error> {
        positive("the number of devices", devices)?;
        Ok(Self { stage, devices })
    }

    /// Returns a device's share of `whole`, which is divided from stage `from` on.
    pub fn share(self, whole: u64, from: ZeroStage) -> u64 {
        if self.stage >= from { whole.div_ceil(self.devices.max(1)) } else { whole }
    }

    /// Returns whether something that is divided from stage `from` on is divided.
    pub fn divides(self, from: ZeroStage) -> bool {
        self.stage >= from && self.devices > 1
    }
}

/// Bytes per device between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelStates {
    /// Parameters that the forward reads.
    pub parameters: u64,
    /// The optimizer's own copy of the parameters.
    pub master: u64,
    /// Gradients between backward and step.
    pub gradients: u64,
    /// Optimizer state.
    pub optimizer: u64,
}

impl ModelStates {
    /// Returns all of them.
    pub fn total(&self) -> Result<u64, Error> {
        crate::exact::sum(
            "bytes of the model states",
            [self.parameters, self.master, self.gradients, self.optimizer],
        )
    }
}

/// Returns the bytes per device of `model`'s parameters, gradients and optimizer state.
pub fn model_states(
    model: &Decoder,
    recipe: &Recipe,
    optimizer: Optimizer,
    sharding: Sharding,
) -> Result<ModelStates, Error> {
    let parameters = model.parameters()?;
    let bytes = |dtype: Dtype, from| dtype.bytes(sharding.share(parameters, from));
    Ok(ModelStates {
        parameters: bytes(recipe.parameters, ZeroStage::Three)?,
        master: recipe.master.map_or(Ok(0), |dtype| bytes(dtype, ZeroStage::One))?,
        gradients: bytes(recipe.gradients, ZeroStage::Two)?,
        optimizer: sharding.share(optimizer.state_bytes(model, recipe.state)?, ZeroStage::One),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    /// Figure 1 of the ZeRO paper: 7.5e9 parameters, K = 12, 64 devices: 120, 31.4, 16.6 and 1.9 GB.
    #[test]
    fn figure_1_of_the_zero_paper() {
        let gigabytes = ZeroStage::ALL.map(|stage| {
            let sharding = Sharding::new(stage, 64).unwrap();
            let n = 7_500_000_000u64;
            let share = |bytes_each: u64, from| bytes_each * sharding.share(n, from);
            let total = share(2, ZeroStage::Three) + share(2, ZeroStage::Two) + share(12, ZeroStage::One);
            (total as f64 / 1e8).round() / 10.0
        });
        assert_eq!(gigabytes, [120.0, 31.4, 16.6, 1.9]);
    }

    #[test]
    fn shares_are_divided_once() {
        let model = presets::find("llama-3-8b").unwrap();
        let n = model.parameters().unwrap();
        let total = |stage, devices| {
            let sharding = Sharding::new(stage, devices).unwrap();
            model_states(&model, &Recipe::BF16_MASTER, Optimizer::AdamW, sharding).unwrap().total().unwrap()
        };
        // The count is a multiple of 8, so the shares are exact.
        assert_eq!(n % 8, 0);
        assert_eq!(total(ZeroStage::Zero, 8), 16 * n);
        assert_eq!(total(ZeroStage::One, 8), 4 * n + 12 * n / 8);
        assert_eq!(total(ZeroStage::Two, 8), 2 * n + 14 * n / 8);
        assert_eq!(total(ZeroStage::Three, 8), 2 * n);
        assert!(ZeroStage::ALL.iter().all(|stage| total(*stage, 1) == 16 * n));
    }

    #[test]
    fn stage_4_and_no_device_are_refused() {
        assert!(
            ZeroStage::from_number(4).unwrap_err().to_string().starts_with("ZeRO stage 4 does not exist")
        );
        assert!(Sharding::new(ZeroStage::One, 0).unwrap_err().to_string().contains("devices is 0"));
    }
}
