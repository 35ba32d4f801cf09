//! The subcommands, a module each.

pub(crate) mod train;
