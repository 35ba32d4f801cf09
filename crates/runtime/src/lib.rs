//! Features of libtorch that `tch` lacks.
//!
//! `tch` binds libtorch's operators. Training with little memory needs more of libtorch:
//!
//! | module | contents |
//! |---|---|
//! | [`autograd`] | functions whose backward is written by hand, recomputation, a gradient check |
//! | [`device`] | the device from a flag; streams, events, pinned memory, for CPU and CUDA behind the same types |
//! | [`collectives`] | tensors between processes: gathers, ordered reductions, barriers; starting ranks |
//! | [`memory`] | live and peak bytes of the allocators, the peak of a region of code |
//! | [`profile`] | traces for Perfetto, named ranges, an exact count of FLOPs and bytes |
//! | [`measure`] | warm-up, repeats, phases, median and spread |
//! | [`ops`] | every operator by its name, and typed functions over the ones training needs |
//! | [`precision`] | the interface through which models compute in mixed precision |
//! | [`file`](mod@file) | tensors over a file's pages, or read from it into existing memory |
//! | [`file_memory`] | tensors whose memory is an unnamed file |
//! | [`tensor_layout`] | a tensor's shape, strides, dtype, device and addresses from one call |
//! | [`tensor_memory`] | a tensor's identity, address range and version, for kernels that read and write memory themselves |
//! | [`parallel`] | tasks on libtorch's own threads |
//! | [`shared_library`] | libraries that are loaded at run time |
//! | [`random`] | seeds and the state of the random generators |
//! | [`signals`] | which signals this process ignores |
//! | [`wait_policy`] | how libtorch's CPU threads wait for each other: what a program on a busy machine does |
//!
//! # What is the process's, not the caller's
//!
//! Where a driver of CUDA is visible, a program that links this crate opens `libtorch_cuda` before `main`, as `import torch` does, because
//! libtorch asks once per process whether CUDA exists, and a seed, pinned memory or a trace on the CPU asks it. An empty
//! `CUDA_VISIBLE_DEVICES` prevents that, and saves the time and the memory. Shared by all of a process are also the default generators
//! ([`random::seed`]), the allocators' counts and limits ([`memory`]), and the handlers of [`files::mapped::report_shortened_files`].
//!
//! All `unsafe` code of the crate and the workspace's only C++ are behind these modules: `src/sys` and `cpp`. A failure of
//! libtorch is an [`Error`] with libtorch's message and without its C++ stack; no argument causes a panic.
//!
//! ```
//! use runtime::{autograd, device, memory};
//! use tch::{Kind, Tensor};
//!
//! let device = device::select("cpu")?;
//! let region = memory::Region::start(device)?;
//! let x = Tensor::f_randn([64, 64], (Kind::Float, device))?.set_requires_grad(true);
//! let [y] = autograd::checkpoint(|[x]| Ok([x.f_gelu("none")?.f_sum(Kind::Float)?]), [&x])?;
//! autograd::backward(&[&y])?;
//! println!("peak {} B", region.finish()?.peak);
//! # Ok::<(), runtime::Error>(())
//! ```

pub mod autograd;
pub mod collectives;
pub mod device;
pub mod error;
pub mod file;
pub mod file_memory;
pub mod measure;
pub mod memory;
pub mod ops;
pub mod precision;
pub mod profile;
pub mod random;
pub mod shared_library;
pub mod signals;
mod sys;
pub mod wait_policy;

pub use error::{Error, Result};
pub use sys::layout as tensor_layout;
pub use sys::parallel;
pub use sys::tensor as tensor_memory;

/// Returns the version of libtorch, such as `2.11.0`.
pub fn torch_version() -> &'static str {
    sys::torch_version()
}
