//! What the passes of a decoder hold, operation by operation, in the order in which this workspace's own functions run them.
//!
//! A pass is a sequence of allocations and frees; a [`PeakTracker`] goes through it and keeps the most that was live. It is exact
//! where the order is: for the blocks of Llama and Qwen2 of `models`, with `lora`'s adapters or without, and for the heads of `models`
//! and `fused-ce`. Gradients of weights count from the operation that makes them, while what the forward kept goes.
//!
//! Not counted: what a library takes inside one product (packing buffers, the workspace of an attention kernel on a processor), and
//! tensors of a few bytes a row that live for one operation.

pub(crate) mod block;
pub(crate) mod head;
mod peak_tracker;

pub(crate) use peak_tracker::PeakTracker;
