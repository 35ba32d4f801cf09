//! Options of the loss: its definition, its outputs and how it is computed.

use crate::error::{Result, refused};

/// The reduction of the per-token losses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// The sum divided by a denominator: see [`Inputs::denominator`](crate::Inputs::denominator).
    #[default]
    Mean,
    /// The sum.
    Sum,
    /// No reduction: one loss per token, 0 for ignored tokens. Where nothing but the hidden states is trained, each row of their gradient
    /// is computed in forward, and backward multiplies it by the token's upstream gradient. Otherwise backward recomputes the
    /// logits: four products instead of three.
    None,
}

/// The mean of a batch in which every token is ignored, or has a weight of 0. Weights that cancel out are divided by their sum of 0, as
/// PyTorch does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EmptyMean {
    /// 0.
    #[default]
    Zero,
    /// NaN, as in PyTorch. The gradients are zero in both cases.
    Nan,
}

/// The chunk size: how many tokens have their logits in memory at a time. It depends on shapes and labels only, so that equal runs
/// compute equal numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunk {
    /// The number of tokens whose logits fit in this many bytes.
    Budget(u64),
    /// A number of tokens.
    Tokens(i64),
}

/// When gradients are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gradients {
    /// In forward, from the logits in memory: three products, and the gradients are saved until backward. Those of a differentiable
    /// log-sum-exp, and of per-token losses if more than the hidden states is trained, need the upstream gradient: they are always
    /// computed in backward.
    #[default]
    Forward,
    /// In backward, from recomputed logits: four products, and only two numbers per token are saved.
    Backward,
}

/// Whether log Σ eᶻ is returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogSumExp {
    /// Not returned.
    #[default]
    No,
    /// Returned without a graph.
    Value,
    /// Returned with a graph. Backward recomputes the logits.
    Differentiable,
}

/// Whether targets are checked against the vocabulary. On a GPU the check synchronises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CheckTargets {
    /// On the CPU only. On a GPU a target outside the vocabulary silently contributes no logit, which gives a wrong loss.
    #[default]
    OnCpu,
    /// On every device.
    Always,
}

/// The definition of the loss and how it is computed. See the [crate](crate) for the mathematics.
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
    /// The reduction of the per-token losses.
    pub reduction: Reduction,
    /// The target of ignored tokens. Their rows skip all products, on a GPU if their number is given
    /// ([`labelled_tokens`](crate::Inputs::labelled_tokens)).
    pub ignore_index: i64,
    /// ε in [0, 1]: the target becomes (1 − ε)·target + ε/vocabulary.
    pub label_smoothing: f64,
    /// ζ: adds ζ·(log Σ eᶻ)² to the loss of each token (PaLM, arXiv 2204.02311, uses 1e-4).
    pub z_loss: f64,
    /// Factor of the logits, before the soft cap.
    pub scale: f64,
    /// k: logits become k·tanh(z/k) (Gemma 2, arXiv 2408.00118, uses 30).
    pub softcap: Option<f64>,
    /// The hidden state at position t predicts the target at position t + shift of its row; the last positions have no target.
    pub shift: i64,
    /// The chunk size. `None`: 128 MiB of logits on a CPU, 1 GiB on a GPU, and there one chunk for all tokens if that takes no more
    /// memory than chunks and the sum of a weight's gradient ([`one_chunk_tokens`](crate::one_chunk_tokens)).
    pub chunk: Option<Chunk>,
    /// When gradients are computed.
    pub gradients: Gradients,
    /// Whether the gradient of the logits is rounded to bf16 for operands in bf16, in place, as PyTorch rounds it: then all products have
    /// operands in bf16, and two of three take half the time on a processor that
    /// [multiplies them faster](kernels::processor::multiplies_into_fp32). No effect on another processor; on a GPU it always is.
    pub round_logits_gradient: bool,
    /// Whether a GPU keeps the logits of a chunk in the dtype of the inputs, as PyTorch's composed operators and Liger do. In bf16 and
    /// fp16 a row takes half the bytes, so that a chunk of the same budget has twice the tokens, and the passes over it read and write
    /// half as much. The product rounds each logit by up to 2⁻⁸ of its size in bf16 and 2⁻¹¹ in fp16, where logits beyond 65,504 are
    /// infinite; the product of an adapter rounds it again, and so does a bias, scale or soft cap. Loss, predictions and gradients are
    /// those of the rounded logits; statistics and sums stay in fp32. No effect on a CPU.
    pub round_logits: bool,
    /// The mean of a batch in which every token is ignored, or has a weight of 0. Weights that cancel out are divided by their sum of 0, as
    /// PyTorch does.
    pub empty_mean: EmptyMean,
    /// Whether targets are checked against the vocabulary.
    pub check_targets: CheckTargets,
    /// Whether log Σ eᶻ is returned.
    pub log_sum_exp: LogSumExp,
    /// Whether the argmax per token and the number of correct ones are returned. Costs almost nothing.
    pub predictions: bool,
    /// Whether the entropy of the softmax per token is returned, without a graph. Costs almost nothing.
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
            round_logits_gradient: false,
            round_logits: false,
            empty_mean: EmptyMean::Zero,
            check_targets: CheckTargets::OnCpu,
            log_sum_exp: LogSumExp::No,
            predictions: false,
            entropy: false,
        }
    }
}

impl LinearCrossEntropy {
    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |reason: String| Err(refused(reason));
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
