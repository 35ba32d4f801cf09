//! The subcommands, a module each.

pub(crate) mod methods;
pub(crate) mod timeline;
