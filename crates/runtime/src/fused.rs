//! Elementwise chains and normalisations as one pass over memory, forward and backward.
//!
//! [`swiglu`] and [`gradients`] are ordinary functions on tensors that record nothing: a hand-written
//! [`Function`](crate::autograd::Function) is their caller. [`norm`] has one at hand; [`elementwise`] makes the pass, and its
//! derivative, from an expression, and is a node of the graph by itself. On the CPU the pass is written in Rust and
//! vectorized; on other devices it is the shortest chain of
//! libtorch's operators that works in place.

pub mod cross_entropy;
pub mod elementwise;
pub mod gradients;
pub mod norm;
pub mod swiglu;
