//! Decoder building blocks and models.
pub mod attention;
pub mod error;
pub mod module;

pub use attention::Documents;
pub use error::{Error, Result};
