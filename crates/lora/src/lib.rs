//! Low-rank adaptation of a frozen model (Hu et al., arXiv:2106.09685), in PEFT's files, trained and graded on GSM8K.

pub mod gsm8k;
pub mod init;
pub mod peft;

mod adapted;
mod adapter;
mod adapters;
mod config;
mod dora;
mod dropout;
mod error;
mod function;
mod linear;
mod options;
mod switch;
mod targets;

pub use adapted::{Adapted, field_prefix};
pub use adapters::{Adapters, Disabled, Unloaded};
pub use config::{BiasTraining, Layers, LoraConfig, Names};
pub use error::{Error, Result};
pub use init::Init;
pub use linear::{DEFAULT, LoraLinear};
pub use options::Options;
pub use switch::Evaluation;
