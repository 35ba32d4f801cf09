//! What the training assignment measures, and what plans of activations save.

pub mod activation_plan;
pub mod corpus;
pub mod loading;
pub mod profiling;
pub mod setup;
pub mod step_peak;
pub mod strategy;
