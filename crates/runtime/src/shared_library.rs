//! Libraries that are loaded at run time, because a build must not need them: CUDA's.

pub use crate::sys::device::{libtorch_folder, open_library as open};
