//! What libtorch has and `tch` lacks.

pub mod device;
pub mod error;
mod sys;

pub use error::{Error, Result};
