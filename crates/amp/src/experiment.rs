//! What the mixed-precision assignment measures.

pub mod fp16_adam;
pub mod gradient_time;
pub mod gradients;
pub mod numerics;
pub mod overhead;
pub mod setup;
pub mod training;
