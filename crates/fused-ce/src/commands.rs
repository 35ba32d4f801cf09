//! The subcommands, a module each.

pub(crate) mod bench;
