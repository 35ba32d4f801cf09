//! The subcommands, a module each.

pub(crate) mod decode;
pub(crate) mod embedded;
pub(crate) mod eval;
pub(crate) mod export;
pub(crate) mod generate;
pub(crate) mod info;
pub(crate) mod interchange;
pub(crate) mod merge;
pub(crate) mod shape;
pub(crate) mod step;
pub(crate) mod train;
