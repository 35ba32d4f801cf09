//! Recomputation of MLPs in a model of [`models`].
//!
//! [`CheckpointLevel::install`] replaces the MLPs of a SwiGLU model (Llama and most families, Phi-3's joint projection too) or GPT-2 by
//! [`RecomputedMlp`]s with the same tensors and names, so state dicts, checkpoints, optimizer groups, freezing and offloading work as
//! before. For a model of L layers, the memory between forward and backward decreases, per token, by L times the level's saving:
//!
//! | MLP | original | [`SaveGateUp`] | [`SaveOne`] | [`InputOnly`] |
//! |---|---|---|---|---|
//! | SwiGLU | h + 3f | h + 2f | h + f, recomputes 1 product of 9 | h, recomputes 2 of 9 |
//! | GPT-2's | h + 2f | h + f | h + f | h, recomputes 1 of 6 |
//!
//! A recomputed product is half of its backward's work: if MLPs are a fraction s of a model's work, a step takes about 2s/9
//! (SwiGLU) or s/6 (GPT-2) longer at [`InputOnly`].
//!
//! [`SaveGateUp`]: CheckpointLevel::SaveGateUp
//! [`SaveOne`]: CheckpointLevel::SaveOne
//! [`InputOnly`]: CheckpointLevel::InputOnly

use kernels::linear::linear;
use kernels::swiglu::silu_mul;
use models::module::{
    Context, Mlp, MlpFunction, Module, ModuleMapper, Visitor, VisitorMut, map_modules, tensors,
};
use models::{Activation, Linear};
use runtime::precision;
use tch::Tensor;

use crate::arguments::{Sizes, Weights};
use crate::error::{self, Error, Result};
use crate::function::{check_tile, run_as_is};
use crate::gelu::{Layer, feed_forward};
use crate::level::CheckpointLevel;

impl CheckpointLevel {
    /// Replaces every MLP of `model` by one that keeps what this level says, and returns their number. If one cannot be replaced,
    /// nothing is changed. SwiGLUs compute their products with [`kernels::matmul`], whose last bits differ from libtorch's; GPT-2's
    /// MLPs give the same bits as before, but for the gradient of the second weight, whose bits MKL's small products for AVX2 change.
    ///
    /// Install adapters before this, and activation plans and offloading after it.
    ///
    /// ```
    /// use models::{Llama, DecoderConfig};
    /// use swiglu_ckpt::CheckpointLevel;
    /// use tch::{Device, Kind};
    ///
    /// let mut model = Llama::new(&DecoderConfig::llama(100, 16, 40, 2, 4), (Kind::Float, Device::Cpu))?;
    /// assert_eq!(CheckpointLevel::InputOnly.install(&mut model)?, 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Unsupported`]: an MLP with adapters, a bias, dropout or another form, or one that is already wrapped or recomputed; a level
    /// that it does not support; a model without MLPs. [`Error::Invalid`]: a tile in which no token fits.
    pub fn install(self, model: &mut dyn Module) -> Result<usize> {
        let mut plan = Prepare { level: self, mlps: Vec::new(), refused: None };
        map_modules(model, &mut plan)?;
        let Prepare { mlps, refused, .. } = plan;
        if let Some(refused) = refused {
            return Err(refused);
        }
        if mlps.is_empty() {
            return Err(error::mlp("model", "has no MLP to recompute"));
        }
        let count = mlps.len();
        map_modules(model, &mut Replace(mlps))?;
        Ok(count)
    }
}

/// An MLP that keeps part of its activations for backward and recomputes the rest. Created by [`CheckpointLevel::install`].
#[derive(Debug)]
pub struct RecomputedMlp {
    parts: Parts,
    level: CheckpointLevel,
}

#[derive(Debug)]
enum Parts {
    Swiglu { gate: Linear, up: Linear, down: Linear },
    JointSwiglu { gate_up: Linear, down: Linear },
    FeedForward { names: [&'static str; 2], up: Linear, down: Linear, activation: Activation },
}

impl RecomputedMlp {
    /// Returns the level.
    pub fn level(&self) -> CheckpointLevel {
        self.level
    }

    /// Creates an MLP with the tensors of `mlp`.
    fn of(name: &str, mlp: &dyn Mlp, level: CheckpointLevel) -> Result<Self> {
        let parts = match mlp.function() {
            MlpFunction::Swiglu => {
                let [gate, up, down] = linears(name, mlp, ["gate_proj", "up_proj", "down_proj"])?;
                if [&gate, &up, &down].iter().any(|linear| linear.bias.is_some()) {
                    let reason = "has biases, which its hand-written backward does not compute; take an activation plan \
                                  (LayerPlan::RecomputeMlp) instead";
                    return Err(error::mlp(name, reason));
                }
                let (features, hidden) = gate.weight.size2()?;
                let options = (gate.weight.kind(), gate.weight.device());
                check_tile(level, Sizes { tokens: 0, hidden, features }, options)?;
                Parts::Swiglu { gate, up, down }
            }
            MlpFunction::JointSwiglu => {
                let [gate_up, down] = linears(name, mlp, JOINT)?;
                let (hidden, features) = down.weight.size2()?;
                let options = (gate_up.weight.kind(), gate_up.weight.device());
                check_tile(level, Sizes { tokens: 0, hidden, features }, options)?;
                Parts::JointSwiglu { gate_up, down }
            }
            MlpFunction::Geglu => {
                let reason = "has a GELU as its gate, and only SwiGLU's backward is written by hand; take an activation plan \
                              (LayerPlan::RecomputeMlp) instead";
                return Err(error::mlp(name, reason));
            }
            MlpFunction::FeedForward { names, activation, dropout } => {
                if dropout > 0.0 {
                    let reason = format!(
                        "drops activations with probability {dropout}, and a hand-written backward would draw others; train it \
                         without dropout, or take an activation plan (LayerPlan::RecomputeMlp)"
                    );
                    return Err(error::mlp(name, reason));
                }
                if let CheckpointLevel::SaveAll | CheckpointLevel::InputOnlyTiled { .. } = level {
                    let reason = format!(
                        "has two layers, which do not support the level {level}; use save-one (input and first product) or input-only"
                    );
                    return Err(error::mlp(name, reason));
                }
                let [up, down] = linears(name, mlp, names)?;
                Parts::FeedForward { names, up, down, activation }
            }
            MlpFunction::Recomputed => return Err(error::mlp(name, "is already recomputed")),
            MlpFunction::Other => {
                let reason = "is not a plain SwiGLU or two-layer MLP: another technique has wrapped it, or the model has one of its \
                              own; install recomputation before activation plans and offloading";
                return Err(error::mlp(name, reason));
            }
        };
        Ok(Self { parts, level })
    }
}

/// The projections of an MLP with one for gate and up.
const JOINT: [&str; 2] = ["gate_up_proj", "down_proj"];

/// Returns the projections of these names, if each is a weight with or without a bias and there is nothing else.
fn linears<const N: usize>(name: &str, mlp: &dyn Mlp, names: [&str; N]) -> Result<[Linear; N]> {
    let mut found: [(Option<Tensor>, Option<Tensor>); N] = std::array::from_fn(|_| (None, None));
    for named in tensors(mlp) {
        let tensor = named.tensor.shallow_clone();
        let place = named
            .name
            .split_once('.')
            .and_then(|(part, rest)| Some((names.iter().position(|name| *name == part)?, rest)));
        if kernels::quantized::is_quantized(&tensor) {
            let reason = format!(
                "has `{}` quantized, which a recomputed MLP does not multiply. Leave the MLP as it is, and recompute it by an activation \
                 plan",
                named.name
            );
            return Err(error::mlp(name, reason));
        }
        match place {
            Some((index, "weight")) => found[index].0 = Some(tensor),
            Some((index, "bias")) => found[index].1 = Some(tensor),
            _ => {
                let reason = format!(
                    "has the tensor `{}` besides weights and biases, as adapters do: a recomputed MLP has no projection that they \
                     could replace. Give the adapters other target modules, or leave the MLP as it is",
                    named.name
                );
                return Err(error::mlp(name, reason));
            }
        }
    }
    let mut linears = Vec::new();
    for (name_of_part, (weight, bias)) in names.iter().zip(found) {
        let Some(weight) = weight else {
            let reason = format!("has no `{name_of_part}.weight` of its own");
            return Err(error::mlp(name, reason));
        };
        linears.push(Linear { weight, bias });
    }
    let count = linears.len();
    linears.try_into().map_err(|_| error::mlp(name, format!("has {count} layers")))
}

struct Prepare {
    level: CheckpointLevel,
    mlps: Vec<(String, RecomputedMlp)>,
    refused: Option<Error>,
}

impl ModuleMapper for Prepare {
    fn mlp(&mut self, name: &str, slot: &mut Box<dyn Mlp>) -> models::Result<()> {
        match RecomputedMlp::of(name, &**slot, self.level) {
            Ok(mlp) => self.mlps.push((name.to_owned(), mlp)),
            Err(error) => self.refused = self.refused.take().or(Some(error)),
        }
        Ok(())
    }
}

struct Replace(Vec<(String, RecomputedMlp)>);

impl ModuleMapper for Replace {
    fn mlp(&mut self, name: &str, slot: &mut Box<dyn Mlp>) -> models::Result<()> {
        if let Some(at) = self.0.iter().position(|(of, _)| of == name) {
            *slot = Box::new(self.0.swap_remove(at).1);
        }
        Ok(())
    }
}

impl Module for RecomputedMlp {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        match &self.parts {
            Parts::Swiglu { gate, up, down } => {
                visitor.part("gate_proj", gate);
                visitor.part("up_proj", up);
                visitor.part("down_proj", down);
            }
            Parts::JointSwiglu { gate_up, down } => {
                visitor.part(JOINT[0], gate_up);
                visitor.part(JOINT[1], down);
            }
            Parts::FeedForward { names, up, down, .. } => {
                visitor.part(names[0], up);
                visitor.part(names[1], down);
            }
        }
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> models::Result<()> {
        match &mut self.parts {
            Parts::Swiglu { gate, up, down } => {
                visitor.part("gate_proj", gate)?;
                visitor.part("up_proj", up)?;
                visitor.part("down_proj", down)
            }
            Parts::JointSwiglu { gate_up, down } => {
                visitor.part(JOINT[0], gate_up)?;
                visitor.part(JOINT[1], down)
            }
            Parts::FeedForward { names, up, down, .. } => {
                visitor.part(names[0], up)?;
                visitor.part(names[1], down)
            }
        }
    }
}

impl Mlp for RecomputedMlp {
    fn forward(&self, x: &Tensor, context: &Context<'_>) -> models::Result<Tensor> {
        // A forward with a cache is never differentiated, and uses the policy's own products.
        if context.extension.is_some() {
            return self.plain(x);
        }
        let computed = || -> Result<Tensor> {
            let x = precision::operand(x)?;
            match &self.parts {
                Parts::Swiglu { gate, up, down } => {
                    // Cast before it is transposed: the policy recognises the weight by its handle.
                    let [gate, up, down] = [columns(gate)?, columns(up)?, columns(down)?];
                    run_as_is(&x, Weights::Separate { gate: &gate, up: &up, down: &down }, self.level)
                }
                Parts::JointSwiglu { gate_up, down } => {
                    let [gate_up, down] = [columns(gate_up)?, columns(down)?];
                    run_as_is(&x, Weights::Fused { gate_up: &gate_up, down: &down }, self.level)
                }
                Parts::FeedForward { up, down, activation, .. } => {
                    let cast = |linear: &Linear| -> Result<Linear> {
                        let bias = linear.bias.as_ref().map(precision::weight).transpose()?;
                        Ok(Linear { weight: precision::weight(&linear.weight)?, bias })
                    };
                    let (up, down) = (cast(up)?, cast(down)?);
                    feed_forward(&x, [layer(&up), layer(&down)], *activation, self.level)
                }
            }
        };
        computed()
    }

    fn function(&self) -> MlpFunction {
        MlpFunction::Recomputed
    }
}

impl RecomputedMlp {
    /// Computes like the MLP that was replaced.
    fn plain(&self, x: &Tensor) -> models::Result<Tensor> {
        let linear = |x: &Tensor, of: &Linear| linear(x, &of.weight, of.bias.as_ref());
        Ok(match &self.parts {
            Parts::Swiglu { gate, up, down } => linear(&silu_mul(&linear(x, gate)?, &linear(x, up)?)?, down)?,
            Parts::JointSwiglu { gate_up, down } => {
                let both = linear(x, gate_up)?;
                let inner = both.size().last().copied().unwrap_or(0) / 2;
                let [gate, up] = [both.f_narrow(-1, 0, inner)?, both.f_narrow(-1, inner, inner)?];
                linear(&silu_mul(&gate, &up)?, down)?
            }
            Parts::FeedForward { up, down, activation, .. } => {
                linear(&activation.apply(&linear(x, up)?)?, down)?
            }
        })
    }
}

fn layer(linear: &Linear) -> Layer<'_> {
    Layer { weight: &linear.weight, bias: linear.bias.as_ref() }
}

/// Returns a weight `[out, in]` in the policy's dtype, as the columns `[in, out]` that [`crate::swiglu`] takes.
fn columns(linear: &Linear) -> Result<Tensor> {
    Ok(precision::weight(&linear.weight)?.f_tr()?)
}
