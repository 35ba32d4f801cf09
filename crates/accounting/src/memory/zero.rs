//! The stages of ZeRO (Rajbhandari et al., arXiv:1910.02054): which tensors data-parallel devices divide.

use crate::Error;

/// The model states that are sharded over data-parallel devices.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stage_4_is_refused() {
        assert!(
            ZeroStage::from_number(4).unwrap_err().to_string().starts_with("ZeRO stage 4 does not exist")
        );
    }
}
