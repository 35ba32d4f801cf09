//! Losses and metrics of a language model's logits.
//!
//! With logits z `[b, t, v]` and labels y `[b, t]` (the token to predict at each position), the loss of a position is −log
//! softmax(z)_y in nats; with label smoothing ε it is (1−ε) times that plus ε/v times the sum over all classes. Labels are
//! either given, with an ignore index, or come from tokens `[b, t]` and lengths `[b]`: position i of a row predicts token i+1
//! while i+1 < length. The shift moves the labels, so the logits are never copied; positions without a label are masked, not
//! selected, so that no shape depends on data and nothing waits for the device.
//!
//! Half-precision logits are converted to fp32 first. A batch without any label has loss 0, gradient 0 and accuracy 0
//! (PyTorch's mean is NaN).
//!
//! ```
//! use tch::{Kind, Tensor, kind::FLOAT_CPU};
//! use training::loss::{LmAccuracy, LmCrossEntropyLoss, perplexity};
//!
//! let logits = Tensor::zeros([1, 3, 8], FLOAT_CPU);
//! let (tokens, lengths) = (Tensor::from_slice2(&[[5i64, 2, 0]]), Tensor::from_slice(&[2i64]));
//! let loss = LmCrossEntropyLoss::default().with_lengths(&logits, &tokens, &lengths)?;
//! assert!((perplexity(loss.double_value(&[])) - 8.0).abs() < 1e-5);
//! assert_eq!(LmAccuracy::default().with_lengths(&logits, &tokens, &lengths)?.double_value(&[]), 0.0);
//! # Ok::<(), training::Error>(())
//! ```

use dataloading::IGNORE_INDEX;
use runtime::ops::TryScalar;
use tch::{Kind, Tensor};

use crate::error::{Error, Result};

/// How the losses of positions are combined.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Reduction {
    /// The mean over labelled positions.
    #[default]
    Mean,
    /// The sum, for a mean over several batches: see [`accumulation`](crate::accumulation).
    Sum,
}

/// Cross-entropy of the next token. See the [module](self).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LmCrossEntropyLoss {
    /// How the losses of positions are combined.
    pub reduction: Reduction,
    /// ε, in [0, 1].
    pub label_smoothing: f64,
    /// The label of positions to ignore.
    pub ignore_index: i64,
}

impl Default for LmCrossEntropyLoss {
    fn default() -> Self {
        Self { reduction: Reduction::Mean, label_smoothing: 0.0, ignore_index: IGNORE_INDEX }
    }
}

impl LmCrossEntropyLoss {
    /// Computes the loss of logits `[b, t, v]` for tokens `[b, t]` (int64); the first `lengths` `[b]` (int64) of each
    /// row count. Returns a scalar in fp32 (fp64 for fp64 logits).
    ///
    /// # Errors
    /// Shapes and dtypes that do not match; a token outside the vocabulary (libtorch's message).
    pub fn with_lengths(
        &self,
        logits_btv: &Tensor,
        tokens_bt: &Tensor,
        lengths_b: &Tensor,
    ) -> Result<Tensor> {
        check("LmCrossEntropyLoss", logits_btv, tokens_bt)?;
        self.with_labels(logits_btv, &labels(tokens_bt, lengths_b, self.ignore_index)?)
    }

    /// Computes the loss of logits `[b, t, v]` for labels `[b, t]` (int64), without a shift.
    ///
    /// # Errors
    /// As [`LmCrossEntropyLoss::with_lengths`]; a smoothing outside [0, 1].
    pub fn with_labels(&self, logits_btv: &Tensor, labels_bt: &Tensor) -> Result<Tensor> {
        check("LmCrossEntropyLoss", logits_btv, labels_bt)?;
        if !(0.0..=1.0).contains(&self.label_smoothing) {
            let reason = format!("label_smoothing is {}; expected a number in [0, 1]", self.label_smoothing);
            return Err(Error::config("LmCrossEntropyLoss", reason));
        }
        let logits = full_precision(logits_btv)?.f_flatten(0, 1)?;
        let labels = labels_bt.f_flatten(0, 1)?;
        let (sum, smoothing) = (tch::Reduction::Sum, self.label_smoothing);
        let sum = logits.f_cross_entropy_loss(&labels, None::<Tensor>, sum, self.ignore_index, smoothing)?;
        match self.reduction {
            Reduction::Sum => Ok(sum),
            Reduction::Mean => {
                let count = labels.try_ne(self.ignore_index)?.f_sum(sum.kind())?;
                Ok(sum.f_div(&count.try_clamp_min(1.0)?)?)
            }
        }
    }
}

/// The fraction of labelled positions whose largest logit is the label's. See the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LmAccuracy {
    /// The label of positions to ignore.
    pub ignore_index: i64,
}

impl Default for LmAccuracy {
    fn default() -> Self {
        Self { ignore_index: IGNORE_INDEX }
    }
}

impl LmAccuracy {
    /// Computes the accuracy from logits `[b, t, v]`, tokens `[b, t]` and lengths `[b]`: an fp32 scalar in [0, 1].
    ///
    /// # Errors
    /// Shapes and dtypes that do not match.
    pub fn with_lengths(
        &self,
        logits_btv: &Tensor,
        tokens_bt: &Tensor,
        lengths_b: &Tensor,
    ) -> Result<Tensor> {
        check("LmAccuracy", logits_btv, tokens_bt)?;
        self.with_labels(logits_btv, &labels(tokens_bt, lengths_b, self.ignore_index)?)
    }

    /// Computes the accuracy from logits `[b, t, v]` and labels `[b, t]`: an fp32 scalar in [0, 1].
    ///
    /// # Errors
    /// Shapes and dtypes that do not match.
    pub fn with_labels(&self, logits_btv: &Tensor, labels_bt: &Tensor) -> Result<Tensor> {
        check("LmAccuracy", logits_btv, labels_bt)?;
        let _no_grad = tch::no_grad_guard();
        let labelled = labels_bt.try_ne(self.ignore_index)?;
        let right = logits_btv.f_argmax(-1, false)?.f_eq_tensor(labels_bt)?.f_logical_and(&labelled)?;
        let count = labelled.f_sum(Kind::Float)?.try_clamp_min(1.0)?;
        Ok(right.f_sum(Kind::Float)?.f_div(&count)?)
    }
}

/// Returns the exponential of a mean loss in nats.
pub fn perplexity(mean_loss: f64) -> f64 {
    mean_loss.exp()
}

/// Returns the labels of rows of `tokens_bt` `[b, t]`, whose first `lengths_b` `[b]` tokens count: the next token, or
/// `ignore_index` at the end. All are int64.
///
/// # Errors
/// Shapes and dtypes that do not match.
pub fn labels(tokens_bt: &Tensor, lengths_b: &Tensor, ignore_index: i64) -> Result<Tensor> {
    let (tokens, lengths) = (tokens_bt.size(), lengths_b.size());
    let integers = tokens_bt.kind() == Kind::Int64 && lengths_b.kind() == Kind::Int64;
    if !integers || tokens.len() != 2 || lengths.len() != 1 || tokens[0] != lengths[0] {
        let reason = format!(
            "{tokens:?} {:?} with lengths {lengths:?} {:?}; expected Int64 [b, t] and Int64 [b]",
            tokens_bt.kind(),
            lengths_b.kind()
        );
        return Err(Error::tensor("labels", "tokens", reason));
    }
    let _no_grad = tch::no_grad_guard();
    let following = Tensor::try_arange_start(1, tokens[1] + 1, (Kind::Int64, tokens_bt.device()))?;
    // Rolled rather than shifted, so that the last position exists; it never counts, because no length is above t.
    let beyond = following.f_ge_tensor(&lengths_b.try_clamp_max(tokens[1])?.f_unsqueeze(1)?)?;
    Ok(tokens_bt.f_roll([-1], [1])?.try_masked_fill(&beyond, ignore_index)?)
}

fn full_precision(logits: &Tensor) -> Result<Tensor> {
    Ok(if logits.kind() == Kind::Double { logits.shallow_clone() } else { logits.f_to_kind(Kind::Float)? })
}

fn check(operation: &'static str, logits: &Tensor, labels: &Tensor) -> Result<()> {
    let (shape, of_labels) = (logits.size(), labels.size());
    let floating = matches!(logits.kind(), Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16);
    let refuse = |name: &str, reason: String| Err(Error::tensor(operation, name, reason));
    if shape.len() != 3 || !floating {
        return refuse(
            "logits",
            format!("{shape:?} {:?}; expected a float dtype and [b, t, v]", logits.kind()),
        );
    }
    if of_labels != shape[..2] || labels.kind() != Kind::Int64 || labels.device() != logits.device() {
        let (kind, device) = (labels.kind(), labels.device());
        let expected = format!("Int64 {:?} on {:?}, for logits {shape:?}", &shape[..2], logits.device());
        return refuse("labels", format!("{of_labels:?} {kind:?} on {device:?}; expected {expected}"));
    }
    Ok(())
}
