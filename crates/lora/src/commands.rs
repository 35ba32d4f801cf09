//! The subcommands, a module each.

pub(crate) mod decode;
pub(crate) mod interchange;
pub(crate) mod shape;
pub(crate) mod step;
