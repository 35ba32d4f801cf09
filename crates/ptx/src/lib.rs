//! Runs the PTX of CUDA kernels on a processor, for tests on machines without a GPU, and checks every access.
//!
//! NVRTC and `nvcc` compile CUDA C++ to PTX with no driver and no GPU. This crate executes that text, so a test runs the same
//! instructions that the GPU's assembler gets: blocks of warps whose 32 lanes run in lockstep, diverge at branches and reconverge,
//! shared memory and asynchronous copies to it, shuffles, barriers, vector loads, conversions to bf16 and fp16.
//!
//! ```
//! use ptx::{Argument, Data, Launch, Memory, Module};
//!
//! let text = "
//! .version 8.0
//! .target sm_80
//! .address_size 64
//! .visible .entry twice(.param .u64 numbers, .param .u32 count)
//! {
//!     .reg .pred %p<2>;
//!     .reg .f32 %f<3>;
//!     .reg .b32 %r<6>;
//!     .reg .b64 %rd<5>;
//!     ld.param.u64 %rd1, [numbers];
//!     ld.param.u32 %r1, [count];
//!     mov.u32 %r2, %ctaid.x;
//!     mov.u32 %r3, %ntid.x;
//!     mov.u32 %r4, %tid.x;
//!     mad.lo.s32 %r5, %r2, %r3, %r4;
//!     setp.ge.s32 %p1, %r5, %r1;
//!     @%p1 bra $END;
//!     cvta.to.global.u64 %rd2, %rd1;
//!     mul.wide.s32 %rd3, %r5, 4;
//!     add.s64 %rd4, %rd2, %rd3;
//!     ld.global.f32 %f1, [%rd4];
//!     add.f32 %f2, %f1, %f1;
//!     st.global.f32 [%rd4], %f2;
//! $END:
//!     ret;
//! }";
//! let module = Module::parse(text)?;
//! let kernel = module.kernel("twice")?;
//!
//! let mut memory = Memory::new();
//! let numbers = memory.add("numbers", Data::of(&[1f32, 2.0, 3.0]));
//! let counts = kernel.launch(Launch::new(2, 32), &[numbers.into(), Argument::U32(3)], &mut memory)?;
//! assert_eq!(memory.read::<f32>(numbers)?, [2.0, 4.0, 6.0]);
//! assert_eq!(counts.sector_ratio(), 1.0);
//!
// A count beyond the buffer: the error names the instruction and the thread.
//! let error = kernel.launch(Launch::new(2, 32), &[numbers.into(), Argument::U32(4)], &mut memory).unwrap_err();
//! assert_eq!(
//!     error.to_string(),
//!     "twice, line 22 `ld.global.f32 %f1, [%rd4]`, block 0, thread 3: 4 bytes at `numbers` + 12 (of 12 bytes) are out of bounds"
//! );
//! # Ok::<(), ptx::Error>(())
//! ```
//!
//! # What is checked
//!
//! - Each access lies in a buffer, is aligned to its width, and reads only initialised values: global memory, shared memory and
//!   registers start uninitialised.
//! - No race: two accesses to an address, at least one a write, are of one thread or have a barrier between them. That is decided
//!   by this rule and not by the order of one run; blocks are never ordered. [`Launch::seed`] changes the order in which warps and
//!   blocks run, to compare the results' bits.
//! - Barriers are reached by all threads of a block, at one instruction; masks of shuffles are the active lanes.
//! - An unknown instruction or modifier is an error when the text is parsed, never skipped.
//!
//! # What is counted
//!
//! [`Counts`] has the warps' instructions by [`Class`], sectors of global memory compared with the minimum for the same bytes, bank
//! conflicts of shared memory, and the bytes that were accessed.
//!
//! # What this proves, and what it does not
//!
//! It proves the semantics of the PTX and its access pattern. It says nothing about speed, and nothing about changes by the GPU's
//! assembler, such as fusing a product and a sum into one rounding. The approximate instructions of the special-function unit are
//! correctly rounded here, while the hardware's are up to 2 units in the last place off: [`Launch::approximation_error`] adds such an
//! error, to test that a result does not depend on it.
//!
//! Grids and blocks have one dimension. Clusters, bulk copies, tensor cores, atomics, textures and calls are not supported.

mod arithmetic;
mod block;
mod control_flow;
mod convert;
mod counts;
mod decode;
mod error;
mod execute;
mod float;
mod instruction;
mod kernel;
mod memory;
mod parse;
mod races;
mod scalar;
mod token;
mod traffic;
mod warp;

pub use counts::Counts;
pub use error::{Error, Fault, FaultKind};
pub use instruction::Class;
pub use kernel::{Argument, Kernel, Launch, Module};
pub use memory::{Buffer, Data, Memory, Number};
