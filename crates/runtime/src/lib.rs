//! What libtorch has and `tch` lacks.

pub mod error;
pub mod ops;
pub mod profile;
pub mod random;
mod sys;

pub use error::{Error, Result};
