//! Datasets, samplers, packing, and loaders that resume.

pub mod batch;
pub mod embedded;
pub mod error;
pub mod length_statistics;
pub mod samples;
pub mod text;
pub mod token_store;
pub mod tokenizer;

pub use batch::{Batch, Counts, IGNORED, Packing};
pub use error::{Error, Result};
pub use samples::Samples;
pub use token_store::TokenStore;
pub use tokenizer::Tokenizer;
