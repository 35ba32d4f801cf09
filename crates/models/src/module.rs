//! Modules with named tensors and replaceable parts.
//!
//! [`Module::visit`] names a module's tensors and parts. Parameter lists, counts, state dicts and freezing are functions of it
//! (here and in [`crate::state_dict`]). Names are joined with dots, as in PyTorch: `decoder.self_attn.in_proj_weight`.
//!
//! Five kinds of part are trait objects, which a technique can replace without the model knowing: [`Projection`],
//! [`Attention`], [`Mlp`], [`Block`] and [`LossHead`]. [`map_modules`] calls a [`ModuleMapper`] with each of them and its name:
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
mod functional_call;
mod replace;

use std::collections::BTreeSet;
use std::fmt::Debug;

use regex::Regex;
use tch::Tensor;

pub use context::{Context, Input, OwnedContext};
pub use functional_call::{FunctionalCall, SharedModule};
pub use replace::{replace_attention, replace_block, replace_mlp, try_replace_block};

use crate::error::{Error, Result};
use crate::feed_forward::Activation;
use crate::key_value_cache::CacheShape;

/// Has named tensors and named parts.
pub trait Module: Debug + Send {
    /// Visits every tensor and part with its name, always in the same order.
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>);

    /// Visits every tensor and replaceable part mutably, under the names of [`Module::visit`].
    ///
    /// # Errors
    /// Those of the mapper.
    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()>;
}

/// A linear map of the last dimension; a technique may replace it.
pub trait Projection: Module {
    /// Maps `[…, in]` to `[…, out]`.
    ///
    /// # Errors
    /// A tensor of the wrong width, dtype or device.
    fn forward(&self, x: &Tensor, context: &Context<'_>) -> Result<Tensor>;
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
}

/// The position-wise part of a block.
pub trait Mlp: Module {
    /// Maps `[…, hidden]` to `[…, hidden]`.
    ///
    /// # Errors
    /// A tensor of the wrong width, dtype or device.
    fn forward(&self, x: &Tensor, context: &Context<'_>) -> Result<Tensor>;

    /// The function that it computes, for techniques that compute the same in another way.
    fn form(&self) -> MlpForm {
        MlpForm::Other
    }
}

/// The function that an [`Mlp`] computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MlpForm {
    /// (SiLU(x·Gᵀ + b) ⊙ (x·Uᵀ + b))·Dᵀ + b of the projections `gate_proj`, `up_proj` and `down_proj`.
    Swiglu,
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
    /// counts correct predictions, which costs a pass over the logits.
    ///
    /// # Errors
    /// Shapes that do not match, another dtype or device.
    fn loss(&self, hidden_btd: &Tensor, labels_bt: &Tensor, context: &Context<'_>) -> Result<LossOutput>;
}

/// The label of a position without a token to predict; PyTorch's `ignore_index`.
pub const IGNORE_INDEX: i64 = -100;

/// The result of a [`LossHead`]. Divide by the number of labels for a mean: of this batch, or of all micro-batches of a step.
#[derive(Debug)]
pub struct LossOutput {
    /// Cross-entropy in nats, summed over the labelled positions: a scalar that requires a gradient.
    pub sum: Tensor,
    /// Number of correct predictions, if [`Context::accuracy`] asked for it: an int64 scalar.
    pub correct: Option<Tensor>,
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
}

/// The role of a tensor in its module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// A trainable tensor.
    Parameter,
    /// A tensor of the state that is not trained.
    Buffer,
}

/// Visits the tensors of a module.
pub struct Visitor<'a, 'f> {
    path: String,
    found: &'f mut dyn FnMut(&str, &'a Tensor, Role),
}

impl<'a> Visitor<'a, '_> {
    /// A parameter.
    pub fn parameter(&mut self, name: &str, tensor: &'a Tensor) {
        self.tensor(name, tensor, Role::Parameter);
    }

    /// An optional parameter.
    pub fn optional_parameter(&mut self, name: &str, tensor: Option<&'a Tensor>) {
        if let Some(tensor) = tensor {
            self.parameter(name, tensor);
        }
    }

    /// A buffer.
    pub fn buffer(&mut self, name: &str, tensor: &'a Tensor) {
        self.tensor(name, tensor, Role::Buffer);
    }

    /// A submodule. With an empty name its tensors appear beside those of this module.
    pub fn part(&mut self, name: &str, part: &'a (impl Module + ?Sized)) {
        let length = enter(&mut self.path, name);
        part.visit(self);
        self.path.truncate(length);
    }

    fn tensor(&mut self, name: &str, tensor: &'a Tensor, role: Role) {
        let length = enter(&mut self.path, name);
        (self.found)(&self.path, tensor, role);
        self.path.truncate(length);
    }
}

/// Changes tensors and replaces parts of a model; see [`map_modules`]. Each method does nothing by default. After a part is replaced,
/// the new part is visited.
#[allow(unused_variables, reason = "the defaults do nothing with what they get")]
pub trait ModuleMapper {
    /// A tensor.
    ///
    /// # Errors
    /// The mapper's own.
    fn tensor(&mut self, name: &str, tensor: &mut Tensor, role: Role) -> Result<()> {
        Ok(())
    }
    /// A projection.
    ///
    /// # Errors
    /// The mapper's own.
    fn projection(&mut self, name: &str, slot: &mut Box<dyn Projection>) -> Result<()> {
        Ok(())
    }
    /// An attention.
    ///
    /// # Errors
    /// The mapper's own.
    fn attention(&mut self, name: &str, slot: &mut Box<dyn Attention>) -> Result<()> {
        Ok(())
    }
    /// An MLP.
    ///
    /// # Errors
    /// The mapper's own.
    fn mlp(&mut self, name: &str, slot: &mut Box<dyn Mlp>) -> Result<()> {
        Ok(())
    }
    /// A block.
    ///
    /// # Errors
    /// The mapper's own.
    fn block(&mut self, name: &str, slot: &mut Box<dyn Block>) -> Result<()> {
        Ok(())
    }
    /// A loss head.
    ///
    /// # Errors
    /// The mapper's own.
    fn loss_head(&mut self, name: &str, slot: &mut Box<dyn LossHead>) -> Result<()> {
        Ok(())
    }
}

/// Applies a [`ModuleMapper`] to a module.
pub struct VisitorMut<'e> {
    path: String,
    mapper: &'e mut dyn ModuleMapper,
}

macro_rules! slots {
    ($($(#[$doc:meta])* $name:ident: $part:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        /// Those of the mapper.
        pub fn $name(&mut self, name: &str, slot: &mut Box<dyn $part>) -> Result<()> {
            let length = enter(&mut self.path, name);
            let result = self.mapper.$name(&self.path, slot).and_then(|()| slot.visit_mut(self));
            self.path.truncate(length);
            result
        }
    )*};
}

impl VisitorMut<'_> {
    slots! {
        /// A replaceable projection.
        projection: Projection;
        /// A replaceable attention.
        attention: Attention;
        /// A replaceable MLP.
        mlp: Mlp;
        /// A replaceable block.
        block: Block;
        /// A replaceable loss head.
        loss_head: LossHead;
    }

    /// A parameter.
    ///
    /// # Errors
    /// Those of the mapper.
    pub fn parameter(&mut self, name: &str, tensor: &mut Tensor) -> Result<()> {
        self.tensor(name, tensor, Role::Parameter)
    }

    /// An optional parameter.
    ///
    /// # Errors
    /// Those of the mapper.
    pub fn optional_parameter(&mut self, name: &str, tensor: Option<&mut Tensor>) -> Result<()> {
        tensor.map_or(Ok(()), |tensor| self.parameter(name, tensor))
    }

    /// A buffer.
    ///
    /// # Errors
    /// Those of the mapper.
    pub fn buffer(&mut self, name: &str, tensor: &mut Tensor) -> Result<()> {
        self.tensor(name, tensor, Role::Buffer)
    }

    /// A part that cannot be replaced.
    ///
    /// # Errors
    /// Those of the mapper.
    pub fn part(&mut self, name: &str, part: &mut (impl Module + ?Sized)) -> Result<()> {
        let length = enter(&mut self.path, name);
        let result = part.visit_mut(self);
        self.path.truncate(length);
        result
    }

    fn tensor(&mut self, name: &str, tensor: &mut Tensor, role: Role) -> Result<()> {
        let length = enter(&mut self.path, name);
        let result = self.mapper.tensor(&self.path, tensor, role);
        self.path.truncate(length);
        result
    }
}

/// Appends a name to a path, and returns the length before.
fn enter(path: &mut String, name: &str) -> usize {
    let length = path.len();
    if !path.is_empty() && !name.is_empty() {
        path.push('.');
    }
    path.push_str(name);
    length
}

/// Applies `mapper` to every tensor and replaceable part of `module`.
///
/// # Errors
/// Those of the mapper.
pub fn map_modules(module: &mut (impl Module + ?Sized), mapper: &mut dyn ModuleMapper) -> Result<()> {
    module.visit_mut(&mut VisitorMut { path: String::new(), mapper })
}

/// A tensor of a module.
#[derive(Debug)]
pub struct NamedTensor<'a> {
    /// Its dotted path.
    pub name: String,
    /// The tensor.
    pub tensor: &'a Tensor,
    /// Parameter or buffer.
    pub role: Role,
}

/// Lists every tensor of the state, in order. A shared tensor is listed once, under its first name.
pub fn tensors(module: &(impl Module + ?Sized)) -> Vec<NamedTensor<'_>> {
    let (mut list, mut seen) = (Vec::new(), BTreeSet::new());
    let mut found = |name: &str, tensor, role| {
        if seen.insert(identity(tensor)) {
            list.push(NamedTensor { name: name.to_owned(), tensor, role });
        }
    };
    module.visit(&mut Visitor { path: String::new(), found: &mut found });
    list
}

/// Lists every parameter with its name, in order; a shared one once.
pub fn parameters(module: &(impl Module + ?Sized)) -> Vec<(String, &Tensor)> {
    let all = tensors(module).into_iter();
    all.filter(|named| named.role == Role::Parameter).map(|named| (named.name, named.tensor)).collect()
}

/// Lists the parameters that require a gradient, with their names, in order.
pub fn trainable(module: &(impl Module + ?Sized)) -> Vec<(String, &Tensor)> {
    parameters(module).into_iter().filter(|(_, tensor)| tensor.requires_grad()).collect()
}

/// Number of elements of all parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParameterCount {
    /// All of them.
    pub total: u64,
    /// Those that require a gradient.
    pub trainable: u64,
}

/// Counts the elements of all parameters; a shared tensor once.
pub fn parameter_count(module: &(impl Module + ?Sized)) -> ParameterCount {
    let mut count = ParameterCount { total: 0, trainable: 0 };
    for (_, tensor) in parameters(module) {
        let numel = tensor.numel() as u64;
        count.total += numel;
        count.trainable += if tensor.requires_grad() { numel } else { 0 };
    }
    count
}

/// Freezes (or, with `frozen` false, unfreezes) every parameter whose whole name matches `pattern`, a regular expression such as
/// `h\.[0-3]\..*` or `.*bias`. Returns their names.
///
/// # Errors
/// An invalid regular expression, or one that matches no name.
pub fn freeze(module: &(impl Module + ?Sized), pattern: &str, frozen: bool) -> Result<Vec<String>> {
    let whole = Regex::new(&format!("^(?:{pattern})$"))
        .map_err(|cause| Error::Pattern { pattern: pattern.to_owned(), reason: cause.to_string() })?;
    let mut names = Vec::new();
    for (name, tensor) in parameters(module) {
        if whole.is_match(&name) {
            let _ = tensor.f_set_requires_grad(!frozen)?;
            names.push(name);
        }
    }
    if names.is_empty() {
        let known: Vec<String> = parameters(module).into_iter().map(|(name, _)| name).take(8).collect();
        let reason = format!("it matches no parameter; the first are {}", known.join(", "));
        return Err(Error::Pattern { pattern: pattern.to_owned(), reason });
    }
    Ok(names)
}

/// Identifies a tensor by its memory, shape and strides. Empty tensors are all different.
fn identity(tensor: &Tensor) -> (usize, Vec<i64>, Vec<i64>) {
    let address =
        if tensor.numel() == 0 { std::ptr::from_ref(tensor) as usize } else { tensor.data_ptr() as usize };
    (address, tensor.size(), tensor.stride())
}

impl Debug for Visitor<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Visitor").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Debug for VisitorMut<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VisitorMut").field("path", &self.path).finish_non_exhaustive()
    }
}
