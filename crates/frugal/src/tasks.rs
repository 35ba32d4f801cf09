//! What models are fine-tuned for, and how their answers are graded.

pub mod gsm8k;
pub mod questions;
