//! Tasks with answers that can be graded.

pub mod gsm8k;
pub mod program_grader;
pub mod questions;
