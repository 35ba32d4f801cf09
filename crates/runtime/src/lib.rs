//! What libtorch has and `tch` lacks.

pub mod autograd;
pub mod device;
pub mod error;
pub mod fused;
pub mod matmul;
pub mod measure;
pub mod memory;
pub mod ops;
pub mod profile;
pub mod random;
mod sys;

pub use error::{Error, Result};
