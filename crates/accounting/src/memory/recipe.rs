//! Mixed-precision recipes: the number formats of a training, which determine the bytes per parameter.
//!
//! With AdamW, without activations:
//!
//! | recipe | parameters | master | gradients | state | bytes per parameter |
//! |---|---|---|---|---|---|
//! | `fp32` | 4 | – | 4 | 8 | 16 |
//! | `amp-fp16`, `amp-bf16` | 4 | – | 4 | 8 | 16, and 2 for the copies that autocast makes for a step |
//! | `bf16-master-fp32-grads` | 2 | 4 | 4 | 8 | 18 |
//! | `fp16-master`, `bf16-master` | 2 | 4 | 2 | 8 | 16 |
//! | `bf16` | 2 | – | 2 | 4 | 8 |
//!
//! `nf4` is `bf16` with the matrices of the blocks in 4.13 bits, and `gguf` with all matrices as a file has them; they cannot be trained, so
//! these are for adapters and inference.
//!
//! An 8-bit Adam replaces the 8 by 2 (and 1/32 for its scales); SGD with momentum by 4.
//!
//! Sources: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 3.1 (2 + 2 + 12 = 16); Anthony et al.,
//! "Transformer Math 101", EleutherAI 2023 (12 for AdamW with its master weights, 8 for momentum, 6 for 8-bit Adam).

use std::str::FromStr;

use crate::memory::optimizer::Optimizer;
use crate::memory::quantized::{Matrices, StoredBytes};
use crate::{Dtype, Error};

/// The number formats of a training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// The name for [`FromStr`].
    pub name: &'static str,
    /// A description.
    pub summary: &'static str,
    /// Parameters that the forward reads.
    pub parameters: Dtype,
    /// A second copy of the parameters that the optimizer updates.
    pub master: Option<Dtype>,
    /// Gradients between backward and step.
    pub gradients: Dtype,
    /// The optimizer's state, unless it is an 8-bit optimizer.
    pub state: Dtype,
    /// Matrix products and their saved tensors.
    pub compute: Dtype,
    /// The residual stream, which norms and additions work on.
    pub residual: Dtype,
    /// Whether autocast keeps a copy of each weight in `compute` during a forward and backward.
    pub casts: bool,
    /// How matrices are stored, which are frozen unless they are dense.
    pub matrices: Matrices,
}

use Dtype::{Bf16, Fp16, Fp32};

impl Recipe {
    /// Everything in fp32.
    pub const FP32: Self = Self {
        name: "fp32",
        summary: "everything in fp32",
        parameters: Fp32,
        master: None,
        gradients: Fp32,
        state: Fp32,
        compute: Fp32,
        residual: Fp32,
        casts: false,
        matrices: Matrices::Dense,
    };
    /// `torch.autocast` in fp16 (with a loss scaler) over fp32 parameters, which are the master weights.
    pub const AMP_FP16: Self = Self {
        name: "amp-fp16",
        summary: "autocast: fp32 parameters, matrix products in fp16",
        compute: Fp16,
        casts: true,
        ..Self::FP32
    };
    /// `torch.autocast` in bf16 over fp32 parameters.
    pub const AMP_BF16: Self = Self {
        name: "amp-bf16",
        summary: "autocast: fp32 parameters, matrix products in bf16",
        compute: Bf16,
        ..Self::AMP_FP16
    };
    /// bf16 parameters and gradients, fp32 master weights and state.
    pub const BF16_MASTER: Self = Self {
        name: "bf16-master",
        summary: "bf16 parameters and gradients, fp32 master weights and state",
        parameters: Bf16,
        master: Some(Fp32),
        gradients: Bf16,
        state: Fp32,
        compute: Bf16,
        residual: Bf16,
        casts: false,
        matrices: Matrices::Dense,
    };
    /// The same with gradients accumulated in fp32, as Megatron does.
    pub const BF16_MASTER_FP32_GRADS: Self = Self {
        name: "bf16-master-fp32-grads",
        summary: "bf16 parameters, fp32 gradients, master weights and state",
        gradients: Fp32,
        ..Self::BF16_MASTER
    };
    /// fp16 parameters and gradients, fp32 master weights and state: ZeRO's 16 bytes per parameter.
    pub const FP16_MASTER: Self = Self {
        name: "fp16-master",
        summary: "fp16 parameters and gradients, fp32 master weights and state",
        parameters: Fp16,
        gradients: Fp16,
        compute: Fp16,
        residual: Fp16,
        ..Self::BF16_MASTER
    };
    /// Everything in bf16. Updates smaller than 1/256 of a weight are lost to rounding.
    pub const BF16: Self = Self {
        name: "bf16",
        summary: "everything in bf16, the optimizer's state too",
        master: None,
        state: Bf16,
        ..Self::BF16_MASTER
    };
    /// bf16 parameters and gradients with the state in fp32 and without master weights: what `training`'s optimizers keep of
    /// bf16 weights that are rounded stochastically. Not among [`Recipe::ALL`], which are the recipes of the field.
    pub const BF16_FP32_STATE: Self = Self {
        name: "bf16-fp32-state",
        summary: "bf16 parameters and gradients, the optimizer's state in fp32",
        state: Fp32,
        ..Self::BF16
    };

    /// A frozen base with the matrices of its blocks in NF4, for adapters and inference.
    pub const NF4: Self = Self {
        name: "nf4",
        summary: "a frozen base: the blocks' matrices in NF4, everything else in bf16",
        matrices: Matrices::Nf4,
        ..Self::BF16
    };

    /// A frozen base whose matrices stay in the blocks of a GGUF file, with the bytes of that file.
    pub const fn blocks(stored: StoredBytes) -> Self {
        Self {
            name: "gguf",
            summary: "a frozen base: all matrices in the blocks of a GGUF file, everything else in bf16",
            matrices: Matrices::Blocks(stored),
            ..Self::BF16
        }
    }

    /// All recipes that train a whole model.
    pub const ALL: [Self; 7] = [
        Self::FP32,
        Self::AMP_FP16,
        Self::AMP_BF16,
        Self::FP16_MASTER,
        Self::BF16_MASTER,
        Self::BF16_MASTER_FP32_GRADS,
        Self::BF16,
    ];

    /// Returns whether matrices are stored in few bits.
    pub fn is_quantized(&self) -> bool {
        self.matrices != Matrices::Dense
    }

    /// Refuses a recipe whose weights cannot be trained.
    pub(crate) fn check_trained(&self) -> Result<(), Error> {
        if !self.is_quantized() {
            return Ok(());
        }
        Err(Error::Shape {
            what: "quantized weights cannot be trained".into(),
            remedy: "train adapters of them, or take another recipe".into(),
        })
    }

    /// Returns the bytes per parameter with `optimizer`: parameter, master weight, gradient and state, without the
    /// copies of autocast.
    pub fn bytes_per_parameter(&self, optimizer: Optimizer) -> f64 {
        let bits = |dtype: Dtype| dtype.storage_bits() as f64 / 8.0;
        bits(self.parameters)
            + self.master.map_or(0.0, bits)
            + bits(self.gradients)
            + optimizer.state_bytes_per_parameter(self.state)
    }
}

impl Default for Recipe {
    fn default() -> Self {
        Self::BF16_MASTER
    }
}

impl FromStr for Recipe {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let all = || Self::ALL.into_iter().chain([Self::NF4]);
        all()
            .find(|recipe| recipe.name.eq_ignore_ascii_case(text))
            .ok_or_else(|| Error::unknown("recipe", text, all().map(|recipe| recipe.name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_bytes_per_parameter() {
        let with = |recipe: Recipe, optimizer| recipe.bytes_per_parameter(optimizer);
        for recipe in
            [Recipe::FP32, Recipe::AMP_FP16, Recipe::AMP_BF16, Recipe::FP16_MASTER, Recipe::BF16_MASTER]
        {
            assert_eq!(with(recipe, Optimizer::AdamW), 16.0, "{}", recipe.name);
        }
        assert_eq!(with(Recipe::BF16_MASTER_FP32_GRADS, Optimizer::AdamW), 18.0);
        assert_eq!(with(Recipe::BF16, Optimizer::AdamW), 8.0);
        // EleutherAI counts the optimizer with its master weights: 12, 8 and 6 bytes; ours are beside 2 + 2.
        assert_eq!(with(Recipe::BF16_MASTER, Optimizer::AdamW) - 4.0, 12.0);
        assert_eq!(with(Recipe::BF16_MASTER, Optimizer::Momentum) - 4.0, 8.0);
        assert_eq!(with(Recipe::BF16_MASTER, Optimizer::Adam8bit) - 4.0, 6.0 + 1.0 / 32.0);
        assert_eq!(with(Recipe::FP32, Optimizer::Sgd), 8.0);
        assert_eq!(with(Recipe::FP32, Optimizer::AdaGrad), 12.0);
        assert_eq!(with(Recipe::FP32, Optimizer::RmsProp), 12.0);
    }
}
