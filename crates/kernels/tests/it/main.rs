//! The tests of `kernels` that need only its public interface: one binary, a module per behaviour.

mod adam;
mod attention_documents;
mod attention_sinks;
mod autograd_captured;
mod autograd_retain;
mod blocks;
mod causal_attention;
mod cross_entropy;
mod delta_rule;
mod empty;
mod kernels_cuda;
mod kernels_interpreted;
mod lazy_views;
mod linear;
mod movable_memory;
mod nf4;
mod norm;
mod norm_memory;
mod physical;
mod rope;
mod rope_memory;
mod stochastic_rounding;
mod swiglu;
