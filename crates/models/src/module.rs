//! Modules with named tensors and replaceable parts.
//!
//! [`Module::visit`] names a module's tensors and parts. Parameter lists, counts, state dicts and freezing are functions of it
//! (here and in [`crate::state_dict`]). Names are joined with dots, as in PyTorch: `decoder.self_attn.in_proj_weight`.
//!
//! Five kinds of part are trait objects, which a technique can replace without the model knowing: [`Projection`],
//! [`Attention`], [`Mlp`], [`Block`] and [`LossHead`]. An [`Embedding`](crate::Embedding) can be changed in place. [`map_modules`] calls a
//! [`ModuleMapper`] with each of them and its name:
//!
//! ```
//! use models::module::{ModuleMapper, Module, Projection, map_modules};
//! use models::{Gpt2, Gpt2Config};
//! use tch::{Device, Kind};
//!
//! /// Lists the projections.
//! struct Names(Vec<String>);
//! impl ModuleMapper for Names {
//!     fn projection(&mut self, name: &str, slot: &mut Box<dyn Projection>) -> models::Result<()> {
//!         // To replace the projection: `*slot = Box::new(…)`.
//!         self.0.push(format!("{name}: {} -> {}", slot.in_features(), slot.out_features()));
//!         Ok(())
//!     }
//! }
//!
//! let config = Gpt2Config { vocabulary: 100, max_sequence: 16, hidden: 8, heads: 2, layers: 1, ..Gpt2Config::small() };
//! let mut model = Gpt2::new(&config, (Kind::Float, Device::Cpu))?;
//! let mut names = Names(Vec::new());
//! map_modules(&mut model, &mut names)?;
//! assert_eq!(
//!     names.0,
//!     ["h.0.attn.c_attn: 8 -> 24", "h.0.attn.c_proj: 8 -> 8", "h.0.mlp.c_fc: 8 -> 32", "h.0.mlp.c_proj: 32 -> 8", "lm_head: 8 -> 100"]
//! );
//! # Ok::<(), models::Error>(())
//! ```

mod context;
mod finite;
mod functional_call;
mod named_tensors;
mod replace;
mod visitor;

use std::fmt::Debug;

use kernels::low_rank::Affine;
use runtime::ops::TryScalar;
use tch::Tensor;

pub use context::{Context, Input, OwnedContext};
pub use finite::{first_non_finite, first_non_finite_of};
pub use functional_call::{FunctionalCall, SharedModule};
pub use named_tensors::{
    NamedTensor, ParameterCount, freeze, parameter_count, parameters, tensors, trainable,
};
pub use replace::{Replaceable, replace, try_replace};
pub use visitor::{ModuleMapper, Role, Visitor, VisitorMut, map_modules};

use crate::activation::Activation;
use crate::distillation::{DistillationConfig, DistilledLoss, OutputProjection, Teacher};
use crate::error::{Error, Result};
use crate::key_value_cache::CacheShape;
use crate::token_rows::TokenRows;

/// Has named tensors and named parts.
pub trait Module: Debug + Send {
    /// Visits every tensor and part with its name, always in the same order.
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>);

    /// Visits every tensor and replaceable part mutably, under the names of [`Module::visit`].
    ///
    /// # Errors
    /// Errors of the mapper.
    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()>;
}

/// A linear map of the last dimension; a technique may replace it.
pub trait Projection: Module {
    /// Maps `[…, in]` to `[…, out]`.
    ///
    /// # Errors
    /// A tensor of the wrong width, dtype or device.
    fn forward(&self, x: &Tensor, context: &Context<'_>) -> Result<Tensor>;
    /// Returns this forward as tensors, if it is x·Wᵀ + b with low-rank terms and nothing else, for callers that run several projections of
    /// one input as one function; the masks of its dropout are drawn here. `None`, the default, for any other computation.
    ///
    /// # Errors
    /// As [`Projection::forward`].
    fn affine(&self, _x: &Tensor, _context: &Context<'_>) -> Result<Option<Affine<'_>>> {
        Ok(None)
    }
    /// Width of the input.
    fn in_features(&self) -> i64;
    /// Width of the output.
    fn out_features(&self) -> i64;
}

/// The part of a block in which positions see each other.
pub trait Attention: Module {
    /// Maps the normalised residual stream `[batch, sequence, hidden]` to the update of it.
    ///
    /// # Errors
    /// A tensor of the wrong shape, dtype or device.
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor>;

    /// Maps [`Attention::forward`]'s input, and the values of other layers after it, to its result and the values that other layers need
    /// of this one: keys and values that layers share. See [`Block::forward_with`].
    ///
    /// # Errors
    /// As [`Attention::forward`]; another number of values.
    fn forward_with(&self, values: &[&Tensor], context: &Context<'_>) -> Result<Vec<Tensor>> {
        Ok(vec![self.forward(only(values)?, context)?])
    }
}

/// The position-wise part of a block.
pub trait Mlp: Module {
    /// Maps `[…, hidden]` to `[…, hidden]`.
    ///
    /// # Errors
    /// A tensor of the wrong width, dtype or device.
    fn forward(&self, x: &Tensor, context: &Context<'_>) -> Result<Tensor>;

    /// The function that it computes, for techniques that compute the same in another way.
    fn function(&self) -> MlpFunction {
        MlpFunction::Other
    }
}

/// The function that an [`Mlp`] computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MlpFunction {
    /// (SiLU(x·Gᵀ + b) ⊙ (x·Uᵀ + b))·Dᵀ + b of the projections `gate_proj`, `up_proj` and `down_proj`.
    Swiglu,
    /// The same with one projection `gate_up_proj`, whose rows are those of gate, then those of up, and `down_proj`.
    JointSwiglu,
    /// (GELU(x·Gᵀ) ⊙ x·Uᵀ)·Dᵀ with the tanh approximation, of the projections of [`MlpFunction::Swiglu`].
    Geglu,
    /// f(x·W₁ᵀ + b₁)·W₂ᵀ + b₂.
    FeedForward {
        /// Names of the two projections.
        names: [&'static str; 2],
        /// f.
        activation: Activation,
        /// Dropout probability of f's result in training.
        dropout: f64,
    },
    /// Computes its products itself, to recompute them in backward: its projections cannot be replaced.
    Recomputed,
    /// Anything else, such as an MLP that a technique has wrapped.
    Other,
}

/// A layer of a decoder.
pub trait Block: Module {
    /// Maps `[batch, sequence, hidden]` to the same shape.
    ///
    /// # Errors
    /// A tensor of the wrong shape, dtype or device.
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor>;

    /// Maps [`Block::forward`]'s input, and other values after it, to its result and the values that later layers need of this one. A
    /// model whose layers share tensors passes them through here and not through its own state: a block that is recomputed, or whose
    /// tensors are elsewhere, gets them again in backward, and their gradients add up.
    ///
    /// # Errors
    /// As [`Block::forward`]; another number of values.
    fn forward_with(&self, values: &[&Tensor], context: &Context<'_>) -> Result<Vec<Tensor>> {
        Ok(vec![self.forward(only(values)?, context)?])
    }
}

/// Returns the one value of a part that takes no others.
fn only<'a>(values: &[&'a Tensor]) -> Result<&'a Tensor> {
    match values {
        [x] => Ok(x),
        _ => {
            let reason = format!("{} values for a part of a layer that takes one", values.len());
            Err(Error::invalid("model part", reason))
        }
    }
}

/// Returns the one result of a part that has no others, for a [`Block::forward`] that is a [`Block::forward_with`].
///
/// # Errors
/// Another number of results.
pub fn one(results: Vec<Tensor>) -> Result<Tensor> {
    let [result] = <[Tensor; 1]>::try_from(results).map_err(|results| {
        let reason = format!("{} results of a part of a layer where one is expected", results.len());
        Error::invalid("model part", reason)
    })?;
    Ok(result)
}

/// The output projection and the loss, which a technique may fuse.
pub trait LossHead: Module {
    /// Maps `[batch, sequence, hidden]` to logits `[batch, sequence, vocabulary]`.
    ///
    /// # Errors
    /// A tensor of the wrong width, dtype or device.
    fn logits(&self, hidden_btd: &Tensor, context: &Context<'_>) -> Result<Tensor>;

    /// Computes the loss, summed over the labelled positions, of `hidden_btd` `[batch, sequence, hidden]` and `labels_bt`
    /// `[batch, sequence]` (int64: the token to predict at each position, or [`IGNORE_INDEX`]). With [`Context::accuracy`] it also
    /// counts correct predictions, which costs a pass over the logits. [`Context::label_weights`] are factors of the losses in the sum.
    ///
    /// # Errors
    /// Shapes that do not match, another dtype or device.
    fn loss(&self, hidden_btd: &Tensor, labels_bt: &Tensor, context: &Context<'_>) -> Result<LossOutput>;

    /// Computes the loss of each position, `[batch, sequence]` in fp32 (fp64 for fp64 inputs), 0 without a label: the negative of the
    /// logarithm of the label's probability.
    ///
    /// # Errors
    /// As [`LossHead::loss`]; a head that cannot do that, the default.
    fn token_losses(
        &self,
        _hidden_btd: &Tensor,
        _labels_bt: &Tensor,
        _context: &Context<'_>,
    ) -> Result<Tensor> {
        Err(Error::invalid("loss", "this loss head has no losses of single tokens"))
    }

    /// Computes the loss of a student, summed over the labelled positions: see [`distillation`](crate::distillation).
    ///
    /// # Errors
    /// As [`LossHead::loss`]; options outside their range; a head that cannot do that, the default.
    fn distilled_loss(
        &self,
        _hidden_btd: &Tensor,
        _labels_bt: &Tensor,
        _teacher: (&Teacher<'_>, &DistillationConfig),
        _context: &Context<'_>,
    ) -> Result<DistilledLoss> {
        Err(Error::invalid("loss", "this loss head does not learn from a teacher"))
    }

    /// Returns the output projection as tensors, if it is x·Wᵀ + b and nothing else; `None`, the default, for any other head.
    fn output_projection(&self) -> Option<OutputProjection<'_>> {
        None
    }

    /// The operations after the output projection, for techniques that compute the same in another way.
    fn transform(&self) -> LogitTransform {
        LogitTransform::default()
    }

    /// Rows that replace those of the output projection for some tokens, if there are any.
    fn token_rows(&self) -> Option<&TokenRows> {
        None
    }

    /// Replaces rows of the output projection, or no longer.
    ///
    /// # Errors
    /// A head that cannot do that, the default.
    fn set_token_rows(&mut self, rows: Option<TokenRows>) -> Result<()> {
        match rows {
            None => Ok(()),
            Some(_) => {
                Err(Error::invalid("token rows", "this loss head cannot replace rows of its projection"))
            }
        }
    }
}

/// logits = cap·tanh(scale·W·x/cap), or scale·W·x without a cap: Granite has a scale, Gemma 2 a cap.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitTransform {
    /// Factor of the output projection's results.
    pub scale: f64,
    /// Limit of a logit's magnitude.
    pub softcap: Option<f64>,
}

impl Default for LogitTransform {
    /// Returns the identity.
    fn default() -> Self {
        Self { scale: 1.0, softcap: None }
    }
}

impl LogitTransform {
    /// Transforms the output projection's results, of any shape.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn apply(&self, products: Tensor) -> Result<Tensor> {
        let scaled = if self.scale == 1.0 { products } else { products.try_mul_scalar(self.scale)? };
        Ok(match self.softcap {
            Some(cap) => scaled.try_div_scalar(cap)?.f_tanh()?.try_mul_scalar(cap)?,
            None => scaled,
        })
    }
}

/// The label of a position without a token to predict; PyTorch's `ignore_index`.
pub const IGNORE_INDEX: i64 = -100;

/// The result of a [`LossHead`].
#[derive(Debug)]
pub struct LossOutput {
    /// Cross-entropy in nats, times the weight of its label, summed over the labelled positions: a scalar that requires a gradient.
    pub sum: Tensor,
    /// Number of correct predictions, if [`Context::accuracy`] asked for it: an int64 scalar.
    pub correct: Option<Tensor>,
}

impl LossOutput {
    /// Returns the mean over `labels` positions: the labelled ones of this batch, or of all micro-batches of a step, so that the
    /// gradients of micro-batches add up to those of the whole batch.
    ///
    /// # Errors
    /// No labels.
    pub fn mean(&self, labels: usize) -> Result<Tensor> {
        if labels == 0 {
            let reason = "no position has a label, so there is no mean; leave such batches out".to_owned();
            return Err(Error::invalid("loss", reason));
        }
        Ok(self.sum.try_div_scalar(labels as f64)?)
    }
}

/// A decoder that predicts the next token.
pub trait LanguageModel: Module {
    /// Computes the head's input: `[batch, sequence, hidden]`.
    ///
    /// # Errors
    /// Tokens outside the vocabulary, more positions than the model has, another dtype or device.
    fn hidden(&self, input: &Input<'_>) -> Result<Tensor>;

    /// The head.
    fn head(&self) -> &dyn LossHead;

    /// Size of the vocabulary.
    fn vocabulary(&self) -> i64;

    /// Maximum sequence length.
    fn max_sequence(&self) -> i64;

    /// The shape of its KV cache, if its blocks support [`Context::extension`]; with `None`, generation reads whole rows again for
    /// each token.
    fn cache_shape(&self) -> Option<CacheShape> {
        None
    }

    /// The number of tokens of a row beyond which the keys of earlier tokens are others, so that a cache is read again when its rows
    /// get longer: `longrope` has other frequencies for long rows. `None` for other models.
    fn cache_limit(&self) -> Option<i64> {
        None
    }

    /// Whether a block takes and returns one value, so that one can be measured alone. Blocks that share keys do not.
    fn has_separate_blocks(&self) -> bool {
        true
    }

    /// Its configuration as a flat JSON object, which a resumed training compares: it has what the shapes of tensors do not say,
    /// such as the number of heads. Null for no configuration.
    fn config(&self) -> serde_json::Value {
        serde_json::Value::Null
    }

    /// Computes logits `[batch, sequence, vocabulary]`.
    ///
    /// # Errors
    /// As [`LanguageModel::hidden`].
    fn logits(&self, input: &Input<'_>) -> Result<Tensor> {
        self.head().logits(&self.hidden(input)?, &input.context)
    }

    /// Computes the loss: see [`LossHead::loss`].
    ///
    /// # Errors
    /// As [`LanguageModel::hidden`] and [`LossHead::loss`].
    fn loss(&self, input: &Input<'_>, labels_bt: &Tensor) -> Result<LossOutput> {
        self.head().loss(&self.hidden(input)?, labels_bt, &input.context)
    }

    /// Computes the loss of each position: see [`LossHead::token_losses`].
    ///
    /// # Errors
    /// As [`LanguageModel::hidden`] and [`LossHead::token_losses`].
    fn token_losses(&self, input: &Input<'_>, labels_bt: &Tensor) -> Result<Tensor> {
        self.head().token_losses(&self.hidden(input)?, labels_bt, &input.context)
    }

    /// Computes the loss of a student: see [`LossHead::distilled_loss`].
    ///
    /// # Errors
    /// As [`LanguageModel::hidden`] and [`LossHead::distilled_loss`].
    fn distilled_loss(
        &self,
        input: &Input<'_>,
        labels_bt: &Tensor,
        teacher: (&Teacher<'_>, &DistillationConfig),
    ) -> Result<DistilledLoss> {
        self.head().distilled_loss(&self.hidden(input)?, labels_bt, teacher, &input.context)
    }
}
