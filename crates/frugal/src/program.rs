//! The subcommands, and what they share.

pub(crate) mod adapter;
pub(crate) mod encoding;
pub(crate) mod eval;
pub(crate) mod export;
pub(crate) mod figures;
pub(crate) mod fine_tune;
pub(crate) mod finetune;
pub(crate) mod generate;
pub(crate) mod info;
pub(crate) mod merge;
pub(crate) mod model;
pub(crate) mod output;
pub(crate) mod problems;
