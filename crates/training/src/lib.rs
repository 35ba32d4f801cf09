//! Training.

pub mod accumulation;
pub mod batches;
pub mod checkpoint;
pub mod clip;
pub mod error;
pub mod experiment;
pub mod loader_batches;
pub mod loss;
pub mod optimizer;
pub mod planted;
pub mod profile;
pub mod scaler;
pub mod schedule;

pub use batches::Batches;
pub use error::{Error, Result};
pub use schedule::Schedule;
