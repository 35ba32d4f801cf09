//! What the report measures besides single losses: numerics, trainings, the memory of a step.

pub mod numerics;
pub mod step_memory;
pub mod training;
