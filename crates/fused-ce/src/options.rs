//! What a loss is made of, and how it is computed.

use crate::error::{Error, Result};

/// How the tokens' losses become the result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// Their sum over a denominator: see [`Inputs::denominator`](crate::Inputs::denominator).
    #[default]
    Mean,
    /// Their sum.
    Sum,
    /// One for each target, 0 where it is ignored. Its backward computes the logits a second time: four products instead of
    /// three.
    None,
}

/// The mean over no token at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Empty {
    /// 0.
    #[default]
    Zero,
    /// NaN, as in PyTorch. The gradients are zeros in both.
    Nan,
}

/// How many tokens' logits exist at a time. Depends on shapes alone, so that equal runs compute equal numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunk {
    /// As many as these bytes hold.
    Budget(u64),
    /// This many.
    Tokens(i64),
}

/// When gradients are computed, where both is possible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gradients {
    /// In the forward pass, while the logits are there: three products in all, and the gradients are held until the
    /// backward. A loss for each token, and a differentiable log-sum-exp, need the upstream gradient first, and get theirs in
    /// the backward pass.
    #[default]
    Forward,
    /// In the backward pass, from logits computed again: four products, and between the passes nothing is held but two numbers
    /// for each token.
    Backward,
}

/// Whether log Σ eᶻ is returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogSumExp {
    /// It is not.
    #[default]
    No,
    /// As numbers.
    Value,
    /// With a graph. The backward computes the logits a second time.
    Differentiable,
}

/// Whether targets are looked at before they are used. To look means to wait for a device that is not the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CheckTargets {
    /// On the CPU only. Elsewhere a target outside the vocabulary adds nothing for its logit, which is wrong and silent.
    #[default]
    OnCpu,
    /// On every device.
    Always,
}

/// The loss's definition and its plan. See the [crate](crate) for the mathematics.
///
/// ```
/// use fused_ce::{Chunk, LinearCrossEntropy, Reduction};
///
/// let loss = LinearCrossEntropy {
///     label_smoothing: 0.1,
///     softcap: Some(30.0),
///     chunk: Some(Chunk::Budget(64 << 20)),
///     ..LinearCrossEntropy::default()
/// };
/// assert_eq!(loss.reduction, Reduction::Mean);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct LinearCrossEntropy {
    /// How the tokens' losses become the result.
    pub reduction: Reduction,
    /// The target that means none. Its rows take no part in any product.
    pub ignore_index: i64,
    /// ε in [0, 1]: the target becomes (1 − ε)·target + ε/vocabulary.
    pub label_smoothing: f64,
    /// ζ: adds ζ·(log Σ eᶻ)² to each token's loss (PaLM, arXiv 2204.02311, takes 1e-4).
    pub z_loss: f64,
    /// Multiplies the logits, before the cap.
    pub scale: f64,
    /// k: logits become k·tanh(z/k) (Gemma 2, arXiv 2408.00118, takes 30).
    pub softcap: Option<f64>,
    /// The hidden state at a place predicts the target this many places later in its row; the last ones predict nothing.
    pub shift: i64,
    /// How many tokens' logits exist at a time. `None`: 128 MiB of them on a CPU, 1 GiB elsewhere.
    pub chunk: Option<Chunk>,
    /// When gradients are computed.
    pub gradients: Gradients,
    /// The mean over no token.
    pub empty: Empty,
    /// Whether targets are looked at before they are used.
    pub check_targets: CheckTargets,
    /// Whether log Σ eᶻ is returned.
    pub log_sum_exp: LogSumExp,
    /// Whether each token's argmax, and how many are the target, are returned. Costs next to nothing.
    pub predictions: bool,
    /// Whether the entropy of each token's softmax is returned, as numbers. Costs next to nothing.
    pub entropy: bool,
}

impl Default for LinearCrossEntropy {
    fn default() -> Self {
        Self {
            reduction: Reduction::Mean,
            ignore_index: -100,
            label_smoothing: 0.0,
            z_loss: 0.0,
            scale: 1.0,
            softcap: None,
            shift: 0,
            chunk: None,
            gradients: Gradients::Forward,
            empty: Empty::Zero,
            check_targets: CheckTargets::OnCpu,
            log_sum_exp: LogSumExp::No,
            predictions: false,
            entropy: false,
        }
    }
}

impl LinearCrossEntropy {
    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |reason: String| Err(Error::Option(reason));
        if !(0.0..=1.0).contains(&self.label_smoothing) {
            return refuse(format!(
                "label_smoothing is {}; expected a number in [0, 1]",
                self.label_smoothing
            ));
        }
        if !(self.z_loss.is_finite() && self.z_loss >= 0.0) {
            return refuse(format!("z_loss is {}; expected a finite number of at least 0", self.z_loss));
        }
        if !(self.scale.is_finite() && self.scale != 0.0) {
            return refuse(format!("scale is {}; expected a finite number other than 0", self.scale));
        }
        if let Some(cap) = self.softcap
            && !(cap.is_finite() && cap > 0.0)
        {
            return refuse(format!("softcap is {cap}; expected a finite number above 0, or none"));
        }
        if self.shift < 0 {
            return refuse(format!("shift is {}; expected at least 0", self.shift));
        }
        if let Some(Chunk::Tokens(tokens)) = self.chunk
            && tokens < 1
        {
            return refuse(format!("a chunk of {tokens} tokens; expected at least 1"));
        }
        Ok(())
    }
}
