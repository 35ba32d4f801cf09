//! Fused kernels: normalisations and elementwise chains in one pass over memory, forward and backward.
//!
//! The passes of [`swiglu`] and [`gradients`] are ordinary functions on tensors that record nothing, for use in a hand-written
//! [`Function`](crate::autograd::Function). [`norm`], [`rope`] and [`swiglu::silu_mul`] are nodes of the graph by themselves. On
//! the CPU the pass is written in Rust and vectorized. On CUDA [`cross_entropy`], [`dropout`], [`norm`], [`rope`] and [`swiglu`]'s passes
//! are kernels of this crate, compiled at first use, and [`loss_scale`] is only there; everything else, f64, and machines without NVRTC use
//! the shortest chain of libtorch's operators that works in place. `FRUGAL_CUDA_KERNELS=off` chooses the operators, and
//! `FRUGAL_CUDA_CHECK=1` finds the launch that failed.

pub mod adam;
pub mod attention;
pub mod cross_entropy;
pub mod dropout;
pub mod gradients;
pub mod loss_scale;
pub mod norm;
pub mod rope;
pub mod stochastic_rounding;
pub mod swiglu;
