//! The output projection and the cross-entropy as one operation that never holds all logits.
//!
//! A model's last layer turns hidden states x `[n, h]` into logits `[n, v]` by W `[v, h]`, and the loss turns these into one
//! number. With the vocabularies of today the logits are the largest tensor of a training step: for 32 768 tokens of Llama-3
//! 8.4 GB in bf16, twice that in fp32, and the graph of ordinary operators holds them about three times. They are needed for
//! nothing but the loss and its gradient, and a chunk of them is enough at a time.
//!
//! The loss of token i with target y, over logits z = k·tanh(s·(W·x + b)/k) (or s·(W·x + b) without a cap k), l = log Σ eᶻ,
//! smoothing ε, class weights w, token weight a, and z-loss ζ:
//!
//! ```text
//! ℓ = (1 − ε)·w_y·(l − z_y) + (ε/v)·Σ_c w_c·(l − z_c) + ζ·l²
//! L = Σ a·ℓ / Σ a·w_y          (a mean; or a sum, or each a·ℓ by itself)
//! ∂L/∂z = (u·(T + 2ζ·l))·softmax(z) − u·t,    u = a/Σ a·w_y,    t the smoothed and weighted target, T its sum
//! ```
//!
//! What one run does, chunk by chunk of the tokens that have a label: the logits into one buffer; one pass over them for l, z_y
//! and what else is wanted; one pass that turns them into ∂L/∂z where they lie ([`runtime::fused::cross_entropy`]); the products
//! for the gradients of x and W. Three products in all, as many as without chunks.
//!
//! ```
//! use fused_ce::LinearCrossEntropy;
//! use tch::{Tensor, kind};
//!
//! let x = Tensor::randn([4, 16, 64], kind::FLOAT_CPU).set_requires_grad(true);
//! let w = Tensor::randn([1000, 64], kind::FLOAT_CPU).set_requires_grad(true);
//! let targets = Tensor::randint(1000, [4, 16], kind::INT64_CPU);
//! let loss = LinearCrossEntropy::default().loss(&x, &w, &targets)?;
//! runtime::autograd::backward(&[&loss])?;
//! assert_eq!(w.grad().size(), [1000, 64]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A model of `models` trains this way by one line, [`install`]. More inputs and outputs (bias, weights of tokens and classes,
//! distributions as targets, an explicit denominator, a low-rank adapter, a vocabulary that ranks share; log-sum-exp, argmax,
//! entropy) are fields of [`Inputs`] and [`LinearCrossEntropy`], and come back in [`Output`].
//!
//! # What it keeps
//!
//! | | bytes |
//! |---|---|
//! | logits | the budget ([`Chunk`]), whatever n |
//! | between forward and backward | the gradients of x, W, b (fp32 until scaled for fp16 inputs), or with [`Gradients::Backward`] 8 for each token |
//! | low-precision weights, while it runs | 4·v·h for the gradient of W in fp32, and 16 MiB for casts on a CPU |
//!
//! # Numerics
//!
//! Logits, statistics and the gradient of W are in fp32 (f64 for f64), whatever the operands: W's gradient is summed over chunks
//! in fp32 and rounded once, so its error does not depend on the number of chunks. On a CPU operands of low precision are cast
//! up, so logits are not rounded to them at all. Equal runs give equal bits: the plan depends on shapes and labels alone, and
//! sums have one order. On a CPU the number of threads changes no bit either where every chunk has 32 tokens and more; the products
//! of shorter chunks are libtorch's, and MKL's bits depend on it.
//!
//! A target outside the vocabulary is an error that names it (on a CPU; see [`CheckTargets`]). A NaN in a row of hidden states
//! makes its loss NaN, and with it a mean or sum; in a row without a label it changes nothing. A mean over no label is
//! 0, or NaN as in PyTorch, by [`Empty`].
//!
//! Nothing waits for a device: counts, denominators and upstream gradients stay there. So there the rows without a label can
//! only be left out if their number is given ([`Inputs::labelled`]).
//!
//! Sources: the assignment's fused loss, after Malek's `efficient_cross_entropy`; Hsu et al., "Liger Kernel", arXiv 2410.10989;
//! Wijmans et al., "Cut Your Losses", arXiv 2411.09009.

mod chunk_plan;
mod error;
mod function;
mod head;
mod inputs;
mod linear_cross_entropy;
mod options;
mod rows;
mod token_loss;
pub mod vocabulary_parallel;

pub use chunk_plan::{default_budget, default_chunk_tokens};
pub use error::{Error, Result};
pub use head::{LinearCrossEntropyHead, install};
pub use inputs::{Adapter, Denominator, Inputs, Targets};
pub use linear_cross_entropy::Output;
pub use options::{CheckTargets, Chunk, Empty, Gradients, LinearCrossEntropy, LogSumExp, Reduction};
