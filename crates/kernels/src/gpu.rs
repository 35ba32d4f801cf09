//! Whether products run as on a GPU.
//!
//! A GPU multiplies bf16 and fp16 on tensor cores, with accumulators in fp32, at about 16 times the rate of fp32, and a launch costs the
//! host more than a pass over a few rows. A CPU multiplies fp32 at least as fast as 16 bits, unless it has AMX, and starts a product for
//! less. So functions with several products have two forms, and this module alone decides which one runs:
//!
//! | | CPU | GPU |
//! |---|---|---|
//! | operands in 16 bits | cast to fp32, tile by tile | as they are |
//! | sums of several products | in fp32, rounded once | in the operands' dtype: each product adds in fp32 and rounds |
//! | projections of one input | a function each | one function ([`low_rank`](crate::low_rank)) |
//! | dequantized weights | a tile that fits the cache | tiles of 64 MiB |
//!
//! A test may [`assume`] a GPU on the CPU: then the same operators run, except for products of 16 bits into fp32, which the CPU's libtorch
//! lacks; these are computed by [`matmul`](crate::matmul) under libtorch's name, so that traces and counts are those of a GPU.

use std::cell::Cell;
use std::marker::PhantomData;

use tch::Device;

thread_local! {
    static ASSUMED: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether products of tensors on `device` run as on a GPU.
pub fn is_chosen(device: Device) -> bool {
    device.is_cuda() || device == Device::Cpu && ASSUMED.get()
}

/// Lets this thread's products on the CPU run as on a GPU until the guard is dropped. For tests: it is slower. Backward runs on the thread
/// that calls it, as the CPU's graphs do.
#[doc(hidden)]
pub fn assume() -> Assumed {
    Assumed { previous: ASSUMED.replace(true), thread: PhantomData }
}

/// The guard of [`assume`].
#[doc(hidden)]
#[derive(Debug)]
#[must_use = "the assumption ends when the guard is dropped"]
pub struct Assumed {
    previous: bool,
    thread: PhantomData<*const ()>,
}

impl Drop for Assumed {
    fn drop(&mut self) {
        ASSUMED.set(self.previous);
    }
}
