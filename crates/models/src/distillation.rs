//! Distillation: a student learns the next-token distributions of a teacher.
//!
//! With the logits z of the student and y of the teacher over the tokens that both have, a temperature τ, p = softmax(z/τ) and
//! q = softmax(y/τ), the loss of a position with label t is
//!
//! ```text
//! ℓ = w·(−ln softmax(z)_t) + (1 − w)·D(q, p)
//! ```
//!
//! | [`Divergence`] | D | ∂D/∂z·τ |
//! |---|---|---|
//! | [`ForwardKl`](Divergence::ForwardKl) | Σ q·(ln q − ln p) | p − q |
//! | [`ReverseKl`](Divergence::ReverseKl) | Σ p·(ln p − ln q) | p·(ln p − ln q − D) |
//! | [`JensenShannon`](Divergence::JensenShannon), m = β·q + (1 − β)·p | β·Σ q·(ln q − ln m) + (1 − β)·K, K = Σ p·(ln p − ln m) | (1 − β)·p·(ln p − ln m − K) |
//!
//! The last is 0 at both ends of (0, 1), so they are divergences of their own. There is no factor τ² (Hinton et al., arXiv:1503.02531, have it to
//! keep the scale of gradients; TRL's trainers do not). Sources: Agarwal et al., arXiv:2306.13649 (GKD); TRL 1.16.
//!
//! Hidden sizes may differ, tokens may not. A head that is longer than the other, as those are that are padded to a round number, counts with
//! the tokens that both have.
//!
//! Of a [set of tokens](Teacher::TopK) with the teacher's probabilities q, such as its k most probable ones, the rest is one outcome of its
//! own: with r = 1 − Σ p and s = 1 − Σ q over the set,
//!
//! ```text
//! D = Σ q·(ln q − ln p) + s·(ln s − ln r)          ∂D/∂z·τ = p − q in the set, p·(1 − s/r) elsewhere
//! ```
//!
//! which is the forward divergence of that partition, and its gradient vanishes only where the student agrees with all of it. The other
//! divergences need the teacher's probability of tokens outside the set.

use kernels::linear::linear;
use runtime::ops::TryScalar;
use tch::{Kind, Tensor};

use crate::error::{Error, Result, wrong_shape};
use crate::module::LogitTransform;
use crate::token_rows::TokenRows;

/// How far a student's distribution is from its teacher's. See the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Divergence {
    /// Of the student from the teacher: covers all that the teacher finds probable.
    #[default]
    ForwardKl,
    /// Of the teacher from the student: leaves out what the teacher finds improbable.
    ReverseKl,
    /// Of both from their mixture.
    JensenShannon {
        /// The share of the teacher in the mixture, in (0, 1).
        beta: f64,
    },
}

/// What is learned from a teacher. See the [module](self).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DistillationConfig {
    /// D.
    pub divergence: Divergence,
    /// τ, above 0.
    pub temperature: f64,
    /// w, in [0, 1]: the share of the labels.
    pub label_weight: f64,
}

impl Default for DistillationConfig {
    /// The forward divergence at temperature 1, and no labels.
    fn default() -> Self {
        Self { divergence: Divergence::default(), temperature: 1.0, label_weight: 0.0 }
    }
}

impl DistillationConfig {
    /// Checks the options.
    ///
    /// # Errors
    /// One outside its range.
    pub fn check(&self) -> Result<()> {
        let refuse = |reason: String| Err(Error::invalid("distillation", reason));
        if !(self.temperature.is_finite() && self.temperature > 0.0) {
            return refuse(format!("the temperature is {}; expected a number above 0", self.temperature));
        }
        if !(0.0..=1.0).contains(&self.label_weight) {
            return refuse(format!(
                "the weight of the labels is {}; expected a number from 0 (the teacher alone) to 1 (the labels alone)",
                self.label_weight
            ));
        }
        match self.divergence {
            Divergence::JensenShannon { beta } if !(beta > 0.0 && beta < 1.0) => refuse(format!(
                "beta is {beta}; expected a number between 0 and 1, where the divergence is 0: the ends are the forward and the reverse \
                 divergence"
            )),
            _ => Ok(()),
        }
    }
}

/// The output projection of a model, for callers that compute its logits a part at a time.
#[derive(Debug, Clone, Copy)]
pub struct OutputProjection<'a> {
    /// W: `[vocabulary, hidden]`, also [quantized](kernels::quantized).
    pub weight: &'a Tensor,
    /// b: `[vocabulary]`.
    pub bias: Option<&'a Tensor>,
    /// What follows the product.
    pub transform: LogitTransform,
    /// Rows in place of the weight's.
    pub token_rows: Option<&'a TokenRows>,
}

impl OutputProjection<'_> {
    /// Computes logits `[…, vocabulary]` of hidden states `[…, hidden]`, in fp32 at least.
    ///
    /// # Errors
    /// A tensor of the wrong width, dtype or device.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let mut products = linear(hidden, self.weight, self.bias)?;
        if let Some(rows) = self.token_rows {
            rows.project(&mut products, hidden)?;
        }
        let logits = self.transform.apply(products)?;
        Ok(match logits.kind() {
            Kind::Half | Kind::BFloat16 => logits.f_to_kind(Kind::Float)?,
            _ => logits,
        })
    }
}

/// A teacher's next-token distributions at the positions of a batch. Nothing of it gets a gradient.
#[derive(Debug, Clone, Copy)]
pub enum Teacher<'a> {
    /// Those of a model.
    Hidden {
        /// The input of its head `[batch, sequence, hidden]`, whose width may differ from the student's.
        hidden_btd: &'a Tensor,
        /// Its head.
        projection: OutputProjection<'a>,
    },
    /// The probabilities of k tokens; for [`Divergence::ForwardKl`].
    TopK {
        /// Distinct tokens `[batch, sequence, k]`, int64.
        tokens_btk: &'a Tensor,
        /// Their log-probabilities at the temperature of the distillation `[batch, sequence, k]`, fp32.
        log_probabilities_btk: &'a Tensor,
    },
}

/// The loss of a student over the labelled positions of a batch.
#[derive(Debug)]
pub struct DistilledLoss {
    /// Σ ℓ: a scalar that requires a gradient.
    pub sum: Tensor,
    /// Σ D, without a graph: a scalar.
    pub divergence: Tensor,
    /// The summed loss of the labels, without a graph: a scalar.
    pub cross_entropy: Tensor,
    /// Number of correct predictions of labels, if asked for: an int64 scalar.
    pub correct: Option<Tensor>,
}

impl DistillationConfig {
    /// Computes D `[n]` of logits `[n, v]` of a student and `[n, u]` of a teacher over min(v, u) tokens, by operators that autograd
    /// differentiates: each of them has a tensor of the logits' size.
    ///
    /// # Errors
    /// Logits of different numbers of positions; errors of libtorch.
    pub fn divergences(&self, student_nv: &Tensor, teacher_nu: &Tensor) -> Result<Tensor> {
        let ([n, v], size) = (matrix("student", student_nv)?, matrix("teacher", teacher_nu)?);
        if size[0] != n {
            return Err(wrong_shape("distillation", "teacher", size, format!("[{n}, vocabulary]")));
        }
        let common = v.min(size[1]);
        let log_p = self.log_softmax(&student_nv.f_narrow(1, 0, common)?)?;
        let log_q = self.log_softmax(&teacher_nu.f_narrow(1, 0, common)?)?.f_to_kind(log_p.kind())?;
        let divergence = |log_a: &Tensor, log_b: &Tensor| -> Result<Tensor> {
            let terms = log_a.f_exp()?.f_mul(&log_a.f_sub(log_b)?)?;
            Ok(terms.f_sum_dim_intlist([-1i64].as_slice(), false, terms.kind())?)
        };
        match self.divergence {
            Divergence::ForwardKl => divergence(&log_q, &log_p),
            Divergence::ReverseKl => divergence(&log_p, &log_q),
            Divergence::JensenShannon { beta } => {
                let log_m =
                    log_q.try_add_scalar(beta.ln())?.f_logaddexp(&log_p.try_add_scalar((-beta).ln_1p())?)?;
                let of_teacher = divergence(&log_q, &log_m)?.try_mul_scalar(beta)?;
                Ok(of_teacher.f_add(&divergence(&log_p, &log_m)?.try_mul_scalar(1.0 - beta)?)?)
            }
        }
    }

    /// Computes D `[n]` of logits `[n, v]` of a student from a teacher's k tokens `[n, k]` and their log-probabilities, by operators that
    /// autograd differentiates.
    ///
    /// # Errors
    /// Another divergence than the forward one; errors of libtorch.
    pub fn top_k_divergences(
        &self,
        student_nv: &Tensor,
        tokens_nk: &Tensor,
        log_q_nk: &Tensor,
    ) -> Result<Tensor> {
        if self.divergence != Divergence::ForwardKl {
            return Err(Error::invalid("distillation", OUTSIDE_THE_SET));
        }
        let log_p = self.log_softmax(student_nv)?.f_gather(1, tokens_nk, false)?;
        let log_q = log_q_nk.f_to_kind(log_p.kind())?;
        let terms = log_q.f_exp()?.f_mul(&log_q.f_sub(&log_p)?)?;
        let sum = |of: &Tensor| of.f_sum_dim_intlist([-1i64].as_slice(), false, log_p.kind());
        let [log_s, log_r] = [log_rest(&log_q)?, log_rest(&log_p)?];
        Ok(sum(&terms)?.f_add(&log_s.f_exp()?.f_mul(&log_s.f_sub(&log_r)?)?)?)
    }

    fn log_softmax(&self, logits_nv: &Tensor) -> Result<Tensor> {
        let logits = match self.temperature {
            1.0 => logits_nv.shallow_clone(),
            temperature => logits_nv.try_div_scalar(temperature)?,
        };
        Ok(logits.f_log_softmax(-1, logits.kind())?)
    }
}

/// Why a set of tokens is not enough.
pub const OUTSIDE_THE_SET: &str = "a file with a teacher's k most probable tokens has no probability of the others, which only the forward divergence does without; use \
     `forward-kl`, or the teacher itself";

/// Returns ln(1 − Σ p) `[n]` of the log-probabilities `[n, k]` of some tokens, at least that of the rounding of the sum: a set of all tokens leaves
/// nothing.
///
/// # Errors
/// Errors of libtorch.
pub fn log_rest(log_p_nk: &Tensor) -> Result<Tensor> {
    let least = if log_p_nk.kind() == Kind::Double { 1e-15 } else { 1e-7 };
    let sum = log_p_nk.f_logsumexp([-1i64], false)?.try_clamp_max(-least)?;
    Ok(sum.f_expm1()?.f_neg()?.f_log()?)
}

fn matrix(name: &str, tensor: &Tensor) -> Result<[i64; 2]> {
    match tensor.size().as_slice() {
        &[n, v] => Ok([n, v]),
        other => Err(wrong_shape("distillation", name, other, "[positions, vocabulary]")),
    }
}
