//! The CUDA kernels without a GPU: NVRTC's PTX, run instruction by instruction by the crate `ptx`, which checks every access.
//!
//! Without NVRTC, each test prints that it is skipped; `cargo xtask setup --cuda-tools` installs it.

mod adam;
mod assembly;
mod cross_entropy;
mod cross_entropy_16_bits;
mod dropout;
mod gradients;
mod launch;
mod loss_scale;
mod mutations;
mod nf4;
mod norm;
mod norm_backward;
mod program;
mod rope;
mod scale;
mod stochastic_rounding;
mod swiglu;
mod tolerance;
