//! Parameters, FLOPs, bytes and training time of language models, on paper.
mod error;
mod exact;
pub mod dtype;
pub mod float_format;
pub use dtype::Dtype;
pub use error::Error;
