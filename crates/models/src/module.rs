//! Modules: things with named tensors and named parts.
//!
//! A [`Module`] says once, in [`Module::visit`], what its tensors and parts are called; names, counts, state dicts, freezing
//! and the list that an optimizer takes are functions of that (here and in [`crate::state_dict`]). Names are joined with dots,
//! as in PyTorch: `decoder.self_attn.in_proj_weight`.
//!
//! Four kinds of part are held as trait objects, so that a technique can put its own in the place of any of them without the
//! model knowing: a [`Projection`], an [`Mlp`], a [`Block`], a [`LossHead`]. [`Module::visit_mut`] leads an [`ModuleMapper`] to each
//! of them by name:
//!
//! ```
//! use models::module::{ModuleMapper, Module, Projection, map_modules};
//! use models::{Gpt2, Gpt2Config};
//! use tch::{Device, Kind};
//!
//! /// Remembers what it could replace.
//! struct Names(Vec<String>);
//! impl ModuleMapper for Names {
//!     fn projection(&mut self, name: &str, slot: &mut Box<dyn Projection>) -> models::Result<()> {
//!         // A technique writes `*slot = Box::new(…)` here.
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

use std::collections::BTreeSet;
use std::fmt::Debug;

use regex::Regex;
use tch::Tensor;

pub use context::{Context, Input, OwnedContext};
pub use functional_call::{FunctionalCall, SharedModule, take_block, take_mlp};

use crate::error::{Error, Result};
use crate::feed_forward::Activation;
use crate::generation::CacheShape;

/// Something with named tensors and named parts.
pub trait Module: Debug + Send {
    /// Names every tensor and part, always in the same order.
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>);

    /// Leads an [`ModuleMapper`] to every tensor and replaceable part, under the names of [`Module::visit`].
    ///
    /// # Errors
    /// Those of the mapper.
    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()>;
}

/// A linear map of the last dimension, and whatever a technique makes of it.
pub trait Projection: Module {
    /// `[…, in]` to `[…, out]`.
    ///
    /// # Errors
    /// A tensor of another width, dtype or device.
    fn forward(&self, x: &Tensor, context: &Context<'_>) -> Result<Tensor>;
    /// Width of what goes in.
    fn in_features(&self) -> i64;
    /// Width of what comes out.
    fn out_features(&self) -> i64;
}

/// The position-wise part of a block.
pub trait Mlp: Module {
    /// `[…, hidden]` to `[…, hidden]`.
    ///
    /// # Errors
    /// A tensor of another width, dtype or device.
    fn forward(&self, x: &Tensor, context: &Context<'_>) -> Result<Tensor>;

    /// What it computes, for a technique that computes the same in another way.
    fn form(&self) -> MlpForm {
        MlpForm::Other
    }
}

/// What an [`Mlp`] computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MlpForm {
    /// (SiLU(x·Gᵀ + b) ⊙ (x·Uᵀ + b))·Dᵀ + b of the projections `gate_proj`, `up_proj` and `down_proj`.
    Swiglu,
    /// f(x·W₁ᵀ + b₁)·W₂ᵀ + b₂.
    FeedForward {
        /// What the two projections are called.
        names: [&'static str; 2],
        /// f.
        activation: Activation,
        /// Probability that an element of f's result is dropped in training.
        dropout: f64,
    },
    /// One that computes its products itself, to recompute them in backward: no projection in it can be replaced.
    Recomputed,
    /// Anything else, among it an MLP that a technique has wrapped.
    Other,
}

/// A layer of a decoder.
pub trait Block: Module {
    /// `[batch, sequence, hidden]` to the same.
    ///
    /// # Errors
    /// A tensor of another shape, dtype or device than the layer's.
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor>;
}

/// The last projection and the loss, which a technique may compute as one.
pub trait LossHead: Module {
    /// `[batch, sequence, hidden]` to `[batch, sequence, vocabulary]`.
    ///
    /// # Errors
    /// A tensor of another width, dtype or device.
    fn logits(&self, hidden_btd: &Tensor, context: &Context<'_>) -> Result<Tensor>;

    /// The summed loss of every position that has a label, over `hidden_btd` `[batch, sequence, hidden]` and `labels_bt`
    /// `[batch, sequence]` (int64, the token to predict at each position; [`IGNORED`] where there is none). With
    /// [`Context::accuracy`] the right predictions are counted too, which costs a pass over the logits.
    ///
    /// # Errors
    /// Shapes that do not fit, another dtype or device.
    fn loss(&self, hidden_btd: &Tensor, labels_bt: &Tensor, context: &Context<'_>) -> Result<LossOutput>;
}

/// The label of a position that has nothing to predict.
pub const IGNORED: i64 = -100;

/// What a [`LossHead`] computed. Divide by a number of labels to get a mean: that of this batch, or of all batches whose
/// gradients are summed before a step.
#[derive(Debug)]
pub struct LossOutput {
    /// Cross-entropy in nats, summed over the labelled positions: a scalar with a graph.
    pub sum: Tensor,
    /// How many labelled positions were predicted right, where that was asked for: an int64 scalar without a graph.
    pub correct: Option<Tensor>,
}

/// A decoder that predicts the next token.
pub trait LanguageModel: Module {
    /// What the head takes: `[batch, sequence, hidden]`.
    ///
    /// # Errors
    /// Tokens outside the vocabulary, more positions than the model has, another dtype or device.
    fn hidden(&self, input: &Input<'_>) -> Result<Tensor>;

    /// The head.
    fn head(&self) -> &dyn LossHead;

    /// Number of tokens that the model knows.
    fn vocabulary(&self) -> i64;

    /// The longest row that it takes.
    fn max_sequence(&self) -> i64;

    /// What its layers keep of a token that was read, where they take part in [`Context::extension`]; `None` where they do not,
    /// and [`generate`](crate::generation::generate) reads whole rows again for each token.
    fn cache_shape(&self) -> Option<CacheShape> {
        None
    }

    /// Its configuration, a flat JSON object: what the shapes of its tensors do not say, such as the number of heads, is
    /// compared when a training goes on. Null where it has none.
    fn config(&self) -> serde_json::Value {
        serde_json::Value::Null
    }

    /// `[batch, sequence, vocabulary]`.
    ///
    /// # Errors
    /// As [`LanguageModel::hidden`].
    fn logits(&self, input: &Input<'_>) -> Result<Tensor> {
        self.head().logits(&self.hidden(input)?, &input.context)
    }

    /// The loss of `labels_bt`: see [`LossHead::loss`].
    ///
    /// # Errors
    /// As [`LanguageModel::hidden`] and [`LossHead::loss`].
    fn loss(&self, input: &Input<'_>, labels_bt: &Tensor) -> Result<LossOutput> {
        self.head().loss(&self.hidden(input)?, labels_bt, &input.context)
    }
}

/// What a tensor is to its module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Learned.
    Parameter,
    /// Part of the state, not learned.
    Buffer,
}

/// Collects names on the way through a module.
pub struct Visitor<'a, 'f> {
    path: String,
    found: &'f mut dyn FnMut(&str, &'a Tensor, Role),
}

impl<'a> Visitor<'a, '_> {
    /// A learned tensor.
    pub fn parameter(&mut self, name: &str, tensor: &'a Tensor) {
        self.tensor(name, tensor, Role::Parameter);
    }

    /// A learned tensor that may be left out.
    pub fn optional_parameter(&mut self, name: &str, tensor: Option<&'a Tensor>) {
        if let Some(tensor) = tensor {
            self.parameter(name, tensor);
        }
    }

    /// A tensor of the state that is not learned.
    pub fn buffer(&mut self, name: &str, tensor: &'a Tensor) {
        self.tensor(name, tensor, Role::Buffer);
    }

    /// A part with tensors of its own. An empty name puts them beside those of this module.
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

/// What is done at each tensor and replaceable part; a method left out does nothing. Where a part is replaced, the way
/// goes on into the new one.
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

/// Leads an [`ModuleMapper`] through a module.
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
        /// A replaceable MLP.
        mlp: Mlp;
        /// A replaceable block.
        block: Block;
        /// A replaceable loss head.
        loss_head: LossHead;
    }

    /// A learned tensor.
    ///
    /// # Errors
    /// Those of the mapper.
    pub fn parameter(&mut self, name: &str, tensor: &mut Tensor) -> Result<()> {
        self.tensor(name, tensor, Role::Parameter)
    }

    /// A learned tensor that may be left out.
    ///
    /// # Errors
    /// Those of the mapper.
    pub fn optional_parameter(&mut self, name: &str, tensor: Option<&mut Tensor>) -> Result<()> {
        tensor.map_or(Ok(()), |tensor| self.parameter(name, tensor))
    }

    /// A tensor of the state that is not learned.
    ///
    /// # Errors
    /// Those of the mapper.
    pub fn buffer(&mut self, name: &str, tensor: &mut Tensor) -> Result<()> {
        self.tensor(name, tensor, Role::Buffer)
    }

    /// A part that is not replaceable.
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

/// Appends a name to a path, and gives the length to cut it back to.
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
pub struct Named<'a> {
    /// Its path.
    pub name: String,
    /// The tensor.
    pub tensor: &'a Tensor,
    /// Whether it is learned.
    pub role: Role,
}

/// Every tensor of the state, in order. One that two parts share is listed once, under its first name.
pub fn tensors(module: &(impl Module + ?Sized)) -> Vec<Named<'_>> {
    let (mut list, mut seen) = (Vec::new(), BTreeSet::new());
    let mut found = |name: &str, tensor, role| {
        if seen.insert(identity(tensor)) {
            list.push(Named { name: name.to_owned(), tensor, role });
        }
    };
    module.visit(&mut Visitor { path: String::new(), found: &mut found });
    list
}

/// Every learned tensor with its name, in order; a shared one once.
pub fn parameters(module: &(impl Module + ?Sized)) -> Vec<(String, &Tensor)> {
    let all = tensors(module).into_iter();
    all.filter(|named| named.role == Role::Parameter).map(|named| (named.name, named.tensor)).collect()
}

/// The learned tensors that require a gradient, with their names, in order.
pub fn trainable(module: &(impl Module + ?Sized)) -> Vec<(String, &Tensor)> {
    parameters(module).into_iter().filter(|(_, tensor)| tensor.requires_grad()).collect()
}

/// How many numbers a module learns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParameterCount {
    /// All of them.
    pub total: u64,
    /// Those that are not frozen.
    pub trainable: u64,
}

/// Counts the learned numbers; a shared tensor once.
pub fn parameter_count(module: &(impl Module + ?Sized)) -> ParameterCount {
    let mut count = ParameterCount { total: 0, trainable: 0 };
    for (_, tensor) in parameters(module) {
        let numel = tensor.numel() as u64;
        count.total += numel;
        count.trainable += if tensor.requires_grad() { numel } else { 0 };
    }
    count
}

/// Freezes (or, with `frozen` false, unfreezes) every learned tensor whose whole name matches `pattern`, a regular
/// expression such as `h\.[0-3]\..*` or `.*bias`. Returns their names.
///
/// # Errors
/// A pattern that is not a regular expression, or that matches no name.
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

/// What makes a tensor the same as another: where its values lie. Empty tensors are all different.
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
