//! Tensors that a training stores on the host, and their copies on the device.
//!
//! | on the host | still on the device |
//! |---|---|
//! | parameters | those of the computing block and of the next one, or of the largest matrix outside the blocks |
//! | gradients | those of one block, or of the output or the embedding, in flight |
//! | optimizer | nothing: master weights, state and step are on the host |
//! | block inputs (only with full recomputation) | that of the computing block, and one in flight |
//!
//! DeepSpeed's ZeRO-Offload and ZeRO-Infinity (arXiv:2101.06840, arXiv:2104.07857) do this with buckets of configurable
//! sizes; here a bucket is a block.

use crate::Error;
use crate::decoder_flops::Recomputation;
use crate::recompute::Recompute;

/// Which tensors are stored on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OnHost {
    /// The parameters that the forward reads.
    pub parameters: bool,
    /// Gradients of the parameters.
    pub gradients: bool,
    /// Master weights and the optimizer's state; the step runs there.
    pub optimizer: bool,
    /// What each block keeps, if that is only its input.
    pub block_inputs: bool,
}

impl OnHost {
    /// The names for [`OnHost::with`].
    pub const NAMES: [&str; 4] = ["parameters", "gradients", "optimizer", "block-inputs"];

    /// Returns the same with one more kind of tensor, by name.
    pub fn with(mut self, name: &str) -> Result<Self, Error> {
        let known = Self::NAMES.into_iter().position(|known| known.eq_ignore_ascii_case(name));
        *match known {
            Some(0) => &mut self.parameters,
            Some(1) => &mut self.gradients,
            Some(2) => &mut self.optimizer,
            Some(_) => &mut self.block_inputs,
            None => return Err(Error::unknown("thing on the host", name, Self::NAMES)),
        } = true;
        Ok(self)
    }

    /// Returns the names of the tensors on the host.
    pub fn names(self) -> Vec<&'static str> {
        let flags = [self.parameters, self.gradients, self.optimizer, self.block_inputs];
        Self::NAMES.into_iter().zip(flags).filter(|(_, flag)| *flag).map(|(name, _)| name).collect()
    }

    /// Refuses block inputs on the host if blocks keep more than that.
    pub(crate) fn check(self, recomputation: &Recomputation) -> Result<(), Error> {
        if self.block_inputs && recomputation.checkpoint != Recompute::Full {
            return Err(Error::Shape {
                what: format!(
                    "block inputs can be on the host only where blocks keep nothing else, not with recomputation `{}`",
                    recomputation.checkpoint.name()
                ),
                remedy: "recompute in full, or keep the activations on the device".into(),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        let mut all = OnHost::default();
        for (place, name) in OnHost::NAMES.into_iter().enumerate() {
            all = all.with(name).unwrap();
            assert_eq!(all.names(), OnHost::NAMES[..=place]);
        }
        assert!(all.with("everything").unwrap_err().to_string().contains("block-inputs"));
    }
}
