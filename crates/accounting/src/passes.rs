//! The memory of a decoder's passes, operation by operation, in the order in which this workspace's own functions run.
//!
//! A pass is a sequence of allocations and frees; a [`PeakTracker`] follows it and keeps the maximum of live bytes. It is exact if the
//! order is: for the blocks of Llama, Qwen2, Qwen3, Mistral, SmolLM3, Granite, gpt-oss and Qwen3.5 in `models`, mixtures of experts included, with
//! or without `lora`'s adapters, and for the heads of `models` and `fused-ce`. Gradients of weights count from the operation that computes them, while kept tensors are freed.
//!
//! Not counted: memory inside one product (packing buffers, a thread's tiles of operands cast to fp32, the workspace of a CPU attention
//! kernel), and tensors of a few bytes per row that live for one operation.

pub(crate) mod block;
pub(crate) mod head;
mod peak_tracker;

pub(crate) use peak_tracker::PeakTracker;
