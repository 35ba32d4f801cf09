//! Options of one projection's adapter.

use crate::error::{Result, option};
use crate::init::Init;

/// Options of one projection's adapter. [`LoraConfig`](crate::LoraConfig) has the same for a whole model, in PEFT's format.
///
/// ```
/// let options = lora::LoraLinearConfig { r: 16, alpha: 32.0, dropout: 0.05, ..lora::LoraLinearConfig::default() };
/// assert_eq!(options.scaling(), 2.0);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct LoraLinearConfig {
    /// Rank, at least 1. A rank beyond the projection's widths is allowed but useless.
    pub r: i64,
    /// α; the low-rank product is scaled by α/r.
    pub alpha: f64,
    /// Dropout probability of the adapter's input, in [0, 1).
    pub dropout: f64,
    /// Whether to scale by α/√r instead (Kalajdzievski, arXiv:2312.03732).
    pub rslora: bool,
    /// Whether to train the norm of each row of W + sBA separately from its direction (Liu et al., arXiv:2402.09353).
    pub dora: bool,
    /// The initialisation of A and B.
    pub init: Init,
    /// The seed of the initialisation.
    pub seed: u64,
}

/// Maximum rank: wider than any projection, and small enough that tensor sizes do not overflow.
const MAX_RANK: i64 = 1 << 20;

impl Default for LoraLinearConfig {
    /// PEFT's defaults: rank 8, α 8.
    fn default() -> Self {
        Self { r: 8, alpha: 8.0, dropout: 0.0, rslora: false, dora: false, init: Init::default(), seed: 0 }
    }
}

impl LoraLinearConfig {
    /// Returns s in y = x·Wᵀ + s·x·Aᵀ·Bᵀ.
    pub fn scaling(&self) -> f64 {
        let r = self.r as f64;
        self.alpha / if self.rslora { r.sqrt() } else { r }
    }

    /// Refuses invalid options.
    ///
    /// # Errors
    /// A setting outside its range.
    pub fn check(&self) -> Result<()> {
        self.check_as("r")
    }

    /// As [`LoraLinearConfig::check`], where the field `rank` set the rank.
    pub(crate) fn check_as(&self, rank: &str) -> Result<()> {
        let refuse = |name: &str, value: String, expected| Err(option(name, value, expected));
        if self.r < 1 {
            return refuse(rank, self.r.to_string(), "a rank of at least 1");
        }
        if self.r > MAX_RANK {
            return refuse(rank, self.r.to_string(), "a rank of at most 1048576");
        }
        if !self.alpha.is_finite() {
            return refuse("lora_alpha", self.alpha.to_string(), "a finite number, such as twice the rank");
        }
        if self.init.has_offset() && self.alpha <= 0.0 {
            let expected = "a positive number, because PiSSA and OLoRA divide by it";
            return refuse("lora_alpha", self.alpha.to_string(), expected);
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return refuse("lora_dropout", self.dropout.to_string(), "a probability in [0, 1)");
        }
        if self.init == Init::Orthogonal && self.r % 2 != 0 {
            return refuse(rank, self.r.to_string(), "an even rank, which orthogonal initialisation needs");
        }
        Ok(())
    }
}
