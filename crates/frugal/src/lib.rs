//! Frugal: trains and fine-tunes language models on the memory at hand.
//!
//! This crate composes the techniques of the workspace. [`tasks`] holds what models are trained for and graded on,
//! [`display`], [`download_bar`], [`loss_log`] and [`text_stream`] what a program shows of a training and of a generation.

pub mod display;
pub mod download_bar;
pub mod error;
pub mod loss_log;
pub mod tasks;
pub mod text_stream;

pub use error::{Error, Result};
