//! The output projection and the cross-entropy loss as one operation that never holds all logits.
//!
//! The last layer of a language model computes logits `[n, v]` from hidden states x `[n, h]` and W `[v, h]`, and the loss
//! reduces them to one number. The logits are the largest tensor of a training step: 8.4 GB in bf16 for 32 768 tokens of
//! Llama 3, twice that in fp32, and the autograd graph of separate operators holds them about three times. Only the loss and
//! its gradient need them, and both can be computed from one chunk of tokens at a time.
//!
//! For a token with target y, logits z = k·tanh(s·(W·x + b)/k) (or s·(W·x + b) without a soft cap k), l = log Σ eᶻ, label
//! smoothing ε, class weights w, token weight a, and z-loss ζ:
//!
//! ```text
//! ℓ = (1 − ε)·w_y·(l − z_y) + (ε/v)·Σ_c w_c·(l − z_c) + ζ·l²
//! L = Σ a·ℓ / Σ a·w_y          (mean; or the sum, or each a·ℓ without reduction)
//! ∂L/∂z = (u·(T + 2ζ·l))·softmax(z) − u·t,    u = a/Σ a·w_y,    t the smoothed and weighted target, T its sum
//! ```
//!
//! For each chunk of tokens with a label: one product writes the logits into a buffer; one pass over them computes l, z_y and
//! the other statistics; one pass overwrites them by ∂L/∂z ([`kernels::cross_entropy`]); two products give the
//! gradients of x and W. These are three products in all, as many as without chunks.
//!
//! ```
//! use fused_ce::LinearCrossEntropy;
//! use fused_ce::runtime::autograd::backward;
//! use fused_ce::tch::{Tensor, kind};
//!
//! let x = Tensor::randn([4, 16, 64], kind::FLOAT_CPU).set_requires_grad(true);
//! let w = Tensor::randn([1000, 64], kind::FLOAT_CPU).set_requires_grad(true);
//! let targets = Tensor::randint(1000, [4, 16], kind::INT64_CPU);
//! let loss = LinearCrossEntropy::default().loss(&x, &w, &targets)?;
//! backward(&[&loss])?;
//! assert_eq!(w.grad().size(), [1000, 64]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! With a teacher ([`Inputs::teacher`]) the loss of a token is w·ℓ + (1 − w)·D, D the divergence of the student's distribution from the
//! teacher's at a temperature ([`models::distillation`]). The teacher's logits are one product more for each chunk, of its hidden states `[n, h']`
//! and W' `[v', h']`; D and its gradient are passes over both tiles.
//!
//! [`LinearCrossEntropy::install`] replaces the loss head of a model of `models`. Further inputs (bias, token and class weights, distributions as
//! targets, an explicit denominator, a low-rank adapter, a vocabulary-parallel weight) are fields of [`Inputs`]; options and
//! further outputs (log-sum-exp, predictions, entropy) are fields of [`LinearCrossEntropy`] and [`Output`].
//! `examples/linear_cross_entropy.rs` compares the loss and its gradients with libtorch's.
//!
//! # Cost compared with PyTorch
//!
//! In bytes, for n tokens, with the element size e of the operands:
//!
//! | | `linear` and `cross_entropy` | here |
//! |---|---|---|
//! | logits and their gradient | about 3·4·n·v | the budget of a chunk ([`Chunk`]), for any n; on a GPU up to 2·v·h more |
//! | saved for backward | e·n·h and the logits | e·(n·h + v·h) (4 instead of e for fp16), or 8·n with [`Gradients::Backward`] |
//! | temporary, for low-precision weights | – | 4·v·h for the gradient of W in fp32; none in bf16 on a GPU with one chunk |
//! | products | 3 | 3, or 4 with [`Gradients::Backward`] |
//! | ignored tokens | computed | skipped |
//!
//! # Numerics
//!
//! Logits, statistics and the gradient of W are in fp32 (f64 for f64 inputs) for any dtype of the operands by default: the gradient
//! of W is summed over chunks in fp32 and rounded once, so its error does not depend on the number of chunks. On a GPU one chunk's
//! product is rounded to bf16 as it is written: so the default there is one chunk wherever that takes no more memory than chunks
//! and a sum, which saves reading and writing the sum for each chunk. The logits are rounded only on a GPU by
//! [`LinearCrossEntropy::round_logits`], and their gradient only on a GPU, or by [`LinearCrossEntropy::round_logits_gradient`].
//! Runs are deterministic: chunks depend on shapes and labels only, and sums have one order. On a CPU the result does not depend on
//! the number of threads either if every chunk has at least 32 tokens; the products of smaller chunks are libtorch's, and MKL's
//! bits depend on the threads.
//!
//! A NaN in the hidden states of a token makes its loss NaN, and with it a mean or sum; in an ignored token it changes
//! nothing. The mean of a batch in which every token is ignored is 0, or NaN as in PyTorch, by [`EmptyMean`].
//!
//! Nothing synchronises with a device: counts, denominators and upstream gradients stay there. So on a GPU ignored tokens are
//! skipped only if the number of labelled tokens is given ([`Inputs::labelled_tokens`]).
//!
//! # Errors
//!
//! Mismatched shapes, dtypes and devices, options outside their range, and a target outside the vocabulary (on a GPU only with
//! [`CheckTargets::Always`]) are errors that name the tensor and the remedy ([`enum@Error`]).
//!
//! # Sources
//!
//! Malek's `efficient_cross_entropy`; Hsu et al., "Liger Kernel", arXiv 2410.10989; Wijmans et al., "Cut Your Losses",
//! arXiv 2411.09009.

mod chunk_plan;
mod error;
mod function;
mod head;
mod inputs;
mod linear_cross_entropy;
mod options;
mod rows;
mod teacher;
mod token_loss;
pub mod vocabulary_parallel;

pub use chunk_plan::{default_budget, default_chunk_tokens, default_taught_chunk_tokens, one_chunk_tokens};
pub use error::{Error, Result};
pub use function::tiles as taught_tiles;
pub use head::LinearCrossEntropyHead;
pub use inputs::{Adapter, Denominator, Inputs, ReplacedRows, Targets};
pub use linear_cross_entropy::Output;
pub use options::{CheckTargets, Chunk, EmptyMean, Gradients, LinearCrossEntropy, LogSumExp, Reduction};

// For its callers, who then depend on this crate alone.
pub use {models, runtime, tch};
