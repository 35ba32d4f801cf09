//! What the training assignment measures.

pub mod corpus;
pub mod loading;
pub mod profiling;
pub mod setup;
pub mod step_peak;
pub mod strategy;
