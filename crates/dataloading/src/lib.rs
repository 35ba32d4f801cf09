//! Datasets, samplers, packing, and loaders that resume.

pub mod batch;
pub mod error;
pub mod samples;

pub use batch::{Batch, Counts, IGNORED, Packing};
pub use error::{Error, Result};
pub use samples::Samples;
