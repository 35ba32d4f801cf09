//! Mixtures of experts (Shazeer et al., arXiv:1701.06538): a router gives each token a few of many small SwiGLUs.
//!
//! n tokens of width H, E experts of inner width I, k of them for each token:
//!
//! ```text
//! p = softmax(x·W_rᵀ) in fp32            [n, E]    in f64 for f64
//! s = indices of the k largest p         [n, k]
//! w = p_s, or p_s / Σ p_s                [n, k]    Qwen3's `norm_topk_prob`
//! y = Σ_j w_j·expert_{s_j}(x)            [n, H]    expert(x) = (SiLU(x·Gᵀ) ⊙ x·Uᵀ)·Dᵀ
//! ```
//!
//! The experts are one autograd function. Its k·n rows, one for each token and expert, are sorted by expert, and by token within an
//! expert, so each expert that has a row computes three products over its rows of x, which are copied for one expert at a time. A row's
//! result goes to its token's slot j, and the slots are added in their order: no sum's order depends on the sorting. Beside what it keeps,
//! forward has k·H elements per token, and so does backward, and a few times H + 3·I for each row of the largest expert.
//!
//! Backward, with d = ∂L/∂y of a row's token, its weight w, g = x·Gᵀ, u = x·Uᵀ and h = SiLU(g) ⊙ u:
//!
//! ```text
//! q = d·D                  ∂L/∂w = ⟨q, h⟩        so no result of an expert is kept
//! ∂L/∂h = w·q              ∂L/∂g = ∂L/∂h ⊙ u ⊙ SiLU′(g)        ∂L/∂u = ∂L/∂h ⊙ SiLU(g)
//! ∂L/∂x = Σ_slots ∂L/∂g·G + ∂L/∂u·U
//! ∂L/∂G = (∂L/∂g)ᵀ·x       ∂L/∂U = (∂L/∂u)ᵀ·x    ∂L/∂D = (w·d)ᵀ·h
//! ```
//!
//! It keeps g and u, 2·k·I elements per token, w, and x if an expert is trained. An expert without a row gets no gradient. The gradient of
//! w reaches the router's weight and, through it, x, also where the router is frozen. The chosen indices are not differentiated; a
//! recomputed layer computes them again from the same bits, and with ties the lowest index comes first, so both runs choose alike
//! (transformers leaves ties to `topk`, whose order is not defined).
//!
//! gpt-oss's router and experts have biases, and their activation is [another](kernels::swiglu::Clamp): g = x·Gᵀ + b_G, u = x·Uᵀ + b_U,
//! expert(x) = h·Dᵀ + b_D, ∂L/∂w = ⟨q, h⟩ + ⟨d, b_D⟩, and the gradients of the biases are the sums over an expert's rows of ∂L/∂g, ∂L/∂u and w·d.
//! Its weights are the softmax of the k logits that are chosen, which is p_s / Σ p_s.
//!
//! In some families one more expert computes every token: y += σ(x·gᵀ)·shared(x) with a gate g `[1, H]`. It is an ordinary MLP, whose projections
//! adapters replace, as they do its gate.
//!
//! Each expert has tensors of its own, under the names of Hugging Face's files (`experts.3.gate_proj.weight`). An [`ExpertSource`] may load
//! the experts that have rows, in forward and in backward, instead of all of them being in memory; results do not depend on which were.
//!
//! Low-rank terms of the experts are a part of the function: [`ExpertTerm`].
//!
//! The load-balancing loss is computed with [`Context::balance`] only, as transformers adds it with `output_router_logits` only.

mod balance;
mod function;
mod low_rank;
mod routing;
mod source;

use decoder::{ClampedSwiglu, Mixture};
use kernels::matmul::wide_kind;
use kernels::quantized::is_quantized;
use kernels::swiglu::Clamp;
use runtime::autograd::apply;
use runtime::precision;
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::init::Init;
use crate::linear::{Linear, dense_kind, project};
use crate::module::{Context, Mlp, Module, Projection, Visitor, VisitorMut};
use crate::swiglu::Swiglu;
pub use balance::RouterBalance;
use function::Experts;
use low_rank::Terms;
pub use low_rank::{ExpertTensor, ExpertTerm, delta_of_expert};
use routing::{Routing, choose, weights_of};
pub use source::{ExpertChange, ExpertLoads, ExpertSlot, ExpertSource};

/// A mixture of experts with Hugging Face's names: `gate` for the router (gpt-oss: `router`), `experts.0.gate_proj` and so on. Its parts
/// cannot be replaced.
#[derive(Debug)]
pub struct SparseMlp {
    /// The router, `[experts, hidden]`.
    gate: Linear,
    experts: Vec<Expert>,
    slot: ExpertSlot,
    shared: Option<SharedExpert>,
    per_token: i64,
    normalizes: bool,
    /// The numbers of the activation of experts with biases.
    clamp: Option<Clamp>,
}

/// An expert that computes every token, and the gate of its result.
#[derive(Debug)]
struct SharedExpert {
    mlp: Swiglu,
    gate: Box<dyn Projection>,
}

/// The projections of an expert, in the order of [`decoder::EXPERT_PROJECTIONS`].
#[derive(Debug)]
struct Expert([Linear; 3]);

impl Expert {
    fn projections(&self) -> impl Iterator<Item = (&'static str, &Linear)> {
        decoder::EXPERT_PROJECTIONS.into_iter().zip(&self.0)
    }
}

impl SparseMlp {
    /// Creates a mixture for tokens of width `hidden`, with the given initialisation. With a dtype of [`kernels::nf4`] the experts are
    /// quantized, and the router is in bf16.
    ///
    /// # Errors
    /// A width below 1, too little memory.
    pub fn new(hidden: i64, mixture: &Mixture, init: Init, options: (Kind, Device)) -> Result<Self> {
        let inner = mixture.intermediate_size;
        let linear = |from, to, options| Linear::with_init(from, to, None, init, options);
        let bias = mixture.clamped.map(|_| Init::Constant(0.0));
        let biased = |from, to, options| Linear::with_init(from, to, bias, init, options);
        let expert = |_| -> Result<Expert> {
            let (gate, up) = (biased(hidden, inner, options)?, biased(hidden, inner, options)?);
            Ok(Expert([gate, up, biased(inner, hidden, options)?]))
        };
        let shared = |inner| -> Result<SharedExpert> {
            let mlp = Swiglu::new(hidden, inner, false, init, options)?;
            Ok(SharedExpert { mlp, gate: Box::new(linear(hidden, 1, options)?) })
        };
        Ok(Self {
            gate: biased(hidden, mixture.experts, (dense_kind(options.0), options.1))?,
            experts: (0..mixture.experts).map(expert).collect::<Result<_>>()?,
            slot: ExpertSlot::resident(mixture.clamped.is_some()),
            shared: mixture.shared.map(shared).transpose()?,
            per_token: mixture.per_token,
            normalizes: mixture.normalizes,
            clamp: mixture.clamped.map(|ClampedSwiglu { alpha, limit }| Clamp { alpha, limit }),
        })
    }
}

impl SparseMlp {
    /// The router's name.
    fn router(&self) -> &'static str {
        if self.clamp.is_some() { "router" } else { "gate" }
    }

    /// Returns the weights of each token's experts `[n, k]`, and the rows of each expert.
    fn route(&self, x_nh: &Tensor, balance: Option<&RouterBalance>) -> Result<(Tensor, Routing)> {
        let logits_ne = project(x_nh, &self.gate.weight, self.gate.bias.as_ref())?;
        let probabilities_ne = logits_ne.f_softmax(-1, wide_kind(logits_ne.kind()))?;
        drop(logits_ne);
        let chosen_nk = choose(&probabilities_ne, self.per_token)?;
        let probabilities_ne = match balance {
            Some(balance) => balance.of_layer(probabilities_ne, &chosen_nk)?,
            None => probabilities_ne,
        };
        let weights_nk = weights_of(&probabilities_ne, &chosen_nk, self.normalizes)?;
        Ok((weights_nk, Routing::new(&chosen_nk, self.experts.len())?))
    }

    /// Refuses streamed experts that are to be trained, or cast.
    fn check_streamed(&self, routing: &Routing, casts: bool) -> Result<()> {
        let refused = |reason: &str| Err(Error::invalid("mixture of experts", reason.to_owned()));
        if casts {
            return refused(
                "streamed experts are not cast; load the model in bfloat16 instead of mixed precision",
            );
        }
        let of = |expert: usize| self.experts[expert].projections();
        if routing.ranges().iter().any(|(expert, _)| of(*expert).any(|(_, one)| one.weight.requires_grad())) {
            return refused(
                "an expert is to be trained, but experts are streamed from where nothing is written; freeze them, or keep them in memory",
            );
        }
        Ok(())
    }
}

impl Mlp for SparseMlp {
    fn forward(&self, x: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        let shape = x.size();
        let width = shape.last().copied().unwrap_or(1);
        let x_nh = x.f_reshape([-1, width])?;
        let (weights_nk, routing) = self.route(&x_nh, context.balance)?;

        // A policy casts what the products read, as a part of the graph.
        let has_policy = precision::current().is_some();
        let kind = x_nh.kind();
        let x_nh = if has_policy { precision::operand(&x_nh)? } else { x_nh };
        let weights_nk = weights_nk.f_to_kind(x_nh.kind())?;
        let source = self.slot.source().cloned();
        if source.is_some() {
            self.check_streamed(&routing, x_nh.kind() != kind)?;
        }
        let mut inputs = vec![x_nh, weights_nk];
        for (expert, _) in routing.ranges().iter().filter(|_| source.is_none()) {
            for (_, projection) in self.experts[*expert].projections() {
                let weight = &projection.weight;
                let is_cast = has_policy && !is_quantized(weight);
                inputs.push(if is_cast { precision::weight(weight)? } else { weight.shallow_clone() });
            }
        }
        for (expert, _) in routing.ranges() {
            for bias in self.experts[*expert].0.iter().filter_map(|one| one.bias.as_ref()) {
                inputs.push(if has_policy { precision::weight(bias)? } else { bias.shallow_clone() });
            }
        }
        let terms = self.slot.change.as_ref().map(|change| change.terms()).transpose()?.unwrap_or_default();
        let mut inputs: Vec<&Tensor> = inputs.iter().collect();
        inputs.extend(terms.iter().flat_map(|term| [term.a, term.b]));
        let of_terms = Terms::new(self.experts.len(), self.slot.has_gate_and_up_in_turns(), &terms);
        let [y] = apply(Experts::new(routing, source, self.clamp, of_terms), &inputs)?;
        let y = y.f_reshape(shape.as_slice())?;
        let Some(SharedExpert { mlp, gate }) = &self.shared else { return Ok(y) };
        let gate = gate.forward(x, context)?.f_sigmoid()?;
        Ok(y.f_add(&mlp.forward(x, context)?.f_mul(&gate)?)?)
    }
}

impl Module for SparseMlp {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part(self.router(), &self.gate);
        for (index, expert) in self.experts.iter().enumerate() {
            for (name, projection) in expert.projections() {
                visitor.part(&format!("experts.{index}.{name}"), projection);
            }
        }
        if let Some(change) = &self.slot.change {
            visitor.part("experts", &**change);
        }
        if let Some(SharedExpert { mlp, gate }) = &self.shared {
            visitor.part("shared_expert", mlp);
            visitor.part("shared_expert_gate", &**gate);
        }
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.part(self.router(), &mut self.gate)?;
        for (index, expert) in self.experts.iter_mut().enumerate() {
            for (name, projection) in decoder::EXPERT_PROJECTIONS.iter().zip(&mut expert.0) {
                visitor.part(&format!("experts.{index}.{name}"), projection)?;
            }
        }
        let matrices = |expert: &Expert| expert.0.each_ref().map(|one| one.weight.shallow_clone());
        visitor.experts("experts", &self.experts.iter().map(matrices).collect::<Vec<_>>(), &mut self.slot)?;
        if let Some(change) = &mut self.slot.change {
            visitor.part("experts", &mut **change)?;
        }
        if let Some(SharedExpert { mlp, gate }) = &mut self.shared {
            visitor.part("shared_expert", mlp)?;
            visitor.projection("shared_expert_gate", gate)?;
        }
        Ok(())
    }
}
