//! Kernels: operations that libtorch lacks, or that are faster in one pass over memory.
//!
//! | module | contents |
//! |---|---|
//! | [`norm`] | layer norm and RMS norm, alone or with the residual sum before them |
//! | [`rope`] | rotary position embedding |
//! | [`attention`] | causal attention and the attention of one query |
//! | [`delta_rule`] | the gated delta rule: linear attention by chunks and by tokens |
//! | [`causal_conv`] | a causal depthwise convolution with SiLU |
//! | [`swiglu`] | SiLU(gate)·up |
//! | [`dropout`] | a mask that is a function of a seed |
//! | [`cross_entropy`] | the passes over a tile of logits |
//! | [`adam`] | one step of Adam |
//! | [`adam_8bit`] | one step of AdamW with moments in 8 bits |
//! | [`lion`] | one step of Lion |
//! | [`stochastic_rounding`] | parameters in bf16 and fp16 without a copy in fp32 |
//! | [`gradients`] | scaling, unscaling and the norm of many gradients |
//! | [`loss_scale`] | the update of a loss scale on the device |
//! | [`linear`](mod@linear) | a linear layer over a weight of any dtype |
//! | [`low_rank`] | frozen projections with low-rank terms, several of one input at once |
//! | [`matmul`] | matrix products into a given output tensor, with accumulation in fp32 |
//! | [`quantized`] | frozen matrices in few bits, in NF4 or in GGUF's blocks: products that dequantize tile by tile |
//! | [`nf4`] | NF4: quantization and its tensors |
//! | [`processor`] | the choice among CPU implementations |
//! | [`gpu`] | whether products run as on a GPU |
//! | [`physical`] | the rates that a device reaches at best |
//! | [`nvrtc`] | CUDA C++ to PTX and machine code, without a GPU |
//!
//! A module is one operation: its mathematics and its public functions, its autograd `function`, and up to three implementations: `cpu`
//! in Rust, vectorized, on libtorch's own threads; `cuda`, with its source in CUDA C++ beside it, compiled at first use; and `reference`,
//! the shortest chain of libtorch's operators, for every other dtype and device. A trait such as [`cross_entropy::LogitsPass`] has them
//! behind it, `pass_for` chooses one for a device, and `Operands` checks the tensors of a pass. `FRUGAL_CUDA_KERNELS=off` chooses the
//! operators, and `FRUGAL_CUDA_CHECK=1` finds the launch that failed.
//!
//! [`norm`], [`rope`], [`swiglu::silu_mul`], [`attention`], [`delta_rule`], [`causal_conv`], [`linear`](mod@linear) and [`low_rank`] are nodes of the graph; the others record
//! nothing, and are for use in a hand-written [`Function`](runtime::autograd::Function).

pub mod adam;
pub mod adam_8bit;
#[cfg(target_arch = "x86_64")]
mod amx;
pub mod attention;
pub mod causal_conv;
mod cpu_tensor;
pub mod cross_entropy;
mod cuda;
pub mod delta_rule;
pub mod dropout;
#[cfg(test)]
mod every_kernel;
mod gemm;
pub mod gpu;
pub mod gradients;
pub mod linear;
pub mod lion;
pub mod loss_scale;
pub mod low_rank;
pub mod matmul;
mod matvec;
pub mod nf4;
pub mod norm;
pub mod nvrtc;
mod operands;
pub mod physical;
pub mod processor;
pub mod quantized;
pub mod rope;
mod simd;
pub mod stochastic_rounding;
pub mod swiglu;
pub mod uniform;
