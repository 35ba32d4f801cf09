//! Compiles CUDA C++ to PTX and machine code with NVIDIA's run-time compiler. It needs no GPU and no driver, so kernels can be
//! checked on any machine: the crate `ptx` executes the PTX.
//!
//! NVRTC is looked up in the folder `FRUGAL_NVRTC`, beside torch's packages, in the folder `FRUGAL_CUDA_TOOLS` that
//! `cargo xtask setup --cuda-tools` fills, and on the loader's path.

pub use crate::cuda::nvrtc::Emitted;
use crate::cuda::nvrtc::{Nvrtc, load};
use runtime::{Error, Result};

const NAME: &str = "CUDA C++";

/// Returns NVRTC's version as (major, minor).
///
/// # Errors
/// NVRTC is missing: the error names the folders that were searched, and the remedy.
pub fn version() -> Result<(i32, i32)> {
    found().map(Nvrtc::version)
}

/// Compiles `text`, which may include `headers` (name, text), and instantiates `expressions` such as `f<float, 4>`.
///
/// # Errors
/// A compilation error, with NVRTC's log; no NVRTC.
///
/// ```
/// use kernels::nvrtc;
///
/// let text = "template <int N> __global__ void fill(int* out) { out[threadIdx.x] = N; }";
/// match nvrtc::compile(text, &[], &["fill<3>"], &["--gpu-architecture=sm_80".into()]) {
///     Ok(emitted) => assert!(emitted.ptx.contains(".entry")),
///     Err(error) => println!("{error}"),
/// }
/// ```
pub fn compile(
    text: &str,
    headers: &[(&str, &str)],
    expressions: &[&str],
    options: &[String],
) -> Result<Emitted> {
    found()?.emit(text, headers, expressions, options).map_err(|log| Error::invalid(NAME, log))
}

fn found() -> Result<&'static Nvrtc> {
    load().map_err(|reason| Error::Unavailable { what: "NVRTC".into(), reason: reason.to_owned() })
}
