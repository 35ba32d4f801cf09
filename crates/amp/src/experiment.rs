//! What the mixed-precision assignment measures.

pub mod gradients;
pub mod numerics;
pub mod overhead;
pub mod setup;
pub mod training;
