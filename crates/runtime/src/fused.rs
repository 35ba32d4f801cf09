//! Elementwise chains and normalisations as one pass over memory, forward and backward.
//!
//! The passes of [`swiglu`] and [`gradients`] are ordinary functions on tensors that record nothing: a hand-written
//! [`Function`](crate::autograd::Function) is their caller. [`norm`], [`rope`] and [`swiglu::silu_mul`] are nodes of the graph
//! by themselves; [`elementwise`] makes such a node, and its derivative, from an expression. On the CPU the pass is written in
//! Rust and vectorized; on other devices it is the shortest chain of libtorch's operators that works in place.

pub mod adam;
pub mod cross_entropy;
pub mod elementwise;
pub mod gradients;
pub mod norm;
pub mod rope;
pub mod swiglu;
