//! What the subcommands are made of: parts that an experiment calls too.

pub(crate) mod adapter;
pub(crate) mod encoding;
pub(crate) mod figures;
pub(crate) mod fine_tune;
pub(crate) mod loss_log;
pub(crate) mod masked_batches;
pub(crate) mod model;
pub(crate) mod problems;
pub(crate) mod solver;
pub(crate) mod text_stream;
