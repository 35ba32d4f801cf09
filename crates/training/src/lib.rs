//! Training.

pub mod profile;
