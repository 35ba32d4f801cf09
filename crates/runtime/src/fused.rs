//! Elementwise chains and normalisations as one pass over memory, forward and backward.
//!
//! Each is an ordinary function on tensors that records nothing: a hand-written [`Function`](crate::autograd::Function)
//! is its caller ([`norm`] has it at hand). On the CPU the pass is written in Rust and vectorized; on other devices it is the shortest chain of
//! libtorch's operators that works in place.

pub mod gradients;
pub mod norm;
pub mod swiglu;
