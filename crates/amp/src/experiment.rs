//! What the mixed-precision assignment measures.

pub mod gradients;
pub mod setup;
pub mod training;
